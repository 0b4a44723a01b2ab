"""Update rules: how the workers' weights change the center, the shared weights of a training.

Notation: ``C`` is the center and ``lr`` the learning rate of the workers' optimizer. In synchronous mode ``W`` is the
mean of the workers' weights, weighted by their numbers of rows. In the asynchronous modes ``W`` is the current weights
of one worker, ``B`` its base (the weights that it has trained from since its last exchange), ``k`` the optimizer steps
since then, ``n`` the number of workers, and ``s`` the staleness of its update.

A synchronous rule applies the mean to the center once per round. An asynchronous rule has two halves: `exchange` on the
worker computes what to send, and `apply` on the server applies it to the center. A rule sees only the trainable weights;
statistics are averaged with every rule.

A custom rule is a frozen dataclass with `modes`, `init` and `apply`, and with `exchange` for the asynchronous modes; see
`UpdateRule` and `AsynchronousRule`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from sparkkeras.arguments import known_fields
from sparkkeras.errors import ConfigurationError, known_names
from sparkkeras.weights import Array

State = dict[str, Array]
"""The state of a rule between updates: vectors of the center's length, by name."""


@dataclass(frozen=True)
class ExchangeWindow:
    """The training between two exchanges of a worker.

    Attributes:
        steps: The number of optimizer steps.
        rows: The number of rows.
        learning_rate: The learning rate of the worker's optimizer at the last of these steps.
        num_workers: The number of workers that take part in the training.
    """

    steps: int
    rows: int
    learning_rate: float
    num_workers: int


@dataclass(frozen=True)
class WorkerUpdate(ExchangeWindow):
    """The result of an exchange window, which a rule applies to the center.

    In synchronous mode the window is the round: `steps` is the largest number of steps of a worker, `rows` is the sum over
    all workers, `learning_rate` is the workers' mean, and `num_workers` is the number of workers that had rows.

    Attributes:
        sent: float32 or float64, shape (parameters,). In synchronous mode, the mean of the workers' trainable weights,
            weighted by rows; in the asynchronous modes, the first result of the worker's `exchange`.
    """

    sent: Array


@runtime_checkable
class UpdateRule(Protocol):
    """How an update changes the center.

    This is the whole of a synchronous rule, and the server's half of an `AsynchronousRule`. Implement it as a frozen
    dataclass whose fields are the rule's hyper-parameters, so that it can be saved with the model::

        @dataclass(frozen=True)
        class Damped:
            modes = frozenset({"synchronous"})
            share: float = 0.5

            def init(self, center):
                return {}

            def apply(self, center, state, update, staleness):
                center += self.share * (update.sent - center)

    A rule may also have a method ``check_optimizer(optimizer)``. It is called on the driver before training, with the
    model's optimizer, and raises `ConfigurationError` if the rule does not work with this optimizer; see `EAMSGD`.
    """

    @property
    def modes(self) -> frozenset[str]:
        """The training modes that the rule supports: ``"synchronous"``, ``"asynchronous"``, ``"hogwild"``."""
        ...

    def init(self, center: Array) -> State:
        """The state before the first update.

        Args:
            center: The trainable weights, shape (parameters,).

        Returns:
            Vectors of the center's length, by name; ``{}`` for a rule without a state.
        """
        ...

    def apply(self, center: Array, state: State, update: WorkerUpdate, staleness: int) -> None:
        """Change ``center`` and ``state`` in place.

        Args:
            center: The trainable weights, shape (parameters,).
            state: The state that `init` returned, with the changes of all updates since.
            update: The update to apply.
            staleness: The number of updates of other workers that were applied since the pull that the worker's base came
                from; 0 in synchronous mode.
        """
        ...


@runtime_checkable
class AsynchronousRule(UpdateRule, Protocol):
    """How a worker and the center exchange weights in the asynchronous modes.

    An exchange is pull, exchange, push: the worker pulls the center and calls `exchange`. It continues training from the
    second result, and pushes the first result, which the server passes to `apply`. Both halves see only the trainable
    weights; the server averages the statistics. (`Downpour` and `AGN` themselves push first, and get the center with
    the reply, in half the round trips.) A custom rule::

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
        """Compute what the worker sends, and the weights that it continues from. Runs on the worker.

        Must not change its arguments.

        Args:
            local: The worker's current weights, shape (parameters,).
            base: The weights that the worker has trained from since its last exchange, shape (parameters,); before the first
                exchange, the center that it started with. This is not the center that it pulled at its last exchange:
                ``local`` minus that center would contain what the worker has already sent.
            center: The server's weights as just pulled, shape (parameters,).
            window: The training since the last exchange.

        Returns:
            What to send, and the weights to continue from: two new arrays, shape (parameters,), with the dtype of
            ``local``.
        """
        ...


_SYNCHRONOUS = frozenset({"synchronous"})
_ASYNCHRONOUS = frozenset({"asynchronous"})
_ANY_ASYNCHRONOUS = frozenset({"asynchronous", "hogwild"})


@known_fields
@dataclass(frozen=True)
class Average:
    """Replaces the center by the mean of the workers' weights: ``C = W``.

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


class _MomentumRule:
    """What the synchronous rules with momentum over rounds have in common."""

    modes: ClassVar[frozenset[str]] = _SYNCHRONOUS

    def init(self, center: Array) -> State:
        """The momentum, zeros."""
        return {"momentum": np.zeros_like(center)}


@known_fields
@dataclass(frozen=True)
class SlowMo(_MomentumRule):
    """Applies slow momentum over rounds: ``u = b*u + (C - W)/lr``, then ``C = C - a*lr*u``.

    With ``momentum=0`` and ``alpha=1`` it equals `Average`. Wang et al., SlowMo: Improving communication-efficient
    distributed SGD with slow momentum, 2020, arXiv 1910.00643, algorithm 1.

    Args:
        momentum: ``b``, in [0, 1); default 0.6. The paper recommends 0.5 to 0.7.
        alpha: ``a``, the slow learning rate, positive; default 1.
    """

    momentum: float = 0.6
    alpha: float = 1.0

    def __post_init__(self) -> None:
        _in_unit_interval("SlowMo", "momentum", self.momentum)
        _positive("SlowMo", "alpha", self.alpha)

    def apply(self, center: Array, state: State, update: WorkerUpdate, staleness: int) -> None:
        """``u = b*u + (C - W)/lr``, ``C -= a*lr*u``. With a learning rate of 0 the workers changed nothing: no-op."""
        if update.learning_rate <= 0:
            return
        slow = state["momentum"]
        slow *= self.momentum
        slow += (center - update.sent) / update.learning_rate
        center -= self.alpha * update.learning_rate * slow


@known_fields
@dataclass(frozen=True)
class DiLoCo(_MomentumRule):
    """Applies an outer SGD with Nesterov momentum to ``g = C - W``: ``u = b*u + g``, then ``C = C - lr_out*(g + b*u)``.

    Designed for AdamW as the workers' optimizer and hundreds of steps between rounds. Douillard et al., DiLoCo: Distributed
    low-communication training of language models, 2023, arXiv 2311.08105.

    Args:
        learning_rate: ``lr_out``, positive; default 0.7.
        momentum: ``b``, in [0, 1); default 0.9.
    """

    learning_rate: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _positive("DiLoCo", "learning_rate", self.learning_rate)
        _in_unit_interval("DiLoCo", "momentum", self.momentum)

    def apply(self, center: Array, state: State, update: WorkerUpdate, staleness: int) -> None:
        """``u = b*u + g``, ``C -= lr_out*(g + b*u)``."""
        gradient = center - update.sent
        outer = state["momentum"]
        outer *= self.momentum
        outer += gradient
        center -= self.learning_rate * (gradient + self.momentum * outer)


@dataclass(frozen=True)
class _AdditiveRule:
    """The server's half of most asynchronous rules: ``C += sent``, without a state."""

    def init(self, center: Array) -> State:
        """No state."""
        return {}

    def apply(self, center: Array, state: State, update: WorkerUpdate, staleness: int) -> None:
        """``C += sent``."""
        center += update.sent


@known_fields
@dataclass(frozen=True)
class Downpour(_AdditiveRule):
    """Adds up the workers' progress: a worker sends ``d = W - B``, ``C += d``, and the worker continues from ``C + d``.

    Dean et al., Large scale distributed deep networks, 2012. The sum makes the step grow with the number of workers: for
    many workers, use a smaller learning rate or another rule.
    """

    modes: ClassVar[frozenset[str]] = _ANY_ASYNCHRONOUS

    def exchange(self, local: Array, base: Array, center: Array, window: ExchangeWindow) -> tuple[Array, Array]:
        """``d = W - B``, and ``C + d``."""
        sent = local - base
        return sent, center + sent


@known_fields
@dataclass(frozen=True)
class AGN(_AdditiveRule):
    """Accumulated gradient normalization: a worker sends ``d = (W - B)/k``, ``C += d``, and continues from ``C + d``.

    A worker sends the mean progress of its k steps, so that a longer window makes the update better, not larger.
    Hermans, Spanakis, Möckel, Accumulated gradient normalization, 2017, arXiv 1710.02368.
    """

    modes: ClassVar[frozenset[str]] = _ANY_ASYNCHRONOUS

    def exchange(self, local: Array, base: Array, center: Array, window: ExchangeWindow) -> tuple[Array, Array]:
        """``d = (W - B)/k``, and ``C + d``."""
        sent = local - base
        sent /= max(1, window.steps)
        return sent, center + sent


@known_fields
@dataclass(frozen=True)
class DynSGD(Downpour):
    """`Downpour` with smaller weights for stale updates: ``C += d/(s + 1)``.

    Jiang et al., Heterogeneity-aware distributed parameter servers, 2017 (SIGMOD); Zhang et al., Staleness-aware async-SGD
    for distributed deep learning, 2016, arXiv 1511.05950.
    """

    modes: ClassVar[frozenset[str]] = _ASYNCHRONOUS

    def apply(self, center: Array, state: State, update: WorkerUpdate, staleness: int) -> None:
        """``C += d/(s + 1)``."""
        center += update.sent / (staleness + 1)


@known_fields
@dataclass(frozen=True)
class EASGD(_AdditiveRule):
    """Elastic averaging: a worker sends ``E = a*(W - C)``, ``C += E``, and the worker continues from ``W - E``.

    The elastic force pulls worker and center together, while the workers explore independently. Zhang, Choromanska, LeCun,
    Deep learning with elastic averaging SGD, 2015, arXiv 1412.6651, algorithm 1.

    Args:
        alpha: ``a``, in (0, 1]. ``None``, the default, takes the paper's ``0.9/n``; a fixed value is unstable with many
            workers.
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

    The worker's optimizer computes the momentum ``v = b*v - lr*g(W + b*v)``, ``W = W + v`` and keeps it; the exchange is
    that of EASGD. So the rule only checks for such an optimizer. Zhang, Choromanska, LeCun, 2015, arXiv 1412.6651,
    algorithm 2.

    Args:
        alpha: ``a``, in (0, 1]; see `EASGD`.
    """

    def check_optimizer(self, optimizer: Any) -> None:
        """Check that an optimizer has Nesterov momentum.

        Raises:
            ConfigurationError: It is not ``Nadam``, and does not have ``nesterov=True`` and a positive ``momentum``.
        """
        inner = getattr(optimizer, "inner_optimizer", optimizer)  # Keras's LossScaleOptimizer wraps another one
        if any(kind.__name__ == "Nadam" for kind in type(inner).__mro__):
            return
        nesterov, momentum = getattr(inner, "nesterov", False), getattr(inner, "momentum", 0.0)
        if not (nesterov and momentum and momentum > 0):
            raise ConfigurationError(
                f"the rule 'eamsgd' needs an optimizer with Nesterov momentum, received {type(inner).__name__} with "
                f"nesterov={nesterov} and momentum={momentum}. Compile the model with "
                "keras.optimizers.SGD(..., momentum=0.9, nesterov=True) or keras.optimizers.Nadam, or use rule='easgd'."
            )


@known_fields
@dataclass(frozen=True)
class DCASGD(_AdditiveRule):
    """Delay compensation: `Downpour` with ``d' = d - l*d*d*(C - B)/(k*lr)`` for ``d``.

    While the worker trained from ``B``, others moved the center to ``C``, where the gradient is about ``g + H*(C - B)``. The
    paper approximates the diagonal of the Hessian ``H`` by ``l*g*g``, for one step of plain SGD, ``g = -d/lr``. Over k
    steps the mean gradient is ``g = -d/(k*lr)``, and each step is compensated; for k = 1 that is the paper's formula.
    Zheng et al., Asynchronous stochastic gradient descent with delay compensation, 2017, arXiv 1609.08326.

    Args:
        compensation: ``l``, the paper's lambda, at least 0; 0 is `Downpour`. The default 0.04 is the paper's value for
            CIFAR-10 with a constant lambda (DC-ASGD-c).
    """

    compensation: float = 0.04
    modes: ClassVar[frozenset[str]] = _ASYNCHRONOUS

    def __post_init__(self) -> None:
        if not _is_number(self.compensation) or not 0 <= self.compensation < float("inf"):
            raise ConfigurationError(f"DCASGD(compensation={self.compensation!r}): expected a finite number of at least 0.")

    def exchange(self, local: Array, base: Array, center: Array, window: ExchangeWindow) -> tuple[Array, Array]:
        """``d'``, and ``C + d'``; without compensation if the learning rate is 0."""
        sent = local - base
        if window.learning_rate > 0:
            drift = center - base
            # In this order nothing overflows with a tiny learning rate, since sent is as small.
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
"""The built-in rules by name."""

_DIST_KERAS_NAMES = {"adag": "agn", "aeasgd": "easgd", "averaging": "average"}
"""Trainers of dist-keras in lower case, and the names of the same rules in this package where they differ."""

_DEFAULTS = {"synchronous": "average", "asynchronous": "downpour", "hogwild": "downpour"}


def as_rule(rule: str | UpdateRule, mode: str | None = None) -> UpdateRule:
    """A rule from its name; a rule object is returned unchanged.

    Args:
        rule: The name or the object.
        mode: The mode whose rules an error message lists; ``None``, the default, lists those of all modes.

    Raises:
        ConfigurationError: The name is unknown, or the object is not an update rule, or one whose methods take other
            arguments.
    """
    if isinstance(rule, str):
        if rule not in RULES:
            known, which = (list(RULES), "") if mode is None else (_names_for(mode), f" for mode={mode!r}")
            name = _DIST_KERAS_NAMES.get(rule.lower().removesuffix("trainer"))
            hint = ""
            if name is not None:
                modes = " or ".join(f"mode={each!r}" for each in sorted(RULES[name].modes))
                hint = f"The {rule} of dist-keras is rule={name!r} in sparkkeras, with {modes}. "
            raise ConfigurationError(f"rule={rule!r} is not known{which}. {hint}{known_names(name or rule, known)}")
        rule = RULES[rule]()
    if isinstance(rule, type):
        raise ConfigurationError(f"rule={rule.__name__} is a class; expected an object: rule={rule.__name__}().")
    if not isinstance(rule, UpdateRule):
        missing = [name for name in ("modes", "init", "apply") if not hasattr(rule, name)]
        raise ConfigurationError(
            f"rule={rule!r} is not an update rule, because it has no {', no '.join(missing)}: expected one of "
            f"{sorted(RULES)} or an object with modes, init(center) and apply(center, state, update, staleness); see "
            "sparkkeras.UpdateRule."
        )
    for name, arguments in _METHODS.items():
        if hasattr(rule, name):
            _check_method(rule, name, arguments)
    return rule


_METHODS = {
    "init": ("center",),
    "apply": ("center", "state", "update", "staleness"),
    "exchange": ("local", "base", "center", "window"),
}
"""The arguments with which the methods of a rule are called."""


def _check_method(rule: UpdateRule, name: str, arguments: tuple[str, ...]) -> None:
    """Reject a method that cannot be called with these arguments.

    Raises:
        ConfigurationError: The method takes others.
    """
    try:
        signature = inspect.signature(getattr(rule, name))
    except (TypeError, ValueError):  # unknown, as for some built-in functions
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigurationError(
            f"{name} of the rule {rule_name(rule)!r} takes {signature} after self; expected ({', '.join(arguments)}). See "
            f"sparkkeras.{'AsynchronousRule' if name == 'exchange' else 'UpdateRule'}."
        ) from error


def make_rule(rule: str | UpdateRule | None, mode: str) -> UpdateRule:
    """A rule for a mode, from its name or an object; ``None`` is the mode's default rule.

    Raises:
        ConfigurationError: The name is unknown, the object is not an update rule, it does not support ``mode``, or it lacks
            the method ``exchange``, which the asynchronous modes need.
    """
    if mode == "allreduce":
        if rule is not None:
            raise ConfigurationError(
                f"rule={rule!r} does not apply to mode='allreduce', which averages the gradients of every step, so that the "
                "optimizer computes the same weights on all workers: leave rule out, or use another mode."
            )
        return Average()
    rule = as_rule(_DEFAULTS[mode] if rule is None else rule, mode)
    if mode not in rule.modes:
        raise ConfigurationError(
            f"rule {rule_name(rule)!r} does not fit mode={mode!r}: it supports {', '.join(map(repr, sorted(rule.modes)))}. "
            f"The rules for mode={mode!r} are {', '.join(repr(name) for name in sorted(_names_for(mode)))}."
        )
    if mode in _ANY_ASYNCHRONOUS and not isinstance(rule, AsynchronousRule):
        raise ConfigurationError(
            f"the rule {rule_name(rule)!r} has no exchange(local, base, center, window), which mode={mode!r} needs. It "
            "returns what a worker sends and the weights that it continues from; see sparkkeras.AsynchronousRule."
        )
    return rule


def fitting_state(rule: UpdateRule, state: State, center: Array) -> State:
    """A copy of a rule's state; a new state before the first update, or if the trainable weights have changed.

    Raises:
        ConfigurationError: The rule's ``init`` did not return a dict of arrays.
    """
    fresh = rule.init(center)
    if not isinstance(fresh, dict) or not all(isinstance(value, np.ndarray) for value in fresh.values()):
        raise ConfigurationError(
            f"init of the rule {rule!r} returned {fresh!r}; expected a dict of arrays by name, or {{}} for a rule without "
            "a state."
        )
    state = {name: np.asarray(value) for name, value in state.items()}
    fits = {name: value.shape for name, value in state.items()} == {name: value.shape for name, value in fresh.items()}
    return {name: value.copy() for name, value in state.items()} if fits else fresh


def apply_in_place(rule: UpdateRule, center: Array, state: State, update: WorkerUpdate, staleness: int) -> None:
    """Apply an update with a rule.

    Raises:
        ConfigurationError: The rule's ``apply`` returned a value, so it did not work in place.
    """
    apply: Callable[..., Any] = rule.apply
    if apply(center, state, update, staleness) is not None:
        raise ConfigurationError(
            f"the rule {rule!r} returned something from apply: it must change center in place and return None."
        )


def adds_progress(rule: UpdateRule) -> bool:
    """Whether a worker sends its own progress, whatever the center is, and continues from the center with it."""
    kind: Any = type(rule)
    return getattr(kind, "exchange", None) in (Downpour.exchange, AGN.exchange) and kind.apply is _AdditiveRule.apply


def check_optimizer(rule: UpdateRule, optimizer: Any) -> None:
    """Call the rule's ``check_optimizer`` with the model's optimizer, if the rule has that method.

    Raises:
        ConfigurationError: The rule does not work with this optimizer.
    """
    check: Callable[[Any], None] | None = getattr(rule, "check_optimizer", None)
    if check is not None:
        check(optimizer)


def rule_name(rule: UpdateRule) -> str:
    """The name of a built-in rule, or the class name of a custom one."""
    return next((name for name, known in RULES.items() if type(rule) is known), type(rule).__name__)


def rule_config(rule: UpdateRule) -> dict[str, Any]:
    """The name and the hyper-parameters of a rule, for JSON.

    Raises:
        ConfigurationError: The rule is not a dataclass.
    """
    if not dataclasses.is_dataclass(rule) or isinstance(rule, type):
        raise ConfigurationError(
            f"the rule {type(rule).__name__} cannot be saved, because it is not a dataclass: make it one, with its "
            "hyper-parameters as fields."
        )
    return {"name": rule_name(rule), "parameters": dataclasses.asdict(rule)}


def rule_from_config(config: dict[str, Any], custom_objects: dict[str, Any]) -> UpdateRule:
    """The rule of a config from `rule_config`.

    Args:
        config: The name and the hyper-parameters.
        custom_objects: The classes of custom rules, by class name.

    Raises:
        ConfigurationError: The name is neither a built-in rule's nor in ``custom_objects``.
    """
    name = config["name"]
    known = {**RULES, **custom_objects}
    if name not in known:
        raise ConfigurationError(
            f"the model was saved with the update rule {name!r}: pass custom_objects={{{name!r}: {name}}} to load it."
        )
    rule: UpdateRule = known[name](**config["parameters"])
    return rule


def _names_for(mode: str) -> list[str]:
    return [name for name, rule in RULES.items() if mode in rule.modes]


def _positive(rule: str, name: str, value: float) -> None:
    if not _is_number(value) or not value > 0:
        raise ConfigurationError(f"{rule}({name}={value!r}): expected a positive number.")


def _in_unit_interval(rule: str, name: str, value: float) -> None:
    if not _is_number(value) or not 0 <= value < 1:
        raise ConfigurationError(f"{rule}({name}={value!r}): expected a number in [0, 1).")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
