"""Exchanges of values between the ranks of a group through the driver, and of all ranks with the driver. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparkkeras.weights import Array, is_floating

BARRIER, ALL_REDUCE, BROADCAST = "barrier", "all_reduce", "broadcast"

ASK_DRIVER = "ask_driver"
"""The driver receives what all ranks have sent to it before, and its answer is the result."""

OUT_OF_STEP = "out of step"
"""The kind of `RefusedError` for a rank whose exchange cannot end."""


class OutOfStepError(Exception):
    """An exchange cannot end: ranks called different methods, or gave different arrays, or a rank has ended."""


@dataclass(frozen=True)
class Kind:
    """What an exchange does; all ranks must give the same one.

    Attributes:
        name: `BARRIER`, `ALL_REDUCE`, `BROADCAST` or `ASK_DRIVER`.
        dtype: The dtype of the arrays of a sum.
        shape: Their shape.
    """

    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        array = f"array of {self.dtype} with shape {self.shape}" if self.name == ALL_REDUCE else ""
        return f"{self.name}({array})"

    def combine(self, values: Sequence[bytes]) -> bytes:
        """The result of the exchange, given the values of all ranks in their order."""
        if self.name == BROADCAST:
            return values[0]
        if self.name == BARRIER:
            return b""
        dtype = named_dtype(self.dtype)
        return total([np.frombuffer(value, dtype) for value in values]).tobytes()


def named_dtype(name: str) -> Any:
    """The dtype with a name, also one of those that NumPy itself does not define, such as ``bfloat16``."""
    with suppress(ImportError):
        import ml_dtypes  # noqa: F401 - adds dtypes to NumPy
    return np.dtype(name)


def total(arrays: Sequence[Array]) -> Array:
    """The element-wise sum in the order of the arrays, with their dtype. Floats of two bytes are summed in four."""
    dtype = arrays[0].dtype
    wide = np.dtype(np.float32) if is_floating(dtype) and dtype.itemsize < 4 else dtype
    result = arrays[0].astype(wide)
    for array in arrays[1:]:
        result += array.astype(wide, copy=False)
    return result.astype(dtype, copy=False)


@dataclass
class _Contributions:
    kind: Kind
    first: int
    values: dict[int, bytes] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)
    result: bytes | None = None
    error: str = ""


class Exchanges:
    """The exchanges of a group. Each rank numbers its calls from 1; those with the same number belong together.

    Not thread-safe.

    Args:
        size: The number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._exchanges: dict[int, _Contributions] = {}
        self._ended: set[int] = set()

    def give(self, rank: int, number: int, kind: Kind, value: bytes) -> None:
        """Record the value of a rank. Giving it again changes nothing."""
        exchange = self._exchanges.setdefault(number, _Contributions(kind, rank))
        if rank in exchange.given:
            return
        if kind != exchange.kind:
            exchange.error = exchange.error or (
                f"the ranks are out of step: in its exchange {number}, rank {exchange.first} called {exchange.kind}, but "
                f"rank {rank} called {kind}. All ranks must call the same methods in the same order, with arrays of the "
                "same shape and dtype."
            )
        exchange.given.add(rank)
        exchange.values[rank] = value
        if self._is_complete(exchange) and kind.name != ASK_DRIVER:
            self.answer(number, kind.combine([exchange.values[each] for each in range(self._size)]))
        self._check_ended(number, exchange)

    def asked(self) -> int | None:
        """The number of the exchange that waits for the driver's answer; ``None`` if none does."""
        for number, exchange in self._exchanges.items():
            if exchange.kind.name == ASK_DRIVER and exchange.result is None and self._is_complete(exchange):
                return number
        return None

    def answer(self, number: int, result: bytes) -> None:
        """Set the result of an exchange to which all ranks have given a value."""
        exchange = self._exchanges[number]
        exchange.result = result
        exchange.values.clear()
        self._exchanges.pop(number - 1, None)  # all ranks are here, so they have the result of that one

    def take(self, number: int) -> bytes | None:
        """The result of an exchange; ``None`` while ranks are missing.

        Raises:
            OutOfStepError: The exchange cannot end.
        """
        exchange = self._exchanges[number]
        if exchange.error:
            raise OutOfStepError(exchange.error)
        return exchange.result

    def end(self, rank: int) -> None:
        """Record that a rank has ended and will take part in no further exchange."""
        self._ended.add(rank)
        for number, exchange in self._exchanges.items():
            self._check_ended(number, exchange)

    def _is_complete(self, exchange: _Contributions) -> bool:
        return len(exchange.given) == self._size and not exchange.error

    def _check_ended(self, number: int, exchange: _Contributions) -> None:
        missing = self._ended - exchange.given
        if missing and exchange.result is None and not exchange.error:
            exchange.error = (
                f"{exchange.kind} of rank {exchange.first} (its exchange {number}) cannot end: rank {min(missing)} has "
                "ended without it. All ranks must call the same methods in the same order; steps(n) of the context is the "
                "number of batches of the rank with the most."
            )
