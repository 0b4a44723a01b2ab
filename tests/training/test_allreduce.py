"""All-reduce training without processes: what the driver changes, rows of several partitions, arguments that do not fit."""

import pickle
from dataclasses import replace
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
from sparkkeras.data.values import DelayedValue
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
    np.testing.assert_array_equal(applied.vector, after.vector)
    assert applied.integer_variables == after.integer_variables
    assert len(change.values) == size
    np.testing.assert_array_equal(before.vector, [1, 2, 3, 4])


def block(start, stop):
    return from_arrays(np.arange(start, stop, dtype=np.float32).reshape(-1, 1), np.arange(start, stop, dtype=np.int32), None)


def plan(rows, spec):
    return RankPlan(range(1), (tuple(range(len(rows))),), rows, spec, 10, None, 1)


def test_a_rank_trains_and_validates_on_the_rows_of_several_partitions(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    monkeypatch.setattr(LocalHosts, "size", lambda hosts: 1)
    given, dataset = Model(optimizer="sgd"), partitions(10, None, 15)
    split = TrainValidationSplit.split([10, 0, 15], 0.2)
    validation = Validation(dataset, BatchOptions(BATCH), 1, split.validation_spans)
    history, _ = fit(given, dataset, "allreduce", epochs=2, split=split, validation=validation)
    found, trained, held_out = weights_of(given.model), [*range(8), *range(10, 22)], [8, 9, 22, 23, 24]
    arguments = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
    arguments["validation_data"] = X[held_out], Y[held_out]
    expected = given.reset().fit(X[trained], Y[trained], **arguments).history
    assert close(given.model, found)
    assert history.history["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-5)
    assert not list(tmp_path.glob("*/joined-*"))


def test_the_batches_of_a_rank_are_spread_over_the_rounds():
    in_rounds = replace(plan((40, 13), block(0, 1).spec), window=4)  # of the ten steps of another rank
    starts = (0, 4, 8)
    assert [in_rounds.own_batches(start, 40, 4) for start in starts] == [(0, 4), (4, 8), (8, 10)]
    assert [in_rounds.own_batches(start, 13, 4) for start in starts] == [(0, 1), (1, 3), (3, 4)]
    assert [in_rounds.own_batches(start, 80, 4) for start in starts] == [(0, 4), (4, 8), (8, 10)]  # steps_per_epoch=10


def test_streams_are_read_in_turn():
    streams = Streams((LocalStream((block(0, 2), block(2, 3))), LocalStream((block(3, 5),))))
    assert [each.arrays[1].tolist() for each in streams.blocks(0, 0)] == [[0, 1], [3, 4], [2]]


class Unpickled:
    """Counts how often it is unpickled."""

    count = 0

    def __setstate__(self, state):
        Unpickled.count += 1

    def __getstate__(self):
        return {"a": 1}


def test_a_delayed_value_is_unpickled_when_it_is_used():
    delayed = pickle.loads(pickle.dumps(DelayedValue(Unpickled())))
    again = pickle.loads(pickle.dumps(delayed))
    assert Unpickled.count == 0
    assert delayed.value is delayed.value
    assert isinstance(again.value, Unpickled)
    assert Unpickled.count == 2


def test_the_default_frequency_is_that_of_the_mode():
    spark_model = SparkModel(classifier(), num_workers=2)
    assert spark_model.frequency == "epoch"
    spark_model.mode = "allreduce"
    assert spark_model.frequency == 1
    assert repr(spark_model) == "SparkModel('classifier', mode='allreduce', num_workers=2)"
    assert spark_model.get_config()["frequency"] is None
    assert SparkModel(classifier(), "allreduce", "batch").frequency == 1
    assert SparkModel(classifier(), **spark_model.get_config()).get_config() == spark_model.get_config()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"frequency": 5}, "frequency=5 does not fit mode='allreduce', which averages the gradients of every batch"),
        ({"rule": "average"}, "rule='average' does not apply to mode='allreduce'"),
        ({"gradient_dtype": "float8"}, "gradient_dtype='float8' is not known. Known: 'bfloat16', 'float16'"),
        ({"max_restarts": -1}, "max_restarts=-1: expected a whole number of at least 0"),
        ({"parameter_server_mode": "http"}, "does not fit mode='allreduce', which has no .* use mode='asynchronous'"),
        ({"server_options": ParameterServerOptions(host="a")}, r"server_options=.*host='a'.* does not fit mode='allreduce'"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        SparkModel(classifier(), "allreduce", **arguments)


def test_arguments_of_another_mode_are_checked_in_fit():
    spark_model = SparkModel(classifier(), frequency=5)
    spark_model.mode = "allreduce"
    with pytest.raises(ConfigurationError, match="frequency=5 does not fit mode='allreduce'"):
        spark_model.fit(np.zeros((4, 64)), np.zeros(4))
    for arguments in ({"gradient_dtype": "float16"}, {"max_restarts": 3}):
        spark_model = SparkModel(classifier(), "allreduce", **arguments)
        spark_model.mode = "synchronous"
        words = "does not fit mode='synchronous', .* leave it out, or use mode='allreduce'"
        with pytest.raises(ConfigurationError, match=words):
            spark_model.fit(np.zeros((4, 64)), np.zeros(4))
        with pytest.raises(ConfigurationError, match="does not fit mode='hogwild'"):
            SparkModel(classifier(), "hogwild", **arguments)
    assert SparkModel(classifier(), parameter_server_mode="http", port=4000).port == 4000  # as in Elephas


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="XLA compiles the collectives of JAX")
def test_training_without_xla_is_a_warning_on_the_driver():
    check_all_reduce(classifier())
    with pytest.warns(UserWarning, match="'classifier' was compiled with jit_compile=True, .* train it without XLA"):
        check_all_reduce(classifier(jit_compile=True))


def test_a_loss_that_is_no_mean_over_rows_is_an_error():
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=0)
    with pytest.raises(ModelError, match="ignore_class=0: it divides by the number of labels of a batch"):
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
    with pytest.raises(ModelError, match=rf"compares the rows of a batch with each other.* use {instead}"):
        check_mean_over_rows(classifier(loss=loss))
    check_mean_over_rows(classifier(loss=keras.losses.Dice(axis=1)))


def test_a_mask_that_reaches_the_loss_is_an_error():
    model = Model(optimizer="sgd").model
    model._compile_loss._sparkkeras_mask = True
    with pytest.raises(ModelError, match="an output with a mask"):
        train(SimpleNamespace(mode="allreduce", model=model))


class Allocates:
    """A SparkContext with dynamic allocation."""

    def getConf(self):
        return {"spark.dynamicAllocation.enabled": "true"}


def test_dynamic_allocation_is_an_error_before_data_is_read(monkeypatch):
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", Allocates())
    with pytest.raises(ConfigurationError, match=r'SPARK-24942\): set it to false .* or use mode="synchronous"'):
        SparkModel(classifier(), "allreduce").fit(np.zeros((4, 64)), np.zeros(4))


class Busy:
    """A cluster of 4 slots, 3 of which another job uses."""

    is_local, slots, free_slots = True, 4, 1


def test_training_waits_for_slots_that_are_not_free():
    assert all_slots(Busy(), None) == all_slots(Busy(), 2) == 4
    with holding_slots(1):
        assert all_slots(Busy(), 3) == 3


def test_more_workers_than_slots_are_an_error():
    with pytest.raises(ConfigurationError, match=r"num_workers=7, but Spark has 4 slots, and .* master local\[7\]"):
        all_slots(Busy(), 7)
    with holding_slots(1), pytest.raises(ConfigurationError, match="num_workers=4, but Spark has 3 slots besides those of"):
        all_slots(Busy(), 4)
    with holding_slots(4), pytest.raises(ConfigurationError, match=r"holds all slots \(4\)"):
        all_slots(Busy(), 1)


RAISED = WorkerError("rank 0 of 2 failed: ValueError: on purpose.", "Traceback ...\nValueError: on purpose.\n")
KILLED = WorkerError("rank 1 of 2 failed: its process was killed by SIGKILL.")


class Training(_RankTraining):
    """The decisions of the driver for ranks that do what a test says: finish epochs (``"epoch"``), and fail.

    Attributes:
        starts: For each start of the ranks, the first epoch, the number of ranks, and whether rows are sent to them.
        firsts: For each start, the steps of this epoch that are not trained again.
    """

    report_is_finite = True

    def __init__(self, *groups, slots=2, epochs=3, max_restarts=3, callbacks=(), recorder=None):
        model = Model(optimizer="sgd").model
        more = {"max_restarts": max_restarts, "recorder": recorder or Recorder()}
        run = stored_run([model], partitions(8, 8), FitOptions(4), given={"epochs": epochs}, **more)
        run.callbacks = DriverCallbacks(callbacks, model, epochs, 2, run.events)
        run.callbacks.on_train_begin()
        super().__init__(run, range(epochs))
        self.groups, self.slots = iter(groups), slots
        self.starts, self.firsts, self.answers = [], [], []

    def _size(self):
        return self.slots if isinstance(self.slots, int) else next(self.slots)

    def _run_group(self, plan, moves_rows):
        size = len(plan.partitions)
        self.starts.append((plan.epochs.start, size, moves_rows))
        self.firsts.append(plan.first)
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


def test_training_continues_after_failures_from_the_last_epoch():
    begun = []
    training = Training(
        ["epoch", KILLED],
        [KILLED],
        ["epoch", "epoch"],
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, _: begun.append(epoch))],
    )
    before = training._state.weights.vector
    with pytest.warns(UserWarning, match="from the beginning of epoch 2 .restart [12] of at most 3.* SIGKILL") as caught:
        training.train()
    assert [each.category for each in caught if each.category is not DeprecationWarning] == [UserWarning] * 2
    assert training.starts == [(0, 2, False), (1, 2, False), (1, 2, False)]
    assert begun == [1, 2]
    assert [entry["epoch"] for entry in training._run.histories] == [0, 0, 1, 1, 2, 2]
    np.testing.assert_array_equal(training._state.weights.vector, before + 3)


@pytest.mark.parametrize(
    ("groups", "max_restarts", "message"),
    [
        ([[KILLED]], 0, "killed by SIGKILL.$"),
        ([["epoch", KILLED], [KILLED], [KILLED]], 2, r"killed by SIGKILL. \(after 2 restarts, max_restarts=2\)$"),
        ([[KILLED], ["epoch"] * 3 + [RAISED]], 3, r"on purpose. \(after 1 restart, max_restarts=3\)$"),
        ([[RAISED], ["epoch", RAISED], [RAISED]], 3, r"on purpose. \(for the second time in epoch 2\)$"),
    ],
    ids=["none", "limited", "an error after the last epoch", "the same error in the same epoch"],
)
@pytest.mark.filterwarnings("ignore:training continues")
def test_a_failure_is_an_error_without_further_restarts(groups, max_restarts, message):
    training = Training(*groups, max_restarts=max_restarts)
    with pytest.raises(WorkerError, match=message):
        training.train()
    assert len(training.starts) == len(groups)


def never_met(port):
    error = f"sparkkeras.worker.collectives.group.NeverMetError: the process of rank 1 (worker2:{port}) did not join"
    return WorkerError(f"rank 0 of 2 failed: {error}. The traceback:", f"Traceback (most recent call last):\n{error}\n")


@pytest.mark.filterwarnings("ignore:training continues")
def test_a_group_that_never_met_is_tried_once_more():
    training = Training([never_met(36000)], [never_met(36001)])  # each group has ports of its own
    with pytest.raises(WorkerError, match=r"worker2:36001.* did not join.*\(for the second time in epoch 1\)"):
        training.train()
    assert len(training.starts) == 2


def test_a_worker_that_is_lost_after_the_last_epoch_is_no_error():
    training = Training(["epoch"] * 3 + [KILLED])
    with pytest.warns(UserWarning, match="after the last epoch, rank 1 of 2 failed"):
        training.train()
    assert [answer.stop for answer in training.answers] == [False, False, True]


def test_too_few_slots_after_a_failure_are_an_error_with_the_failure():
    training = Training([KILLED], [ClusterError("Spark has only 1 slot left")])
    with pytest.warns(UserWarning, match="restart 1"), pytest.raises(ClusterError, match="only 1 slot left") as caught:
        training.train()
    assert caught.value.__cause__ is KILLED


def test_divergence_names_a_worker_only_if_its_own_rows_are_known_to_cause_it():
    def report(worker, loss, is_finite):
        return Report(worker, 8, 2, 1.0, 0.1, {"loss": loss}, is_finite)

    with pytest.raises(DivergenceError, match=r"^training diverged in epoch 3: the loss is nan.*extreme values in the data"):
        check_finite([report(0, np.nan, False), report(1, np.nan, False)], 2, "epoch", in_step=True)
    with pytest.raises(DivergenceError, match=r"^training diverged in epoch 3 on worker 1: the loss is nan.*in its rows"):
        check_finite([report(0, 1.0, True), report(1, np.nan, False)], 2, "epoch", in_step=True)


def test_divergence_ends_training_without_a_restart():
    training = Training(["epoch"])
    training.report_is_finite = False
    with pytest.raises(DivergenceError, match=r"^training diverged in epoch 1: "):
        training.train()
    assert len(training.starts) == 1


def test_an_error_that_would_occur_again_is_raised_at_once():
    traceback = "Traceback (most recent call last):\nsparkkeras.errors.DataError: row 3 has no label\n"
    training = Training([WorkerError("rank 0 of 2 failed: DataError", traceback)])
    with pytest.raises(DataError, match="row 3 has no label"):
        training.train()
    assert len(training.starts) == 1


def test_training_continues_after_the_driver_was_not_reached():
    """It may have been stopped for longer than workers wait; if they never reach it, the error is theirs."""
    text = "DriverConnectionError: rank 1 received no reply from the driver"
    traceback = f"Traceback (most recent call last):\nsparkkeras.errors.{text}\n"
    unreached = WorkerError(f"rank 1 of 2 failed: {text}", traceback)
    training = Training(["epoch", unreached], ["epoch", "epoch"])
    with pytest.warns(UserWarning, match="from the beginning of epoch 2.*rank 1 received no reply from the driver"):
        training.train()
    training = Training([unreached], [unreached])
    with pytest.warns(UserWarning, match="restart 1"), pytest.raises(DriverConnectionError, match="received no reply"):
        training.train()


def test_training_continues_with_as_many_workers_as_there_are_slots():
    training = Training(["epoch", KILLED], ["epoch", KILLED], ["epoch"], slots=iter([2, 1, 2]))
    with pytest.warns(UserWarning, match="training continues"):
        training.train()
    assert training.starts == [(0, 2, False), (1, 1, False), (2, 2, False)]
    assert [entry["rows"] for entry in training._run.histories] == [8, 8, 16, 8, 8]


class InRounds(Recorder):
    """Asks for rounds of one step."""

    every_steps = 1


def test_training_continues_from_the_last_round():
    training = Training(["epoch", KILLED], ["epoch"] * 3, epochs=2, recorder=InRounds())
    before = training._state.weights.vector
    with pytest.warns(UserWarning, match=r"continues from epoch 1, after 1 batch \(restart 1 of at most 3\)"):
        training.train()
    assert (training.starts, training.firsts) == ([(0, 2, False)] * 2, [0, 1])
    assert [answer is None for answer in training.answers] == [True, False, True, False]
    assert [entry["epoch"] for entry in training._run.histories] == [0] * 2 + [1] * 2
    np.testing.assert_array_equal(training._state.weights.vector, before + 4)


def test_other_workers_begin_the_epoch_again():
    training = Training(["epoch", KILLED], ["epoch"] * 4, epochs=1, slots=iter([2, 1]), recorder=InRounds())
    before = training._state.weights.vector
    with pytest.warns(UserWarning, match="restart 1"):
        training.train()
    assert (training.starts, training.firsts) == ([(0, 2, False), (0, 1, False)], [0, 0])
    assert sum(entry["rows"] for entry in training._run.histories) == 16 * 4
    np.testing.assert_array_equal(training._state.weights.vector, before + 4)


def test_rows_are_sent_to_workers_that_do_not_find_them():
    training = Training([RowsMissingError()], ["epoch"] * 3)
    training.train()
    assert training.starts == [(0, 2, False), (0, 2, True)]
    with pytest.raises(ClusterError, match="removed from Spark's temporary folder"):
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
