"""Arrays on a disk that the workers share."""

import shutil

import pytest

from sparkkeras.data import files
from sparkkeras.errors import ClusterError, ConfigurationError
from sparkkeras.sources.arrays import _open_all, to_simple_rdd
from tests.sources.conformance import ROWS, numbered_block


def test_removed_files_are_reported_with_a_remedy(tmp_path):
    handle = files.write([numbered_block()], 0, tmp_path)
    assert [block.rows for block in _open_all([handle])] == [ROWS]
    shutil.rmtree(handle.directory)
    with pytest.raises(ClusterError, match="removed .*part-0.*spark.local.dir"):
        list(_open_all([handle]))


def test_a_number_of_partitions_in_place_of_weights_is_an_error():
    with pytest.raises(ConfigurationError, match="^sample_weight=2: .*num_slices=2"):
        to_simple_rdd(None, [[1.0], [2.0]], [0.0, 1.0], 2)
