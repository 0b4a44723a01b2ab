"""A benchmark of learning: the accuracy that each mode reaches over time and epochs, and the bytes that it sends.

Samples are named by the mode and the quantity, for instance ``"allreduce seconds"``: the time until the end of each
epoch. Each seed is a turn.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from statistics import median
from typing import Any

import data
import numpy as np
from harness import Effort, Metric, Samples, Turn, benchmark

MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "asynchronous": {"frequency": 10, "parameter_server_mode": "socket"},
    "allreduce": {},
}
"""The modes, with further arguments of `SparkModel`."""

COLORS = ("#4477aa", "#ee6677", "#228833")
ACCURACY, TARGET = 0.97, "97 %"
COSTS = ("seconds", "epochs", "MB")
"""What it takes to reach `ACCURACY`."""

EPOCHS, SEEDS = 12, 3
ROWS, VALIDATION_ROWS, VALIDATION_DIGITS = 20_000, 3_600, 360


def draw(samples: Samples, path: Path, caption: str) -> None:
    """Draw the results of `to_accuracy`: medians over the seeds, and a thin line for each seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(13, 5.5), layout="constrained", sharey=True)
    for mode, color in zip(MODES, COLORS, strict=True):
        accuracy = 100 * np.array(samples[f"{mode} accuracy"])
        seconds, epochs, megabytes = (median(turn[0] for turn in samples[f"{mode} {cost} to it"]) for cost in COSTS)
        label = f"{mode}: {seconds:.1f} s, {epochs:.0f} epochs, {megabytes:.0f} MB over the network to {TARGET}"
        for axis, x in zip(axes, (np.array(samples[f"{mode} seconds"]), np.array(samples[f"{mode} epochs"])), strict=True):
            axis.plot(x.T, accuracy.T, color=color, linewidth=0.5, alpha=0.6)
            axis.plot(np.median(x, 0), np.median(accuracy, 0), color=color, marker="o", markersize=4, label=label)
    lowest = min(turn[-1] for mode in MODES for turn in samples[f"{mode} accuracy"])
    for axis, over in zip(axes, ("seconds from the call of fit", "epochs"), strict=True):
        axis.set(xlabel=over, xlim=(0, None), ylim=(100 * min(0.9, lowest), 100))
        axis.axhline(100 * ACCURACY, color="black", linestyle="--", linewidth=0.9)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("validation accuracy, %")
    axes[1].legend(loc="lower right", fontsize=8)
    figure.suptitle(caption, fontsize=10, x=0.99, ha="right")
    figure.savefig(path, dpi=100)
    plt.close(figure)


@benchmark(
    *(
        Metric(
            f"{cost} to {TARGET} validation accuracy, {mode}, against synchronous",
            f"{mode} {cost} to it",
            f"synchronous {cost} to it",
            unit={"seconds": "s"}.get(cost, cost),
        )
        for cost in COSTS
        for mode in list(MODES)[1:]
    ),
    once=True,
    draw=draw,
)
def to_accuracy(effort: Effort) -> Samples:
    """The same MLP trained in each mode by two workers. An accuracy that is not reached costs infinitely much."""
    from contestants import spark

    order = np.random.default_rng(0).permutation(len(data.small_digits()[0]))
    x, y = data.vectors(effort.rows(ROWS), digits=order[VALIDATION_DIGITS:])
    held_out = data.vectors(effort.rows(VALIDATION_ROWS), digits=order[:VALIDATION_DIGITS])
    samples: Samples = {}
    with spark():
        for mode in MODES:
            few = len(x) // 10
            _curves(mode, 0, (x[:few], y[:few]), held_out, min(effort.warmup, 10))
        for seed in range(min(effort.seeds, SEEDS)):
            for mode in MODES:
                curves = _curves(mode, seed, (x, y), held_out, max(2, EPOCHS // effort.shrink))
                reached = next((epoch for epoch, value in enumerate(curves["accuracy"]) if value >= ACCURACY), None)
                curves |= {f"{cost} to it": [math.inf if reached is None else curves[cost][reached]] for cost in COSTS}
                for name, turn in curves.items():
                    samples.setdefault(f"{mode} {name}", []).append(turn)
    return samples


def _curves(mode: str, seed: int, rows: data.Arrays, held_out: data.Arrays, epochs: int) -> dict[str, Turn]:
    """Train a model; return the validation accuracy at the end of each epoch, and what it took until then."""
    import keras
    from contestants import WORKERS

    from sparkkeras import SparkModel

    keras.utils.set_random_seed(seed)
    spark_model = SparkModel(data.mlp(), mode, num_workers=WORKERS, batch_size=data.BATCH_SIZE, seed=seed, **MODES[mode])
    ends: list[float] = []
    started = time.perf_counter()
    clock = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ends.append(time.perf_counter() - started))
    history = spark_model.fit(
        *rows,
        epochs=epochs,
        validation_data=held_out,
        validation_batch_size=1024,
        callbacks=[clock],
        verbose=0,
    )
    megabytes = _epoch_bytes(spark_model, len(rows[0]), epochs) / 1e6
    numbers = [float(epoch) for epoch in range(1, epochs + 1)]
    return {
        "accuracy": history.history["val_accuracy"],
        "seconds": ends,
        "epochs": numbers,
        "MB": [number * megabytes for number in numbers],
    }


def _epoch_bytes(spark_model: Any, rows: int, epochs: int) -> float:
    """The bytes that workers send and receive in an epoch, without the rows.

    The parameter server counts them. In the other modes they follow from the sizes of weights and optimizer variables. A
    synchronous round sends both to each worker and back, and the weights once more for the validation. In each step of a
    ring of n workers, the gradients go over the network 2 * (n - 1) times; after the epoch, one worker sends weights and
    optimizer variables to the driver.
    """
    workers, stats = spark_model.num_workers, spark_model.parameter_server_stats
    if stats is not None:
        return (stats.received_bytes + stats.sent_bytes) / epochs
    weights = _size(spark_model.model.weights)
    state = weights + _size(spark_model.model.optimizer.variables)
    if spark_model.mode == "synchronous":
        return workers * (2 * state + weights)
    steps = math.ceil(rows / workers / data.BATCH_SIZE)
    return steps * 2 * (workers - 1) * weights + state


def _size(variables: list[Any]) -> int:
    return sum(np.asarray(variable).nbytes for variable in variables)
