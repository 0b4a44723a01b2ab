"""Leases, with a clock that the test controls. The tests of both ledgers show what they are for."""

from contextlib import suppress

import pytest

from sparkkeras.rpc.leases import Leases

SECONDS = 10.0


class Bench:
    """Leases and their clock."""

    def __init__(self):
        self.now = 1000.0
        self.leases = Leases(SECONDS, lambda: self.now)


@pytest.fixture
def bench():
    return Bench()


def test_a_lease_is_held_until_it_expires(bench):
    lease = bench.leases.grant("a", "one")
    assert (lease.key, lease.holder, bench.leases.of("a")) == ("a", "one", lease)
    bench.now += SECONDS - 1
    assert bench.leases.is_held("a")
    bench.now += 1
    assert not bench.leases.is_held("a")
    assert bench.leases.is_held("a", grace=1)
    assert bench.leases.of("a") is lease
    assert not bench.leases.is_held("b")


def test_an_expired_lease_can_be_renewed(bench):
    lease = bench.leases.grant("a", "one")
    bench.leases.expire(lease.number)
    assert not bench.leases.is_held("a")
    bench.now += 3 * SECONDS
    assert bench.leases.renew(lease.number) is lease
    bench.now += SECONDS - 1
    assert bench.leases.is_held("a")


def test_a_new_lease_revokes_the_one_before(bench):
    old = bench.leases.grant("a", "one")
    new = bench.leases.grant("a", "one")
    assert old.number != new.number
    assert bench.leases.renew(old.number) is None
    assert not bench.leases.revoke(old.number)
    bench.leases.expire(old.number)
    assert bench.leases.is_held("a")
    assert list(bench.leases) == [new]


def test_a_revoked_lease_has_not_finished(bench):
    one, two = bench.leases.grant("a", "one"), bench.leases.grant("b", "two")
    assert bench.leases.revoke(one.number)
    bench.leases.finish(two.number)
    assert [bench.leases.is_finished(lease.number) for lease in (one, two)] == [False, True]
    assert [bench.leases.renew(lease.number) for lease in (one, two)] == [None, None]
    assert list(bench.leases) == []
    assert bench.leases.grant("a", "three").number not in (one.number, two.number)


def test_a_pause_does_not_count(bench):
    lost, held = bench.leases.grant("a", "one"), bench.leases.grant("b", "two")
    bench.leases.expire(lost.number)
    with suppress(ZeroDivisionError), bench.leases.paused():
        bench.now += 5 * SECONDS
        raise ZeroDivisionError
    assert not bench.leases.is_held("a")
    bench.now += SECONDS - 1
    assert bench.leases.is_held("b")
    assert held.expires == bench.now + 1
