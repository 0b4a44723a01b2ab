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


def columns(model, task="auto", raw="o", probability="pr", prediction="p", output_type="array", logits="", thresholds=None):
    scorer = KerasTransformer(
        task=task, outputType=output_type, outputCol=raw, rawPredictionCol=logits, probabilityCol=probability,
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
        (losses.BinaryCrossentropy(from_logits=True), 1, "binary", True),
        (losses.BinaryFocalCrossentropy(from_logits=True), 2, "multilabel", True),
        ("SparseCategoricalCrossentropy", 3, "multiclass", False),
        (losses.CategoricalCrossentropy(), 3, "multiclass", False),
        (losses.CategoricalFocalCrossentropy(from_logits=True), 3, "multiclass", True),
    ],
)
def test_auto_infers_the_task_from_the_loss(loss, units, task, from_logits):
    (column,) = columns(network(loss, units))
    assert (column.task.name, column.task.from_logits) == (task, from_logits)
    names = {"regression": ["o", "p"], None: ["o"]}.get(task, ["o", "pr", "p"])
    assert [field.name for field in column.fields()] == names


def test_auto_without_a_loss_and_with_sequences():
    assert columns(network(compiled=False))[0].task.name == "regression"
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
    with pytest.raises(ConfigurationError, match=f"task='{task}' does not fit the output .* shape"):
        columns(network("mse", units, axes), task=task)


def two_outputs():
    inputs = keras.Input((4,))
    ends = {"age": keras.layers.Dense(1, name="age")(inputs), "kind": keras.layers.Dense(3, name="kind")(inputs)}
    model = keras.Model(inputs, ends)
    model.compile(loss={"age": "mse", "kind": losses.SparseCategoricalCrossentropy(from_logits=True)})
    return model


def test_each_output_has_its_columns_and_task():
    found = columns(two_outputs(), logits="l")
    assert [[field.name for field in column.fields()] for column in found] == [
        ["o_age", "p_age"],
        ["o_kind", "l_kind", "pr_kind", "p_kind"],
    ]
    found = columns(two_outputs(), raw="", probability={"kind": "p_of_kind"}, prediction=["years", "sort"])
    assert [[field.name for field in column.fields()] for column in found] == [["years"], ["p_of_kind", "sort"]]
    found = columns(two_outputs(), task={"kind": "multilabel"})
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
        (column,) = columns(model, output_type=output_type, logits="l")
        return [(field.name, field.dataType.simpleString(), *field.metadata.values()) for field in column.fields()]

    assert types(network("sparse_categorical_crossentropy", 3), "vector") == [
        ("o", "vector", {"num_attrs": 3}),
        ("l", "vector", {"num_attrs": 3}),
        ("pr", "vector", {"num_attrs": 3}),
        ("p", "double", {"num_vals": 3, "type": "nominal"}),
    ]
    assert types(network("binary_crossentropy"))[1:3] == [(name, "vector", {"num_attrs": 2}) for name in ("l", "pr")]
    assert types(network("mse")) == [("o", "double"), ("p", "double")]
    assert types(network("mse", 3, axes=(5,)), "vector") == [("o", "array<array<float>>")]


def test_names_of_unknown_outputs_are_reported():
    with pytest.raises(ConfigurationError, match=r"predictionCol: the model has no output 'sort'. Known: 'age', 'kind'"):
        columns(two_outputs(), prediction={"sort": "x"})
    with pytest.raises(ConfigurationError, match=r"outputCol=\['x'\]: expected 2 names"):
        columns(two_outputs(), raw=["x"])
    with pytest.raises(ConfigurationError, match="task: the model has no output 'size'"):
        columns(two_outputs(), task={"size": "binary"})


@pytest.mark.parametrize(
    ("model", "thresholds", "message"),
    [
        (network("binary_crossentropy"), [1.0, 1.0, 1.0], r"3 values for the output 'end', which has 2 classes"),
        (network("mse"), [0.5, 0.5], "the task of the output 'end' is 'regression'; expected 'binary' or 'multiclass'"),
        (two_outputs(), [0.5, 0.5, 0.5], r"the model has the outputs \['age', 'kind'\]; expected {output name: thresholds}"),
        (two_outputs(), {"kinds": [0.5, 0.5]}, "thresholds: the model has no output 'kinds'.*Did you mean 'kind'"),
        (two_outputs(), {"kind": [0.5, 0.5]}, "output 'kind', which has 3 classes"),
    ],
)
def test_thresholds_that_do_not_fit_the_output_are_reported(model, thresholds, message):
    with pytest.raises(ConfigurationError, match=message):
        columns(model, thresholds=thresholds)
