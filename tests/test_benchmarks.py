"""The benchmarks of search algorithms, which are not timed, and `scripts/gpu` on the CPU."""

import importlib
import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest

from sparkkeras.hyperopt import Search
from tests.processes import clean_environment
from tests.scripts import ROOT, SECONDS

BENCHMARKS = ROOT / "benchmarks"
STORED = BENCHMARKS / "results" / "search_regret"
MINIMIZERS = {
    "branin": {"x0": math.pi, "x1": 2.275},
    "hartmann6": {f"x{i}": x for i, x in enumerate([0.20169, 0.150011, 0.476874, 0.275332, 0.311652, 0.6573])},
    "rosenbrock": {f"x{i}": 1.0 for i in range(4)},
    "ackley": {f"x{i}": 0.0 for i in range(5)},
    "levy_mixed": {"x0": 1.0, "x1": 1.0, "x2": 1, "x3": 1.0, "x4": 10.0},
}
"""Where the literature says that the functions have their minima."""


@pytest.fixture(scope="module")
def modules():
    """Modules of the benchmarks by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module


@pytest.mark.parametrize("name", MINIMIZERS)
def test_a_function_has_its_minimum_where_the_literature_says(name, modules):
    objective = modules("objectives").OBJECTIVES[name]
    assert objective.value(MINIMIZERS[name]) == pytest.approx(objective.minimum, abs=1e-5)
    search = Search(objective.space, algo="random", seed=0)
    assert min(objective.value(search.ask().params) for _ in range(50)) > objective.minimum


@pytest.mark.programs
def test_the_benchmark_runs(modules, tmp_path):
    titles = modules("regret").TITLES
    assert titles.keys() == modules("objectives").OBJECTIVES.keys()
    command = [sys.executable, "benchmarks/run.py", "--quick", "--only", "search_regret", "--output", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    samples = json.loads((tmp_path / "quick.json").read_text())["samples"]["search_regret"]
    for key in titles:
        for name in modules("search_contestants").CONTESTANTS:
            curves = np.array(samples[f"{key}: {name}"])
            assert curves.shape == (2, 6)
            assert (np.diff(curves) <= 0).all()
            assert (curves >= 0).all()
    assert (tmp_path / "quick-search_regret.png").exists()
    assert "QUICK RUN" in (tmp_path / "quick-search_regret.md").read_text()


def test_pages_show_the_stored_regrets(modules):
    stored = json.loads((STORED / "latest.json").read_text())["samples"]["search_regret"]
    table = modules("regret").summary(stored)
    assert (STORED / "search_regret.md").read_text() == table + "\n"
    ranks = re.findall(r"^\| .* \| \d\.\d\d ± .*$", table, re.MULTILINE)
    page = (BENCHMARKS / "README.md").read_text()
    assert len(ranks) == 6
    assert all(rank in page for rank in ranks)


@pytest.mark.programs
def test_the_script_for_gpus_measures_without_java_and_spark_a_model_that_trains_as_with_keras(tmp_path):
    done = subprocess.run(
        ["bash", "scripts/gpu", "--only", "jax", "mlp", "float32", "--output", str(tmp_path)],
        cwd=ROOT,
        env={**clean_environment(), "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "JAVA_HOME": "/none"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "No backend sees a GPU" in done.stdout
    (case,) = json.loads((tmp_path / "cpu.json").read_text())["cases"]
    assert case["weights_differ"] == {"from_keras": 0, "keras_from_itself": 0}
    for kind in ("epoch", "predict"):
        assert all(seconds > 0 for turns in case[kind].values() for turn in turns for seconds in turn)
    assert re.search(r"^jax mlp float32( +\d+\.\d+){3} ", done.stdout, re.MULTILINE)
