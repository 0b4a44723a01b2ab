"""Measure the modes over networks with delay, rate and loss: ``python benchmarks/networks.py [--only NAME...]``.

It needs root. Driver, master and two workers have hosts of their own on this machine (`tests.clusters.hosts`), and share its
cores. A case that was measured before without a problem is not measured again: remove ``results/networks`` for a new run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import data
import numpy as np
import report

HERE = Path(__file__).resolve().parent
ACCURACY, VALIDATION_ROWS, VALIDATION_DIGITS = 0.97, 1_800, 360
WARMUP, EPOCHS, MOST_EPOCHS, START_SECONDS = 1, 3, 40, 30
PLAIN, SLOW = "no delay", "slow host"

NETWORKS: dict[str, dict[str, float]] = {
    PLAIN: {},
    "1 ms": {"delay": 1},
    "10 ms": {"delay": 10},
    "50 ms": {"delay": 50},
    "1 Gbit/s": {"rate": 1000},
    "100 Mbit/s": {"rate": 100},
    "0.5 % loss": {"loss": 0.5},
    SLOW: {},
}
"""The arguments of `Link`. In `SLOW`, one of the workers has half a core."""

MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "asynchronous, 10": {"mode": "asynchronous", "frequency": 10, "parameter_server_mode": "socket"},
    "asynchronous, 1": {"mode": "asynchronous", "frequency": 1, "parameter_server_mode": "socket"},
    "hogwild, 10": {"mode": "hogwild", "frequency": 10, "parameter_server_mode": "socket"},
    "all-reduce": {"mode": "allreduce"},
}
INDEPENDENT = ("synchronous", "all-reduce")
"""The modes whose weights after an epoch do not depend on the network."""


@dataclass(frozen=True)
class Weights:
    """A model, and how it is measured.

    Attributes:
        model: Builds the compiled model.
        rows: The rows of an epoch.
        limit: The most seconds of a case; it ends when it has measured what it can by then.
        modes: The modes to measure.
        networks: The networks to measure.
    """

    model: Callable[[], Any]
    rows: int
    limit: float
    modes: tuple[str, ...] = tuple(MODES)
    networks: tuple[str, ...] = tuple(NETWORKS)

    @property
    def steps(self) -> int:
        """The steps of each of two workers in an epoch."""
        return math.ceil(self.rows / 2 / data.BATCH_SIZE)


def _large() -> Any:
    import keras

    model = data.large_mlp()
    model.compile(keras.optimizers.SGD(0.3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


WEIGHTS = {
    "0.5 MB": Weights(data.mlp, 12_800, 30),
    "10 MB": Weights(data.middle_mlp, 12_800, 45, ("synchronous", "asynchronous, 10", "all-reduce")),
    "100 MB": Weights(
        *(_large, 6_400, 90, ("synchronous", "asynchronous, 10", "all-reduce")),
        networks=(PLAIN, "10 ms", "1 Gbit/s", "100 Mbit/s"),
    ),
}

SETTINGS = {"spark.executor.memory": "1000m", "spark.driver.memory": "3g", "spark.driver.maxResultSize": "0"}


def main() -> int:
    """Measure what is chosen and was not measured before, write it after each case, and print tables."""
    options = _options()
    path = options.output / "latest.json"
    stored = _stored(path)
    report.save(options.output, path.stem, stored | {"cases": [case for case in stored["cases"] if "problem" not in case]})
    for network in NETWORKS:
        wanted = [
            {"network": network, "weights": weights, "mode": mode}
            for weights, mode in product(WEIGHTS, MODES)
            if network in WEIGHTS[weights].networks
            and mode in WEIGHTS[weights].modes
            and not {network, weights, mode} & options.left_out
        ]
        began = time.perf_counter()
        if _missing(wanted, path):
            _on_network(network, wanted, path)
            print(f"{network}: {time.perf_counter() - began:.0f} s", flush=True)
    cases = _stored(path)["cases"]
    text = summary(cases)
    (options.output / "networks.md").write_text(text)
    print(f"\n{text}\nwrote {path}")
    return int(any("problem" in case for case in cases))


def summary(cases: list[dict[str, Any]]) -> str:
    """The seconds of an epoch and to `ACCURACY` as tables in Markdown, one for each size of the weights."""
    plain = {(case["weights"], case["mode"]): case for case in cases if case["network"] == PLAIN}
    lines: list[str] = []
    for weights, of_weights in _grouped(cases, "weights").items():
        modes = [mode for mode in MODES if mode in _grouped(of_weights, "mode")]
        head = f"{weights} of weights, {WEIGHTS[weights].steps} steps of each worker in an epoch"
        lines += [f"| {head} | {' | '.join(modes)} |", "| --- |" + " --- |" * len(modes)]
        for network, of_network in _grouped(of_weights, "network").items():
            found = {case["mode"]: case for case in of_network}
            cells = (_cell(found[mode], plain.get((weights, mode))) if mode in found else "" for mode in modes)
            lines.append(f"| {network} | {' | '.join(cells)} |")
        lines.append("")
    note = (
        f"Seconds of an epoch / to {ACCURACY:.0%} accuracy on other rows, both without the start of training; - if it was "
        "not reached in time. With ~, the number of epochs is that without delay: in synchronous and all-reduce training it "
        "is the same in all networks."
    )
    return "\n".join([*lines, note, ""])


def _cell(case: dict[str, Any], plain: dict[str, Any] | None) -> str:
    """The seconds of an epoch, and those to the accuracy: measured, or of as many epochs as without delay."""
    if "problem" in case:
        return case["problem"]
    epoch = _seconds(case)
    if epoch is None:
        return f"more than {case['limit']:.0f}"
    shown = f"{epoch:.{1 if epoch < 10 else 0}f}"
    measured = case["epochs_to_accuracy"]
    epochs = measured or (plain if plain and case["mode"] in INDEPENDENT else {}).get("epochs_to_accuracy")
    return f"{shown} / {'' if measured else '~'}{epoch * epochs:.0f}" if epochs else f"{shown} / -"


def _seconds(case: dict[str, Any]) -> float | None:
    """The median seconds of the epochs after the first one."""
    return median(case["seconds"][WARMUP:]) if len(case["seconds"]) > WARMUP else None


def _grouped(cases: list[dict[str, Any]], key: str) -> dict[str, list[dict[str, Any]]]:
    return {name: [case for case in cases if case[key] == name] for name in dict.fromkeys(case[key] for case in cases)}


def _options() -> argparse.Namespace:
    groups = [tuple(NETWORKS), tuple(WEIGHTS), tuple(MODES)]
    names = [name for group in groups for name in group]
    parser = argparse.ArgumentParser(description="Measure the modes over networks with delay, rate and loss.")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=names, default=[], help="; ".join(names).replace("%", "%%")
    )
    parser.add_argument("--output", type=Path, default=HERE / "results" / "networks", metavar="DIR")
    options = parser.parse_args()
    chosen = [name for group in groups for name in ([n for n in group if n in options.only] or group)]
    options.left_out = set(names) - set(chosen)
    return options


def _stored(path: Path) -> dict[str, Any]:
    if path.exists():
        return json.loads(path.read_text())
    return {"about": report.machine({"sparkkeras": sys.executable}), "cases": []}


def _store(path: Path, case: dict[str, Any]) -> None:
    stored = _stored(path)
    stored["cases"].append(case)
    report.save(path.parent, path.stem, stored)


def _missing(wanted: list[dict[str, str]], path: Path) -> list[dict[str, str]]:
    """The cases that were not measured yet."""
    known = [{key: case[key] for key in ("network", "weights", "mode")} for case in _stored(path)["cases"]]
    return [case for case in wanted if case not in known]


def _on_network(network: str, wanted: list[dict[str, str]], path: Path) -> None:
    """Measure cases on a cluster of their own; a driver that fails is replaced, and its case has a problem."""
    import networks  # by this name, drivers import this module

    from tests.clusters.hosts import Hosts, Link, cluster

    cores = {"worker2": 0.5} if network == SLOW else {}
    with (
        tempfile.TemporaryDirectory(prefix="networks-") as folder,
        Hosts(folder, link=Link(**NETWORKS[network]), cores=cores) as hosts,
        cluster(folder, hosts) as spark,
    ):
        while cases := _missing(wanted, path):
            seconds = 120 + sum(2 * WEIGHTS[case["weights"]].limit for case in cases)
            try:
                spark.run(networks.measure, SETTINGS, seconds=seconds, cases=cases, path=str(path.resolve()))
            except (AssertionError, subprocess.TimeoutExpired) as error:
                print(error)
                _store(path, _missing(wanted, path)[0] | {"problem": "failed"})


# --- In the driver --------------------------------------------------------------------------------------------------


def measure(context: Any, cases: list[dict[str, str]], path: str) -> None:
    """Train each case and store it, after a short training in which the workers load Keras."""
    order = np.random.default_rng(0).permutation(len(data.small_digits()[0]))
    held_out = data.vectors(VALIDATION_ROWS, digits=order[:VALIDATION_DIGITS])
    small = WEIGHTS["0.5 MB"]
    _train(context, small, {}, data.vectors(256), held_out, to_accuracy=False)
    for case in cases:
        size = WEIGHTS[case["weights"]]
        rows = data.vectors(size.rows, digits=order[VALIDATION_DIGITS:])
        found = _train(context, size, MODES[case["mode"]], rows, held_out, to_accuracy=_is_measured(case))
        _store(Path(path), case | {"steps": size.steps, "limit": size.limit} | found)


def _is_measured(case: dict[str, str]) -> bool:
    """Whether a case is trained up to the accuracy, and not for a few epochs only."""
    return case["network"] == PLAIN or case["mode"] not in INDEPENDENT


def _train(
    context: Any, size: Weights, options: dict[str, Any], rows: Any, held_out: Any, to_accuracy: bool
) -> dict[str, Any]:
    """The seconds of each epoch, and the epochs and seconds until the accuracy was reached."""
    import keras

    from sparkkeras import SparkModel

    last = time.perf_counter()
    seconds: list[float] = []
    accuracies: list[float] = []

    class Epochs(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            nonlocal last
            if "frequency" not in options or not seconds:  # asynchronous workers do not wait for the callbacks
                last = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            nonlocal last
            now = time.perf_counter()
            seconds.append(now - last)
            last = now
            if to_accuracy:
                predicted = self.model.predict_on_batch(held_out[0]).argmax(1)
                accuracies.append(float((predicted == held_out[1]).mean()))
            done = not to_accuracy or max(accuracies) >= ACCURACY
            over = sum(seconds) > size.limit
            self.model.stop_training = over or (done and len(seconds) >= WARMUP + EPOCHS)

    keras.utils.set_random_seed(0)
    spark_model = SparkModel(size.model(), num_workers=2, batch_size=data.BATCH_SIZE, seed=0, **options)
    stop = threading.Timer(1.3 * size.limit + START_SECONDS, context.cancelAllJobs)
    stop.start()
    try:
        spark_model.fit(*rows, epochs=MOST_EPOCHS, verbose=0, callbacks=[Epochs()])
    except Exception as error:
        if stop.is_alive():
            return {"seconds": seconds, "problem": f"{type(error).__name__}: {error}"[:200]}
    finally:
        stop.cancel()
    reached = next((number for number, value in enumerate(accuracies, 1) if value >= ACCURACY), None)
    return {"seconds": seconds, "accuracies": accuracies, "epochs_to_accuracy": reached}


if __name__ == "__main__":
    os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:+UseSerialGC")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    os.environ["PYSPARK_PYTHON"] = sys.executable
    sys.path.insert(1, str(HERE.parent))
    sys.exit(main())
