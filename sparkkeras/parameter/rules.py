"""Update rules: what becomes of the center when workers' weights come back.

Notation: ``C`` the center, ``lr`` the learning rate of the workers' optimizer. In synchronous mode ``W`` is the mean of the
workers' weights, weighted by the rows that each has seen. In the asynchronous modes ``W`` is one worker's weights now, ``B``
what it went on from after its last exchange (its base), ``k`` the optimizer steps since then, ``n`` the number of workers,
and ``s`` the staleness of what it sends.

A synchronous rule applies the mean to the center once a round. An asynchronous rule has two halves: `exchange` on the worker
makes what is sent, and `apply` on the server takes it up. A rule sees the trainable weights only; statistics are averaged
whatever the rule.

An own rule is a frozen dataclass with `modes`, `init` and `apply`, and with `exchange` for the asynchronous modes; see
`UpdateRule` and `AsynchronousRule`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from sparkkeras.arguments import known_fields
from sparkkeras.errors import ConfigurationError, known_names
from sparkkeras.weights import Array

State = dict[str, Array]
"""What a rule remembers from one update to the next: named vectors of the center's length."""


@dataclass(frozen=True)
class ExchangeWindow:
    """The training between two exchanges of a worker.

    Attributes:
        steps: The optimizer steps in it.
        rows: The rows in it.
        learning_rate: The learning rate of the worker's optimizer at the last of these steps.
        num_workers: How many workers take part in the training.
    """

    steps: int
    rows: int
    learning_rate: float
    num_workers: int


@dataclass(frozen=True)
class WorkerUpdate(ExchangeWindow):
    """What came of a window, as it reaches the center.

    In synchronous mode the window is the round: `steps` are those of the busiest worker, `rows` those of all workers,
    `learning_rate` is the workers' mean, and `num_workers` counts those that had rows.

    Attributes:
        sent: What the workers sent, float32 or float64, shape (parameters,): in synchronous mode the row-weighted mean of
            their trainable weights, in the asynchronous modes what the worker's `exchange` gave to send.
    """

    sent: Array


@runtime_checkable
class UpdateRule(Protocol):
    """How the center takes up an update.

    This is all of a synchronous rule, and the server's half of an `AsynchronousRule`. Implement it as a frozen dataclass,
    whose fields are the rule's hyper-parameters, so that it is saved with the model::

        @dataclass(frozen=True)
        class Damped:
            modes = frozenset({"synchronous"})
            share: float = 0.5

            def init(self, center):
                return {}

            def apply(self, center, state, update, staleness):
                center += self.share * (update.sent - center)

    A rule may have a method ``check_optimizer(optimizer)`` too. It is called on the driver before training, with the model's
    optimizer, and raises `ConfigurationError` if the rule does not work with that one; see `EAMSGD`.
    """

    @property
    def modes(self) -> frozenset[str]:
        """The training modes that the rule fits."""
        ...

    def init(self, center: Array) -> State:
        """The state before the first update. ``center``: shape (parameters,)."""
        ...

    def apply(self, center: Array, state: State, update: WorkerUpdate, staleness: int) -> None:
        """Change ``center`` and ``state`` in place.

        Args:
            center: The trainable weights, shape (parameters,).
            state: What `init` made, as the last update left it.
            update: What came in.
            staleness: How many updates of other workers were applied since the pull that this worker's base came from. 0 in
                synchronous mode.
        """
        ...


@runtime_checkable
class AsynchronousRule(UpdateRule, Protocol):
    """How a worker and the center meet in the asynchronous modes.

    An exchange is always pull, exchange, push: the worker pulls the center, calls `exchange`, goes on from the second thing
    that it returns, and pushes the first one, which the server gives to `apply`. Both halves see the trainable weights only;
    statistics are averaged by the store. A rule of one's own::

        @dataclass(frozen=True)
        class Clipped:
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
    """

    def exchange(self, local: Array, base: Array, center: Array, window: ExchangeWindow) -> tuple[Array, Array]:
        """What the worker sends, and the weights that it goes on from. On the worker; nothing given is changed.

        Args:
            local: The worker's weights now, shape (parameters,).
            base: What the worker went on from after its last exchange, shape (parameters,); at first, the center that it
                began with. It is not the center that it pulled then: ``local`` minus that one would hold what the worker has
                already sent.
            center: The server's weights as just pulled, shape (parameters,).
            window: The training since the last exchange.

        Returns:
            Two new arrays, shape (parameters,), in the dtype of ``local``.
        """
        ...


_SYNCHRONOUS = frozenset({"synchronous"})
_ASYNCHRONOUS = frozenset({"asynchronous"})
_ANY_ASYNCHRONOUS = frozenset({"asynchronous", "hogwild"})


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

    def apply(self, center: Array, state: State, update: WorkerUpdate, staleness: int) -> None:
        """``C = W``."""
        center[...] = update.sent


@known_fields
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

    def apply(self, center: Array, state: State, update: WorkerUpdate, staleness: int) -> None:
        """``u = b*u + (C - W)/lr``, ``C -= a*lr*u``. A learning rate of 0 moved nothing, and nothing is applied."""
        if update.learning_rate <= 0:
            return
        slow = state["momentum"]
        slow *= self.momentum
        slow += (center - update.sent) / update.learning_rate
        center -= self.alpha * update.learning_rate * slow


@known_fields
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

    def apply(self, center: Array, state: State, update: WorkerUpdate, staleness: int) -> None:
        """``u = b*u + g``, ``C -= lr_out*(g + b*u)``."""
        gradient = center - update.sent
        outer = state["momentum"]
        outer *= self.momentum
        outer += gradient
        center -= self.learning_rate * (gradient + self.momentum * outer)


@dataclass(frozen=True)
class _Summed:
    """The server's half that most asynchronous rules share: ``C += sent``, without a state."""

    def init(self, center: Array) -> State:
        """No state."""
        return {}

    def apply(self, center: Array, state: State, update: WorkerUpdate, staleness: int) -> None:
        """``C += sent``."""
        center += update.sent


@dataclass(frozen=True)
class Downpour(_Summed):
    """The server sums what the workers learn: ``d = W - B`` is sent, ``C += d``, and the worker goes on from ``C + d``.

    Dean et al., Large scale distributed deep networks, 2012. The sum makes the step grow with the number of workers: with
    many of them take a smaller learning rate, or another rule.
    """

    modes: ClassVar[frozenset[str]] = _ANY_ASYNCHRONOUS

    def exchange(self, local: Array, base: Array, center: Array, window: ExchangeWindow) -> tuple[Array, Array]:
        """``d = W - B``, and ``C + d``."""
        sent = local - base
        return sent, center + sent


@dataclass(frozen=True)
class AGN(_Summed):
    """Accumulated gradient normalization: ``d = (W - B)/k`` is sent, ``C += d``, and the worker goes on from ``C + d``.

    A worker explores for k steps and sends their mean, so that a longer window makes a better step, not a larger one.
    Hermans, Spanakis, Möckel, Accumulated gradient normalization, 2017, arXiv 1710.02368.
    """

    modes: ClassVar[frozenset[str]] = _ANY_ASYNCHRONOUS

    def exchange(self, local: Array, base: Array, center: Array, window: ExchangeWindow) -> tuple[Array, Array]:
        """``d = (W - B)/k``, and ``C + d``."""
        sent = local - base
        sent /= max(1, window.steps)
        return sent, center + sent


@dataclass(frozen=True)
class DynSGD(Downpour):
    """`Downpour` in which stale updates count less: ``C += d/(s + 1)``.

    Jiang et al., Heterogeneity-aware distributed parameter servers, 2017 (SIGMOD); Zhang et al., Staleness-aware async-SGD
    for distributed deep learning, 2016, arXiv 1511.05950.
    """

    modes: ClassVar[frozenset[str]] = _ASYNCHRONOUS

    def apply(self, center: Array, state: State, update: WorkerUpdate, staleness: int) -> None:
        """``C += d/(s + 1)``."""
        center += update.sent / (staleness + 1)


@known_fields
@dataclass(frozen=True)
class EASGD(_Summed):
    """Elastic averaging: ``E = a*(W - C)`` is sent, ``C += E``, and the worker goes on from ``W - E``.

    Worker and center draw each other together, and workers explore apart. Zhang, Choromanska, LeCun, Deep learning with
    elastic averaging SGD, 2015, arXiv 1412.6651, algorithm 1.

    Args:
        alpha: ``a``, in (0, 1]. ``None`` is ``0.9/n``, the paper's; a fixed one is unstable with many workers.
    """

    alpha: float | None = None
    modes: ClassVar[frozenset[str]] = _ASYNCHRONOUS

    def __post_init__(self) -> None:
        if self.alpha is not None and (not _is_number(self.alpha) or not 0 < self.alpha <= 1):
            raise ConfigurationError(
                f"{type(self).__name__}(alpha={self.alpha!r}): expected a number in (0, 1], or None for 0.9/num_workers."
            )

    def exchange(self, local: Array, base: Array, center: Array, window: ExchangeWindow) -> tuple[Array, Array]:
        """``E = a*(W - C)``, and ``W - E``."""
        sent = local - center
        sent *= 0.9 / max(1, window.num_workers) if self.alpha is None else self.alpha
        return sent, local - sent


@known_fields
@dataclass(frozen=True)
class EAMSGD(EASGD):
    """`EASGD` over workers with Nesterov momentum.

    The momentum ``v = b*v - lr*g(W + b*v)``, ``W = W + v`` is the optimizer's, and stays in the worker; the exchange is
    EASGD's. So the rule only asks for such an optimizer. Zhang, Choromanska, LeCun, 2015, arXiv 1412.6651, algorithm 2.

    Args:
        alpha: As in `EASGD`.
    """

    def check_optimizer(self, optimizer: Any) -> None:
        """Refuse an optimizer without Nesterov momentum.

        Raises:
            ConfigurationError: It is neither ``Nadam`` nor has ``nesterov`` and a positive ``momentum``.
        """
        inner = getattr(optimizer, "inner_optimizer", optimizer)  # Keras's LossScaleOptimizer wraps another one
        if any(kind.__name__ == "Nadam" for kind in type(inner).__mro__):
            return
        nesterov, momentum = getattr(inner, "nesterov", False), getattr(inner, "momentum", 0.0)
        if not (nesterov and momentum and momentum > 0):
            raise ConfigurationError(
                f"the rule 'eamsgd' needs an optimizer with Nesterov momentum, and got {type(inner).__name__} with "
                f"nesterov={nesterov} and momentum={momentum}: compile the model with "
                "keras.optimizers.SGD(..., momentum=0.9, nesterov=True) or keras.optimizers.Nadam, or take rule='easgd'."
            )


@known_fields
@dataclass(frozen=True)
class DCASGD(_Summed):
    """Delay compensation: `Downpour` with ``d' = d - l*d*d*(C - B)/(k*lr)`` for ``d``.

    While the worker trained from ``B`` on, others moved the center to ``C``, where the gradient is about ``g + H*(C - B)``.
    The paper takes ``l*g*g`` for the diagonal of the Hessian ``H``, and one step of plain SGD, ``g = -d/lr``. Over k steps
    ``g = -d/(k*lr)`` is their mean gradient, and each is compensated; for k = 1 that is the paper's formula. Zheng et al.,
    Asynchronous stochastic gradient descent with delay compensation, 2017, arXiv 1609.08326.

    Args:
        compensation: ``l``, the paper's lambda; 0 is `Downpour`. 0.04 is what the paper takes for CIFAR-10 where lambda is
            constant (DC-ASGD-c).
    """

    compensation: float = 0.04
    modes: ClassVar[frozenset[str]] = _ASYNCHRONOUS

    def __post_init__(self) -> None:
        if not _is_number(self.compensation) or not 0 <= self.compensation < float("inf"):
            raise ConfigurationError(f"DCASGD(compensation={self.compensation!r}): expected a number from 0 on.")

    def exchange(self, local: Array, base: Array, center: Array, window: ExchangeWindow) -> tuple[Array, Array]:
        """``d'``, and ``C + d'``. At a learning rate of 0 nothing is compensated."""
        sent = local - base
        if window.learning_rate > 0:
            drift = center - base
            # In this order nothing overflows where the learning rate is tiny: sent is as small.
            drift *= sent
            drift /= window.learning_rate * max(1, window.steps)
            drift *= sent
            drift *= self.compensation
            sent -= drift
        return sent, center + sent


RULES: dict[str, type[Any]] = {
    "average": Average,
    "slowmo": SlowMo,
    "diloco": DiLoCo,
    "downpour": Downpour,
    "agn": AGN,
    "dynsgd": DynSGD,
    "easgd": EASGD,
    "eamsgd": EAMSGD,
    "dcasgd": DCASGD,
}
"""The rules that go by a name."""

_OF_DIST_KERAS = {"adag": "agn", "aeasgd": "easgd", "averaging": "average"}
"""Trainers of dist-keras, in lower case, and the rules that they are here where the name is another one."""

_DEFAULTS = {"synchronous": "average", "asynchronous": "downpour", "hogwild": "downpour"}


def as_rule(rule: str | UpdateRule, mode: str | None = None) -> UpdateRule:
    """The rule that a person asked for, by name or as an object.

    Args:
        rule: The name or the object.
        mode: The mode whose rules a message names; ``None`` names those of all modes.

    Raises:
        ConfigurationError: The name is unknown, or the object is no rule.
    """
    if isinstance(rule, str):
        if rule not in RULES:
            known, whose = (list(RULES), "") if mode is None else (_fitting(mode), f" for mode={mode!r}")
            here = _OF_DIST_KERAS.get(rule.lower().removesuffix("trainer"))
            hint = ""
            if here is not None:
                modes = " or ".join(f"mode={each!r}" for each in sorted(RULES[here].modes))
                hint = f"dist-keras's {rule} is rule={here!r} here, with {modes}. "
            raise ConfigurationError(f"rule={rule!r} is not known{whose}. {hint}{known_names(here or rule, known)}")
        rule = RULES[rule]()
    if isinstance(rule, type):
        raise ConfigurationError(f"rule is the class {rule.__name__}: make an object of it, rule={rule.__name__}().")
    if not isinstance(rule, UpdateRule):
        raise ConfigurationError(
            f"rule={rule!r} is not an update rule: expected one of {sorted(RULES)} or an object with modes, init(center) "
            "and apply(center, state, update, staleness); see sparkkeras.UpdateRule."
        )
    return rule


def make_rule(rule: str | UpdateRule | None, mode: str) -> UpdateRule:
    """As `as_rule`, for a mode; ``None`` is the mode's plain rule.

    Raises:
        ConfigurationError: The name is unknown, the object is no rule, it does not fit ``mode``, or it lacks the half that
            ``mode`` needs on the workers.
    """
    rule = as_rule(_DEFAULTS[mode] if rule is None else rule, mode)
    if mode not in rule.modes:
        raise ConfigurationError(
            f"rule {rule_name(rule)!r} does not fit mode={mode!r}: it is made for {', '.join(sorted(rule.modes))}. "
            f"For mode={mode!r} there are {', '.join(repr(name) for name in sorted(_fitting(mode)))}."
        )
    if mode in _ANY_ASYNCHRONOUS and not isinstance(rule, AsynchronousRule):
        raise ConfigurationError(
            f"the rule {rule_name(rule)!r} has no exchange(local, base, center, window), which mode={mode!r} needs. It "
            "returns what a worker sends and the weights that it goes on from; see sparkkeras.AsynchronousRule."
        )
    return rule


def fitting_state(rule: UpdateRule, state: State, center: Array) -> State:
    """A copy of a rule's state; a fresh one before the first update, or where other weights train than before."""
    fresh = rule.init(center)
    if not isinstance(fresh, dict) or not all(isinstance(value, np.ndarray) for value in fresh.values()):
        raise ConfigurationError(
            f"init of the rule {rule!r} must return a dict of arrays by name, {{}} where there is nothing to remember; it "
            f"returned {fresh!r}."
        )
    state = {name: np.asarray(value) for name, value in state.items()}
    fits = {name: value.shape for name, value in state.items()} == {name: value.shape for name, value in fresh.items()}
    return {name: value.copy() for name, value in state.items()} if fits else fresh


def apply_in_place(rule: UpdateRule, center: Array, state: State, update: WorkerUpdate, staleness: int) -> None:
    """Have a rule apply an update.

    Raises:
        ConfigurationError: It returned something, so it did not work in place.
    """
    apply: Callable[..., Any] = rule.apply
    if apply(center, state, update, staleness) is not None:
        raise ConfigurationError(f"the rule {rule!r} returned something from apply: it must change center in place.")


def check_optimizer(rule: UpdateRule, optimizer: Any) -> None:
    """Have a rule look at the model's optimizer, if it has something to say of it.

    Raises:
        ConfigurationError: It does not work with this one.
    """
    check: Callable[[Any], None] | None = getattr(rule, "check_optimizer", None)
    if check is not None:
        check(optimizer)


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


def _fitting(mode: str) -> list[str]:
    return [name for name, rule in RULES.items() if mode in rule.modes]


def _positive(rule: str, name: str, value: float) -> None:
    if not _is_number(value) or not value > 0:
        raise ConfigurationError(f"{rule}({name}={value!r}): expected a positive number.")


def _in_unit_interval(rule: str, name: str, value: float) -> None:
    if not _is_number(value) or not 0 <= value < 1:
        raise ConfigurationError(f"{rule}({name}={value!r}): expected a number in [0, 1).")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
