"""Fine-tune a transformer with LoRA on text in a DataFrame: only low-rank factors train, and its weights stay.

::

    python examples/transformer_lora.py [--output DIR] [--epochs N] [--reviews N] [--width N] [--blocks N] [--master URL]

There are no pretrained weights to download, so the transformer first learns on the driver what a review is about. It is then
fine-tuned on the workers to tell praise from blame.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from surroundings import hushed, start_spark
from text_classification import SUBJECTS, write_reviews

with hushed():
    import keras
    import numpy as np

    from sparkkeras import SparkModel, load_spark_model

SEED = 7
WORDS, LENGTH, RANK = 20_000, 32, 4


@keras.saving.register_keras_serializable("examples")
class TransformerBlock(keras.layers.Layer):
    """Self-attention and a network for each position, each with a residual connection."""

    def __init__(self, width: int, heads: int = 4, **options: object) -> None:
        super().__init__(**options)
        self.width, self.heads = width, heads
        self.attention = keras.layers.MultiHeadAttention(heads, width // heads)
        self.before_attention = keras.layers.LayerNormalization()
        self.before_network = keras.layers.LayerNormalization()
        self.widen = keras.layers.Dense(4 * width, activation="gelu")
        self.narrow = keras.layers.Dense(width)

    def build(self, shape: tuple[int | None, ...]) -> None:
        """Create the weights."""
        self.attention.build(shape, shape)
        for layer in (self.before_attention, self.before_network, self.widen):
            layer.build(shape)
        self.narrow.build((*shape[:-1], 4 * self.width))

    def call(self, sequence: object, training: bool = False) -> object:
        """The transformed sequence."""
        normal = self.before_attention(sequence)
        sequence = sequence + self.attention(normal, normal, training=training)
        return sequence + self.narrow(self.widen(self.before_network(sequence)))

    def get_config(self) -> dict[str, object]:
        """The arguments of the constructor."""
        return {**super().get_config(), "width": self.width, "heads": self.heads}


@keras.saving.register_keras_serializable("examples")
class Positions(keras.layers.Layer):
    """Adds an embedding of each position."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        """Create the weights."""
        self.embeddings = self.add_weight(shape=shape[1:], initializer="normal", name="embeddings")

    def call(self, sequence: object) -> object:
        """The sequence with positions."""
        return sequence + self.embeddings


@hushed()
def main() -> None:
    options = command_line()
    options.output.mkdir(parents=True, exist_ok=True)
    model_file = options.output / "transformer.keras"

    print(f"Starting Spark on {options.master} ...")
    spark = start_spark(options.master)
    rows = write_reviews(options.reviews)
    train, test = spark.createDataFrame(rows).repartition(2).randomSplit([0.8, 0.2], seed=SEED)
    train, test = train.cache(), test.cache()

    print("Training the base model on the driver ...")
    body = pretrained([row.text for row in rows[:500]], options.width, options.blocks)
    model = fine_tuned(body)
    trainable = sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)
    print(f"Parameters  {model.count_params():,}, of which {trainable:,} are trained\n")

    spark_model = SparkModel(model, batch_size=32, seed=SEED)
    spark_model.fit(train, features="text", epochs=options.epochs)
    loss, accuracy = spark_model.evaluate(test, features="text")
    spark_model.save(model_file)
    scored = load_spark_model(model_file).predict(test, features="text", output_col="positive")

    print(f"\nAccuracy    {accuracy:.1%} of {test.count()} unseen reviews, loss {loss:.3f}")
    for row in scored.limit(3).collect():
        print(f"{row.positive:>8.0%}    {row.text}")
    print(f"Model       {model_file}")
    spark.stop()


def command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a transformer with LoRA on text in a DataFrame.")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", default=Path("artifacts"), help="output directory (default: %(default)s)"
    )
    parser.add_argument("--epochs", type=int, metavar="N", default=4, help="training epochs (default: %(default)s)")
    parser.add_argument("--reviews", type=int, metavar="N", default=1500, help="number of reviews (default: %(default)s)")
    parser.add_argument("--width", type=int, metavar="N", default=384, help="size of embeddings (default: %(default)s)")
    parser.add_argument("--blocks", type=int, metavar="N", default=4, help="number of blocks (default: %(default)s)")
    parser.add_argument("--master", default="local[2]", help="Spark master URL (default: %(default)s)")
    return parser.parse_args()


def pretrained(texts: list[str], width: int, blocks: int) -> keras.Model:
    """A transformer from strings to a vector, which has learned the subjects of reviews."""
    keras.utils.set_random_seed(SEED)
    vectorize = keras.layers.TextVectorization(max_tokens=WORDS, output_sequence_length=LENGTH)
    vectorize.adapt(texts)
    text = keras.Input((1,), dtype="string", name="text")
    sequence = Positions()(keras.layers.Embedding(WORDS, width)(vectorize(text)))
    for _ in range(blocks):
        sequence = TransformerBlock(width)(sequence)
    vector = keras.layers.GlobalAveragePooling1D()(keras.layers.LayerNormalization()(sequence))
    body = keras.Model(text, vector, name="body")

    subjects = keras.Model(text, keras.layers.Dense(len(SUBJECTS), activation="sigmoid")(vector))
    subjects.compile(keras.optimizers.Adam(3e-4), "binary_crossentropy")
    labels = np.array([[subject in each.lower() for subject in SUBJECTS] for each in texts], "float32")
    subjects.fit(keras.ops.convert_to_tensor([[each] for each in texts], "string"), labels, epochs=1, verbose=0)
    return body


def fine_tuned(body: keras.Model) -> keras.Model:
    """The transformer with a new output. Only its low-rank factors and the output are trainable."""
    for layer in body._flatten_layers():
        if hasattr(layer, "enable_lora") and layer.weights:
            layer.enable_lora(RANK)
    for weight in body.trainable_weights:
        if "lora" not in weight.name:
            weight.trainable = False
    model = keras.Model(body.input, keras.layers.Dense(1, activation="sigmoid")(body.output))
    model.compile(keras.optimizers.Adam(2e-3), "binary_crossentropy", metrics=["accuracy"])
    return model


if __name__ == "__main__":
    main()
