"""Arrays on a disk that the workers share."""

import shutil

import pytest

from sparkkeras.data import files
from sparkkeras.errors import ClusterError
from sparkkeras.sources.arrays import _open_all
from tests.sources.conformance import ROWS, numbered_block


def test_removed_files_are_reported_with_a_remedy(tmp_path):
    handle = files.write([numbered_block()], 0, tmp_path)
    assert [block.rows for block in _open_all([handle])] == [ROWS]
    shutil.rmtree(handle.directory)
    with pytest.raises(
        ClusterError, match=r"removed during their use \(.*part-0.*spark.local.dir.*exclude it from any cleanup"
    ):
        list(_open_all([handle]))
