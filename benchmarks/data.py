"""The data and models of the benchmarks: digits from scikit-learn, so nothing is downloaded.

The environment of Elephas imports this file, too, so it must not import sparkkeras.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = tuple[NDArray[np.float32], NDArray[np.int64]]

SIDE = 28
BATCH_SIZE = 64
LENGTH, WORDS = 64, 1000
_MAX_SHIFT = 3


def images(rows: int, seed: int = 0, digits: Any = slice(None)) -> Arrays:
    """Digits of 28 x 28 pixels in [0, 1], shape (rows, 28, 28, 1), and their labels.

    The 1,797 digits of 8 x 8 pixels are enlarged, repeated in random order up to ``rows``, and shifted by up to 3 pixels.

    Args:
        rows: The number of rows.
        seed: The seed of their order and shifts.
        digits: The indices of the digits to take; all by default.
    """
    from scipy.ndimage import zoom
    from sklearn.datasets import load_digits

    known = load_digits()
    enlarged = zoom(known.images[digits] / 16.0, (1, SIDE / 8, SIDE / 8), order=1).clip(0, 1).astype(np.float32)
    padded = np.pad(enlarged, ((0, 0), (_MAX_SHIFT, _MAX_SHIFT), (_MAX_SHIFT, _MAX_SHIFT)))
    shifted = np.lib.stride_tricks.sliding_window_view(padded, (SIDE, SIDE), axis=(1, 2))
    random = np.random.default_rng(seed)
    chosen = random.permutation(np.arange(rows) % len(enlarged))
    down, right = random.integers(2 * _MAX_SHIFT + 1, size=(2, rows))
    return np.ascontiguousarray(shifted[chosen, down, right])[..., np.newaxis], known.target[digits][chosen].astype(np.int64)


def vectors(rows: int, seed: int = 0, digits: Any = slice(None)) -> Arrays:
    """The digits of `images` as flat vectors, shape (rows, 784), and their labels."""
    x, y = images(rows, seed, digits)
    return x.reshape(rows, SIDE * SIDE), y


def small_digits() -> Arrays:
    """scikit-learn's digits in their original size, in [0, 1], shape (1797, 64), and their labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return (digits.data / 16.0).astype(np.float32), digits.target.astype(np.int64)


def table(rows: int, columns: int, seed: int = 0) -> NDArray[np.float32]:
    """Random rows, like those of a table, shape (rows, columns)."""
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)


def large_mlp() -> Any:
    """784-4096-5120-10: 24 million weights, 97 MB. Its optimizer has no variables, which would be sent with the weights."""
    return _compiled(_dense("large_mlp", SIDE * SIDE, 4096, 5120), optimizer="sgd")


def middle_mlp() -> Any:
    """784-2048-440-10: 2.5 million weights, 10 MB, and 20 MB of optimizer variables."""
    return _compiled(_dense("middle_mlp", SIDE * SIDE, 2048, 440))


def mlp(steps_per_execution: int = 1) -> Any:
    """784-128-128-10: so small that the overhead of a step costs more than its arithmetic."""
    return _compiled(_dense("mlp", SIDE * SIDE, 128, 128), steps_per_execution)


def table_mlp(columns: int) -> Any:
    """columns-128-128-10, for `table`."""
    return _compiled(_dense("table_mlp", columns, 128, 128, "class"))


def cnn() -> Any:
    """Two convolutions: so much arithmetic that the overhead of a step is negligible."""
    from keras import Input, Sequential, layers

    return _compiled(
        Sequential(
            [
                Input((SIDE, SIDE, 1)),
                layers.Conv2D(32, 3, activation="relu", name="first"),
                layers.Conv2D(64, 3, activation="relu", name="second"),
                layers.MaxPooling2D(name="pool"),
                layers.Flatten(name="flat"),
                layers.Dense(64, activation="relu", name="third"),
                layers.Dense(10, activation="softmax", name="digit"),
            ],
            name="cnn",
        )
    )


def transformer() -> Any:
    """Two blocks of self-attention over sequences of `LENGTH` words out of `WORDS`."""
    from keras import Input, Model, layers

    words = Input((LENGTH,), dtype="int32", name="words")
    x = layers.Embedding(WORDS, 128, name="embedding")(words)
    for block in ("first", "second"):
        attended = layers.MultiHeadAttention(4, 32, name=f"{block}_attention")(x, x)
        x = layers.LayerNormalization(name=f"{block}_norm")(layers.add([x, attended]))
        hidden = layers.Dense(128, name=f"{block}_narrow")(layers.Dense(256, "gelu", name=f"{block}_wide")(x))
        x = layers.LayerNormalization(name=f"{block}_end")(layers.add([x, hidden]))
    pooled = layers.GlobalAveragePooling1D(name="pool")(x)
    return _compiled(Model(words, layers.Dense(10, "softmax", name="topic")(pooled), name="transformer"))


def lstm(width: int = 8, steps: int = 60) -> Any:
    """A recurrent layer of 64 units over rows of `series`."""
    from keras import Input, Sequential, layers

    shape = Input((steps, width))
    return _compiled(Sequential([shape, layers.LSTM(64, name="recurrent"), layers.Dense(10, "softmax")], name="lstm"))


def series(rows: int, width: int = 8, steps: int = 60, seed: int = 0) -> NDArray[np.float32]:
    """Random series, shape (rows, steps, width)."""
    return np.random.default_rng(seed).normal(size=(rows, steps, width)).astype(np.float32)


def words(rows: int, seed: int = 0) -> NDArray[np.int32]:
    """Random sequences of words, shape (rows, `LENGTH`)."""
    return np.random.default_rng(seed).integers(WORDS, size=(rows, LENGTH), dtype=np.int32)


def small_mlp() -> Any:
    """64-64-10, for `small_digits`."""
    from keras import Input, Sequential, layers

    return _compiled(
        Sequential(
            [
                Input((64,)),
                layers.Dense(64, activation="relu", name="first"),
                layers.Dense(10, activation="softmax", name="digit"),
            ],
            name="small_mlp",
        )
    )


def _dense(name: str, width: int, first: int, second: int, output: str = "digit") -> Any:
    """A model with two hidden layers and ten outputs."""
    from keras import Input, Sequential, layers

    return Sequential(
        [
            Input((width,)),
            layers.Dense(first, activation="relu", name="first"),
            layers.Dense(second, activation="relu", name="second"),
            layers.Dense(10, activation="softmax", name=output),
        ],
        name=name,
    )


def _compiled(model: Any, steps_per_execution: int = 1, optimizer: str = "adam") -> Any:
    model.compile(
        optimizer=optimizer,
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        steps_per_execution=steps_per_execution,
    )
    return model
