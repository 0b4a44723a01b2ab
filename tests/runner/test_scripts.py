"""Training scripts of JAX and Keras on JAX, as users have them; examples/ has those of PyTorch and TensorFlow."""

import textwrap

import numpy as np
import pytest

from sparkkeras import SparkRunner

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]

DISTRIBUTED = """
    import jax
    import numpy as np
    from jax.experimental import multihost_utils
    from sparkkeras.runner import context

    ranks = context()
    jax.distributed.initialize(num_processes=ranks.world_size, process_id=ranks.rank)  # JAX_COORDINATOR_ADDRESS
    print("processes", jax.process_count(), multihost_utils.process_allgather(np.ones(1) * ranks.rank).tolist())
"""

DATA_PARALLEL = """
    import os, sys

    os.environ["KERAS_BACKEND"] = "jax"
    import jax
    import keras
    import numpy as np
    from sparkkeras.runner import context

    keras.distribution.initialize()
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    y = x.sum(1, keepdims=True)
    mine = slice(context().rank, None, context().world_size)
    model.fit(x[mine], y[mine], batch_size=8, epochs=2, shuffle=False, verbose=2)
    weights = [np.asarray(each.value.addressable_data(0)) for each in model.trainable_variables]
    np.savez(sys.argv[1] + str(context().rank), *weights)
"""

MODEL_PARALLEL = """
    import os, sys

    os.environ["KERAS_BACKEND"] = "jax"
    import jax
    import keras
    import numpy as np
    from jax.experimental import multihost_utils
    from sparkkeras.runner import context

    keras.distribution.initialize()
    mesh = keras.distribution.DeviceMesh((1, 2), ["batch", "model"], keras.distribution.list_devices())
    layout = keras.distribution.LayoutMap(mesh)
    layout[".*kernel"] = (None, "model")
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch", auto_shard_dataset=False)
    )
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    model.fit(x, x[:, :2], batch_size=16, epochs=2, shuffle=False, verbose=2)
    kernel = model.layers[0].kernel.value
    print("shard", kernel.addressable_data(0).shape, "of", kernel.shape)
    weights = [multihost_utils.process_allgather(each.value, tiled=True) for each in model.variables]
    np.savez(sys.argv[1] + str(context().rank), *weights)
"""


def run(folder, source):
    pytest.importorskip("jax")
    script = folder / "train.py"
    script.write_text(textwrap.dedent(source))
    SparkRunner(2, local_mode=True).run(script, folder / "weights", timeout=200)


def weights(folder):
    return [list(np.load(folder / f"weights{rank}.npz").values()) for rank in (0, 1)]


def test_jax_distributed(tmp_path, capsys):
    run(tmp_path, DISTRIBUTED)
    assert "[1] processes 2 [[0.0], [1.0]]\n" in capsys.readouterr().out


def test_keras_data_parallel(tmp_path):
    run(tmp_path, DATA_PARALLEL)
    first, second = weights(tmp_path)
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))


def test_keras_model_parallel(tmp_path, capsys):
    run(tmp_path, MODEL_PARALLEL)
    assert "[0] shard (4, 4) of (4, 8)\n" in capsys.readouterr().out
    first, second = weights(tmp_path)
    assert first[0].shape == (4, 8)
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))
