"""Over a network that loses, repeats and delays calls, every push is applied exactly once."""

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

from sparkkeras.parameter.exchange import ExchangePoint
from sparkkeras.parameter.service import ParameterClient, ParameterService, PayloadFormat
from sparkkeras.rpc.transport import RefusedError, TransportError, connect
from sparkkeras.weights import Flat
from tests.parameter.servers import a_ledger, a_store
from tests.rpc.test_transports import serving

VECTOR = np.zeros(8)
PAYLOAD_FORMAT = PayloadFormat.of(Flat(VECTOR, (np.array(0),)), [np.array(0.0)])
WORKERS = 3
EPOCHS = 5


class Killed(Exception):
    """The worker's process ends in the middle of a push."""


class BadNetwork:
    """A `Caller` with faults: a fifth each of the requests and replies is lost, and of the calls duplicated or delayed.

    Late copies arrive over separate connections, so they are out of order.

    Args:
        address: The address of the server.
        seed: The seed of the random faults.
        late: Copies of an earlier attempt's calls that are still in transit.
        dies: The number of the push, retries included, at which the worker's process ends.
    """

    def __init__(self, address, seed, late=(), dies=None):
        self._caller, self._address = connect(address), address
        self._chance = random.Random(seed)
        self._late = list(late)
        self._calls_left = dies
        self.lost_requests = self.lost_replies = self.duplicated = self.delayed = 0

    def call(self, name, fields, body=(), into=None):
        copy = (name, dict(fields), tuple(memoryview(bytes(part)) for part in body))
        kept = name == "lease"  # the push during which the last attempt died arrives after the new lease
        if len(self._late) > kept and self._chance.random() < 0.5:
            self.deliver(self._late.pop(self._chance.randrange(kept, len(self._late))))
        if self._hit():
            self._late.append(copy)
            self.delayed += 1
        if name == "update" and self._calls_left is not None:
            self._calls_left -= 1
            if not self._calls_left:
                self._late.insert(0, copy)
                raise Killed
        if self._hit():
            self.lost_requests += 1
            raise TransportError("the request was lost")
        if self._hit():
            self.duplicated += 1
            self.deliver(copy)
        answer = self._caller.call(name, fields, body, into)
        if self._hit():
            self.lost_replies += 1
            raise TransportError("the reply was lost")
        return answer

    def deliver(self, copy):
        """Deliver a copy, and ignore the reply."""
        with suppress(RefusedError):  # it arrived too late
            connect(self._address).call(*copy)

    def in_transit(self):
        """The copies that are still in transit."""
        late, self._late = self._late, []
        return late

    def close(self):
        self._caller.close()

    def _hit(self):
        return self._chance.random() < 0.2


def train(address, worker, attempt, network, batches):
    """Push integer deltas until the partition is done."""
    client = ParameterClient(address, PAYLOAD_FORMAT, worker, attempt, network)
    resumed = client.lease()
    epoch, batch = resumed.epoch, resumed.batch
    while epoch < EPOCHS:
        pulled = client.pull()
        batch += 1
        logs = {"loss": 1.0} if batch == batches else None
        point = ExchangePoint(epoch, batch, 1, 7, 0.1, 1.0, (np.array(float(batch)),), logs)
        client.push([delta(worker, epoch, batch)], [np.array(epoch * batches + batch)], pulled.version, point)
        if batch == batches:
            epoch, batch = epoch + 1, 0
    client.finish()


def delta(worker, epoch, batch):
    """A different delta for each push."""
    values = np.zeros(8)
    values[[0, 1, 2 + worker]] = 1, 1000 * epoch + batch, 1
    return values


@pytest.mark.parametrize("batches", [100, pytest.param(667, marks=pytest.mark.soak)])
def test_every_push_is_applied_once_over_a_bad_network_though_attempts_die(batches):
    """Copies of their calls arrive before the calls of the next attempt, and in between."""
    store = a_store(VECTOR, (np.array(0),), num_workers=WORKERS)
    ledger = a_ledger(
        [batches] * WORKERS,
        store,
        range(EPOCHS),
        lease_seconds=0.2,
        warmup_timeout=60.0,
        on_epoch=lambda epoch: store.snapshot(),
    )
    service = ParameterService(ledger, PAYLOAD_FORMAT)
    networks = []

    def work(worker):
        late = []
        for attempt, dies in enumerate([11, 1, 25, 2, 30, None]):
            number = 10 * attempt + worker
            network = BadNetwork(address, number, late, dies)
            networks.append(network)
            with suppress(Killed):
                train(address, worker, number, network, batches)
            network.close()
            late = network.in_transit()
        for copy in late:
            network.deliver(copy)

    with serving("inprocess", service, timeout=30.0) as address, ThreadPoolExecutor(WORKERS) as threads:
        list(threads.map(work, range(WORKERS)))
    unique = WORKERS * EPOCHS * batches
    pushes = itertools.product(range(WORKERS), range(EPOCHS), range(1, batches + 1))
    with store.snapshot() as snapshot:
        assert snapshot.weights.vector.tolist() == sum(delta(*push) for push in pushes).tolist()
        assert snapshot.weights.integer_variables[0] == EPOCHS * batches
    stats = service.stats("inprocess")
    assert stats.pushes == store.version == unique
    assert stats.duplicates > unique / 20
    assert stats.rejected_requests["lease lost"] > 0
    assert stats.steps == dict.fromkeys(range(WORKERS), EPOCHS * batches)
    assert ledger.rows == 7 * unique
    ends = [ledger.wait(0) for _ in range(EPOCHS)]
    assert [end.epoch for end in ends] == list(range(EPOCHS))
    assert all((report.rows, report.steps) == (7 * batches, batches) for end in ends for report in end.reports)
    for fault in ("lost_requests", "lost_replies", "duplicated", "delayed"):
        assert sum(getattr(network, fault) for network in networks) > WORKERS * batches / 2
