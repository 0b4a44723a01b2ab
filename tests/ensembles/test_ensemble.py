"""Ensembles in one process: voting, checks, files and greedy selection of members. No Spark."""

import io
import json
import sys
import zipfile

import keras
import numpy as np
import pytest

from sparkkeras import EnsembleModel, greedy_ensemble, load_ensemble_model, load_spark_model
from sparkkeras.errors import ConfigurationError, CustomObjectError, DataError, ModelError, StorageError
from tests.models import regression

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3)).astype(np.float32)
LABELS = X.argmax(-1)


def network(*layers, seed=0, compiled=True):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(3, activation="softmax", name="scores")])
    if compiled:
        options = {"metrics": ["accuracy"], "run_eagerly": True}  # these models run too few steps to be traced
        model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", **options)
    return model


def unit(activation="sigmoid", units=1, seed=0, **compiled):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(units, activation=activation)])
    if compiled:
        model.compile("sgd", **{"run_eagerly": True, **compiled})
    return model


@pytest.fixture(scope="module")
def members():
    """Models of different architectures, trained briefly."""
    models = [
        network(keras.layers.Dense(16, "relu", kernel_regularizer="l2"), seed=1),
        network(keras.layers.BatchNormalization(), keras.layers.Dropout(0.2), seed=2),
        network(keras.layers.Reshape((3, 1)), keras.layers.Conv1D(4, 2), keras.layers.Flatten(), seed=3),
    ]
    for model in models:
        model.fit(X, LABELS, epochs=2, verbose=0)
    return models


def called(model, x):
    """A model's outputs for ``x``; a direct call, which is faster than tracing ``predict``."""
    return keras.tree.map_structure(np.asarray, model(x))


@pytest.fixture(scope="module")
def outputs(members):
    return np.stack([called(model, X) for model in members])


def untraced(ensemble):
    """The same ensemble, which runs too few steps here to be traced."""
    ensemble.model.run_eagerly = True
    return ensemble


@pytest.fixture(scope="module")
def soft(members):
    return untraced(EnsembleModel(members))


@pytest.fixture(scope="module")
def hard(members):
    return untraced(EnsembleModel(members, "hard"))


# Voting


def test_soft_is_the_weighted_mean_of_probabilities(members, outputs):
    ensemble = untraced(EnsembleModel(members, weights=[3, 1, 0]))
    assert ensemble.weights == (0.75, 0.25, 0.0)
    found = ensemble.predict(X)
    np.testing.assert_allclose(found, np.average(outputs, axis=0, weights=[3, 1, 0]), atol=1e-6)
    assert np.array_equal(ensemble.predict_classes(X), found.argmax(-1))


def test_hard_is_one_hot_and_follows_the_majority(hard, outputs):
    votes = np.stack([np.bincount(row, minlength=3) for row in outputs.argmax(-1).T])
    expected = np.where(votes == votes.max(-1, keepdims=True), outputs.mean(0), -1).argmax(-1)  # the mean breaks ties
    assert np.array_equal(hard.predict(X), np.eye(3, dtype=np.float32)[expected])
    assert hard.evaluate(X, LABELS, return_dict=True)["accuracy"] == pytest.approx((expected == LABELS).mean())


def test_the_ensemble_follows_its_members_and_does_not_modify_them():
    models = [network(seed=seed) for seed in (0, 1)]

    def properties():
        return [
            (model.name, len(model.trainable_weights), int(model.optimizer.iterations), model.get_weights()[0].tolist())
            for model in models
        ]

    ensemble, before = untraced(EnsembleModel(models)), properties()
    ensemble.evaluate(X, LABELS)
    assert properties() == before
    models[1].fit(X, LABELS, verbose=0)
    expected = np.mean([called(model, X) for model in models], 0)
    np.testing.assert_allclose(ensemble.predict(X), expected, atol=1e-6)


def test_evaluate_equals_keras_without_regularization(members, soft, outputs):
    mean = outputs.mean(0)
    loss = -np.log(mean[np.arange(40), LABELS])
    correct = mean.argmax(-1) == LABELS
    assert soft.evaluate(X, LABELS) == pytest.approx([loss.mean(), correct.mean()], rel=1e-4)
    found = soft.evaluate(X, LABELS, sample_weight=np.arange(40), return_dict=True, batch_size=7)
    assert found["loss"] == pytest.approx((loss * np.arange(40)).mean(), rel=1e-4)
    assert untraced(EnsembleModel(members[:1])).evaluate(X, LABELS)[0] < members[0].evaluate(X, LABELS, verbose=0)[0] - 0.01


def test_arrays_do_not_start_spark(soft):
    from pyspark import SparkContext

    before = SparkContext._active_spark_context
    soft.predict(X)
    soft.evaluate(X, LABELS)
    assert SparkContext._active_spark_context is before


def test_transform_and_rows_that_are_not_finite(soft):
    def scaled(features, labels):
        features /= 16.0
        return features, labels

    raw = X * 16
    assert soft.evaluate(raw, LABELS, transform=scaled) == pytest.approx(soft.evaluate(X, LABELS), rel=1e-5)
    assert np.array_equal(raw, X * 16)
    x = X.copy()
    x[39, 0] = np.nan
    with pytest.raises(DataError, match="NaN"):
        soft.predict(x)
    assert np.isnan(soft.predict(x, on_invalid="allow")[39]).all()
    assert soft.evaluate(x, LABELS, on_invalid="drop") == pytest.approx(soft.evaluate(x[:39], LABELS[:39]), rel=1e-5)
    assert soft.predict(x[:0]).shape == (0, 3)


@pytest.mark.parametrize("units", [1, 4])
def test_sigmoid_units_vote_for_each_label(units):
    models = [unit(units=units, seed=seed, loss="binary_crossentropy") for seed in range(3)]
    outputs = np.stack([called(model, X) for model in models])
    ensemble = untraced(EnsembleModel(models, "hard"))
    majority = (outputs > 0.5).sum(0) >= 2
    assert np.array_equal(ensemble.predict(X), majority)
    if units == 1:
        assert ensemble.predict_classes(X).tolist() == majority[:, 0].tolist()
        assert untraced(EnsembleModel(models)).predict_classes(X).tolist() == (outputs.mean(0)[:, 0] > 0.5).tolist()
        return
    with pytest.raises(ConfigurationError, match="not mutually exclusive"):
        ensemble.predict_classes(X)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="only TensorFlow has strings")
def test_inputs_of_strings():
    def model(seed):
        keras.utils.set_random_seed(seed)
        text = keras.Input((1,), dtype="string", name="text")
        hashed = keras.layers.Hashing(8, output_mode="one_hot")(text)
        made = keras.Model(text, keras.layers.Dense(1, "sigmoid")(hashed))
        made.compile("sgd", "binary_crossentropy", metrics=["accuracy"], run_eagerly=True)
        return made

    import tensorflow as tf

    text, models = np.array(["good", "bad", "ü"]), [model(0), model(1)]
    expected = np.mean([called(each, tf.constant(text)[:, None]) for each in models], axis=0)
    np.testing.assert_allclose(untraced(EnsembleModel(models)).predict(text), expected, rtol=1e-5)
    assert greedy_ensemble(models, text, np.array([1, 0, 1]), size=2).models


def test_greedy_selection_with_hard_voting_needs_models_of_one_kind():
    multiclass = unit("softmax", 4, loss="categorical_crossentropy")
    multilabel = unit(units=4, loss="binary_crossentropy")
    y = np.eye(4)[np.arange(40) % 4]
    with pytest.raises(ConfigurationError, match="predict one class"):
        greedy_ensemble([multiclass, multilabel], X, y, "accuracy", 2, voting="hard")
    assert greedy_ensemble([multiclass, multilabel], X, y, "accuracy", 2).models


# Structure


def two_inputs(order, names=("a", "b"), seed=0):
    keras.utils.set_random_seed(seed)
    shapes = {"a": 2, "b": 3}
    inputs = {key: keras.Input((shapes[key],), name=name) for key, name in zip("ab", names, strict=True)}
    joined = keras.layers.Concatenate()([keras.layers.Dense(2)(inputs[key]) for key in "ab"])
    outputs = [keras.layers.Dense(1, name="first")(joined), keras.layers.Dense(2, name="second")(joined)]
    model = keras.Model([inputs[key] for key in order], outputs)
    model.compile("sgd", {"first": "mse", "second": "mae"}, run_eagerly=True)
    return model


@pytest.mark.parametrize("weights", [[1, 3], [0, 1]])  # also if only a later member has a weight
def test_inputs_are_matched_by_name_and_outputs_by_position(weights):
    models = [two_inputs("ab"), two_inputs("ba", seed=1)]
    a, b = X[:, :2], X
    ensemble = untraced(EnsembleModel(models, "average", weights=weights))
    found = ensemble.predict((a, b))
    theirs = called(models[0], [a, b]), called(models[1], [b, a])
    for mine, outputs in zip(found, zip(*theirs, strict=True), strict=True):
        np.testing.assert_allclose(mine, np.average(outputs, axis=0, weights=weights), atol=1e-6)
    for both, one in zip(found, ensemble.predict({"a": a, "b": b}), strict=True):
        assert np.array_equal(both, one)
    y = {"first": X[:, :1], "second": X[:, :2]}
    expected = ((found[0] - y["first"]) ** 2).mean() + np.abs(found[1] - y["second"]).mean()
    assert ensemble.evaluate((a, b), y, return_dict=True)["loss"] == pytest.approx(expected, rel=1e-4)


def test_nested_tuples_of_inputs():
    a, b, c = (keras.Input((1,)) for _ in "abc")
    model = keras.Model([a, [b, c]], keras.layers.Dense(1)(keras.layers.Concatenate()([a, b, c])))
    model.compile("sgd", "mse", run_eagerly=True)
    x = np.arange(4, dtype=np.float32)[:, None]
    expected = called(model, [x, [x + 1, x * 2]])
    selected = greedy_ensemble([model, model], (x, (x + 1, x * 2)), expected, voting="average")
    np.testing.assert_allclose(selected.predict((x, (x + 1, x * 2))), expected, rtol=1e-6)


def test_dicts_of_inputs_and_outputs():
    def model(seed):
        keras.utils.set_random_seed(seed)
        inputs = {"a": keras.Input((2,), name="a"), "b": keras.Input((3,), name="b")}
        joined = keras.layers.Concatenate()([inputs["a"], inputs["b"]])
        made = keras.Model(inputs, {"kind": keras.layers.Dense(3, "softmax", name="kind")(joined)})
        made.compile("adam", {"kind": "sparse_categorical_crossentropy"}, run_eagerly=True)
        return made

    models, x, y = [model(0), model(1)], {"a": X[:, :2], "b": X}, np.arange(40) % 3
    ensemble = greedy_ensemble(models, x, y, "loss", 3)
    assert greedy_ensemble(models, x, {"kind": y}, "loss", 3).weights == ensemble.weights
    found = ensemble.predict(x)["kind"]
    expected = sum(weight * called(each, x)["kind"] for each, weight in zip(ensemble.models, ensemble.weights, strict=True))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert np.array_equal(ensemble.predict_classes(x), found.argmax(-1))


def test_ensembles_of_ensembles(members, outputs):
    outer = untraced(EnsembleModel([EnsembleModel(members[:2]).model, members[2]]))
    np.testing.assert_allclose(outer.predict(X), (outputs[:2].mean(0) + outputs[2]) / 2, atol=1e-6)


class Unregistered(keras.layers.Layer):
    def call(self, values):
        return 3 * values


class Largest(keras.layers.Layer):
    def call(self, values):
        return keras.ops.argmax(values, -1, keepdims=True)


def custom_softmax(values):
    return keras.ops.softmax(values)


# Checks


BAD_MODELS = {
    "none": (list, "models is empty"),
    "a single one": (unit, "expected a list"),
    "no model": (lambda: [unit(), 3], r"models\[1\]: expected"),
    "not built": (lambda: [unit(), keras.Sequential([keras.layers.Dense(3)])], r"models\[1\]: .* not built"),
    "other inputs": (lambda: [unit(), two_inputs("ab")], "same inputs"),
    "other outputs": (lambda: [unit(), unit(units=2)], "outputs of the same"),
    "integers": (lambda: [keras.Sequential([keras.Input((3,)), Largest()])], "integer dtype"),
    "batches of different sizes": (lambda: [stateful(), flat(), stateful(2)], r"models\[2\] takes batches"),
}


@pytest.mark.parametrize(("models", "message"), BAD_MODELS.values(), ids=BAD_MODELS)
def test_models_that_cannot_form_an_ensemble_are_reported(models, message):
    given = models()
    with pytest.raises(ModelError, match=message):
        EnsembleModel(given, "average")


@pytest.mark.parametrize("weights", [[1], [0, 0], [1, -1], [1, "x"]], ids=str)
def test_invalid_weights_are_reported(weights):
    with pytest.raises(ConfigurationError, match="weights=.*expected 2 numbers"):
        EnsembleModel([unit(), unit()], weights=weights)


def test_unknown_arguments_are_reported():
    with pytest.raises(ConfigurationError, match="voting='sort'.*'soft'"):
        EnsembleModel([unit()], "sort")
    with pytest.raises(ConfigurationError, match="features= requires"):
        EnsembleModel([unit()]).predict(X, features="x")
    with pytest.raises(ConfigurationError, match="does not predict classes"):
        EnsembleModel([regression()], "average").predict_classes(X)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: regression(), "'linear'"),
        (lambda: keras.Sequential([keras.Input((3,)), unit("tanh")]), "'tanh'"),
        (lambda: unit(None, loss=keras.losses.BinaryCrossentropy(from_logits=True)), "logits"),
    ],
)
def test_outputs_that_are_not_probabilities_cannot_vote(model, message):
    with pytest.raises(ConfigurationError, match=f'{message}.*voting="average"'):
        EnsembleModel([model()], "hard")
    EnsembleModel([model()], "average")


def test_outputs_that_may_be_probabilities_can_vote():
    softmax = keras.layers.Softmax()
    cast = keras.layers.Activation("linear", dtype="float32")
    for model in (
        keras.Sequential([unit(None, 4), softmax]),
        keras.Sequential([unit("softmax", 4), cast]),
        keras.Sequential([unit(None, 4), keras.layers.Lambda(custom_softmax)]),
    ):
        EnsembleModel([model], "hard")


def test_evaluate_without_a_compiled_member():
    ensemble = EnsembleModel([network(compiled=False), network(compiled=False, seed=1)])
    with pytest.raises(ModelError, match=r"ensemble\.model\.compile"):
        ensemble.evaluate(X, LABELS)
    ensemble.model.compile(loss="sparse_categorical_crossentropy", metrics=["accuracy"], run_eagerly=True)
    assert len(ensemble.evaluate(X, LABELS)) == 2
    # The first compiled member is used, at any position.
    assert len(untraced(EnsembleModel([network(compiled=False), network()])).evaluate(X, LABELS)) == 2


# Files


def test_an_ensemble_is_saved_and_loaded_with_its_compiled_metrics(members, tmp_path):
    path = tmp_path / "ensemble.zip"
    ensemble = EnsembleModel(members, weights=[1, 2, 3])
    ensemble.model.compile(loss="sparse_categorical_crossentropy", metrics=["sparse_categorical_crossentropy"])
    ensemble.save(path)
    loaded = untraced(load_ensemble_model(path))
    untraced(ensemble)
    assert (loaded.voting, loaded.weights) == ("soft", ensemble.weights)
    assert np.array_equal(loaded.predict(X), ensemble.predict(X))
    found = loaded.evaluate(X, LABELS, return_dict=True)
    assert found == ensemble.evaluate(X, LABELS, return_dict=True)
    assert "sparse_categorical_crossentropy" in found
    for model, member in zip(loaded.models, members, strict=True):
        assert int(model.optimizer.iterations) == int(member.optimizer.iterations)
    with pytest.raises(StorageError, match="pass overwrite=True"):
        loaded.save(path, overwrite=False)
    loaded.save(str(path))
    assert [file.name for file in tmp_path.iterdir()] == ["ensemble.zip"]


def test_the_ensemble_is_saved_as_one_model_that_a_process_without_ensembles_can_load(hard, tmp_path, monkeypatch):
    from keras.src.saving.object_registration import GLOBAL_CUSTOM_OBJECTS

    with pytest.raises(ConfigurationError, match="single model"):
        hard.save(tmp_path / "ensemble.keras")
    hard.model.save(tmp_path / "one.keras")
    model = keras.saving.load_model(tmp_path / "one.keras")
    assert np.array_equal(called(model, X), hard.predict(X))
    monkeypatch.delitem(GLOBAL_CUSTOM_OBJECTS, "sparkkeras>Vote")  # as in another process
    loaded = load_spark_model(tmp_path / "one.keras")
    assert np.array_equal(called(loaded.model, X), hard.predict(X))


def test_missing_custom_objects_are_reported_when_loading(tmp_path, monkeypatch):
    EnsembleModel([network(Unregistered())]).save(tmp_path / "e")
    assert load_ensemble_model(tmp_path / "e")  # this module has the class
    monkeypatch.delattr(sys.modules[__name__], "Unregistered")
    with pytest.raises(CustomObjectError, match="member 0.*custom_objects="):
        load_ensemble_model(tmp_path / "e")
    monkeypatch.undo()
    assert load_ensemble_model(tmp_path / "e", {"Unregistered": Unregistered})


def test_python_code_in_a_file_is_not_run(tmp_path):
    EnsembleModel([network(keras.layers.Lambda(lambda v: v * 2.0))]).save(tmp_path / "e")
    with pytest.raises(ModelError, match="safe_mode=False"):
        load_ensemble_model(tmp_path / "e")
    assert load_ensemble_model(tmp_path / "e", safe_mode=False)


def archive(**members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in members.items():
            file.writestr(name.replace("_", "."), content)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an ensemble file"),
        (archive(something_txt="a"), "no ensemble.json"),
        (archive(metadata_json="{}"), "load_spark_model"),
        (archive(ensemble_json="no json"), "damaged"),
        (archive(ensemble_json='{"format": 1, "members": 1}'), "damaged.*member-0.keras"),
        (archive(ensemble_json='{"format": 2, "members": 1}'), "later version"),
    ],
)
def test_files_that_do_not_hold_an_ensemble_are_reported(content, message, tmp_path):
    (tmp_path / "e").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        load_ensemble_model(tmp_path / "e")


@pytest.mark.parametrize("changed", [{"voting": "loud"}, {"weights": [1, 2]}, {"compiled": [1]}, None], ids=str)
def test_damaged_settings_and_members_are_reported(tmp_path, changed):
    EnsembleModel([unit(loss="binary_crossentropy")]).save(tmp_path / "e")
    with zipfile.ZipFile(tmp_path / "e") as file:
        settings, member = json.loads(file.read("ensemble.json")), file.read("member-0.keras")
    with zipfile.ZipFile(tmp_path / "e", "w") as file:
        file.writestr("ensemble.json", json.dumps(settings | (changed or {})))
        file.writestr("member-0.keras", member if changed else member[: len(member) // 2])
    with pytest.raises(ModelError, match="damaged|loaded" if changed else "member 0"):
        load_ensemble_model(tmp_path / "e")


# Greedy selection


def test_greedy_selection_is_never_worse_than_the_best_member_on_validation_data(members, outputs):
    ensemble = greedy_ensemble(members, X, LABELS, "accuracy", size=10, voting="hard")
    alone = [(output.argmax(-1) == LABELS).mean() for output in outputs]
    assert ensemble.evaluate(X, LABELS, return_dict=True)["accuracy"] >= max(alone) - 1e-5
    assert sum(ensemble.weights) == pytest.approx(1.0)
    assert ensemble.voting == "hard"


def test_greedy_selection_by_each_kind_of_metric(members, outputs):
    def log_loss(y_true, y_pred):
        return -np.log(y_pred[np.arange(len(y_true)), y_true]).mean()

    by_object = greedy_ensemble(members, X, LABELS, keras.losses.SparseCategoricalCrossentropy(), 6)
    assert by_object.weights == greedy_ensemble(members, X, LABELS, log_loss, 6, mode="min").weights
    worst = greedy_ensemble(members, X, LABELS, keras.metrics.SparseCategoricalAccuracy(), 1, mode="min")
    assert worst.models[0] is members[int(np.argmin((outputs.argmax(-1) == LABELS).mean(-1)))]


def test_greedy_selection_for_regression_uses_the_mean():
    models = [regression(seed=seed) for seed in range(3)]
    for model, level in zip(models, (0.0, 1.0, 5.0), strict=True):
        model.set_weights([np.zeros((3, 1)), np.array([level])])
    ensemble = greedy_ensemble(models, X, np.full((40, 1), 2.0), "mae", 4, voting="average", initial=1)
    assert ensemble.models == (models[1], models[2])
    assert ensemble.weights == (0.75, 0.25)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="TensorFlow's warnings")
def test_greedy_selection_does_not_warn_of_retracing(monkeypatch):
    """TensorFlow counts the first call of each model as retracing of one function."""
    import tensorflow as tf
    from tensorflow.python.eager.polymorphic_function import polymorphic_function

    manager = polymorphic_function._FrequentTracingDetectorManager()  # one that has not warned yet
    monkeypatch.setattr(polymorphic_function, "_frequent_tracing_detector_manager", manager)
    emitted = []
    monkeypatch.setattr(tf.get_logger(), "callHandlers", emitted.append)
    greedy_ensemble(
        [unit(None, seed=seed, loss="mse", run_eagerly=False) for seed in range(6)], X, X[:, :1], voting="average"
    )
    assert not emitted


def test_greedy_selection_applies_sample_weights():
    yes, no = (unit(seed=seed, loss="binary_crossentropy") for seed in (0, 1))
    for model, level in ((yes, 3.0), (no, -3.0)):
        model.set_weights([np.zeros((3, 1)), np.array([level])])
    y = np.array([1.0] * 10 + [0.0] * 30)
    weights = np.where(y == 1, 100.0, 1.0)
    for metric, weighted, expected in (("accuracy", None, no), ("accuracy", weights, yes), ("loss", weights, yes)):
        assert greedy_ensemble([yes, no], X, y, metric, 1, sample_weight=weighted).models == (expected,)
    with pytest.raises(ConfigurationError, match="apply weights itself"):
        greedy_ensemble([yes, no], X, y, lambda y, p: 0.0, 1, mode="min", sample_weight=weights)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"metric": "acuracy"}, ConfigurationError, "metric='acuracy'"),
        ({"metric": keras.metrics.AUC}, ConfigurationError, "not its class"),
        ({"metric": lambda y, p: 0.0}, ConfigurationError, 'set mode="min"'),
        ({"metric": lambda y, p: np.nan, "mode": "min"}, DataError, "not finite for any"),
        ({"mode": "least"}, ConfigurationError, "mode='least'"),
        ({"size": 0}, ConfigurationError, "size=0"),
        ({"models": []}, ModelError, "models is empty"),
        ({"models": [unit(), unit()]}, ConfigurationError, "compiled with a loss"),
        ({"models": [two_inputs("ab")], "voting": "average"}, ConfigurationError, "2 outputs"),
        ({"y_val": None}, DataError, "labels are missing"),
        ({"x_val": lambda worker, count: []}, DataError, "x_val is the function"),
        ({"sample_weight": np.zeros(40)}, DataError, "0 for all samples"),
        ({"x_val": X * np.nan}, DataError, "holds NaN"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_invalid_arguments_of_greedy_selection_are_reported(given, error, message):
    models = [unit(seed=seed, loss="binary_crossentropy") for seed in (0, 1)]
    with pytest.raises(error, match=message):
        greedy_ensemble(**({"models": models, "x_val": X, "y_val": np.zeros(40)} | given))


# Members with stateful layers


def stateful(size=4):
    recurrent = keras.layers.LSTM(2, stateful=True)
    return keras.Sequential([keras.Input((3, 1), batch_size=size), recurrent, keras.layers.Dense(1)])


def flat():
    return keras.Sequential([keras.Input((3, 1)), keras.layers.Flatten(), keras.layers.Dense(1)])


def test_members_with_stateful_layers_predict_whole_batches_of_one_partition(sc):
    members, x = [flat(), stateful()], X[:8, :, None]
    ensemble = EnsembleModel(members, "average")
    found = ensemble.predict(x)
    members[1].layers[0].reset_state()
    expected = np.mean([model.predict(x, batch_size=4, verbose=0) for model in members], axis=0)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    with pytest.raises(ConfigurationError, match="set batch_size=4"):
        ensemble.predict(x, batch_size=32)


@pytest.mark.parametrize(("rows", "batch_size", "message"), [(8, 32, "set batch_size=4"), (6, 4, "6 rows")])
def test_greedy_selection_rejects_batches_that_stateful_layers_cannot_take(rows, batch_size, message):
    with pytest.raises(ConfigurationError, match=message):
        greedy_ensemble([stateful()], X[:rows, :, None], X[:rows, :1], "mae", voting="average", batch_size=batch_size)
