"""The shared weights: snapshots, updates, and many threads at the same time."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest

from sparkkeras.errors import ConfigurationError
from sparkkeras.parameter.exchange import ExchangePoint
from sparkkeras.parameter.store import MAX_SPARES, WeightChange
from sparkkeras.weights import Flat
from tests.parameter.servers import a_store


@dataclass(frozen=True)
class Momentum:
    """A custom rule with a state: ``v = v/2 + d``, ``C += v``."""

    modes = frozenset({"asynchronous", "hogwild"})

    def init(self, center):
        return {"velocity": np.zeros_like(center)}

    def exchange(self, local, base, center, window):
        return local - base, center + local - base

    def apply(self, center, state, update, staleness):
        state["velocity"] *= 0.5
        state["velocity"] += update.sent
        center += state["velocity"]


class Returning(Momentum):
    """A custom rule whose `apply` returns the result instead of working in place."""

    def apply(self, center, state, update, staleness):
        return center + update.sent


class Recording(Momentum):
    """Records its arguments."""

    def __init__(self):
        object.__setattr__(self, "updates", [])

    def apply(self, center, state, update, staleness):
        self.updates.append((update, staleness))


def apply(store, sent, base=None, integer_variables=(), **fields):
    fields = {"epoch": 0, "batch": 1, "steps": 1, "rows": 4, "learning_rate": 0.1, "seconds": 1.0} | fields
    base = store.version if base is None else base
    return store.apply(Flat(np.asarray(sent, np.float32), integer_variables), base, ExchangePoint(**fields))


def values(store):
    with store.snapshot() as snapshot:
        return snapshot.weights.vector.tolist()


@pytest.fixture(params=[True, False], ids=["locked", "hogwild"])
def locked(request):
    return request.param


# Snapshots


def test_a_held_snapshot_never_changes(locked):
    store = a_store([1, 2], locked=locked)
    held = [store.snapshot()]
    for _ in range(4):
        apply(store, [1, 1])
        held.append(store.snapshot())
    assert [snapshot.weights.vector.tolist() for snapshot in held] == [[1 + n, 2 + n] for n in range(5)]
    assert [snapshot.version for snapshot in held] == [0, 1, 2, 3, 4]


def test_an_update_copies_the_weights_once_for_a_reader():
    store = a_store([1, 2])
    with store.snapshot() as before:
        memory = before.weights.vector
    apply(store, [1, 1])
    reader = store.snapshot()
    assert np.shares_memory(reader.weights.vector, memory), "no reader, no copy"
    apply(store, [1, 1])
    with store.snapshot() as first:
        memory = first.weights.vector
    apply(store, [1, 1])
    with store.snapshot() as second:
        assert np.shares_memory(second.weights.vector, memory)
        assert not np.shares_memory(second.weights.vector, reader.weights.vector)
        assert second.weights.vector.tolist() == [4, 5]


def test_a_vector_that_is_still_read_is_not_reused():
    store = a_store([1, 2])
    one, other = store.snapshot(), store.snapshot()
    apply(store, [1, 1])
    one.release()
    with store.snapshot():
        apply(store, [1, 1])
    assert other.weights.vector.tolist() == [1, 2]
    assert values(store) == [3, 4]


def test_only_a_few_spare_vectors_are_kept():
    store = a_store([1, 2])
    held = []
    for _ in range(MAX_SPARES + 5):
        held.append(store.snapshot())
        apply(store, [1, 1])
    for snapshot in held:
        snapshot.release()
    assert len(store._spares) == MAX_SPARES


def test_releasing_twice_does_no_harm(locked):
    store = a_store([1, 2], locked=locked)
    other, snapshot = store.snapshot(), store.snapshot()
    snapshot.release()
    snapshot.release()
    apply(store, [1, 1])
    assert other.weights.vector.tolist() == [1, 2]
    assert values(store) == [2, 3]


def test_the_given_weights_do_not_change(locked):
    given, sent = np.ones(3, np.float32), np.ones(3, np.float32)
    store = a_store(given, trainable=2, locked=locked)
    apply(store, sent)
    sent[:] = 9
    assert given.tolist() == [1, 1, 1]
    assert values(store) == [2, 2, 1]


# Updates


def test_updates_count_versions_and_staleness(locked):
    store = a_store([1, 2], locked=locked)
    results = [(apply(store, [1, 1], base), store.version) for base in (0, 0, 1, 3, 0)]
    assert results == [(0, 1), (1, 2), (1, 3), (0, 4), (4, 5)]


def test_the_rule_gets_the_window_and_the_trainable_part(locked):
    rule = Recording()
    store = a_store([1, 2, 3], trainable=2, rule=rule, num_workers=4, locked=locked)
    apply(store, [7, 8, 3], base=-2, steps=6, rows=48, learning_rate=0.25)
    ((update, staleness),) = rule.updates
    assert update.sent.tolist() == [7, 8]
    assert (update.steps, update.rows, update.learning_rate, update.num_workers) == (6, 48, 0.25, 4)
    assert staleness == 2


@pytest.mark.parametrize("trainable", [0, 1])
def test_statistics_are_averaged(locked, trainable):
    store = a_store([0, 8, -8], trainable=trainable, num_workers=4, locked=locked)
    apply(store, [0, 16, 0])
    assert values(store)[1:] == [10, -6]  # C += (W - C)/4
    apply(store, [0, 10, 2])
    assert values(store)[1:] == [10, -4]


def test_the_largest_of_each_counter_is_kept(locked):
    def integers(steps, seeds):
        return np.array(steps, np.int64), np.array(seeds, np.uint32)

    store = a_store([1, 2], integer_variables=integers(5, [1, 9]), locked=locked)
    before = store.snapshot()
    apply(store, [0, 0], integer_variables=integers(3, [4, 4]))
    apply(store, [0, 0], integer_variables=integers(8, [2, 2]))
    steps, seeds = store.snapshot().weights.integer_variables
    assert (steps.tolist(), seeds.tolist()) == (8, [4, 9])
    assert (steps.dtype, seeds.dtype) == (np.int64, np.uint32)
    assert [each.tolist() for each in before.weights.integer_variables] == [5, [1, 9]]


def test_float64_weights_stay_float64(locked):
    store = a_store(np.full(3, 1.0), trainable=2, locked=locked)
    store.apply(Flat(np.full(3, 2.0**-40)), 0, ExchangePoint(0, 1, 1, 1, 0.1, 1.0))
    assert values(store) == [1 + 2.0**-40, 1 + 2.0**-40, 2.0**-40]


# The state of the rule


def test_a_state_that_fits_is_copied(locked):
    velocity = np.array([2, 4], np.float32)
    store = a_store([0, 0], rule=Momentum(), state={"velocity": velocity}, locked=locked)
    before = store.rule_state()
    apply(store, [1, 1])
    assert values(store) == [2, 3]
    assert store.rule_state()["velocity"].tolist() == [2, 3]
    assert before["velocity"].tolist() == velocity.tolist() == [2, 4]


def test_a_state_that_does_not_fit_is_replaced():
    """As that of other weights."""
    store = a_store([0, 0, 7], trainable=2, rule=Momentum(), state={"velocity": np.ones(3, np.float32)})
    assert {name: value.tolist() for name, value in store.rule_state().items()} == {"velocity": [0, 0]}
    apply(store, [1, 2, 7])
    assert values(store) == [1, 2, 7]
    assert store.rule_state()["velocity"].tolist() == [1, 2]


def test_a_rule_that_returns_its_result_is_reported():
    store = a_store([1, 2], rule=Returning())
    with pytest.raises(ConfigurationError, match="Returning.*apply: .* in place"):
        apply(store, [1, 1])
    assert values(store) == [1, 2]


# Many threads


class Slow(Momentum):
    """Changes one half, and after a while the other."""

    def __init__(self):
        object.__setattr__(self, "between", threading.Event())

    def apply(self, center, state, update, staleness):
        center[0] += 1
        self.between.set()
        time.sleep(0.05)
        center[1] += center[0]


@pytest.mark.parametrize("read", [False, True], ids=["in place", "in a copy"])
def test_snapshots_and_other_updates_wait_for_a_locked_update(read):
    rule = Slow()
    store = a_store([0, 0], rule=rule)
    reader = store.snapshot()
    if not read:
        reader.release()
    with ThreadPoolExecutor() as threads:
        applying = [threads.submit(apply, store, [0, 0]) for _ in range(2)]
        rule.between.wait()
        with store.snapshot() as snapshot:
            found = snapshot.version, snapshot.weights.vector.tolist()
        for each in applying:
            each.result()
    assert found in [(1, [1, 1]), (2, [2, 3])]
    assert values(store) == [2, 3]


def test_hogwild_updates_do_not_wait_for_each_other():
    meeting = threading.Barrier(2, timeout=120)

    class Meeting(Momentum):
        """Applies an update only while another one is being applied."""

        def apply(self, center, state, update, staleness):
            meeting.wait()
            center[int(update.sent[0])] += 1

    store = a_store([0, 0], rule=Meeting(), locked=False)
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda sent: apply(store, sent), [[0, 0], [1, 1]]))
    assert (values(store), store.version) == ([1, 1], 2)


# Changes of the driver


def test_a_change_is_applied_to_what_the_weights_have_become(locked):
    store = a_store([1, 2, 3], locked=locked)
    change = WeightChange.between(np.array([1, 2, 3], np.float32), np.array([1, 0.1, 4], np.float32))
    with store.snapshot() as before:
        apply(store, [0, 0, 10])
        assert store.change(change) == 2
        assert before.weights.vector.tolist() == [1, 2, 3]
    with store.snapshot() as after:
        assert after.version == 2
        assert after.weights.vector.tolist() == np.array([1, 0.1, 14], np.float32).tolist()
