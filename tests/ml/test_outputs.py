"""The task that a loss implies for an output, and the columns of each task; without Spark."""

import keras
import pytest

from sparkkeras import ConfigurationError
from sparkkeras.ml import KerasTransformer
from sparkkeras.ml.outputs import columns_of
from tests.ml import parts

losses = keras.losses


def network(loss=None, units=1, axes=(), compiled=True):
    model = keras.Sequential([keras.Input((*axes, 4)), keras.layers.Dense(units, name="end")])
    if compiled:
        model.compile(loss=loss)
    return model


def columns(model, task="auto", raw="o", probability="pr", prediction="p", output_type="array", thresholds=None):
    scorer = KerasTransformer(
        task=task, outputType=output_type, outputCol=raw, rawPredictionCol="", probabilityCol=probability,
        predictionCol=prediction, thresholds=thresholds,
    )  # fmt: skip
    return columns_of(scorer, model)


@pytest.mark.parametrize(
    ("loss", "units", "task", "from_logits"),
    [
        ("mse", 1, "regression", False),
        ("mse", 3, None, False),
        (parts.squared, 1, "regression", False),
        (None, 1, "regression", False),
        ("bce", 1, "binary", False),
        (losses.binary_crossentropy, 3, "multilabel", False),
        (losses.BinaryFocalCrossentropy(from_logits=True), 2, "multilabel", True),
        ("SparseCategoricalCrossentropy", 3, "multiclass", False),
        (losses.CategoricalFocalCrossentropy(from_logits=True), 3, "multiclass", True),
    ],
)
def test_auto_infers_the_task_from_the_loss(loss, units, task, from_logits):
    (column,) = columns(network(loss, units))
    assert (column.task.name, column.task.from_logits) == (task, from_logits)


def test_auto_without_a_loss_and_with_sequences():
    assert columns(network(compiled=False, units=3))[0].task.name is None
    assert columns(network("sparse_categorical_crossentropy", 3, axes=(5,)))[0].task.name is None


def test_an_explicit_task_overrides_the_loss_but_keeps_from_logits():
    (column,) = columns(network(losses.CategoricalCrossentropy(from_logits=True), 3), task="multilabel")
    assert (column.task.name, column.task.from_logits) == ("multilabel", True)


@pytest.mark.parametrize(
    ("units", "axes", "task"),
    [(2, (), "binary"), (1, (), "multiclass"), (3, (5,), "multiclass"), (3, (), "regression")],
)
def test_a_task_that_does_not_fit_is_reported(units, axes, task):
    with pytest.raises(ConfigurationError, match=f"task='{task}' does not"):
        columns(network("mse", units, axes), task=task)


def two_outputs():
    inputs = keras.Input((4,))
    ends = {"age": keras.layers.Dense(1, name="age")(inputs), "kind": keras.layers.Dense(3, name="kind")(inputs)}
    model = keras.Model(inputs, ends)
    model.compile(loss={"age": "mse", "kind": losses.SparseCategoricalCrossentropy(from_logits=True)})
    return model


def test_each_output_has_its_columns_and_task():
    found = columns(
        two_outputs(), {"kind": "multilabel"}, "", probability={"kind": "p_of_kind"}, prediction=["years", "sort"]
    )
    assert [[field.name for field in column.fields()] for column in found] == [["years"], ["p_of_kind", "sort"]]
    assert [column.task.name for column in found] == ["regression", "multilabel"]


def test_names_tasks_and_thresholds_of_nested_outputs():
    a = keras.Input((4,))
    model = keras.Model(a, {"u": keras.layers.Dense(1)(a), "v": {"w": keras.layers.Dense(2, "softmax")(a)}})
    names = {"u": "one", "v": {"w": "two"}}
    one, two = columns(model, {"v": {"w": "multiclass"}}, names, thresholds={"v": {"w": [0.2, 0.8]}})
    assert (one.output_col, two.output_col) == ("one", "two")
    assert (one.task.name, two.task.name, two.thresholds) == ("regression", "multiclass", (0.2, 0.8))


def test_types_and_metadata_of_the_columns():
    def types(model, output_type="array"):
        (column,) = columns(model, output_type=output_type)
        return [(field.dataType.simpleString(), *field.metadata.values()) for field in column.fields()]

    vector = ("vector", {"num_attrs": 3})
    classes = ("double", {"num_vals": 3, "type": "nominal"})
    assert types(network("sparse_categorical_crossentropy", 3), "vector") == [vector, vector, classes]
    assert types(network("binary_crossentropy"))[1] == ("vector", {"num_attrs": 2})
    assert types(network("mse", 3, axes=(5,)), "vector") == [("array<array<float>>",)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prediction": {"sort": "x"}}, "predictionCol: .*'sort'. Known: 'age', 'kind'"),
        ({"raw": ["x"]}, r"outputCol=\['x'\]: .*2"),
        ({"task": {"size": "binary"}}, "task: .*'size'"),
        ({"thresholds": [0.5, 0.5, 0.5]}, r"\['age', 'kind'\]; expected {output"),
        ({"thresholds": {"kinds": [0.5, 0.5]}}, "thresholds: .*'kinds'.*'kind'"),
        ({"thresholds": {"kind": [0.5, 0.5]}}, "'kind', which has 3"),
    ],
)
def test_names_and_thresholds_that_do_not_fit_the_outputs_are_reported(given, message):
    with pytest.raises(ConfigurationError, match=message):
        columns(two_outputs(), **given)


def test_thresholds_are_for_classes():
    with pytest.raises(ConfigurationError, match="'end' is 'regression'"):
        columns(network("mse"), thresholds=[0.5, 0.5])
