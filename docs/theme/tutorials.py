"""The tutorials: Markdown pages whose code runs as a notebook, and which the site shows with what it printed and drew.

::

    python docs/theme/tutorials.py [NAME ...]    # runs all, or these, and leaves notebooks in build/tutorials/

The pages in docs/tutorials/ are the only source; no output is stored in the repository. Each fence of Python is a cell. As a
hook of MkDocs, this file adds to each page the outputs of its notebook, if that was made of the same cells, and the notebook
for download. A page whose notebook is missing or older is shown without outputs, and says so.
"""

import base64
import hashlib
import html
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "tutorials"
EXECUTED = ROOT / "build" / "tutorials"

CODE = re.compile(r"^```python\n(?P<code>.*?)^```$\n?", re.MULTILINE | re.DOTALL)
RELATIVE_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?!https?:)[^)]+\)")
SECONDS = 600
SETTINGS = {
    "PYSPARK_SUBMIT_ARGS": "--conf spark.ui.enabled=false --conf spark.ui.showConsoleProgress=false "
    "--conf spark.python.daemon.module=sparkkeras.spark.daemon pyspark-shell",
    "SPARK_LOCAL_IP": "127.0.0.1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
"""The environment of a notebook: less to print, and workers that load Keras once."""

STOP = "if 'spark' in globals():\n    spark.stop()"
"""What runs after the last cell, and is not shown, so that Spark removes its files."""

Notebook = dict[str, Any]

_log = logging.getLogger("mkdocs.hooks.tutorials")


# --- From a page to an executed notebook ----------------------------------------------------------------------------


def names() -> list[str]:
    """The tutorials, in the order of their numbers."""
    return sorted(path.stem for path in PAGES.glob("*.md") if path.stem != "index")


def notebook(text: str) -> Notebook:
    """The notebook of a page, without outputs. Links to other pages of the site become their text."""
    cells, end = [], 0
    for fence in CODE.finditer(text):
        cells += [*_prose(text[end : fence.start()]), _cell("code", fence["code"], execution_count=None, outputs=[])]
        end = fence.end()
    cells += _prose(text[end:])
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def execute(name: str, folder: Path) -> Notebook:
    """Run a tutorial in a folder, in which it may write files; returns its notebook with outputs.

    An error in a cell raises ``nbclient.exceptions.CellExecutionError``, with its traceback.
    """
    import nbformat
    from nbclient import NotebookClient

    given = nbformat.from_dict(notebook((PAGES / f"{name}.md").read_text()))
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("PYSPARK_PYTHON", None)  # tutorials set it themselves
    environment.pop("PYSPARK_DRIVER_PYTHON", None)
    client = NotebookClient(
        given,
        timeout=SECONDS,
        coalesce_streams=True,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    started = time.monotonic()
    given.cells.append(nbformat.v4.new_code_cell(STOP))
    with (folder / "kernel.log").open("w") as log:  # what Java prints, also when the kernel ends
        client.execute(env=environment, stderr=log)
    given.cells.pop()
    done: Notebook = json.loads(nbformat.writes(given))
    for cell in done["cells"]:
        cell["metadata"] = {}
        if cell["cell_type"] == "code":  # standard error has the logs of Java and of TensorFlow
            cell["outputs"] = [each for each in cell["outputs"] if each.get("name") != "stderr"]
    done["metadata"]["sparkkeras"] = {"seconds": round(time.monotonic() - started), "cores": os.cpu_count()}
    return done


def printed(executed: Notebook) -> str:
    """All that the cells of a notebook have printed."""
    outputs = [output for cell in executed["cells"] for output in cell.get("outputs", [])]
    return "".join(_joined(output["text"]) for output in outputs if output["output_type"] == "stream")


def _prose(text: str) -> list[Notebook]:
    text = RELATIVE_LINK.sub(lambda link: link["text"], text.strip())
    return [_cell("markdown", text)] if text else []


def _cell(kind: str, source: str, **more: Any) -> Notebook:
    return {"cell_type": kind, "metadata": {}, "source": source.rstrip("\n"), **more}


def _joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)


# --- From an executed notebook to a page of the site ----------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    """Add the notebooks, and the pictures and pages that they have made."""
    from mkdocs.structure.files import File

    for name in names():
        page, executed = (PAGES / f"{name}.md").read_text(), _executed(name)
        content = json.dumps(executed or notebook(page), indent=1) + "\n"
        files.append(File.generated(config, f"tutorials/{name}.ipynb", content=content))
        for file, data in _made(name, executed):
            files.append(File.generated(config, f"tutorials/{file}", content=data))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Put the outputs of each cell below it, and a link to the notebook below the title."""
    path = Path(page.file.src_uri)
    if path.parent.name != "tutorials" or path.stem == "index":
        return markdown
    executed = _executed(path.stem)
    if executed is None:
        _log.info("%s is shown without outputs: run bash scripts/docs without --no-snippets", path)
    title, rest = markdown.split("\n", 1)
    cells = [cell for cell in (executed or {"cells": []})["cells"] if cell["cell_type"] == "code"]
    for cell, fence in reversed(list(zip(cells, CODE.finditer(rest), strict=False))):
        rest = rest[: fence.end()] + _below(path.stem, cell) + rest[fence.end() :]
    return f"{title}\n\n{_note(path.stem, executed)}\n{rest}"


def _executed(name: str) -> Notebook | None:
    """The executed notebook of a tutorial, unless the code of its page has changed since."""
    path = EXECUTED / f"{name}.ipynb"
    if not path.exists():
        return None
    executed: Notebook = json.loads(path.read_text())
    return executed if _code(executed) == _code(notebook((PAGES / f"{name}.md").read_text())) else None


def _code(made: Notebook) -> list[str]:
    return [_joined(cell["source"]) for cell in made["cells"] if cell["cell_type"] == "code"]


def _note(name: str, executed: Notebook | None) -> str:
    download = f"[Download this page as a notebook]({name}.ipynb){{ .md-button }}\n\n"
    if executed is None:
        return download + "*This copy of the site was built without running the tutorials, so outputs are missing.*\n"
    ran = executed["metadata"]["sparkkeras"]
    cores = "one core" if ran["cores"] == 1 else f"{ran['cores']} cores"
    return (
        f"{download}*The build of this site ran the page on {cores}, in {ran['seconds']} seconds with the start of Spark.*\n"
    )


def _made(name: str, executed: Notebook | None) -> Iterator[tuple[str, bytes]]:
    """The files that the outputs of a notebook need, and their contents."""
    for cell in (executed or {"cells": []})["cells"]:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                yield _picture(name, data["image/png"]), base64.b64decode(data["image/png"])
            for file in re.findall(r'src="([^":/]+)"', _joined(data.get("text/html", ""))):
                yield f"{name}/{file}", (EXECUTED / name / file).read_bytes()


def _picture(name: str, encoded: str) -> str:
    return f"{name}/{hashlib.sha256(encoded.encode()).hexdigest()[:12]}.png"


def _below(name: str, cell: Notebook) -> str:
    """The outputs of a cell as HTML."""
    parts = []
    for output in cell["outputs"]:
        data = output.get("data", {"text/plain": output.get("text", "")})
        if "image/png" in data:
            parts.append(f'<p><img alt="What the code above draws" src="{_picture(name, data["image/png"])}"></p>')
        elif "text/html" in data:
            text = re.sub(r"<style scoped>.*?</style>", "", _joined(data["text/html"]), flags=re.DOTALL)
            text = re.sub(r"<table [^>]*>", "<table>", text)  # the theme styles tables without a class
            text = re.sub(r"\n\s*\n", "\n", text)
            parts.append(re.sub(r'src="([^":/]+)"', rf'src="{name}/\1"', text))
        else:
            text = html.escape(_joined(data["text/plain"]).strip("\n"))
            text = re.sub(r"\n(?=\n)", "\n&#8203;", text)  # Markdown might end the element at a blank line
            parts.append(f"<pre><code>{text}</code></pre>")
    return "\n".join(["", '<div class="output">', *parts, "</div>", ""]) if parts else ""


if __name__ == "__main__":
    for each in sys.argv[1:] or names():
        work = EXECUTED / each
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        result = execute(each, work)
        (EXECUTED / f"{each}.ipynb").write_text(json.dumps(result, indent=1) + "\n")
        sys.stderr.write(f"{each}: {result['metadata']['sparkkeras']['seconds']} s\n")
