"""`ImageFeaturizer`: images as the features that a network's layer gives of them."""

# ruff: noqa: N803, N815 - Spark's names
from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import keras
from pyspark import keyword_only
from pyspark.ml import Transformer

from sparkkeras.arguments import known_arguments, one_of
from sparkkeras.data.block import describe
from sparkkeras.errors import ConfigurationError, ModelError, known_names
from sparkkeras.formats.images import INTERPOLATIONS, image_loader
from sparkkeras.ml import values
from sparkkeras.ml.outputs import as_vector
from sparkkeras.ml.params import REQUIRED, KerasParams, param
from sparkkeras.ml.persistence import Savable
from sparkkeras.ml.transformer import Columnar, with_fields
from sparkkeras.modeling import archive as models
from sparkkeras.modeling.outputs import outputs_of
from sparkkeras.scoring.columns import with_predictions
from sparkkeras.sources.frame import Named

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}

Preprocessing = str | float | Callable[[Any], Any] | None


def _network(name: str, value: Any) -> keras.Model | str:
    if not isinstance(value, str):
        return values.network(name, value)
    one_of(name, value, applications())
    return value


def _layer(name: str, value: Any) -> str | int:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ConfigurationError(f"{name} is {describe(value)}; expected the name of a layer, its index, or None.")
    return value


def _size(name: str, value: Any) -> tuple[int, int]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ConfigurationError(f"{name}={value!r}: expected (height, width), or None for what the model takes.")
    height, width = (values.number()(name, side) for side in value)
    return height, width


def _preprocessing(name: str, value: Any) -> Preprocessing:
    if value in ("auto", None) or (callable(value) and not isinstance(value, type)):
        return value  # type: ignore[no-any-return]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigurationError(
            f"{name} is {describe(value)}; expected 'auto', a function on a batch, a factor for its values, or None."
        )
    return float(value)


class ImageFeaturizer(KerasParams, Transformer, Savable):
    """Adds a vector of features to each image: what a layer of a network gives of it.

    A network that was trained on many images knows what to look for in others, so that a simple classifier on its features
    does with few of them. Features of more than one axis are flattened.

    Args:
        model: A built functional or sequential ``keras.Model`` with one input of shape (height, width, channels), or the
            name of one in ``keras.applications``, such as ``"ResNet50"``, which is built when it is first used.
        weights: For a name: the path of a weights file for ``keras.applications``, on the driver, or ``"imagenet"``, which
            Keras downloads. ``None``, said explicitly, leaves the weights random.
        include_top: For a name: whether network and weights have the classifier on top. Without it, the features are
            averaged over the image.
        layer: The layer whose output is taken: its name, its index, or ``None`` for what goes into the last Dense layer,
            which is the classifier mostly; where there is none, the model's own output.
        inputCol: The column of images: encoded bytes, rows of Spark's image source, or paths; see `image_loader`.
        outputCol: The new column of vectors.
        size: (height, width) that images are resized to; ``None``: what the model takes.
        mode: ``"RGB"``, ``"L"`` or ``"RGBA"``; ``None``: what fits the model's channels.
        preprocessing: What is done to each batch of pixels from 0 to 255: a function, a factor, or ``None`` for nothing.
            ``"auto"`` is what ``keras.applications`` has for a network that was named, else nothing.
        on_error: What becomes of rows without a readable image: ``"error"``, ``"null"`` (their features are null) or
            ``"drop"``.
        interpolation: How images are resized, as in `image_loader`.
        inferenceBatchSize: Images that the network is called on at a time.

    Raises:
        UnknownArgumentError: An argument that it does not take.
        ConfigurationError: An argument is out of range.

    Example::

        images = spark.read.format("image").load("photos/")
        featurizer = ImageFeaturizer(model="ResNet50", weights="resnet50.h5", inputCol="image", outputCol="features")
        Pipeline(stages=[featurizer, LogisticRegression()]).fit(labelled)
    """

    model = param("a Keras model, or the name of one in keras.applications", values.optional(_network))
    weights = param("for a name: the path of its weights, or None for random ones", values.optional(values.text))
    include_top = param("for a name: whether network and weights have the classifier on top", values.flag)
    layer = param(
        "the layer whose output is taken: its name or index; None: what goes into the last Dense layer, or else the "
        "model's own output",
        values.optional(_layer),
    )
    inputCol = param("the column of images: encoded bytes, rows of the image source, or paths", values.text)
    outputCol = param("the new column of vectors", values.text)
    size = param("(height, width) that images are resized to; None: what the model takes", values.optional(_size))
    mode = param(
        "'RGB', 'L' or 'RGBA'; None: what fits the model's channels", values.optional(values.choice(*_MODES.values()))
    )
    preprocessing = param(
        "what is done to each batch of pixels: a function, a factor, or None; 'auto': what the named network wants",
        _preprocessing,
    )
    on_error = param(
        "what becomes of rows without a readable image: 'error', 'null' or 'drop'", values.choice("error", "null", "drop")
    )
    interpolation = param(f"how images are resized: {', '.join(map(repr, INTERPOLATIONS))}", values.choice(*INTERPOLATIONS))
    inferenceBatchSize = param("images that the network is called on at a time", values.number())

    @known_arguments
    @keyword_only
    def __init__(
        self,
        *,
        model: keras.Model | str | None = None,
        weights: str | None = REQUIRED,
        include_top: bool = True,
        layer: str | int | None = None,
        inputCol: str = "image",
        outputCol: str = "features",
        size: tuple[int, int] | None = None,
        mode: str | None = None,
        preprocessing: Preprocessing = "auto",
        on_error: str = "error",
        interpolation: str = "nearest",
        inferenceBatchSize: int = 32,
    ) -> None:
        super().__init__()
        self._built: tuple[Any, keras.Model] | None = None
        self._begin(ImageFeaturizer.__init__)

    def get_model(self) -> keras.Model:
        """The whole network.

        Raises:
            ModelError: There is none, or it is not built.
            ConfigurationError: It was named, but nothing was said of its weights.
        """
        given = self.getOrDefault("model")
        if given is None:
            raise ModelError("this ImageFeaturizer has no model: ImageFeaturizer(model=...), a Keras model or a name.")
        if isinstance(given, str):
            return self._application(given)
        models.check_built(given)
        model: keras.Model = given
        return model

    def transformSchema(self, schema: StructType) -> StructType:  # noqa: N802 - Spark's name
        """The schema of `transform`'s result.

        Raises:
            ModelError: There is no model, or the layer is not in it.
            DataError: The column of images is missing, or of a type that cannot be loaded.
            ConfigurationError: The new column is there already, or size and mode do not fit the model.
        """
        return self._result_schema(Columnar.of(schema))

    def _result_schema(self, frame: DataFrame) -> StructType:
        from pyspark.ml.linalg import VectorUDT
        from pyspark.sql.types import StructField

        network = self._features()
        named = Named(self.getOrDefault("inputCol"), loader=self._loader(network))
        named.select(frame, models.schema_of(network), labelled=False)
        width = network.outputs[0].shape[-1]
        metadata = {} if width is None else {"ml_attr": {"num_attrs": width}}
        return with_fields(frame, [StructField(self.getOrDefault("outputCol"), VectorUDT(), True, metadata)])

    def _transform(self, dataset: DataFrame) -> DataFrame:
        from pyspark.sql import functions

        field = self._result_schema(Columnar.of(dataset)).fields[-1]
        network, scored_as = self._features(), f"{self.uid}_features"
        scored = with_predictions(
            dataset,
            network,
            features=self.getOrDefault("inputCol"),
            output_col=scored_as,
            batch_size=self.getOrDefault("inferenceBatchSize"),
            loader=self._loader(network),
        )
        found = scored[scored_as] if outputs_of(network)[0].rank else functions.array(scored[scored_as])
        features = as_vector(functions.when(scored[scored_as].isNotNull(), found))
        return scored.select("*", features.alias(field.name, metadata=field.metadata)).drop(scored_as)

    def _application(self, name: str) -> keras.Model:
        if not self.isDefined("weights"):
            raise ConfigurationError(
                f"model={name!r}: its weights are to be given as well: weights='/path/to/weights.h5', or 'imagenet', which "
                "Keras downloads, or weights=None for random ones."
            )
        weights, top = self.getOrDefault("weights"), self.getOrDefault("include_top")
        key = (name, weights, top)
        if self._built is None or self._built[0] != key:
            build = getattr(keras.applications, name)
            try:
                model = build(weights=weights, include_top=top, **({} if top else {"pooling": "avg"}))
            except Exception as error:  # Keras raises a bare one where it cannot download
                raise ModelError(
                    f"keras.applications.{name}(weights={weights!r}, include_top={top}) cannot be built: {error}"
                ) from error
            self._built = key, model
        return self._built[1]

    def _features(self) -> keras.Model:
        """The network up to the layer, with one flat output."""
        model = self.get_model()
        if len(getattr(model, "inputs", None) or []) != 1 or len(model.inputs[0].shape) != 4:
            raise ModelError(
                f"the model {model.name!r} does not take images: it needs one input of shape (height, width, channels)."
            )
        output = _output_of(model, self.getOrDefault("layer"))
        if len(output.shape) > 2:
            output = keras.layers.Flatten(name="features")(output)
        try:
            return keras.Model(model.inputs, output, name=f"{model.name}_features")
        except ValueError as error:
            raise ModelError(
                f"layer={self.getOrDefault('layer')!r} cannot be reached from the input of {model.name!r}: {error}"
            ) from error

    def _loader(self, network: keras.Model) -> Any:
        height, width, channels = network.inputs[0].shape[1:]
        size = self.getOrDefault("size") or (height, width)
        if None in size:
            raise ConfigurationError(
                f"the model {network.name!r} takes images of any size: give size=(height, width), which all are resized to."
            )
        mode = self.getOrDefault("mode") or _MODES.get(channels)
        if mode is None:
            raise ConfigurationError(f"the model {network.name!r} takes images of {channels} channels; expected 1, 3 or 4.")
        on_error, interpolation = self.getOrDefault("on_error"), self.getOrDefault("interpolation")
        return image_loader(size, cast(Any, mode), self._how(), on_error=on_error, interpolation=interpolation)

    def _how(self) -> Any:
        """What is done to the pixels."""
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
    """The names of the networks that Keras has for images."""
    members = vars(keras.applications).items()
    return tuple(sorted(name for name, member in members if name[:1].isupper() and callable(member)))


def _output_of(model: keras.Model, layer: str | int | None) -> Any:
    """What a layer gives, as a symbolic tensor."""
    if layer is None:
        dense = [each for each in model.layers if isinstance(each, keras.layers.Dense)]
        return dense[-1].input if dense else model.outputs[0]
    if isinstance(layer, int):
        if not -len(model.layers) <= layer < len(model.layers):
            raise ModelError(f"layer={layer}: the model {model.name!r} has {len(model.layers)} layers, counted from 0.")
        return model.layers[layer].output
    names = [each.name for each in model.layers]
    if layer not in names:
        raise ModelError(f"layer={layer!r}: the model {model.name!r} has no such layer. {known_names(layer, names)}")
    return model.get_layer(layer).output
