"""Labels that the loss would misinterpret raise an error before training starts."""

import keras
import numpy as np
import pytest

from sparkkeras.data.block import from_arrays
from sparkkeras.data.labels import label_ranges
from sparkkeras.errors import ConfigurationError, DataError
from sparkkeras.modeling.labels import check_class_weight, check_labels


@pytest.fixture(scope="module")
def three():
    """A model with three outputs for each row."""
    inputs = keras.Input((2,))
    return keras.Model(inputs, keras.layers.Dense(3, activation="softmax", name="out")(inputs))


@pytest.fixture(scope="module")
def one():
    """A model with one output for each row."""
    inputs = keras.Input((2,))
    return keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid", name="out")(inputs))


@pytest.fixture(scope="module")
def two():
    """A model with two named outputs."""
    inputs = keras.Input((2,))
    kind = keras.layers.Dense(3, activation="softmax", name="kind")(inputs)
    size = keras.layers.Dense(1, name="size")(inputs)
    return keras.Model(inputs, {"kind": kind, "size": size})


def check(model, labels, loss):
    model.compile(optimizer="sgd", loss=loss)
    rows = len(next(iter(labels.values())) if isinstance(labels, dict) else labels[0] if type(labels) is tuple else labels)
    block = from_arrays(np.ones((rows, 2), np.float32), labels, None)
    check_labels(model, block.spec, label_ranges(block))


def error_of(*given):
    with pytest.raises(DataError) as caught:
        check(*given)
    return str(caught.value)


def named(loss):
    return loss if isinstance(loss, str) else getattr(loss, "__name__", None) or type(loss).__name__ + "()"


def own_loss(y, prediction):
    return keras.ops.mean(prediction)


SPARSE = [
    "sparse_categorical_crossentropy",
    "SparseCategoricalCrossentropy",
    keras.losses.sparse_categorical_crossentropy,
    keras.losses.SparseCategoricalCrossentropy(),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True, name="mine"),
]


@pytest.mark.parametrize("loss", SPARSE, ids=named)
@pytest.mark.parametrize(
    ("labels", "low", "high"),
    [([0, 1, 3], 0, 3), ([1, 2, 3], 1, 3), ([-1, 0, 1], -1, 1), ([0.0, 0.5, 1.0], 0, 1), ([[0], [7], [1]], 0, 7)],
)
def test_class_indices_must_be_below_the_number_of_units(three, loss, labels, low, high):
    message = error_of(three, np.array(labels), loss)
    assert message.startswith("y does not fit the loss sparse_categorical_crossentropy: the model's output has 3 units")
    assert f"integers from 0 to 2, but they range from {low} to {high}" in message


@pytest.mark.parametrize("loss", SPARSE, ids=named)
@pytest.mark.parametrize("labels", [[0, 1, 2], [0.0, 2.0, 1.0], [[0], [1], [2]], [False, True, True]])
def test_class_indices_that_fit(three, loss, labels):
    check(three, np.array(labels), loss)


def test_an_ignored_class_may_be_out_of_range(three):
    check(three, np.array([0, 1, -1]), keras.losses.SparseCategoricalCrossentropy(ignore_class=-1))


CATEGORICAL = ["categorical_crossentropy", "CategoricalCrossentropy", keras.losses.CategoricalCrossentropy()]


@pytest.mark.parametrize("loss", CATEGORICAL, ids=named)
@pytest.mark.parametrize(("labels", "shape"), [([0, 1, 2], "()"), ([[0], [1]], "(1,)"), (np.eye(4), "(4,)")])
def test_one_hot_rows_must_be_as_wide_as_the_model(three, loss, labels, shape):
    message = error_of(three, np.array(labels), loss)
    assert message.startswith("y does not fit the loss categorical_crossentropy: it expects one-hot rows of 3 values")
    assert f"received rows of shape {shape}" in message
    assert "to_categorical" in message


@pytest.mark.parametrize("loss", CATEGORICAL, ids=named)
def test_one_hot_rows_that_fit(three, loss):
    check(three, np.eye(3), loss)


BINARY = ["binary_crossentropy", "bce", keras.losses.binary_crossentropy, keras.losses.BinaryCrossentropy()]


@pytest.mark.parametrize("loss", BINARY, ids=named)
@pytest.mark.parametrize(("labels", "low", "high"), [([-1, 1], -1, 1), ([1, 2], 1, 2), ([[0.5], [1.5]], 0.5, 1.5)])
def test_binary_labels_must_lie_between_0_and_1(one, loss, labels, low, high):
    message = error_of(one, np.array(labels), loss)
    assert message.startswith("y does not fit the loss binary_crossentropy: labels must lie between 0 and 1")
    assert f"they range from {low:g} to {high:g}" in message


@pytest.mark.parametrize("loss", BINARY, ids=named)
@pytest.mark.parametrize("labels", [[0, 1], [0.25, 0.5], [[True], [False]]])
def test_binary_labels_that_fit(one, loss, labels):
    check(one, np.array(labels), loss)


ELEMENTWISE = ["mse", "mae", keras.losses.huber, keras.losses.LogCosh(), keras.losses.MeanSquaredLogarithmicError()]


@pytest.mark.parametrize("loss", ELEMENTWISE, ids=named)
def test_labels_of_another_shape_for_a_loss_by_values(three, one, loss):
    message = r"^y has rows of shape \(\), but the output of the model .* \(3,\), and the loss .* value by value"
    with pytest.raises(DataError, match=message):
        check(three, np.ones(5), loss)
    with pytest.raises(DataError, match=r"shape \(2,\), but"):
        check(three, np.ones((5, 2)), loss)
    with pytest.warns(UserWarning, match=r"^y has rows of shape \(1,\), but .* \(3,\): the loss .* broadcasts them"):
        check(three, np.ones((5, 1)), loss)
    with pytest.warns(UserWarning, match="broadcasts them"):
        check(one, np.ones((5, 3)), loss)
    for model, shape in ((three, (5, 3)), (three, (5, 3, 1)), (one, 5), (one, (5, 1))):
        check(model, np.ones(shape), loss)


@pytest.mark.parametrize("loss", [own_loss, keras.losses.Hinge()], ids=named)
def test_other_losses_accept_any_labels(three, one, loss):
    check(one, np.array([-7, 100]), loss)
    check(three, np.full((2, 3), 9.5), loss)


# Several outputs

GOOD = {"kind": np.array([0, 2]), "size": np.array([100.0, 0.5])}
BAD = {"kind": np.array([0, 3]), "size": np.array([100.0, 0.5])}


@pytest.mark.parametrize(
    "loss",
    [
        {"kind": "sparse_categorical_crossentropy", "size": "mse"},
        {"size": "mse", "kind": "sparse_categorical_crossentropy"},
    ],
)
@pytest.mark.parametrize("order", [("kind", "size"), ("size", "kind")])
def test_named_labels_are_matched_by_name(two, loss, order):
    check(two, {name: GOOD[name] for name in order}, loss)
    assert error_of(two, {name: BAD[name] for name in order}, loss).startswith("y['kind'] does not fit the loss sparse_")


def test_each_output_has_its_own_loss(two):
    loss = {"kind": "sparse_categorical_crossentropy", "size": "binary_crossentropy"}
    assert error_of(two, GOOD, loss).startswith("y['size'] does not fit the loss binary_crossentropy")


def test_an_output_without_a_loss_accepts_any_labels(two):
    check(two, {"kind": np.array([-5, 50]), "size": np.array([0.0, 1.0])}, {"size": "mse"})


def test_labels_in_a_tuple_are_matched_by_position():
    inputs = keras.Input((2,))
    model = keras.Model(inputs, [keras.layers.Dense(3)(inputs), keras.layers.Dense(2)(inputs)])
    losses = ["sparse_categorical_crossentropy", "sparse_categorical_crossentropy"]
    check(model, (np.array([2, 0]), np.array([1, 0])), losses)
    assert error_of(model, (np.array([2, 0]), np.array([2, 0])), losses).startswith("y[1] does not fit")
    assert error_of(model, (np.array([3, 0]), np.array([1, 0])), losses).startswith("y[0] does not fit")


def test_unknown_shapes_and_ranges_are_accepted(three):
    class Subclassed(keras.Model):
        def call(self, x):
            return x

    check(Subclassed(), np.array([0, 50]), "sparse_categorical_crossentropy")
    block = from_arrays(np.ones((2, 2)), None, None)
    check_labels(three, block.spec, ())
    labelled = from_arrays(np.ones((2, 2)), np.array([9, 9]), None)
    check_labels(three, labelled.spec, ())  # without values, no range is known


@pytest.mark.parametrize("loss", SPARSE, ids=named)
def test_one_hot_rows_in_place_of_class_indices(three, loss):
    message = error_of(three, np.eye(3, dtype=np.float32), loss)
    assert message.startswith(
        "y does not fit the loss sparse_categorical_crossentropy: it expects class indices from 0 to 2"
    )
    assert "received rows of shape (3,), the shape of one-hot rows" in message
    assert message.endswith("Compile with categorical_crossentropy, or pass class indices (y.argmax(-1)).")
    assert error_of(three, np.zeros((2, 2)), loss).endswith("received rows of shape (2,). Pass class indices.")


def test_labels_by_name_are_those_of_the_outputs_with_a_loss(two):
    with pytest.raises(DataError, match=r"the output 'sise', which the model lacks. .*Did you mean 'size'\?"):
        check(two, {"kind": np.array([0, 1]), "sise": np.array([0, 1])}, "mse")
    with pytest.raises(DataError, match=r"missing for 'size': every output with a loss needs labels; received"):
        check(two, {"kind": np.array([0, 1])}, "mse")
    check(two, {"kind": np.array([0, 1])}, {"kind": own_loss})


def test_labels_by_another_name_for_a_single_output(one):
    check(one, {one.output_names[0]: np.array([0, 1])}, "mse")
    with pytest.raises(DataError, match="labels are for the output 'zz', which the model lacks. Known: "):
        check(one, {"zz": np.array([0, 1])}, "mse")


def test_one_array_of_labels_for_several_outputs(two, three):
    expected = r"the model has 2 outputs \(kind, size\), but the labels are 1 array: pass y as a tuple or a dict of 2"
    with pytest.raises(DataError, match=expected):
        check(two, np.array([0, 1]), "mse")
    with pytest.raises(DataError, match=r"1 output \(out\), but the labels are 2 arrays: pass y as one array"):
        check(three, (np.array([0, 1]), np.array([0, 1])), "mse")


def test_a_custom_compute_loss_may_use_fewer_labels():
    class Own(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean(y_pred["kind"])

    inputs = keras.Input((2,))
    model = Own(
        inputs, {"kind": keras.layers.Dense(3, name="kind")(inputs), "size": keras.layers.Dense(1, name="size")(inputs)}
    )
    check(model, np.array([0, 1]), "mse")


def test_class_weights_of_unknown_classes_raise_an_error(three, one, two):
    for model, loss, classes in (
        (three, "sparse_categorical_crossentropy", 3),
        (three, "categorical_crossentropy", 3),
        (one, "binary_crossentropy", 2),
    ):
        model.compile("sgd", loss)
        check_class_weight(model, {0: 2.0, classes - 1: 1.0})
        with pytest.raises(ConfigurationError, match=rf"unknown classes, 5: .* class indices from 0 to {classes - 1}\."):
            check_class_weight(model, {0: 1.0, 5: 1.0})
    for model, loss in ((three, "mse"), (three, "binary_crossentropy"), (two, "mse")):  # the classes are unknown
        model.compile("sgd", loss)
        check_class_weight(model, {5: 1.0})


@pytest.fixture(scope="module")
def listed():
    """A model with a list of three outputs."""
    inputs = keras.Input((2,))
    return keras.Model(inputs, [keras.layers.Dense(3, name=name)(inputs) for name in ("first", "second", "third")])


def test_labels_for_only_the_outputs_with_a_loss(listed):
    sparse = "sparse_categorical_crossentropy"
    good, bad = np.array([0, 2]), np.array([0, 3])
    for loss, other in (([sparse, None, None], None), ([None, sparse, None], None), ([None, own_loss, sparse], bad)):
        given = [labels if other is None else (other, labels) for labels in (good, bad)]
        check(listed, given[0], loss)
        assert "does not fit the loss sparse_categorical_crossentropy" in error_of(listed, given[1], loss)
    check(listed, {"second": good}, [None, sparse, None])
    assert error_of(listed, {"second": bad}, [None, sparse, None]).startswith("y['second'] does not fit the loss sparse_")
    assert error_of(listed, good, ["mse", None, sparse]).endswith(
        "the model has 3 outputs (first, second, third), 2 with a loss, but the labels are 1 array: pass y as a tuple "
        "or a dict of 3 arrays, or as a tuple or a dict of 2 arrays for the outputs with a loss."
    )
    assert error_of(listed, (good, good), [None, sparse, None]).endswith("or as one array for the output with a loss.")
    assert error_of(listed, good, "mse").endswith("1 array: pass y as a tuple or a dict of 3 arrays.")


def test_class_indices_for_one_unit(one):
    message = error_of(one, np.array([0, 1]), "sparse_categorical_crossentropy")
    assert "the model's output has 1 unit, so labels must be integers from 0 to 0" in message
    assert message.endswith(
        "For labels 0 and 1, use a sigmoid with binary_crossentropy; for classes, one unit for each class."
    )


def test_one_hot_rows_without_the_last_class(three):
    message = error_of(three, np.eye(3)[:, :2], "categorical_crossentropy")
    assert "received rows of shape (2,)" in message
    assert "Spark's OneHotEncoder and dropLast=False" in message
