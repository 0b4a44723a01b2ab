"""Update rules against arrays computed by hand.

A new rule joins the conformance suite by a line in ``SYNCHRONOUS_UNDER_TEST`` or ``ASYNCHRONOUS_UNDER_TEST``.
"""

import dataclasses
import json
import pickle
from dataclasses import dataclass

import numpy as np
import pytest

from sparkkeras.errors import ConfigurationError, UnknownArgumentError
from sparkkeras.parameter.rules import (
    AGN,
    DCASGD,
    EAMSGD,
    EASGD,
    RULES,
    AsynchronousRule,
    Average,
    DiLoCo,
    Downpour,
    DynSGD,
    ExchangeWindow,
    SlowMo,
    UpdateRule,
    WorkerUpdate,
    make_rule,
    rule_config,
    rule_from_config,
    rule_name,
)


@dataclass(frozen=True)
class Damped:
    """A person's own rule, as the words of `UpdateRule` show it."""

    modes = frozenset({"synchronous"})
    share: float = 0.5

    def init(self, center):
        return {}

    def apply(self, center, state, update, staleness):
        center += self.share * (update.sent - center)


@dataclass(frozen=True)
class Heavy:
    """An own rule with a state."""

    modes = frozenset({"synchronous"})
    friction: float = 0.25

    def init(self, center):
        return {"velocity": np.zeros_like(center)}

    def apply(self, center, state, update, staleness):
        state["velocity"] *= self.friction
        state["velocity"] += update.sent - center
        center += state["velocity"]


class Unsaved:
    """An own rule that is no dataclass."""

    modes = frozenset({"synchronous"})

    def init(self, center):
        return {}

    def apply(self, center, state, update, staleness):
        center[...] = update.sent


@dataclass(frozen=True)
class Elsewhere(Damped):
    """An own rule of another mode."""

    modes = frozenset({"asynchronous", "hogwild"})


@dataclass(frozen=True)
class Clipped:
    """An own asynchronous rule, as the words of `AsynchronousRule` show it."""

    modes = frozenset({"asynchronous"})
    norm: float = 1.0

    def init(self, center):
        return {}

    def exchange(self, local, base, center, window):
        sent = local - base
        sent *= min(1.0, self.norm / max(float(np.linalg.norm(sent)), 1e-12))
        return sent, center + sent

    def apply(self, center, state, update, staleness):
        center += update.sent


OWN = {"Damped": Damped, "Heavy": Heavy, "Clipped": Clipped}

SYNCHRONOUS_UNDER_TEST = [
    Average(),
    SlowMo(),
    SlowMo(momentum=0.0, alpha=0.5),
    DiLoCo(),
    DiLoCo(learning_rate=1.0, momentum=0.0),
    Damped(),
    Damped(share=0.25),
    Heavy(),
]

ASYNCHRONOUS_UNDER_TEST = [
    Downpour(),
    AGN(),
    DynSGD(),
    EASGD(),
    EASGD(alpha=0.25),
    EAMSGD(),
    EAMSGD(alpha=0.125),
    DCASGD(),
    DCASGD(compensation=0.0),
    Clipped(),
]

RULES_UNDER_TEST = SYNCHRONOUS_UNDER_TEST + ASYNCHRONOUS_UNDER_TEST


def update(sent, learning_rate=0.1, dtype=np.float32, steps=5):
    return WorkerUpdate(sent=np.array(sent, dtype), steps=steps, rows=100, learning_rate=learning_rate, num_workers=2)


def window(steps=5, learning_rate=0.1, num_workers=2):
    return ExchangeWindow(steps=steps, rows=100, learning_rate=learning_rate, num_workers=num_workers)


def towards(rule, center, weights):
    """The update that brings a rule ``weights``: in the asynchronous modes, what a worker sends that began at the center."""
    weights = np.array(weights, center.dtype)
    if isinstance(rule, AsynchronousRule):
        weights, _ = rule.exchange(weights, center.copy(), center.copy(), window())
    return update(weights, dtype=center.dtype)


def exchanged(rule, local, base, center, **of_window):
    """What is sent and what the worker goes on from, as lists."""
    arrays = (np.array(array, np.float32) for array in (local, base, center))
    sent, following = rule.exchange(*arrays, window(**of_window))
    return sent.tolist(), following.tolist()


def applied(rule, center, sent, staleness):
    center = np.array(center, np.float32)
    rule.apply(center, rule.init(center), update(sent), staleness)
    return center.tolist()


def applies(rule, center, updates):
    """The centers after each apply."""
    center = np.array(center, np.float32)
    state = rule.init(center)
    seen = []
    for one in updates:
        rule.apply(center, state, one, 0)
        seen.append(center.tolist())
    return seen


# By hand. Rates are powers of two, so that every step is exact.


def test_average():
    assert applies(Average(), [1, 2], [update([3, -1]), update([0.5, 8])]) == [[3, -1], [0.5, 8]]


def test_the_average_is_a_copy():
    center, one = np.zeros(2, np.float32), update([3, -1])
    Average().apply(center, {}, one, 0)
    one.sent[:] = 7
    assert center.tolist() == [3, -1]


def test_slowmo():
    updates = [update([0, 4], 0.5), update([-1, 4], 0.5), update([-1.5, 4.5], 0.25)]
    assert applies(SlowMo(momentum=0.5, alpha=1.0), [1, 2], updates) == [
        [0, 4],  # (C - W)/lr = [2, -4] = u; C - 0.5*u
        [-1.5, 5],  # (C - W)/lr = [2, 0]; u = [1, -2] + [2, 0] = [3, -2]; C - 0.5*u
        [-1.875, 4.75],  # (C - W)/lr = [0, 2]; u = [1.5, -1] + [0, 2] = [1.5, 1]; C - 0.25*u
    ]


def test_slowmo_with_a_slow_learning_rate():
    updates = [update([0, 4], 0.5), update([0.5, 1], 0.5)]
    assert applies(SlowMo(momentum=0.25, alpha=0.5), [1, 2], updates) == [
        [0.5, 3],  # u = [2, -4]; C - 0.5*0.5*u
        [0.375, 2.25],  # (C - W)/lr = [0, 4]; u = [0.5, -1] + [0, 4] = [0.5, 3]; C - 0.25*u
    ]


def test_slowmo_remembers_the_momentum():
    center = np.array([1, 2], np.float32)
    rule = SlowMo(momentum=0.5)
    state = rule.init(center)
    assert {name: array.tolist() for name, array in state.items()} == {"momentum": [0, 0]}
    rule.apply(center, state, update([0, 4], 0.5), 0)
    assert state["momentum"].tolist() == [2, -4]
    rule.apply(center, state, update([-1, 4], 0.5), 0)
    assert state["momentum"].tolist() == [3, -2]


def test_slowmo_at_a_learning_rate_of_zero_folds_nothing():
    center = np.array([1, 2], np.float32)
    rule = SlowMo(momentum=0.5)
    state = rule.init(center)
    rule.apply(center, state, update([0, 4], 0.5), 0)
    rule.apply(center, state, update([0, 4], 0.0), 0)
    assert center.tolist() == [0, 4]
    assert state["momentum"].tolist() == [2, -4]


def test_slowmo_without_momentum_is_the_average():
    draw = np.random.default_rng(0)
    updates = [update(draw.normal(size=50), rate) for rate in (0.1, 0.003, 1.0)]
    center = draw.normal(size=50)
    slow, plain = applies(SlowMo(momentum=0.0, alpha=1.0), center, updates), applies(Average(), center, updates)
    assert np.allclose(slow, plain, rtol=0, atol=1e-6)


def test_diloco():
    updates = [update([0, 4]), update([-0.75, 3.5]), update([-0.625, 1.75])]
    assert applies(DiLoCo(learning_rate=0.5, momentum=0.5), [1, 2], updates) == [
        [0.25, 3.5],  # g = u = [1, -2]; C - 0.5*(g + 0.5*u) = C - 0.5*[1.5, -3]
        [-0.625, 3.75],  # g = [1, 0]; u = [0.5, -1] + g = [1.5, -1]; C - 0.5*[1.75, -0.5]
        [-0.8125, 2.375],  # g = [0, 2]; u = [0.75, -0.5] + g = [0.75, 1.5]; C - 0.5*[0.375, 2.75]
    ]


def test_diloco_remembers_the_momentum():
    center = np.array([1, 2], np.float32)
    rule = DiLoCo(learning_rate=0.5, momentum=0.5)
    state = rule.init(center)
    rule.apply(center, state, update([0, 4]), 0)
    assert {name: array.tolist() for name, array in state.items()} == {"momentum": [1, -2]}
    rule.apply(center, state, update([-0.75, 3.5]), 0)
    assert state["momentum"].tolist() == [1.5, -1]


def test_diloco_does_not_look_at_the_workers_learning_rate():
    one, other = ([update([0, 4], rate), update([3, 1], rate)] for rate in (0.5, 0.0))
    assert applies(DiLoCo(), [1, 2], one) == applies(DiLoCo(), [1, 2], other)


def test_diloco_at_a_rate_of_one_without_momentum_is_the_average():
    assert applies(DiLoCo(learning_rate=1.0, momentum=0.0), [1, 2], [update([3, -1])]) == [[3, -1]]


def test_the_papers_defaults():
    assert (DiLoCo().learning_rate, DiLoCo().momentum) == (0.7, 0.9)
    assert SlowMo().alpha == 1.0
    assert 0.5 <= SlowMo().momentum <= 0.7


# By hand, the asynchronous ones. The worker came from B = [1, 2], is at W = [3, -2] and finds C = [5, 4].

LOCAL, BASE, CENTER = [3, -2], [1, 2], [5, 4]

# The server has gone on to [10, 20] when the push comes in.
SERVER = [10, 20]


def test_downpour():
    # d = W - B; C + d
    assert exchanged(Downpour(), LOCAL, BASE, CENTER) == ([2, -4], [7, 0])
    assert applied(Downpour(), SERVER, [2, -4], 3) == [12, 16]


@pytest.mark.parametrize(
    ("steps", "sent", "following"),
    [
        (1, [2, -4], [7, 0]),
        (4, [0.5, -1], [5.5, 3]),  # d = (W - B)/4; C + d
        (16, [0.125, -0.25], [5.125, 3.75]),
        (0, [2, -4], [7, 0]),  # never happens, and divides by nothing
    ],
)
def test_agn(steps, sent, following):
    assert exchanged(AGN(), LOCAL, BASE, CENTER, steps=steps) == (sent, following)
    assert applied(AGN(), SERVER, [0.5, -1], 3) == [10.5, 19]


@pytest.mark.parametrize(
    ("staleness", "center"),
    [(0, [12, 16]), (1, [11, 18]), (3, [10.5, 19]), (7, [10.25, 19.5])],  # C + d/(s + 1)
)
def test_dynsgd(staleness, center):
    assert exchanged(DynSGD(), LOCAL, BASE, CENTER) == ([2, -4], [7, 0])
    assert applied(DynSGD(), SERVER, [2, -4], staleness) == center


@pytest.mark.parametrize("kind", [EASGD, EAMSGD])
def test_easgd(kind):
    # E = (W - C)/4 = [-2, -6]/4; W - E
    assert exchanged(kind(alpha=0.25), LOCAL, BASE, CENTER) == ([-0.5, -1.5], [3.5, -0.5])
    assert applied(kind(alpha=0.25), SERVER, [-0.5, -1.5], 3) == [9.5, 18.5]


@pytest.mark.parametrize("kind", [EASGD, EAMSGD])
def test_easgd_does_not_look_at_the_base(kind):
    assert exchanged(kind(alpha=0.25), LOCAL, [70, 80], CENTER) == exchanged(kind(alpha=0.25), LOCAL, BASE, CENTER)


def test_an_elastic_pull_of_one_changes_places():
    assert exchanged(EASGD(alpha=1), LOCAL, BASE, CENTER) == ([-2, -6], CENTER)
    assert applied(EASGD(alpha=1), CENTER, [-2, -6], 0) == LOCAL


@pytest.mark.parametrize(("num_workers", "alpha"), [(1, 0.9), (2, 0.45), (9, 0.1)])
def test_easgd_shares_its_pull_out_over_the_workers(num_workers, alpha):
    sent, following = exchanged(EASGD(), LOCAL, BASE, CENTER, num_workers=num_workers)
    assert np.allclose(sent, [-2 * alpha, -6 * alpha])
    assert np.allclose(following, [3 + 2 * alpha, -2 + 6 * alpha])


@pytest.mark.parametrize(
    ("compensation", "learning_rate", "sent", "following"),
    [
        # d = [2, -4]; C - B = [4, 2]; d*d*(C - B) = [16, 32]
        (0.0, 0.5, [2, -4], [7, 0]),
        (0.125, 0.5, [-2, -12], [3, -8]),  # d - [16, 32]/8/0.5
        (0.03125, 1.0, [1.5, -5], [6.5, -1]),  # d - [16, 32]/32
        (0.03125, 0.25, [0, -8], [5, -4]),  # d - [16, 32]/32/0.25
        (0.125, 0.0, [2, -4], [7, 0]),
    ],
)
@pytest.mark.parametrize("steps", [1, 8])
def test_dcasgd(compensation, learning_rate, sent, following, steps):
    """The mean gradient of a window of k steps is d/(k*lr), so k times the compensation does what 1 does for one step."""
    rule = DCASGD(compensation=compensation * steps)
    assert exchanged(rule, LOCAL, BASE, CENTER, learning_rate=learning_rate, steps=steps) == (sent, following)
    assert applied(rule, SERVER, sent, 3) == [10 + sent[0], 20 + sent[1]]


def test_dcasgd_is_the_papers_step():
    """Zheng et al.: ``w = w - lr*(g + l*g*g*(w - w_bak))``, for a worker that took one step of SGD."""
    draw = np.random.default_rng(0)
    gradient, base, center = draw.normal(size=(3, 50))
    rate, compensation = 0.3, 0.7
    _, following = DCASGD(compensation).exchange(base - rate * gradient, base, center, window(1, rate))
    expected = center - rate * (gradient + compensation * gradient * gradient * (center - base))
    assert np.allclose(following, expected, rtol=0, atol=1e-12)


def test_dcasgd_over_a_window_is_k_compensated_steps_of_the_mean_gradient():
    draw = np.random.default_rng(1)
    gradient, base, center = draw.normal(size=(3, 50))
    rate, compensation, steps = 0.3, 0.7, 5
    _, following = DCASGD(compensation).exchange(base - steps * rate * gradient, base, center, window(steps, rate))
    expected = center - steps * rate * (gradient + compensation * gradient * gradient * (center - base))
    assert np.allclose(following, expected, rtol=0, atol=1e-12)


def test_dcasgd_brings_a_late_gradient_nearer_to_the_one_at_the_center():
    """For ``-log sigmoid(w)`` at 0, ``g*g`` is the Hessian."""
    base, center, rate = np.array([0.0]), np.array([0.5]), 0.1

    def gradient(weights):
        return -1 / (1 + np.exp(weights))

    right = -rate * gradient(center)
    late, _ = DCASGD(0.0).exchange(base - rate * gradient(base), base, center, window(1, rate))
    compensated, _ = DCASGD(1.0).exchange(base - rate * gradient(base), base, center, window(1, rate))
    assert abs(compensated - right)[0] < 0.05 * abs(late - right)[0]


def test_dcasgd_at_a_tiny_learning_rate_stays_finite():
    rate = 1e-38
    arrays = (np.full(3, value, np.float32) for value in (rate, 0.0, 1e3))
    with np.errstate(under="ignore"):
        sent, _ = DCASGD().exchange(*arrays, window(1, rate))
    assert np.isfinite(sent).all()


def test_the_own_rule_of_the_docstring():
    # |W - B| = |[3, 4]| = 5, so a fifth of it is sent
    sent, following = exchanged(Clipped(), [4, 6], BASE, CENTER)
    assert np.allclose(sent, [0.6, 0.8])
    assert np.allclose(following, [5.6, 4.8])
    assert exchanged(Clipped(norm=10.0), [4, 6], BASE, CENTER) == ([3, 4], [8, 8])


def test_the_papers_defaults_of_the_asynchronous_rules():
    assert (EASGD().alpha, EAMSGD().alpha, DCASGD().compensation) == (None, None, 0.04)


# What every rule keeps to


@pytest.fixture(params=RULES_UNDER_TEST, ids=repr)
def rule(request):
    return request.param


def some(draw, size=7, dtype=np.float32):
    return draw.normal(size=size).astype(dtype)


def test_every_named_rule_is_under_test():
    assert set(RULES.values()) <= {type(rule) for rule in RULES_UNDER_TEST}


def test_it_is_a_rule(rule):
    assert isinstance(rule, UpdateRule)
    assert rule.modes
    assert isinstance(rule.modes, frozenset)
    assert all(make_rule(rule, mode) is rule for mode in rule.modes)


def test_it_cannot_be_changed(rule):
    for field in dataclasses.fields(rule):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(rule, field.name, 0.1)


def test_a_fold_is_in_place(rule):
    draw = np.random.default_rng(0)
    center = some(draw)
    state = rule.init(center)
    before = dict(state)
    old, identity = center.copy(), id(center)
    assert rule.apply(center, state, towards(rule, center, some(draw)), 3) is None
    assert id(center) == identity
    assert not np.array_equal(center, old)
    assert set(state) == set(before)
    assert all(state[name] is before[name] for name in before)


def test_a_fold_reaches_the_vector_that_the_center_is_a_slice_of(rule):
    draw = np.random.default_rng(1)
    whole = some(draw, 10)
    old = whole.copy()
    center = whole[:7]
    rule.apply(center, rule.init(center), towards(rule, center, some(draw)), 0)
    assert np.all(whole[:7] != old[:7])
    assert np.array_equal(whole[7:], old[7:])


def test_an_update_stays_as_it_is(rule):
    draw = np.random.default_rng(2)
    center, one = some(draw), update(some(draw))
    old = one.sent.copy()
    rule.apply(center, rule.init(center), one, 0)
    assert np.array_equal(one.sent, old)


def test_starting_does_not_touch_the_center(rule):
    center = np.ones(4, np.float32)
    rule.init(center)
    assert center.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_dtype_is_kept(rule, dtype):
    draw = np.random.default_rng(3)
    center = some(draw, dtype=dtype)
    state = rule.init(center)
    for staleness in (0, 3, np.int64(3)):
        rule.apply(center, state, towards(rule, center, some(draw)), staleness)
    assert center.dtype == dtype
    assert all(array.dtype == dtype for array in state.values())


def test_the_state_has_the_same_names_and_shapes_all_the_time(rule):
    draw = np.random.default_rng(4)
    center = some(draw)
    state = rule.init(center)
    shapes = {name: array.shape for name, array in state.items()}
    assert all(shape == center.shape for shape in shapes.values())
    for _ in range(3):
        rule.apply(center, state, update(some(draw)), 0)
        assert {name: array.shape for name, array in state.items()} == shapes


def test_the_center_itself_is_a_fixed_point(rule):
    center = some(np.random.default_rng(5))
    old = center.copy()
    state = rule.init(center)
    for _ in range(3):
        rule.apply(center, state, towards(rule, center, center), 0)
    assert np.array_equal(center, old)
    assert all(not array.any() for array in state.values())


def test_a_first_fold_goes_towards_the_update(rule):
    draw = np.random.default_rng(6)
    center, weights = some(draw), some(draw)
    old = center.copy()
    rule.apply(center, rule.init(center), towards(rule, center, weights), 0)
    assert np.array_equal(np.sign(center - old), np.sign(weights - old))


def test_the_same_folds_give_the_same_center_to_the_last_bit(rule):
    def run():
        draw = np.random.default_rng(7)
        center = some(draw)
        state = rule.init(center)
        for _ in range(4):
            rule.apply(center, state, update(some(draw)), 0)
        return center.tobytes(), {name: array.tobytes() for name, array in state.items()}

    assert run() == run()


def test_a_state_that_was_stored_goes_on(rule):
    """What a saved model does: state is copied out and in between two applies."""
    draw = np.random.default_rng(8)
    center, one, two = some(draw), update(some(draw)), update(some(draw))
    state = rule.init(center)
    rule.apply(center, state, one, 0)
    copy, stored = center.copy(), {name: array.copy() for name, array in state.items()}
    rule.apply(center, state, two, 0)
    rule.apply(copy, stored, two, 0)
    assert np.array_equal(copy, center)


def test_no_parameters_at_all(rule):
    center = np.zeros(0, np.float32)
    rule.apply(center, rule.init(center), update([]), 0)
    assert center.size == 0


def test_it_comes_back_from_json(rule):
    config = json.loads(json.dumps(rule_config(rule)))
    assert rule_from_config(config, OWN) == rule
    assert type(rule_from_config(config, OWN)) is type(rule)


# What every asynchronous rule keeps to beside


@pytest.fixture(params=ASYNCHRONOUS_UNDER_TEST, ids=repr)
def asynchronous(request):
    return request.param


def test_a_rule_has_a_workers_half_if_its_modes_need_one(rule):
    assert isinstance(rule, AsynchronousRule) == bool(rule.modes & {"asynchronous", "hogwild"})
    assert isinstance(rule, AsynchronousRule) != ("synchronous" in rule.modes)


def test_an_exchange_changes_nothing_that_it_is_given(asynchronous):
    draw = np.random.default_rng(0)
    given = [some(draw) for _ in range(3)]
    old = [array.copy() for array in given]
    for array in given:
        array.flags.writeable = False
    sent, following = asynchronous.exchange(*given, window())
    assert all(np.array_equal(array, before) for array, before in zip(given, old, strict=True))
    assert not any(np.shares_memory(made, array) for made in (sent, following) for array in given)
    assert not np.shares_memory(sent, following)
    again = asynchronous.exchange(*given, window())
    assert np.array_equal(again[0], sent)
    assert np.array_equal(again[1], following)


@pytest.mark.parametrize("number", [float, np.float32, np.float64])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_exchange_keeps_the_dtype_and_shape(asynchronous, dtype, number):
    draw = np.random.default_rng(1)
    local, base, center = (some(draw, dtype=dtype) for _ in range(3))
    for steps in (5, np.int64(5)):
        sent, following = asynchronous.exchange(local, base, center, window(steps, number(0.1), np.int64(2)))
        assert (sent.dtype, following.dtype) == (dtype, dtype)
        assert sent.shape == following.shape == (7,)


def test_numpy_numbers_as_hyper_parameters_keep_the_dtype():
    ones = np.ones(3, np.float32)
    for rule in (EASGD(np.float64(0.5)), DCASGD(np.float64(0.5))):
        assert [made.dtype for made in rule.exchange(2 * ones, ones, 3 * ones, window())] == [np.float32] * 2


def test_an_exchange_of_no_parameters(asynchronous):
    none = np.zeros(0, np.float32)
    assert [made.size for made in asynchronous.exchange(none, none, none, window())] == [0, 0]


def test_who_learned_nothing_and_finds_the_center_as_it_was_sends_nothing(asynchronous):
    center = some(np.random.default_rng(2))
    sent, following = asynchronous.exchange(center, center, center, window())
    assert not sent.any()
    assert np.array_equal(following, center)


@pytest.mark.parametrize("rule", [Downpour(), DynSGD(), DCASGD()], ids=repr)
def test_one_worker_alone_trains_as_if_there_were_no_server(rule):
    """Its base and the center stay the same, so nothing is counted twice."""
    draw = np.random.default_rng(3)
    center = some(draw, dtype=np.float64)
    state, base, plain = rule.init(center), center.copy(), center.copy()
    for _ in range(5):
        progress = some(draw, dtype=np.float64)
        plain += progress
        sent, base = rule.exchange(base + progress, base, center.copy(), window())
        rule.apply(center, state, update(sent, dtype=np.float64), 0)
        assert np.allclose(center, plain, rtol=0, atol=1e-12)
        assert np.allclose(base, plain, rtol=0, atol=1e-12)


def simulate(rule, exchanges=3000, workers=4, steps=5, rate=0.05, momentum=0.0):
    """Train a linear regression over ``workers`` with rows of their own; the error of the center.

    Workers exchange in a drawn order, and a push reaches the server only up to three exchanges later, so that others are
    applied between.
    """
    draw = np.random.default_rng(0)
    optimum = np.array([1.0, -2.0, 0.5])
    rows = draw.normal(size=(workers, 20, 3))
    targets = rows @ optimum
    center = np.zeros(3)
    state = rule.init(center)
    bases, pulled_at, velocity = [center.copy() for _ in range(workers)], [0] * workers, np.zeros((workers, 3))
    applies, underway, stalest = 0, [], 0
    for number in range(exchanges):
        worker = int(draw.integers(workers))
        for due, own, pushed, pulled in [push for push in underway if push[0] <= number or push[1] == worker]:
            underway.remove((due, own, pushed, pulled))
            rule.apply(center, state, pushed, applies - pulled)
            stalest = max(stalest, applies - pulled)
            applies += 1
        local = bases[worker].copy()
        for _ in range(steps):
            ahead = local + momentum * velocity[worker]
            gradient = rows[worker].T @ (rows[worker] @ ahead - targets[worker]) / 20
            velocity[worker] = momentum * velocity[worker] - rate * gradient
            local += velocity[worker]
        seen = window(steps, rate, workers)
        sent, bases[worker] = rule.exchange(local, bases[worker], center.copy(), seen)
        pushed = WorkerUpdate(**dataclasses.asdict(seen), sent=sent)
        underway.append((number + int(draw.integers(1, 4)), worker, pushed, pulled_at[worker]))
        pulled_at[worker] = applies
    assert stalest > 3
    return float(np.abs(center - optimum).max())


def test_workers_that_exchange_out_of_step_find_the_optimum(asynchronous):
    assert simulate(asynchronous) < 1e-6


def test_workers_with_momentum_find_the_optimum_elastically():
    assert simulate(EAMSGD(), momentum=0.9, rate=0.01) < 1e-6


# Names, and what is refused


@pytest.mark.parametrize(("name", "expected"), [(name, kind()) for name, kind in RULES.items()])
def test_a_rule_by_name(name, expected):
    for mode in expected.modes:
        made = make_rule(name, mode)
        assert made == expected
        assert type(made) is type(expected)
    assert rule_name(expected) == name


def test_the_names():
    synchronous = {"average": Average, "slowmo": SlowMo, "diloco": DiLoCo}
    summing = {"downpour": Downpour, "agn": AGN, "dynsgd": DynSGD, "dcasgd": DCASGD}
    elastic = {"easgd": EASGD, "eamsgd": EAMSGD}
    assert synchronous | summing | elastic == RULES


def test_which_rules_do_without_a_lock():
    assert {name for name, kind in RULES.items() if "hogwild" in kind.modes} == {"downpour", "agn"}


def test_no_rule_is_the_modes_plain_one():
    assert make_rule(None, "synchronous") == Average()
    assert make_rule(None, "asynchronous") == Downpour()
    assert make_rule(None, "hogwild") == Downpour()


def test_an_own_rule_goes_by_its_class():
    own = Damped(share=0.25)
    assert make_rule(own, "synchronous") is own
    assert rule_name(own) == "Damped"
    assert rule_config(own) == {"name": "Damped", "parameters": {"share": 0.25}}
    assert rule_config(SlowMo(momentum=0.5)) == {"name": "slowmo", "parameters": {"momentum": 0.5, "alpha": 1.0}}
    assert rule_config(EASGD()) == {"name": "easgd", "parameters": {"alpha": None}}
    assert rule_config(EAMSGD(0.5)) == {"name": "eamsgd", "parameters": {"alpha": 0.5}}
    assert rule_config(DCASGD()) == {"name": "dcasgd", "parameters": {"compensation": 0.04}}


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigurationError) as caught:
        make_rule("slowmow", "synchronous")
    assert "rule='slowmow' is not known" in str(caught.value)
    assert "Did you mean 'slowmo'?" in str(caught.value)


@pytest.mark.parametrize(("mode", "meant"), [("synchronous", "average"), ("asynchronous", "agn"), ("hogwild", "agn")])
def test_only_names_that_the_mode_knows_are_suggested(mode, meant):
    with pytest.raises(ConfigurationError, match=rf"'avg'.*Did you mean '{meant}'\?") as caught:
        make_rule("avg", mode)
    assert [name for name in RULES if repr(name) in str(caught.value)] == [
        name for name, rule in RULES.items() if mode in rule.modes
    ]


@pytest.mark.parametrize("given", [Average, SlowMo, Damped, 3, lambda center: center, object()])
def test_what_is_no_rule_is_told_what_a_rule_is(given):
    with pytest.raises(ConfigurationError) as caught:
        make_rule(given, "synchronous")
    if isinstance(given, type):
        assert f"rule={given.__name__}()" in str(caught.value)
    else:
        assert "is not an update rule" in str(caught.value)
        assert "apply(center, state, update, staleness)" in str(caught.value)
        assert "'average'" in str(caught.value)


def test_a_rule_of_another_mode_is_told_its_own():
    with pytest.raises(ConfigurationError) as caught:
        make_rule(Elsewhere(), "synchronous")
    assert "'Elsewhere' does not fit mode='synchronous'" in str(caught.value)
    assert "asynchronous, hogwild" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "mode", "made_for", "fitting"),
    [
        ("easgd", "synchronous", "asynchronous", "'average', 'diloco', 'slowmo'"),
        ("slowmo", "asynchronous", "synchronous", "'agn', 'dcasgd', 'downpour', 'dynsgd', 'eamsgd', 'easgd'"),
        ("dynsgd", "hogwild", "asynchronous", "'agn', 'downpour'"),
    ],
)
def test_a_mode_that_does_not_fit_names_the_rules_that_do(name, mode, made_for, fitting):
    with pytest.raises(ConfigurationError) as caught:
        make_rule(name, mode)
    assert str(caught.value) == (
        f"rule {name!r} does not fit mode={mode!r}: it is made for {made_for}. For mode={mode!r} there are {fitting}."
    )


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
def test_a_rule_without_its_workers_half_is_told_what_it_lacks(mode):
    with pytest.raises(ConfigurationError) as caught:
        make_rule(Elsewhere(), mode)
    assert "the rule 'Elsewhere' has no exchange(local, base, center, window)" in str(caught.value)
    assert f"which mode={mode!r} needs. It returns what a worker sends" in str(caught.value)
    assert "sparkkeras.AsynchronousRule" in str(caught.value)


class SGD:
    def __init__(self, momentum=0.0, nesterov=False):
        self.momentum, self.nesterov = momentum, nesterov


class Nadam:
    pass


class MyNadam(Nadam):
    pass


class Adam:
    pass


class Scaled:
    """As Keras's LossScaleOptimizer."""

    def __init__(self, inner_optimizer):
        self.inner_optimizer = inner_optimizer


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, Scaled])
@pytest.mark.parametrize("optimizer", [SGD(0.9, True), Nadam(), MyNadam()])
def test_eamsgd_takes_nesterov_momentum(optimizer, wrap):
    assert EAMSGD().check_optimizer(wrap(optimizer)) is None


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, Scaled])
@pytest.mark.parametrize(
    ("optimizer", "got"),
    [
        (SGD(), "SGD with nesterov=False and momentum=0.0"),
        (SGD(0.9), "SGD with nesterov=False and momentum=0.9"),
        (SGD(0.0, True), "SGD with nesterov=True and momentum=0.0"),
        (SGD(None, True), "SGD with nesterov=True and momentum=None"),
        (Adam(), "Adam with nesterov=False and momentum=0.0"),
        (None, "NoneType with"),
    ],
)
def test_eamsgd_tells_how_to_get_nesterov_momentum(optimizer, got, wrap):
    with pytest.raises(ConfigurationError) as caught:
        EAMSGD().check_optimizer(wrap(optimizer))
    assert f"'eamsgd' needs an optimizer with Nesterov momentum, and got {got}" in str(caught.value)
    assert "keras.optimizers.SGD(..., momentum=0.9, nesterov=True)" in str(caught.value)
    assert "rule='easgd'" in str(caught.value)


def test_only_eamsgd_asks_for_an_optimizer():
    assert [name for name, kind in RULES.items() if hasattr(kind, "check_optimizer")] == ["eamsgd"]


BAD = [
    (SlowMo, "momentum", 1.0),
    (SlowMo, "momentum", -0.1),
    (SlowMo, "momentum", float("nan")),
    (SlowMo, "momentum", "0.5"),
    (SlowMo, "alpha", 0),
    (SlowMo, "alpha", -1.0),
    (SlowMo, "alpha", float("nan")),
    (SlowMo, "alpha", None),
    (DiLoCo, "learning_rate", 0.0),
    (DiLoCo, "learning_rate", -0.7),
    (DiLoCo, "learning_rate", "0.7"),
    (DiLoCo, "momentum", 1),
    (DiLoCo, "momentum", -1),
    (DiLoCo, "momentum", None),
    *[(kind, "alpha", value) for kind in (EASGD, EAMSGD) for value in (0, 0.0, -0.5, 1.01, float("nan"), "0.5", True)],
    *[(DCASGD, "compensation", value) for value in (-0.04, float("nan"), float("inf"), "0.04", None, False)],
]


@pytest.mark.parametrize(("kind", "name", "value"), BAD)
def test_bad_hyper_parameters_are_refused_by_name(kind, name, value):
    with pytest.raises(ConfigurationError) as caught:
        kind(**{name: value})
    assert f"{kind.__name__}({name}={value!r}): expected" in str(caught.value)


def test_an_own_rule_that_is_no_dataclass_cannot_be_written_down():
    assert make_rule(Unsaved(), "synchronous")
    with pytest.raises(ConfigurationError, match="the rule Unsaved cannot be saved: make it a dataclass"):
        rule_config(Unsaved())


def test_an_own_rule_must_be_given_to_load():
    with pytest.raises(ConfigurationError, match=r"update rule 'Damped': pass custom_objects=\{'Damped': Damped\}"):
        rule_from_config(rule_config(Damped()), {})


@pytest.mark.parametrize(
    ("mode", "name", "words"),
    [
        (
            "asynchronous",
            "ADAG",
            "rule='ADAG' is not known for mode='asynchronous'. dist-keras's ADAG is rule='agn' here, with "
            "mode='asynchronous' or mode='hogwild'. Known: 'agn', 'dcasgd', 'downpour', 'dynsgd', 'eamsgd', 'easgd'. "
            "Did you mean 'agn'?",
        ),
        ("asynchronous", "aeasgd", "rule='easgd' here"),
        ("synchronous", "AveragingTrainer", "rule='average' here"),
        ("synchronous", "adag", "rule='agn' here, with mode='asynchronous' or mode='hogwild'. Known: 'average', "),
    ],
)
def test_names_of_dist_keras_lead_to_the_rule(mode, name, words):
    with pytest.raises(ConfigurationError) as caught:
        make_rule(name, mode)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "given", "meant"),
    [
        (SlowMo, "mom", "momentum"),
        (DiLoCo, "learn_rate", "learning_rate"),
        (EASGD, "alfa", "alpha"),
        (EAMSGD, "alfa", "alpha"),
        (DCASGD, "compensate", "compensation"),
    ],
)
def test_misspelt_hyper_parameters_suggest_the_nearest(kind, given, meant):
    with pytest.raises(UnknownArgumentError, match=f"^{kind.__name__} takes no argument '{given}'.*Did you mean '{meant}'"):
        kind(**{given: 0.5})
    assert pickle.loads(pickle.dumps(kind())) == kind()
