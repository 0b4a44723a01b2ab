"""All-reduce training without processes: what the driver changes, rows of several partitions, arguments that do not fit."""

import functools
import pickle
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from sparkkeras import (
    ConfigurationError,
    DataError,
    DivergenceError,
    ModelError,
    ParameterServerOptions,
    SparkModel,
    WorkerError,
)
from sparkkeras.data.block import from_arrays
from sparkkeras.data.local_dataset import LocalStream
from sparkkeras.data.placement import TrainValidationSplit
from sparkkeras.errors import ClusterError, DriverConnectionError
from sparkkeras.modeling import metrics
from sparkkeras.modeling.reductions import check_mean_over_rows
from sparkkeras.modeling.state import ModelState
from sparkkeras.runner.groups import RowsMissingError
from sparkkeras.runner.service import pack_parts
from sparkkeras.spark.slots import holding_slots
from sparkkeras.training.allreduce import (
    Change,
    RankEpoch,
    RankPlan,
    Streams,
    _RankTraining,
    check_all_reduce,
)
from sparkkeras.training.allreduce_hosts import all_slots
from sparkkeras.training.callbacks import DriverCallbacks
from sparkkeras.training.recorder import Recorder
from sparkkeras.training.run import train
from sparkkeras.training.validation import Validation
from sparkkeras.training.worker_reports import Report, check_finite
from sparkkeras.weights import Flat
from sparkkeras.worker.batches import BatchOptions, FitOptions
from tests.models import classifier
from tests.training.ranks import LocalHosts
from tests.training.runs import BATCH, Model, X, Y, close, fit, partitions, stored_run, weights_of


def flat(*values, steps=1):
    return Flat(np.array(values, np.float32), (np.array(steps, np.int64),))


@pytest.mark.parametrize(("after", "size"), [(flat(1, 2, 3, 4), 0), (flat(1, 2, 3, 5, steps=7), 1), (flat(9, 8, 7, 6), 4)])
def test_a_change_restores_the_vector_from_what_is_new(after, size):
    before = flat(1, 2, 3, 4)
    change = pickle.loads(pickle.dumps(Change.between(before, after)))
    applied = change.applied(before)
    assert applied.vector.tolist() == after.vector.tolist()
    assert applied.integer_variables == after.integer_variables
    assert len(change.values) == size


def block(start, stop):
    return from_arrays(np.arange(start, stop, dtype=np.float32).reshape(-1, 1), np.arange(start, stop, dtype=np.int32), None)


def test_a_rank_trains_and_validates_on_the_rows_of_several_partitions(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    monkeypatch.setattr(LocalHosts, "size", lambda hosts: 1)
    given, dataset = shared(), partitions(10, None, 15)
    given.reset()
    split = TrainValidationSplit.split([10, 0, 15], 0.2)
    validation = Validation(dataset, BatchOptions(BATCH), 1, split.validation_spans)
    history, _ = fit(given, dataset, "allreduce", epochs=2, split=split, validation=validation)
    found, trained, held_out = weights_of(given.model), [*range(8), *range(10, 22)], [8, 9, 22, 23, 24]
    rows = {"x": X[trained], "y": Y[trained], "validation_data": (X[held_out], Y[held_out])}
    expected = given.reset().fit(**rows, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    assert close(given.model, found)
    assert history.history["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-5)
    assert not list(tmp_path.glob("*/joined-*"))


def test_the_batches_of_a_rank_are_spread_over_the_rounds():
    in_rounds = RankPlan(range(1), ((0,),), (53,), block(0, 1).spec, 10, None, 1, window=4)  # of another rank's ten steps
    for rows, expected in ((40, [(0, 4), (4, 8), (8, 10)]), (13, [(0, 1), (1, 3), (3, 4)]), (80, [(0, 4), (4, 8), (8, 10)])):
        assert [in_rounds.own_batches(start, rows, 4) for start in (0, 4, 8)] == expected


def test_streams_are_read_in_turn():
    streams = Streams((LocalStream((block(0, 2), block(2, 3))), LocalStream((block(3, 5),))))
    assert [each.arrays[1].tolist() for each in streams.blocks(0, 0)] == [[0, 1], [3, 4], [2]]


def test_the_default_frequency_is_that_of_the_mode():
    spark_model = SparkModel(classifier(), num_workers=2)
    assert spark_model.frequency == "epoch"
    spark_model.mode = "allreduce"
    assert spark_model.frequency == 1
    assert repr(spark_model) == "SparkModel('classifier', mode='allreduce', num_workers=2)"
    assert SparkModel(classifier(), "allreduce", "batch").frequency == 1
    assert SparkModel(classifier(), **spark_model.get_config()).get_config() == spark_model.get_config()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"frequency": 5}, "frequency=5 does not fit"),
        ({"rule": "average"}, "rule='average' does not"),
        ({"gradient_dtype": "float8"}, "'float8'.*Known: 'bfloat16'"),
        ({"max_restarts": -1}, "max_restarts=-1"),
        ({"parameter_server_mode": "http"}, "use mode='asynchronous'"),
        ({"server_options": ParameterServerOptions(host="a")}, "server_options=.*does not fit"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        SparkModel(classifier(), "allreduce", **arguments)


@pytest.mark.parametrize(
    ("mode", "other", "arguments"),
    [
        ("synchronous", "allreduce", {"frequency": 5}),
        ("allreduce", "synchronous", {"gradient_dtype": "float16"}),
        ("allreduce", "synchronous", {"max_restarts": 3}),
    ],
)
def test_arguments_of_another_mode_are_checked_in_fit(mode, other, arguments):
    spark_model = SparkModel(classifier(), mode, **arguments)
    spark_model.mode = other
    with pytest.raises(ConfigurationError, match=f"does not fit mode='{other}'"):
        spark_model.fit(np.zeros((4, 64)), np.zeros(4))


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="XLA compiles the collectives of JAX")
def test_training_without_xla_is_a_warning_on_the_driver():
    check_all_reduce(classifier())
    with pytest.warns(UserWarning, match="'classifier'.*jit_compile=True"):
        check_all_reduce(classifier(jit_compile=True))


def test_a_loss_that_is_no_mean_over_rows_is_an_error():
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=0)
    with pytest.raises(ModelError, match="ignore_class=0"):
        SparkModel(classifier(loss=loss), "allreduce").fit(np.zeros((4, 64)), np.zeros(4))


@pytest.mark.parametrize(
    ("loss", "instead"),
    [
        ("dice", "keras.losses.Dice"),
        (keras.losses.Tversky(axis=(0, 1)), "keras.losses.Tversky"),
        (keras.losses.Circle(), "a loss that is a mean over rows"),
    ],
)
def test_a_loss_of_the_whole_batch_is_an_error(loss, instead):
    with pytest.raises(ModelError, match=f"with each other.* use {instead}"):
        check_mean_over_rows(classifier(loss=loss))
    check_mean_over_rows(classifier(loss=keras.losses.Dice(axis=1)))


def test_a_mask_that_reaches_the_loss_is_an_error():
    model = Model(optimizer="sgd", run_eagerly=True).model
    model._compile_loss._sparkkeras_mask = True
    with pytest.raises(ModelError, match="an output with a mask"):
        train(SimpleNamespace(mode="allreduce", model=model))


class Allocates:
    """A SparkContext with dynamic allocation."""

    def getConf(self):
        return {"spark.dynamicAllocation.enabled": "true"}


def test_dynamic_allocation_is_an_error_before_data_is_read(monkeypatch):
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", Allocates())
    with pytest.raises(ConfigurationError, match="SPARK-24942.*set it to false"):
        SparkModel(classifier(), "allreduce").fit(np.zeros((4, 64)), np.zeros(4))


class Busy:
    """A cluster of 4 slots, 3 of which another job uses."""

    is_local, slots, free_slots, slots_per_task = True, 4, 1, 1


def test_training_waits_for_slots_that_are_not_free():
    assert all_slots(Busy(), None) == all_slots(Busy(), 2) == 4
    with holding_slots(1):
        assert all_slots(Busy(), 3) == 3


@pytest.mark.parametrize(
    ("held", "num_workers", "message"),
    [
        (0, 7, r"num_workers=7.*master local\[7\]"),
        (1, 4, "num_workers=4.*3 slots besides"),
        (4, 1, r"holds all slots \(4\)"),
    ],
)
def test_more_workers_than_slots_are_an_error(held, num_workers, message):
    with holding_slots(held), pytest.raises(ConfigurationError, match=message):
        all_slots(Busy(), num_workers)


def failed(rank, error):
    """The error of a rank, with its traceback."""
    return WorkerError(f"rank {rank} of 2 failed: {error}.", f"Traceback (most recent call last):\n{error}\n")


def never_met(port):
    """Each group has ports of its own."""
    name = "sparkkeras.worker.collectives.group.NeverMetError"
    return failed(0, f"{name}: the process of rank 1 (worker2:{port}) did not join")


RAISED, OTHER = failed(0, "ValueError: on purpose"), failed(0, "sparkkeras.errors.DataError: row 3 has no label")
KILLED = WorkerError("rank 1 of 2 failed: its process was killed by SIGKILL.")
UNREACHED = failed(1, "sparkkeras.errors.DriverConnectionError: rank 1 received no reply from the driver")


class InRounds(Recorder):
    """Asks for rounds of one step."""

    every_steps = 1


@functools.cache
def shared():
    return Model(optimizer="sgd")


class Training(_RankTraining):
    """The decisions of the driver for ranks that do what a test says: finish epochs or rounds (``"epoch"``), and fail.

    Attributes:
        starts: For each start of the ranks, the first epoch, its steps that are not trained again, and the number of ranks.
        moved: For each start, whether rows are sent to them.
    """

    report_is_finite = True

    def __init__(self, *groups, slots=(2,) * 9, epochs=3, max_restarts=3, callbacks=(), recorder=Recorder):
        model = shared().reset()
        more = {"max_restarts": max_restarts, "recorder": recorder()}
        run = stored_run([model], partitions(8, 8), FitOptions(4), given={"epochs": epochs}, **more)
        run.callbacks = DriverCallbacks(callbacks, model, epochs, 2, run.events)
        run.callbacks.on_train_begin()
        super().__init__(run, range(epochs))
        self.groups, self.slots = iter(groups), iter(slots)
        self.starts, self.moved, self.answers = [], [], []

    def _size(self):
        return next(self.slots)

    def _run_group(self, plan, moves_rows):
        size = len(plan.partitions)
        self.starts.append((plan.epochs.start, plan.first, size))
        self.moved.append(moves_rows)
        assert sorted(part for parts in plan.partitions for part in parts) == [0, 1]
        for action in next(self.groups):
            if isinstance(action, WorkerError):
                return action
            if isinstance(action, Exception):
                raise action
            try:
                answer = pickle.loads(self._answer([self._ended(rank, 16 // size) for rank in range(size)]))
            except WorkerError as error:  # as from run_group
                return error
            self.answers.append(answer)
        return None

    def _ended(self, rank, rows):
        model = self._run.model
        state = ModelState(Flat(self._state.weights.vector + 1), self._state.optimizer)
        report = Report(rank, rows, rows // 4, 1.0, 0.1, {"loss": 1.0, "mae": 1.0}, self.report_is_finite)
        return pack_parts(RankEpoch(report, metrics.take(model), None, None if rank else state, False), "an epoch")


ONE, TWO = ["epoch"], ["epoch"] * 2
CONTINUED = {
    "from the last epoch": ([[*ONE, KILLED], [KILLED], TWO], {}, [(0, 0, 2), (1, 0, 2), (1, 0, 2)], "epoch 2 .* SIGKILL"),
    "without a reply": ([[*ONE, UNREACHED], TWO], {}, [(0, 0, 2), (1, 0, 2)], "epoch 2 .*received no reply"),
    "with fewer slots": (
        [[*ONE, KILLED], [*ONE, KILLED], ONE], {"slots": (2, 1, 2)}, [(0, 0, 2), (1, 0, 1), (2, 0, 2)], "restart [12]"
    ),
    "from the last round": (
        [[*ONE, KILLED], ONE * 3], {"epochs": 2, "recorder": InRounds}, [(0, 0, 2), (0, 1, 2)], "after 1 batch"
    ),
    "with other workers": (
        [[*ONE, KILLED], ONE * 4], {"epochs": 1, "slots": (2, 1), "recorder": InRounds}, [(0, 0, 2), (0, 0, 1)], "restart 1"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("groups", "given", "starts", "message"), CONTINUED.values(), ids=CONTINUED)
def test_training_continues_after_failures(groups, given, starts, message):
    begun = []
    beginning = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, _: begun.append(epoch))
    training = Training(*groups, callbacks=[beginning], **given)
    before = training._state.weights.vector
    with pytest.warns(UserWarning, match=message) as caught:
        training.train()
    assert sum("training continues" in str(each.message) for each in caught) == len(groups) - 1
    assert training.starts == starts
    assert begun == [*range(1, given.get("epochs", 3))]
    trained = 4 if "recorder" in given else 3  # rounds or epochs
    assert sum(entry["rows"] for entry in training._run.histories) == 16 * trained
    np.testing.assert_array_equal(training._state.weights.vector, before + trained)


@pytest.mark.parametrize(
    ("groups", "max_restarts", "kind", "message"),
    [
        ([[KILLED]], 0, WorkerError, "SIGKILL.$"),
        ([["epoch", KILLED], [KILLED], [KILLED]], 2, WorkerError, r"\(after 2 restarts, max_restarts=2\)"),
        ([[KILLED], ["epoch"] * 3 + [RAISED]], 3, WorkerError, r"on purpose.*\(after 1 restart,"),
        ([[RAISED], ["epoch", RAISED], [RAISED]], 3, WorkerError, "for the second time in epoch 2"),
        ([[never_met(36000)], [never_met(36001)]], 3, WorkerError, "worker2:36001.*for the second time"),
        ([[UNREACHED], [UNREACHED]], 3, DriverConnectionError, "received no reply"),
        ([[OTHER]], 3, DataError, "row 3 has no"),
    ],
    ids=[
        "none",
        "limited",
        "an error after the last epoch",
        "the same error in the same epoch",
        "never met",
        "driver",
        "data",
    ],
)
@pytest.mark.filterwarnings("ignore:training continues")
def test_a_failure_is_an_error_without_further_restarts(groups, max_restarts, kind, message):
    training = Training(*groups, max_restarts=max_restarts)
    with pytest.raises(kind, match=message):
        training.train()
    assert len(training.starts) == len(groups)


def test_a_worker_that_is_lost_after_the_last_epoch_is_no_error():
    training = Training(["epoch"] * 3 + [KILLED])
    with pytest.warns(UserWarning, match="after the last epoch"):
        training.train()
    assert [answer.stop for answer in training.answers] == [False, False, True]


def test_too_few_slots_after_a_failure_are_an_error_with_the_failure():
    training = Training([KILLED], [ClusterError("Spark has only 1 slot left")])
    with pytest.warns(UserWarning, match="restart 1"), pytest.raises(ClusterError, match="only 1 slot left") as caught:
        training.train()
    assert caught.value.__cause__ is KILLED


@pytest.mark.parametrize(("is_finite", "where"), [(False, ""), (True, " on worker 1")])
def test_divergence_names_a_worker_only_if_its_own_rows_are_known_to_cause_it(is_finite, where):
    reports = [Report(rank, 8, 2, 1.0, 0.1, {"loss": np.nan}, rank == 0 and is_finite) for rank in range(2)]
    with pytest.raises(DivergenceError, match=f"epoch 3{where}: the loss"):
        check_finite(reports, 2, "epoch", in_step=True)


def test_divergence_ends_training_without_a_restart():
    training = Training(["epoch"])
    training.report_is_finite = False
    with pytest.raises(DivergenceError, match="diverged in epoch 1: "):
        training.train()
    assert len(training.starts) == 1


def test_rows_are_sent_to_workers_that_do_not_find_them():
    training = Training([RowsMissingError()], ["epoch"] * 3)
    training.train()
    assert training.moved == [False, True]
    with pytest.raises(ClusterError, match="temporary folder"):
        Training([RowsMissingError()], [RowsMissingError()]).train()


@pytest.mark.parametrize("error", [WorkerError("of a job that the callback has started"), KeyError("a")])
def test_an_error_of_a_callback_is_not_that_of_a_worker(error):
    class Fail(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise error

    training = Training(["epoch"], callbacks=[Fail()])
    with pytest.raises(type(error)) as caught:
        training.train()
    assert caught.value is error
    assert len(training.starts) == 1


def test_ranks_learn_what_callbacks_change_and_whether_to_stop():
    class Change(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 0.5
            self.model.stop_training = epoch == 1

    training = Training(["epoch"] * 2, callbacks=[Change()])
    training.train()
    first, second = training.answers
    assert (first.stop, second.stop) == (False, True)
    assert (first.optimizer.values.tolist(), first.weights.values.size) == ([0.5], 0)
