"""Labels that the loss would misinterpret raise an error before training starts."""

import functools

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
    outputs = {"kind": keras.layers.Dense(3, name="kind")(inputs), "size": keras.layers.Dense(1, name="size")(inputs)}
    return kind(inputs, outputs)


def check(model, labels, loss):
    model.compile(optimizer="sgd", loss=loss)
    rows = len(next(iter(labels.values())) if isinstance(labels, dict) else labels[0] if type(labels) is tuple else labels)
    block = from_arrays(np.ones((rows, 2), np.float32), labels, None)
    check_labels(model, block.spec, label_ranges(block))


def own_loss(y, prediction):
    return keras.ops.mean(prediction)


SPARSE, CATEGORICAL, BINARY = (f"{kind}_crossentropy" for kind in ("sparse_categorical", "categorical", "binary"))


@pytest.mark.parametrize(
    ("units", "loss", "labels", "words"),
    [
        (3, SPARSE, [0, 1, 3], "0 to 2.* 0 to 3"),
        (3, SPARSE, [[-1], [0], [1]], "-1 to 1"),
        (3, SPARSE, [0.0, 0.5, 1.0], "range from 0 to 1"),
        (1, SPARSE, [0, 1], "1 unit.* use a sigmoid"),
        (3, SPARSE, np.eye(3), r"y.argmax\(-1\)"),
        (3, SPARSE, np.zeros((2, 2)), r"\(2,\)\. Pass class indices"),
        (3, CATEGORICAL, [0, 1, 2], r"rows of shape \(\).*to_categorical"),
        (1, BINARY, [-1, 1], "-1 to 1"),
        (1, BINARY, [[0.5], [1.5]], "0.5 to 1.5"),
    ],
)
def test_labels_that_do_not_fit_the_loss(units, loss, labels, words):
    with pytest.raises(DataError, match=f"^y does .* {loss}: .*{words}"):
        check(network(units), np.array(labels), loss)


@pytest.mark.parametrize(
    ("units", "loss", "labels"),
    [
        (3, SPARSE, [0.0, 2.0, 1.0]),
        (3, SPARSE, [[0], [1], [2]]),
        (3, keras.losses.SparseCategoricalCrossentropy(ignore_class=-1), [0, 1, -1]),
        (3, CATEGORICAL, np.eye(3)),
        (1, BINARY, [0.25, 1]),
        (1, own_loss, [-7, 100]),
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
    with pytest.raises(DataError, match="not fit the loss"):
        check(network(3), np.array([0, 1, 3]), loss)


def test_labels_of_another_shape_for_a_loss_by_values():
    one, three = network(1), network(3)
    for shape in (5, (5, 2)):
        with pytest.raises(DataError, match=r"\(3,\).* value by value"):
            check(three, np.ones(shape), "mse")
    for model, shape in ((three, (5, 1)), (one, (5, 3))):
        with pytest.warns(UserWarning, match="broadcasts them"):
            check(model, np.ones(shape), "mse")
    for model, shape in ((three, (5, 3)), (three, (5, 3, 1)), (one, 5), (one, (5, 1))):
        check(model, np.ones(shape), "mse")


# Several outputs

GOOD, BAD, SIZES = np.array([0, 2]), np.array([0, 3]), np.array([100.0, 0.5])


def rejects(words, *given):
    with pytest.raises(DataError, match=words):
        check(*given)


@pytest.mark.parametrize("order", [("kind", "size"), ("size", "kind")])
def test_named_labels_are_matched_by_name(order):
    losses = {"kind": SPARSE, "size": "mse"}
    for kinds, checked in ((GOOD, check), (BAD, functools.partial(rejects, r"^y\['kind'\] does not fit"))):
        labels = {"kind": kinds, "size": SIZES}
        checked(named(), {name: labels[name] for name in order}, losses)


def test_labels_in_a_tuple_are_matched_by_position():
    model, losses = network(3, 2), [SPARSE, SPARSE]
    check(model, (GOOD, GOOD // 2), losses)
    rejects(r"^y\[1\] does not fit", model, (GOOD, GOOD), losses)
    rejects(r"^y\[0\] does not fit", model, (BAD, GOOD // 2), losses)


def test_unknown_shapes_and_ranges_are_accepted():
    class Subclassed(keras.Model):
        def call(self, x):
            return x

    check(Subclassed(), BAD, SPARSE)
    model = network(3)
    model.compile("sgd", SPARSE)
    for labels in (None, BAD):
        check_labels(model, from_arrays(np.ones((2, 2)), labels, None).spec, ())  # without values, no range is known


def test_labels_by_name_are_those_of_the_outputs_with_a_loss():
    two, one = named(), network(1)
    rejects("'sise'.*Did you mean 'size'", two, {"kind": GOOD, "sise": GOOD}, "mse")
    rejects("missing for 'size'", two, {"kind": GOOD}, "mse")
    check(two, {"kind": GOOD}, {"kind": own_loss})
    check(one, {"first": GOOD}, "mse")
    rejects("'zz', which the model lacks", one, {"zz": GOOD}, "mse")


def test_another_number_of_labels_than_outputs():
    rejects(r"2 outputs \(kind, size\).* 1 array", named(), GOOD, "mse")
    rejects(r"1 output \(first\).* 2 arrays", network(3), (GOOD, GOOD), "mse")


def test_a_custom_compute_loss_may_use_fewer_labels():
    class Own(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean(y_pred["kind"])

    check(named(Own), GOOD, "mse")


def test_class_weights_of_unknown_classes_raise_an_error():
    one, three = network(1), network(3)
    for model, loss, classes in ((three, SPARSE, 3), (three, CATEGORICAL, 3), (one, BINARY, 2)):
        model.compile("sgd", loss)
        check_class_weight(model, {0: 2.0, classes - 1: 1.0})
        with pytest.raises(ConfigurationError, match=rf"classes, 5: .* 0 to {classes - 1}"):
            check_class_weight(model, {0: 1.0, 5: 1.0})
    for model, loss in ((three, "mse"), (three, BINARY), (named(), "mse")):  # the classes are unknown
        model.compile("sgd", loss)
        check_class_weight(model, {5: 1.0})


def test_labels_for_only_the_outputs_with_a_loss():
    model, first, second = network(3, 3, 3), [SPARSE, None, None], [None, SPARSE, None]
    for loss in (first, second):
        check(model, GOOD, loss)
        rejects("^y does not fit", model, BAD, loss)
    check(model, (BAD, GOOD), [None, own_loss, SPARSE])
    rejects(r"^y\[1\] does not fit", model, (GOOD, BAD), [None, own_loss, SPARSE])
    check(model, {"second": GOOD}, second)
    rejects(r"^y\['second'\] does not fit", model, {"second": BAD}, second)
    rejects("2 with a loss.* 2 arrays", model, GOOD, ["mse", None, SPARSE])
    rejects("or as one array", model, (GOOD, GOOD), second)
