"""Train a digit classifier through a parameter server, and compare training modes.

::

    python examples/asynchronous.py [--output DIR] [--epochs N] [--modes asynchronous hogwild] [--transport socket]
                                    [--frequency N] [--rule NAME] [--max-staleness N] [--master local[2]]

It starts Spark on this machine. The digits come with scikit-learn: nothing is downloaded. To compare with synchronous
training: ``--modes synchronous asynchronous``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surroundings import hushed, start_spark

with hushed():
    import keras
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    from sparkkeras import ParameterServerOptions, ParameterServerStats, SparkModel

SEED = 7
MODES = ("synchronous", "asynchronous", "hogwild")
COLOURS = ("#2a7f62", "#c8102e", "#3b6fb6")


@dataclass(frozen=True)
class Outcome:
    """Results of training in one mode; ``mode`` includes the name of the update rule."""

    mode: str
    seconds: list[float]
    losses: list[float]
    accuracy: float
    stats: ParameterServerStats | None


class Stopwatch(keras.callbacks.Callback):  # type: ignore[misc]
    """Records when each epoch ended. Callbacks run on the driver."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_train_begin(self, logs: Any = None) -> None:
        """Start the clock."""
        self._started = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Record the time since training began."""
        self.seconds.append(time.perf_counter() - self._started)


@hushed()
def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line(arguments)
    picture = options.output / "asynchronous.png"
    options.output.mkdir(parents=True, exist_ok=True)

    print(f"Starting Spark on {options.master} ...")
    spark = start_spark(options.master)
    x_train, x_test, y_train, y_test = digits()
    print(f"{len(x_train):,} training digits, {len(x_test)} test digits.\n")

    model = build_model()
    beginning = model.get_weights()
    train(model, "synchronous", options, 1, x_train, y_train, x_test, y_test)  # workers load Keras and trace the model

    outcomes = []
    for mode in options.modes:
        model.set_weights(beginning)
        model.compile(keras.optimizers.Adam(1e-3), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
        outcome = train(model, mode, options, options.epochs, x_train, y_train, x_test, y_test)
        print(summary(outcome), end="\n\n")
        outcomes.append(outcome)

    draw(outcomes).savefig(picture, dpi=150)
    spark.stop()
    print(f"Picture                 {picture}")


def command_line(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare training modes on a digit classifier.")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", default=Path("artifacts"), help="output directory (default: %(default)s)"
    )
    parser.add_argument("--epochs", type=int, metavar="N", default=15, help="training epochs (default: %(default)s)")
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=["asynchronous", "hogwild"], help="the modes to compare, one or more"
    )
    parser.add_argument(
        "--transport",
        choices=("socket", "http"),
        default="socket",
        help="transport of the parameter server (default: %(default)s)",
    )
    parser.add_argument(
        "--frequency", type=int, metavar="N", default=5, help="batches between exchanges (default: %(default)s)"
    )
    parser.add_argument(
        "--rule", metavar="NAME", default="downpour", help="update rule; must support all modes (default: %(default)s)"
    )
    parser.add_argument(
        "--max-staleness",
        type=int,
        metavar="N",
        help="how many exchanges a worker may be ahead of the slowest one (default: no bound)",
    )
    parser.add_argument("--master", default="local[2]", help="Spark master URL (default: %(default)s)")
    return parser.parse_args(arguments)


def digits() -> list[np.ndarray]:
    """Train and test rows of 64 pixels from 0 to 1, then train and test labels. Shifted training images are added."""
    data = load_digits()
    images = data.images.astype("float32") / 16
    x_train, x_test, y_train, y_test = train_test_split(
        images, data.target, test_size=0.25, stratify=data.target, random_state=SEED
    )
    shifts = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))
    x_train = np.concatenate([np.roll(x_train, shift, axis=(1, 2)) for shift in shifts])
    y_train = np.tile(y_train, len(shifts))
    order = np.random.default_rng(SEED).permutation(len(x_train))
    return [x_train[order].reshape(-1, 64), x_test.reshape(-1, 64), y_train[order], y_test]


def build_model() -> keras.Model:
    keras.utils.set_random_seed(SEED)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-3), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def train(
    model: keras.Model,
    mode: str,
    options: argparse.Namespace,
    epochs: int,
    x: np.ndarray,
    y: np.ndarray,
    x_test: np.ndarray,
    y_test: np.ndarray,
) -> Outcome:
    spark_model = SparkModel(
        model,
        mode=mode,
        parameter_server_mode=options.transport,
        frequency="epoch" if mode == "synchronous" else options.frequency,
        rule=None if mode == "synchronous" else options.rule,  # the mode's default rule
        server_options=ParameterServerOptions(max_staleness=options.max_staleness),
        seed=SEED,
    )
    watch = Stopwatch()
    history = spark_model.fit(x, y, epochs=epochs, validation_data=(x_test, y_test), callbacks=[watch], verbose=0)
    return Outcome(
        f"{mode} ({type(spark_model.rule).__name__})",
        watch.seconds,
        history.history["val_loss"],
        history.history["val_accuracy"][-1],
        spark_model.parameter_server_stats,
    )


def summary(outcome: Outcome) -> str:
    """The results as text."""
    lines = [
        (
            outcome.mode.capitalize(),
            f"test accuracy {outcome.accuracy:.1%}, loss {outcome.losses[-1]:.3f}, {outcome.seconds[-1]:.1f} s",
        )
    ]
    stats = outcome.stats
    if stats is not None:
        sent, received = stats.sent_bytes / 1e6, stats.received_bytes / 1e6
        lines += [
            ("  updates", f"{stats.pushes} applied, {stats.updates_per_second:,.0f} per second over {stats.transport}"),
            ("  staleness", f"mean {stats.mean_staleness:.1f}, maximum {stats.max_staleness}"),
            ("  traffic", f"{sent:.0f} MB to the workers, {received:.0f} MB from them"),
            ("  pulls", f"{stats.pulls}, {stats.cached_pulls} of them without new weights"),
            ("  steps", ", ".join(f"worker {worker}: {steps}" for worker, steps in stats.steps.items())),
        ]
    return "\n".join(f"{name:<24}{value}" for name, value in lines)


def draw(outcomes: list[Outcome]) -> Figure:
    """Loss over time on the left, staleness of updates on the right."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for outcome, colour in zip(outcomes, COLOURS, strict=False):
        label = f"{outcome.mode}: loss {outcome.losses[-1]:.3f}, accuracy {outcome.accuracy:.1%}"
        left.plot(outcome.seconds, outcome.losses, "o-", color=colour, markersize=3, label=label)
    left.set(title="Test loss over time", xlabel="training time (s)", ylabel="loss", yscale="log")
    draw_staleness(right, outcomes)
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    return figure


def draw_staleness(axes: Axes, outcomes: list[Outcome]) -> None:
    """A histogram of staleness, modes side by side; values of 10 and more share one bar."""
    most = 10
    for place, (outcome, colour) in enumerate(zip(outcomes, COLOURS, strict=False)):
        if outcome.stats is None:
            axes.plot([], [], color=colour, label=f"{outcome.mode}: none (synchronous)")
            continue
        shares = np.zeros(most + 1)
        for staleness, count in outcome.stats.staleness.items():
            shares[min(staleness, most)] += count / max(1, outcome.stats.pushes)
        width = 0.8 / len(outcomes)
        label = f"{outcome.mode}: mean {outcome.stats.mean_staleness:.1f}"
        axes.bar(np.arange(most + 1) + (place + 0.5) * width - 0.4, shares, width, color=colour, label=label)
    axes.set_xticks(range(most + 1), [*map(str, range(most)), f"{most}+"])
    axes.set(
        title="Staleness of updates", xlabel="staleness (updates of other workers in between)", ylabel="fraction of updates"
    )


if __name__ == "__main__":
    main()
