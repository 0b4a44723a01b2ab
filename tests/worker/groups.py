"""Groups of real processes for tests: forks of one process that has imported the backend once, as on the workers."""

import faulthandler
import functools
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from contextlib import contextmanager
from pathlib import Path

import keras
import numpy as np

from sparkkeras.data.dataset import TaskContext
from sparkkeras.worker import collectives
from sparkkeras.worker.batches import BatchRange
from sparkkeras.worker.lockstep import Lockstep
from sparkkeras.worker.trainer import LocalTrainer

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.worker.groups"])
JOIN_SECONDS = 6
ANSWER_SECONDS = 120


class Processes:
    """The processes of a group, seen from the test."""

    def __init__(self, size):
        self.held = [collectives.hold_port("127.0.0.1") for _ in range(size)]
        addresses = [held.getsockname() for held in self.held]
        self.pipes, self.processes = [], []
        for rank, held in enumerate(self.held):
            mine, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_member, args=(rank, addresses, held, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def start(self, function, *arguments):
        """Have each rank call ``function(group, *arguments)``, where each argument is a list by rank."""
        by_rank = zip(*arguments, strict=True) if arguments else [()] * len(self.pipes)
        for pipe, mine in zip(self.pipes, by_rank, strict=True):
            pipe.send((function, mine))

    def answer(self, rank):
        """The result of a rank; exceptions are returned, of a process that has ended its exit code."""
        try:
            assert self.pipes[rank].poll(ANSWER_SECONDS), f"rank {rank} does not answer"
            return self.pipes[rank].recv()
        except (EOFError, ConnectionError):
            self.processes[rank].join()
            return Ended(self.processes[rank].exitcode)

    def run(self, function, *arguments):
        """The results by rank of ``function(group, *arguments)``."""
        self.start(function, *arguments)
        answers = [self.answer(rank) for rank in range(len(self.pipes))]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def close(self):
        for process in self.processes:
            process.kill()
            process.join()
        for held in self.held:
            held.close()


class Ended(Exception):
    """A process has ended without an answer."""


@contextmanager
def group_of(size):
    processes = Processes(size)
    try:
        yield processes
    finally:
        processes.close()


def _member(rank, addresses, held, pipe):
    _limit_threads()
    faulthandler.enable()  # as in the processes of ranks
    group = None
    while True:
        function, arguments = pipe.recv()
        try:
            group = group or collectives.join(rank, addresses, held, timeout=JOIN_SECONDS)
            pipe.send(function(group, *arguments))
        except Exception as error:
            error.add_note(traceback.format_exc())
            pipe.send(error if is_picklable(error) else RuntimeError(repr(error)))


def is_picklable(error):
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True


def _limit_threads():
    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"


# What the processes run


def train(group, archive, state, rows, options, epochs=2, gradient_dtype=None, callbacks=()):
    """Train some epochs; returns the replica of each."""
    lockstep = _lockstep(group, gradient_dtype)
    trainer = LocalTrainer(archive, TaskContext(group.rank))
    replicas = []
    for epoch in range(epochs):
        batch_range = BatchRange(epoch, None, 0, 10**6)
        replica = trainer.fit(state, rows, batch_range, options, lockstep=lockstep, callbacks=list(callbacks))
        replicas.append(replica)
        state = replica.state
    return replicas


@functools.cache
def _lockstep(group, gradient_dtype):
    return Lockstep(group, gradient_dtype)


def gather(group, arrays):
    return [group.gather(array) for array in arrays], group.gather_bytes(b"x" * group.rank)


def leave(group):
    group.leave()


def catches_abort(group):
    """Whether there is a handler for SIGABRT, as that of faulthandler."""
    (mask,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask.split()[1], 16) >> (signal.SIGABRT - 1) & 1)


class Shift(keras.callbacks.Callback):
    """Changes a weight at the end of an epoch."""

    def on_epoch_end(self, epoch, logs=None):
        weights = self.model.get_weights()
        weights[0] = weights[0] + np.float32(1e-3)
        self.model.set_weights(weights)


class StopAt(keras.callbacks.Callback):
    """Stops training after a batch, on some workers."""

    def __init__(self, stops):
        super().__init__()
        self._stops = stops

    def on_train_batch_end(self, batch, logs=None):
        if self._stops:
            self.model.stop_training = True


class Ends(keras.callbacks.Callback):
    """Sends its process a signal, if there is one, once training is under way, and writes the time to a file."""

    def __init__(self, sent, path):
        super().__init__()
        self._sent, self._path = sent, path

    def on_train_batch_end(self, batch, logs=None):
        if self._sent is not None and batch == 5:
            self._path.write_text(str(time.monotonic()))
            os.kill(os.getpid(), self._sent)
