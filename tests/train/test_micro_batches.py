"""How many micro-batches a step has where nobody says, and what is refused."""

from __future__ import annotations

import pytest

from mpitrain.config import MeshConfig, TrainConfig
from mpitrain.errors import MeshError
from mpitrain.placement.place import micro_batches
from mpitrain.schedules.grid import Grid


@pytest.mark.parametrize(("batch_size", "n_stages", "n_ranks", "chunks", "expected"), [
    (64, 1, 3, 1, 3),
    (64, 2, 2, 1, 16),
    (64, 2, 1, 3, 24),
    (8, 3, 1, 1, 8),                         # not 12: there are not so many samples
    (15, 2, 2, 1, 14),                       # as many on each data-parallel rank
])
def test_stages_are_kept_busy_as_far_as_there_are_samples(batch_size: int, n_stages: int, n_ranks: int, chunks: int,
                                                          expected: int) -> None:
    grid, mesh = Grid({"pp": n_stages, "dp": n_ranks}), MeshConfig(chunks=chunks)
    assert micro_batches(grid, mesh, TrainConfig(batch_size=batch_size, micro_batches=0)) == expected
    assert micro_batches(grid, mesh, TrainConfig(batch_size=batch_size, micro_batches=5)) == 5


@pytest.mark.parametrize(("asked", "batch_size", "n_ranks", "each", "advice"), [
    (3, 64, 4, 2, "set train.micro_batches to 4 or more, or run with -n 6"),
    (12, 8, 1, 3, "set train.batch_size to 12 or more, or train.micro_batches to 8 or less"),
    (0, 2, 3, 2, "set train.batch_size to 3 or more, or run with -n 4"),
])
def test_what_is_advised_can_be_had(asked: int, batch_size: int, n_ranks: int, each: int, advice: str) -> None:
    with pytest.raises(MeshError) as caught:
        micro_batches(Grid({"pp": each, "dp": n_ranks}), MeshConfig(), TrainConfig(batch_size=batch_size, micro_batches=asked))
    assert advice in caught.value.message
