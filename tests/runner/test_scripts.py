"""Training scripts of Keras on JAX train as one process does on all rows; examples/ has scripts of all backends."""

import textwrap

import numpy as np
import pytest

from sparkkeras import SparkRunner

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]

START = """
    import os, sys

    os.environ["KERAS_BACKEND"] = "jax"
    import keras
    import numpy as np
    from jax.experimental import multihost_utils
    from sparkkeras.runner import context

    ranks = context()
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    batch_size = 16
"""

DATA_PARALLEL = """
    if ranks.world_size > 1:
        keras.distribution.initialize()
        keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
        x, batch_size = x[ranks.rank :: 2], 8
"""

MODEL_PARALLEL = """
    if ranks.world_size > 1:
        keras.distribution.initialize()
        mesh = keras.distribution.DeviceMesh((1, 2), ["batch", "model"], keras.distribution.list_devices())
        layout = keras.distribution.LayoutMap(mesh)
        layout[".*kernel"] = (None, "model")
        keras.distribution.set_distribution(
            keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch", auto_shard_dataset=False)
        )
"""

TRAIN = """
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    model.fit(x, x[:, :2], batch_size=batch_size, epochs=3, shuffle=False, verbose=2)
    variables = [each.value for each in (*model.weights, *model.optimizer.variables)]
    print("parts", [each.addressable_data(0).shape for each in variables if each.ndim == 2])
    if ranks.world_size > 1:
        variables = [multihost_utils.process_allgather(each, tiled=True) for each in variables]
    np.savez(sys.argv[1] + str(ranks.rank), *variables)
"""


def trained(folder, size, script):
    pytest.importorskip("jax")
    path = folder / "train.py"
    path.write_text(textwrap.dedent(START) + textwrap.dedent(script) + textwrap.dedent(TRAIN))
    weights = folder / f"weights-{size}-"
    SparkRunner(size, local_mode=True).run(path, weights, timeout=200)
    return [list(np.load(f"{weights}{rank}.npz").values()) for rank in range(size)]


@pytest.mark.parametrize(
    ("script", "parts"),
    [(DATA_PARALLEL, "[(4, 8), (8, 2)"), (MODEL_PARALLEL, "[(4, 4), (8, 1), (4, 4), (4, 4), (8, 1), (8, 1)]")],
)
def test_ranks_train_as_one_process_does(script, parts, tmp_path, capsys):
    (plain,) = trained(tmp_path, 1, script)
    capsys.readouterr()
    of_ranks = trained(tmp_path, 2, script)
    assert f"[1] parts {parts}" in capsys.readouterr().out
    for weights in of_ranks:
        for one, other in zip(plain, weights, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
