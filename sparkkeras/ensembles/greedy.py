"""`greedy_ensemble`: ensemble selection on validation data, by any metric."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np

from sparkkeras import arguments
from sparkkeras.arguments import known_arguments
from sparkkeras.data.block import Block, describe
from sparkkeras.data.labels import label_ranges
from sparkkeras.data.reader import Reader
from sparkkeras.ensembles import compatibility
from sparkkeras.ensembles.ensemble import EnsembleModel
from sparkkeras.ensembles.member_predictions import member_predictions
from sparkkeras.ensembles.selection import Score, forward_selection
from sparkkeras.errors import ConfigurationError, DataError
from sparkkeras.modeling.fixed_batch import check_batch_size
from sparkkeras.modeling.labels import check_labels
from sparkkeras.modeling.outputs import losses_of
from sparkkeras.modeling.schema import schema_of
from sparkkeras.modeling.voting import ballot, decided
from sparkkeras.scoring import inference
from sparkkeras.sources.frame import ColumnMapping, Columns, Loaders
from sparkkeras.sources.source import as_source, is_batch_function
from sparkkeras.weights import Array
from sparkkeras.worker.batches import BatchOptions, Transform

Metric: TypeAlias = str | keras.metrics.Metric | keras.losses.Loss | Callable[[Any, Any], float]


@known_arguments
def greedy_ensemble(
    models: Sequence[keras.Model],
    x_val: Any,
    y_val: Any = None,
    metric: Metric = "loss",
    size: int = 20,
    *,
    mode: str = "auto",
    voting: str = "soft",
    initial: int = 5,
    sample_weight: Any = None,
    features: Columns | None = None,
    label: Columns | None = None,
    loader: Loaders | None = None,
    transform: Transform | None = None,
    batch_size: int = 32,
    custom_objects: Mapping[str, Any] | None = None,
) -> EnsembleModel:
    """Select the models that form the best ensemble on validation data, by forward selection with replacement.

    The selection starts with the best models. Then it adds, one at a time, the model that improves the ensemble most, which
    may be selected already. A model's weight is the number of its selections; models that were never selected are left out.
    On the validation data the ensemble is never worse than the best single model. To estimate its quality on new data, use
    data that was not used for training or selection (Caruana et al. 2004).

    Arrays are predicted in this process. A DataFrame or an RDD is predicted on its workers, one model after the other: only
    labels and predictions are sent to this process, in which the selection needs all of them.

    Args:
        models: Built Keras models with the same inputs and outputs. Each predicts the validation data once.
        x_val: Data that the models were not trained on: features as arrays, a DataFrame, or an RDD of ``(x, y)`` or
            ``(x, y, sample_weight)`` rows.
        y_val: Validation labels, if ``x_val`` is arrays.
        metric: The metric to select by: ``"loss"`` (the loss of the first compiled model, without regularization), the name
            of a Keras metric, a Keras metric or loss object, or a function ``metric(y_true, y_pred) -> number``.
        size: The maximum number of selections, counting repeated ones.
        mode: ``"min"`` to minimize the metric, ``"max"`` to maximize it, ``"auto"`` to infer it from a Keras metric or loss.
        voting: How members are combined: ``"soft"``, ``"hard"`` or ``"average"``; see `EnsembleModel`.
        initial: The maximum number of models to start with: the best ones, added in order as long as the metric does not get
            worse.
        sample_weight: A weight for each sample: an array of shape (samples,) for arrays, the name of a column for a
            DataFrame.
        features: The input columns of a DataFrame, or ``{input name: column(s)}`` with the first model's input names; see
            `SparkModel.fit`.
        label: The label column of a DataFrame. ``None``: the column ``label``, or a column with the name of the output.
        loader: Converts a column of a DataFrame into an input, such as `image_loader`.
        transform: ``transform(x, y) -> (x, y)``, applied to each batch.
        batch_size: Rows per batch when predicting.
        custom_objects: Custom classes and functions by name, where they cannot be found from the models.

    Returns:
        An ensemble whose weights are the selection counts, scaled to add up to 1.

    Raises:
        ModelError: The models cannot form an ensemble.
        ConfigurationError: An argument is invalid, or the metric cannot be computed.
        DataError: The data does not fit the models, or the metric is not finite for any model.
        WorkerError: A task failed repeatedly; the message contains its traceback.

    Example::

        ensemble = greedy_ensemble(models, x_val, y_val, metric="accuracy", size=15)
        ensemble.evaluate(x_test, y_test)

        ensemble = greedy_ensemble(models, validation_df, features="pixels", label="digit")
    """
    given = compatibility.check_members(models, voting)
    size, initial = arguments.integer("size", size), arguments.integer("initial", initial)
    arguments.one_of("mode", mode, ("auto", "min", "max"))
    schema = schema_of(given[0])
    if len(schema.outputs) > 1:
        raise ConfigurationError(
            f"the models have {len(schema.outputs)} outputs, but a metric scores a single one. Select by one output, with "
            "keras.Model(model.inputs, model.outputs[0])."
        )
    by_value = inference.transform_by_value(transform)
    columns = ColumnMapping(features, label, loader=loader, fits=transform is None)
    reader = Reader(schema.before(transform), has_on_invalid=False)
    if is_batch_function(x_val):
        raise DataError(f"x_val is {describe(x_val)}; expected a DataFrame, an RDD or arrays, which each model can predict.")
    source = as_source(x_val, reader, y_val, sample_weight, columns)
    objects = arguments.custom_objects("custom_objects", custom_objects)
    batch_size = arguments.integer("batch_size", batch_size)
    for model in given:
        check_batch_size(model, "batch_size", batch_size)
    exclusive = compatibility.exclusive(given)[0]
    if voting == "hard" and any(compatibility.exclusive([model])[0] != exclusive for model in given):
        raise ConfigurationError(
            'voting="hard": some of the models predict one class (softmax), others several labels (one sigmoid each), and '
            "their votes cannot be combined. Pass models of one kind."
        )
    with member_predictions(given, source, BatchOptions(batch_size, by_value), objects) as (rows, predicted):
        if any(not np.any(weights) for weights in rows.arrays[rows.form.span("sample_weight")]):
            raise DataError("sample_weight is 0 for all samples; expected a positive weight for at least one.")
        predictions = [next(predicted)]
        score = _score(metric, mode, given, rows, predictions[0])  # raises errors before the other models predict
        predictions.extend(predicted)
    if voting == "hard":
        ballots = [np.stack([_numpy(ballot(each, exclusive)), each]) for each in predictions]
        chosen = forward_selection(ballots, lambda mean: score(_numpy(decided(mean[0], mean[1], exclusive))), size, initial)
    else:
        chosen = forward_selection(predictions, score, size, initial)
    if not chosen:
        raise DataError(f"metric={metric!r} is not finite for any of the models. Check whether their training diverged.")
    counts = Counter(chosen)
    best = sorted(counts)
    return EnsembleModel(
        [given[member] for member in best],
        voting,
        [counts[member] for member in best],
        custom_objects=objects,
    )


def _score(metric: Any, mode: str, given: Sequence[keras.Model], rows: Block, prediction: Array) -> Score:
    """A function that scores predictions for the rows; lower is better.

    Args:
        metric: The metric, as in `greedy_ensemble`.
        mode: ``"min"``, ``"max"`` or ``"auto"``.
        given: The models.
        rows: The labels and weights of the validation data.
        prediction: One model's predictions, which define the shape and dtype.
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
                "sample_weight works with Keras metrics and losses only; a custom function must apply weights itself."
            )

        def measure(predicted: Array) -> float:
            try:
                return float(metric(rows.y, predicted))
            except (TypeError, ValueError) as error:
                raise ConfigurationError(
                    f"metric={metric!r} failed or did not return a number ({type(error).__name__}: {error}); expected a "
                    f"function of labels of shape {np.shape(rows.y)} and predictions of shape {predicted.shape}, which are "
                    "probabilities or values, not class indices."
                ) from error

        found = None
    mode = found or "auto" if mode == "auto" else mode
    if mode == "auto":
        raise ConfigurationError(
            f'metric={metric!r}: cannot infer whether to minimize or maximize it; set mode="min" or mode="max".'
        )
    sign = 1.0 if mode == "min" else -1.0
    return lambda mean: sign * measure(mean.astype(prediction.dtype))


def _of_keras(
    metric: str | keras.metrics.Metric | keras.losses.Loss, given: Sequence[keras.Model], rows: Block, prediction: Array
) -> tuple[Callable[[Array], float], str | None]:
    """A function that computes a Keras metric or loss, and its direction ``"min"`` or ``"max"``; ``None``: unknown.

    An identity model evaluates the predictions, so that metric names have the same meaning as in ``compile``.
    """
    is_loss = metric == "loss" or isinstance(metric, keras.losses.Loss)
    loss: Any = metric if is_loss else _zero_loss
    if is_loss and isinstance(metric, str):
        compiled = compatibility.first_compiled(given)
        if compiled is None or compiled.loss is None:
            raise ConfigurationError(
                'metric="loss": none of the models was compiled with a loss. Pass a Keras loss, such as '
                "keras.losses.SparseCategoricalCrossentropy(), or compile one of the models."
            )
        (loss,) = losses_of(compiled, [spec.name for spec in schema_of(compiled).outputs])
        check_labels(compiled, rows.spec, label_ranges(rows))
    inputs = keras.Input(prediction.shape[1:], dtype=str(prediction.dtype))
    evaluator = keras.Model(inputs, keras.layers.Identity(dtype=str(prediction.dtype))(inputs))
    measured = [] if is_loss else [metric]
    weighted = rows.sample_weight is not None
    evaluator.compile(None, loss, metrics=None if weighted else measured, weighted_metrics=measured if weighted else None)

    (labels,) = keras.tree.flatten(rows.y)

    def measure(predicted: Array) -> float:
        evaluator.reset_metrics()  # Keras 3.12 accumulates over calls
        logs = evaluator.test_on_batch(predicted, labels, rows.sample_weight, return_dict=True)
        value = logs["loss"] if is_loss else next(each for name, each in logs.items() if name != "loss")
        return float(np.asarray(value))

    try:
        measure(prediction)
    except Exception as error:
        reason = str(error).strip().rstrip(".")
        raise ConfigurationError(
            f"metric={metric!r} cannot be computed: {reason}. It receives predictions of shape {prediction.shape} and "
            f"labels of shape {rows.spec.leaves[rows.form.span('y')][0].shape} per row."
        ) from error
    return measure, "min" if is_loss else _direction(evaluator)


def _zero_loss(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.zeros(keras.ops.shape(y_pred)[:1])


def _direction(evaluator: keras.Model) -> str | None:
    """``"min"`` or ``"max"`` for the model's metric; ``None`` if Keras does not define its direction."""
    listed = [each for metric in evaluator.metrics for each in getattr(metric, "metrics", ())]
    compiled = [metric for each in listed for metric in getattr(each, "metrics", None) or (each,)]
    directions = {str(getattr(metric, "_direction", "")) for metric in compiled} - {""}
    return {"up": "max", "down": "min"}.get(directions.pop()) if len(directions) == 1 else None


def _numpy(tensor: Any) -> Array:
    return np.asarray(keras.ops.convert_to_numpy(tensor))
