"""Batches sent ahead to a device: the same batches, one ahead, in two slots that wait for each other."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import fakecuda
import numpy as np
import pytest
from device_races import watched
from fakegpu import DeviceArray, xp

from mpitrain.backend import Device
from mpitrain.data import MicroBatch
from mpitrain.parallel.pipeline.feed import Feed
from mpitrain.parallel.pipeline.uploads import Uploads

GPU = Device("gpu", xp)


@pytest.fixture
def in_order() -> Iterator[None]:
    """Streams wait for each other where they must. All memory is kept meanwhile."""
    with watched():
        yield


def batches(asked: list[int], sizes: list[int]) -> Iterator[tuple[int, list[MicroBatch]]]:
    """Two micro-batches a step, of `sizes[step]` rows, whose numbers tell step and micro-batch."""
    for step, size in enumerate(sizes):
        asked.append(step)
        rows = np.arange(size, dtype=np.uint64)
        yield step, [MicroBatch(np.full((size, 3), 10.0 * step + i), np.full(size, step), rows, i, 0, step) for i in range(2)]


@pytest.mark.usefixtures("in_order")
def test_a_batch_is_given_with_its_numbers_there_and_the_next_is_on_its_way() -> None:
    asked: list[int] = []
    sizes = [4, 4, 2, 4, 3]
    for step, micro_batches in Uploads(Feed(GPU, np.float32)).ahead(batches(asked, sizes)):
        assert asked[-1] == min(step + 1, len(sizes) - 1)
        for i, micro in enumerate(micro_batches):
            x, y = micro.there
            assert isinstance(x, DeviceArray) and x.dtype == np.float32 and (x.get() == 10 * step + i).all()
            assert x.shape == (sizes[step], 3) and (y.get() == step).all() and (micro.y == step).all()
    assert asked == [0, 1, 2, 3, 4]


def test_a_slot_keeps_the_arrays_of_the_last_shapes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of ever new lengths, whose first comes again: the memory is that of 4 shapes, not of all."""
    made: list[Any] = []

    def allocate(size: int) -> Any:
        made.append(weakref.ref(found := fakecuda.pinned.malloc(size)))
        return found
    monkeypatch.setattr(fakecuda, "alloc_pinned_memory", allocate)
    sizes = [*range(1, 21), 1, 2]
    for step, micro_batches in Uploads(Feed(GPU, np.float32)).ahead(batches([], sizes)):
        assert all((micro.there[0].get() == 10 * step + i).all() for i, micro in enumerate(micro_batches))
        assert sum(memory() is not None for memory in made) <= 2 * 4 * 4, "slots, shapes; x and y of two micro-batches"
    assert len(made) == 4 * len(sizes)


@pytest.mark.usefixtures("in_order")
def test_no_batch_is_no_batch_and_one_is_one() -> None:
    assert [step for step, _ in Uploads(Feed(GPU, np.float32)).ahead(batches([], []))] == []
    assert [step for step, _ in Uploads(Feed(GPU, np.float32)).ahead(batches([], [3]))] == [0]


def test_a_slot_is_written_after_the_step_that_read_it_and_read_after_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of records, waits and copies that a device would see: without them the values above would be luck there. New
    arrays are written after all that was asked for before, which may read what was at their place."""
    told: list[str] = []
    events: list[Any] = []

    def name_of(thing: Any) -> str:
        if not any(thing is event for event in events):
            events.append(thing)
        return f"e{next(i for i, event in enumerate(events) if event is thing)}"

    def four_new(first: int) -> list[str]:
        return [f"{what} e{i}" for i in range(first, first + 4) for what in ("record", "wait")]
    monkeypatch.setattr(fakecuda.Event, "record", lambda self, stream=None: told.append(f"record {name_of(self)}"))
    monkeypatch.setattr(fakecuda.Stream, "wait_event", lambda self, event: told.append(f"wait {name_of(event)}"))
    monkeypatch.setattr(fakecuda.Event, "synchronize", lambda self: told.append(f"host waits {name_of(self)}"))
    given = Uploads(Feed(GPU, np.float32)).ahead(batches([], [1, 1, 1]))
    for step, _ in given:
        told.append(f"step {step}")
    assert told == [*four_new(0), "record e4", *four_new(5), "record e9",           # batches 0 and 1 have left
                    "wait e4", "step 0", "record e10",                              # slot 0 is read
                    "host waits e4", "wait e10", "record e4",                       # batch 2 into slot 0 after e10
                    "wait e9", "step 1", "record e11",
                    "wait e4", "step 2", "record e10"]
