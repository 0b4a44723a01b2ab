"""The protocol between ranks and driver: the service on the driver, and the client of hosts and of their ranks.

==============  ==================================================  =====================================================
call            meaning                                             body of the request / of the reply
==============  ==================================================  =====================================================
`join`          a host has a port for its rank; reply when all do   - / the addresses of all ranks, as JSON
`missing_rows`  a host does not find the rows of its rank
`heartbeat`     the output since the last one; replies whether to   lines, as JSON / -
                end the process
`end`           the process of the rank has ended
`start`         the process of the rank calls the function
`report`        show metrics of an epoch; replies whether to stop   the logs, as JSON / -
`give`          a value for an exchange between the ranks           the value / -
`take`          the result of an exchange                           - / the result
`expect`        announce the result, or what to ask the driver      the sizes of its parts, as JSON / -
`piece`         a piece of it                                       the piece / -
`finish`        all of the result was sent
`leave`         the process wants to exit; replies whether to wait
`fail`          the function raised an exception                    the traceback / -
==============  ==================================================  =====================================================

The first four are calls of the host, the others of the process of its rank. All can be repeated. The calls use the
transports of `sparkkeras.rpc`; no call waits on the driver, so a rank that waits for others asks again.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparkkeras.data.values import Pickled
from sparkkeras.errors import ClusterError, ConfigurationError, CustomObjectError
from sparkkeras.events import RankReported
from sparkkeras.modeling.custom_code import culprit
from sparkkeras.rpc.service import Client, Service
from sparkkeras.rpc.transport import Address, Call, RefusedError, Reply
from sparkkeras.rpc.wire import Fields
from sparkkeras.runner.exchanges import ASK_DRIVER, OUT_OF_STEP, Kind, OutOfStepError
from sparkkeras.runner.group import RankFailure, RankGroup

if TYPE_CHECKING:
    from sparkkeras.runner.run_checkpoints import RunCheckpoints

LINES_BYTES = 4 << 20
"""The largest size of the lines of a heartbeat, and of a traceback."""

VALUE_BYTES = 1 << 30
"""The largest size of a result, and of a value in an exchange between the ranks."""

PIECE_BYTES = 16 << 20
"""Results are sent in pieces of this size."""


def check_size(name: str, size: int, instead: str) -> None:
    """Reject a value that is too large to be sent to the driver.

    Args:
        name: What it is, for the message.
        size: Its size in bytes.
        instead: What to do instead, for the message.

    Raises:
        ConfigurationError: It is larger than `VALUE_BYTES`.
    """
    if size > VALUE_BYTES:
        limit = VALUE_BYTES >> 30
        raise ConfigurationError(
            f"{name} has {size / (1 << 30):.2f} GiB, and at most {limit} GiB can be sent to the driver: {instead}."
        )


def pack(value: Any, name: str) -> bytes:
    """Pickle a value by value, as it travels between the driver and the processes of ranks; the inverse is `pickle.loads`.

    Args:
        value: The value.
        name: What it is, for messages.

    Raises:
        CustomObjectError: It cannot be pickled; the message names the part that fails.
    """
    from pyspark import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value, 5))
    except Exception as error:
        raise _unpicklable(value, name, f"{type(error).__name__}: {error}") from error


def pack_parts(value: Any, name: str) -> tuple[memoryview, ...]:
    """Pickle a value, as the pickle and then the memory of each array; see `pack`."""
    from pyspark import cloudpickle

    try:
        return Pickled.of(value, cloudpickle.dumps).parts
    except pickle.PicklingError as error:
        raise _unpicklable(value, name, str(error)) from error


def unpack_parts(parts: Sequence[memoryview]) -> Any:
    """The inverse of `pack_parts`. The arrays of the value use the memory of the parts."""
    head, *arrays = parts
    return pickle.loads(head, buffers=arrays)


def _unpicklable(value: Any, name: str, reason: str) -> CustomObjectError:
    return CustomObjectError(
        f"{name} cannot be pickled, since pickling {culprit(value, name)} failed: {reason}. Return arrays, numbers and "
        "strings, or write what cannot be pickled to a file and return its path; of a Keras model, return "
        "model.get_weights()."
    )


NO_CHECKPOINTS = "no checkpoints"
"""The kind of `RefusedError` for a rank that saves a state in a run without checkpoints."""

REPLACED = "replaced"
"""The kind of `RefusedError` for an attempt at a rank that Spark has started again."""


class GroupService(Service):
    """Handles the calls of a group.

    Args:
        group: The state of the group.
        max_value: The largest size of what a rank asks the driver, in bytes.
        checkpoints: Writes what rank 0 saves; ``None``: ranks cannot save.
    """

    def __init__(self, group: RankGroup, max_value: int = VALUE_BYTES, checkpoints: RunCheckpoints | None = None) -> None:
        of_ranks: dict[str, tuple[Callable[[int, Call], Reply | None], int]] = {
            "heartbeat": (self._heartbeat, LINES_BYTES),
            "end": (lambda rank, call: group.end(rank, call.field("how", str)), 0),
            "start": (lambda rank, call: group.start(rank), 0),
            "report": (self._report, LINES_BYTES),
            "give": (self._give, VALUE_BYTES),
            "take": (self._take, 0),
            "expect": (self._expect, LINES_BYTES),
            "piece": (self._piece, PIECE_BYTES),
            "save": (self._save, VALUE_BYTES),
            "restored": (self._restored, 0),
            "finish": (lambda rank, call: group.complete(rank), 0),
            "leave": (lambda rank, call: Reply({"wait": not group.may_exit}), 0),
            "fail": (self._fail, LINES_BYTES),
        }
        calls = {name: (self._of_current(handle), limit) for name, (handle, limit) in of_ranks.items()}
        of_hosts = {"join": (self._join, 0), "missing_rows": (self._report_missing_rows, 0)}
        super().__init__({**calls, **of_hosts, "health": (lambda call: Reply({}), 0)}, group.disconnect)
        self._group, self._max_value, self._checkpoints = group, max_value, checkpoints

    def _of_current(self, handle: Callable[[int, Call], Reply | None]) -> Callable[[Call], Reply]:
        """Pass on calls of ranks whose attempt was not replaced by another one."""

        def handled(call: Call) -> Reply:
            rank = self._rank_of(call)
            if not self._group.is_current(rank, call.field("attempt", int)):
                raise RefusedError(REPLACED, f"Spark has started rank {rank} again.")
            return handle(rank, call) or Reply({})

        return handled

    def _rank_of(self, call: Call) -> int:
        rank = call.field("rank", int)
        if not 0 <= rank < self._group.size:
            raise RefusedError("malformed", f"there is no rank {rank}.")
        return rank

    def _join(self, call: Call) -> Reply:
        rank, attempt = self._rank_of(call), call.field("attempt", int)
        addresses = self._group.join(rank, attempt, call.field("host", str), call.field("port", int))
        if addresses is None:
            stop = self._group.is_stopping or self._group.is_complete(rank)
            return Reply({"wait": not stop, "stop": stop})
        return Reply({}, (memoryview(json.dumps(addresses).encode()),))

    def _report_missing_rows(self, call: Call) -> Reply:
        self._group.report_missing_rows()
        return Reply({})

    def _heartbeat(self, rank: int, call: Call) -> Reply:
        if call.body:
            self._group.console.add(rank, [str(line) for line in json.loads(bytes(call.body))])
        return Reply({"stop": self._group.heartbeat(rank)})

    def _report(self, rank: int, call: Call) -> Reply:
        logs = {str(name): float(value) for name, value in json.loads(bytes(call.body)).items()}
        self._group.console.report(RankReported(rank, call.field("epoch", int), call.fields.get("epochs"), logs))
        return Reply({"stop": self._group.is_stopping})

    def _save(self, rank: int, call: Call) -> None:
        if self._checkpoints is None:
            raise RefusedError(
                NO_CHECKPOINTS, "save() needs checkpoints: pass checkpoint=Checkpoint(path) to SparkRunner.run."
            )
        self._checkpoints.save(pickle.loads(call.body))

    def _restored(self, rank: int, call: Call) -> Reply:
        found = b"" if self._checkpoints is None else self._checkpoints.restored
        return Reply({}, (memoryview(found),) if found else ())

    def _give(self, rank: int, call: Call) -> None:
        name, dtype, shape = call.field("kind", tuple)
        self._group.give(rank, call.field("number", int), Kind(name, dtype, tuple(shape)), bytes(call.body))

    def _take(self, rank: int, call: Call) -> Reply:
        try:
            result = self._group.take(call.field("number", int))
        except OutOfStepError as error:
            raise RefusedError(OUT_OF_STEP, str(error)) from error
        return Reply({"wait": True}) if result is None else Reply({}, (memoryview(result),))

    def _expect(self, rank: int, call: Call) -> None:
        sizes = [int(size) for size in json.loads(bytes(call.body))]
        if min(sizes) < 0 or sum(sizes) > self._max_value:
            raise RefusedError("malformed", f"a result has {sum(sizes)} bytes; at most {self._max_value} are possible.")
        self._group.expect(rank, sizes)

    def _piece(self, rank: int, call: Call) -> None:
        try:
            self._group.receive(rank, call.field("part", int), call.field("start", int), call.body)
        except (IndexError, ValueError) as error:
            raise RefusedError("malformed", f"a piece of a result does not fit: {error}.") from error

    def _fail(self, rank: int, call: Call) -> None:
        traceback = bytes(call.body).decode("utf-8", "replace")
        self._group.fail(RankFailure(rank, call.field("error", str), traceback))


class GroupStoppedError(Exception):
    """The driver has stopped the group, or does not need this attempt at a rank."""


_ERRORS = {OUT_OF_STEP: ConfigurationError, NO_CHECKPOINTS: ConfigurationError, REPLACED: ClusterError}


class RankClient(Client):
    """The client of a host or of the process of its rank.

    Args:
        address: The address of the driver.
        rank: The rank.
        attempt: The number of Spark's attempt at its task.
        is_host: Whether this is the client of the host. The driver counts a rank as lost when that client disconnects.
    """

    def __init__(self, address: Address, rank: int, attempt: int, is_host: bool = False) -> None:
        super().__init__(address, f"rank {rank}", None, _ERRORS)
        self._fields = {"rank": rank, "attempt": attempt} | ({"lease": rank} if is_host else {})

    def _ask(self, name: str, *body: memoryview, **fields: Any) -> tuple[Fields, memoryview]:
        """Make a call of this rank."""
        return self._call(name, {**self._fields, **fields}, body)

    def join(self, host: str, port: int) -> tuple[str, ...]:
        """Join the group, and wait for the addresses of all ranks; see `RankGroup.join`.

        Raises:
            GroupStoppedError: The group has been stopped, or another attempt at the rank has ended.
        """
        reply, body = self._poll("join", {**self._fields, "host": host, "port": port})
        if reply.get("stop"):
            raise GroupStoppedError
        return tuple(json.loads(bytes(body)))

    def report_missing_rows(self) -> None:
        """Report that the rows of the rank are not on this machine."""
        self._ask("missing_rows")

    def heartbeat(self, lines: Sequence[str] = ()) -> bool:
        """Send a heartbeat with output; returns whether to end the process of the rank."""
        body = (memoryview(json.dumps(lines).encode()),) if lines else ()
        return bool(self._ask("heartbeat", *body)[0]["stop"])

    def end(self, how: str) -> None:
        """Report how the process of the rank has ended."""
        self._ask("end", how=how)

    def start(self) -> None:
        """Report that the process of the rank calls the function."""
        self._ask("start")

    def report(self, epoch: int, epochs: int | None, logs: Mapping[str, Any]) -> bool:
        """Show metrics of an epoch on the driver; returns whether to stop."""
        body = memoryview(json.dumps(dict(logs)).encode())
        return bool(self._ask("report", body, epoch=epoch, epochs=epochs)[0]["stop"])

    def save(self, packed: memoryview) -> None:
        """Have the driver write a pickled `Saved`.

        Raises:
            ConfigurationError: The run has no checkpoints.
        """
        self._ask("save", packed)

    def restored(self) -> memoryview:
        """The pickled `Saved` of the checkpoint from which the run continues; empty if there is none."""
        return self._ask("restored")[1]

    def exchange(self, number: int, kind: Kind, value: memoryview) -> memoryview:
        """Give a value to an exchange, and wait for its result.

        Raises:
            ConfigurationError: The ranks are out of step.
        """
        self._ask("give", value, number=number, kind=(kind.name, kind.dtype, kind.shape))
        return self._poll("take", {**self._fields, "number": number})[1]

    def ask_driver(self, number: int, parts: Sequence[memoryview]) -> memoryview:
        """Send the driver a pickled value, and wait for its answer to those of all ranks; see `exchange`."""
        self._send(parts)
        return self.exchange(number, Kind(ASK_DRIVER), memoryview(b""))

    def finish(self, parts: Sequence[memoryview]) -> None:
        """Send the pickled result."""
        self._send(parts)
        self._ask("finish")

    def _send(self, parts: Sequence[memoryview]) -> None:
        sizes = memoryview(json.dumps([part.nbytes for part in parts]).encode())
        self._ask("expect", sizes)
        for number, part in enumerate(parts):
            for start in range(0, part.nbytes, PIECE_BYTES):
                self._ask("piece", part[start : start + PIECE_BYTES], part=number, start=start)

    def leave(self) -> None:
        """Wait until all ranks have sent their results."""
        self._poll("leave", self._fields)

    def fail(self, error: str, traceback: str) -> None:
        """Report the exception of the function: what it is, in one line, and its traceback."""
        body = traceback.encode("utf-8", "replace")[-LINES_BYTES:]
        self._ask("fail", memoryview(body), error=error[:1000])
