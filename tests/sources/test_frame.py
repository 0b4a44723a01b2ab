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
from sparkkeras.data.block import Structure
from sparkkeras.data.columns import Leaf
from sparkkeras.data.reader import Reader
from sparkkeras.data.schema import InputSpec, Schema
from sparkkeras.sources.column_types import _check_loaded_shape
from sparkkeras.sources.frame import ColumnMapping, is_frame, split_by

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


def test_the_columns_features_and_label_are_the_default(spark):
    found = select(frame(spark, "id int, features array<float>, label int"), labelled=True)
    assert found.names == ["features", "label"]
    assert (found.form.x, found.form.y, found.form.weight) == (Structure(), Structure(), None)


def test_columns_with_the_names_of_inputs_and_outputs_are_found(spark):
    assert select(frame(spark, "x array<float>, y int"), labelled=True).names == ["x", "y"]
    found = select(frame(spark, "price int, item int, click int, user array<int>"), TWO, labelled=True)
    assert found.names == ["user", "item", "click", "price"]
    assert found.form.x.names == ("user", "item")
    assert found.form.y.names == ("click", "price")


def test_the_error_for_missing_columns_lists_the_existing_ones(spark):
    message = error_of(ConfigurationError, frame(spark, "a int, b int"))
    assert message == (
        "features= (in Spark ML featuresCol) is missing, and the DataFrame has no column 'features' and no columns with the "
        "names of the model's inputs (x). Its columns: 'a', 'b'."
    )
    assert "no column 'features'. Its columns: 'a'." in error_of(ConfigurationError, frame(spark, "a int"), UNKNOWN)


# Named columns


def test_several_columns_of_one_input_are_concatenated(spark):
    (leaf,) = select(frame(spark, "a int, b boolean, c decimal(10,2)"), features=["c", "a", "b"]).leaves
    assert leaf.columns == ("c", "a", "b")
    assert leaf.together
    assert leaf.input == ONE.inputs[0]


def test_columns_of_several_inputs_are_matched_in_order_or_by_name(spark):
    given = frame(spark, "age int, income int, item int, clicked boolean, paid double")
    by_name = {"item": "item", "user": ["age", "income"]}
    found = select(given, TWO, True, features=by_name, label=["clicked", "paid"])
    assert found.names == ["item", "age", "income", "clicked", "paid"]
    assert found.form.x.names == ("item", "user")
    assert found.form.y == Structure.several(2)
    assert [leaf.input.name for leaf in found.leaves[:2]] == ["item", "user"]
    wide = frame(spark, "u array<int>, i int")
    assert select(wide, TWO, features=["u", "i"]).form.x == Structure.several(2)


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
    assert found.form.labels[2:6] == ["x['b']['c']", "y['u']", "y['v'][0]", "y['v'][1]"]
    assert found.form.labels[6:] == ["sample_weight['u']", "sample_weight['v'][0]", "sample_weight['v'][1]"]
    assert select(given, schema).names == ["a", "b.d", "b.c"]  # by default, fields of structs
    assert select(given, schema, features=["b.c", "a", "b.d"]).names == ["a", "b.d", "b.c"]  # fields go by name, too
    columns = r"Pass features=\{'a': column, 'b': \{'d': column, 'c': column\}\}\."
    with pytest.raises(ConfigurationError, match=rf"features has the keys \['a', 'b/x'\], but the model's .*\. {columns}"):
        select(given, schema, features={"a": "a", "b": {"x": "p"}})
    with pytest.raises(ConfigurationError, match=r"by position .*'b\.c' is the name of the input 'b/c'"):
        select(given, schema, features=["a", "b.c", "p"])


def test_columns_of_nested_tuples(spark):
    structure = Structure(((0,), (1, 0), (1, 1)))
    schema = Schema(tuple(InputSpec(name, (1,)) for name in ("0", "1/0", "1/1")), x=structure)
    given = frame(spark, "a int, b int, c int")
    found = select(given, schema, features=["a", ["b", "c"]])
    assert (found.form.x, found.names) == (structure, ["a", "b", "c"])
    with pytest.raises(
        ConfigurationError, match=r"does not fit the model's inputs. Pass features=\(column, \(column, column"
    ):
        select(given, schema, features=["a", ["b"]])


def test_a_list_with_the_names_of_several_inputs_goes_by_name(spark):
    given = frame(spark, "Item int, user array<int>, age int, price int, click int, w float")
    named = {"features": ["Item", "user"], "label": ["price", "click"]}
    found = select(given, TWO, True, **named)
    assert found.names == ["user", "Item", "click", "price"]
    assert [leaf.input.name for leaf in found.leaves[:2]] == ["user", "item"]
    message = error_of(ConfigurationError, given, TWO, features=["item", "age"])
    assert message == (
        "features=['item', 'age'] are mapped to the model's inputs by position ('user' gets 'item', 'item' gets 'age'), but "
        "'item' is the name of the input 'item': pass features={name: column}."
    )
    weights = {"labelled": True, "features": ["user", "item"], "label": ["click", "price"]}
    assert "'price' gets 'click'" in error_of(ConfigurationError, given, TWO, sample_weight=["w", "click"], **weights)


def test_outputs_without_a_loss_need_no_labels(spark):
    found = select(frame(spark, "user array<int>, item int, paid double"), TWO, True, label={"price": "paid"})
    assert found.names == ["user", "item", "paid"]
    assert found.form.y == Structure.named(("price",))


def test_a_dict_for_a_single_input_or_output_gives_an_array(spark):
    given = frame(spark, "a int, b int, c int, d int, w float")
    named = {"features": {"x": ["a", "b", "c"]}, "label": {"y": "d"}, "sample_weight": {"y": "w"}}
    found = select(given, ONE, True, **named)
    assert found.names == ["a", "b", "c", "d", "w"]
    assert (found.form.x, found.form.y, found.form.weight) == (Structure(), Structure(), Structure())


def test_weights_are_one_column_or_one_for_each_output(spark):
    given = frame(spark, "features array<int>, label int, w float, v float, user array<int>, item int, a int, b int")
    assert select(given, ONE, True, sample_weight="w").form.weight == Structure()
    both = select(given, TWO, True, label=["a", "b"], sample_weight={"click": "w", "price": "v"})
    assert both.names == ["user", "item", "a", "b", "w", "v"]
    assert both.form.weight == Structure.several(2)  # the same structure as the outputs
    assert select(given, ONE, False, sample_weight="w").form.weight is None


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
        (ONE, {"features": 5}, "features is int 5; expected the name of a column, or a list of names"),
        (ONE, {"features": [SimpleNamespace(alias=1)]}, "one of which is .*namespace.*names of columns instead of Column"),
        (ONE, {"features": np.array(["a", "b"])}, r"features is an array of .* Convert it to a list: features=list\(...\)"),
        (TWO, {"features": ["a", ["b", "c"]]}, r"one of which is a list of 2 values; .* features=\{name: \[columns\]\}"),
        (ONE, {"features": {"z": "a"}}, "features: the model has no input 'z'. Known: 'x'"),
        (TWO, {"features": ["a", "b", "c"]}, r"\['a', 'b', 'c'\]: the model has 2 inputs: pass one column for each"),
        (ONE, {"features": ["a", "b", "a"]}, r"features=\['a', 'b', 'a'\] has the column 'a' twice"),
        (TWO, {"features": {"user": ["a", "b"]}}, r"keys \['user'\], but the model's inputs are \['user', 'item'\]"),
        (
            TWO,
            {"labelled": True, "label": {"prize": "a"}},
            "label: the model has no output 'prize'. .* Did you mean 'price'?",
        ),
        (
            TWO,
            {"labelled": True, "label": ["a", "b"], "sample_weight": {"click": "c"}},
            r"sample_weight has the keys \['click'\], but the model's outputs are",
        ),
        (ONE, {"labelled": True, "sample_weight": ["a", "b"]}, r"sample_weight=\['a', 'b'\]: expected one column"),
        (ONE, {"features": ["a", "s"], "loader": Texts()}, r"a loader takes one column, received \['a', 's'\]"),
        (ONE, {"features": "s", "loader": {"z": Texts()}}, "loader: the model has no input or output 'z'. Known: 'x', 'y'"),
        (
            TWO,
            {"features": ["s", "b"], "loader": Texts()},
            r"2 inputs, so pass \{input name: loader\} .* \['user', 'item'\]",
        ),
        (
            TWO,
            {"features": ["s", "b"], "loader": {"user": Texts()}},
            r"returns arrays of shape \(3,\), but .*'user' expects",
        ),
        (ONE, {"features": "s", "loader": Texts}, r"loader is the class Texts; .* Call the class: loader=Texts\(...\)"),
    ],
)
def test_invalid_names_of_columns_and_loaders_raise_an_error(spark, schema, named, message):
    given = frame(spark, "a int, b int, c int, s string, features array<int>, label int, user array<int>, item int")
    with pytest.raises(ConfigurationError, match=message):
        select(given, schema, **named)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"features": "agge"}, "no column 'agge'. Known: 'age', 'bytes'"),
        ({"features": "user.agge"}, "no column 'user.agge'. Known: 'user.age'."),
        ({"features": "x", "labelled": True, "label": "bytes"}, "column 'bytes' has the type binary"),
        ({"features": "x", "labelled": True, "label": "text"}, "column 'text' has the type string"),
        ({"features": ["age", "user.age"]}, r"the columns age, user.age have 2 values per row.*'x' expects rows of shape"),
    ],
)
def test_unsuitable_columns_raise_an_error(spark, named, message):
    with pytest.raises(DataError, match=message):
        select(frame(spark, "age int, user struct<age: int>, x array<int>, text string, bytes binary"), **named)


def test_the_default_of_a_param_of_spark_ml_means_the_names_of_several_inputs(spark):
    given = frame(spark, "features int, user array<int>, item int, click int, price int")
    assert select(given, TWO, True, features="features", label="label").names == ["user", "item", "click", "price"]
    with pytest.raises(ConfigurationError, match=r"the DataFrame has no columns with the names of the model's inputs"):
        select(frame(spark, "features int"), TWO, features="features")


# Names


def test_names_may_contain_any_characters(spark):
    row = types.StructType(
        [
            types.StructField("a.b", types.IntegerType()),
            types.StructField("ti`ck", types.IntegerType()),
            types.StructField("user", types.StructType([types.StructField("age.now", types.IntegerType())])),
        ]
    )
    names = ["a.b", "ti`ck", "user.age.now"]
    given = spark.createDataFrame([(1, 2, (3,))], row)
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


def test_a_column_takes_precedence_over_a_field_with_the_same_name(spark):
    given = spark.createDataFrame([((1,), 2)], "user struct<age: int>, `user.age` int")
    found = select(given, UNKNOWN, features="user.age")
    assert tuple(found.narrowed(given).first()) == (2,)


def test_names_are_case_insensitive_unless_that_is_ambiguous(spark):
    given = spark.createDataFrame([(1, (2,), 3.0)], "Age int, User struct<Size: int>, Label double")
    found = select(given, UNKNOWN, True, features=["age", "user.size"])
    assert tuple(found.narrowed(given).first()) == (1, 2, 3.0)
    spark.conf.set("spark.sql.caseSensitive", "true")
    given = spark.createDataFrame([(1, 2)], "a int, A int")
    assert tuple(select(given, UNKNOWN, features=["A", "a"]).narrowed(given).first()) == (2, 1)
    spark.conf.set("spark.sql.caseSensitive", "false")
    with pytest.raises(DataError, match=r"2 columns whose names Spark does not distinguish \('a', 'A'\): rename them"):
        select(frame(spark, types.StructType.fromDDL("a int, A int")), UNKNOWN, features="a")


def test_only_selecting_a_duplicate_column_raises_an_error(spark):
    given = frame(spark, "a int, b int").join(frame(spark, "b int, c int"))
    with pytest.raises(DataError, match=r"2 columns whose names Spark does not distinguish \('b', 'b'\)"):
        select(given, UNKNOWN, features=["a", "b"])
    assert select(given, UNKNOWN, features=["a", "c"]).narrowed(given).columns == ["c0", "c1"]


# Types

VECTORS = [VectorUDT(), OldVectorUDT()]
READABLE = ["tinyint", "double", "decimal(10,2)", "boolean", "array<array<boolean>>", "array<decimal(3,1)>", "binary"]


def one(kind):
    return types.StructType([types.StructField("c", types._parse_datatype_string(kind) if isinstance(kind, str) else kind)])


@pytest.mark.parametrize("kind", [*READABLE, *VECTORS], ids=str)
def test_supported_types(spark, kind):
    shape = (1,) if isinstance(kind, str) and "<" not in kind else (3,)
    assert select(frame(spark, one(kind)), Schema((InputSpec("x", shape),)), features="c").names == ["c"]


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (
            "string",
            "Encode text first, for instance with pyspark.ml.feature.StringIndexer",
        ),
        ("timestamp", "unix_timestamp"),
        ("date", "unix_date"),
        ("struct<a: int>", r"Name the fields to use \(struct.field\)"),
        ("map<string,int>", r"m\['key'\] of a map"),
        ("array<struct<a: int>>", "s.field of an array of structs"),
        ("array<binary>", "Bytes require a model input of known shape"),
    ],
)
def test_the_error_for_an_unsupported_type_names_the_column_and_has_advice(spark, kind, advice):
    with pytest.raises(DataError, match=rf"column 'c' has the type {kind.split('<')[0]}.*expected numbers.*{advice}"):
        select(frame(spark, one(kind)), features="c")


def test_allowed_nulls_are_rejected_where_all_features_are_strings(spark):
    schema = Schema((InputSpec("text", (2,), text=True),), ONE.outputs)
    given = frame(spark, "a string, b string, label int, x array<float>").fillna("", "b")
    message = error_of(DataError, given, schema, labelled=True, on_invalid="allow", features=["b", "a"])
    assert message == (
        "column 'a' holds strings and may hold nulls, but on_invalid=\"allow\" replaces missing numbers by NaN, which "
        "strings and integers cannot be. Replace nulls (df.fillna({'a': ''})), or pass on_invalid=\"drop\" (in Spark ML "
        'handleInvalid="skip").'
    )
    assert error_of(DataError, given, features=["b", "a"], fits=False, on_invalid="allow").endswith(
        'on_invalid="null" (in Spark ML handleInvalid="keep"), which predicts null for them.'
    )
    assert select(given, schema, on_invalid="null", features=["b", "a"]).names == ["b", "a"]
    assert select(given, schema, features="b", fits=False, on_invalid="allow").names == ["b"]
    assert select(given, features={"words": "a", "numbers": "x"}, fits=False, on_invalid="allow").names == ["a", "x"]


def test_the_width_of_vectors_is_read_from_their_metadata(spark):
    field = types.StructField("features", VectorUDT(), metadata={"ml_attr": {"num_attrs": 3}})
    given = frame(spark, types.StructType([field, types.StructField("age", types.IntegerType())]))
    assert select(given).names == ["features"]
    with pytest.raises(DataError, match=r"the columns features, age have 4 values"):
        select(given, features=["features", "age"])


# Loaders


def test_the_shape_of_a_loader_with_preprocessing():
    loader = SimpleNamespace(shape=(3,), preprocessing=len)
    with pytest.raises(ConfigurationError, match="returns arrays of shape .3,., but .* or change its preprocessing"):
        _check_loaded_shape(Leaf(("c",)), loader, InputSpec("x", (8, 8, 3)))


def test_a_loader_checks_the_type_of_its_column(spark):
    texts = frame(spark, "features string, number int, user array<int>, item int")
    assert select(texts, loader=Texts()).leaves[0].loader == Texts()
    fitting = {"user": Texts((2,))}
    leaves = select(texts, TWO, loader=fitting, features=["features", "item"]).leaves
    assert [leaf.loader for leaf in leaves] == [fitting["user"], None]
    with pytest.raises(DataError, match="column 'number' is int, not text"):
        select(texts, features="number", loader=Texts())


# Validation rows


def test_rows_are_split_by_a_column(spark):
    values = [(0, True, 1), (1, False, 0), (2, None, None), (3, True, 7)]
    given = spark.createDataFrame(values, "id int, `is.val` boolean, number int")
    for name in ("is.val", "NUMBER"):
        train, held_out = split_by(given, name)
        assert [row.id for row in train.collect()] == [1, 2]
        assert [row.id for row in held_out.collect()] == [0, 3]


def test_the_validation_column_must_be_boolean_or_numeric(spark):
    given = frame(spark, "fold string, flags array<boolean>, struct struct<a: string>")
    for name, kind in [("fold", "string"), ("flags", "array<boolean>"), ("struct.a", "string")]:
        with pytest.raises(DataError, match=f"column '{name}' marks the validation rows.*has the type {kind}"):
            split_by(given, name)
    with pytest.raises(DataError, match="no column 'folds'.*Did you mean 'fold'"):
        split_by(given, "folds")


def test_is_frame(spark, sc):
    assert is_frame(spark.range(1))
    assert not is_frame(sc.parallelize([1]))
    assert not is_frame([1])


NUMBER, TEXT = types.IntegerType(), types.StringType()
IMAGE = {"origin": TEXT, "height": NUMBER, "width": NUMBER, "nChannels": NUMBER, "mode": NUMBER, "data": types.BinaryType()}


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (TEXT, r"If these are paths of images, pass loader=image_loader\(\(8, 9\)\). Encode text first"),
        (
            types.StructType([types.StructField(name, kind) for name, kind in IMAGE.items()]),
            r"It is the struct of Spark's image source: pass loader=image_loader\(\(8, 9\)\)",
        ),
    ],
    ids=["paths", "struct"],
)
def test_the_error_for_an_image_column_without_a_loader_suggests_one(kind, advice):
    given = SimpleNamespace(schema=types.StructType([types.StructField("c", kind)]))
    schema = Schema((InputSpec("photo", (8, 9, 3), floating=True),))
    assert re.search(advice, error_of(DataError, given, schema, features="c"))
    assert "paths of images" not in error_of(DataError, given, ONE, features="c")


# Labels that equal the features


def test_labels_with_the_columns_of_the_features_equal_them(spark):
    """They are read once, and get the shape of the input."""
    schema = Schema((InputSpec("x", (1, 2), floating=True),), (InputSpec("y", (1, 2), floating=True),))
    found = select(frame(spark, "a int, b int"), schema, True, features=["a", "b"], label=["a", "b"])
    assert found.names == ["a", "b"]
    block, _ = next(found.blocks([pa.array([1]), pa.array([2])], "partition 0", 0))
    assert block.x.tolist() == block.y.tolist() == [[[1, 2]]]


def test_labels_with_the_columns_of_the_features_may_have_another_shape(spark):
    schema = Schema((InputSpec("x", (1, 2), floating=True),), (InputSpec("y", (2,), floating=True),))
    found = select(frame(spark, "pixels array<double>"), schema, True, features="pixels", label="pixels")
    block, _ = next(found.blocks([pa.array([[1.0, 2.0]])] * 2, "partition 0", 0))
    assert (block.x.tolist(), block.y.tolist()) == ([[[1, 2]]], [[1, 2]])


def test_labels_with_the_columns_of_features_use_their_loader(spark):
    loader = Texts((1,))
    schema = Schema((InputSpec("x", (1,)),))
    found = select(frame(spark, "features string"), schema, labelled=True, label="features", loader=loader)
    assert [leaf.loader for leaf in found.leaves] == [loader, loader]
