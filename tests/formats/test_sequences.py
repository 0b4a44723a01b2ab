"""`PadSequences`, compared with ``keras.utils.pad_sequences``, on columns, rows and arrays."""

import keras
import numpy as np
import pyarrow as pa
import pytest

from sparkkeras import ConfigurationError, DataError, PadSequences, SparkModel, image_loader, register_keras_udf
from sparkkeras.data.block import Form, Structure
from sparkkeras.data.columns import Leaf
from sparkkeras.data.reader import Reader
from sparkkeras.data.schema import InputSpec, Schema
from sparkkeras.sources.frame import ColumnMapping, Selection
from sparkkeras.sources.source import as_source, as_sources

RAGGED = [[1, 2, 3, 4], [], [5], [6, 7]]
TOKENS = Schema((InputSpec("tokens", (3,)),))


@pytest.mark.parametrize("padding", ["pre", "post"])
@pytest.mark.parametrize("truncating", ["pre", "post"])
@pytest.mark.parametrize("step_shape", [(), (2,)])
def test_the_values_are_those_of_keras(padding, truncating, step_shape):
    arrays = [np.multiply.outer(sequence, np.ones(step_shape)).astype(int) for sequence in map(np.array, RAGGED)]
    expected = keras.utils.pad_sequences(arrays, 3, padding=padding, truncating=truncating, value=-1)
    loader = PadSequences(3, -1, padding, truncating, step_shape=step_shape)
    lists = [array.tolist() for array in arrays]
    column, good = loader(pa.array(lists)[1:], "c")
    np.testing.assert_array_equal(column, expected[1:])
    assert good.all()
    for rows in (arrays, lists):
        values, missing = loader.load_rows(rows)
        np.testing.assert_array_equal(values, expected)
        assert (values.dtype, missing) == (np.int64, None)
    assert loader.shape == expected.shape[1:]


def test_columns_of_other_types():
    fixed = pa.array([[1.0, 2.0]], pa.list_(pa.float32(), 2))
    assert PadSequences(3)(fixed, "c")[0].tolist() == [[0, 1, 2]]
    assert PadSequences(2, dtype="int8")(pa.array([[1, 2]]), "c")[0].dtype == np.int8
    for nothing in (pa.nulls(2), pa.array([], pa.list_(pa.int64()))):
        values, good = PadSequences(2)(nothing, "c")
        assert values.shape == (len(nothing), 2)
        assert not good.any()


@pytest.mark.parametrize("on_invalid", ["error", "drop", "allow"])
def test_nulls_follow_on_invalid(on_invalid):
    """A null that is cut off does not matter."""
    rows = [[1.0], None, [2.0, None], [None, 3.0, 4.0]]
    reader = Reader(Schema((InputSpec("x", (2,), floating=True),)), on_invalid=on_invalid)
    leaves = (Leaf(("c",), input=reader.schema.inputs[0], loader=PadSequences(2)), Leaf(("y",)))
    selection = Selection(reader, Form(Structure(), Structure()), leaves)
    read = [
        lambda: as_source(rows, reader, np.ones(4), columns=ColumnMapping(loader=PadSequences(2))).block,
        lambda: next(selection.blocks([pa.array(rows), pa.array([1, 1, 1, 1])], "partition 0", 0))[0],
    ]
    for block in read:
        if on_invalid == "error":
            with pytest.raises(DataError, match="row 1 of .*on_invalid"):
                block()
            continue
        expected = [[0, 1], [np.nan, np.nan], [2, np.nan], [3, 4]] if on_invalid == "allow" else [[0, 1], [3, 4]]
        np.testing.assert_array_equal(block().arrays[0], expected)


@pytest.mark.parametrize("convert", [list, lambda rows: np.array(rows, object), lambda rows: list(map(np.array, rows))])
def test_lists_and_arrays_of_different_lengths(convert):
    columns = ColumnMapping(loader={"tokens": PadSequences(3)})
    validation = (RAGGED[:2], np.ones(2))
    source, held_out = as_sources(convert(RAGGED), np.ones(4), None, validation, Reader(TOKENS), columns)
    assert source.block.x.tolist() == [[2, 3, 4], [0, 0, 0], [0, 0, 5], [0, 6, 7]]
    assert held_out.block.x.tolist() == [[2, 3, 4], [0, 0, 0]]


def test_rows_of_partitions():
    reader = Reader(TOKENS, loaders={"tokens": PadSequences(3, padding="post")})
    rows = [(sequence, label) for label, sequence in enumerate(RAGGED)]
    block = reader.read_rows(rows, reader.form_of(rows[0], 0), 0, 0)
    assert block.x.tolist() == [[2, 3, 4], [0, 0, 0], [5, 0, 0], [6, 7, 0]]
    assert block.y.tolist() == [0, 1, 2, 3]
    with pytest.raises(DataError, match="row 7 of partition 2 is"):
        reader.read_rows([([1], 0), (5, 1)], reader.form_of(rows[0], 0), 2, 6)


def test_labels_that_are_sequences_have_a_loader_under_the_name_of_their_output():
    schema = Schema((InputSpec("tokens", (3,)),), (InputSpec("tags", (3, 5)), InputSpec("tokens", (1,))))
    loaders = ColumnMapping(loader={"tokens": PadSequences(3), "tags": PadSequences(3, -1)})
    block = as_source(RAGGED, Reader(schema), {"tags": RAGGED, "tokens": np.ones(4)}, columns=loaders).block
    assert block.y["tags"].tolist() == [[2, 3, 4], [-1, -1, -1], [-1, -1, 5], [-1, 6, 7]]
    assert (block.x.shape, block.y["tokens"].shape) == ((4, 3), (4,))


def test_an_image_loader_still_requires_a_column():
    with pytest.raises(ConfigurationError, match="loader= requires"):
        as_source(RAGGED, Reader(TOKENS), np.ones(4), columns=ColumnMapping(loader=image_loader((3, 3))))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([["a"]], "<U1.*Encode text"),
        ([[1], [object()]], "row 1 of the arrays .*object"),
        ([1, 2], "row 0 of the arrays .*int 1"),
        ([[[1, 2]]], r"step_shape=\(2,\)"),
        ([[0.5]], "dtype='int8' would truncate"),
    ],
)
def test_errors_name_the_row_and_the_remedy(rows, message):
    loader = PadSequences(3, dtype="int8")
    with pytest.raises(DataError, match=f"x of .*{message}"):
        as_source(rows, Reader(TOKENS), np.ones(len(rows)), columns=ColumnMapping(loader=loader))


def test_errors_name_the_column_and_the_remedy():
    with pytest.raises(DataError, match=r"column 'c' .*step_shape=\(2,\)"):
        PadSequences(3)(pa.array([[[1, 2]]]), "c")
    with pytest.raises(DataError, match="value=0.5 .*set dtype"):
        PadSequences(3, 0.5)(pa.array([[1]]), "c")
    assert PadSequences(2, 0.5, dtype="float32")(pa.array([[1]]), "c")[0].tolist() == [[0.5, 1]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"maxlen": None}, "maxlen=None: .*positive"),
        ({"padding": "left"}, "padding='left' .*'post'"),
        ({"value": "0"}, "value='0'"),
        ({"dtype": "str"}, "dtype='str'"),
        ({"value": -1, "dtype": "uint8"}, "value=-1 .*dtype='uint8'"),
        ({"step_shape": 3}, r"step_shape=3: .*\(3,\)"),
    ],
)
def test_arguments_out_of_range_raise_errors(arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        PadSequences(**{"maxlen": 3, **arguments})


def test_the_type_of_a_column_is_checked():
    PadSequences(3).check("c", "array<decimal(10,2)>")
    PadSequences(3, step_shape=(2,)).check("c", "array<array<float>>")
    for kind, words in (
        ("array<array<float>>", "Set step_shape"),
        ("array<string>", "Encode text"),
        ("array<struct<item:int>>", r"df\['c'\].getField"),
    ):
        with pytest.raises(DataError, match=f"(?s)'c' .*type {kind}.*{words}"):
            PadSequences(3).check("c", kind)


def test_frames_rdds_and_sql_functions_pad_like_keras(spark, sc):
    generator = np.random.default_rng(0)
    rows = [(generator.integers(1, 20, generator.integers(1, 9)).tolist(), number % 2) for number in range(40)]
    frame = spark.createDataFrame(rows, "tokens array<int>, label int").coalesce(1)
    loader = PadSequences(6, padding="post")
    padded = keras.utils.pad_sequences([tokens for tokens, _ in rows], 6, padding="post")
    labels = np.array([label for _, label in rows])

    def model():
        keras.utils.set_random_seed(1)
        layers = [keras.Input((None,)), keras.layers.Embedding(20, 4, mask_zero=True), keras.layers.GlobalAveragePooling1D()]
        made = keras.Sequential([*layers, keras.layers.Dense(1, "sigmoid")])
        made.compile("sgd", "binary_crossentropy", run_eagerly=True)
        return made

    expected = model()
    expected.fit(padded, labels, batch_size=8, shuffle=False, verbose=0)
    spark_model = SparkModel(model(), batch_size=8)
    spark_model.fit(frame, features="tokens", loader=loader, shuffle=False, verbose=0)
    for ours, theirs in zip(spark_model.model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    scores = expected.predict(padded, verbose=0)
    predicted = spark_model.predict(frame, features="tokens", loader=loader)
    register_keras_udf(spark, "padded_score", spark_model.model, loader=loader)
    found = predicted.selectExpr("prediction", "padded_score(tokens) AS score").collect()
    np.testing.assert_allclose([tuple(row) for row in found], np.repeat(scores, 2, axis=1), atol=1e-5)
    np.testing.assert_allclose(spark_model.predict(sc.parallelize(rows, 1), loader=loader), scores, atol=1e-5)
