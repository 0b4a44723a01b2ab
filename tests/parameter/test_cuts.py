"""Cuts: weights and progress of the same updates, while many threads push."""

import threading
import time

import numpy as np
import pytest

from sparkkeras.parameter.exchange import ExchangePoint
from sparkkeras.weights import Flat
from tests.parameter.servers import a_ledger, a_store

WORKERS, BATCHES, EPOCHS = 4, 5, 6


class Server:
    """A store whose weights count the pushes, and its ledger."""

    def __init__(self, locked=True, reached=None, weights=None, cut_seconds=0):
        weights = weights or Flat(np.zeros(WORKERS))
        self.store = a_store(weights.vector, num_workers=WORKERS, locked=locked)
        self.taken, self.cut_seconds = [], cut_seconds
        self.ledger = a_ledger(
            [BATCHES] * WORKERS,
            self.store,
            range(0 if reached is None else reached.next_epoch, EPOCHS),
            on_cut=self.take,
            reached=reached,
        )

    def take(self, cut):
        time.sleep(self.cut_seconds)
        self.taken.append(cut)

    def train(self, worker, until=EPOCHS):
        """Push each batch that is left as an update that counts it."""
        resumed = self.ledger.lease(worker, worker)
        sequence, batch = resumed.sequence, resumed.batch
        for epoch in range(resumed.epoch, until):
            while batch < BATCHES:
                sequence, batch = sequence + 1, batch + 1
                logs = {} if batch == BATCHES else None
                point = ExchangePoint(epoch, batch, 1, 1, 0.1, 0.0, logs=logs)
                with self.ledger.pushing(worker, resumed.lease, sequence):
                    self.store.apply(Flat(np.eye(WORKERS)[worker]), self.store.version, point)
                    time.sleep(0.0005)  # a cut in between would have an update that the ledger does not have
                    if logs is not None:
                        self.ledger.keep_optimizer(worker, resumed.lease, bytes([epoch]))
                    self.ledger.pushed(worker, point)
            batch = 0

    def run(self, until=EPOCHS):
        threads = [threading.Thread(target=self.train, args=(worker, until), daemon=True) for worker in range(WORKERS)]
        for thread in threads:
            thread.start()
        return threads


def check(cut):
    """The weights count exactly the updates of the ledger; workers have the optimizer variables of their last epoch."""
    counted = [cut.progress.partitions[worker].sequence for worker in range(WORKERS)]
    np.testing.assert_array_equal(np.abs(cut.weights.vector), counted)
    for each in cut.progress.partitions.values():
        assert each.sequence == each.epoch * BATCHES + each.batch == each.steps
        assert each.optimizer == (bytes([each.epoch - 1]) if each.epoch else b"")
    reported = {(report.epoch, report.worker) for report in cut.progress.reports}
    ahead = cut.progress.partitions.items()
    assert reported == {(epoch, worker) for worker, each in ahead for epoch in range(cut.progress.next_epoch, each.epoch)}


@pytest.mark.parametrize("locked", [True, False])
def test_cuts_have_the_updates_of_the_ledger(locked):
    server = Server(locked)
    threads = server.run()
    cuts = []
    while any(thread.is_alive() for thread in threads):
        cuts.append(server.ledger.cut())
        time.sleep(0.001)
    assert len(cuts) > 3
    assert [cut.progress.next_epoch for cut in server.taken] == list(range(1, EPOCHS + 1))
    for cut in cuts + server.taken:
        check(cut)


def test_the_driver_waits_for_a_cut_that_is_being_taken():
    server = Server(cut_seconds=0.3)
    threads = server.run(until=1)
    assert server.ledger.wait(60).epoch == 0
    server.ledger.wait_for_cut()
    assert [cut.progress.next_epoch for cut in server.taken] == [1]
    for thread in threads:
        thread.join()


def test_a_server_continues_from_a_cut():
    first = Server()
    for thread in first.run(until=2):
        thread.join()
    first.train(0, 4)  # two epochs ahead
    cut = first.ledger.cut()
    check(cut)
    second = Server(reached=cut.progress, weights=cut.weights)
    assert second.ledger.cut().progress == cut.progress
    for thread in second.run():
        thread.join()
    (*_, last) = second.taken
    check(last)
    np.testing.assert_array_equal(np.abs(last.weights.vector), BATCHES * EPOCHS)
    ends = [second.ledger.wait(0) for _ in range(2, EPOCHS)]
    assert [(end.epoch, len(end.reports)) for end in ends] == [(epoch, WORKERS) for epoch in range(2, EPOCHS)]
