"""The service and the client, over the in-memory transport."""

import itertools
import json
import math
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest

from sparkkeras.errors import ConfigurationError, DivergenceError, DriverConnectionError
from sparkkeras.parameter.exchange import (
    MAX_LOG_VALUES,
    Directive,
    EvaluationReport,
    ExchangePoint,
    ParameterServerStats,
    PartitionPlan,
)
from sparkkeras.parameter.rules import Downpour
from sparkkeras.parameter.service import ArraySpecs, ParameterClient, ParameterService, PayloadFormat, is_finite
from sparkkeras.rpc.transport import Call, RefusedError, TransportError, connect
from sparkkeras.weights import Flat
from tests.parameter.servers import a_ledger, a_store
from tests.rpc.test_transports import serving as serve

VECTOR = np.array([1, 2, 3, 4], np.float32)  # the last one is a statistic
INTEGER_VARIABLES = (np.array(5, np.int64), np.array([1, 9], np.uint32))
METRICS = (np.array(0.5, np.float32), np.array([[1, 2]], np.float64))
PAYLOAD_FORMAT = PayloadFormat.of(Flat(VECTOR, INTEGER_VARIABLES), METRICS)


@dataclass(frozen=True)
class Picky(Downpour):
    """A custom rule that fails for some updates."""

    def apply(self, center, state, update, staleness):
        if update.sent[0] == 13:
            raise ZeroDivisionError("thirteen")
        center += update.sent


class Bench:
    """A service, its store and ledger, and clients."""

    def __init__(self, store, ledger, service, address):
        self.store, self.ledger, self.service, self.address = store, ledger, service, address

    def client(self, worker=0, attempt=None, caller=None, leased=True):
        client = ParameterClient(self.address, PAYLOAD_FORMAT, worker, 100 + worker if attempt is None else attempt, caller)
        if leased:
            assert client.lease() is not None
        return client

    @property
    def stats(self):
        return self.service.stats("inprocess")

    @property
    def values(self):
        with self.store.snapshot() as snapshot:
            return snapshot.weights.vector.tolist()


@contextmanager
def serving(*plans, rule=None, epochs=3, timeout=60.0):
    """A service whose partitions have three batches and validate by default."""
    plans = plans or [PartitionPlan(3, validates=True)] * 3
    store = a_store(VECTOR, INTEGER_VARIABLES, trainable=3, rule=rule, num_workers=len(plans))
    ledger = a_ledger(
        plans,
        store,
        range(epochs),
        num_concurrent=1,
        validates=lambda epoch: True,
        lease_seconds=600.0,
        warmup_timeout=600.0,
        on_epoch=lambda epoch: store.snapshot(),
    )
    service = ParameterService(ledger, PAYLOAD_FORMAT)
    with serve("inprocess", service, timeout=timeout) as address:
        yield Bench(store, ledger, service, address)


@pytest.fixture
def bench():
    with serving() as bench:
        yield bench


BODY = memoryview(bytes(PAYLOAD_FORMAT.update_bytes))
REPORT = EvaluationReport(METRICS, 3, {"loss": 0.5, "mine": np.array([1, 2])})
POINT = ExchangePoint(epoch=0, batch=1, steps=1, rows=4, learning_rate=0.1, seconds=1.5, metrics=METRICS)


def push(client, delta=(1, 1, 1, 4), *, integer_variables=INTEGER_VARIABLES, base=0, **point):
    return client.push([np.array(delta, np.float32)], integer_variables, base, replace(POINT, **point))[0]


def same(arrays, others):
    """Whether shapes, dtypes and values are equal."""
    pairs = list(zip(arrays, others, strict=True))
    return all(one.dtype == other.dtype and np.array_equal(one, other) for one, other in pairs)


# The format of bodies


def test_small_arrays_survive_packing_as_copies():
    """Also empty ones, and views."""
    views = np.array([[1, 2], [3, 4]], np.uint8).T, np.arange(10, dtype=np.float64)[::3]
    arrays = (np.zeros((0, 3), np.float32), np.ones((2, 3), np.float16), np.array(True), *views)
    kind = ArraySpecs.like(arrays)
    data = bytearray(kind.pack(arrays))
    assert len(data) == kind.nbytes == sum(array.nbytes for array in arrays)
    found = kind.unpack(memoryview(data))
    data[:] = bytes(len(data))
    assert same(found, arrays)
    assert all(array.flags.writeable for array in found)


def test_packing_converts_dtypes_and_rejects_other_shapes():
    kind = ArraySpecs.like([np.zeros(2, np.float32)])
    assert same(kind.unpack(memoryview(kind.pack([np.array([1, 2])]))), [np.array([1, 2], np.float32)])
    with pytest.raises(ValueError, match="'float32'"):
        kind.pack([np.zeros((1, 2))])


@pytest.mark.parametrize(
    ("values", "finite"),
    [([], True), ([1, -2], True), ([1, "nan"], False), (["inf", "-inf"], False), ([1e38, 1e38], True)],
)
def test_values_that_are_not_finite_are_found(values, finite):
    assert is_finite(np.array(values, np.float32)) is finite


# Pulls


def test_unchanged_weights_are_not_sent_again(bench):
    client = bench.client()
    first = client.pull()
    assert first.version == 0
    assert same([first.weights.vector, *first.weights.integer_variables], [VECTOR, *INTEGER_VARIABLES])
    sent = bench.stats.sent_bytes
    assert client.pull() is first
    assert (bench.stats.pulls, bench.stats.cached_pulls, bench.stats.sent_bytes) == (2, 1, sent)
    push(client)
    second = client.pull()
    assert np.shares_memory(second.weights.vector, first.weights.vector)
    assert second.version == 1
    assert second.weights.vector.tolist() == [2, 3, 4, 4]
    assert (bench.stats.pulls, bench.stats.cached_pulls, bench.stats.sent_bytes) == (3, 1, 2 * sent)


def test_a_push_brings_the_weights_after_it(bench):
    """Its vector may consist of parts, and of views with gaps."""
    client, other = bench.client(), bench.client(1)
    client.pull()
    push(other)
    parts = [np.array([1, 0, 2, 0, 3, 0], np.float32)[::2], np.array([4], np.float32), np.array([], np.float32)]
    for _ in range(2):  # the second time as if the first reply had been lost
        _, pulled = client.push(parts, INTEGER_VARIABLES, 0, POINT, pull=True)
        client._sequence -= 1
        assert pulled.version == 2
        assert pulled.weights.vector.tolist() == bench.values == [3, 5, 7, 4]
    assert (bench.stats.pulls, bench.stats.pushes, bench.stats.duplicates) == (3, 2, 1)


def test_a_pull_releases_its_snapshot(bench):
    client = bench.client()
    with bench.store.snapshot() as snapshot:
        memory = snapshot.weights.vector
    client.pull()
    client.pull()
    push(client)
    with bench.store.snapshot() as snapshot:
        assert np.shares_memory(snapshot.weights.vector, memory)


def test_a_client_gets_the_weights_of_an_epoch_to_evaluate():
    with serving(PartitionPlan(3, validates=True)) as bench:
        client = bench.client()
        assert push(client, batch=3, logs={}).evaluate == (0,)
        push(client, (10, 10, 10, 4), epoch=1)
        assert client.pull().weights.vector.tolist() == [12, 13, 14, 4]
        weights = client.snapshot(0)
        assert weights.vector.tolist() == [2, 3, 4, 4]
        assert same(weights.integer_variables, INTEGER_VARIABLES)
        assert client.pull().weights.vector.tolist() == [12, 13, 14, 4]  # though both are received into the same buffer
        assert client.report(0, REPORT).evaluate == ()
        with pytest.raises(DriverConnectionError, match="epoch 0"):
            client.snapshot(0)
        end = bench.ledger.wait(0)
        assert same(end.validation[0].metrics, METRICS)
        assert (end.validation[0].rows, end.validation[0].logs) == (3, {"loss": 0.5, "mine": [1, 2]})
        assert end.snapshot.weights.vector.tolist() == [2, 3, 4, 4]


# Pushes


def test_a_push_is_applied_with_all_its_fields(bench):
    client = bench.client()
    integer_variables = (np.array(7), np.array([2, 2], np.uint32))
    fields = {"batch": 2, "steps": 6, "rows": 48, "iterations": (16, 6)}
    directive = push(client, (1, 0, -1, 7), integer_variables=integer_variables, base=0, **fields)
    assert directive == Directive()
    with bench.store.snapshot() as snapshot:
        assert snapshot.weights.vector.tolist() == [2, 2, 2, 5]  # the mean over three workers: 4 + (7 - 4)/3
        assert same(snapshot.weights.integer_variables, (np.array(7), np.array([2, 9], np.uint32)))
    resumed = client.lease()
    assert (resumed.sequence, resumed.epoch, resumed.batch, resumed.iterations) == (1, 0, 2, (16, 6))
    assert same(resumed.metrics, METRICS)
    assert bench.ledger.rows == 48


def test_calls_whose_request_or_reply_is_lost_are_repeated_and_pushes_applied_once(bench, monkeypatch):
    """Also while another attempt has the lease."""
    other, client = bench.client(0, 1), bench.client(0, 2, leased=False)
    call, lost = client._caller.call, itertools.cycle(["request", "reply", "nothing"])

    def losing(*arguments):
        what = next(lost)
        if what == "request":
            raise TransportError("lost")
        answer = call(*arguments)
        if what == "reply":
            raise TransportError("lost")
        other.release()
        return answer

    monkeypatch.setattr(client._caller, "call", losing)
    client.lease()
    for batch in (1, 2, 3):
        push(client, batch=batch, logs={} if batch == 3 else None)
    client.finish()
    assert bench.values == [4, 5, 6, 4]
    assert (bench.stats.pushes, bench.stats.duplicates, bench.ledger.steps[0], bench.store.version) == (3, 3, 3, 3)


def test_a_record_survives_its_packing_without_long_vectors():
    logs = {"loss": np.float32(0.5), "each": np.ones(MAX_LOG_VALUES), "long": np.ones(MAX_LOG_VALUES + 1)}
    point = replace(POINT, logs=logs)
    call = Call("update", json.loads(json.dumps(point.pack())), memoryview(b""), None)
    received = ExchangePoint.unpack(call.field, METRICS)
    assert received == replace(point, logs={"loss": 0.5, "each": [1.0] * MAX_LOG_VALUES, "long": None})


@pytest.mark.parametrize(
    ("values", "logs", "words"),
    [
        ((np.nan, 0, 0, 0), None, "update is not finite"),
        ((1, 1, 1, 4), {"loss": np.inf}, "loss is not finite"),
        ((1, 1, 1, 4), {"loss": np.array([1.0, np.nan])}, "loss is not finite"),
    ],
)
def test_an_update_or_a_loss_that_is_not_finite_ends_training(bench, values, logs, words):
    other = bench.client(0)
    with pytest.raises(DivergenceError, match=f"epoch 2 on worker 2: its {words}"):
        push(bench.client(2), values, epoch=1, logs=logs)
    with pytest.raises(DivergenceError):
        push(other, (np.nan, 0, 0, 0))
    assert isinstance(bench.service.failure, DivergenceError)
    assert "worker 2" in str(bench.service.failure)
    assert (bench.values, bench.store.version, bench.stats.pushes, bench.ledger.rows) == (VECTOR.tolist(), 0, 0, 0)
    assert other.renew().stop
    assert bench.client(1, leased=False).lease() is None
    assert bench.stats.rejected_requests == {"diverged": 2}


def test_metrics_may_be_nan_and_the_loss_of_a_custom_train_step_may_be_a_vector(bench):
    client = bench.client()
    push(client, metrics=(np.array(np.nan, np.float32), METRICS[1]))
    for epoch, size in enumerate((2, MAX_LOG_VALUES + 1)):
        push(client, epoch=epoch, logs={"loss": np.ones(size)})
    assert (bench.store.version, bench.service.failure) == (3, None)


def test_a_custom_rule_that_fails_ends_training_with_its_message():
    with serving(rule=Picky()) as bench:
        one, two = bench.client(0), bench.client(1)
        with pytest.raises(DriverConnectionError, match=r"Picky\(\) failed .*: thirteen"):
            push(one, (13, 0, 0, 4))
        assert bench.stats.pushes == 0
        assert isinstance(bench.service.failure, ConfigurationError)
        assert "thirteen" in str(bench.service.failure)
        assert two.renew().stop


# Invalid calls


def fields(lease, sequence=1, **header):
    return {"worker": 0, "lease": lease, "sequence": sequence, "base": 0} | POINT.pack() | header


def rejected(bench, kind, name, fields, body=()):
    with pytest.raises(RefusedError) as caught:
        connect(bench.address).call(name, fields, body)
    assert caught.value.kind == kind
    return str(caught.value)


def test_an_update_with_an_invalid_field_or_a_short_body_is_not_applied(bench):
    client = bench.client()
    for invalid in ({"logs": 7}, {"rows": "many"}, {"steps": math.inf}, {"base": 1}):
        rejected(bench, "malformed", "update", fields(client._lease, **invalid), (BODY,))
    message = rejected(bench, "malformed", "update", fields(client._lease), (BODY[:16],))
    assert f"{PAYLOAD_FORMAT.update_bytes} bytes, received 16" in message
    assert (bench.values, bench.store.version, bench.ledger.rows) == (VECTOR.tolist(), 0, 0)
    push(client)


def test_the_limits_of_the_bodies_of_calls(bench):
    limits = {"update": PAYLOAD_FORMAT.update_bytes, "report": PAYLOAD_FORMAT.metrics.nbytes}
    others = ("health", "lease", "renew", "parameters", "finish", "release")
    assert {name: bench.service.limit(name) for name in (*limits, *others)} == limits | dict.fromkeys(others, 0)


def test_an_unknown_call_and_one_without_its_fields_are_rejected(bench):
    assert "'delete'" in rejected(bench, "unknown", "delete", {})
    assert "'worker' of the call 'lease'" in rejected(bench, "malformed", "lease", {})
    push(bench.client())


def test_a_fault_of_the_server_is_not_taken_for_an_invalid_call(bench, caplog, monkeypatch):
    lease = bench.client()._lease

    def fail(*_):
        raise KeyError("lost")

    monkeypatch.setattr(bench.ledger, "directive", fail)
    assert "'renew' failed: KeyError" in rejected(bench, "failed", "renew", fields(lease))
    assert "in fail" in caplog.text, "the traceback"


# Statistics


def test_the_statistics_of_a_training():
    with serving(PartitionPlan(3), PartitionPlan(3)) as bench:
        one, two = bench.client(0), bench.client(1)
        for client in (one, two, two):
            client.pull()
        push(one, base=0)
        push(two, base=0, steps=3)
        push(two, base=0, steps=2)
        one.pull()
        stats = bench.service.stats("http")
    assert stats.transport == "http"
    assert (stats.pulls, stats.cached_pulls, stats.pushes, stats.duplicates) == (4, 1, 3, 0)
    assert stats.staleness == {0: 1, 1: 1, 2: 1}
    assert (stats.mean_staleness, stats.max_staleness) == (1.0, 2)
    assert stats.steps == {0: 1, 1: 5}
    assert stats.received_bytes == 3 * PAYLOAD_FORMAT.update_bytes
    assert stats.sent_bytes == 3 * PAYLOAD_FORMAT.weights_bytes
    assert stats.rejected_requests == {}
    assert 0 < stats.seconds < 10
    assert stats.updates_per_second == 3 / stats.seconds


def test_statistics_without_updates():
    stats = ParameterServerStats()
    assert (stats.updates_per_second, stats.mean_staleness, stats.max_staleness) == (0, 0, 0)


# Renewing a lease


def lease_threads():
    return [thread for thread in threading.enumerate() if thread.name == "sparkkeras-lease"]


def test_renewing_ends_when_the_lease_is_lost(bench):
    client = bench.client(0, 1)
    with client.renewing(0.001):
        (thread,) = lease_threads()
        bench.ledger.release(0, client._lease)
        thread.join(120)
        assert not thread.is_alive()
    with pytest.raises(DriverConnectionError, match="taken over"):
        client.renew()


def test_renewing_goes_on_after_an_outage_that_is_longer_than_the_timeout(monkeypatch):
    """As when it begins and ends within an epoch, in which the worker makes no call."""
    with serving(timeout=0.01) as bench:
        client = bench.client(0, 1)
        lease, call, failed = bench.ledger._leases.of(0), type(client._caller).call, []

        def fail(caller, name, *arguments):
            failed.append(name)
            raise TransportError("the network is down")

        monkeypatch.setattr(type(client._caller), "call", fail)
        with client.renewing(0.001):
            assert len(lease_threads()) == 1
            while len(failed) < 50:
                time.sleep(0.001)
            before, limit = lease.expires, time.monotonic() + 60
            monkeypatch.setattr(type(client._caller), "call", call)
            while lease.expires <= before:
                assert time.monotonic() < limit, "the lease was not renewed"
                time.sleep(0.001)
        assert lease_threads() == []
        assert bench.ledger.lease(0, 2) == "wait"
        push(client)


# A server that has stopped


def test_release_ignores_a_rejection_and_a_server_that_has_stopped():
    with serving(timeout=60.0) as bench:
        client = bench.client()
        bench.client(9, leased=False).release()
        assert bench.stats.rejected_requests == {"unknown": 1}
    started = time.monotonic()
    client.release()
    client.__exit__(None, None, None)
    assert time.monotonic() - started < 30
