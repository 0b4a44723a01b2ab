"""Update rules against arrays computed by hand. A new rule joins the conformance suite by a line in ``RULES_UNDER_TEST``."""

import dataclasses
import json
from dataclasses import dataclass

import numpy as np
import pytest

from sparkkeras.errors import ConfigurationError
from sparkkeras.parameter.rules import (
    RULES,
    Average,
    DiLoCo,
    SlowMo,
    Update,
    UpdateRule,
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

    def fold(self, center, state, update, staleness):
        center += self.share * (update.weights - center)


@dataclass(frozen=True)
class Heavy:
    """An own rule with a state."""

    modes = frozenset({"synchronous"})
    friction: float = 0.25

    def init(self, center):
        return {"velocity": np.zeros_like(center)}

    def fold(self, center, state, update, staleness):
        state["velocity"] *= self.friction
        state["velocity"] += update.weights - center
        center += state["velocity"]


class Unsaved:
    """An own rule that is no dataclass."""

    modes = frozenset({"synchronous"})

    def init(self, center):
        return {}

    def fold(self, center, state, update, staleness):
        center[...] = update.weights


@dataclass(frozen=True)
class Elsewhere(Damped):
    """An own rule of another mode."""

    modes = frozenset({"asynchronous", "hogwild"})


OWN = {"Damped": Damped, "Heavy": Heavy}

RULES_UNDER_TEST = [
    Average(),
    SlowMo(),
    SlowMo(momentum=0.0, alpha=0.5),
    DiLoCo(),
    DiLoCo(learning_rate=1.0, momentum=0.0),
    Damped(),
    Damped(share=0.25),
    Heavy(),
]


def update(weights, learning_rate=0.1, dtype=np.float32):
    return Update(np.array(weights, dtype), steps=5, rows=100, learning_rate=learning_rate, num_workers=2)


def folds(rule, center, updates):
    """The centers after each fold."""
    center = np.array(center, np.float32)
    state = rule.init(center)
    seen = []
    for one in updates:
        rule.fold(center, state, one, 0)
        seen.append(center.tolist())
    return seen


# By hand. Rates are powers of two, so that every step is exact.


def test_average():
    assert folds(Average(), [1, 2], [update([3, -1]), update([0.5, 8])]) == [[3, -1], [0.5, 8]]


def test_the_average_is_a_copy():
    center, one = np.zeros(2, np.float32), update([3, -1])
    Average().fold(center, {}, one, 0)
    one.weights[:] = 7
    assert center.tolist() == [3, -1]


def test_slowmo():
    updates = [update([0, 4], 0.5), update([-1, 4], 0.5), update([-1.5, 4.5], 0.25)]
    assert folds(SlowMo(momentum=0.5, alpha=1.0), [1, 2], updates) == [
        [0, 4],  # (C - W)/lr = [2, -4] = u; C - 0.5*u
        [-1.5, 5],  # (C - W)/lr = [2, 0]; u = [1, -2] + [2, 0] = [3, -2]; C - 0.5*u
        [-1.875, 4.75],  # (C - W)/lr = [0, 2]; u = [1.5, -1] + [0, 2] = [1.5, 1]; C - 0.25*u
    ]


def test_slowmo_with_a_slow_learning_rate():
    updates = [update([0, 4], 0.5), update([0.5, 1], 0.5)]
    assert folds(SlowMo(momentum=0.25, alpha=0.5), [1, 2], updates) == [
        [0.5, 3],  # u = [2, -4]; C - 0.5*0.5*u
        [0.375, 2.25],  # (C - W)/lr = [0, 4]; u = [0.5, -1] + [0, 4] = [0.5, 3]; C - 0.25*u
    ]


def test_slowmo_remembers_the_momentum():
    center = np.array([1, 2], np.float32)
    rule = SlowMo(momentum=0.5)
    state = rule.init(center)
    assert {name: array.tolist() for name, array in state.items()} == {"momentum": [0, 0]}
    rule.fold(center, state, update([0, 4], 0.5), 0)
    assert state["momentum"].tolist() == [2, -4]
    rule.fold(center, state, update([-1, 4], 0.5), 0)
    assert state["momentum"].tolist() == [3, -2]


def test_slowmo_at_a_learning_rate_of_zero_folds_nothing():
    center = np.array([1, 2], np.float32)
    rule = SlowMo(momentum=0.5)
    state = rule.init(center)
    rule.fold(center, state, update([0, 4], 0.5), 0)
    rule.fold(center, state, update([0, 4], 0.0), 0)
    assert center.tolist() == [0, 4]
    assert state["momentum"].tolist() == [2, -4]


def test_slowmo_without_momentum_is_the_average():
    draw = np.random.default_rng(0)
    updates = [update(draw.normal(size=50), rate) for rate in (0.1, 0.003, 1.0)]
    center = draw.normal(size=50)
    slow, plain = folds(SlowMo(momentum=0.0, alpha=1.0), center, updates), folds(Average(), center, updates)
    assert np.allclose(slow, plain, rtol=0, atol=1e-6)


def test_diloco():
    updates = [update([0, 4]), update([-0.75, 3.5]), update([-0.625, 1.75])]
    assert folds(DiLoCo(learning_rate=0.5, momentum=0.5), [1, 2], updates) == [
        [0.25, 3.5],  # g = u = [1, -2]; C - 0.5*(g + 0.5*u) = C - 0.5*[1.5, -3]
        [-0.625, 3.75],  # g = [1, 0]; u = [0.5, -1] + g = [1.5, -1]; C - 0.5*[1.75, -0.5]
        [-0.8125, 2.375],  # g = [0, 2]; u = [0.75, -0.5] + g = [0.75, 1.5]; C - 0.5*[0.375, 2.75]
    ]


def test_diloco_remembers_the_momentum():
    center = np.array([1, 2], np.float32)
    rule = DiLoCo(learning_rate=0.5, momentum=0.5)
    state = rule.init(center)
    rule.fold(center, state, update([0, 4]), 0)
    assert {name: array.tolist() for name, array in state.items()} == {"momentum": [1, -2]}
    rule.fold(center, state, update([-0.75, 3.5]), 0)
    assert state["momentum"].tolist() == [1.5, -1]


def test_diloco_does_not_look_at_the_workers_learning_rate():
    one, other = ([update([0, 4], rate), update([3, 1], rate)] for rate in (0.5, 0.0))
    assert folds(DiLoCo(), [1, 2], one) == folds(DiLoCo(), [1, 2], other)


def test_diloco_at_a_rate_of_one_without_momentum_is_the_average():
    assert folds(DiLoCo(learning_rate=1.0, momentum=0.0), [1, 2], [update([3, -1])]) == [[3, -1]]


def test_the_papers_defaults():
    assert (DiLoCo().learning_rate, DiLoCo().momentum) == (0.7, 0.9)
    assert SlowMo().alpha == 1.0
    assert 0.5 <= SlowMo().momentum <= 0.7


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
    old = center.copy()
    assert rule.fold(center, state, update(some(draw)), 0) is None
    assert not np.array_equal(center, old)
    assert set(state) == set(before)
    assert all(state[name] is before[name] for name in before)


def test_a_fold_reaches_the_vector_that_the_center_is_a_slice_of(rule):
    draw = np.random.default_rng(1)
    whole = some(draw, 10)
    old = whole.copy()
    center = whole[:7]
    rule.fold(center, rule.init(center), update(some(draw)), 0)
    assert np.all(whole[:7] != old[:7])
    assert np.array_equal(whole[7:], old[7:])


def test_an_update_stays_as_it_is(rule):
    draw = np.random.default_rng(2)
    center, one = some(draw), update(some(draw))
    old = one.weights.copy()
    rule.fold(center, rule.init(center), one, 0)
    assert np.array_equal(one.weights, old)


def test_starting_does_not_touch_the_center(rule):
    center = np.ones(4, np.float32)
    rule.init(center)
    assert center.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_dtype_is_kept(rule, dtype):
    draw = np.random.default_rng(3)
    center = some(draw, dtype=dtype)
    state = rule.init(center)
    for _ in range(3):
        rule.fold(center, state, update(some(draw), dtype=dtype), 0)
    assert center.dtype == dtype
    assert all(array.dtype == dtype for array in state.values())


def test_the_state_has_the_same_names_and_shapes_all_the_time(rule):
    draw = np.random.default_rng(4)
    center = some(draw)
    state = rule.init(center)
    shapes = {name: array.shape for name, array in state.items()}
    assert all(shape == center.shape for shape in shapes.values())
    for _ in range(3):
        rule.fold(center, state, update(some(draw)), 0)
        assert {name: array.shape for name, array in state.items()} == shapes


def test_the_center_itself_is_a_fixed_point(rule):
    center = some(np.random.default_rng(5))
    old = center.copy()
    state = rule.init(center)
    for _ in range(3):
        rule.fold(center, state, update(center.copy()), 0)
    assert np.array_equal(center, old)
    assert all(not array.any() for array in state.values())


def test_a_first_fold_goes_towards_the_update(rule):
    draw = np.random.default_rng(6)
    center, one = some(draw), update(some(draw))
    old = center.copy()
    rule.fold(center, rule.init(center), one, 0)
    assert np.array_equal(np.sign(center - old), np.sign(one.weights - old))


def test_the_same_folds_give_the_same_center_to_the_last_bit(rule):
    def run():
        draw = np.random.default_rng(7)
        center = some(draw)
        state = rule.init(center)
        for _ in range(4):
            rule.fold(center, state, update(some(draw)), 0)
        return center.tobytes(), {name: array.tobytes() for name, array in state.items()}

    assert run() == run()


def test_a_state_that_was_stored_goes_on(rule):
    """What a saved model does: state is copied out and in between two folds."""
    draw = np.random.default_rng(8)
    center, one, two = some(draw), update(some(draw)), update(some(draw))
    state = rule.init(center)
    rule.fold(center, state, one, 0)
    copy, stored = center.copy(), {name: array.copy() for name, array in state.items()}
    rule.fold(center, state, two, 0)
    rule.fold(copy, stored, two, 0)
    assert np.array_equal(copy, center)


def test_no_parameters_at_all(rule):
    center = np.zeros(0, np.float32)
    rule.fold(center, rule.init(center), update([]), 0)
    assert center.size == 0


def test_it_comes_back_from_json(rule):
    config = json.loads(json.dumps(rule_config(rule)))
    assert rule_from_config(config, OWN) == rule
    assert type(rule_from_config(config, OWN)) is type(rule)


# Names, and what is refused


@pytest.mark.parametrize(("name", "expected"), [("average", Average()), ("slowmo", SlowMo()), ("diloco", DiLoCo())])
def test_a_rule_by_name(name, expected):
    assert make_rule(name, "synchronous") == expected
    assert rule_name(expected) == name


def test_no_rule_is_the_modes_plain_one():
    assert make_rule(None, "synchronous") == Average()


def test_an_own_rule_goes_by_its_class():
    own = Damped(share=0.25)
    assert make_rule(own, "synchronous") is own
    assert rule_name(own) == "Damped"
    assert rule_config(own) == {"name": "Damped", "parameters": {"share": 0.25}}
    assert rule_config(SlowMo(momentum=0.5)) == {"name": "slowmo", "parameters": {"momentum": 0.5, "alpha": 1.0}}


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigurationError) as caught:
        make_rule("slowmow", "synchronous")
    assert "rule='slowmow' is not known" in str(caught.value)
    assert "'average', 'diloco', 'slowmo'" in str(caught.value)
    assert "Did you mean 'slowmo'?" in str(caught.value)


@pytest.mark.parametrize("given", [Average, SlowMo, Damped, 3, lambda center: center, object()])
def test_what_is_no_rule_is_told_what_a_rule_is(given):
    with pytest.raises(ConfigurationError) as caught:
        make_rule(given, "synchronous")
    if isinstance(given, type):
        assert f"rule={given.__name__}()" in str(caught.value)
    else:
        assert "is not an update rule" in str(caught.value)
        assert "fold(center, state, update, staleness)" in str(caught.value)
        assert "'average'" in str(caught.value)


def test_a_rule_of_another_mode_is_told_its_own():
    with pytest.raises(ConfigurationError) as caught:
        make_rule(Elsewhere(), "synchronous")
    assert "'Elsewhere' does not fit mode='synchronous'" in str(caught.value)
    assert "asynchronous, hogwild" in str(caught.value)


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
