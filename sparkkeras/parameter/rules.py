"""Update rules: what becomes of the center when the workers' weights come back.

Notation: ``C`` the center, ``W`` the mean of the workers' weights, weighted by the rows that each has seen, ``lr`` the
learning rate of the workers' optimizer. A rule sees the trainable weights only; statistics are averaged whatever the
rule.

An own rule is a frozen dataclass with `modes`, `init` and `fold`; see `UpdateRule`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from sparkkeras.errors import ConfigurationError, known_names
from sparkkeras.weights import Array

State = dict[str, Array]
"""What a rule remembers from one fold to the next: named vectors of the center's length."""


@dataclass(frozen=True)
class Update:
    """What one round of training brought.

    Attributes:
        weights: The mean of the workers' trainable weights, float32 or float64, shape (parameters,).
        steps: The optimizer steps that the busiest worker took since the last exchange.
        rows: The rows that all workers saw since the last exchange.
        learning_rate: The learning rate of the workers' optimizer at the last of these steps.
        num_workers: How many workers took part.
    """

    weights: Array
    steps: int
    rows: int
    learning_rate: float
    num_workers: int


@runtime_checkable
class UpdateRule(Protocol):
    """How the center takes up an update.

    Implement it as a frozen dataclass, whose fields are the rule's hyper-parameters, so that it is saved with the model::

        @dataclass(frozen=True)
        class Damped:
            modes = frozenset({"synchronous"})
            share: float = 0.5

            def init(self, center):
                return {}

            def fold(self, center, state, update, staleness):
                center += self.share * (update.weights - center)
    """

    @property
    def modes(self) -> frozenset[str]:
        """The training modes that the rule fits."""
        ...

    def init(self, center: Array) -> State:
        """The state before the first fold. ``center``: shape (parameters,)."""
        ...

    def fold(self, center: Array, state: State, update: Update, staleness: int) -> None:
        """Change ``center`` and ``state`` in place. ``staleness`` is 0 in synchronous mode."""
        ...


_SYNCHRONOUS = frozenset({"synchronous"})


@dataclass(frozen=True)
class Average:
    """The mean of the replicas becomes the center: ``C = W``.

    McDonald et al., Distributed training strategies for the structured perceptron, 2010; McMahan et al.,
    Communication-efficient learning of deep networks (FedAvg), 2017.
    """

    modes: ClassVar[frozenset[str]] = _SYNCHRONOUS

    def init(self, center: Array) -> State:
        """No state."""
        return {}

    def fold(self, center: Array, state: State, update: Update, staleness: int) -> None:
        """``C = W``."""
        center[...] = update.weights


@dataclass(frozen=True)
class SlowMo:
    """Slow momentum over rounds: ``u = b*u + (C - W)/lr``, then ``C = C - a*lr*u``.

    With ``momentum=0`` and ``alpha=1`` it is `Average`. Wang et al., SlowMo: Improving communication-efficient
    distributed SGD with slow momentum, 2020, arXiv 1910.00643, algorithm 1. The paper finds 0.5 to 0.7 good.

    Args:
        momentum: ``b``, in [0, 1).
        alpha: ``a``, the slow learning rate, positive.
    """

    momentum: float = 0.6
    alpha: float = 1.0
    modes: ClassVar[frozenset[str]] = _SYNCHRONOUS

    def __post_init__(self) -> None:
        _in_unit_interval("SlowMo", "momentum", self.momentum)
        _positive("SlowMo", "alpha", self.alpha)

    def init(self, center: Array) -> State:
        """The slow momentum, zeros."""
        return {"momentum": np.zeros_like(center)}

    def fold(self, center: Array, state: State, update: Update, staleness: int) -> None:
        """``u = b*u + (C - W)/lr``, ``C -= a*lr*u``. A learning rate of 0 moved nothing, and nothing is folded."""
        if update.learning_rate <= 0:
            return
        slow = state["momentum"]
        slow *= self.momentum
        slow += (center - update.weights) / update.learning_rate
        center -= self.alpha * update.learning_rate * slow


@dataclass(frozen=True)
class DiLoCo:
    """An outer SGD with Nesterov momentum on ``g = C - W``: ``u = b*u + g``, then ``C = C - lr_out*(g + b*u)``.

    Made for AdamW inside and many steps (hundreds) between rounds. Douillard et al., DiLoCo: Distributed
    low-communication training of language models, 2023, arXiv 2311.08105.

    Args:
        learning_rate: ``lr_out``, positive.
        momentum: ``b``, in [0, 1).
    """

    learning_rate: float = 0.7
    momentum: float = 0.9
    modes: ClassVar[frozenset[str]] = _SYNCHRONOUS

    def __post_init__(self) -> None:
        _positive("DiLoCo", "learning_rate", self.learning_rate)
        _in_unit_interval("DiLoCo", "momentum", self.momentum)

    def init(self, center: Array) -> State:
        """The outer momentum, zeros."""
        return {"momentum": np.zeros_like(center)}

    def fold(self, center: Array, state: State, update: Update, staleness: int) -> None:
        """``u = b*u + g``, ``C -= lr_out*(g + b*u)``."""
        gradient = center - update.weights
        outer = state["momentum"]
        outer *= self.momentum
        outer += gradient
        center -= self.learning_rate * (gradient + self.momentum * outer)


RULES: dict[str, type[Any]] = {"average": Average, "slowmo": SlowMo, "diloco": DiLoCo}
"""The rules that go by a name."""

_DEFAULTS = {"synchronous": "average"}


def make_rule(rule: str | UpdateRule | None, mode: str) -> UpdateRule:
    """The rule that a person asked for, by name or as an object; ``None`` is the mode's plain rule.

    Raises:
        ConfigurationError: The name is unknown, the object is no rule, or it does not fit ``mode``.
    """
    if rule is None:
        rule = _DEFAULTS[mode]
    if isinstance(rule, str):
        if rule not in RULES:
            raise ConfigurationError(f"rule={rule!r} is not known. {known_names(rule, RULES)}")
        rule = RULES[rule]()
    if isinstance(rule, type):
        raise ConfigurationError(f"rule is the class {rule.__name__}: make an object of it, rule={rule.__name__}().")
    if not isinstance(rule, UpdateRule):
        raise ConfigurationError(
            f"rule={rule!r} is not an update rule: expected one of {sorted(RULES)} or an object with modes, init(center) "
            "and fold(center, state, update, staleness); see sparkkeras.UpdateRule."
        )
    if mode not in rule.modes:
        raise ConfigurationError(
            f"rule {rule_name(rule)!r} does not fit mode={mode!r}: it is made for {', '.join(sorted(rule.modes))}."
        )
    return rule


def rule_name(rule: UpdateRule) -> str:
    """The name that a rule is known by: the short one, or its class's."""
    return next((name for name, known in RULES.items() if type(rule) is known), type(rule).__name__)


def rule_config(rule: UpdateRule) -> dict[str, Any]:
    """A rule as JSON can hold it: its name and its hyper-parameters.

    Raises:
        ConfigurationError: An own rule that is not a dataclass cannot be written down.
    """
    if not dataclasses.is_dataclass(rule) or isinstance(rule, type):
        raise ConfigurationError(
            f"the rule {type(rule).__name__} cannot be saved: make it a dataclass whose fields are its hyper-parameters."
        )
    return {"name": rule_name(rule), "parameters": dataclasses.asdict(rule)}


def rule_from_config(config: dict[str, Any], custom_objects: dict[str, Any]) -> UpdateRule:
    """The rule that `rule_config` wrote down; an own one is looked up in ``custom_objects`` by its class name."""
    name = config["name"]
    known = {**RULES, **custom_objects}
    if name not in known:
        raise ConfigurationError(
            f"the model was saved with the update rule {name!r}: pass custom_objects={{{name!r}: {name}}} to load it."
        )
    rule: UpdateRule = known[name](**config["parameters"])
    return rule


def _positive(rule: str, name: str, value: float) -> None:
    if not _is_number(value) or not value > 0:
        raise ConfigurationError(f"{rule}({name}={value!r}): expected a positive number.")


def _in_unit_interval(rule: str, name: str, value: float) -> None:
    if not _is_number(value) or not 0 <= value < 1:
        raise ConfigurationError(f"{rule}({name}={value!r}): expected a number in [0, 1).")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
