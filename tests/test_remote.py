"""What Spark Connect carries: results in cells of a bounded size."""

import pickle

import numpy as np
import pytest

from sparkkeras.data.rdd import Missing
from sparkkeras.data.remote import InPieces, Whole
from sparkkeras.model import ModelState
from sparkkeras.remote import Failure, pack_cells, unpack_cells
from sparkkeras.strategy.averaging import Mean, merge
from sparkkeras.weights import Flat


@pytest.mark.parametrize("most", [1, 10, 11, 1000])
def test_results_come_out_of_their_cells(most):
    results = ["a", Missing(3), "b" * 100, None, Failure("DataError", "c" * 50, "")]
    cells = [cell for result in results for cell in pack_cells(result, most)]
    assert list(unpack_cells(cells)) == results
    assert len(list(unpack_cells(pack_cells("d" * 5000, most)))) == 1


def test_no_cell_is_larger_than_it_may_be():
    batches = list(Whole(lambda _: iter(["small", np.arange(1000)]), 500)(iter(())))
    sizes = [len(batch.column("result")[0].as_py()) for batch in batches]
    assert len(sizes) > 10
    assert max(sizes) < 700
    small, large = unpack_cells(batch.column("result")[0].as_py() for batch in batches)
    assert small == "small"
    assert np.array_equal(large, np.arange(1000))


def replica(offset):
    state = ModelState(Flat(np.arange(1000, dtype=np.float32) + offset, (np.array(3),)), Flat(np.ones(2000, np.float32)))
    return Mean(4, state.weights, state.optimizer, (), ("report",))


def test_a_replica_is_cut_where_it_is_made():
    results = [replica(0), Missing(1)]
    batches = list(InPieces(lambda _: iter(results), merge, 500)(iter(())))
    *pieces, missing = [pickle.loads(batch.column("result")[0].as_py()) for batch in batches]
    assert [batch.column("piece")[0].as_py() for batch in batches] == [*range(len(pieces)), -1]
    assert missing == Missing(1)
    assert len(pieces) == 25
    assert max(len(batch.column("result")[0].as_py()) for batch in batches) < 1500
    whole = merge.join(pieces)
    assert np.array_equal(whole.weights.vector, replica(0).weights.vector)
    assert whole.reports == ("report",)
