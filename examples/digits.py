"""Shared by the examples of SparkRunner: the digits, the command line, and the accuracy on digits that no rank has seen."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

SEED = 7
BATCH_SIZE = 32


def command_line(arguments: Sequence[str] | None, description: str, epochs: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--epochs", type=int, metavar="N", default=epochs, help="training epochs (default: %(default)s)")
    parser.add_argument("--workers", type=int, metavar="N", default=2, help="processes that train (default: %(default)s)")
    parser.add_argument("--master", default="local[2]", help="Spark master URL (default: %(default)s)")
    options = parser.parse_args(arguments)
    print(f"Starting Spark on {options.master} ...")
    return options


def split_digits() -> tuple[Any, Any, Any, Any]:
    """Pixels to train on and to test with, then their digits."""
    x, y = load_digits(return_X_y=True)
    return tuple(train_test_split((x / 16).astype(np.float32), y, test_size=0.25, stratify=y, random_state=SEED))


def same(weights: Sequence[Sequence[Any]]) -> Sequence[Any]:
    """The weights that each rank has returned, which are the same to the last bit."""
    first, *others = weights
    assert all(np.array_equal(one, two) for other in others for one, two in zip(first, other, strict=True))
    return first


def print_accuracy(scores: Any, y_test: Any, ranks: int) -> None:
    """Print the share of test digits whose score is the highest one."""
    accuracy = np.mean(np.argmax(scores, 1) == y_test)
    print(f"Accuracy    {accuracy:.1%} of {len(y_test)} test digits, trained by {ranks} ranks")
