"""The design held by tests: the order of the layers, which packages use which libraries, and the public names."""

import ast
import functools
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sparkkeras

PACKAGE = Path(sparkkeras.__file__).parent

LAYERS = [
    "errors",
    "events",
    "arguments",
    "progress",
    "weights",
    "rpc",
    "parameter",
    "data",
    "modeling",
    "worker",
    "spark",
    "checkpoints",
    "sources",
    "runner",
    "formats",
    "scoring",
    "preprocessing",
    "training",
    "spark_model",
    "mllib",
    "loading",
    "ensembles",
    "keyed",
    "ml",
    "sql",
    "hyperopt",
    "monitor",
    "tracking",
    "diagnostics",
    "__main__",
    "__init__",
]
"""Packages and top-level modules from the lowest to the highest: each may import what stands before.

See docs/contributing/design.md.
"""

LIBRARIES = {
    "cryptography": {"rpc"},
    "flask": {"rpc"},
    "google_crc32c": {"formats"},
    "h5py": {"modeling", "training"},
    "hyperopt": {"hyperopt"},
    "matplotlib": {"hyperopt"},
    "mlflow": {"tracking"},
    "optuna": {"hyperopt"},
    "pandas": set(),
    "PIL": {"formats"},
    "pyarrow": {"data", "diagnostics", "formats", "keyed", "ml", "modeling", "scoring", "sources", "spark"},
    "pyspark": {"diagnostics", "formats", "keyed", "ml", "mllib", "modeling", "runner", "sources", "spark"},
    "keras": {
        "ensembles",
        "hyperopt",
        "keyed",
        "ml",
        "modeling",
        "monitor",
        "preprocessing",
        "runner",
        "scoring",
        "spark",
        "spark_model",
        "sql",
        "tracking",
        "training",
        "worker",
    },
    "tensorboard": {"tracking"},
    "tensorflow": {"modeling", "worker"},
    "torch": {"modeling", "worker"},
    "jax": {"modeling", "worker"},
}
"""Which packages import which of the libraries that not every process needs or has."""


DYNAMIC = {"import_module", "__import__"}

MAY_IMPORT_ANYTHING = {"__init__", "training"}
"""The package that loads its public names lazily, and saved values that name the user's modules."""


def files():
    return sorted(PACKAGE.rglob("*.py"))


def layer(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


parsed = functools.cache(ast.parse)


def imports(source, for_types=True):
    """The modules that a file imports when it is loaded or run, and with ``for_types`` also those for type checkers."""
    nodes = list(ast.walk(parsed(source)))
    if not for_types:
        typing = [node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
        nodes = set(nodes).difference(inner for node in typing for each in node.body for inner in ast.walk(each))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: a relative import, whose layer is not visible"
            for alias in node.names:
                public = node.module == "sparkkeras" and sparkkeras._HOME_OF.get(alias.name)
                yield public or f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in DYNAMIC:
            yield re.split("[{'\"]", ast.unparse(node.args[0]) + "'")[1]  # of f"sparkkeras.rpc.{name}": sparkkeras.rpc.


def check_imports(source, mine, path=""):
    """Raise an error if a file of layer ``mine`` imports from a layer above, or a library that its package does not use."""
    for name in imports(source):
        package, _, rest = name.partition(".")
        assert package or mine in MAY_IMPORT_ANYTHING, f"{path} imports a module whose layer is not visible"
        if package == "sparkkeras":
            imported = rest.partition(".")[0]
            assert imported in LAYERS, f"{path} imports {name}, whose layer is not visible"
            assert LAYERS.index(imported) <= LAYERS.index(mine), f"{path} imports {name}, which is above {mine}"
    for name in imports(source, for_types=False):
        library = name.split(".")[0]
        if library in LIBRARIES:
            assert mine in LIBRARIES[library], f"{path} imports {library}, which its package does not use"


def test_files_import_from_their_own_package_and_lower_layers():
    for path in files():
        mine = layer(path)
        assert mine in LAYERS, f"{mine} has no place among the layers: add it here and to docs/contributing/design.md"
        check_imports(path.read_text(), mine, path)


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    from sparkkeras.training import run",
        "from sparkkeras import SparkModel",
        "import sparkkeras",
        "from ..training import run",
        "from .. import training",
        "import importlib\nimportlib.import_module('sparkkeras.training.run')",
        "import importlib\nimportlib.import_module(name)",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from sparkkeras.training.run import Run",
        "import keras",
    ],
)
def test_no_kind_of_import_goes_upward(source):
    with pytest.raises(AssertionError):
        check_imports(source, "rpc")


def test_the_tree_is_small_at_the_top_and_packages_say_what_they_are_for():
    assert len(list(PACKAGE.glob("*.py"))) <= 10
    for path in PACKAGE.glob("*/__init__.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path
    unknown = {path.stem if path.suffix else path.name for path in PACKAGE.iterdir()} - {*LAYERS, "__pycache__", "py"}
    assert unknown == set(), unknown


KINDS = {"RemoteCluster", "active_remote_session", "is_remote", "uses_connect"}
"""What tells classic Spark and Spark Connect apart."""

MAY_TELL_KINDS_APART = {"spark", "diagnostics"}
"""What hides the difference, and what reports it to people."""

HIDE_KINDS = {"arrays.py", "connect_partitions.py", "connect_values.py", "spark_dataset.py"}


def test_only_what_hides_the_kind_of_spark_tells_kinds_apart():
    for path in files():
        if layer(path) in MAY_TELL_KINDS_APART or path.name in HIDE_KINDS:
            continue
        source = path.read_text()
        names = {name.rpartition(".")[2] for name in imports(source)}
        names |= {node.attr for node in ast.walk(parsed(source)) if isinstance(node, ast.Attribute)}
        assert not names & KINDS, f"{path} uses {names & KINDS}"
        assert not any(name.startswith("pyspark.sql.connect") for name in imports(source)), path


MAY_NAME_BACKENDS = {
    "backends.py",
    "collectives/__init__.py",
    "inspection.py",
    "probe.py",
    "custom_code.py",
    "hyperopt/algorithms.py",  # a sampler of Optuna needs torch, whatever the backend is
}


def test_only_one_file_names_a_backend_and_none_prints():
    for path in files():
        assert not re.search(r"\bprint\(", path.read_text()), path
        if path.name == "device.py":
            continue
        for node in ast.walk(parsed(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value not in {"tensorflow", "jax", "torch"} or any(map(path.match, MAY_NAME_BACKENDS))


def test_the_public_names():
    """Every name is documented, and imported from where it is defined."""
    for name, module in sparkkeras._HOME_OF.items():
        value = getattr(sparkkeras, name)
        assert value.__doc__, name
        assert getattr(value, "__module__", None) in (module, None), name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = sparkkeras.nothing


@pytest.mark.parametrize("module", ["sparkkeras", "sparkkeras.hyperopt"])
def test_only_public_names_are_listed(module):
    found = importlib.import_module(module)
    listed = {name for name in dir(found) if not name.startswith("__")}
    assert listed - {"events", "hyperopt", "ml", "runner"} == set(found.__all__)


def test_reading_data_does_not_load_keras():
    """A worker that only reads rows must not pay for the backend's import."""
    code = "import sys, sparkkeras.sources.rows, sparkkeras.sources.arrays; print('keras' in sys.modules)"
    assert _printed(code) == "False"


@pytest.mark.programs
def test_workers_of_a_search_do_not_need_hyperopt_and_optuna():
    """They may not be there; the package is shipped without what it depends on."""
    names = ("search_job", "distributions", "hypermodel", "reporting")
    code = f"""import sys; sys.modules.update(hyperopt=None, optuna=None)
import {", ".join(f"sparkkeras.hyperopt.{name}" for name in names)}
from sparkkeras.hyperopt import HyperModel, HyperParameters, ReportCallback, Trial, choice, report
print("imported")"""
    assert _printed(code, KERAS_BACKEND="jax") == "imported"  # the backend that loads soonest


@pytest.mark.programs
def test_synchronous_training_and_ensembles_do_not_need_cryptography():
    """Workers need it only where they connect to a server on the driver."""
    modules = "sparkkeras.training.averaging, sparkkeras.training.independent, sparkkeras.ensembles.spark_ensemble"
    code = f"import sys; sys.modules['cryptography'] = None; import {modules}; print('imported')"
    assert _printed(code, KERAS_BACKEND="jax") == "imported"


@pytest.mark.programs
def test_workers_load_nothing_that_only_the_driver_needs():
    names = ("averaging", "parameter_server_worker", "allreduce", "independent", "sorted_rows")
    modules = ", ".join(f"sparkkeras.training.{name}" for name in names)
    code = f"import sys, {modules}; print('sparkkeras.training.run' in sys.modules)"
    assert _printed(code, KERAS_BACKEND="jax") == "False"


def _printed(code, **environment):
    environment = os.environ | environment
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent, env=environment
    )
    return done.stdout.strip()
