"""The protocol of training strategies, and the strategy of each training mode."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

from sparkkeras.data.dataset import StoredDataset
from sparkkeras.errors import ConfigurationError, known_names
from sparkkeras.training.callbacks import DriverCallbacks
from sparkkeras.training.job import Job

MODES = ("synchronous", "asynchronous", "hogwild", "allreduce")
"""The training modes; each has a strategy."""

ASYNCHRONOUS_MODES = ("asynchronous", "hogwild")
"""The modes with a parameter server."""


class Strategy(Protocol):
    """Trains a job's model on a dataset; implements both the driver's and the workers' half of the protocol."""

    def fit(self, job: Job, dataset: StoredDataset, callbacks: DriverCallbacks) -> None:
        """Train the model, update the job's model and histories, and call ``callbacks`` in every epoch and round."""
        ...


def make_strategy(mode: str) -> Strategy:
    """The strategy of a mode.

    Raises:
        ConfigurationError: The mode is unknown.
    """
    from sparkkeras.training.allreduce import AllReduceStrategy
    from sparkkeras.training.averaging import AveragingStrategy
    from sparkkeras.training.parameter_server import ParameterServerStrategy

    strategies: dict[str, Callable[[], Strategy]] = {
        "synchronous": AveragingStrategy,
        "asynchronous": functools.partial(ParameterServerStrategy, locked=True),
        "hogwild": functools.partial(ParameterServerStrategy, locked=False),
        "allreduce": AllReduceStrategy,
    }
    if mode not in strategies:
        raise ConfigurationError(f"mode={mode!r} is not known. {known_names(mode, strategies)}")
    return strategies[mode]()
