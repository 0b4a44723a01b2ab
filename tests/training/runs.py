"""Runs on an in-memory dataset: small models, rows in partitions, and a record of the progress reports."""

from contextlib import ExitStack
from unittest import mock

import keras
import numpy as np

from sparkkeras.arguments import declared
from sparkkeras.data.block import from_arrays
from sparkkeras.data.local_dataset import LocalDataset
from sparkkeras.data.placement import TrainValidationSplit
from sparkkeras.events import Events, RowsTrained, listeners
from sparkkeras.modeling import metrics
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.custom_code import ByValue
from sparkkeras.modeling.state import ModelState
from sparkkeras.parameter.rules import make_rule
from sparkkeras.training import allreduce
from sparkkeras.training.callbacks import DriverCallbacks
from sparkkeras.training.fit_arguments import MODES, FitArguments
from sparkkeras.training.independent import IndependentStrategy
from sparkkeras.training.recorder import Recorder
from sparkkeras.training.run import Run, ServerSettings, train
from sparkkeras.worker.batches import FitOptions
from tests.training.ranks import LocalHosts

IN_MEMORY = tuple(mode for mode in MODES if mode != "allreduce")
"""The modes that need no processes, and so no Spark."""

BATCH = 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3)).astype(np.float32)
Y = (X @ np.array([[1.0], [-2.0], [0.5]], np.float32) + 0.5 + 0.1 * RNG.normal(size=(60, 1))).astype(np.float32)


class Model:
    """A model and its initial state."""

    def __init__(self, *layers, optimizer, loss="mse", kind=keras.Sequential, **compiled):
        keras.utils.set_random_seed(1)
        self.model = kind([keras.Input((3,)), *layers, keras.layers.Dense(1)])
        self.model.compile(optimizer=optimizer, loss=loss, metrics=["mae"], **compiled)
        metrics.prepare(self.model, rows(X[:1], Y[:1]).spec.zeros())
        self.archive = ModelArchive.pack(self.model)  # finds variables outside the model
        self.state = ModelState.take(self.model)

    def reset(self):
        """Reset the model to its initial state, and return it."""
        self.state.put(self.model)
        self.model.stop_training = False
        return self.model


def rows(x, y, weight=None):
    """A block with copies of the arrays."""
    return from_arrays(x.copy(), y.copy(), weight)


def partitions(*sizes):
    """A dataset of consecutive rows in partitions of these sizes; ``None``: a partition without a block."""
    stops = np.cumsum([size or 0 for size in sizes])
    assert stops[-1] <= 60
    return LocalDataset(
        tuple(
            None if size is None else rows(X[stop - size : stop], Y[stop - size : stop])
            for size, stop in zip(sizes, stops, strict=True)
        )
    )


def stored_run(
    models, dataset, options, *, mode="synchronous", split=None, validation=None, archives=None, given=None, **more
):
    """A run whose rows are stored; ``given`` are arguments of `fit`, and ``more`` are fields of the `Run`."""
    sizes = tuple(handle.rows for handle in dataset.handles)
    defaults = {name: argument.default for name, argument in declared(FitArguments).items()}
    run = Run(mode, models, defaults | (given or {}), **more)
    run.dataset, run.split = dataset, split or TrainValidationSplit(sizes, (0,) * len(sizes))
    run.options, run.validation = options, validation
    run.archives = archives or [ModelArchive.pack(model) for model in models]
    return run


class RecordedEvents(keras.callbacks.Callback):
    """Keeps the events of a training; may be one of its callbacks."""

    def __init__(self):
        super().__init__()
        self.events = []

    def on_event(self, event):
        self.events.append(event)

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


def fit(
    given,
    dataset,
    mode="synchronous",
    *,
    callbacks=(),
    epochs=1,
    initial_epoch=0,
    steps_per_epoch=None,
    shuffle=False,
    seed=1,
    class_weight=None,
    worker_callbacks=None,
    progress=None,
    rule=None,
    recorder=None,
    archive=None,
    **more,
):
    """Train; return the history and the recorded rounds. ``more`` are fields of the `Run`."""
    recorded = RecordedEvents()
    how = {"shuffle": shuffle, "seed": seed, "class_weight": class_weight, "progress": progress}
    options = FitOptions(BATCH, callbacks=worker_callbacks, **how)
    run = stored_run(
        [given.model],
        dataset,
        options,
        mode=mode,
        archives=archive and [archive],
        given={"callbacks": callbacks, "epochs": epochs, "initial_epoch": initial_epoch, "steps_per_epoch": steps_per_epoch},
        rule=make_rule(rule, "synchronous" if mode == "independent" else mode),
        events=Events([recorded, *listeners(callbacks)]),
        recorder=recorder or Recorder(),
        **{"server": ServerSettings("inprocess"), **more},
    )
    run.callbacks = DriverCallbacks(callbacks, run.model, run.epochs, run.steps, run.events)
    if recorder is not None:
        recorder.check(run, {"fits": 1})
        recorder.check_data(run)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(allreduce.RankHosts, "of", LocalHosts))
        if recorder is not None:
            stack.enter_context(recorder.recording(run))
        if mode == "independent":
            IndependentStrategy("all", seed).train(run, range(initial_epoch, epochs))
        else:
            train(run)
    return given.model.history, [(event.rows, event.done) for event in recorded.of(RowsTrained)]


def weights_of(model):
    return ModelState.take(model).weights.vector


def plain(given, epochs, stop=22, **arguments):
    """Train a model from its initial state with plain Keras, on the first rows; return the history."""
    return given.reset().fit(X[:stop], Y[:stop], batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, **arguments)


def close(model, expected, optimizer=None, atol=1e-6):
    state = ModelState.take(model)
    assert np.allclose(state.weights.vector, expected, rtol=0, atol=atol)
    if optimizer is not None:
        assert np.allclose(state.optimizer.vector, optimizer, rtol=0, atol=atol)
    return True


def scaled_by(variable):
    """A model whose loss has a factor outside of it."""

    def scaled(y, predicted):
        return keras.ops.mean(variable) * keras.ops.mean(keras.ops.square(y - predicted))

    return Model(optimizer=keras.optimizers.SGD(0.05), loss=scaled, run_eagerly=True)


def noted(path):
    """A callback that writes the calls that it gets to a file, dumped for the workers."""

    def note(name):
        with path.open("a") as file:
            file.write(name + " ")

    callback = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: note("train"),
        on_epoch_begin=lambda epoch, logs: note(f"epoch{epoch}"),
        on_train_batch_end=lambda batch, logs: note("batch"),
        on_epoch_end=lambda epoch, logs: note("end"),
        on_train_end=lambda logs: note("trained"),
    )
    return ByValue.dump([callback], "worker_callbacks")


class Snapshots(keras.callbacks.Callback):
    """Records the weights after each epoch; from epoch ``blow_up`` on, sets a learning rate that makes training diverge."""

    def __init__(self, blow_up=None):
        super().__init__()
        self.blow_up = blow_up
        self.weights = []

    def on_epoch_begin(self, epoch, logs=None):
        if self.blow_up is not None and epoch >= self.blow_up:
            self.model.optimizer.learning_rate = 1e38

    def on_epoch_end(self, epoch, logs=None):
        self.weights.append(ModelState.take(self.model).weights.vector)
