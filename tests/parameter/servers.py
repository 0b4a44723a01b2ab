"""Ledgers and stores for the tests of the parameter server."""

import time

import numpy as np

from sparkkeras.parameter.exchange import PartitionPlan
from sparkkeras.parameter.ledger import Ledger
from sparkkeras.parameter.rules import Downpour
from sparkkeras.parameter.store import Store
from sparkkeras.weights import Flat


def a_store(vector, integer_variables=(), *, trainable=None, rule=None, state=None, num_workers=1, locked=True):
    """A store whose updates are added to the weights by default; a list of weights is float32."""
    vector = np.array(vector, np.float32) if isinstance(vector, list) else vector
    trainable = vector.size if trainable is None else trainable
    return Store(Flat(vector, integer_variables), trainable, rule or Downpour(), state or {}, num_workers, locked)


def a_ledger(plans, store=None, epochs=range(1), **options):
    """A ledger of plans or numbers of batches, by default without validation and without waiting."""
    plans = {worker: plan if isinstance(plan, PartitionPlan) else PartitionPlan(plan) for worker, plan in enumerate(plans)}
    defaults = {
        "num_concurrent": len(plans),
        "validates": lambda epoch: False,
        "max_staleness": None,
        "lease_seconds": 60.0,
        "warmup_timeout": 0.0,
        "on_epoch": lambda epoch: None,
        "clock": time.monotonic,
    }
    return Ledger(store or a_store(np.zeros(1)), plans, epochs, **defaults | options)
