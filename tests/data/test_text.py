"""Strings in blocks: any text survives memory, pickles and files; the rules for columns and rows of strings."""

import pickle

import numpy as np
import pyarrow as pa
import pytest

from sparkkeras.data import files
from sparkkeras.data.block import from_arrays
from sparkkeras.data.columns import Leaf
from sparkkeras.data.reader import Reader
from sparkkeras.data.schema import InputSpec, Schema
from sparkkeras.data.text import read_text
from sparkkeras.errors import DataError

WORDS = np.array(["", "ends in NUL\0", "a\0b", "😀 é", "z" * 10_000, "", "last"], object)
Y = np.arange(len(WORDS), dtype=np.float32)
TEXT, NUMBER = InputSpec("text", (1,), text=True), InputSpec("number", (1,), floating=True)


def reader(*inputs, **options):
    return Reader(Schema(inputs or (TEXT,)), **options)


def block(rows=WORDS):
    return reader().read_arrays(rows, np.zeros(len(rows), np.float32), None)


def words(found):
    return found.x.reshape(-1).tolist()


def test_any_text_survives_a_file(tmp_path):
    handle = files.write([block(WORDS[:3]), block(WORDS[3:])], 0, tmp_path)
    stored = handle.open()
    assert words(stored) == WORDS.tolist()
    assert stored.spec == handle.spec == block().spec
    assert stored.spec.leaves[0].dtype == "string"
    assert words(stored[::3]) == WORDS[::3].tolist()
    assert words(stored[np.array([4, 1, 1])]) == WORDS[[4, 1, 1]].tolist()
    assert handle.nbytes == sum(len(word.encode()) for word in WORDS) + len(WORDS) * (8 + 4)
    assert words(files.write([block(np.array(["", ""]))], 1, tmp_path).open()) == ["", ""]


def test_slices_and_pieces_have_the_size_of_their_strings():
    part = pickle.dumps(block()[1:3])
    assert len(part) < 2_000
    assert words(pickle.loads(part)) == WORDS[1:3].tolist()
    rows = block(np.array(["x" * 1000] * 100, object))
    assert rows.row_bytes == 1000 + 8 + 4
    assert [piece.rows for piece in rows.pieces(10_240)] == [10] * 10


def test_arrays_of_every_type_of_string():
    variable = [np.dtypes.StringDType()] if hasattr(np.dtypes, "StringDType") else []  # not in NumPy 1
    for dtype in ("U", "S", object, *variable):
        rows = np.array(["a\0b", "", "three"]).astype(dtype)
        assert words(block(rows)) == words(block(rows[:, None])) == ["a\0b", "", "three"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.arange(3), "int64.*astype"),
        (["a", 3], "row 1 .*type int"),
        ([b"\xff"], "row 0 .*not text in UTF-8"),
        (["\ud800"], "row 0 .*UTF-8 cannot represent"),
        ([["a"], ["b", "c"]], "row 0 .*different shapes"),
        (["a", None], 'row 1 .*missing.*on_invalid="drop"'),
    ],
)
def test_other_values_for_an_input_of_strings_raise_an_error_or_are_dropped(value, message):
    with pytest.raises(DataError, match=message):
        reader().read_arrays(value, np.zeros(len(value)), None)
    rows = np.array(["a", None, float("nan"), "b"], object)
    assert words(reader(on_invalid="drop").read_arrays(rows, np.arange(4.0), None)) == ["a", "b"]


def test_strings_are_refused_for_inputs_of_numbers_and_for_labels():
    for array, given in (("x", (reader(NUMBER), Y)), ("y", (reader(), WORDS))):
        with pytest.raises(DataError, match=f"^{array} .*numbers.*StringLookup"):
            given[0].read_arrays(WORDS, given[1], None)


def test_a_transform_gets_strings_and_may_return_them_as_features():
    rows = Reader(Schema((NUMBER,)).before(len)).read_arrays(WORDS, WORDS, None)
    assert rows.y.tolist() == WORDS.tolist()
    made = rows.transformed(lambda x, y: (np.array([word.upper() for word in x]), np.char.str_len(y.astype(str))), 2)
    assert words(made) == [word.upper().rstrip("\0") for word in WORDS]
    with pytest.raises(DataError, match="'number': it expects numbers"):
        Schema((NUMBER,)).check_features(made.spec)
    with pytest.raises(DataError, match="it expects strings"):
        Schema((TEXT,)).check_features(from_arrays(Y, Y, None).spec)
    with pytest.raises(ValueError, match="y of row 0 .*numbers"):
        rows.transformed(lambda x, y: (x, y), 2)


def test_rows_of_text_and_numbers():
    several, rows = reader(TEXT, NUMBER), [(("a", 1), 0), (("b", 2), 1)]
    found = several.read_rows(rows, several.form_of(rows[0], 0), 0, 0)
    assert [each.reshape(-1).tolist() for each in found.x] == [["a", "b"], [1.0, 2.0]]
    predicting = reader(labelled=False)
    for rows in (["a", "b"], [("a", 1), ("b", 0)]):
        assert words(predicting.read_rows(rows, predicting.form_of(rows[0], 0), 0, 0)) == ["a", "b"]


def leaf(*columns, spec=TEXT, **options):
    return Leaf(columns, len(columns) > 1, spec, **options)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()])
def test_columns_of_strings(kind):
    found = leaf("c").read([pa.array([None, *WORDS], pa.string()).cast(kind)[1:]])
    assert np.asarray(found.values).tolist() == WORDS.tolist()
    assert found.good is None


def test_columns_of_strings_are_joined_and_nulls_are_empty_strings_in_a_mask():
    three = leaf("c", "d", spec=InputSpec("three", (3,), text=True))
    found = three.read([pa.array(["a", None]), pa.array([["b", "c"], ["d", "e"]])])
    assert np.asarray(found.values).tolist() == [["a", "b", "c"], ["", "d", "e"]]
    assert found.good.tolist() == [True, False]
    assert found.null_column(1) == "column 'c'"


def test_other_columns_for_an_input_of_strings_raise_an_error():
    for column, message in ((pa.array([1]), "int64; expected strings"), (pa.array([["a"], ["b", "c"]]), r"\(1 and 2\)")):
        with pytest.raises(DataError, match=f"column 'c' .*{message}"):
            leaf("c").read([column])


def test_arrays_of_strings_are_read_with_null_rows_between_them():
    column = pa.array([["out"], ["a", "é"], None, ["b", None], None, ["\0", ""]])[1:]
    values, good = read_text(column, None)
    assert np.asarray(values).tolist() == [["a", "é"], ["", ""], ["b", ""], ["", ""], ["\0", ""]]
    assert good.tolist() == [True, False, False, False, True]
