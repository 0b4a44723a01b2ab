"""Rows that are sorted: a warning, and places at random that do not depend on the order of the source."""

import warnings

import numpy as np
import pytest

from sparkkeras import Checkpoint, ConfigurationError, DataError, SparkEnsemble, SparkModel, to_data_frame, to_simple_rdd
from tests.models import classifier

GENERATOR = np.random.default_rng(0)
X = GENERATOR.random((600, 8)).astype(np.float32)
Y = np.sort(GENERATOR.integers(0, 4, 600))
X[:, 0] += Y
WARNING = r'rows seem to be sorted\. {}.*shuffle="global"'


def rows(sc, parts, order=slice(None)):
    return sc.parallelize(list(zip(X[order], Y[order], strict=True)), parts)


def fit(data, *labels, model=None, epochs=1, spark_model=(), **arguments):
    spark_model = SparkModel(model or classifier(8, 8, 4), seed=2, **dict(spark_model))
    history = spark_model.fit(data, *labels, epochs=epochs, verbose=0, **arguments).history
    return spark_model.model.get_weights(), history


def silently(*data, **arguments):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the rows seem to be sorted")
        return fit(*data, **arguments)


def is_same(one, other):
    return all(np.array_equal(mine, theirs) for mine, theirs in zip(one[0], other[0], strict=True)) and one[1] == other[1]


def test_sorted_rows_give_a_warning_that_names_the_fix(sc, spark):
    with pytest.warns(UserWarning, match=WARNING.format(r"y is (\d) in 100% of partition \1, and in 0% of")):
        fit(rows(sc, 4))
    frame = to_data_frame(spark, X, Y).repartitionByRange(2, "label")
    with pytest.warns(UserWarning, match=WARNING.format("'label' is ")):
        fit(frame)
    fit(frame, shuffle=False)
    fit(X, Y)
    fit(to_simple_rdd(sc, X, Y, num_slices=4))
    members = [classifier(8, 8, 4, seed=seed) for seed in range(2)]
    SparkEnsemble(members, sampling="all", seed=1).fit(rows(sc, 2), verbose=0)  # each member gets all rows


def test_rows_sorted_by_a_feature_give_a_warning_that_names_the_column(spark):
    days = np.arange(600) // 20
    frame = spark.createDataFrame(
        [(float(day), float(x), int(y)) for day, (x, *_), y in zip(days, X, GENERATOR.permutation(Y), strict=True)],
        "day double, x double, label long",
    )
    with pytest.warns(UserWarning, match=WARNING.format("'day' has the mean .* in partition 0, and .* in partition 2")):
        fit(frame.repartitionByRange(3, "day"), model=classifier(2, 8, 4), features=["day", "x"])


def test_validation_rows_that_differ_from_the_others_give_a_warning(spark):
    frame = to_data_frame(spark, X, Y).coalesce(1).sortWithinPartitions("label")
    match = WARNING.format(r"'label' is 3 in \d+% of those of validation_split, .* and in \d+% of the rows to train on")
    with pytest.warns(UserWarning, match=match):
        fit(frame, validation_split=0.2)
    fit(frame)
    fit(frame, validation_split=0.2, shuffle="global")


def test_global_places_do_not_depend_on_the_order_of_the_source(sc, spark):
    expected = fit(rows(sc, 4), shuffle="global", validation_split=0.2)
    order = GENERATOR.permutation(600)
    assert is_same(fit(rows(sc, 3, order), shuffle="global", validation_split=0.2, spark_model={"num_workers": 4}), expected)
    settings = {"shuffle": "global", "validation_split": 0.2, "spark_model": {"num_workers": 3}}
    frame, reordered = to_data_frame(spark, X, Y), to_data_frame(spark, X[order], Y[order])
    assert is_same(fit(frame.repartition(4), **settings), fit(reordered.repartition(5), **settings))


def test_resuming_with_other_rows_is_an_error(sc, tmp_path):
    settings = {"shuffle": "global", "checkpoint": Checkpoint(str(tmp_path / "run")), "resume": True}
    whole = fit(rows(sc, 2), epochs=3, shuffle="global")
    fit(rows(sc, 2), epochs=1, **settings)
    assert is_same(fit(rows(sc, 2, GENERATOR.permutation(600)), epochs=3, **settings), whole)
    changed = rows(sc, 2).map(lambda row: (row[0] + np.float32(1), row[1]))
    with pytest.raises(DataError, match=r"not those of the training that is resumed.*checkpoint\(\)"):
        fit(changed, epochs=4, **settings)


def test_balanced_class_weights_are_those_of_the_rows_to_train_on(sc):
    y = (GENERATOR.random(600) < 0.2).astype(np.int64)
    data = sc.parallelize(list(zip(GENERATOR.permutation(X), y, strict=True)), 3)
    rows_of_classes = np.bincount(np.concatenate([y[start : start + 150] for start in (0, 200, 400)]))
    given = {number: 450 / (2 * count) for number, count in enumerate(rows_of_classes)}
    expected, balanced, plain = (
        fit(data, validation_split=0.25, model=classifier(8, 4, 2), class_weight=weight)
        for weight in (given, "balanced", None)
    )
    assert is_same(balanced, expected)
    assert not is_same(plain, expected)


def test_an_argument_that_does_not_fit_is_an_error_before_a_job(sc):
    with pytest.raises(ConfigurationError, match=r"^shuffle='globally': expected True, False or \"global\"\.$"):
        fit(X, Y, shuffle="globally")
    with pytest.raises(ConfigurationError, match=r'shuffle="global" redistributes stored rows, but data is a function'):
        fit(lambda worker, num_workers: iter(()), shuffle="global")
    with pytest.raises(ConfigurationError, match=r'class_weight="balanced" counts the labels before the transform'):
        fit(X, Y, class_weight="balanced", transform=lambda x, y: (x, 3 - y))


def test_malformed_rows_are_reported_with_their_place(sc):
    data = sc.parallelize([([1.0, 2.0], 0), ([1.0, float("nan")], 1)], 1)
    with pytest.raises(DataError, match="row 1 of partition 0"):
        fit(data, model=classifier(2, 4, 4), shuffle="global")


def test_an_rdd_of_arrays_of_objects(sc):
    rdd = to_simple_rdd(sc, X.astype(object), Y.astype(object), num_slices=2)
    assert is_same(fit(rdd), fit(to_simple_rdd(sc, X, Y, num_slices=2)))


def test_an_rdd_does_not_change_with_the_arrays_that_it_was_made_of(sc):
    x, y = X.copy(), Y.copy()
    rdd = to_simple_rdd(sc, x, y, num_slices=2)
    expected = fit(to_simple_rdd(sc, X, Y, num_slices=2), shuffle=False)
    model = SparkModel(classifier(8, 8, 4))
    predictions = model.predict(rdd)
    x[:], y[:] = 0, 0
    assert is_same(silently(rdd, shuffle=False), expected)
    np.testing.assert_allclose(model.predict(rdd), predictions, rtol=1e-6)
