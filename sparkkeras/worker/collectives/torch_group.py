"""Groups of processes with PyTorch's process groups."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from sparkkeras.weights import Array
from sparkkeras.worker.collectives.group import HEARTBEAT_SECONDS, LOST_SECONDS, Group, PeerLostError, unreachable


class TorchGroup(Group):
    """PyTorch's process groups: gloo, and NCCL for gradients on GPUs. Heartbeats go through the store of rank 0."""

    runs_eagerly = True

    def connect(self, held: socket.socket, timeout: float) -> None:
        """See `Group.connect`."""
        import torch

        distributed = _torch_distributed()
        store = self._store(held, timeout)
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=self.addresses[self.rank][0])]
        options._timeout = timedelta(seconds=timeout)
        try:
            gloo = distributed.ProcessGroupGloo(distributed.PrefixStore("gloo", store), self.rank, self.size, options)
        except RuntimeError as error:
            raise self._incomplete(timeout, error) from error
        gloo._set_default_timeout(_FOREVER)
        self._host: Any = gloo
        self._device: Any = gloo
        self.uses_gpus = torch.cuda.is_available()
        if self.uses_gpus:
            on_gpu = distributed.PrefixStore("nccl", store)
            chosen = distributed.ProcessGroupNCCL.Options()
            chosen._timeout = _FOREVER
            self._device = distributed.ProcessGroupNCCL(on_gpu, self.rank, self.size, chosen)

    def _store(self, held: socket.socket, timeout: float) -> Any:
        """The store, when all processes have joined. Rank 0 serves it."""
        distributed = _torch_distributed()
        host, port = self.addresses[0]
        serving: dict[str, Any] = {}
        if self.rank == 0:
            held.listen()
            serving = {"is_master": True, "master_listen_fd": os.dup(held.fileno())}
        wait: dict[str, Any] = {"wait_for_workers": False, "timeout": timedelta(seconds=timeout)}
        try:
            store = distributed.TCPStore(host, port, self.size, **serving, **wait)
            beats = distributed.TCPStore(host, port, self.size, is_master=False, **wait)
        except RuntimeError as error:  # torch.distributed.DistError
            raise self._missing([0], timeout) from error
        store.set(f"joined/{self.rank}", "")

        def missing() -> list[int]:
            return [rank for rank in range(self.size) if not store.check([f"joined/{rank}"])]

        self._await(missing, timeout)
        self._beats = _Beats(beats, self.rank, self.size)
        return store

    def _disconnect(self) -> None:
        self._beats.stop()

    def _gather(self, words: Array) -> Array:
        import torch

        return np.stack([each.numpy() for each in self._vectors(torch.from_numpy(words.copy()))])

    def _sum(self, vector: Any) -> Any:
        vector = vector.detach().contiguous()
        self._wait(self._device.allreduce([vector]), self.uses_gpus)
        return vector

    def _vectors(self, vector: Any) -> Sequence[Any]:
        import torch

        found = [torch.empty_like(vector) for _ in range(self.size)]
        self._wait(self._host.allgather([found], [vector.detach().contiguous()]))
        return found

    # The same with PyTorch's functions: those of Keras take longer than the gradients of a small model on their way.

    def _packed(self, tensors: Sequence[Any], shapes: Sequence[tuple[int, ...]], dtype: str) -> Any:
        import torch

        parts = [tensor.detach().reshape(-1).to(getattr(torch, dtype)) for tensor in tensors]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _unpacked(self, vector: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        sizes = list(map(math.prod, shapes))
        parts = vector[: sum(sizes)].split(sizes)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _weighted(self, vector: Any, weight: Any) -> Any:
        return vector.mul_(weight) if weight > 0 else vector.zero_()

    def _wait(self, work: Any, on_gpu: bool = False) -> None:
        """Wait for a collective. NCCL aborts one that has not ended when a wait with a time limit ends."""
        while on_gpu and not work.is_completed():
            self._check_peers()
            time.sleep(_GPU_POLL_SECONDS)
        while True:
            try:
                work.wait(timedelta(seconds=HEARTBEAT_SECONDS))
                return
            except RuntimeError as error:
                if work.is_completed():
                    raise PeerLostError(unreachable(error)) from error
                self._check_peers()

    def _check_peers(self) -> None:
        silent = self._beats.silent()
        if silent:
            raise PeerLostError(self._gone(silent)) from None

    def _complete(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Sequence[Any]:
        """PyTorch has no gradients for what a step did not use, which may depend on the data."""
        from keras import ops

        pairs = zip(gradients, variables, strict=True)
        return [ops.zeros(variable.shape, variable.dtype) if each is None else each for each, variable in pairs]

    def _counts(self, gradients: Sequence[Any]) -> list[float]:
        return [1.0, *(float(each is not None) for each in gradients)]

    def _contributed(self, means: list[Any], presence: Any) -> list[Any]:
        flags = presence.tolist()
        return [mean if flag > 0 else None for mean, flag in zip(means, flags, strict=True)]


def _torch_distributed() -> Any:
    """The module, whose declared types lack most of what is used here."""
    from torch import distributed

    return distributed


_FOREVER = timedelta(days=7)
"""The time limit of collectives: heartbeats tell a slow peer from one that is gone."""


_GPU_POLL_SECONDS = 1e-4


class _Beats:
    """Heartbeats through a store: each process counts up, and notes when it last saw the others' counts change."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank = store, rank
        now = time.monotonic()
        self._seen = {other: (b"", now) for other in range(size) if other != rank}
        self._answered = now
        self._stopped = threading.Event()
        store.set(f"beat/{rank}", "0")
        threading.Thread(target=self._run, name="sparkkeras-heartbeats", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def silent(self) -> list[int]:
        """The ranks that are gone."""
        limit = time.monotonic() - LOST_SECONDS
        if self._answered < limit:  # the store does not answer
            return [0]
        return [rank for rank, (_, when) in self._seen.items() if when < limit]

    def _run(self) -> None:
        count = 0
        while not self._stopped.wait(HEARTBEAT_SECONDS):
            count += 1
            try:
                self._store.set(f"beat/{self._rank}", str(count))
                for rank, (last, _) in list(self._seen.items()):
                    beat = self._store.get(f"beat/{rank}")
                    if beat != last:
                        self._seen[rank] = beat, time.monotonic()
            except RuntimeError:  # rank 0 is gone
                return
            self._answered = time.monotonic()
