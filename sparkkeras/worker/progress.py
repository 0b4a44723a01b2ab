"""The progress of a worker within an epoch, or with rows to evaluate or predict, sent to the driver about once a second.

Nothing depends on it. A worker connects only when it has trained for a second, so short ones cost nothing; if it cannot
connect, it does not try again.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkkeras.rpc.transport import Address, Caller

REPORT_SECONDS = 1.0
"""The interval of reports, and how long a worker must have trained before the first one."""

CONNECT_SECONDS = 5.0
"""How long a worker waits for the driver."""


class ProgressReporter:
    """Sends the latest progress from a thread; a context manager.

    Args:
        address: The address of the driver; ``None``: nothing is sent.
        worker: The index of the worker.
        epoch: The epoch.
    """

    def __init__(self, address: Address | None, worker: int, epoch: int = 0) -> None:
        self._address, self._worker, self._epoch = address, worker, epoch
        self._began: float | None = None
        self._latest: tuple[int, Mapping[str, Any]] = 0, {}
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_sent = False

    def __enter__(self) -> ProgressReporter:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()  # the thread sends what was reached, and ends by itself

    def update(self, rows: int, logs: Mapping[str, Any] | None = None) -> None:
        """Note what was reached: the rows of the epoch, and the metrics over them. It returns at once."""
        now = time.monotonic()
        self._latest = rows, logs or {}
        if self._began is None:  # now that the model is compiled
            self._began = now
        if self._address is not None and self._thread is None and now >= self._began + REPORT_SECONDS:
            address = replace(self._address, timeout=CONNECT_SECONDS)
            self._thread = threading.Thread(target=self._send, args=[address], name="sparkkeras-progress", daemon=True)
            self._thread.start()

    def _send(self, address: Address) -> None:
        is_last = False
        while not is_last:
            is_last = self._ends.wait(REPORT_SECONDS) if self._has_sent else False
            rows, logs = self._latest
            body = json.dumps({name: value for name, value in logs.items() if isinstance(value, float)}).encode()
            seconds = time.monotonic() - (self._began or 0.0)
            fields = {"worker": self._worker, "epoch": self._epoch, "rows": rows, "seconds": seconds}
            if not _call(address, fields, body):
                return
            self._has_sent = True


def _call(address: Address, fields: Mapping[str, Any], body: bytes) -> bool:
    """Send a report; returns whether that was possible. If not, no report is sent to this address any more."""
    with _lock:
        try:
            from sparkkeras.rpc.transport import RefusedError, TransportError, connect
        except ImportError:  # this Python has no cryptography
            return False
        try:
            if address not in _callers:
                for before in filter(None, _callers.values()):
                    before.close()
                _callers.clear()
                _callers[address] = connect(address)
            caller = _callers[address]
            if caller is not None:
                caller.call("progress", fields, (memoryview(body),))
            return caller is not None
        except (TransportError, RefusedError, OSError):
            _callers[address] = None
            return False


_callers: dict[Address, Caller | None] = {}
"""The connections of this process; ``None`` for an address that could not be reached. It has only the last address."""

_lock = threading.Lock()
