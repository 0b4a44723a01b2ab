"""Train a digit classifier of PyTorch with DistributedDataParallel: a training function, once on each of several workers.

::

    python examples/torch_distributed.py [--epochs N] [--workers N] [--master local[2]]

The function is an ordinary one of PyTorch; Spark starts its processes and distributes the rows. Needs PyTorch. The digits
come with scikit-learn: nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surroundings import hushed, start_spark

with hushed():
    from digits import BATCH_SIZE, SEED, command_line, print_accuracy, same, split_digits

    from sparkkeras import SparkRunner
    from sparkkeras.runner import context


def train(epochs: int) -> list[Any]:
    """Train on the rows of this rank, together with the other ranks; returns the weights, the same on all of them."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    ranks = context()
    torch.distributed.init_process_group("gloo")  # finds the others in MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE
    torch.manual_seed(SEED)
    network = DistributedDataParallel(build())
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    loss_of = torch.nn.CrossEntropyLoss()
    for epoch in range(epochs):
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
            ranks.report(epoch, {"loss": sums[0] / sums[1]}, epochs)
    # The process group stays open: PyTorch may wait forever for a destroyed one (pytorch/pytorch#56297).
    return [value.numpy() for value in network.module.state_dict().values()]


def build() -> Any:
    from torch.nn import Linear, ReLU, Sequential

    return Sequential(Linear(64, 128), ReLU(), Linear(128, 10))


@hushed()
def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line(arguments, "Train a digit classifier with DistributedDataParallel on Spark.", epochs=20)
    spark = start_spark(options.master)
    x_train, x_test, y_train, y_test = split_digits()
    weights = SparkRunner(options.workers).run(train, options.epochs, data=(x_train, y_train))
    spark.stop()

    import torch

    network = build()
    network.load_state_dict(dict(zip(network.state_dict(), map(torch.from_numpy, same(weights)), strict=True)))
    print_accuracy(network(torch.from_numpy(x_test)).detach().numpy(), y_test, len(weights))


if __name__ == "__main__":
    main()
