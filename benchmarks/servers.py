"""Measure the two parameter servers of sparkkeras, with a client in another process, like a worker."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import numpy as np
from harness import Turn

from sparkkeras.parameter.exchange import ExchangePoint, PartitionPlan
from sparkkeras.parameter.ledger import Ledger
from sparkkeras.parameter.rules import Downpour
from sparkkeras.parameter.service import ParameterClient, ParameterService, PayloadFormat
from sparkkeras.parameter.store import Store
from sparkkeras.rpc.transport import Address, Endpoint, make_transport
from sparkkeras.rpc.wire import Secret
from sparkkeras.weights import Flat


def exchanges(transport: str, nbytes: int, count: int, *, encrypt: bool = False) -> dict[str, Turn]:
    """Return the seconds of ``count`` pulls and pushes of ``nbytes`` bytes, authenticated, one after the other.

    A pull ends when the weights are in the client's memory, a push when it has been applied and acknowledged.
    """
    weights = Flat(np.zeros(nbytes // 4, np.float32))
    store = Store(weights, weights.vector.size, Downpour(), {}, 1)
    ledger = Ledger(
        store,
        {0: PartitionPlan(batches=10**9)},
        range(1),
        num_concurrent=1,
        validates=lambda epoch: False,
        max_staleness=None,
        lease_seconds=60,
        warmup_timeout=60,
        on_epoch=lambda epoch: None,
        clock=time.monotonic,
    )
    payload_format = PayloadFormat.of(weights, ())
    service = ParameterService(ledger, payload_format)
    endpoint = Endpoint("127.0.0.1", "127.0.0.1", encrypt=encrypt)
    with make_transport(transport).serve(service, endpoint, Secret.fresh()) as address:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(_client, (address, payload_format, count))


def _client(address: Address, payload_format: PayloadFormat, count: int) -> dict[str, Any]:
    delta = np.ones(payload_format.size, np.float32)
    seconds: dict[str, Turn] = {"pull": [], "push": []}
    with ParameterClient(address, payload_format, 0, 0) as client:
        client.lease()
        for turn in range(count + 2):
            started = time.perf_counter()
            version = client.pull().version
            pulled = time.perf_counter()
            client.push((delta,), (), version, ExchangePoint(0, turn + 1, 1, 1, 0.1, 0.0))
            seconds["pull"].append(pulled - started)
            seconds["push"].append(time.perf_counter() - pulled)
    return {name: turns[2:] for name, turns in seconds.items()}  # the first ones create connections and buffers
