"""Labels that the loss would misinterpret raise an error before training starts."""

import keras
import numpy as np
import pytest

from sparkkeras.data.block import from_arrays
from sparkkeras.data.labels import label_ranges
from sparkkeras.errors import ConfigurationError, DataError
from sparkkeras.modeling.labels import check_class_weight, check_labels


def network(*units, names=("first", "second", "third")):
    """A model with an output of each number of units."""
    inputs = keras.Input((2,))
    outputs = [keras.layers.Dense(count, name=name)(inputs) for count, name in zip(units, names, strict=False)]
    return keras.Model(inputs, outputs if len(outputs) > 1 else outputs[0])


def named(kind=keras.Model):
    """A model with two named outputs."""
    inputs = keras.Input((2,))
    return kind(
        inputs, {"kind": keras.layers.Dense(3, name="kind")(inputs), "size": keras.layers.Dense(1, name="size")(inputs)}
    )


def check(model, labels, loss):
    model.compile(optimizer="sgd", loss=loss)
    rows = len(next(iter(labels.values())) if isinstance(labels, dict) else labels[0] if type(labels) is tuple else labels)
    block = from_arrays(np.ones((rows, 2), np.float32), labels, None)
    check_labels(model, block.spec, label_ranges(block))


def error_of(*given):
    with pytest.raises(DataError) as caught:
        check(*given)
    return str(caught.value)


def own_loss(y, prediction):
    return keras.ops.mean(prediction)


SPARSE, CATEGORICAL, BINARY = (f"{kind}_crossentropy" for kind in ("sparse_categorical", "categorical", "binary"))


@pytest.mark.parametrize(
    ("units", "loss", "labels", "words"),
    [
        (3, SPARSE, [0, 1, 3], "has 3 units, so labels must be integers from 0 to 2, but they range from 0 to 3"),
        (3, SPARSE, [[-1], [0], [1]], "they range from -1 to 1"),
        (3, SPARSE, [0.0, 0.5, 1.0], "they range from 0 to 1"),
        (1, SPARSE, [0, 1], "has 1 unit, .* For labels 0 and 1, use a sigmoid with binary_crossentropy"),
        (3, SPARSE, np.eye(3), r"shape \(3,\), the shape of one-hot rows.*categorical_crossentropy, or .*y.argmax\(-1\)"),
        (3, SPARSE, np.zeros((2, 2)), r"class indices from 0 to 2, received rows of shape \(2,\)\. Pass class indices\.$"),
        (3, CATEGORICAL, [0, 1, 2], r"one-hot rows of 3 values, received rows of shape \(\)\. .*to_categorical"),
        (3, CATEGORICAL, np.eye(3)[:, :2], r"received rows of shape \(2,\).*Spark's OneHotEncoder and dropLast=False"),
        (1, BINARY, [-1, 1], "labels must lie between 0 and 1, but they range from -1 to 1"),
        (1, BINARY, [[0.5], [1.5]], "from 0.5 to 1.5"),
    ],
)
def test_labels_that_do_not_fit_the_loss(units, loss, labels, words):
    with pytest.raises(DataError, match=f"^y does not fit the loss {loss}: .*{words}"):
        check(network(units), np.array(labels), loss)


@pytest.mark.parametrize(
    ("units", "loss", "labels"),
    [
        (3, SPARSE, [0.0, 2.0, 1.0]),
        (3, SPARSE, [[0], [1], [2]]),
        (3, SPARSE, [False, True, True]),
        (3, keras.losses.SparseCategoricalCrossentropy(ignore_class=-1), [0, 1, -1]),
        (3, CATEGORICAL, np.eye(3)),
        (1, BINARY, [0.25, 1]),
        (1, BINARY, [[True], [False]]),
        (1, own_loss, [-7, 100]),
        (3, keras.losses.Hinge(), np.full((2, 3), 9.5)),
    ],
)
def test_labels_that_fit_the_loss(units, loss, labels):
    check(network(units), np.array(labels), loss)


@pytest.mark.parametrize(
    "loss",
    [
        "SparseCategoricalCrossentropy",
        keras.losses.sparse_categorical_crossentropy,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True, name="mine"),
        "bce",
    ],
)
def test_losses_are_recognized_in_every_form(loss):
    with pytest.raises(DataError, match="y does not fit the loss"):
        check(network(3), np.array([0, 1, 3]), loss)


@pytest.mark.parametrize("loss", ["mse", keras.losses.huber, keras.losses.LogCosh()])
def test_labels_of_another_shape_for_a_loss_by_values(loss):
    one, three = network(1), network(3)
    with pytest.raises(DataError, match=r"^y has rows of shape \(\), but the output .* \(3,\), and .* value by value"):
        check(three, np.ones(5), loss)
    with pytest.raises(DataError, match=r"shape \(2,\), but"):
        check(three, np.ones((5, 2)), loss)
    with pytest.warns(UserWarning, match=r"^y has rows of shape \(1,\), but .* \(3,\): the loss .* broadcasts them"):
        check(three, np.ones((5, 1)), loss)
    with pytest.warns(UserWarning, match="broadcasts them"):
        check(one, np.ones((5, 3)), loss)
    for model, shape in ((three, (5, 3)), (three, (5, 3, 1)), (one, 5), (one, (5, 1))):
        check(model, np.ones(shape), loss)


# Several outputs

GOOD = {"kind": np.array([0, 2]), "size": np.array([100.0, 0.5])}
BAD = {"kind": np.array([0, 3]), "size": np.array([100.0, 0.5])}


@pytest.mark.parametrize("order", [("kind", "size"), ("size", "kind")])
def test_named_labels_are_matched_by_name(order):
    loss = {"kind": SPARSE, "size": "mse"}
    check(named(), {name: GOOD[name] for name in order}, loss)
    assert error_of(named(), {name: BAD[name] for name in order}, loss).startswith("y['kind'] does not fit the loss sparse_")


def test_each_output_has_its_own_loss():
    message = error_of(named(), GOOD, {"kind": SPARSE, "size": BINARY})
    assert message.startswith("y['size'] does not fit the loss binary_crossentropy")


def test_labels_in_a_tuple_are_matched_by_position():
    model, losses = network(3, 2), [SPARSE, SPARSE]
    check(model, (np.array([2, 0]), np.array([1, 0])), losses)
    assert error_of(model, (np.array([2, 0]), np.array([2, 0])), losses).startswith("y[1] does not fit")
    assert error_of(model, (np.array([3, 0]), np.array([1, 0])), losses).startswith("y[0] does not fit")


def test_unknown_shapes_and_ranges_are_accepted():
    class Subclassed(keras.Model):
        def call(self, x):
            return x

    check(Subclassed(), np.array([0, 50]), SPARSE)
    model = network(3)
    model.compile("sgd", SPARSE)
    for labels in (None, np.array([9, 9])):
        check_labels(model, from_arrays(np.ones((2, 2)), labels, None).spec, ())  # without values, no range is known


def test_labels_by_name_are_those_of_the_outputs_with_a_loss():
    two, one, labels = named(), network(1), np.array([0, 1])
    with pytest.raises(DataError, match=r"the output 'sise', which the model lacks. .*Did you mean 'size'\?"):
        check(two, {"kind": labels, "sise": labels}, "mse")
    with pytest.raises(DataError, match=r"missing for 'size': every output with a loss needs labels; received"):
        check(two, {"kind": labels}, "mse")
    check(two, {"kind": labels}, {"kind": own_loss})
    check(one, {"first": labels}, "mse")
    with pytest.raises(DataError, match="labels are for the output 'zz', which the model lacks. Known: "):
        check(one, {"zz": labels}, "mse")


def test_another_number_of_labels_than_outputs():
    labels = np.array([0, 1])
    with pytest.raises(DataError, match=r"2 outputs \(kind, size\), but the labels are 1 array: .* a tuple or a dict of 2"):
        check(named(), labels, "mse")
    with pytest.raises(DataError, match=r"1 output \(first\), but the labels are 2 arrays: pass y as one array"):
        check(network(3), (labels, labels), "mse")


def test_a_custom_compute_loss_may_use_fewer_labels():
    class Own(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean(y_pred["kind"])

    check(named(Own), np.array([0, 1]), "mse")


def test_class_weights_of_unknown_classes_raise_an_error():
    one, three = network(1), network(3)
    for model, loss, classes in ((three, SPARSE, 3), (three, CATEGORICAL, 3), (one, BINARY, 2)):
        model.compile("sgd", loss)
        check_class_weight(model, {0: 2.0, classes - 1: 1.0})
        with pytest.raises(ConfigurationError, match=rf"unknown classes, 5: .* class indices from 0 to {classes - 1}\."):
            check_class_weight(model, {0: 1.0, 5: 1.0})
    for model, loss in ((three, "mse"), (three, BINARY), (named(), "mse")):  # the classes are unknown
        model.compile("sgd", loss)
        check_class_weight(model, {5: 1.0})


def test_labels_for_only_the_outputs_with_a_loss():
    model = network(3, 3, 3)
    good, bad = np.array([0, 2]), np.array([0, 3])
    for loss, other in (([SPARSE, None, None], None), ([None, SPARSE, None], None), ([None, own_loss, SPARSE], bad)):
        given = [labels if other is None else (other, labels) for labels in (good, bad)]
        check(model, given[0], loss)
        assert "does not fit the loss sparse_categorical_crossentropy" in error_of(model, given[1], loss)
    check(model, {"second": good}, [None, SPARSE, None])
    assert error_of(model, {"second": bad}, [None, SPARSE, None]).startswith("y['second'] does not fit the loss sparse_")
    assert error_of(model, good, ["mse", None, SPARSE]).endswith(
        "the model has 3 outputs (first, second, third), 2 with a loss, but the labels are 1 array: pass y as a tuple "
        "or a dict of 3 arrays, or as a tuple or a dict of 2 arrays for the outputs with a loss."
    )
    assert error_of(model, (good, good), [None, SPARSE, None]).endswith("or as one array for the output with a loss.")
