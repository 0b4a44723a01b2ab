"""Update rules against arrays computed by hand.

To add a rule to the conformance suite, add it to ``SYNCHRONOUS_UNDER_TEST`` or ``ASYNCHRONOUS_UNDER_TEST``.
"""

import dataclasses
import json
import pickle
from dataclasses import dataclass
from types import SimpleNamespace

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
    """The custom rule in the docstring of `UpdateRule`."""

    modes = frozenset({"synchronous"})
    share: float = 0.5

    def init(self, center):
        return {}

    def apply(self, center, state, update, staleness):
        center += self.share * (update.sent - center)


@dataclass(frozen=True)
class Heavy:
    """A custom rule with a state."""

    modes = frozenset({"synchronous"})
    friction: float = 0.25

    def init(self, center):
        return {"velocity": np.zeros_like(center)}

    def apply(self, center, state, update, staleness):
        state["velocity"] *= self.friction
        state["velocity"] += update.sent - center
        center += state["velocity"]


class Unsaved:
    """A custom rule that is not a dataclass."""

    modes = frozenset({"synchronous"})

    def init(self, center):
        return {}

    def apply(self, center, state, update, staleness):
        center[...] = update.sent


@dataclass(frozen=True)
class OtherModes(Damped):
    """A custom rule for other modes, without `exchange`."""

    modes = frozenset({"asynchronous", "hogwild"})


@dataclass(frozen=True)
class Clipped:
    """The custom rule in the docstring of `AsynchronousRule`."""

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


CUSTOM = {"Damped": Damped, "Heavy": Heavy, "Clipped": Clipped}

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
    """The update that moves the center to ``weights``; of an asynchronous rule, for a worker that started at the center."""
    weights = np.array(weights, center.dtype)
    if isinstance(rule, AsynchronousRule):
        weights, _ = rule.exchange(weights, center.copy(), center.copy(), window())
    return update(weights, dtype=center.dtype)


def exchanged(rule, local, base, center, **of_window):
    """What a worker sends and what it continues from, as lists."""
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


# Synchronous rules, computed by hand. Rates are powers of two, so that every step is exact.


def test_average_replaces_the_center():
    assert applies(Average(), [1, 2], [update([3, -1]), update([0.5, 8])]) == [[3, -1], [0.5, 8]]


def test_average_copies_the_update():
    center, one = np.zeros(2, np.float32), update([3, -1])
    Average().apply(center, {}, one, 0)
    one.sent[:] = 7
    assert center.tolist() == [3, -1]


def test_slowmo_matches_values_computed_by_hand():
    updates = [update([0, 4], 0.5), update([-1, 4], 0.5), update([-1.5, 4.5], 0.25)]
    assert applies(SlowMo(momentum=0.5, alpha=1.0), [1, 2], updates) == [
        [0, 4],  # (C - W)/lr = [2, -4] = u; C - 0.5*u
        [-1.5, 5],  # (C - W)/lr = [2, 0]; u = [1, -2] + [2, 0] = [3, -2]; C - 0.5*u
        [-1.875, 4.75],  # (C - W)/lr = [0, 2]; u = [1.5, -1] + [0, 2] = [1.5, 1]; C - 0.25*u
    ]


def test_slowmo_with_a_slow_learning_rate_matches_values_computed_by_hand():
    updates = [update([0, 4], 0.5), update([0.5, 1], 0.5)]
    assert applies(SlowMo(momentum=0.25, alpha=0.5), [1, 2], updates) == [
        [0.5, 3],  # u = [2, -4]; C - 0.5*0.5*u
        [0.375, 2.25],  # (C - W)/lr = [0, 4]; u = [0.5, -1] + [0, 4] = [0.5, 3]; C - 0.25*u
    ]


def test_slowmo_keeps_the_momentum_in_its_state():
    center = np.array([1, 2], np.float32)
    rule = SlowMo(momentum=0.5)
    state = rule.init(center)
    assert {name: array.tolist() for name, array in state.items()} == {"momentum": [0, 0]}
    rule.apply(center, state, update([0, 4], 0.5), 0)
    assert state["momentum"].tolist() == [2, -4]
    rule.apply(center, state, update([-1, 4], 0.5), 0)
    assert state["momentum"].tolist() == [3, -2]


def test_slowmo_with_a_learning_rate_of_zero_changes_nothing():
    center = np.array([1, 2], np.float32)
    rule = SlowMo(momentum=0.5)
    state = rule.init(center)
    rule.apply(center, state, update([0, 4], 0.5), 0)
    rule.apply(center, state, update([0, 4], 0.0), 0)
    assert center.tolist() == [0, 4]
    assert state["momentum"].tolist() == [2, -4]


def test_slowmo_without_momentum_equals_average():
    draw = np.random.default_rng(0)
    updates = [update(draw.normal(size=50), rate) for rate in (0.1, 0.003, 1.0)]
    center = draw.normal(size=50)
    slow, plain = applies(SlowMo(momentum=0.0, alpha=1.0), center, updates), applies(Average(), center, updates)
    assert np.allclose(slow, plain, rtol=0, atol=1e-6)


def test_diloco_matches_values_computed_by_hand():
    updates = [update([0, 4]), update([-0.75, 3.5]), update([-0.625, 1.75])]
    assert applies(DiLoCo(learning_rate=0.5, momentum=0.5), [1, 2], updates) == [
        [0.25, 3.5],  # g = u = [1, -2]; C - 0.5*(g + 0.5*u) = C - 0.5*[1.5, -3]
        [-0.625, 3.75],  # g = [1, 0]; u = [0.5, -1] + g = [1.5, -1]; C - 0.5*[1.75, -0.5]
        [-0.8125, 2.375],  # g = [0, 2]; u = [0.75, -0.5] + g = [0.75, 1.5]; C - 0.5*[0.375, 2.75]
    ]


def test_diloco_keeps_the_momentum_in_its_state():
    center = np.array([1, 2], np.float32)
    rule = DiLoCo(learning_rate=0.5, momentum=0.5)
    state = rule.init(center)
    rule.apply(center, state, update([0, 4]), 0)
    assert {name: array.tolist() for name, array in state.items()} == {"momentum": [1, -2]}
    rule.apply(center, state, update([-0.75, 3.5]), 0)
    assert state["momentum"].tolist() == [1.5, -1]


def test_diloco_does_not_use_the_workers_learning_rate():
    one, other = ([update([0, 4], rate), update([3, 1], rate)] for rate in (0.5, 0.0))
    assert applies(DiLoCo(), [1, 2], one) == applies(DiLoCo(), [1, 2], other)


def test_diloco_with_a_rate_of_one_and_no_momentum_equals_average():
    assert applies(DiLoCo(learning_rate=1.0, momentum=0.0), [1, 2], [update([3, -1])]) == [[3, -1]]


def test_defaults_are_the_papers():
    assert (DiLoCo().learning_rate, DiLoCo().momentum) == (0.7, 0.9)
    assert SlowMo().alpha == 1.0
    assert 0.5 <= SlowMo().momentum <= 0.7


# Asynchronous rules, computed by hand. The worker trained from B = [1, 2] to W = [3, -2], and pulls C = [5, 4].

LOCAL, BASE, CENTER = [3, -2], [1, 2], [5, 4]

# The center has moved to [10, 20] when the push arrives.
SERVER = [10, 20]


def test_downpour_matches_values_computed_by_hand():
    # d = W - B; C + d
    assert exchanged(Downpour(), LOCAL, BASE, CENTER) == ([2, -4], [7, 0])
    assert applied(Downpour(), SERVER, [2, -4], 3) == [12, 16]


@pytest.mark.parametrize(
    ("steps", "sent", "following"),
    [
        (1, [2, -4], [7, 0]),
        (4, [0.5, -1], [5.5, 3]),  # d = (W - B)/4; C + d
        (16, [0.125, -0.25], [5.125, 3.75]),
        (0, [2, -4], [7, 0]),  # never happens, and must not divide by zero
    ],
)
def test_agn_matches_values_computed_by_hand(steps, sent, following):
    assert exchanged(AGN(), LOCAL, BASE, CENTER, steps=steps) == (sent, following)
    assert applied(AGN(), SERVER, [0.5, -1], 3) == [10.5, 19]


@pytest.mark.parametrize(
    ("staleness", "center"),
    [(0, [12, 16]), (1, [11, 18]), (3, [10.5, 19]), (7, [10.25, 19.5])],  # C + d/(s + 1)
)
def test_dynsgd_matches_values_computed_by_hand(staleness, center):
    assert exchanged(DynSGD(), LOCAL, BASE, CENTER) == ([2, -4], [7, 0])
    assert applied(DynSGD(), SERVER, [2, -4], staleness) == center


@pytest.mark.parametrize("kind", [EASGD, EAMSGD])
def test_easgd_matches_values_computed_by_hand(kind):
    # E = (W - C)/4 = [-2, -6]/4; W - E
    assert exchanged(kind(alpha=0.25), LOCAL, BASE, CENTER) == ([-0.5, -1.5], [3.5, -0.5])
    assert applied(kind(alpha=0.25), SERVER, [-0.5, -1.5], 3) == [9.5, 18.5]


@pytest.mark.parametrize("kind", [EASGD, EAMSGD])
def test_easgd_does_not_use_the_base(kind):
    assert exchanged(kind(alpha=0.25), LOCAL, [70, 80], CENTER) == exchanged(kind(alpha=0.25), LOCAL, BASE, CENTER)


def test_easgd_with_alpha_one_swaps_worker_and_center():
    assert exchanged(EASGD(alpha=1), LOCAL, BASE, CENTER) == ([-2, -6], CENTER)
    assert applied(EASGD(alpha=1), CENTER, [-2, -6], 0) == LOCAL


@pytest.mark.parametrize(("num_workers", "alpha"), [(1, 0.9), (2, 0.45), (9, 0.1)])
def test_the_default_alpha_of_easgd_depends_on_the_number_of_workers(num_workers, alpha):
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
def test_dcasgd_matches_values_computed_by_hand(compensation, learning_rate, sent, following, steps):
    """The mean gradient of a window of k steps is d/(k*lr), so k times the compensation does what 1 does for one step."""
    rule = DCASGD(compensation=compensation * steps)
    assert exchanged(rule, LOCAL, BASE, CENTER, learning_rate=learning_rate, steps=steps) == (sent, following)
    assert applied(rule, SERVER, sent, 3) == [10 + sent[0], 20 + sent[1]]


def test_dcasgd_over_one_step_is_the_papers_formula():
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


def test_dcasgd_moves_a_stale_gradient_towards_the_gradient_at_the_center():
    """For ``-log sigmoid(w)`` at 0, ``g*g`` is the Hessian."""
    base, center, rate = np.array([0.0]), np.array([0.5]), 0.1

    def gradient(weights):
        return -1 / (1 + np.exp(weights))

    right = -rate * gradient(center)
    late, _ = DCASGD(0.0).exchange(base - rate * gradient(base), base, center, window(1, rate))
    compensated, _ = DCASGD(1.0).exchange(base - rate * gradient(base), base, center, window(1, rate))
    assert abs(compensated - right)[0] < 0.05 * abs(late - right)[0]


def test_dcasgd_with_a_tiny_learning_rate_stays_finite():
    rate = 1e-38
    arrays = (np.full(3, value, np.float32) for value in (rate, 0.0, 1e3))
    with np.errstate(under="ignore"):
        sent, _ = DCASGD().exchange(*arrays, window(1, rate))
    assert np.isfinite(sent).all()


def test_the_custom_rule_of_the_docstring():
    # |W - B| = |[3, 4]| = 5, so a fifth of it is sent
    sent, following = exchanged(Clipped(), [4, 6], BASE, CENTER)
    assert np.allclose(sent, [0.6, 0.8])
    assert np.allclose(following, [5.6, 4.8])
    assert exchanged(Clipped(norm=10.0), [4, 6], BASE, CENTER) == ([3, 4], [8, 8])


def test_defaults_of_the_asynchronous_rules_are_the_papers():
    assert (EASGD().alpha, EAMSGD().alpha, DCASGD().compensation) == (None, None, 0.04)


# The conformance suite of all rules


@pytest.fixture(params=RULES_UNDER_TEST, ids=repr)
def rule(request):
    return request.param


def some(draw, size=7, dtype=np.float32):
    return draw.normal(size=size).astype(dtype)


def test_every_built_in_rule_is_under_test():
    assert set(RULES.values()) <= {type(rule) for rule in RULES_UNDER_TEST}


def test_a_rule_has_the_interface_of_update_rule(rule):
    assert isinstance(rule, UpdateRule)
    assert rule.modes
    assert isinstance(rule.modes, frozenset)
    assert all(make_rule(rule, mode) is rule for mode in rule.modes)


def test_a_rule_is_frozen(rule):
    for field in dataclasses.fields(rule):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(rule, field.name, 0.1)


def test_apply_works_in_place(rule):
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


def test_apply_changes_the_vector_that_the_center_is_a_slice_of(rule):
    draw = np.random.default_rng(1)
    whole = some(draw, 10)
    old = whole.copy()
    center = whole[:7]
    rule.apply(center, rule.init(center), towards(rule, center, some(draw)), 0)
    assert np.all(whole[:7] != old[:7])
    assert np.array_equal(whole[7:], old[7:])


def test_apply_does_not_change_the_update(rule):
    draw = np.random.default_rng(2)
    center, one = some(draw), update(some(draw))
    old = one.sent.copy()
    rule.apply(center, rule.init(center), one, 0)
    assert np.array_equal(one.sent, old)


def test_init_does_not_change_the_center(rule):
    center = np.ones(4, np.float32)
    rule.init(center)
    assert center.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_apply_keeps_the_dtype(rule, dtype):
    draw = np.random.default_rng(3)
    center = some(draw, dtype=dtype)
    state = rule.init(center)
    for staleness in (0, 3, np.int64(3)):
        rule.apply(center, state, towards(rule, center, some(draw)), staleness)
    assert center.dtype == dtype
    assert all(array.dtype == dtype for array in state.values())


def test_apply_keeps_the_names_and_shapes_of_the_state(rule):
    draw = np.random.default_rng(4)
    center = some(draw)
    state = rule.init(center)
    shapes = {name: array.shape for name, array in state.items()}
    assert all(shape == center.shape for shape in shapes.values())
    for _ in range(3):
        rule.apply(center, state, update(some(draw)), 0)
        assert {name: array.shape for name, array in state.items()} == shapes


def test_the_center_is_a_fixed_point(rule):
    center = some(np.random.default_rng(5))
    old = center.copy()
    state = rule.init(center)
    for _ in range(3):
        rule.apply(center, state, towards(rule, center, center), 0)
    assert np.array_equal(center, old)
    assert all(not array.any() for array in state.values())


def test_the_first_apply_moves_towards_the_update(rule):
    draw = np.random.default_rng(6)
    center, weights = some(draw), some(draw)
    old = center.copy()
    rule.apply(center, rule.init(center), towards(rule, center, weights), 0)
    assert np.array_equal(np.sign(center - old), np.sign(weights - old))


def test_the_same_updates_give_bitwise_the_same_center(rule):
    def run():
        draw = np.random.default_rng(7)
        center = some(draw)
        state = rule.init(center)
        for _ in range(4):
            rule.apply(center, state, update(some(draw)), 0)
        return center.tobytes(), {name: array.tobytes() for name, array in state.items()}

    assert run() == run()


def test_a_copied_state_can_be_used_further(rule):
    """As with a saved model: the state is copied between two updates."""
    draw = np.random.default_rng(8)
    center, one, two = some(draw), update(some(draw)), update(some(draw))
    state = rule.init(center)
    rule.apply(center, state, one, 0)
    copy, stored = center.copy(), {name: array.copy() for name, array in state.items()}
    rule.apply(center, state, two, 0)
    rule.apply(copy, stored, two, 0)
    assert np.array_equal(copy, center)


def test_apply_works_without_parameters(rule):
    center = np.zeros(0, np.float32)
    rule.apply(center, rule.init(center), update([]), 0)
    assert center.size == 0


def test_a_rule_survives_json(rule):
    config = json.loads(json.dumps(rule_config(rule)))
    assert rule_from_config(config, CUSTOM) == rule
    assert type(rule_from_config(config, CUSTOM)) is type(rule)


# The conformance suite of asynchronous rules


@pytest.fixture(params=ASYNCHRONOUS_UNDER_TEST, ids=repr)
def asynchronous(request):
    return request.param


def test_a_rule_has_exchange_if_its_modes_need_it(rule):
    assert isinstance(rule, AsynchronousRule) == bool(rule.modes & {"asynchronous", "hogwild"})
    assert isinstance(rule, AsynchronousRule) != ("synchronous" in rule.modes)


def test_exchange_does_not_change_its_arguments(asynchronous):
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
def test_exchange_keeps_the_dtype_and_shape(asynchronous, dtype, number):
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


def test_exchange_works_without_parameters(asynchronous):
    none = np.zeros(0, np.float32)
    assert [made.size for made in asynchronous.exchange(none, none, none, window())] == [0, 0]


def test_a_worker_at_an_unchanged_center_sends_zeros(asynchronous):
    center = some(np.random.default_rng(2))
    sent, following = asynchronous.exchange(center, center, center, window())
    assert not sent.any()
    assert np.array_equal(following, center)


@pytest.mark.parametrize("rule", [Downpour(), DynSGD(), DCASGD()], ids=repr)
def test_a_single_worker_trains_as_without_a_server(rule):
    """Its base stays equal to the center, so nothing is counted twice."""
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
    """Train a linear regression on ``workers`` with different rows; returns the error of the center.

    Workers exchange in a random order, and a push reaches the server up to three exchanges later, so that other updates are
    applied in between.
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
        for due, sender, pushed, pulled in [push for push in underway if push[0] <= number or push[1] == worker]:
            underway.remove((due, sender, pushed, pulled))
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


def test_workers_that_exchange_asynchronously_find_the_optimum(asynchronous):
    assert simulate(asynchronous) < 1e-6


def test_eamsgd_workers_with_momentum_find_the_optimum():
    assert simulate(EAMSGD(), momentum=0.9, rate=0.01) < 1e-6


# Names and errors


@pytest.mark.parametrize(("name", "expected"), [(name, kind()) for name, kind in RULES.items()])
def test_a_rule_is_made_from_its_name(name, expected):
    for mode in expected.modes:
        made = make_rule(name, mode)
        assert made == expected
        assert type(made) is type(expected)
    assert rule_name(expected) == name


def test_which_rules_support_hogwild():
    assert {name for name, kind in RULES.items() if "hogwild" in kind.modes} == {"downpour", "agn"}


def test_each_mode_has_a_default_rule():
    assert make_rule(None, "synchronous") == Average()
    assert make_rule(None, "asynchronous") == Downpour()
    assert make_rule(None, "hogwild") == Downpour()


def test_a_custom_rule_has_the_name_of_its_class():
    custom = Damped(share=0.25)
    assert make_rule(custom, "synchronous") is custom
    assert rule_name(custom) == "Damped"
    assert rule_config(custom) == {"name": "Damped", "parameters": {"share": 0.25}}
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
def test_only_names_of_rules_for_the_mode_are_suggested(mode, meant):
    with pytest.raises(ConfigurationError, match=rf"'avg'.*Did you mean '{meant}'\?") as caught:
        make_rule("avg", mode)
    assert [name for name in RULES if repr(name) in str(caught.value)] == [
        name for name, rule in RULES.items() if mode in rule.modes
    ]


@pytest.mark.parametrize("given", [Average, SlowMo, Damped, 3, lambda center: center, object()])
def test_the_error_of_an_invalid_rule_says_what_is_expected(given):
    with pytest.raises(ConfigurationError) as caught:
        make_rule(given, "synchronous")
    if isinstance(given, type):
        assert f"is a class; expected an object: rule={given.__name__}()" in str(caught.value)
    else:
        assert "is not an update rule" in str(caught.value)
        assert "apply(center, state, update, staleness)" in str(caught.value)
        assert "it has no modes, no init, no apply: expected one of ['agn', 'average'" in str(caught.value)


@dataclass(frozen=True)
class WithoutStaleness(Damped):
    def apply(self, center, state, update):
        raise AssertionError("never called")


@dataclass(frozen=True)
class WithoutWindow(OtherModes):
    def exchange(self, local, base, center):
        raise AssertionError("never called")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            WithoutStaleness(),
            r"apply of the rule 'WithoutStaleness' takes \(center, state, update\) after self; expected .*ss\)",
        ),
        (WithoutWindow(), r"exchange of the rule .* takes \(local, base, center\) after self; expected .*, window\)"),
        (SimpleNamespace(modes={"synchronous"}, apply=print), "is not an update rule, because it has no init: expected"),
    ],
)
def test_the_methods_of_a_rule_are_checked_before_training(given, words):
    with pytest.raises(ConfigurationError, match=words):
        make_rule(given, next(iter(given.modes)))


def test_the_error_of_a_rule_for_other_modes_lists_them():
    with pytest.raises(ConfigurationError) as caught:
        make_rule(OtherModes(), "synchronous")
    assert "'OtherModes' does not fit mode='synchronous'" in str(caught.value)
    assert "'asynchronous', 'hogwild'" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "mode", "supported", "fitting"),
    [
        ("easgd", "synchronous", "'asynchronous'", "'average', 'diloco', 'slowmo'"),
        ("slowmo", "asynchronous", "'synchronous'", "'agn', 'dcasgd', 'downpour', 'dynsgd', 'eamsgd', 'easgd'"),
        ("dynsgd", "hogwild", "'asynchronous'", "'agn', 'downpour'"),
    ],
)
def test_the_error_of_an_unsupported_mode_lists_the_rules_for_it(name, mode, supported, fitting):
    with pytest.raises(ConfigurationError) as caught:
        make_rule(name, mode)
    assert str(caught.value) == (
        f"rule {name!r} does not fit mode={mode!r}: it supports {supported}. The rules for mode={mode!r} are {fitting}."
    )


@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
def test_the_error_of_a_rule_without_exchange_says_what_is_missing(mode):
    with pytest.raises(ConfigurationError) as caught:
        make_rule(OtherModes(), mode)
    assert "the rule 'OtherModes' has no exchange(local, base, center, window)" in str(caught.value)
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
def test_eamsgd_accepts_nesterov_momentum(optimizer, wrap):
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
def test_the_error_of_eamsgd_says_how_to_get_nesterov_momentum(optimizer, got, wrap):
    with pytest.raises(ConfigurationError) as caught:
        EAMSGD().check_optimizer(wrap(optimizer))
    assert f"'eamsgd' needs an optimizer with Nesterov momentum, received {got}" in str(caught.value)
    assert "keras.optimizers.SGD(..., momentum=0.9, nesterov=True)" in str(caught.value)
    assert "rule='easgd'" in str(caught.value)


def test_only_eamsgd_checks_the_optimizer():
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
def test_the_error_of_an_invalid_hyper_parameter_names_it(kind, name, value):
    with pytest.raises(ConfigurationError) as caught:
        kind(**{name: value})
    assert f"{kind.__name__}({name}={value!r}): expected" in str(caught.value)


def test_a_custom_rule_that_is_not_a_dataclass_cannot_be_saved():
    assert make_rule(Unsaved(), "synchronous")
    with pytest.raises(ConfigurationError, match="the rule Unsaved cannot be saved, because it is not a dataclass"):
        rule_config(Unsaved())


def test_loading_a_custom_rule_needs_custom_objects():
    with pytest.raises(ConfigurationError, match=r"update rule 'Damped': pass custom_objects=\{'Damped': Damped\}"):
        rule_from_config(rule_config(Damped()), {})


@pytest.mark.parametrize(
    ("mode", "name", "message"),
    [
        (
            "asynchronous",
            "ADAG",
            "rule='ADAG' is not known for mode='asynchronous'. The ADAG of dist-keras is rule='agn' in sparkkeras, with "
            "mode='asynchronous' or mode='hogwild'. Known: 'agn', 'dcasgd', 'downpour', 'dynsgd', 'eamsgd', 'easgd'. "
            "Did you mean 'agn'?",
        ),
        ("asynchronous", "aeasgd", "rule='easgd' in sparkkeras"),
        ("synchronous", "AveragingTrainer", "rule='average' in sparkkeras"),
        ("synchronous", "adag", "rule='agn' in sparkkeras, with mode='asynchronous' or mode='hogwild'. Known: 'average', "),
    ],
)
def test_names_of_dist_keras_are_translated(mode, name, message):
    with pytest.raises(ConfigurationError) as caught:
        make_rule(name, mode)
    assert message in str(caught.value)


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
def test_a_misspelt_hyper_parameter_suggests_the_nearest(kind, given, meant):
    with pytest.raises(UnknownArgumentError, match=f"^{kind.__name__} takes no argument '{given}'.*Did you mean '{meant}'"):
        kind(**{given: 0.5})
    assert pickle.loads(pickle.dumps(kind())) == kind()
