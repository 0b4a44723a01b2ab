"""Groups of processes with TensorFlow's collective operations."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparkkeras.rpc.addresses import host_and_port
from sparkkeras.weights import Array
from sparkkeras.worker.collectives.group import HEARTBEAT_SECONDS, LOST_SECONDS, Group

PARTS = 4
"""In so many parts TensorFlow sums a large vector."""

PART_SIZE = 1 << 21
"""A part has at least so many values."""

GATHERS = 1 << 20
"""The keys of gathers in training steps are larger, those of sums are smaller."""


class TensorFlowGroup(Group):
    """TensorFlow's collective operations, without a strategy. A thread aborts them when a peer does not answer."""

    _calls = 0
    listens_anywhere = False

    def connect(self, held: socket.socket, timeout: float) -> None:
        """See `Group.connect`."""
        import tensorflow as tf
        from tensorflow.core.protobuf import tensorflow_server_pb2
        from tensorflow.python.eager import context

        os.environ["TF_GRPC_REUSE_PORT"] = "1"  # beside the socket that holds the port
        self._context = context.context()
        self.uses_gpus = bool(tf.config.list_physical_devices("GPU"))
        self._hint = "nccl" if self.uses_gpus else "ring"
        self._context.configure_collective_ops(
            collective_leader=_task(0),
            device_filters=(f"/job:worker/task:{self.rank}",),
            use_nccl_communication=self.uses_gpus,
        )
        cluster = tf.train.ClusterSpec({"worker": [host_and_port(*address) for address in self.addresses]})
        self._context.enable_collective_ops(
            tensorflow_server_pb2.ServerDef(
                cluster=cluster.as_cluster_def(),
                default_session_config=self._context.config,
                job_name="worker",
                task_index=self.rank,
                protocol="grpc",
            )
        )
        self._context.ensure_initialized()
        self._instances: dict[tuple[Any, ...], int] = {}
        self._gathers = 0
        self._lost: list[int] = []
        self._left = threading.Event()
        self._await(lambda: [rank for rank in self._others if not self._answers(rank)], timeout)
        self.gather(np.zeros((), np.int32))
        threading.Thread(target=self._watch, name="sparkkeras-peers", daemon=True).start()

    def adopt(self, model: Any) -> None:
        """See `Group.adopt`."""
        model.jit_compile = model.jit_compile and self.size == 1  # see compiles_collectives

    def begin_step(self) -> None:
        """See `Group.begin_step`."""
        self._calls = 0

    def _disconnect(self) -> None:
        self._left.set()

    def _gather(self, words: Array) -> Array:
        import tensorflow as tf

        self._gathers += 1
        with tf.device("/device:CPU:0"):
            found = tf.raw_ops.CollectiveGatherV2(
                input=tf.constant(words),
                group_size=self.size,
                group_key=2,  # its devices are CPUs
                instance_key=self._gathers,
                ordering_token=[],
                communication_hint="ring",
            )
        result: Array = found.numpy().reshape(self.size, -1)
        return result

    def _sum(self, vector: Any) -> Any:
        import tensorflow as tf

        # A large vector travels faster in a few parts at the same time: 84 MB take 0.2 instead of 0.3 to 0.5 s on loopback.
        size = int(vector.shape[0])
        parts = min(PARTS, size // PART_SIZE)
        if parts < 2:
            return self._sum_of_part(vector)
        split = tf.split(vector, [(size + number) // parts for number in range(parts)])
        return tf.concat([self._sum_of_part(part) for part in split], 0)

    def _sum_of_part(self, vector: Any) -> Any:
        import tensorflow as tf

        return tf.raw_ops.CollectiveReduceV2(
            input=vector,
            group_size=self.size,
            group_key=1,
            instance_key=self._key(vector),
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
            communication_hint=self._hint,
        )

    def _vectors(self, vector: Any) -> Sequence[Any]:
        import tensorflow as tf

        found: Sequence[Any] = tf.unstack(self._gathered(vector), self.size)
        return found

    def _weighted(self, vector: Any, weight: Any) -> Any:
        import tensorflow as tf

        return tf.math.multiply_no_nan(vector, tf.cast(weight, vector.dtype))

    def _is_sparse(self, gradient: Any) -> bool:
        import tensorflow as tf

        # On GPUs, optimizers add the values for a row in any order, which would let replicas differ in their last bits.
        return isinstance(gradient, tf.IndexedSlices) and not self.uses_gpus

    def _sparse_means(self, gradients: Sequence[Any], weight: Any, dtype: str | None) -> Sequence[Any]:
        import tensorflow as tf

        lengths = tf.stack([tf.where(weight > 0, tf.size(each.indices), 0) for each in gradients])
        of_ranks = self._gathered(lengths)
        means = []
        for number, gradient in enumerate(gradients):
            length, all_lengths = lengths[number], of_ranks[:, number]
            values = gradient.values[:length] * tf.cast(weight, gradient.dtype)
            found = self._gathered_rows(tf.cast(values, dtype or gradient.dtype), all_lengths)
            # Values for the same row are not added: optimizers of Keras square each one.
            indices = self._gathered_rows(gradient.indices[:length], all_lengths)
            means.append(tf.IndexedSlices(tf.cast(found, gradient.dtype), indices, gradient.dense_shape))
        return means

    def _gathered_rows(self, rows: Any, lengths: Any) -> Any:
        """The rows of all ranks, of which each has so many, one after the other."""
        import tensorflow as tf

        # A key is for tensors of one size: they are padded to a power of 2.
        exponent = tf.reduce_sum(tf.cast(2 ** tf.range(31) < tf.reduce_max(lengths), tf.int32))
        padding = tf.concat([[2**exponent - tf.shape(rows)[0]], tf.shape(rows)[1:]], 0)
        found = self._gathered(tf.concat([rows, tf.zeros(padding, rows.dtype)], 0), exponent)
        return tf.boolean_mask(found, tf.sequence_mask(lengths, 2**exponent))

    def _gathered(self, tensor: Any, exponent: Any = 0) -> Any:
        """The tensors of all ranks along a new first axis, in a training step; a size that differs has another exponent."""
        import tensorflow as tf

        # bfloat16 is not gathered, so its bits travel as another type.
        found = tf.raw_ops.CollectiveGatherV2(
            input=tf.bitcast(tensor, tf.float16) if tensor.dtype == tf.bfloat16 else tensor,
            group_size=self.size,
            group_key=1,
            instance_key=GATHERS + 32 * self._key(tensor) + exponent,
            ordering_token=[],
            communication_hint=self._hint,
        )
        return tf.reshape(tf.bitcast(found, tensor.dtype), tf.concat([[self.size], tf.shape(tensor)], 0))

    def _key(self, tensor: Any) -> int:
        """The key by which ranks know the tensors that belong together in a training step, which are of one size."""
        call = (self._calls, tuple(tensor.shape), tensor.dtype.name)
        self._calls += 1
        return self._instances.setdefault(call, len(self._instances) + 1)

    def _answers(self, rank: int) -> bool:
        import tensorflow as tf

        try:
            self._context.check_collective_ops_peer_health(_task(rank), int(HEARTBEAT_SECONDS * 1000))
        except tf.errors.OpError:
            return False
        return True

    def _watch(self) -> None:
        """Abort collectives when a peer has not answered for some seconds."""
        from tensorflow.python.framework import errors

        failing: dict[int, float] = {}  # the ranks whose last check failed, since when; a check of each takes a second
        while not self._left.wait(HEARTBEAT_SECONDS):
            for rank in self._others:
                asked = time.monotonic()
                if self._answers(rank):
                    failing.pop(rank, None)
                elif time.monotonic() - failing.setdefault(rank, asked) >= LOST_SECONDS and not self._left.is_set():
                    self._lost = sorted(failing)
                    self._context.abort_collective_ops(errors.UNAVAILABLE, self._gone(self._lost))
                    return

    def _reason(self, error: Exception) -> str:
        import tensorflow as tf

        if not isinstance(error, tf.errors.OpError):
            return ""
        lost = self._lost or [rank for rank in self._others if not self._answers(rank)]
        return self._gone(lost) if lost else ""


def _task(rank: int) -> str:
    return f"/job:worker/replica:0/task:{rank}"
