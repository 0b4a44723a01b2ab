"""Pages whose code runs as a notebook, and which the site shows with what it printed and drew.

::

    python docs/theme/notebooks.py [NAME ...]    # runs all, or these (tutorials/1-tabular, search); writes to build/

The pages in docs/ and the programs in examples/ are the only source; no output is stored in the repository. Programs are
made into pages first. Each fence of Python is a cell. As a hook of MkDocs, this file adds to each page the outputs of its
notebook, if that was made of the same cells, and to tutorials and examples the notebook for download. A page whose
notebook is missing or older is shown without outputs.
"""

import ast
import base64
import hashlib
import html
import itertools
import json
import logging
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
EXECUTED = ROOT / "build"

CODE = re.compile(r"^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```$\n?", re.MULTILINE | re.DOTALL)
FOLDED = re.compile(r'^\?\?\? \w+ "(?P<title>.*)"$', re.MULTILINE)
"""The head of a block that the site shows only on a click; in a notebook, its title."""

RELATIVE_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?!https?:)[^)]+\)")
SECONDS = 600
SETTINGS = {
    "PYSPARK_SUBMIT_ARGS": "--conf spark.ui.enabled=false --conf spark.ui.showConsoleProgress=false "
    "--conf spark.python.daemon.module=sparkkeras.spark.daemon pyspark-shell",
    "SPARK_LOCAL_IP": "127.0.0.1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
"""The environment of a notebook: less to print, and workers that load Keras once."""

CONNECT = {"connect", "examples/connect"}
"""The pages that use Spark Connect; ``SPARK_TESTING`` starts its server on any free port."""

LOG_OF_RANK = re.compile(r"^\[\d+\] (?:\[Gloo\]|WARNING: All log messages|[IW]\d{4} ).*\n", re.MULTILINE)
"""What TensorFlow and Gloo log in the ranks of a SparkRunner, whose standard error is shown with their output."""

START = "%reset -f\n__spec__ = None\n%cd -q {folder}"
"""What runs before the first cell of a page, and is not shown."""

STOP = "from pyspark.sql import SparkSession\nif session := SparkSession.getActiveSession():\n    session.stop()"
"""What runs after the last page, and is not shown, so that Spark removes its files."""

NAMELESS = re.compile(r"<[^>]* at 0x[0-9a-f]+>")
"""The last expression of a cell that says nothing, such as the `History` of a fit."""

SHARED = re.compile(r"^ *from (?P<module>surroundings|digits) import .*\n\n?", re.MULTILINE)
"""Where an example imports what examples share. Its notebook has the source of that module instead."""

NEEDED = {"JAX": "jax", "PyTorch": "torch", "TensorFlow": "tensorflow"}
"""The packages that docstrings of examples name after "Needs", with the names of their modules."""

Notebook = dict[str, Any]

_log = logging.getLogger("mkdocs.hooks.notebooks")


def names() -> list[str]:
    """Tutorials in the order of their numbers, then examples, by their place in the site without a suffix."""
    tutorials = sorted(path.stem for path in (DOCS / "tutorials").glob("*.md") if path.stem != "index")
    examples = sorted(path.stem for path in EXAMPLES.glob("*.py") if "def main(" in path.read_text())
    return [*(f"tutorials/{name}" for name in tutorials), *(f"examples/{name}" for name in examples)]


def guides() -> list[str]:
    """The other pages with code, which share a kernel."""
    pages = [path.relative_to(DOCS).with_suffix("").as_posix() for path in sorted(DOCS.rglob("*.md"))]
    return [name for name in pages if not name.startswith("tutorials/") and CODE.search(page_text(name))]


def page_text(name: str) -> str:
    """The Markdown of a page, without outputs."""
    if name.startswith("examples/"):
        return example_page(name.removeprefix("examples/"))
    return ((ROOT if name == "README" else DOCS) / f"{name}.md").read_text()


# --- From a program to a page ---------------------------------------------------------------------------------------


def example_page(stem: str) -> str:
    """The page of an example: its docstring, a cell for the imports and for each definition, a call, and the picture."""
    source = (EXAMPLES / f"{stem}.py").read_text()
    title, prose, usage = _described(_docstring(source))
    modules = dict.fromkeys(found["module"] for found in SHARED.finditer(source))
    picture = re.search(r'"([\w-]+\.png)"', source)
    parts = [
        f"# {title}",
        prose,
        f"As a program, in a clone of the repository:\n\n```text\n{usage}\n```\n\nThe output is [at the end](#output).",
        "## Code",
        *map(_shared_block, modules),
        *map(_fence, _pieces(SHARED.sub("", source))),
        "## Output",
        "`main` takes the options of the command line as a list of strings; those not given have their defaults.",
        _fence("main([])"),
    ]
    if picture:
        parts.append(_fence(f'from IPython.display import Image\n\nImage("artifacts/{picture[1]}")'))
    return "\n\n".join(filter(None, parts)) + "\n"


def _described(docstring: str) -> tuple[str, str, str]:
    """The title, the text and the usage that the docstring of an example gives."""
    head, usage, *paragraphs = docstring.replace("``", "`").replace("::\n\n", "").split("\n\n")
    title, _, rest = head.removesuffix(".").partition(": ")
    if rest:
        paragraphs.insert(0, f"{rest[0].upper()}{rest[1:]}.")
    return title, "\n\n".join(paragraphs), textwrap.dedent(usage)


def _docstring(source: str) -> str:
    return ast.get_docstring(ast.parse(source)) or ""


def _pieces(source: str) -> list[str]:
    """The code of a program in pieces, each but the first one with a definition; without its docstring and its last call."""
    first, *others, last = ast.parse(source).body
    lines = source.splitlines()
    starts = [first.end_lineno or 0]
    for node in others:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            starts.append(min(part.lineno for part in (node, *node.decorator_list)) - 1)
    return ["\n".join(lines[start:stop]) for start, stop in itertools.pairwise([*starts, last.lineno - 1])]


def _shared_block(module: str) -> str:
    source = (EXAMPLES / f"{module}.py").read_text()
    code = source.removeprefix(f'"""{_docstring(source)}"""\n')
    return f'??? quote "{_docstring(source).removesuffix(".")}"\n\n{textwrap.indent(_fence(code), "    ")}'


def _fence(code: str) -> str:
    return f"```python\n{code.strip()}\n```"


# --- From a page to an executed notebook ----------------------------------------------------------------------------


def notebook(text: str) -> Notebook:
    """The notebook of a page, without outputs. Links to other pages of the site become their text."""
    cells, end = [], 0
    for fence in CODE.finditer(text):
        code = textwrap.dedent(fence["code"])
        cells += [*_prose(text[end : fence.start()]), _cell("code", code, execution_count=None, outputs=[])]
        end = fence.end()
    cells += _prose(text[end:])
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def execute(names: Sequence[str], folder: Path, **settings: str) -> dict[str, Notebook]:
    """Run pages one after another in one kernel, which share its Spark; returns their notebooks with outputs, by name.

    Each has variables of its own, and a folder of its name below ``folder``, in which it may write files. If a package that
    a page needs is missing, it does not run, and the notebook's metadata says so. After an error, the next page runs: see
    `failure`. The settings are environment variables.
    """
    made = {name: notebook(page_text(name)) for name in names}
    to_run = {}
    for name in names:
        missing = [each for each, module in NEEDED.items() if f"Needs {each}" in page_text(name) and not find_spec(module)]
        if missing:
            made[name]["metadata"]["sparkkeras"] = {"missing": missing}
        else:
            to_run[name] = made[name]
    with_connect = {name: to_run[name] for name in to_run if name in CONNECT}
    without = {name: to_run[name] for name in to_run if name not in CONNECT}
    for pages, more in (without, {}), (with_connect, {"SPARK_TESTING": "1"}):
        if pages:
            made |= _run(pages, folder, SETTINGS | settings | more)
    return made


def _run(pages: dict[str, Notebook], folder: Path, settings: dict[str, str]) -> dict[str, Notebook]:
    import nbformat
    from nbclient import NotebookClient

    together = nbformat.v4.new_notebook()
    for number, (name, made) in enumerate(pages.items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        together.cells.append(nbformat.v4.new_code_cell(START.format(folder=folder / name)))
        together.cells += [nbformat.from_dict({**cell, "id": f"page-{number}-{cell['id']}"}) for cell in made["cells"]]
    together.cells.append(nbformat.v4.new_code_cell(STOP))
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    of_spark = ("SPARK_", "PYSPARK_")  # which a SparkContext of this process may have set
    environment = {name: value for name, value in os.environ.items() if not name.startswith(of_spark)}
    client = NotebookClient(together, timeout=SECONDS, coalesce_streams=True, kernel_name="python3", allow_errors=True)
    started = time.monotonic()
    with (folder / "kernel.log").open("w") as log:  # what Java prints, also when the kernel ends
        client.execute(env={**environment, **settings, "PYTHONPATH": os.pathsep.join(paths)}, stderr=log)
    ran = {"seconds": round(time.monotonic() - started), "cores": os.cpu_count()}
    cells = json.loads(nbformat.writes(together))["cells"]
    done = {}
    for name, made in pages.items():
        del cells[0]
        of_page, cells = cells[: len(made["cells"])], cells[len(made["cells"]) :]
        for cell in of_page:
            cell["metadata"] = {}
            if cell["cell_type"] == "code":
                cell["outputs"] = list(_without_logs(cell["outputs"]))
        done[name] = {**made, "cells": of_page, "metadata": {**made["metadata"], "sparkkeras": ran}}
    return done


def failure(executed: Notebook) -> str:
    """The traceback of the first cell that failed; empty if none did."""
    outputs = [output for cell in executed["cells"] for output in cell.get("outputs", [])]
    errors = ("\n".join(output["traceback"]) for output in outputs if output["output_type"] == "error")
    return re.sub(r"\x1b\[[\d;]*m", "", next(errors, ""))


def _without_logs(outputs: list[Notebook]) -> Iterator[Notebook]:
    """The outputs of a cell without standard error, where Java and TensorFlow log, logs of ranks, and nameless objects."""
    for output in outputs:
        if output["output_type"] == "stream":
            output["text"] = LOG_OF_RANK.sub("", _joined(output["text"]))
        if output.get("name") != "stderr" and not NAMELESS.fullmatch(_joined(output.get("data", {}).get("text/plain", ""))):
            yield output


def printed(executed: Notebook) -> str:
    """All that the cells of a notebook have printed."""
    outputs = [output for cell in executed["cells"] for output in cell.get("outputs", [])]
    return "".join(_joined(output["text"]) for output in outputs if output["output_type"] == "stream")


def _prose(text: str) -> list[Notebook]:
    text = RELATIVE_LINK.sub(lambda link: link["text"], FOLDED.sub(r"\g<title>:", text.strip()))
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
        content = json.dumps(_executed(name) or notebook(page_text(name)), indent=1) + "\n"
        files.append(File.generated(config, f"{name}.ipynb", content=content))
        if not (DOCS / f"{name}.md").exists():
            files.append(File.generated(config, f"{name}.md", content=page_text(name)))
    for name in [*names(), *guides()]:
        for file, data in _made(name, _executed(name)):
            files.append(File.generated(config, f"{name}/{file}", content=data))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Put the outputs of each cell below it, and below the title of a tutorial or an example a link to its notebook."""
    name = page.file.src_uri.removesuffix(".md")
    if name not in names() and name not in guides():
        return markdown
    if name.startswith("examples/"):
        page.meta["hide"] = ["toc"]  # which has two headings, and takes the room of long lines of code
    executed = _executed(name)
    if executed is None:
        _log.info("%s is shown without outputs: run bash scripts/docs without --no-snippets", name)
    title, rest = markdown.split("\n", 1)
    cells = [cell for cell in (executed or {"cells": []})["cells"] if cell["cell_type"] == "code"]
    for cell, fence in reversed(list(zip(cells, CODE.finditer(rest), strict=False))):
        rest = rest[: fence.end()] + _below(Path(name).name, cell) + rest[fence.end() :]
    return f"{title}\n\n{_note(Path(name).name, executed)}\n{rest}" if name in names() else f"{title}\n{rest}"


def _executed(name: str) -> Notebook | None:
    """The executed notebook of a page, unless its code has changed since."""
    path = EXECUTED / f"{name}.ipynb"
    if not path.exists():
        return None
    executed: Notebook = json.loads(path.read_text())
    return executed if _code(executed) == _code(notebook(page_text(name))) else None


def _code(made: Notebook) -> list[str]:
    return [_joined(cell["source"]) for cell in made["cells"] if cell["cell_type"] == "code"]


def _note(stem: str, executed: Notebook | None) -> str:
    ran = executed["metadata"]["sparkkeras"] if executed else {}
    if "seconds" in ran:
        cores = "one core" if ran["cores"] == 1 else f"{ran['cores']} cores"
        note = f"The build of this site ran the page on {cores}, in {ran['seconds']} seconds with the start of Spark."
    else:
        without = " and ".join(ran.get("missing", ["running the code"]))
        note = f"This copy of the site was built without {without}, so outputs are missing."
    return f"[Download this page as a notebook]({stem}.ipynb){{ .md-button }}\n\n*{note}*\n"


def _made(name: str, executed: Notebook | None) -> Iterator[tuple[str, bytes]]:
    """The files that the outputs of a page need, in a folder beside it, and their contents."""
    for cell in (executed or {"cells": []})["cells"]:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                yield _picture(data["image/png"]), base64.b64decode(data["image/png"])
            for file in re.findall(r'src="([^":/]+)"', _joined(data.get("text/html", ""))):
                yield file, (EXECUTED / name / file).read_bytes()


def _picture(encoded: str) -> str:
    return f"{hashlib.sha256(encoded.encode()).hexdigest()[:12]}.png"


def _below(stem: str, cell: Notebook) -> str:
    """The outputs of a cell as HTML."""
    parts = []
    for output in cell["outputs"]:
        data = output.get("data", {"text/plain": output.get("text", "")})
        if "image/png" in data:
            parts.append(f'<p><img alt="What the code above draws" src="{stem}/{_picture(data["image/png"])}"></p>')
        elif "text/html" in data:
            text = re.sub(r"<style scoped>.*?</style>", "", _joined(data["text/html"]), flags=re.DOTALL)
            text = re.sub(r"<table [^>]*>", "<table>", text)  # the theme styles tables without a class
            text = re.sub(r"\n\s*\n", "\n", text)
            parts.append(re.sub(r'src="([^":/]+)"', rf'src="{stem}/\1"', text))
        else:
            text = html.escape(_joined(data["text/plain"]).strip("\n"))
            text = re.sub(r"\n(?=\n)", "\n&#8203;", text)  # Markdown might end the element at a blank line
            parts.append(f"<pre><code>{text}</code></pre>")
    return "\n".join(["", '<div class="output">', *parts, "</div>", ""]) if parts else ""


def main(wanted: Sequence[str]) -> str:
    """Run pages; returns the tracebacks of those that failed."""
    kernels: list[tuple[list[str], dict[str, str]]] = [([name], {}) for name in names()]  # these set it themselves
    kernels.append((guides(), {"PYSPARK_PYTHON": sys.executable}))
    failures = []
    for pages, settings in kernels:
        chosen = [name for name in pages if name in wanted or not wanted]
        for name in chosen:
            shutil.rmtree(EXECUTED / name, ignore_errors=True)
        EXECUTED.mkdir(exist_ok=True)
        for name, executed in execute(chosen, EXECUTED, **settings).items():
            path = EXECUTED / f"{name}.ipynb"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(executed, indent=1) + "\n")
            sys.stderr.write(f"{name}: {json.dumps(executed['metadata']['sparkkeras'])}\n")
            if error := failure(executed):
                path.unlink()
                failures.append(f"{name} failed:\n{error}\n")
    return "\n".join(failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) or None)
