"""Small arrays that come down from a device: by one copy where they fit, into memory that is theirs until then."""

from __future__ import annotations

import weakref

import fakecuda
import numpy as np
import pytest
from fakegpu import counted, put, xp

from mpitrain.backend import Device


def numbers() -> np.ndarray:
    return np.arange(8, dtype=np.float64)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_arrays_that_wait_come_down_with_the_next_copy_that_has_room(dtype: str) -> None:
    device, losses = Device("gpu", xp), np.array([[1 / 3]], dtype)
    later = device.downloads.with_next(put(losses))
    with counted() as counts:
        read = device.read_later(put(numbers()), room=6)
        later.begin()
    assert counts.down == 7 * 8 and not counts.syncs, "one copy, of what it has"
    np.testing.assert_array_equal(read()[:6], numbers()[:6])
    np.testing.assert_array_equal(later(), losses)
    assert later().dtype == dtype and later().shape == (1, 1)


def test_those_for_which_there_is_no_room_come_down_by_themselves() -> None:
    device, losses = Device("gpu", xp), np.array([1, 2, 3], np.float32)
    later = device.downloads.with_next(put(losses))
    with counted() as counts:
        first, second = device.read_later(put(numbers())), device.read_later(put(numbers()), room=6)
        assert counts.down == 64 + 48
        later.begin()
    assert counts.down == 64 + 48 + 12
    np.testing.assert_array_equal(later(), losses)
    np.testing.assert_array_equal(first(), numbers())
    np.testing.assert_array_equal(second(), numbers()[:6])


def test_memory_that_a_copy_writes_to_is_kept_where_nobody_wants_the_copy_any_more() -> None:
    device, array, held = Device("gpu", xp), put(numbers()), []

    def malloc(size: int) -> np.ndarray:
        made = np.empty(size, np.uint8)
        held.append(weakref.ref(made))
        return made
    fakecuda.set_pinned_memory_allocator(malloc)
    try:
        with fakecuda.lagging(2):
            device.read_later(array)                          # nobody keeps what reads it
            assert held[0]() is not None
            for _ in range(4):
                np.testing.assert_array_equal(device.read_later(array)(), numbers())
            assert held[0]() is None, "it has landed"
    finally:
        fakecuda.set_pinned_memory_allocator()
