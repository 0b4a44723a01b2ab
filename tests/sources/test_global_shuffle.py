"""Rows at random places that only depend on the rows and a seed."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from sparkkeras.data.block import concatenate, from_arrays
from sparkkeras.data.text import to_text
from sparkkeras.sources.global_shuffle import ByDigest, DealByDigest, digests_of

RNG = np.random.default_rng(0)


def rows(count):
    text = to_text(np.array([f"row {number % 7} " * (number % 3) for number in range(count)], object))[0]
    return from_arrays({"number": RNG.normal(size=(count, 3)).astype("f4"), "text": text}, np.arange(count), None)


def shuffled(blocks, parts, seed=1):
    """What `shuffled` does with two shuffles of Spark: the rows of each partition."""
    ranges = [[] for _ in range(parts)]
    for number, block in enumerate(blocks):
        for (index,), piece in ByDigest(parts, seed)(number, [block]):
            ranges[index].append(piece)
    dealt = [pair for number, pieces in enumerate(ranges) for pair in DealByDigest(parts)(number, pieces)]
    found = [[] for _ in range(parts)]
    for key, block in sorted(dealt, key=lambda pair: pair[0]):
        found[key[0]].append(block)
    return [concatenate(blocks) for blocks in found if blocks]


def digests(parts):
    return [digests_of(part, 1).tolist() for part in parts]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    yield
    assert not list(tmp_path.iterdir())


def test_places_depend_on_the_rows_and_the_seed_only():
    block = rows(500)
    placed = shuffled([block], 3)
    order = RNG.permutation(500)
    again = shuffled([block[order[:100]], block[order[100:350]], block[order[350:]]], 3)
    assert digests(placed) == digests(again)
    assert digests(shuffled([block], 3, seed=2)) != digests(placed)
    labels = np.concatenate([part.y for part in placed])
    assert sorted(labels) == list(range(500))
    assert [part.rows for part in placed] in ([167, 167, 166], [167, 166, 167], [166, 167, 167])
    assert abs(np.corrcoef(labels, np.arange(500))[0, 1]) < 0.15
    assert max(abs(part.y.mean() - 249.5) for part in placed) < 40


def test_equal_rows_are_dealt_to_all_partitions():
    x = RNG.integers(0, 2, (4000, 2)).astype("f4")
    parts = shuffled([from_arrays(x, x.sum(axis=1), None)], 5)
    assert all(abs(part.rows - 800) <= 2 for part in parts)
    total = Counter(map(tuple, x.tolist()))
    for part in parts:
        counts = Counter(map(tuple, part.x.tolist()))
        assert all(abs(counts[row] - total[row] / 5) <= 5 for row in total)


def test_digests_differ_for_any_change_of_a_row():
    def of(text, number=1.0, weight=1.0):
        block = from_arrays(np.float32([[number]]), np.int32([1]), np.float32([weight]))
        strings = to_text(np.array([text], object))[0]
        return tuple(digests_of(replace(block, arrays=(strings, *block.arrays)), 1)[0].tolist())

    found = [of(["a", "bc"]), of(["ab", "c"]), of(["", "abc"]), of(["a", "bc"], 2.0), of(["a", "bc"], 1.0, 2.0)]
    assert len(set(found)) == 5
    assert of(["a", "bc"]) == of(["a", "bc"])


def test_pieces_may_be_cut_and_lack_rows(monkeypatch):
    block = rows(300)
    placed = digests(shuffled([block], 2))
    assert digests(shuffled([block[:0], block], 2)) == placed
    assert not shuffled([block[:0]], 2)
    monkeypatch.setattr("sparkkeras.sources.global_shuffle.BLOCK_BYTES", 100)
    assert digests(shuffled([block], 2)) == placed
