"""`greedy_ensemble`: the ensemble of some models that is best on validation data, by whatever a person measures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np

from sparkkeras import arguments
from sparkkeras.arguments import known_arguments
from sparkkeras.data.block import Block
from sparkkeras.data.schema import Reader, label_ranges
from sparkkeras.ensembles import compatibility
from sparkkeras.ensembles.ensemble import EnsembleModel
from sparkkeras.ensembles.selection import Score, forward_selection
from sparkkeras.errors import ConfigurationError, DataError
from sparkkeras.modeling.archive import schema_of
from sparkkeras.modeling.labels import check_labels
from sparkkeras.modeling.outputs import losses_of
from sparkkeras.modeling.voting import ballot, decided
from sparkkeras.sources.source import as_source
from sparkkeras.weights import Array

Metric: TypeAlias = str | keras.metrics.Metric | keras.losses.Loss | Callable[[Any, Any], float]


@known_arguments
def greedy_ensemble(
    models: Sequence[keras.Model],
    x_val: Any,
    y_val: Any,
    metric: Metric = "loss",
    size: int = 20,
    *,
    mode: str = "auto",
    voting: str = "soft",
    initial: int = 5,
    sample_weight: Any = None,
    batch_size: int = 32,
    custom_objects: Mapping[str, Any] | None = None,
) -> EnsembleModel:
    """The ensemble of some of the models that is best on validation data, found by forward selection with replacement.

    The best models begin; then, one after the other, the model is added that helps most, be it in already. How often it was
    chosen is its weight, and models that were never chosen are left out. On the validation data the ensemble is never worse
    than the best model; whether it is better elsewhere, test it on data that nothing was chosen on (Caruana 2004).

    Args:
        models: As of `EnsembleModel`. Each predicts the validation data once.
        x_val: Features that the models were not trained on: arrays.
        y_val: Their labels.
        metric: What to choose by: ``"loss"``, that of the first compiled model, without penalties on weights; the name of a
            Keras metric; a Keras metric or loss; or ``metric(y_true, y_pred) -> number``.
        size: How many times a model is chosen, at most.
        mode: Whether the metric is to be small (``"min"``) or large (``"max"``). ``"auto"`` asks Keras, which knows its own.
        voting: As of `EnsembleModel`.
        initial: How many of the best models may begin, one after the other, as long as none of them makes it worse.
        sample_weight: A weight for each sample, shape (samples,).
        batch_size: Rows that a model predicts at a time.
        custom_objects: As of `EnsembleModel`.

    Returns:
        An ensemble whose weights are how often each model was chosen, scaled to add up to 1.

    Raises:
        ModelError: The models do not belong together.
        ConfigurationError: An argument cannot be.
        DataError: The data does not fit the models, or no model's figure is finite.

    Example::

        ensemble = greedy_ensemble(models, x_val, y_val, metric="accuracy", size=15)
        ensemble.evaluate(x_test, y_test)
    """
    given = compatibility.check_members(models, voting)
    size, initial = arguments.whole_number("size", size), arguments.whole_number("initial", initial)
    arguments.one_of("mode", mode, ("auto", "min", "max"))
    schema = schema_of(given[0])
    if len(schema.outputs) > 1:
        raise ConfigurationError(
            f"the models have {len(schema.outputs)} outputs, and one score does not show how good they are: choose on one "
            "of them, with keras.Model(model.inputs, model.outputs[0])."
        )
    block = as_source(x_val, Reader(schema, has_on_invalid=False), y_val, sample_weight).block
    if block is None or not block.rows:
        told = "holds no rows" if block is not None else "lies on Spark"
        raise DataError(f"x_val {told}; expected arrays, such as a sample that was collected.")
    schema.check_features(block.spec, has_transform=False)
    if sample_weight is not None and not np.any(np.asarray(sample_weight)):
        raise DataError("sample_weight is 0 for all samples; expected more than 0 for one of them.")
    batch_size = arguments.whole_number("batch_size", batch_size)
    exclusive = compatibility.exclusive(given)[0]
    if voting == "hard" and any(compatibility.exclusive([model])[0] != exclusive for model in given):
        raise ConfigurationError(
            'voting="hard": to some of the models one class is right, to others several may be (a sigmoid for each), so the '
            "votes would count otherwise by who is chosen: choose among models of one kind."
        )
    features = [compatibility.own_features(block.x, model, given[0]) for model in given]
    predictions = [
        keras.tree.flatten(compatibility.predicted(*each, batch_size))[0] for each in zip(given, features, strict=True)
    ]
    score = _score(metric, mode, given, block, predictions[0])
    if voting == "hard":
        ballots = [np.stack([_numpy(ballot(each, exclusive)), each]) for each in predictions]
        chosen = forward_selection(ballots, lambda mean: score(_numpy(decided(mean[0], mean[1], exclusive))), size, initial)
    else:
        chosen = forward_selection(predictions, score, size, initial)
    if not chosen:
        raise DataError(f"metric={metric!r} is finite for none of the models: have they diverged?")
    counts = Counter(chosen)
    best = sorted(counts)
    return EnsembleModel(
        [given[member] for member in best],
        voting,
        [counts[member] for member in best],
        custom_objects=custom_objects,
    )


def _score(metric: Any, mode: str, given: Sequence[keras.Model], rows: Block, prediction: Array) -> Score:
    """How good predictions for some rows are; less is better.

    Args:
        metric: What measures it.
        mode: Whether that is to be small or large.
        given: The models that predict.
        rows: The rows.
        prediction: A prediction for them, which others are like.
    """
    kinds = (str, keras.metrics.Metric, keras.losses.Loss)
    if isinstance(metric, type) or not (isinstance(metric, kinds) or callable(metric)):
        raise ConfigurationError(
            f'metric={metric!r}: expected "loss", the name of a Keras metric, a Keras metric or loss (an object, not its '
            "class), or a function of (y_true, y_pred)."
        )
    if isinstance(metric, kinds):
        measure, found = _of_keras(metric, given, rows, prediction)
    else:
        if rows.sample_weight is not None:
            raise ConfigurationError(
                "sample_weight goes with metrics of Keras's; a function of your own has to weight itself."
            )

        def measure(predicted: Array) -> float:
            try:
                return float(metric(rows.y, predicted))
            except (TypeError, ValueError) as error:
                raise ConfigurationError(
                    f"metric={metric!r} failed, or gave no number ({type(error).__name__}: {error}); expected a function of "
                    f"labels of shape {np.shape(rows.y)} and predictions of shape {predicted.shape}, which are "
                    "probabilities or values, not classes."
                ) from error

        found = None
    mode = found or "auto" if mode == "auto" else mode
    if mode == "auto":
        raise ConfigurationError(
            f'metric={metric!r}: nobody says whether it is to be small or large; give mode="min" or mode="max".'
        )
    sign = 1.0 if mode == "min" else -1.0
    return lambda mean: sign * measure(mean.astype(prediction.dtype))


def _of_keras(
    metric: str | keras.metrics.Metric | keras.losses.Loss, given: Sequence[keras.Model], rows: Block, prediction: Array
) -> tuple[Callable[[Array], float], str | None]:
    """What Keras measures, and whether that is to be small or large.

    A model that does nothing evaluates predictions, so that names mean what they mean in ``compile``.
    """
    is_loss = metric == "loss" or isinstance(metric, keras.losses.Loss)
    loss: Any = metric if is_loss else _nothing
    if is_loss and isinstance(metric, str):
        compiled = compatibility.first_compiled(given)
        if compiled is None or compiled.loss is None:
            raise ConfigurationError(
                'metric="loss": none of the models was compiled with a loss. Give a Keras loss, such as '
                "keras.losses.SparseCategoricalCrossentropy(), or compile one."
            )
        (loss,) = losses_of(compiled, [spec.name for spec in schema_of(compiled).outputs])
        check_labels(compiled, rows.spec, label_ranges(rows))
    inputs = keras.Input(prediction.shape[1:], dtype=str(prediction.dtype))
    judge = keras.Model(inputs, keras.layers.Identity(dtype=str(prediction.dtype))(inputs))
    measured = [] if is_loss else [metric]
    weighted = rows.sample_weight is not None
    judge.compile(None, loss, metrics=None if weighted else measured, weighted_metrics=measured if weighted else None)

    (labels,) = keras.tree.flatten(rows.y)

    def measure(predicted: Array) -> float:
        figures = judge.test_on_batch(predicted, labels, rows.sample_weight, return_dict=True)
        figure = figures["loss"] if is_loss else next(value for name, value in figures.items() if name != "loss")
        return float(np.asarray(figure))

    try:
        measure(prediction)
    except Exception as error:
        reason = str(error).strip().rstrip(".")
        raise ConfigurationError(
            f"metric={metric!r} cannot be measured: {reason}. It gets predictions of shape {prediction.shape} and labels of "
            f"shape {rows.spec.leaves[rows.form.span('y')][0].shape} for a row."
        ) from error
    return measure, "min" if is_loss else _direction(judge)


def _nothing(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.zeros(keras.ops.shape(y_pred)[:1])


def _direction(judge: keras.Model) -> str | None:
    """Whether the metric of a model is to be small or large, where Keras knows."""
    compiled = [metric for each in judge.metrics for lists in getattr(each, "metrics", ()) for metric in _listed(lists)]
    told = {str(getattr(metric, "_direction", "")) for metric in compiled} - {""}
    return {"up": "max", "down": "min"}.get(told.pop()) if len(told) == 1 else None


def _listed(metrics: Any) -> Sequence[Any]:
    listed: Sequence[Any] = getattr(metrics, "metrics", None) or (metrics,)
    return listed


def _numpy(tensor: Any) -> Array:
    return np.asarray(keras.ops.convert_to_numpy(tensor))
