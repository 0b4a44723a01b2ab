"""What runs on the workers, without Spark: rows that are collected, and results that pass through files."""

from dataclasses import make_dataclass

import numpy as np
import pytest

from sparkkeras.data.block import Block, Form, Structure
from sparkkeras.data.dataset import TaskContext
from sparkkeras.data.text import Text, to_text
from sparkkeras.data.values import ValueFile
from sparkkeras.errors import StorageError
from sparkkeras.sources.tasks import Collect, ThroughFiles
from tests.sources.conformance import LARGE


@pytest.mark.parametrize("size", [1, LARGE])
def test_results_may_hold_objects_of_a_class_that_workers_cannot_import(tmp_path, size):
    key = make_dataclass("Key", ["number"])
    key.__module__ = "__main__"  # as on a worker that received the class from the user's script
    (found,) = ThroughFiles(lambda partition, rows: rows, tmp_path)(0, [([key(7)], np.ones(size))])
    assert isinstance(found, ValueFile) == (size == LARGE)
    (read,), ones = found.value if isinstance(found, ValueFile) else found
    assert read == key(7)
    assert len(ones) == size


def test_a_folder_that_is_gone_is_reported(tmp_path):
    with pytest.raises(StorageError, match=r"cannot write to .*removed, in Spark's temporary folder: .*No such file"):
        list(ThroughFiles(lambda partition, rows: rows, tmp_path / "removed")(0, [np.ones(LARGE)]))


def test_collected_strings_are_not_python_objects():
    strings = np.array(["one", "two", ""])
    (found,) = Collect()(TaskContext(0), iter([Block(Form(Structure()), (to_text(strings)[0],))]))
    assert isinstance(found.arrays[0], Text)
    assert found.x.tolist() == strings.tolist()
