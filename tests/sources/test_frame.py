"""Selecting the columns of a DataFrame for a model; errors name the column before any job starts."""

import re
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from pyspark.ml.linalg import VectorUDT
from pyspark.mllib.linalg import VectorUDT as OldVectorUDT
from pyspark.sql import types

from sparkkeras import ConfigurationError, DataError
from sparkkeras.data.block import Form, Structure
from sparkkeras.data.reader import Reader
from sparkkeras.data.schema import InputSpec, Schema
from sparkkeras.sources.frame import ColumnMapping

ONE = Schema((InputSpec("x", (3,), floating=True),), (InputSpec("y", (1,), floating=True),))
TWO = Schema((InputSpec("user", (2,)), InputSpec("item", (1,))), (InputSpec("click", (1,)), InputSpec("price", (1,))))
UNKNOWN = Schema()


def frame(spark, columns):
    """An empty DataFrame with a schema: a DDL string, or fields."""
    return spark.createDataFrame([], columns)


def select(frame, schema=ONE, labelled=False, on_invalid="error", **named):
    return ColumnMapping(**named).select(frame, Reader(schema, labelled, on_invalid))


def error_of(kind, *given, **named):
    with pytest.raises(kind) as caught:
        select(*given, **named)
    return str(caught.value)


# Default columns


@pytest.mark.parametrize(
    ("columns", "schema", "named", "names"),
    [
        ("x array<float>, y int", ONE, {}, ["x", "y"]),
        ("price int, item int, click int, user array<int>", TWO, {}, ["user", "item", "click", "price"]),
        (
            "Item int, user array<int>, price int, click int",
            TWO,
            {"features": ["Item", "user"], "label": ["price", "click"]},
            ["user", "Item", "click", "price"],
        ),
        ("user array<int>, item int, paid double", TWO, {"label": {"price": "paid"}}, ["user", "item", "paid"]),
        (
            "features int, user array<int>, item int, click int, price int",
            TWO,
            {"features": "features", "label": "label"},  # the defaults in Spark ML
            ["user", "item", "click", "price"],
        ),
    ],
)
def test_columns_are_found_by_the_names_of_inputs_and_outputs(spark, columns, schema, named, names):
    assert select(frame(spark, columns), schema, True, **named).names == names


def test_columns_of_a_single_input_and_output_by_name_are_no_dicts(spark):
    named = {"features": {"x": "a"}, "label": {"y": "b"}, "sample_weight": {"y": "b"}}
    found = select(frame(spark, "a array<float>, b int"), labelled=True, **named)
    assert found.form == Form(Structure(), Structure(), Structure())


def test_the_error_for_missing_columns_lists_the_existing_ones(spark):
    message = error_of(ConfigurationError, frame(spark, "a int, b int"))
    assert message == (
        "features= (in Spark ML featuresCol) is missing, and the DataFrame has no column 'features' and no columns with the "
        "names of the model's inputs (x). Its columns: 'a', 'b'."
    )
    assert "no column 'features'." in error_of(ConfigurationError, frame(spark, "a int"), UNKNOWN)
    with pytest.raises(ConfigurationError, match="no columns with the"):
        select(frame(spark, "features int"), TWO, features="features")


# Named columns


def test_columns_of_several_inputs_are_matched_in_order_or_by_name(spark):
    given = frame(spark, "age int, income int, item int, clicked boolean, paid double, u array<int>")
    by_name = {"item": "item", "user": ["age", "income"]}
    found = select(given, TWO, True, features=by_name, label=["clicked", "paid"])
    assert found.names == ["item", "age", "income", "clicked", "paid"]
    assert found.form == Form(Structure.named(("item", "user")), Structure.several(2))
    assert [leaf.input.name for leaf in found.leaves[:2]] == ["item", "user"]
    assert select(given, TWO, features=["u", "item"]).form.x == Structure.several(2)


def test_columns_of_nested_inputs_and_outputs(spark):
    schema = Schema(
        tuple(InputSpec(name, (1,)) for name in ("a", "b/d", "b/c")),
        tuple(InputSpec(name, (1,)) for name in ("u", "v/0", "v/1")),
        x=Structure((("a",), ("b", "d"), ("b", "c"))),
        y=Structure((("u",), ("v", 0), ("v", 1))),
    )
    given = frame(spark, "a int, b struct<c: int, d: int>, u int, p int, q int, w int")
    features, label = {"b": {"c": "b.c", "d": "b.d"}, "a": "a"}, {"u": "u", "v": ["p", "q"]}
    found = select(given, schema, True, features=features, label=label, sample_weight={"v": ["w", "p"], "u": "w"})
    assert found.names[:6] == ["a", "b.d", "b.c", "u", "p", "q"]
    assert [leaf.input.name for leaf in found.leaves[:3]] == ["a", "b/d", "b/c"]
    assert found.form.labels[5:] == ["y['v'][1]", "sample_weight['u']", "sample_weight['v'][0]", "sample_weight['v'][1]"]
    assert select(given, schema).names == ["a", "b.d", "b.c"]  # by default, fields of structs
    assert select(given, schema, features=["b.c", "a", "b.d"]).names == ["a", "b.d", "b.c"]  # fields go by name, too
    with pytest.raises(ConfigurationError, match=r"'b/x'\], .*\{'a': column, 'b': \{'d': column"):
        select(given, schema, features={"a": "a", "b": {"x": "p"}})
    with pytest.raises(ConfigurationError, match="by position .*'b.c' .*'b/c'"):
        select(given, schema, features=["a", "b.c", "p"])


def test_columns_of_nested_tuples(spark):
    structure = Structure(((0,), (1, 0), (1, 1)))
    schema = Schema(tuple(InputSpec(name, (1,)) for name in ("0", "1/0", "1/1")), x=structure)
    given = frame(spark, "a int, b int, c int")
    found = select(given, schema, features=["a", ["b", "c"]])
    assert (found.form.x, found.names) == (structure, ["a", "b", "c"])
    with pytest.raises(ConfigurationError, match=r"features=\(column, \(column, column"):
        select(given, schema, features=["a", ["b"]])


@dataclass(frozen=True)
class Texts:
    """Loads texts."""

    shape: tuple[int, ...] = (3,)
    on_error: str = "error"

    def check(self, name, kind):
        if kind != "string":
            raise DataError(f"column {name!r} is {kind}, not text.")

    def __call__(self, column, name):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("schema", "named", "message"),
    [
        (ONE, {"features": 5}, "features is int 5"),
        (ONE, {"features": [SimpleNamespace(alias=1)]}, "names of columns instead"),
        (ONE, {"features": np.array(["a", "b"])}, r"features=list\(...\)"),
        (TWO, {"features": ["a", ["b", "c"]]}, r"features=\{name: \[columns\]\}"),
        (TWO, {"features": ["a", "b", "c"]}, r"2 inputs: pass one"),
        (ONE, {"features": ["a", "b", "a"]}, "column 'a' twice"),
        (TWO, {"features": {"user": ["a", "b"]}}, r"keys \['user'\]"),
        (TWO, {"labelled": True, "label": {"prize": "a"}}, "no output 'prize'. .*'price'"),
        (TWO, {"labelled": True, "label": ["a", "b"], "sample_weight": {"click": "c"}}, r"sample_weight .*\['click'\]"),
        (ONE, {"labelled": True, "sample_weight": ["a", "b"]}, "sample_weight=.*one column"),
        (TWO, {"features": ["item", "a"]}, "'user' gets 'item'"),
        (ONE, {"features": ["a", "s"], "loader": Texts()}, "a loader takes one"),
        (ONE, {"features": "s", "loader": {"z": Texts()}}, "loader: .*'z'. Known: 'x', 'y'"),
        (TWO, {"features": ["s", "b"], "loader": Texts()}, r"\{input name: loader\}"),
        (TWO, {"features": ["s", "b"], "loader": {"user": Texts()}}, r"shape \(3,\), .*'user'"),
        (ONE, {"features": "s", "loader": Texts}, r"loader=Texts\(...\)"),
    ],
)
def test_invalid_names_of_columns_and_loaders_raise_an_error(spark, schema, named, message):
    numbers = "a int, b int, c int, features array<int>, label int, user array<int>, item int, click int, price int"
    given = frame(spark, f"s string, {numbers}")
    with pytest.raises(ConfigurationError, match=message):
        select(given, schema, **named)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"features": "user.agge"}, "'user.agge'. Known: 'user.age'"),
        ({"features": "x", "labelled": True, "label": "bytes"}, "'bytes' has the type binary"),
        ({"features": "x", "labelled": True, "label": "text"}, "'text' has the type string"),
        ({"features": ["vectors", "age"]}, "vectors, age have 4 values"),  # by the metadata
    ],
)
def test_unsuitable_columns_raise_an_error(spark, named, message):
    fields = types.StructType.fromDDL("age int, user struct<age: int>, x array<float>, text string, bytes binary")
    with pytest.raises(DataError, match=message):
        select(frame(spark, fields.add("vectors", VectorUDT(), metadata={"ml_attr": {"num_attrs": 3}})), **named)


# Names


def test_names_may_contain_any_characters(spark):
    given = spark.createDataFrame([(1, 2, (3,))], "`a.b` int, `ti``ck` int, user struct<`age.now`: int>")
    names = ["a.b", "ti`ck", "user.age.now"]
    found = select(given, UNKNOWN, features=names)
    assert found.names == names
    assert found.narrowed(given).columns == ["c0", "c1", "c2"]
    spark.conf.set("spark.sql.parser.quotedRegexColumnNames", "true")
    assert tuple(found.narrowed(given).first()) == (1, 2, 3)
    packed = replace(found, packs=((0, 2),))
    assert tuple(given.select(packed.columns(given)).first()) == (2, [1, 3])


def test_many_columns_of_a_type_travel_as_one(spark):
    """Each keeps its place, its type and its nulls."""
    numbers = [None if number == 7 else number if number % 2 else float(number) for number in range(36)]
    columns = [f"x{number} {'int' if number % 2 else 'double'}" for number in range(36)]
    given = spark.createDataFrame([(True, *numbers, [0.5])], ", ".join(["flag boolean", *columns, "list array<double>"]))
    found = select(given, UNKNOWN, features=given.columns)
    table = found.narrowed(given).toArrow().combine_chunks()
    assert table.num_columns == 4  # the boolean, the array, and one each for the types
    (values,) = found.read([column.chunk(0) for column in table.columns])
    assert [part.name for part in values.parts if part.good is not None] == ["column 'x7'"]
    assert np.delete(values.values[0], 8).tolist() == [1, *numbers[:7], *numbers[8:], 0.5]


def test_names_are_case_insensitive_unless_that_is_ambiguous(spark):
    kinds = "Age int, User struct<Size: int, Age: int>, Label double, `User.Age` int"
    given = spark.createDataFrame([(1, (2, 9), 3.0, 4)], kinds)
    found = select(given, UNKNOWN, True, features=["age", "user.size", "user.age"])
    assert tuple(found.narrowed(given).first()) == (1, 2, 4, 3.0)
    spark.conf.set("spark.sql.caseSensitive", "true")
    given = spark.createDataFrame([(1, 2)], "a int, A int")
    assert tuple(select(given, UNKNOWN, features=["A", "a"]).narrowed(given).first()) == (2, 1)
    spark.conf.set("spark.sql.caseSensitive", "false")
    with pytest.raises(DataError, match=r"\('a', 'A'\): rename them"):
        select(frame(spark, types.StructType.fromDDL("a int, A int")), UNKNOWN, features="a")


def test_only_selecting_a_duplicate_column_raises_an_error(spark):
    given = frame(spark, "a int, b int").join(frame(spark, "b int, c int"))
    with pytest.raises(DataError, match=r"\('b', 'b'\): rename them"):
        select(given, UNKNOWN, features=["a", "b"])
    assert select(given, UNKNOWN, features=["a", "c"]).narrowed(given).columns == ["c0", "c1"]


# Types


def test_supported_types(spark):
    numbers = "a tinyint, b double, c decimal(10,2), d boolean, e binary"
    arrays = types.StructType.fromDDL("f array<array<boolean>>, g array<decimal(3,1)>")
    arrays.add("h", VectorUDT()).add("i", OldVectorUDT())
    for shape, columns in (((1,), numbers), ((3,), arrays)):
        given = frame(spark, columns)
        for name in given.columns:
            assert select(given, Schema((InputSpec("x", shape),)), features=name).names == [name]


def test_the_error_for_an_unsupported_type_names_the_column_and_has_advice(spark):
    nested = "d struct<a: int>, e map<string,int>, f array<struct<a: int>>, g array<binary>"
    given = frame(spark, f"a string, b timestamp, c date, {nested}")
    for name, kind, advice in (
        ("a", "string", "StringIndexer"),
        ("b", "timestamp", "unix_timestamp"),
        ("c", "date", "unix_date"),
        ("d", "struct", r"\(struct.field\)"),
        ("e", "map", r"m\['key'\]"),
        ("f", "array", "s.field of an array"),
        ("g", "array", "Bytes require"),
    ):
        with pytest.raises(DataError, match=f"'{name}' has the type {kind}.*{advice}"):
            select(given, features=name)


def test_allowed_nulls_are_rejected_where_all_features_are_strings(spark):
    schema = Schema((InputSpec("text", (2,), text=True),), ONE.outputs)
    given = frame(spark, "a string, b string, label int, x array<float>").fillna("", "b")
    both = {"features": ["b", "a"], "on_invalid": "allow"}
    message = error_of(DataError, given, schema, labelled=True, **both)
    assert re.search('column \'a\' .*strings.*df.fillna.*"drop" .*"skip"', message)
    assert re.search('"null" .*"keep"', error_of(DataError, given, fits=False, **both))
    assert select(given, schema, on_invalid="null", features=["b", "a"]).names == ["b", "a"]
    assert select(given, schema, features="b", fits=False, on_invalid="allow").names == ["b"]
    assert select(given, features={"words": "a", "numbers": "x"}, fits=False, on_invalid="allow").names == ["a", "x"]


# Loaders


def test_a_loader_checks_the_type_of_its_column(spark):
    texts = frame(spark, "features string, number int, item int")
    loader = {"user": Texts((2,))}
    leaves = select(texts, TWO, loader=loader, features=["features", "item"]).leaves
    assert [leaf.loader for leaf in leaves] == [loader["user"], None]
    with pytest.raises(DataError, match="'number' is int, not"):
        select(texts, features="number", loader=Texts())


NUMBER, TEXT = types.IntegerType(), types.StringType()
IMAGE = {"origin": TEXT, "height": NUMBER, "width": NUMBER, "nChannels": NUMBER, "mode": NUMBER, "data": types.BinaryType()}


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (TEXT, "paths of images"),
        (types.StructType([types.StructField(name, kind) for name, kind in IMAGE.items()]), "image source"),
    ],
    ids=["paths", "struct"],
)
def test_the_error_for_an_image_column_without_a_loader_suggests_one(kind, advice):
    given = SimpleNamespace(schema=types.StructType([types.StructField("c", kind)]))
    photo = Schema((InputSpec("photo", (8, 9, 3), floating=True),))
    assert re.search(rf"{advice}.*loader=image_loader\(\(8, 9\)\)", error_of(DataError, given, photo, features="c"))
    assert "paths of images" not in error_of(DataError, given, ONE, features="c")


# Labels that equal the features


def test_labels_may_have_the_columns_and_the_loader_of_the_features(spark):
    x, y, wide = (InputSpec(name, shape, floating=True) for name, shape in (("x", (1, 2)), ("y", (1, 2)), ("y", (2,))))
    found = select(frame(spark, "a int, b int"), Schema((x,), (y,)), True, features=["a", "b"], label=["a", "b"])
    assert found.names == ["a", "b"]  # which are read once
    block, _ = next(found.blocks([pa.array([1]), pa.array([2])], "partition 0", 0))
    assert block.x.tolist() == block.y.tolist() == [[[1, 2]]]
    given = frame(spark, "pixels array<double>, features string")
    found = select(given, Schema((x,), (wide,)), True, features="pixels", label="pixels")
    block, _ = next(found.blocks([pa.array([[1.0, 2.0]])] * 2, "partition 0", 0))
    assert (block.x.tolist(), block.y.tolist()) == ([[[1, 2]]], [[1, 2]])
    loader = Texts((1,))
    found = select(given, Schema((InputSpec("x", (1,)),)), labelled=True, label="features", loader=loader)
    assert [leaf.loader for leaf in found.leaves] == [loader, loader]
