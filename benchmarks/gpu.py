"""Measure sparkkeras without Spark against plain Keras on a GPU: ``bash scripts/gpu``.

Small models train and predict with JAX and PyTorch, in float32 and in mixed precision, in turns: with plain Keras, and with
sparkkeras's strategy of synchronous training over rows in memory (`LocalDataset`), which has one worker, in this process.
Each backend and model has a process of its own. On a machine without a GPU, they are smaller and run on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import data
import numpy as np
import report
from harness import Effort, Metric, Turn, alternate, timed
from numpy.typing import NDArray

HERE = Path(__file__).resolve().parent
BACKENDS = ("jax", "torch")
POLICIES = ("float32", "mixed_bfloat16")
GPU = Effort(warmup=0, turns=4, epochs=1, seeds=1)
CPU = Effort(warmup=1, turns=3, epochs=1, seeds=1, shrink=20)
BATCH_SIZE = 128
JAX_STEPS = 5
LOG_LINES = 20
COMPARED_EPOCHS = 2
TOLERANCE = {"float32": 1e-2, "mixed_bfloat16": 0.1}
"""How much weights may differ from those of plain Keras, as a share of how far training has moved them."""
EPOCH = Metric("epoch begin -> end", "sparkkeras", "keras", target=1.05)
PREDICT = Metric("predict", "sparkkeras", "keras")


@dataclass(frozen=True)
class Task:
    """A model and rows for it.

    Attributes:
        model: Builds the compiled model.
        steps: The number of steps in an epoch with PyTorch on a GPU; `JAX_STEPS` times as many with JAX, which are shorter.
        rows: Makes rows: features that depend on the labels, which it gets.
    """

    model: Callable[[], Any]
    steps: int
    rows: Callable[[NDArray[np.int64], np.random.Generator], NDArray[Any]]


def _pixels(labels: NDArray[np.int64], random: np.random.Generator) -> NDArray[np.float32]:
    means = random.normal(size=(10, data.SIDE * data.SIDE)).astype(np.float32)
    return means[labels] + random.standard_normal((len(labels), data.SIDE * data.SIDE), np.float32)


def _words(labels: NDArray[np.int64], random: np.random.Generator) -> NDArray[np.int32]:
    return (random.integers(data.WORDS // 2, size=(len(labels), data.LENGTH)) + 50 * labels[:, np.newaxis]).astype(np.int32)


TASKS = {
    "mlp": Task(data.mlp, 100, _pixels),
    "cnn": Task(data.cnn, 60, lambda y, random: _pixels(y, random).reshape(-1, data.SIDE, data.SIDE, 1)),
    "transformer": Task(data.transformer, 60, _words),
}


def main() -> int:
    """Measure all that is chosen, print a table and write a file; return 1 if something failed or is wrong, else 0."""
    options = _options()
    if options.child:
        _measure(options)
        return 0
    about = report.machine({"sparkkeras": sys.executable})
    print(f"{about['processor']}, {about['cpus_used']} CPUs; load {about['load_at_start']}")
    until = time.time() + 60 * options.minutes
    pairs = [(backend, model) for backend in options.backends for model in options.models]
    cases: list[dict[str, Any]] = []
    for number, (backend, model) in enumerate(pairs):
        print(f"{backend} {model} ...", end=" ", flush=True)
        started = time.time()
        until_then = started + (until - started) / (len(pairs) - number)
        cases += _in_own_process(backend, model, options, until_then)
        print(f"{time.time() - started:.0f} s")
    print(f"\n{table(cases)}\n")
    on_gpu = any(case.get("gpu") for case in cases)
    if not on_gpu:
        print("No backend sees a GPU: this was the small version, on the CPU. It shows that the script works, and no more.")
    path = report.save(options.output, "latest" if on_gpu else "cpu", {"about": about, "cases": cases})
    print(f"wrote {path}")
    problems = [f"{_title(case)}: {case['problem']}" for case in cases if case.get("problem")]
    print("\n".join(problems))
    return int(bool(problems))


def table(cases: list[dict[str, Any]]) -> str:
    """The cases that were measured, one in a row."""
    head = ["", "epoch, s", "Keras", "ratio", "range over turns", "at most 1.05", "predict, s", "Keras", "ratio"]
    rows = [[*head, "GPU waits", "Keras", "GPU MB", "Keras", "weights differ", "from run to run"]]
    for case in cases:
        if "epoch" in case:
            epoch, predict = (report.Result(metric, case[metric.name.split()[0]]) for metric in (EPOCH, PREDICT))
            _, ours, keras, ratio, spread, _, verdict = epoch.row()
            shares = [f"{value:.0%}" if value is not None else "-" for value in _pair(case["gpu_waits"])]
            memory = [f"{value / 1e6:.0f}" if value is not None else "-" for value in _pair(case["gpu_bytes"])]
            differ = [f"{case['weights_differ'][name]:.1g}" for name in ("from_keras", "keras_from_itself")]
            rows.append([_title(case), ours[:-2], keras[:-2], ratio, spread, verdict])
            rows[-1] += [cell.removesuffix(" s") for cell in predict.row()[1:4]] + shares + memory + differ
    return report.aligned(rows)


def _pair(values: dict[str, Any]) -> tuple[Any, Any]:
    return values["sparkkeras"], values["keras"]


def _title(case: dict[str, Any]) -> str:
    return f"{case['backend']} {case['model']} {case['policy']}"


def _options() -> argparse.Namespace:
    names = {"backends": BACKENDS, "models": tuple(TASKS), "policies": POLICIES}
    known = [name for group in names.values() for name in group]
    parser = argparse.ArgumentParser(description="Measure sparkkeras without Spark against plain Keras on a GPU.")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=known, default=[], help=", ".join(known))
    parser.add_argument("--minutes", type=float, default=7.5, help="leave out what does not fit (7.5)")
    parser.add_argument("--turns", type=int, metavar="N", help=f"turns of each ({GPU.turns}; on CPUs {CPU.turns})")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "gpu", metavar="DIR")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for group, members in names.items():
        setattr(options, group, [name for name in members if name in options.only] or list(members))
    options.backends = [name for name in options.backends if find_spec(name)]
    if not options.backends:
        parser.error(f"{sys.executable} has none of these backends: {', '.join(BACKENDS)}")
    return options


def _in_own_process(backend: str, model: str, options: argparse.Namespace, until: float) -> list[dict[str, Any]]:
    """The cases of a backend and a model; one that failed or was left out has a ``problem``."""
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # as on Spark's workers
    }
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        file, log = Path(folder) / "cases.json", Path(folder) / "log"
        command = [sys.executable, __file__, f"--until={until}", f"--file={file}", "--child", backend, model]
        command += [*([f"--turns={options.turns}"] if options.turns else []), "--only", *options.policies]
        with log.open("w") as output:
            limit = max(1.0, until + 60 - time.time())
            try:
                code: object = subprocess.run(
                    command, env=environment, stdout=output, stderr=output, timeout=limit, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                code = "it took too long"
        cases = json.loads(file.read_text()) if file.exists() else []
        if len(cases) < len(options.policies):
            end = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
            problem = f"failed ({code}). The end of its log:\n{end}"
            cases.append({"backend": backend, "model": model, "policy": options.policies[len(cases)], "problem": problem})
        return cases


# --- In the process of a backend and a model ------------------------------------------------------------------------


def _measure(options: argparse.Namespace) -> None:
    """Measure the cases, and write them to a file after each one."""
    from gpu_contestants import Utilization, gpu_name

    device = gpu_name()
    effort = GPU if device else CPU
    effort = replace(effort, turns=options.turns or effort.turns)
    utilization = Utilization()
    cases: list[dict[str, Any]] = []
    slowest = 0.0
    with utilization.sampled():
        for policy in options.policies:
            started = time.time()
            backend, model = options.child
            case = {"backend": backend, "model": model, "policy": policy, "gpu": device}
            if started + slowest > options.until:
                cases.append(
                    case | {"problem": "left out, since the time was up: name fewer cases (--only), or more --minutes"}
                )
            else:
                cases.append(case | _case(TASKS[model], policy, effort, bool(device), utilization))
                slowest = max(slowest, time.time() - started)
            Path(options.file).write_text(json.dumps(cases))


def _case(task: Task, policy: str, effort: Effort, on_gpu: bool, utilization: Any) -> dict[str, Any]:
    import keras
    from gpu_contestants import InMemory, PlainKeras, gpu_bytes, peak_gpu_bytes

    keras.config.set_dtype_policy(policy)
    random = np.random.default_rng(0)
    batch_size = BATCH_SIZE if on_gpu else BATCH_SIZE // 8
    steps = effort.rows(task.steps * (JAX_STEPS if keras.backend.backend() == "jax" else 1))
    y = random.integers(10, size=steps * batch_size)
    x = task.rows(y, random)
    contestants: dict[str, PlainKeras] = {}
    trained: dict[str, NDArray[Any]] = {}
    memory: dict[str, int | None] = {}
    for name, kind in {"keras": PlainKeras, "sparkkeras": InMemory}.items():
        gc.collect()
        before = gpu_bytes() if on_gpu else 0
        keras.utils.set_random_seed(1)
        contestant = contestants[name] = kind(task.model(), x, y, batch_size)
        trained["start"] = contestant.weights
        for attempt in (name, "keras again")[: 2 if name == "keras" else 1]:
            contestant.reset()
            contestant.fit(COMPARED_EPOCHS, shuffle=False)
            trained[attempt] = contestant.weights
        memory[name] = peak_gpu_bytes(lambda fit=contestant.fit: fit(1)) - before if on_gpu else None
        contestant.predict()
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}

    def epochs(name: str) -> Turn:
        started = time.time()
        seconds = contestants[name].epochs(effort.epochs)
        spans[name].append((started, time.time()))
        return seconds

    def predictions(name: str) -> Turn:
        return timed(contestants[name].predict, effort.epochs)

    def difference(one: str, other: str) -> float:
        moved = np.linalg.norm(trained["keras"] - trained["start"])
        return float(np.linalg.norm(trained[one] - trained[other]) / moved)

    from_keras, by_chance = difference("sparkkeras", "keras"), difference("keras", "keras again")
    limit = TOLERANCE[policy] + 10 * by_chance
    return {
        "rows": len(y),
        "batch_size": batch_size,
        "epoch": alternate(effort.turns, **{name: partial(epochs, name) for name in contestants}),
        "predict": alternate(effort.turns, **{name: partial(predictions, name) for name in contestants}),
        "gpu_waits": {name: utilization.waits(spans[name]) for name in contestants},
        "gpu_bytes": memory,
        "weights_differ": {"from_keras": from_keras, "keras_from_itself": by_chance},
        "problem": f"weights differ by {from_keras:.1g}, more than {limit:.1g}" if not from_keras <= limit else None,
    }


if __name__ == "__main__":
    sys.exit(main())
