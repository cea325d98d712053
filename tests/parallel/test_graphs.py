"""What captured graphs keep: a bounded number of them, and numbers of a launch in pinned memory until they have been read."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import fakecuda
import numpy as np
import pytest
from fakegpu import DeviceArray, xp

from mpitrain import nn
from mpitrain.autograd import Tensor
from mpitrain.backend import Device, random
from mpitrain.data import MicroBatch
from mpitrain.parallel.gradients.reducer import GradientReducer
from mpitrain.parallel.pipeline.feed import Feed
from mpitrain.parallel.pipeline.graphs import Graphs
from mpitrain.parallel.pipeline.stored_keys import Pinned, Uncapturable

GPU = Device("gpu", xp)


class Setting:
    """A small model that drops, its graphs, and steps of any number of rows."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        storage: Any = self.model.initialize(1, device=GPU)
        self.model.train()
        self.reducer = GradientReducer(storage, SimpleNamespace(size=1, tree=None))
        self.graphs = Graphs(GPU, Feed(GPU, np.float32), self.reducer, lambda x, y: self.loss(Tensor(x), y), wanted=True, seed=7)

    def loss(self, x: Tensor, y: Any) -> Tensor:
        return nn.LOSSES["cross_entropy"]()(self.model(x), y)

    def step(self, rows: int, number: int, *, captured: bool) -> tuple[float, Any] | None:
        """The loss and the gradients."""
        rng = np.random.default_rng(rows)
        x, y = rng.standard_normal((rows, 3)).astype(np.float32), rng.integers(0, 2, rows)
        self.reducer.begin()
        self.reducer.begin_micro_batch(last=True)
        if captured:
            loss = self.graphs.run(MicroBatch(x, y, np.arange(rows, dtype=np.uint64), 0, 0, number), lambda: rows, last=True)
            if loss is None:
                return None
        else:
            with random.use(random.Scope(7, number, np.arange(rows, dtype=np.uint64))):
                result = self.loss(Tensor(xp.asarray(x)), xp.asarray(y))
            result.backward(xp.asarray(np.float32(1 / rows)))
            loss = result.array
        return float(loss), self.reducer.finish().get()


def test_the_graphs_of_the_last_shapes_are_kept_and_others_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes again is captured again, and all compute what the same code does."""
    monkeypatch.setattr(Graphs, "KEPT", 2)
    captured, plain = Setting(), Setting()
    made: list[Any] = []
    capture = Graphs._capture

    def noted(self: Graphs, *given: Any) -> Any:
        found = capture(self, *given)
        made.append(weakref.ref(found))
        return found
    monkeypatch.setattr(Graphs, "_capture", noted)
    for number, rows in enumerate([2, 2, 3, 3, 2, 4, 4, 2, 3, 3, 5, 5, 2]):
        found, expected = captured.step(rows, number, captured=True), plain.step(rows, number, captured=False)
        if found is not None:
            assert found[0] == expected[0], number
            np.testing.assert_array_equal(found[1], expected[1])
        assert sum(graph() is not None for graph in made) <= 2
    assert len(made) == 6, "2, 3, 4, then 3 in place of 4 or of 2, and so on; 2 stays while it is used"


def test_shapes_that_come_once_are_forgotten_and_capture_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graphs, "KEPT", 2)
    setting = Setting()
    assert [setting.step(rows, 0, captured=True) for rows in (*range(2, 12), 2)] == [None] * 11, "of 8 shapes alone it is known"


def test_the_keys_of_a_launch_go_up_from_pinned_memory_that_is_written_again_once_it_was_read(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pinned, "PLACES", 3)
    pinned: list[Any] = []
    malloc = fakecuda.alloc_pinned_memory
    monkeypatch.setattr(fakecuda, "alloc_pinned_memory", lambda size: pinned.append(malloc(size)) or pinned[-1])
    sent: list[tuple[bool, int]] = []
    bring = DeviceArray.set

    def noted(self: DeviceArray, values: np.ndarray, stream: Any = None) -> None:
        if values.dtype == np.uint64:
            sent.append((any(np.may_share_memory(values, memory) for memory in pinned), values.ctypes.data))
        bring(self, values, stream)
    monkeypatch.setattr(DeviceArray, "set", noted)
    asked: list[int] = []
    monkeypatch.setattr(fakecuda.Event, "synchronize", lambda self: asked.append(len(sent)))
    monkeypatch.setattr(fakecuda.Event, "done", False)
    setting = Setting()
    for number in range(6):
        setting.step(2, number, captured=True)
    assert [is_pinned for is_pinned, _ in sent] == [True] * 5
    assert len({place for _, place in sent}) == 3 and asked == [3, 4], "the host waits for the copy of three launches ago"


def test_a_device_without_room_for_another_graph_leaves_those_there_are_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs write into memory that their pool has for free: given back to the driver, it would be somebody else's."""
    setting = Setting()
    for number in range(2):
        setting.step(2, number, captured=True)
    (pool,) = setting.graphs.pools
    setting.step(3000, 2, captured=True)
    monkeypatch.setattr(fakecuda.Memory, "LIMIT", 40_000)
    with pytest.raises(Uncapturable, match="bytes for captured graphs: cudaErrorMemoryAllocation"):
        setting.step(3000, 3, captured=True)
    assert pool.total_bytes() and not pool.given_back
