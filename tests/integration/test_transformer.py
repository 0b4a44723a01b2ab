"""A transformer of 20 million weights, trained for some steps in every mode: its memory, and the bytes on the wire."""

import keras
import numpy as np
import psutil
import pytest
from keras import layers

from sparkkeras import SparkModel

pytestmark = pytest.mark.soak

WORDS, LENGTH, WIDTH, BLOCKS = 20_000, 32, 448, 4
BATCH, STEPS = 8, 3


def transformer():
    keras.utils.set_random_seed(1)
    tokens = keras.Input((LENGTH,), dtype="int32", name="tokens")
    sequence = layers.Embedding(WORDS, WIDTH)(tokens)
    for _ in range(BLOCKS):
        normal = layers.LayerNormalization()(sequence)
        attended = layers.MultiHeadAttention(4, WIDTH // 4)(normal, normal, use_causal_mask=True)
        sequence = layers.Add()([sequence, attended])
        hidden = layers.Dense(4 * WIDTH, activation="gelu")(layers.LayerNormalization()(sequence))
        sequence = layers.Add()([sequence, layers.Dense(WIDTH)(hidden)])
    model = keras.Model(tokens, layers.Dense(2)(layers.GlobalAveragePooling1D()(sequence)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-4), loss, metrics=["accuracy"])
    return model


def memory():
    """The memory of this process and of its largest Python worker, without what they share, in bytes."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    used = []
    for process in processes:
        try:
            if "python" in process.name():
                used.append(process.memory_full_info().uss)
        except psutil.Error:
            used.append(0)
    return used[0], max(used[1:], default=0)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("mode", "transport"),
    [("synchronous", "http"), ("asynchronous", "http"), ("hogwild", "socket")],
)
def test_a_transformer_trains(sc, request, mode, transport):
    generator = np.random.default_rng(0)
    x = generator.integers(0, WORDS, (2 * BATCH * STEPS, LENGTH)).astype(np.int32)
    y = (x[:, 0] % 2).astype(np.int32)
    model = transformer()
    size = 4 * model.count_params()
    assert 70e6 < size < 90e6
    before, seen = memory(), []
    look = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.append(memory()))
    spark_model = SparkModel(
        model,
        mode,
        frequency="epoch" if mode == "synchronous" else 1,
        num_workers=2,
        parameter_server_mode=transport,
        seed=1,
    )
    history = spark_model.fit(x, y, batch_size=BATCH, epochs=2, callbacks=[look], verbose=0).history
    assert np.isfinite(history["loss"]).all()
    assert history["loss"][1] < history["loss"][0]
    driver, worker = max(found[0] for found in seen) - before[0], max(found[1] for found in seen)
    stats = spark_model.parameter_server_stats
    found = f"driver +{driver / size:.1f}, worker {worker / size:.1f} times the weights; {stats}"
    request.node.add_report_section("call", "memory", found)
    assert driver < 12 * size
    assert worker < 30 * size, "with the libraries, which take about 8 times the weights"
    if stats is not None:
        assert stats.received_bytes < 1.02 * stats.pushes * size
        assert stats.sent_bytes < 1.02 * stats.pulls * size
