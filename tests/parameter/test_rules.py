"""Update rules against arrays computed by hand.

To add a rule to the conformance suite, add it to ``SYNCHRONOUS_UNDER_TEST`` or ``ASYNCHRONOUS_UNDER_TEST``.
"""

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


CUSTOM = {"Damped": Damped, "Clipped": Clipped}

SYNCHRONOUS_UNDER_TEST = [
    Average(),
    SlowMo(),
    DiLoCo(),
    Damped(),
]

ASYNCHRONOUS_UNDER_TEST = [
    Downpour(),
    AGN(),
    DynSGD(),
    EASGD(),
    EASGD(alpha=np.float64(0.25)),
    EAMSGD(),
    DCASGD(),
    DCASGD(compensation=np.float64(0.04)),
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


def applied(rule, sent, staleness):
    center = np.array(SERVER, np.float32)
    rule.apply(center, rule.init(center), update(sent), staleness)
    return center.tolist()


# Synchronous rules, computed by hand. Rates are powers of two, so that every step is exact.


@pytest.mark.parametrize(
    ("rule", "updates", "centers"),
    [
        (Average(), [([3, -1], 0.1), ([0.5, 8], 0.1)], [[3, -1], [0.5, 8]]),
        (
            SlowMo(momentum=0.25, alpha=0.5),
            [([0, 4], 0.5), ([0.5, 1], 0.25)],
            [
                [0.5, 3],  # (C - W)/lr = [2, -4] = u; C - 0.5*0.5*u
                [0.4375, 2.125],  # (C - W)/lr = [0, 8]; u = [0.5, -1] + [0, 8] = [0.5, 7]; C - 0.5*0.25*u
            ],
        ),
        (SlowMo(momentum=0.5), [([0, 4], 0.5), ([0, 4], 0.0), ([-1, 4], 0.5)], [[0, 4], [0, 4], [-1.5, 5]]),
        (
            DiLoCo(learning_rate=0.5, momentum=0.5),  # does not use the workers' learning rate
            [([0, 4], 0.5), ([-0.75, 3.5], 0.0), ([-0.625, 1.75], 0.25)],
            [
                [0.25, 3.5],  # g = u = [1, -2]; C - 0.5*(g + 0.5*u) = C - 0.5*[1.5, -3]
                [-0.625, 3.75],  # g = [1, 0]; u = [0.5, -1] + g = [1.5, -1]; C - 0.5*[1.75, -0.5]
                [-0.8125, 2.375],  # g = [0, 2]; u = [0.75, -0.5] + g = [0.75, 1.5]; C - 0.5*[0.375, 2.75]
            ],
        ),
    ],
)
def test_synchronous_rules_match_values_computed_by_hand(rule, updates, centers):
    center = np.array([1, 2], np.float32)
    state, seen = rule.init(center), []
    for weights, learning_rate in updates:
        rule.apply(center, state, update(weights, learning_rate), 0)
        seen.append(center.tolist())
    assert seen == centers


# Asynchronous rules, computed by hand. The worker trained from B = [1, 2] to W = [3, -2], and pulls C = [5, 4].

LOCAL, BASE, CENTER = [3, -2], [1, 2], [5, 4]

# The center has moved to [10, 20] when the push arrives.
SERVER = [10, 20]


@pytest.mark.parametrize(
    ("rule", "of_window", "sent", "following"),
    [
        (Downpour(), {}, [2, -4], [7, 0]),  # d = W - B; C + d
        (AGN(), {"steps": 4}, [0.5, -1], [5.5, 3]),  # d = (W - B)/4; C + d
        (EASGD(alpha=0.25), {}, [-0.5, -1.5], [3.5, -0.5]),  # E = (W - C)/4 = [-2, -6]/4; W - E
        # d = [2, -4]; C - B = [4, 2]; d*d*(C - B) = [16, 32]; d - [16, 32]/8/0.5
        (DCASGD(compensation=0.125), {"steps": 1, "learning_rate": 0.5}, [-2, -12], [3, -8]),
        (DCASGD(compensation=0.125), {"learning_rate": 0.0}, [2, -4], [7, 0]),
    ],
    ids=repr,
)
def test_exchanges_match_values_computed_by_hand(rule, of_window, sent, following):
    assert exchanged(rule, LOCAL, BASE, CENTER, **of_window) == (sent, following)


@pytest.mark.parametrize("rule", [Downpour(), AGN(), EASGD(), EAMSGD(), DCASGD()], ids=repr)
def test_the_server_adds_what_a_worker_sends(rule):
    assert applied(rule, [2, -4], 3) == [12, 16]


@pytest.mark.parametrize(
    ("staleness", "center"),
    [(0, [12, 16]), (1, [11, 18]), (3, [10.5, 19])],  # C + d/(s + 1)
)
def test_dynsgd_adds_less_of_a_stale_update(staleness, center):
    assert applied(DynSGD(), [2, -4], staleness) == center


@pytest.mark.parametrize(("num_workers", "alpha"), [(1, 0.9), (9, 0.1)])
def test_the_default_alpha_of_easgd_depends_on_the_number_of_workers(num_workers, alpha):
    sent, following = exchanged(EASGD(), LOCAL, BASE, CENTER, num_workers=num_workers)
    assert np.allclose(sent, [-2 * alpha, -6 * alpha])
    assert np.allclose(following, [3 + 2 * alpha, -2 + 6 * alpha])


def test_dcasgd_over_a_window_is_k_compensated_steps_of_the_mean_gradient():
    """For one step this is the formula of Zheng et al.: ``w = w - lr*(g + l*g*g*(w - w_bak))``."""
    draw = np.random.default_rng(1)
    gradient, base, center = draw.normal(size=(3, 50))
    steps, rate, compensation = 5, 0.3, 0.7
    _, following = DCASGD(compensation).exchange(base - steps * rate * gradient, base, center, window(steps, rate))
    expected = center - steps * rate * (gradient + compensation * gradient * gradient * (center - base))
    assert np.allclose(following, expected, rtol=0, atol=1e-12)


def test_dcasgd_with_a_tiny_learning_rate_stays_finite():
    rate = 1e-38
    arrays = (np.full(3, value, np.float32) for value in (rate, 0.0, 1e3))
    with np.errstate(under="ignore"):
        sent, _ = DCASGD().exchange(*arrays, window(1, rate))
    assert np.isfinite(sent).all()


# The conformance suite of all rules


@pytest.fixture(params=RULES_UNDER_TEST, ids=repr)
def rule(request):
    return request.param


def some(draw, size=7, dtype=np.float32):
    return draw.normal(size=size).astype(dtype)


def test_every_built_in_rule_is_under_test():
    assert set(RULES.values()) <= {type(rule) for rule in RULES_UNDER_TEST}


def test_a_rule_has_the_interface_that_its_modes_need(rule):
    assert isinstance(rule, UpdateRule)
    assert rule.modes
    assert all(make_rule(rule, mode) is rule for mode in rule.modes)
    assert isinstance(rule, AsynchronousRule) == bool(rule.modes & {"asynchronous", "hogwild"})
    assert isinstance(rule, AsynchronousRule) != ("synchronous" in rule.modes)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_apply_changes_the_center_and_the_state_in_place(rule, dtype):
    """And nothing else: neither the update nor the vector that the center is a slice of."""
    draw = np.random.default_rng(0)
    whole = some(draw, 10, dtype)
    old, center = whole.copy(), whole[:7]
    state = rule.init(center)
    assert np.array_equal(whole, old)
    before = dict(state)
    for staleness in (0, 3, np.int64(3)):
        one = towards(rule, center, some(draw, dtype=dtype))
        sent = one.sent.copy()
        assert rule.apply(center, state, one, staleness) is None
        assert np.array_equal(one.sent, sent)
    assert np.all(whole[:7] != old[:7])
    assert np.array_equal(whole[7:], old[7:])
    assert state.keys() == before.keys()
    for name, array in state.items():
        assert array is before[name]
        assert (array.shape, array.dtype) == (center.shape, dtype)


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


def test_a_rule_works_without_parameters(rule):
    none = np.zeros(0, np.float32)
    rule.apply(none, rule.init(none), update([]), 0)
    if isinstance(rule, AsynchronousRule):
        assert [made.size for made in rule.exchange(none, none, none, window())] == [0, 0]


def test_a_rule_survives_json(rule):
    config = json.loads(json.dumps(rule_config(rule)))
    assert rule_from_config(config, CUSTOM) == rule
    assert type(rule_from_config(config, CUSTOM)) is type(rule)


# The conformance suite of asynchronous rules


@pytest.fixture(params=ASYNCHRONOUS_UNDER_TEST, ids=repr)
def asynchronous(request):
    return request.param


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exchange_returns_new_arrays_of_the_same_dtype_and_changes_no_argument(asynchronous, dtype):
    """Also with numbers of NumPy."""
    draw = np.random.default_rng(0)
    given = [some(draw, dtype=dtype) for _ in range(3)]
    old = [array.copy() for array in given]
    for seen in (window(), window(np.int64(5), np.float64(0.1), np.int64(2))):
        sent, following = asynchronous.exchange(*given, seen)
        assert all(np.array_equal(array, before) for array, before in zip(given, old, strict=True))
        assert not np.shares_memory(sent, following)
        for made in (sent, following):
            assert not any(np.shares_memory(made, array) for array in given)
            assert (made.shape, made.dtype) == (given[0].shape, dtype)


# Names and errors


@pytest.mark.parametrize(("name", "expected"), [(name, kind()) for name, kind in RULES.items()])
def test_a_rule_is_made_from_its_name(name, expected):
    for mode in expected.modes:
        made = make_rule(name, mode)
        assert made == expected
        assert type(made) is type(expected)
    assert rule_name(expected) == name


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


@dataclass(frozen=True)
class WithoutStaleness(Damped):
    def apply(self, center, state, update):
        raise AssertionError("never called")


@pytest.mark.parametrize(
    ("given", "mode", "words"),
    [
        (Average, "synchronous", r"rule=Average\(\)"),
        (3, "synchronous", "no modes, no init"),
        (WithoutStaleness(), "synchronous", r"takes \(center, state, update\)"),
        (OtherModes(), "hogwild", "'OtherModes' has no exchange"),
        ("dynsgd", "hogwild", r"supports 'asynchronous'\. The rules for mode='hogwild' are 'agn', 'downpour'\.$"),
        ("avg", "hogwild", "'agn', 'downpour'.* mean 'agn'"),
        # Names of dist-keras
        ("ADAG", "asynchronous", "mode='asynchronous' or mode='hogwild'.* mean 'agn'"),
        ("AveragingTrainer", "synchronous", "rule='average' in"),
    ],
)
def test_a_rule_that_cannot_be_used_is_an_error(given, mode, words):
    with pytest.raises(ConfigurationError, match=words):
        make_rule(given, mode)


class Nadam:
    pass


class MyNadam(Nadam):
    pass


def sgd(nesterov, momentum):
    return SimpleNamespace(nesterov=nesterov, momentum=momentum)


def scaled(optimizer):
    """As Keras's LossScaleOptimizer."""
    return SimpleNamespace(inner_optimizer=optimizer)


@pytest.mark.parametrize("optimizer", [sgd(True, 0.9), scaled(sgd(True, 0.9)), MyNadam()])
def test_eamsgd_accepts_nesterov_momentum(optimizer):
    EAMSGD().check_optimizer(optimizer)


@pytest.mark.parametrize(
    ("optimizer", "got"),
    [
        (scaled(sgd(False, 0.9)), "nesterov=False and momentum=0.9"),
        (sgd(True, None), "nesterov=True and momentum=None"),
        (object(), "nesterov=False"),
    ],
)
def test_the_error_of_eamsgd_says_how_to_get_nesterov_momentum(optimizer, got):
    with pytest.raises(ConfigurationError, match=f"{got}.*momentum=0.9, nesterov=True"):
        EAMSGD().check_optimizer(optimizer)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (SlowMo, "momentum", 1.0),
        (SlowMo, "alpha", float("nan")),
        (DiLoCo, "learning_rate", "0.7"),
        (DiLoCo, "momentum", -0.1),
        (EASGD, "alpha", 0),
        (EAMSGD, "alpha", 1.01),
        (EASGD, "alpha", True),
        (DCASGD, "compensation", -0.04),
        (DCASGD, "compensation", float("inf")),
    ],
)
def test_the_error_of_an_invalid_hyper_parameter_names_it(kind, name, value):
    with pytest.raises(ConfigurationError, match=rf"{kind.__name__}\({name}={value!r}\)"):
        kind(**{name: value})


def test_a_custom_rule_that_is_not_a_dataclass_cannot_be_saved():
    with pytest.raises(ConfigurationError, match="not a dataclass"):
        rule_config(SimpleNamespace())


def test_loading_a_custom_rule_needs_custom_objects():
    with pytest.raises(ConfigurationError, match=r"custom_objects=\{'Damped': Damped\}"):
        rule_from_config(rule_config(Damped()), {})


def test_a_misspelt_hyper_parameter_suggests_the_nearest():
    with pytest.raises(UnknownArgumentError, match="^DCASGD .*'compensate'.* mean 'compensation'"):
        DCASGD(compensate=0.5)
    assert pickle.loads(pickle.dumps(DCASGD())) == DCASGD()
