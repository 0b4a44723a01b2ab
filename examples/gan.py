"""Train a generative adversarial network on two workers: a model with two optimizers and its own training step.

::

    python examples/gan.py [--output DIR] [--epochs N] [--master local[2]]

The model is that of Keras's guide "Customizing what happens in fit()", with ``get_config`` so that it can be sent to
workers. It learns to draw points on a ring. Needs TensorFlow, whose gradients the training step uses.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from surroundings import hushed, start_spark

with hushed():
    import keras
    import numpy as np
    import tensorflow as tf
    from matplotlib.figure import Figure

    from sparkkeras import SparkModel, load_spark_model

SEED = 7
LATENT = 4
REAL, GENERATED = "#8a8f98", "#2a7f62"


@hushed()
def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    model_file, picture = options.output / "gan.keras", options.output / "gan.png"
    points = ring(4096)

    print(f"Starting Spark on {options.master} ...")
    spark = start_spark(options.master)
    gan = build_gan()
    spark_model = SparkModel(gan, num_workers=2, frequency=8, batch_size=64, seed=SEED)
    history = spark_model.fit(points, epochs=options.epochs)

    spark_model.save(model_file)
    loaded = load_spark_model(model_file).model
    noise = np.random.default_rng(SEED).normal(size=(1000, LATENT)).astype(np.float32)
    generated = SparkModel(gan.generator).predict(noise)
    np.testing.assert_allclose(loaded.generator.predict(noise, verbose=0), generated, atol=1e-5)
    draw(points[:1000], generated, history.history).savefig(picture, dpi=150)
    spark.stop()

    radius = np.linalg.norm(generated, axis=1)
    print(f"""
Steps       discriminator {int(gan.d_optimizer.iterations)}, generator {int(gan.g_optimizer.iterations)}
Generated   radius {radius.mean():.2f} on average, standard deviation {radius.std():.2f}; real points: 1.00, 0.05
Picture     {picture}
Model       {model_file}, with both optimizers""")


def command_line(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a generative adversarial network on two workers.")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", default=Path("artifacts"), help="output directory (default: %(default)s)"
    )
    parser.add_argument("--epochs", type=int, metavar="N", default=60, help="training epochs (default: %(default)s)")
    parser.add_argument("--master", default="local[2]", help="Spark master URL (default: %(default)s)")
    return parser.parse_args(arguments)


def ring(count: int) -> np.ndarray:
    """Points around the unit circle, shape (count, 2)."""
    generator = np.random.default_rng(SEED)
    angle, radius = generator.uniform(0, 2 * np.pi, count), generator.normal(1, 0.05, count)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).astype(np.float32)


@keras.saving.register_keras_serializable("examples")
class GAN(keras.Model):
    """A generator and a discriminator, each trained by an optimizer of its own."""

    def __init__(self, discriminator: keras.Model, generator: keras.Model, latent_dim: int, **options: object) -> None:
        super().__init__(**options)
        self.discriminator, self.generator, self.latent_dim = discriminator, generator, latent_dim
        self.d_loss_tracker, self.g_loss_tracker = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")
        self.seed_generator = keras.random.SeedGenerator(SEED)

    def compile(self, d_optimizer: keras.Optimizer, g_optimizer: keras.Optimizer, loss_fn: keras.Loss) -> None:
        """Keep both optimizers and the loss."""
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    @property
    def metrics(self) -> list[keras.Metric]:
        """The metrics that Keras resets at the start of each epoch."""
        return [self.d_loss_tracker, self.g_loss_tracker]

    def train_step(self, real: tf.Tensor) -> dict[str, tf.Tensor]:
        """Train the discriminator, then the generator, on a batch of real points."""
        size = tf.shape(real)[0]
        both = tf.concat([self.generator(self.noise(size)), real], axis=0)
        labels = tf.concat([tf.ones((size, 1)), tf.zeros((size, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)

        with tf.GradientTape() as tape:
            scores = self.discriminator(self.generator(self.noise(size)))
            g_loss = self.loss_fn(tf.zeros((size, 1)), scores)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)

        self.d_loss_tracker.update_state(d_loss)
        self.g_loss_tracker.update_state(g_loss)
        return {"d_loss": self.d_loss_tracker.result(), "g_loss": self.g_loss_tracker.result()}

    def noise(self, size: tf.Tensor) -> tf.Tensor:
        """The input of the generator for ``size`` points."""
        return keras.random.normal((size, self.latent_dim), seed=self.seed_generator)

    def get_config(self) -> dict[str, object]:
        """The arguments of the constructor, in the form in which Keras saves them."""
        parts = {"discriminator": self.discriminator, "generator": self.generator}
        saved = {name: keras.saving.serialize_keras_object(part) for name, part in parts.items()}
        return {**super().get_config(), **saved, "latent_dim": self.latent_dim}

    @classmethod
    def from_config(cls, config: dict[str, object]) -> GAN:
        """Load both networks."""
        for name in ("discriminator", "generator"):
            config[name] = keras.saving.deserialize_keras_object(config[name])
        return cls(**config)


def build_gan() -> GAN:
    keras.utils.set_random_seed(SEED)
    discriminator, generator = network(2, 1), network(LATENT, 2)
    gan = GAN(discriminator, generator, LATENT)
    gan.compile(
        d_optimizer=keras.optimizers.Adam(2e-3, beta_1=0.5),
        g_optimizer=keras.optimizers.Adam(1e-3, beta_1=0.5),
        loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return gan


def network(inputs: int, outputs: int) -> keras.Model:
    hidden = [keras.layers.Dense(32, activation="leaky_relu") for _ in range(2)]
    return keras.Sequential([keras.Input((inputs,)), *hidden, keras.layers.Dense(outputs)])


def draw(real: np.ndarray, generated: np.ndarray, history: dict[str, list[float]]) -> Figure:
    """Real and generated points on the left, the losses on the right."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(*real.T, ".", color=REAL, markersize=3, label="real")
    left.plot(*generated.T, ".", color=GENERATED, markersize=3, label="generated")
    left.set_aspect("equal")
    for name, color in ("d_loss", REAL), ("g_loss", GENERATED):
        right.plot(range(1, len(history[name]) + 1), history[name], color=color, label=name)
    right.set_xlabel("epoch")
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    main()
