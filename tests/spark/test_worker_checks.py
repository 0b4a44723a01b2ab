"""Checks of the workers."""

import threading

from sparkkeras.spark.worker_checks import probing


class Owner:
    """A SparkContext or session."""


def test_a_probe_blocks_only_other_probes_of_its_context():
    first, second, entered, free = Owner(), Owner(), threading.Event(), threading.Event()

    def probe():
        with probing(first):
            entered.set()
            free.wait(10)

    threads = [threading.Thread(target=probe) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert entered.wait(10)
    with probing(second):
        pass
    entered.clear()
    assert not entered.wait(0.1), "the second probe of the first context waits"
    free.set()
    for thread in threads:
        thread.join(10)
    assert entered.is_set()
