"""Random numbers as functions of a key and an index."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain.backend import random, stream_key
from mpitrain.errors import ShapeError
from mpitrain.kernels.random import normal, random_words, uniform


@pytest.mark.parametrize(("counter", "key", "expected"), [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
])
def test_philox_gives_the_published_known_answers(counter: tuple[int, ...], key: tuple[int, ...],
                                                  expected: tuple[int, ...]) -> None:
    """The vectors that its authors publish with Random123 for philox4x32-10."""
    low, high = (np.array([counter[i] | counter[i + 1] << 32], np.uint64) for i in (0, 2))
    assert tuple(int(word[0]) for word in random.philox(key[0] | key[1] << 32, low, high, np)) == expected


def test_a_row_of_words_does_not_depend_on_the_other_rows_or_the_width() -> None:
    rows = np.array([5, 1 << 40, 0], np.uint64)
    whole = random_words(rows, 42, 9)
    assert whole.dtype == np.uint32 and whole.shape == (3, 9)
    assert np.array_equal(whole[1:2, :3], random_words(rows[1:2], 42, 3))


def test_any_slice_of_a_stream_is_a_part_of_the_whole() -> None:
    for draw in (uniform, normal):
        assert np.array_equal(draw(7, 0, 100, np)[30:60], draw(7, 30, 30, np))


def test_uniform_and_normal_numbers_have_their_moments() -> None:
    u, n = uniform(1, 0, 100_000, np), normal(1, 0, 100_000, np)
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.005 and abs(u.var() - 1 / 12) < 0.002
    assert abs(n.mean()) < 0.015 and abs(n.var() - 1) < 0.02 and abs((n ** 3).mean()) < 0.05 and abs((n ** 4).mean() - 3) < 0.1


def test_keys_differ_by_what_they_are_for() -> None:
    keys = [stream_key(*parts) for parts in ((1, "a"), (2, "a"), (1, "b"), ("1", "a"), (1, "a", 0), ("1a",), (11, "a"))]
    assert len(set(keys)) == len(keys) and all(0 <= key < 1 << 64 for key in keys)
    assert stream_key(1, "a") == stream_key(1, "a")


def test_a_layer_used_twice_draws_two_masks_and_a_new_scope_repeats_them() -> None:
    scope = random.Scope(seed=1, step=2)
    first = [scope.key("layer"), scope.key("layer"), scope.key("other")]
    assert len(set(first)) == 3
    again = random.Scope(seed=1, step=2)
    assert [again.key("layer"), again.key("layer"), again.key("other")] == first
    assert random.Scope(seed=1, step=3).key("layer") != first[0]


def test_rows_follow_the_samples_and_not_their_place_in_the_batch() -> None:
    scope = random.Scope(samples=np.array([10, 3]))
    assert scope.rows(2, np).tolist() == [10, 3] and scope.rows(4, np).tolist() == [20, 21, 6, 7]
    assert scope.rows(4, np) is scope.rows(4, np), "made once for all layers"
    assert random.Scope().rows(3, np).tolist() == [0, 1, 2]
    with pytest.raises(ShapeError, match="random numbers for 3 rows, but the batch has 2 samples"):
        scope.rows(3, np)


def test_a_scope_ends_with_its_block_and_a_snapshot_does_not_move_it() -> None:
    outside = random.current()
    with random.use(random.Scope(seed=9)) as _:
        copy = random.current().copy()
        copy.key("layer")
        assert random.current().seed == 9 and random.current().uses == {}
    assert random.current() is outside
