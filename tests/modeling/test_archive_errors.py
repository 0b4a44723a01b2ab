"""The advice for models without get_config or from_config works when it is followed."""

import keras
import numpy as np
import pytest

from sparkkeras.errors import ModelError
from sparkkeras.modeling.archive import copy_of


class Gan(keras.Model):
    def __init__(self, generator, discriminator, factor=2, name="gan", **options):
        super().__init__(name=name, **options)
        self.generator, self.discriminator, self.factor = generator, discriminator, factor

    def call(self, x):
        return self.factor * self.discriminator(self.generator(x))


class Closed(Gan):
    """Takes no further arguments."""

    def __init__(self, generator, discriminator):
        super().__init__(generator, discriminator)


class Halved(Closed):
    """Lacks from_config."""

    def get_config(self):
        return {"generator": self.generator, "discriminator": self.discriminator}


def network(inputs, units):
    return keras.Sequential([keras.Input((inputs,)), keras.layers.Dense(units)])


def built(kind):
    model = kind(network(3, 2), network(2, 1))
    model(np.zeros((1, 3)))
    return model


@pytest.mark.filterwarnings("ignore:Model .* had a build config")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Gan, r"Gan has no get_config.* \(generator, discriminator, factor\)"),
        (Closed, r"Closed has no get_config.* \(generator, discriminator\)"),
        (Halved, r"get_config .* Halved .* \(generator, discriminator\)"),
    ],
)
def test_a_model_of_models_can_be_copied_with_the_methods_that_the_error_shows(kind, message):
    with pytest.raises(ModelError, match=message) as raised:
        copy_of(built(kind))
    methods = str(raised.value).partition(":\n")[2]
    names = {"Lacking": kind, "keras": keras, "__name__": __name__}
    exec(f"class Complete(Lacking):\n{methods}", names)
    model = built(names["Complete"])
    x = np.ones((2, 3), np.float32)
    assert np.array_equal(copy_of(model)(x), model(x))
