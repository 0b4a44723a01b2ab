"""Train a digit classifier of PyTorch with DistributedDataParallel: a training function, once on each of several workers.

::

    python examples/torch_distributed.py [--epochs N] [--workers N] [--master local[2]]

The function is an ordinary one of PyTorch; Spark starts its processes and distributes the rows. Needs PyTorch. The digits
come with scikit-learn: nothing is downloaded.
"""

from __future__ import annotations

import argparse
from typing import Any

from surroundings import hushed, start_spark

with hushed():
    import numpy as np
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    from sparkkeras import SparkRunner
    from sparkkeras.runner import context

SEED = 7
BATCH_SIZE = 32


def train(epochs: int) -> dict[str, Any]:
    """Train on the rows of this rank, together with the other ranks; returns the weights, the same on all of them."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    ranks = context()
    torch.distributed.init_process_group("gloo")  # finds the others in MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE
    torch.manual_seed(SEED)
    network = DistributedDataParallel(build())
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    loss_of = torch.nn.CrossEntropyLoss()
    for epoch in range(1, epochs + 1):
        total = 0.0
        with network.join():  # ranks may have different numbers of batches
            for x, y in ranks.batches(BATCH_SIZE):
                optimizer.zero_grad()
                loss = loss_of(network(torch.from_numpy(x)), torch.from_numpy(y))
                loss.backward()
                optimizer.step()
                total += loss.item() * len(x)
        sums = ranks.all_reduce([total, sum(len(x) for x, _ in ranks.batches(BATCH_SIZE))])
        if ranks.rank == 0:
            ranks.report(epoch, {"loss": sums[0] / sums[1]})
    torch.distributed.destroy_process_group()
    return {name: value.numpy() for name, value in network.module.state_dict().items()}


def build() -> Any:
    from torch.nn import Linear, ReLU, Sequential

    return Sequential(Linear(64, 128), ReLU(), Linear(128, 10))


@hushed()
def main() -> None:
    options = command_line()
    print(f"Starting Spark on {options.master} ...")
    spark = start_spark(options.master)
    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(
        (x / 16).astype(np.float32), y, test_size=0.25, stratify=y, random_state=SEED
    )
    states = SparkRunner(options.workers).run(train, options.epochs, data=(x_train, y_train))
    spark.stop()

    import torch

    assert all(np.array_equal(state[name], states[0][name]) for state in states for name in state)
    network = build()
    network.load_state_dict({name: torch.from_numpy(value) for name, value in states[0].items()})
    accuracy = np.mean(network(torch.from_numpy(x_test)).argmax(1).numpy() == y_test)
    print(f"Accuracy    {accuracy:.1%} of {len(y_test)} test digits, trained by {len(states)} ranks")


def command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a digit classifier with DistributedDataParallel on Spark.")
    parser.add_argument("--epochs", type=int, metavar="N", default=20, help="training epochs (default: %(default)s)")
    parser.add_argument("--workers", type=int, metavar="N", default=2, help="processes that train (default: %(default)s)")
    parser.add_argument("--master", default="local[2]", help="Spark master URL (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
