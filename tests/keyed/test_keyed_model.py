"""A model for each key: the same as separate Keras fits, whatever else happens to other keys."""

import datetime

import keras
import numpy as np
import pytest
from pyspark.sql import functions

from sparkkeras import ConfigurationError, DataError, KeyedModel, ModelError, SparkModel, StorageError, WorkerError
from sparkkeras.keyed.rows import deal
from sparkkeras.keyed.tasks import dump_weights, load_weights
from sparkkeras.weights import Layout
from tests.models import regression

COUNTS = {"a": 70, "b": 33, "c": 5}


def rows(counts, seed=0):
    """Rows ``(store, day, x, y)``, in which y depends on x in another way for each store."""
    draw = np.random.default_rng(seed)
    found = []
    for number, (store, count) in enumerate(counts.items()):
        x = draw.random((count, 3)).astype("float32")
        y = x @ np.array([number + 1, -number, 2]) + number
        days = enumerate(zip(x.tolist(), y.tolist(), strict=True))
        found += [(store, day, features, label) for day, (features, label) in days]
    return found


def frame_of(spark, found):
    mixed = [found[index] for index in np.random.default_rng(1).permutation(len(found))]
    return spark.createDataFrame(mixed, "store string, day int, inputs array<float>, y double")


@pytest.fixture
def stores(spark):
    return frame_of(spark, rows(COUNTS))


FIT = {"features": "inputs", "label": "y", "order_by": "day", "epochs": 3, "verbose": 0}


def weights(model):
    return np.concatenate([np.ravel(each) for each in model.get_weights()])


def cells(keyed):
    """The weights by store, as the table has them: one job, while each of ``keyed.models`` needs one."""
    return {row.store: bytes(row.weights) for row in keyed._table.collect() if row.weights is not None}


def fits(keyed):
    """The number of the fit that has trained each store."""
    return {row.store: row.fit for row in keyed._table.collect()}


def by_store(frame):
    return {row.store: row for row in frame.collect()}


@pytest.mark.core
def test_each_model_trains_validates_predicts_and_evaluates_as_a_separate_one(stores):
    keyed = KeyedModel(regression(metrics=["mae"]), "store")
    metrics = by_store(keyed.fit(stores, shuffle=False, validation_split=0.2, **FIT))
    scored = keyed.predict(stores.withColumn("kept", functions.col("day") * 2)).collect()
    evaluated = by_store(keyed.evaluate(stores))
    assert set(keyed.models) == set(COUNTS)
    assert len(keyed.models) == 3
    assert len(scored) == sum(COUNTS.values())
    for store, count in COUNTS.items():
        mine = sorted((row for row in scored if row.store == store), key=lambda row: row.day)
        x, y = np.array([row.inputs for row in mine], "float32"), np.array([row.y for row in mine], "float32")
        model = regression(metrics=["mae"], run_eagerly=True)
        logs = model.fit(x, y, epochs=3, shuffle=False, validation_split=0.2, verbose=0).history
        np.testing.assert_allclose(weights(keyed.models[store]), weights(model), rtol=1e-5, atol=1e-6)
        found = metrics[store]
        assert (found.rows, found.epochs, found.error) == (count, 3, None)
        assert found.logs == pytest.approx({name: values[-1] for name, values in logs.items()}, rel=1e-5)
        assert (found.loss, found.val_loss) == (found.logs["loss"], found.logs["val_loss"])
        assert [row.kept for row in mine] == list(range(0, 2 * count, 2))
        np.testing.assert_allclose(
            [row.prediction for row in mine], np.ravel(keras.ops.convert_to_numpy(model(x))), rtol=1e-4, atol=1e-5
        )
        assert evaluated[store].loss == pytest.approx(model.evaluate(x, y, verbose=0)[0], rel=1e-4)
        assert evaluated[store].rows == count


def test_a_seed_gives_the_same_models_in_whatever_order_rows_arrive(spark):
    found = rows(COUNTS)
    first, second = (KeyedModel(regression(), "store", seed=3) for _ in range(2))
    given = {**FIT, "order_by": None}
    first.fit(frame_of(spark, found), **given)
    second.fit(frame_of(spark, found[::-1]).repartition(5), **given)
    other = KeyedModel(regression(), "store", seed=4)
    other.fit(frame_of(spark, found), **given)
    assert cells(first) == cells(second)
    assert cells(first)["a"] != cells(other)["a"]


class StopAfterTwo(keras.callbacks.Callback):
    """Counts the epochs that this object has seen, which a copy for another key must not."""

    seen = 0

    def on_epoch_end(self, epoch, logs=None):
        self.seen += 1
        self.model.stop_training = self.seen == 2


def test_each_key_has_its_own_callbacks(spark):
    stores = frame_of(spark, rows(dict.fromkeys("abcdefghi", 2)))  # more than partitions, so that a worker has several
    callbacks = [StopAfterTwo(), keras.callbacks.EarlyStopping("loss", patience=9)]
    metrics = KeyedModel(regression(), "store").fit(stores, callbacks=callbacks, **{**FIT, "epochs": 5})
    assert {row.epochs for row in metrics.collect()} == {2}


def test_a_key_that_fails_does_not_stop_the_others_and_is_tried_again(spark):
    found = rows(COUNTS)
    found += [("nan", 0, [1.0, float("nan"), 0.0], 1.0), ("one", 0, [0.0] * 3, 1.0)]
    found += [("large", day, [1e30] * 3, 1e30) for day in range(2)]
    frame = frame_of(spark, found)
    keyed = KeyedModel(regression(), "store")
    with pytest.warns(UserWarning, match="3 of 6 keys"):
        metrics = by_store(keyed.fit(frame, validation_split=0.4, **FIT))
    assert "not finite" in metrics["nan"].error or "NaN" in metrics["nan"].error
    assert "clipnorm" in metrics["large"].error
    assert "validation_split" in metrics["one"].error
    assert metrics["a"].error is None
    assert set(keyed.models) == set(COUNTS)
    with pytest.raises(KeyError, match="clipnorm"):
        keyed.models["large"]
    assert "large" not in keyed.models
    scored = keyed.predict(frame.where("store != 'nan'")).groupBy("store").agg(functions.count("prediction").alias("n"))
    assert {row.store: row.n for row in scored.collect()} == {**COUNTS, "large": 0, "one": 0}
    errors = by_store(keyed.evaluate(frame.where("store != 'nan'")))
    assert "no model" in errors["one"].error
    assert errors["a"].error is None
    with pytest.warns(UserWarning, match="3 of 3 keys"):
        keyed.fit(frame, validation_split=0.4, **FIT)
    keyed.fit(
        frame_of(spark, [*rows(COUNTS), *(("one", day, [0.0] * 3, 1.0) for day in range(5))]), validation_split=0.4, **FIT
    )
    assert set(keyed.models) == {*COUNTS, "one"}


def test_small_batches_of_spark_change_nothing(stores, spark):
    found = []
    for size in (10_000, 7):
        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", size)
        keyed = KeyedModel(regression(), "store")
        keyed.fit(stores, validation_split=0.2, **FIT)
        predicted = sorted((row.store, row.day, row.prediction) for row in keyed.predict(stores).collect())
        found.append((cells(keyed), predicted, sorted((row.store, row.loss) for row in keyed.evaluate(stores).collect())))
    assert found[0] == found[1]


def test_a_model_that_was_trained_on_spark_before(stores):
    model = regression()
    SparkModel(model).fit(stores, features="inputs", label="y", epochs=1, verbose=0)  # traced with several steps at a time
    keyed = KeyedModel(model, "store")
    metrics = by_store(keyed.fit(stores.where("store = 'a'"), shuffle=False, **FIT))
    start = model.get_weights()
    mine = [row for row in rows(COUNTS) if row[0] == "a"]
    expected = regression(run_eagerly=True)
    expected.set_weights(start)
    expected.fit(np.array([row[2] for row in mine]), np.array([row[3] for row in mine]), epochs=3, shuffle=False, verbose=0)
    np.testing.assert_allclose(weights(keyed.models["a"]), weights(expected), rtol=1e-5, atol=1e-6)
    assert metrics["a"].loss == pytest.approx(expected.history.history["loss"][-1], rel=1e-4)


def test_another_architecture_begins_a_new_table(stores, tmp_path):
    path = str(tmp_path / "models")
    keyed = KeyedModel(regression(run_eagerly=True), "store")
    keyed.fit(stores, save_to=path, **FIT)
    keyed.model = regression(optimizer=keras.optimizers.Adam(), run_eagerly=True)
    with pytest.raises(ModelError, match="fit again"):
        keyed.predict(stores)
    with pytest.warns(UserWarning, match="another model"):
        keyed.fit(stores.where("store = 'a'"), save_to=path, **FIT)
    assert set(keyed.models) == {"a"}
    assert set(KeyedModel.load(path).models) == {"a"}
    keyed.model = regression(run_eagerly=True)
    keyed.fit(stores.where("store = 'b'"), **FIT)
    assert set(keyed.models) == {"b"}
    keyed.model = keras.Sequential([keras.Input((3,), name="other"), keras.layers.Dense(1)])  # the same with other names
    keyed.model.compile(keras.optimizers.SGD(0.05, name="sgd"), "mse", run_eagerly=True)
    keyed.fit(stores.where("store = 'c'"), **FIT)
    assert set(keyed.models) == {"b", "c"}


def test_an_adapted_layer_is_a_part_of_the_model(stores):
    scale = keras.layers.Normalization(name="scale")
    model = keras.Sequential([keras.Input((3,), name="x"), scale, keras.layers.Dense(1, name="y")])
    model.compile("sgd", "mse", run_eagerly=True)
    scale.adapt(2 * np.eye(3))
    keyed = KeyedModel(model, "store")
    keyed.fit(stores, **FIT)
    scale.adapt(np.eye(3))
    with pytest.raises(ModelError, match="fit again"):
        keyed.predict(stores)


def test_training_goes_on_from_the_initial_weights_in_the_folder(stores, tmp_path):
    path = str(tmp_path / "models")
    KeyedModel(regression(seed=1), "store").fit(stores.where("store = 'a'"), save_to=path, **FIT)
    keyed = KeyedModel(regression(seed=2), "store")
    with pytest.warns(UserWarning, match="other weights"):
        keyed.fit(stores, save_to=path, **FIT)
    expected = KeyedModel(regression(seed=1), "store")
    expected.fit(stores, **FIT)
    expected.fit(stores, save_to=str(tmp_path / "all"), **FIT)  # also the models that are in memory
    assert set(KeyedModel.load(str(tmp_path / "all")).models) == set(COUNTS)
    assert cells(keyed) == cells(expected)
    assert fits(keyed) == {"a": 1, "b": 2, "c": 2}


def test_training_that_fails_for_all_keys_raises_an_error(spark):
    frame = frame_of(spark, [("a", 0, [1e30] * 3, 1e30), ("b", 0, [1e30] * 3, 1e30)])
    with pytest.raises(WorkerError, match="all 2 keys.*clipnorm"):
        KeyedModel(regression(), "store").fit(frame, **FIT)


def test_keys_without_a_model_get_null_or_a_default(stores, spark):
    keyed, common = KeyedModel(regression(), "store"), regression(seed=5)
    keyed.fit(stores.where("store = 'a'"), **FIT)
    nulls = stores.withColumn("store", functions.when(functions.col("store") != "c", functions.col("store")))
    assert keyed.predict(nulls).where("store IS NULL AND prediction IS NULL").count() == 5
    others = frame_of(spark, rows({"a": 2, "z": 4}))
    assert [row.prediction is None for row in keyed.predict(others).orderBy("store").collect()] == [False] * 2 + [True] * 4
    scored = [row for row in keyed.transform(others, default=common).collect() if row.store == "z"]
    expected = common(np.array([row.inputs for row in scored], "float32"))
    np.testing.assert_allclose([row.prediction for row in scored], np.ravel(expected), rtol=1e-5)
    assert by_store(keyed.evaluate(others, default=common))["z"].error is None
    with pytest.raises(ModelError, match="default"):
        keyed.predict(others, default=regression(width=4))


def test_another_fit_trains_only_keys_that_have_changed(stores, spark):
    model = regression()
    keyed = KeyedModel(model, "store")
    keyed.fit(stores, **FIT)
    before = fits(keyed)
    changed = rows({**COUNTS, "d": 4})
    changed[70] = (*changed[70][:3], 5.0)  # a row of b
    keyed.fit(frame_of(spark, changed), **FIT)
    after = fits(keyed)
    assert {store for store in after if after[store] != before.get(store)} == {"b", "d"}
    fresh = KeyedModel(model, "store")
    fresh.fit(frame_of(spark, changed), **FIT)
    assert cells(keyed) == cells(fresh)
    keyed.fit(frame_of(spark, changed[::-1]), **FIT)
    assert fits(keyed) == after
    keyed.fit(frame_of(spark, changed), **{**FIT, "epochs": 4})
    assert {row.epochs for row in keyed.metrics.collect()} == {4}


def test_the_table_of_models_can_be_loaded(stores, tmp_path):
    saved, written = str(tmp_path / "saved"), str(tmp_path / "written")
    keyed = KeyedModel(regression(), "store", batch_size=16, seed=2)
    keyed.fit(stores, save_to=written, **FIT)
    keyed.save(saved)
    with pytest.raises(StorageError, match="overwrite"):
        keyed.save(saved)
    predicted = {(row.store, row.day): row.prediction for row in keyed.predict(stores).collect()}
    for path in (saved, written):
        loaded = KeyedModel.load(path)
        assert (loaded.key, loaded.batch_size, loaded.seed) == (("store",), 16, 2)
        assert loaded._architecture == keyed._architecture
        assert by_store(loaded.metrics) == by_store(keyed.metrics)
        assert cells(loaded) == cells(keyed)
        assert {(row.store, row.day): row.prediction for row in loaded.predict(stores).collect()} == predicted


def test_interrupted_training_goes_on(spark, tmp_path, monkeypatch):
    from sparkkeras.keyed import table, training

    monkeypatch.setattr(training, "KEYS_PER_JOB", 1)  # for each slot, so that there are three jobs
    counts = {store: 10 + number for number, store in enumerate("abcdef")}
    stores, path, written = frame_of(spark, rows(counts)), str(tmp_path / "models"), []
    run = table.run

    def interrupted(cluster, action):
        written.append(action)
        if len(written) == 3:  # the model, two keys, and now
            raise KeyboardInterrupt
        run(cluster, action)

    monkeypatch.setattr(table, "run", interrupted)
    keyed = KeyedModel(regression(), "store")
    with pytest.raises(KeyboardInterrupt):
        keyed.fit(stores, save_to=path, **FIT)
    done = set(KeyedModel.load(path).models)
    assert len(done) == 2
    keyed.fit(stores, save_to=path, **FIT)
    at_once = KeyedModel(regression(), "store")
    at_once.fit(stores, **FIT)
    numbers = fits(keyed)
    assert {store for store in numbers if numbers[store] == min(numbers.values())} == done
    assert cells(keyed) == cells(at_once)
    with pytest.raises(DataError, match="other keys"):
        KeyedModel(regression(), "day").fit(stores, save_to=path, **{**FIT, "order_by": None})
    stores.write.parquet(str(tmp_path / "rows"))
    with pytest.raises(StorageError, match="not a table of models"):
        keyed.fit(stores, save_to=str(tmp_path / "rows"), **FIT)


def test_keys_keep_their_types(spark):
    days = [datetime.date(2024, 1, day) for day in (1, 2)]
    found = [(17, day, [float(number)], 2.0 * number) for day in days for number in range(4)]
    frame = spark.createDataFrame(found, "store long, day date, x array<float>, y double")
    keyed = KeyedModel(regression(width=1, run_eagerly=True), ["store", "day"])
    keyed.fit(frame, features="x", label="y", verbose=0)
    assert set(keyed.models) == {(17, day) for day in days}
    assert keyed.models[17, days[1]].count_params() == 2
    with pytest.raises(KeyError, match="store, day"):
        keyed.models[17]
    with pytest.raises(KeyError):
        keyed.models[18, days[0]]
    one = KeyedModel(regression(width=1, run_eagerly=True), "store")
    one.fit(frame, features="x", label="y", verbose=0)
    assert list(one.models) == [17]
    assert 17 in one.models
    assert "z" not in one.models
    assert "17" not in one.models
    assert np.int64(17) in one.models
    with pytest.raises(DataError, match="Cast"):
        one.predict(frame.withColumn("store", functions.col("store").cast("string")))


def test_several_outputs_class_weights_and_a_transform(spark):
    draw = np.random.default_rng(1)
    found = [(key, draw.random(2).tolist(), int(draw.integers(2))) for key in "ab" for _ in range(20)]
    frame = spark.createDataFrame(found, "k string, x array<float>, y int")
    inputs = keras.Input((2,), name="x")
    outputs = [keras.layers.Dense(2, "softmax", name="kind")(inputs), keras.layers.Dense(1, name="size")(inputs)]
    model = keras.Model(inputs, outputs)
    model.compile("sgd", {"kind": "sparse_categorical_crossentropy", "size": "mse"}, run_eagerly=True)
    keyed = KeyedModel(model, "k")
    keyed.fit(frame, features="x", label={"kind": "y", "size": "y"}, verbose=0)
    scored = keyed.predict(frame, {"kind": "p", "size": "s"}).collect()
    assert len(scored) == 40
    assert all(len(row.p) == 2 and isinstance(row.s, float) for row in scored)

    one = keras.Sequential([inputs, keras.layers.Dense(2, "softmax")])
    one.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    weighted = KeyedModel(one, "k")
    given = {"features": "x", "label": "y", "verbose": 0, "shuffle": False, "batch_size": 20}
    plain, weightless, flipped = (
        [by_key.loss for by_key in weighted.fit(frame, **options, **given).orderBy("k").collect()]
        for options in ({}, {"class_weight": {0: 0.0}}, {"transform": lambda x, y: (x, 1 - y)})
    )
    assert all(loss < whole for loss, whole in zip(weightless, plain, strict=True))
    assert len(flipped) == 2
    assert flipped != plain
    with pytest.warns(UserWarning, match="transform"):
        weighted.predict(frame)


def test_wrong_arguments_are_rejected_before_a_job(stores, spark):
    model = regression()
    keyed = KeyedModel(model, "store")
    with pytest.raises(ConfigurationError, match="call fit first"):
        keyed.metrics  # noqa: B018
    for error, match, call in [
        (DataError, "'shop'", lambda: KeyedModel(model, "shop").fit(stores, **FIT)),
        (DataError, "double", lambda: KeyedModel(model, "y").fit(stores, **FIT)),
        (DataError, "'price'", lambda: keyed.fit(stores, **{**FIT, "features": "price"})),
        (DataError, "'week'", lambda: keyed.fit(stores, **{**FIT, "order_by": "week"})),
        (
            ConfigurationError,
            "save_to",
            lambda: keyed.fit(stores, callbacks=keras.callbacks.ModelCheckpoint("m.keras"), **FIT),
        ),
        (
            ConfigurationError,
            "validation_split=",
            lambda: keyed.fit(stores, callbacks=keras.callbacks.EarlyStopping(), **FIT),
        ),
        (ConfigurationError, "order_by", lambda: keyed.fit(stores, **{**FIT, "order_by": None}, validation_split=0.1)),
        (DataError, "createDataFrame", lambda: keyed.fit([1, 2])),
        (ConfigurationError, "epochs", lambda: keyed.fit(stores, **{**FIT, "epochs": 0})),
        (ConfigurationError, "key", lambda: KeyedModel(model, [])),
        (ConfigurationError, "twice", lambda: KeyedModel(model, ["store", "store"])),
        (ConfigurationError, "Rename", lambda: KeyedModel(model, "loss")),
        (ModelError, "compile", lambda: KeyedModel(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), "store")),
        (StorageError, "no table", lambda: KeyedModel.load("there/is/no/such/table", spark)),
    ]:
        with pytest.raises(error, match=match):
            call()


def test_null_keys_and_no_rows_are_errors(stores):
    keyed = KeyedModel(regression(), "store")
    nulls = stores.withColumn("store", functions.when(functions.col("store") != "c", functions.col("store")))
    with pytest.raises(DataError, match="5 rows.*dropna"):
        keyed.fit(nulls, **FIT)
    with pytest.raises(DataError, match="no rows"):
        keyed.fit(stores.where("day < 0"), **FIT)


def test_the_largest_part_has_few_more_rows_than_the_others():
    sizes = np.random.default_rng(0).pareto(1.0, 1000).astype(int) + 1
    loads = np.bincount(deal(sizes, 8), sizes, 8)
    assert loads.max() <= max(sizes.max(), 4 / 3 * sizes.sum() / 8)


def test_weights_of_all_dtypes_are_the_same_in_a_cell():
    arrays = [np.ones((2, 3), "float32"), np.array(7, "int64"), np.full(4, 0.5, "float16"), np.array([1, 2], "uint32")]
    layout = Layout.of(arrays)
    found = layout.unpack(load_weights(dump_weights(layout.pack(arrays)), layout))
    for array, other in zip(arrays, found, strict=True):
        np.testing.assert_array_equal(array, other)
        assert array.dtype == other.dtype
    with pytest.raises(DataError, match="other variables"):
        load_weights(b"1234", layout)
