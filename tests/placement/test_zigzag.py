"""Which positions each rank has, what it sees of others, and lengths that cannot be cut so."""

from __future__ import annotations

import re

import numpy as np
import pytest

from mpitrain.errors import MeshError
from mpitrain.placement import zigzag

RANKS = range(1, 6)


@pytest.mark.parametrize("n", RANKS)
def test_ranks_have_all_positions_once_and_the_samples_of_theirs(n: int) -> None:
    x = np.random.default_rng(n).standard_normal((2, 6 * n, 3))
    mine = [zigzag.positions(6, rank, n) for rank in range(n)]
    assert sorted(np.concatenate(mine)) == list(range(6 * n))
    for rank, places in enumerate(mine):
        assert (np.diff(places) > 0).all()
        np.testing.assert_array_equal(zigzag.part(x, rank, n), x[:, places])


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("causal", [False, True])
def test_tiles_are_what_some_query_sees_and_as_much_work_for_every_rank(n: int, causal: bool) -> None:
    size, work = 3, []
    seen = np.zeros((2 * n * size, 2 * n * size), int)
    for rank in range(n):
        places, before = zigzag.positions(2 * size, rank, n), seen.sum()
        for source in range(n):
            keys = zigzag.positions(2 * size, source, n)
            for i, j, diagonal in zigzag.tiles(rank, source, n, causal):
                tile = np.tri(size, dtype=int) if diagonal else 1
                seen[np.ix_(places[i * size:][:size], keys[j * size:][:size])] += tile
        work.append(seen.sum() - before)
    np.testing.assert_array_equal(seen, np.tri(len(seen), dtype=int) if causal else 1)
    assert len(set(work)) == 1


@pytest.mark.parametrize(("length", "n", "message"), [
    (65, 2, "mesh.cp = 2 cuts the positions of samples into 4 chunks, and theirs are 65, no multiple of 4; the nearest that fits"
            ": 64 or 68 positions (model.block), or mesh.cp = 1"),
    (3, 2, "and theirs are 3, no multiple of 4; the nearest that fits: 4 positions"),
    (0, 2, "and theirs are 0, no multiple of 4; the nearest that fits: 4 positions"),
    (36, 4, "the nearest that fits: 32 or 40 positions (model.block), or mesh.cp = 3")])
def test_a_length_that_does_not_fit_is_named_with_those_that_do(length: int, n: int, message: str) -> None:
    with pytest.raises(MeshError, match=re.escape(message)):
        zigzag.refuse_length(length, n)
    zigzag.refuse_length(2 * n, n)


def test_the_most_ranks_that_a_length_can_be_cut_over_are_named() -> None:
    for length in range(1, 121):
        fitting = [m for m in range(1, 13) if m == 1 or length % (2 * m) == 0]
        for n in range(2, 13):
            if length % (2 * n):
                with pytest.raises(MeshError, match=f"or mesh.cp = {max(m for m in fitting if m < n)}$"):
                    zigzag.refuse_length(length, n)
