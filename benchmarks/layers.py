"""Which layers of Keras each backend scores as TensorFlow does, and how fast: the page docs/scoring-layers.md.

::

    python benchmarks/layers.py [NAME ...]    # all layers and models, or these; writes docs/scoring-layers.md

Each layer is the middle of a small model. A backend is *equal* if its predictions are those of TensorFlow on this machine
(to 1e-5 of the largest one), *slower* if it takes more than 1.2 times as long, and *refused* if `predict` would refuse it.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from sparkkeras.data.block import Block, Form, Structure
from sparkkeras.data.dataset import TaskContext
from sparkkeras.data.local_dataset import LocalShared
from sparkkeras.data.values import DelayedValue
from sparkkeras.modeling.archive import ModelArchive
from sparkkeras.modeling.schema import schema_of
from sparkkeras.modeling.state import ModelWeights
from sparkkeras.scoring.backends import ALIKE, SAME
from sparkkeras.worker.batches import BatchOptions
from sparkkeras.worker.device import worker_environment
from sparkkeras.worker.other_backend import OtherBackend
from sparkkeras.worker.predictor import PredictTask

BACKENDS = ("openvino", "jax", "torch")
PAGE = Path(__file__).parent.parent / "docs" / "scoring-layers.md"
ROWS, TURNS = 64, 5
SLOWER = 1.2

HEAD = f"""# Layers by backend

What `predict(backend=...)` does with a small model around each layer of Keras, and with models of `keras.applications`, if
the driver uses TensorFlow. *Equal*: the predictions are the same to 1e-5 of the largest one. *Slower*: also, but it takes
more than {SLOWER} times as long. The number is the time divided by that of TensorFlow, for {ROWS} rows on one core: it says
little about large models. *Refused*: [`predict` raises an error](scoring-backends.md#the-check).

Layers of strings (`StringLookup`, `TextVectorization`, `HashedCrossing`) need TensorFlow, and wrappers of code for one
backend (`TorchModuleWrapper`, `JaxLayer`, `FlaxLayer`, `TFSMLayer`) that backend.

"""
"""The beginning of the page."""

VECTOR, SERIES, IMAGE, VIDEO = (12,), (10, 6), (16, 16, 3), (6, 6, 6, 2)
STACK = (4, 8, 8, 2)

L: Any = keras.layers

ONE_INPUT: dict[str, tuple[tuple[int, ...], Callable[[], Any]]] = {
    "Activation": (VECTOR, lambda: L.Activation("gelu")),
    "ActivityRegularization": (VECTOR, lambda: L.ActivityRegularization(0.1)),
    "AdaptiveAveragePooling1D": (SERIES, lambda: L.AdaptiveAveragePooling1D(5)),
    "AdaptiveAveragePooling2D": (IMAGE, lambda: L.AdaptiveAveragePooling2D(4)),
    "AdaptiveAveragePooling3D": (VIDEO, lambda: L.AdaptiveAveragePooling3D(3)),
    "AdaptiveMaxPooling1D": (SERIES, lambda: L.AdaptiveMaxPooling1D(5)),
    "AdaptiveMaxPooling2D": (IMAGE, lambda: L.AdaptiveMaxPooling2D(4)),
    "AdaptiveMaxPooling3D": (VIDEO, lambda: L.AdaptiveMaxPooling3D(3)),
    "AlphaDropout": (VECTOR, lambda: L.AlphaDropout(0.2)),
    "AveragePooling1D": (SERIES, lambda: L.AveragePooling1D(2)),
    "AveragePooling2D": (IMAGE, lambda: L.AveragePooling2D(2)),
    "AveragePooling3D": (VIDEO, lambda: L.AveragePooling3D(2)),
    "BatchNormalization": (VECTOR, lambda: L.BatchNormalization()),
    "Bidirectional": (SERIES, lambda: L.Bidirectional(L.LSTM(4))),
    "CenterCrop": (IMAGE, lambda: L.CenterCrop(8, 8)),
    "Conv1D": (SERIES, lambda: L.Conv1D(4, 3)),
    "Conv1DTranspose": (SERIES, lambda: L.Conv1DTranspose(4, 3)),
    "Conv2D": (IMAGE, lambda: L.Conv2D(4, 3)),
    "Conv2DTranspose": (IMAGE, lambda: L.Conv2DTranspose(4, 3)),
    "Conv3D": (VIDEO, lambda: L.Conv3D(4, 3)),
    "Conv3DTranspose": (VIDEO, lambda: L.Conv3DTranspose(4, 3)),
    "ConvLSTM1D": ((4, 8, 2), lambda: L.ConvLSTM1D(3, 3)),
    "ConvLSTM2D": (STACK, lambda: L.ConvLSTM2D(3, 3)),
    "ConvLSTM3D": ((3, 6, 6, 6, 2), lambda: L.ConvLSTM3D(3, 3)),
    "Cropping1D": (SERIES, lambda: L.Cropping1D(1)),
    "Cropping2D": (IMAGE, lambda: L.Cropping2D(1)),
    "Cropping3D": (VIDEO, lambda: L.Cropping3D(1)),
    "Dense": (VECTOR, lambda: L.Dense(8)),
    "DepthwiseConv1D": (SERIES, lambda: L.DepthwiseConv1D(3)),
    "DepthwiseConv2D": (IMAGE, lambda: L.DepthwiseConv2D(3)),
    "Discretization": (VECTOR, lambda: L.Discretization([0.25, 0.5, 0.75])),
    "Dropout": (VECTOR, lambda: L.Dropout(0.5)),
    "ELU": (VECTOR, lambda: L.ELU()),
    "EinsumDense": (SERIES, lambda: L.EinsumDense("abc,cd->abd", (None, 5), bias_axes="d")),
    "Flatten": (IMAGE, lambda: L.Flatten()),
    "GRU": (SERIES, lambda: L.GRU(4)),
    "GaussianDropout": (VECTOR, lambda: L.GaussianDropout(0.2)),
    "GaussianNoise": (VECTOR, lambda: L.GaussianNoise(0.2)),
    "GlobalAveragePooling1D": (SERIES, lambda: L.GlobalAveragePooling1D()),
    "GlobalAveragePooling2D": (IMAGE, lambda: L.GlobalAveragePooling2D()),
    "GlobalAveragePooling3D": (VIDEO, lambda: L.GlobalAveragePooling3D()),
    "GlobalMaxPooling1D": (SERIES, lambda: L.GlobalMaxPooling1D()),
    "GlobalMaxPooling2D": (IMAGE, lambda: L.GlobalMaxPooling2D()),
    "GlobalMaxPooling3D": (VIDEO, lambda: L.GlobalMaxPooling3D()),
    "GroupNormalization": (VECTOR, lambda: L.GroupNormalization(3)),
    "Identity": (VECTOR, lambda: L.Identity()),
    "LSTM": (SERIES, lambda: L.LSTM(4)),
    "LayerNormalization": (VECTOR, lambda: L.LayerNormalization()),
    "LeakyReLU": (VECTOR, lambda: L.LeakyReLU()),
    "Masking": (SERIES, lambda: L.Masking()),
    "MaxPooling1D": (SERIES, lambda: L.MaxPooling1D(2)),
    "MaxPooling2D": (IMAGE, lambda: L.MaxPooling2D(2)),
    "MaxPooling3D": (VIDEO, lambda: L.MaxPooling3D(2)),
    "MelSpectrogram": ((2048,), lambda: L.MelSpectrogram(256)),
    "Normalization": (VECTOR, lambda: L.Normalization(mean=0.5, variance=2.0)),
    "PReLU": (VECTOR, lambda: L.PReLU()),
    "Permute": (SERIES, lambda: L.Permute((2, 1))),
    "RMSNormalization": (VECTOR, lambda: L.RMSNormalization()),
    "RNN": (SERIES, lambda: L.RNN(L.StackedRNNCells([L.GRUCell(4), L.LSTMCell(3)]))),
    "ReLU": (VECTOR, lambda: L.ReLU()),
    "RepeatVector": (VECTOR, lambda: L.RepeatVector(3)),
    "Rescaling": (IMAGE, lambda: L.Rescaling(1 / 255)),
    "Reshape": (SERIES, lambda: L.Reshape((4, 15))),
    "Resizing": (IMAGE, lambda: L.Resizing(8, 8)),
    "STFTSpectrogram": ((256, 1), lambda: L.STFTSpectrogram(frame_length=64, frame_step=32, fft_length=64)),
    "SeparableConv1D": (SERIES, lambda: L.SeparableConv1D(4, 3)),
    "SeparableConv2D": (IMAGE, lambda: L.SeparableConv2D(4, 3)),
    "SimpleRNN": (SERIES, lambda: L.SimpleRNN(4)),
    "Softmax": (VECTOR, lambda: L.Softmax()),
    "Solarization": (IMAGE, lambda: L.Solarization(value_range=(0, 1))),
    "SpatialDropout1D": (SERIES, lambda: L.SpatialDropout1D(0.2)),
    "SpatialDropout2D": (IMAGE, lambda: L.SpatialDropout2D(0.2)),
    "SpatialDropout3D": (VIDEO, lambda: L.SpatialDropout3D(0.2)),
    "SpectralNormalization": (VECTOR, lambda: L.SpectralNormalization(L.Dense(4))),
    "TimeDistributed": (SERIES, lambda: L.TimeDistributed(L.Dense(3))),
    "UnitNormalization": (VECTOR, lambda: L.UnitNormalization()),
    "UpSampling1D": (SERIES, lambda: L.UpSampling1D()),
    "UpSampling2D": (IMAGE, lambda: L.UpSampling2D()),
    "UpSampling3D": (VIDEO, lambda: L.UpSampling3D()),
    "ZeroPadding1D": (SERIES, lambda: L.ZeroPadding1D()),
    "ZeroPadding2D": (IMAGE, lambda: L.ZeroPadding2D()),
    "ZeroPadding3D": (VIDEO, lambda: L.ZeroPadding3D()),
}
"""The shape of the rows, and the layer."""

AUGMENTATIONS: dict[str, tuple[Any, ...]] = {
    "AugMix": (),
    "AutoContrast": (),
    "ContrastLimitedAdaptiveHistogramEqualization": (),
    "CutMix": (),
    "MixUp": (),
    "RandAugment": (),
    "RandomBrightness": (0.1,),
    "RandomColorDegeneration": (0.1,),
    "RandomColorJitter": (),
    "RandomContrast": (0.1,),
    "RandomCrop": (8, 8),
    "RandomElasticTransform": (),
    "RandomErasing": (),
    "RandomFlip": (),
    "RandomGaussianBlur": (),
    "RandomGrayscale": (),
    "RandomHue": (0.1,),
    "RandomInvert": (),
    "RandomPerspective": (),
    "RandomPosterization": (4,),
    "RandomRotation": (0.1,),
    "RandomSaturation": (0.1,),
    "RandomSharpness": (0.1,),
    "RandomShear": (),
    "RandomTranslation": (0.1, 0.1),
    "RandomZoom": (0.1,),
}
"""The arguments of layers that augment images, most of which do nothing in predictions."""

OF_INDICES: dict[str, Callable[[], Any]] = {
    "CategoryEncoding": lambda: L.CategoryEncoding(num_tokens=4),
    "Embedding": lambda: L.Embedding(4, 3),
    "Hashing": lambda: L.Hashing(5),
    "IntegerLookup": lambda: L.IntegerLookup(vocabulary=[1, 2, 3], output_mode="int"),
    "ReversibleEmbedding": lambda: L.ReversibleEmbedding(4, 3),
}
"""Layers of rows of small integers."""

OF_SEVERAL: dict[str, tuple[tuple[int, ...], Callable[[], Any]]] = {
    **{
        name: (VECTOR, lambda name=name: getattr(L, name)()) for name in ("Add", "Average", "Maximum", "Minimum", "Multiply")
    },
    "Subtract": (VECTOR, lambda: L.Subtract()),
    "Concatenate": (VECTOR, lambda: L.Concatenate()),
    "Dot": (VECTOR, lambda: L.Dot(axes=1)),
    "Attention": (SERIES, lambda: L.Attention()),
    "AdditiveAttention": (SERIES, lambda: L.AdditiveAttention()),
    "MultiHeadAttention": (SERIES, lambda: _Pair(L.MultiHeadAttention(2, 3))),
    "GroupQueryAttention": (SERIES, lambda: _Pair(L.GroupQueryAttention(3, 4, 2))),
}
"""Layers of two inputs."""

APPLICATIONS: dict[str, Callable[[], Any]] = {
    name: lambda name=name: getattr(keras.applications, name)(weights=None, input_shape=(96, 96, 3), classes=10)
    for name in ("DenseNet121", "EfficientNetB0", "MobileNetV2", "ResNet50", "VGG16")
}


class _Pair:
    """A layer whose inputs are arguments."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __call__(self, inputs: list[Any]) -> Any:
        return self._layer(*inputs)


def models() -> Iterator[tuple[str, keras.Model, tuple[np.ndarray, ...]]]:
    """The name of each layer, a model with it, and the arrays of its inputs."""
    random = np.random.default_rng(0)
    for name, (shape, made) in ONE_INPUT.items():
        inputs = keras.Input(shape)
        yield name, keras.Model(inputs, made()(inputs)), (random.random((ROWS, *shape), "float32"),)
    for name, given in AUGMENTATIONS.items():
        try:
            inputs = keras.Input(IMAGE)
            yield name, keras.Model(inputs, getattr(L, name)(*given)(inputs)), (random.random((ROWS, *IMAGE), "float32"),)
        except (TypeError, ValueError) as error:
            sys.stderr.write(f"{name}: {error}\n")
    for name, made in OF_INDICES.items():
        inputs = keras.Input((6,), dtype="int32")
        yield name, keras.Model(inputs, made()(inputs)), (random.integers(0, 4, (ROWS, 6), "int32"),)
    for name, (shape, made) in OF_SEVERAL.items():
        pair = [keras.Input(shape), keras.Input(shape)]
        yield name, keras.Model(pair, made()(pair)), tuple(random.random((ROWS, *shape), "float32") for _ in pair)
    for name, made in APPLICATIONS.items():
        yield name, made(), (random.random((ROWS // 8, 96, 96, 3), "float32"),)


@dataclass(frozen=True)
class Timed:
    """Predicts several times; yields the predictions, and the shortest time in seconds."""

    predict: PredictTask

    def __call__(self, context: TaskContext, blocks: Iterator[Block]) -> Iterator[Any]:
        """Run the task."""
        (block,) = blocks
        seconds = []
        for _ in range(TURNS):
            started = time.perf_counter()
            predictions = list(self.predict(context, iter([block])))
            seconds.append(time.perf_counter() - started)
        yield predictions[0], min(seconds)


def result(wanted: tuple[Any, float], found: tuple[Any, float]) -> str:
    """The cell of the table."""
    most = 0.0
    for one, other in zip(keras.tree.flatten(wanted[0]), keras.tree.flatten(found[0]), strict=True):
        if one.shape != other.shape:
            return "refused: another shape"
        scale = max(float(np.abs(one).max()), 1e-30)
        most = max(most, float(np.abs(np.asarray(one, "float64") - other).max()) / scale)
    if not most <= ALIKE:
        return "refused: other values"
    ratio = found[1] / wanted[1]
    word = "slower" if ratio > SLOWER else "equal"
    return f"{word}, {ratio:.2f}" + ("" if most <= SAME else f" (differs by {most:.0e})")


def main(chosen: list[str]) -> None:
    """Measure, and write the table."""
    warnings.simplefilter("ignore")
    others = {name: OtherBackend(worker_environment(1, name)) for name in (keras.backend.backend(), *BACKENDS)}
    rows = []
    for name, model, arrays in models():
        if chosen and name not in chosen:
            continue
        x = Structure() if len(arrays) == 1 else Structure.several(len(arrays))
        block = Block(Form(x), arrays)
        archive, weights = ModelArchive.pack_to_predict(model), ModelWeights.take(model)
        options = LocalShared(BatchOptions(block.rows, to_predict=True))
        task = Timed(PredictTask(LocalShared(archive), LocalShared(weights), options, schema_of(model)))
        cells, wanted = [name], None
        for backend, there in others.items():
            try:
                (found,) = there.run(DelayedValue(task), TaskContext(0), iter([block]))
            except Exception as error:
                cells.append(f"refused: {type(error).__name__}")
                sys.stderr.write(f"{name} {backend}: {error}\n")
                continue
            if wanted is None:
                wanted = found
            else:
                cells.append(result(wanted, found))
        rows.append(cells)
        sys.stdout.write(f"| {' | '.join(cells)} |\n")
        sys.stdout.flush()
    for there in others.values():
        there.close()
    if not chosen:
        head = ["layer or model", "OpenVINO", "JAX", "PyTorch"]
        lines = [head, ["---"] * len(head), *rows]
        PAGE.write_text(HEAD + "".join(f"| {' | '.join(cells)} |\n" for cells in lines))


if __name__ == "__main__":
    import layers  # whose task the other processes find, unlike that of the main program

    layers.main(sys.argv[1:])
