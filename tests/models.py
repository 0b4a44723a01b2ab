"""Small models for several tests.

Layers have explicit names, so that workers recognize two instances as the same model and reuse its traced functions.
"""

import keras


def classifier(width=64, units=64, classes=10, seed=0, **compiled):
    """A dense classifier on rows of ``width`` values."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((width,), name="pixels"),
            keras.layers.Dense(units, activation="relu", name="hidden"),
            keras.layers.Dense(classes, activation="softmax", name="scores"),
        ],
        name="classifier",
    )
    model.compile(**({"optimizer": "adam", "loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]} | compiled))
    return model


def regression(width=3, seed=0, **compiled):
    """A linear model on rows of ``width`` values, with one output."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((width,), name="x"), keras.layers.Dense(1, name="y")], name="regression")
    model.compile(**({"optimizer": keras.optimizers.SGD(0.05), "loss": "mse"} | compiled))
    return model
