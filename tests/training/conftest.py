"""A model that tests of strategies share."""

import keras
import pytest

from tests.training.runs import Model


@pytest.fixture(scope="module")
def linear_adam():
    return Model(optimizer=keras.optimizers.Adam(0.05))


@pytest.fixture
def linear(linear_adam):
    """A linear model with Adam, in its initial state."""
    linear_adam.reset()
    return linear_adam
