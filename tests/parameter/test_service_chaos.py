"""A network that loses, repeats and delays: every push is applied exactly once all the same."""

import itertools
import random
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from sparkkeras.parameter.ledger import Ledger, PartitionPlan
from sparkkeras.parameter.rules import Downpour
from sparkkeras.parameter.service import Contents, ParameterClient, ParameterService
from sparkkeras.parameter.store import Store
from sparkkeras.rpc.transport import Endpoint, RefusedError, TransportError, connect, make_transport
from sparkkeras.rpc.wire import Secret
from sparkkeras.weights import Flat

VECTOR = np.zeros(8)
CONTENTS = Contents.of(Flat(VECTOR, (np.array(0),)), [np.array(0.0)])
WORKERS = 3
EPOCHS = 5


class Killed(Exception):
    """The worker's process ends in the middle of a push."""


class BadNetwork:
    """A `Caller` of whose calls a fifth each is lost, answered in vain, delivered twice, and delivered again much later.

    Late copies come over connections of their own, so no order is kept.

    Args:
        address: As of any caller.
        seed: Of what is left to chance.
        late: Copies of an earlier attempt that are still on their way.
        dies: At which call to push, counted with those that are tried again, the worker's process ends.
    """

    def __init__(self, address, seed, late=(), dies=None):
        self._caller, self._address = connect(address), address
        self._chance = random.Random(seed)
        self._late = list(late)
        self._calls_left = dies
        self.lost = self.unheard = self.twice = self.delayed = 0

    def call(self, name, fields, body=(), into=None):
        kept = (name, dict(fields), tuple(memoryview(bytes(part)) for part in body))
        if self._late and self._chance.random() < 0.5:
            self.deliver(self._late.pop(self._chance.randrange(len(self._late))))
        if self._hit():
            self._late.append(kept)
            self.delayed += 1
        if name == "update" and self._calls_left is not None:
            self._calls_left -= 1
            if not self._calls_left:
                self._late.append(kept)
                raise Killed
        if self._hit():
            self.lost += 1
            raise TransportError("the request was lost")
        if self._hit():
            self.twice += 1
            self.deliver(kept)
        answer = self._caller.call(name, fields, body, into)
        if self._hit():
            self.unheard += 1
            raise TransportError("the answer was lost")
        return answer

    def deliver(self, kept):
        """Deliver a copy, whose answer nobody hears."""
        with suppress(RefusedError):  # it came too late
            connect(self._address).call(*kept)

    def taken(self):
        """What is still on its way."""
        late, self._late = self._late, []
        return late

    def close(self):
        self._caller.close()

    def _hit(self):
        return self._chance.random() < 0.2


def train(address, worker, attempt, network, batches):
    """Push deltas of whole numbers until all is done."""
    client = ParameterClient(address, CONTENTS, worker, attempt, network)
    standing = client.lease()
    epoch, batch = standing.epoch, standing.batch
    while epoch < EPOCHS:
        pulled = client.pull()
        batch += 1
        told = {"logs": {"loss": 1.0}, "seconds": 1.0, "learning_rate": 0.1} if batch == batches else None
        client.push(
            [delta(worker, epoch, batch)],
            [np.array(epoch * batches + batch)],
            [np.array(float(batch))],
            base=pulled.version,
            epoch=epoch,
            batch=batch,
            steps=1,
            rows=7,
            learning_rate=0.1,
            ended=told,
        )
        if batch == batches:
            epoch, batch = epoch + 1, 0
    client.finish()


def delta(worker, epoch, batch):
    """One for each push, and a number that tells it from the others."""
    values = np.zeros(8)
    values[[0, 1, 2 + worker]] = 1, 1000 * epoch + batch, 1
    return values


def run(batches, dies=()):
    """Train with a thread for each worker, whose attempts die at these calls; store, ledger, figures and networks."""
    store = Store(Flat(VECTOR, (np.array(0),)), 8, Downpour(), {}, WORKERS)
    ledger = Ledger(
        {worker: PartitionPlan(batches) for worker in range(WORKERS)},
        range(EPOCHS),
        at_once=WORKERS,
        validates=lambda epoch: False,
        max_staleness=None,
        lease_seconds=0.2,
        warmup_timeout=60.0,
        on_epoch=lambda epoch: store.snapshot(),
        clock=time.monotonic,
    )
    service = ParameterService(store, ledger, CONTENTS)
    networks, failed = [], []

    def work(worker):
        try:
            late = []
            for attempt, call in enumerate([*dies, None]):
                number = 10 * attempt + worker
                network = BadNetwork(address, number, late, call)
                networks.append(network)
                try:
                    train(address, worker, number, network, batches)
                except Killed:
                    network.close()
                late = network.taken()
            for kept in late:
                network.deliver(kept)
        except BaseException as error:
            failed.append(error)

    endpoint = Endpoint("127.0.0.1", "127.0.0.1", timeout=30.0)
    with make_transport("inprocess").serve(service, endpoint, Secret.fresh()) as address:
        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failed:
        raise failed[0]
    return store, ledger, service.stats("inprocess"), networks


def check(batches, store, ledger, stats):
    """All was applied exactly once."""
    unique = WORKERS * EPOCHS * batches
    pushes = itertools.product(range(WORKERS), range(EPOCHS), range(1, batches + 1))
    expected = sum(delta(*push) for push in pushes)
    with store.snapshot() as snapshot:
        assert snapshot.weights.vector.tolist() == expected.tolist()
        assert snapshot.weights.counters[0] == EPOCHS * batches
    assert stats.pushes == store.version == unique
    assert stats.duplicates > unique / 20
    assert stats.steps == dict.fromkeys(range(WORKERS), EPOCHS * batches)
    assert ledger.rows == 7 * unique
    ends = [ledger.wait(0) for _ in range(EPOCHS)]
    assert [end.epoch for end in ends] == list(range(EPOCHS))
    assert all((report.rows, report.steps) == (7 * batches, batches) for end in ends for report in end.reports)


@pytest.mark.parametrize("batches", [100, pytest.param(667, marks=pytest.mark.soak)])
def test_a_bad_network_loses_and_repeats_no_push(batches):
    store, ledger, stats, networks = run(batches)
    check(batches, store, ledger, stats)
    assert set(stats.rejected_requests) <= {"lease lost"}
    for network in networks:
        assert min(network.lost, network.unheard, network.twice, network.delayed) > batches / 2


def test_nor_do_attempts_that_die_on_a_bad_network():
    """Copies of what they sent come before the next attempt, and in between its own calls."""
    batches, dies = 20, (11, 1, 25, 2, 30)
    store, ledger, stats, networks = run(batches, dies)
    check(batches, store, ledger, stats)
    assert len(networks) == (len(dies) + 1) * WORKERS
    assert stats.rejected_requests["lease lost"] > 0
