"""How many micro-batches a step has where nobody says, and what is refused."""

from __future__ import annotations

import pytest

from mpitrain.errors import MeshError
from mpitrain.placement.micro_batches import count_micro_batches


@pytest.mark.parametrize(("batch_size", "n_stages", "n_ranks", "chunks", "expected"), [
    (64, 1, 3, 1, 3),
    (64, 2, 2, 1, 16),
    (64, 2, 1, 3, 24),
    (8, 3, 1, 1, 8),                         # not 12: there are not so many samples
    (15, 2, 2, 1, 14),                       # as many on each data-parallel rank
])
def test_stages_are_kept_busy_as_far_as_there_are_samples(batch_size: int, n_stages: int, n_ranks: int, chunks: int,
                                                          expected: int) -> None:
    assert count_micro_batches(0, batch_size, n_stages, n_ranks, chunks) == expected
    assert count_micro_batches(5, batch_size, n_stages, n_ranks, chunks) == 5


@pytest.mark.parametrize(("asked", "batch_size", "n_ranks", "each", "advice"), [
    (3, 64, 4, 2, "set train.micro_batches to 4 or more, or run with -n 6"),
    (12, 8, 1, 3, "set train.batch_size to 12 or more, or train.micro_batches to 8 or less"),
    (0, 2, 3, 2, "set train.batch_size to 3 or more, or run with -n 4"),
])
def test_what_is_advised_can_be_had(asked: int, batch_size: int, n_ranks: int, each: int, advice: str) -> None:
    with pytest.raises(MeshError) as caught:
        count_micro_batches(asked, batch_size, each, n_ranks, each=each)
    assert advice in caught.value.message
