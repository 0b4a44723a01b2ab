"""`ImageFeaturizer`: a Spark ML Transformer that extracts image features with a layer of a Keras model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any, TypedDict, Unpack, cast

import keras
from pyspark.ml import Transformer
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from sparkkeras import arguments
from sparkkeras.arguments import Argument, known_arguments, listing, one_of
from sparkkeras.data.block import describe
from sparkkeras.errors import ConfigurationError, ModelError, counted, known_names
from sparkkeras.formats.images import INTERPOLATIONS, image_loader
from sparkkeras.ml import converters
from sparkkeras.ml.params import REQUIRED, KerasParams
from sparkkeras.ml.persistence import Savable
from sparkkeras.ml.transformer import KerasTransformer
from sparkkeras.modeling.compilation import check_built

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""The mode of the images for each number of channels."""

_HANDLE_INVALID = {"error": "error", "null": "keep", "drop": "skip"}
"""The ``handleInvalid`` of `KerasTransformer` for each ``on_error``."""

Preprocessing = str | float | Callable[[Any], Any] | None


def _model_or_name(name: str, value: Any) -> keras.Model | str:
    if not isinstance(value, str):
        return converters.keras_model(name, value)
    one_of(name, value, applications())
    return value


def _layer(name: str, value: Any) -> str | int:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ConfigurationError(f"{name} is {describe(value)}; expected the name or the index of a layer, or None.")
    return value


def _size(name: str, value: Any) -> tuple[int, int]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ConfigurationError(f"{name}={value!r}: expected (height, width), or None for the model's input size.")
    height, width = (arguments.integer(name, side) for side in value)
    return height, width


def _preprocessing(name: str, value: Any) -> Preprocessing:
    if value in ("auto", None) or (callable(value) and not isinstance(value, type)):
        return value  # type: ignore[no-any-return]
    if not arguments.is_number(value):
        raise ConfigurationError(
            f"{name} is {describe(value)}; expected 'auto', a function on a batch, a factor for its values, or None."
        )
    return float(value)


class FeaturizerArguments(TypedDict, total=False):
    """The params of `ImageFeaturizer`."""

    model: Annotated[
        keras.Model | str | None,
        Argument(
            None,
            arguments.optional(_model_or_name),
            """A built functional or sequential ``keras.Model`` with one input of shape (height, width, channels), or the
            name of one in ``keras.applications``, such as ``"ResNet50"``, which is built on first use.""",
        ),
    ]
    weights: Annotated[
        str | None,
        Argument(
            REQUIRED,
            arguments.optional(converters.text),
            """Required if ``model`` is a name: the path of a weights file on the driver, ``"imagenet"`` (Keras downloads
            them), or an explicit ``None`` for random weights.""",
        ),
    ]
    include_top: Annotated[
        bool,
        Argument(
            True,
            arguments.flag,
            """If ``model`` is a name: whether the model and its weights include the classifier on top. Without it,
            features are averaged over the image (``pooling="avg"``).""",
        ),
    ]
    layer: Annotated[
        str | int | None,
        Argument(
            None,
            arguments.optional(_layer),
            """The name or index of the layer whose output becomes the features. ``None``: the input of the last Dense
            layer, which usually is the classifier; without a Dense layer, the model's output.""",
        ),
    ]
    inputCol: Annotated[
        str,
        Argument(
            "image",
            converters.text,
            """The column of images: encoded bytes, rows of Spark's image source, or paths; see `image_loader`.""",
        ),
    ]
    outputCol: Annotated[
        str,
        Argument(
            "features",
            converters.text,
            """The new column of vectors.""",
        ),
    ]
    size: Annotated[
        tuple[int, int] | None,
        Argument(
            None,
            arguments.optional(_size),
            """The (height, width) in pixels that images are resized to. ``None``: the model's input size.""",
        ),
    ]
    mode: Annotated[
        str | None,
        Argument(
            None,
            arguments.optional(converters.choice(*_MODES.values())),
            """``"RGB"``, ``"L"`` or ``"RGBA"``. ``None``: the mode that fits the model's channels.""",
        ),
    ]
    preprocessing: Annotated[
        Preprocessing,
        Argument(
            "auto",
            _preprocessing,
            """Applied to each batch of pixels with values from 0 to 255: a function, a factor, or ``None``. ``"auto"``:
            the ``preprocess_input`` of ``keras.applications`` if ``model`` is a name, else none.""",
        ),
    ]
    on_error: Annotated[
        str,
        Argument(
            "error",
            converters.choice("error", "null", "drop"),
            """What to do with rows without a readable image, or whose pixels ``preprocessing`` makes NaN or infinite:
            ``"error"`` raises, ``"null"`` makes their features null, ``"drop"`` drops them.""",
        ),
    ]
    interpolation: Annotated[
        str,
        Argument(
            "nearest",
            converters.choice(*INTERPOLATIONS),
            """The resizing filter, as in `image_loader`.""",
        ),
    ]
    inferenceBatchSize: Annotated[int, Argument(32, arguments.integer, """Images per batch.""")]


class ImageFeaturizer(KerasParams, Transformer, Savable, declares=FeaturizerArguments):
    """Adds a vector of image features to each row: the output of a layer of a Keras model (transfer learning).

    With the features of a pretrained model, a simple classifier such as ``LogisticRegression`` needs few labelled images.
    Features of more than one axis are flattened.

    Args:
        **given: See `FeaturizerArguments`.

    Raises:
        UnknownArgumentError: An argument is not known.
        ConfigurationError: An argument is out of range.

    Example::

        images = spark.read.format("image").load("photos/")
        featurizer = ImageFeaturizer(model="ResNet50", weights="resnet50.h5", inputCol="image", outputCol="features")
        Pipeline(stages=[featurizer, LogisticRegression()]).fit(labelled)
    """

    @known_arguments
    @listing(FeaturizerArguments)
    def __init__(self, **given: Unpack[FeaturizerArguments]) -> None:
        super().__init__()
        self._built: tuple[Any, keras.Model] | None = None
        self._begin(given)

    def get_model(self) -> keras.Model:
        """Return the whole Keras model; a named one is built on the first call.

        Raises:
            ModelError: There is no model, it is not built, or ``keras.applications`` cannot build it.
            ConfigurationError: ``model`` is a name and ``weights`` is not set.
        """
        given = self.getOrDefault("model")
        if given is None:
            raise ModelError("this ImageFeaturizer has no model: pass a Keras model or a name, ImageFeaturizer(model=...).")
        if isinstance(given, str):
            return self._application(given)
        check_built(given)
        model: keras.Model = given
        return model

    def transformSchema(self, schema: StructType) -> StructType:  # noqa: N802 - Spark's name
        """Check that `transform` accepts a schema, and return the schema of its result.

        Raises:
            ModelError: There is no model, or it does not have the layer.
            DataError: The column of images is missing, or its type cannot be loaded as images.
            ConfigurationError: The new column already exists, or size and mode do not fit the model.
        """
        return self._transformer().transformSchema(schema)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        return self._transformer().transform(dataset)

    def _transformer(self) -> KerasTransformer:
        """The transformer that adds the features: the output of the model up to the layer."""
        network, get = self._feature_model(), self.getOrDefault
        transformer = KerasTransformer(
            model=network,
            featuresCol=get("inputCol"),
            # For one unit outputCol would hold numbers. These probabilities are the output as a vector, for any number.
            probabilityCol=get("outputCol"),
            task="multilabel",
            outputCol="",
            rawPredictionCol="",
            predictionCol="",
            inferenceBatchSize=get("inferenceBatchSize"),
            loader=self._loader(network),
            handleInvalid=_HANDLE_INVALID[get("on_error")],
        )
        transformer._new_columns = ("outputCol",)
        return transformer

    def _application(self, name: str) -> keras.Model:
        if not self.isDefined("weights"):
            raise ConfigurationError(
                f"model={name!r} needs weights: set weights='/path/to/weights.h5', weights='imagenet' (Keras downloads "
                "them), or weights=None for random ones."
            )
        weights, top = self.getOrDefault("weights"), self.getOrDefault("include_top")
        key = (name, weights, top)
        if self._built is None or self._built[0] != key:
            build = getattr(keras.applications, name)
            try:
                model = build(weights=weights, include_top=top, **({} if top else {"pooling": "avg"}))
            except Exception as error:  # Keras raises a plain Exception if the download fails
                raise ModelError(
                    f"keras.applications.{name}(weights={weights!r}, include_top={top}) cannot be built: {error}"
                ) from error
            self._built = key, model
        return self._built[1]

    def _feature_model(self) -> keras.Model:
        """The model up to the layer, with one flat output."""
        model = self.get_model()
        if len(getattr(model, "inputs", None) or []) != 1 or len(model.inputs[0].shape) != 4:
            raise ModelError(
                f"the model {model.name!r} does not take images: expected one input of shape (height, width, channels)."
            )
        output = _output_of(model, self.getOrDefault("layer"))
        if len(output.shape) > 2:
            output = keras.layers.Flatten(name="features")(output)
        try:
            return keras.Model(model.inputs, output, name=f"{model.name}_features")
        except ValueError as error:
            raise ModelError(
                f"layer={self.getOrDefault('layer')!r} is not connected to the input of the model {model.name!r}: {error}"
            ) from error

    def _loader(self, network: keras.Model) -> Any:
        height, width, channels = network.inputs[0].shape[1:]
        size = self.getOrDefault("size") or (height, width)
        if None in size:
            raise ConfigurationError(
                f"the model {network.name!r} takes images of any size: set size=(height, width) to resize them."
            )
        mode = self.getOrDefault("mode") or _MODES.get(channels)
        if mode is None:
            raise ConfigurationError(f"the model {network.name!r} has {channels} input channels; expected 1, 3 or 4.")
        on_error, interpolation = self.getOrDefault("on_error"), self.getOrDefault("interpolation")
        return image_loader(size, cast(Any, mode), self._pixel_function(), on_error=on_error, interpolation=interpolation)

    def _pixel_function(self) -> Any:
        """The preprocessing for `image_loader`, with ``"auto"`` resolved."""
        given, model = self.getOrDefault("preprocessing"), self.getOrDefault("model")
        if given != "auto":
            return given
        if not isinstance(model, str):
            return None
        return sys.modules[getattr(keras.applications, model).__module__].preprocess_input

    def _saved_model(self) -> keras.Model | None:
        return None if self.getOrDefault("model") is None else self.get_model()

    def _loaded_model(self, model: keras.Model) -> None:
        name = self.getOrDefault("model")
        if isinstance(name, str):
            self._built = (name, self.getOrDefault("weights"), self.getOrDefault("include_top")), model
        else:
            self._set(model=model)


def applications() -> tuple[str, ...]:
    """The names of the models in ``keras.applications``."""
    members = vars(keras.applications).items()
    return tuple(sorted(name for name, member in members if name[:1].isupper() and callable(member)))


def _output_of(model: keras.Model, layer: str | int | None) -> Any:
    """The symbolic output tensor of a layer; see `ImageFeaturizer` for ``None``."""
    if layer is None:
        dense = [each for each in model.layers if isinstance(each, keras.layers.Dense)]
        return dense[-1].input if dense else model.outputs[0]
    if isinstance(layer, int):
        if not -len(model.layers) <= layer < len(model.layers):
            raise ModelError(
                f"layer={layer}: the model {model.name!r} has {counted(len(model.layers), 'layer')}, counted from 0."
            )
        return model.layers[layer].output
    names = [each.name for each in model.layers]
    if layer not in names:
        raise ModelError(f"layer={layer!r}: the model {model.name!r} has no layer of this name. {known_names(layer, names)}")
    return model.get_layer(layer).output
