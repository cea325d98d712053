"""A cut by measured time: what is measured, what it makes of a model of unequal blocks, and when it is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain import models, nn, ops
from mpitrain.autograd import Tensor
from mpitrain.backend import CPU
from mpitrain.errors import ShapeError
from mpitrain.parallel.pipeline.block_seconds import TIMES, block_seconds
from mpitrain.placement.stages import balanced
from mpitrain.train.build import measured_cut


def seconds(model: nn.Sequential, x: Any, *, tokens: bool = False) -> list[float]:
    return block_seconds(model, x, seed=1, precision="float32", device=CPU, tokens=tokens)


class Heavy(nn.Module):
    """Takes as long as many products."""

    def __init__(self, width: int):
        self.weight = nn.Parameter((width, width), nn.init.normal(0.01))

    def forward(self, x: Any) -> Tensor:
        for _ in range(200):
            x = ops.linear(x, self.weight)
        return x


def test_a_block_that_takes_long_is_on_a_stage_with_fewer_others() -> None:
    model = nn.Sequential(*((f"light{i}", nn.Linear(64, 64)) for i in range(3)), ("heavy", Heavy(64)), ("last", nn.Linear(64, 8)))
    found = seconds(model, np.ones((32, 64), np.float32))
    assert len(found) == 5 and min(found) > 0 and found[3] > 5 * max(found[:3] + found[4:])
    assert balanced(found, 2) in ([3, 2], [4, 1]) and balanced(found, 3)[0] + balanced(found, 3)[1] >= 3


def test_one_block_at_a_time_has_memory_and_none_afterwards() -> None:
    model = models.gpt(layers=2, heads=2, width=8, block=4, vocabulary=7, dropout=0.2)
    model.untie()
    calls: list[int] = []
    held: list[set[str]] = []

    class Counting(nn.Module):
        def forward(self, x: Any) -> Any:
            calls.append(len(x))
            held.append({name.split(".")[0] for name, p in whole.named_parameters() if p.allocated})
            return x
    both = nn.Sequential(("count", Counting()), ("linear", nn.Linear(7, 7)))
    whole = nn.Sequential(*model.blocks.items(), ("norm2", nn.BatchNorm1d(4)), ("both", both))
    assert len(seconds(whole, np.zeros((6, 4), np.int64), tokens=True)) == 7
    assert calls == [6] * TIMES and held == [{"both"}] * TIMES
    assert not any(parameter.grad is not None or parameter.allocated for parameter in whole.parameters())
    assert not any(buffer.allocated for _, buffer in whole.named_buffers())
    whole.initialize(0)
    assert nn.collect_statistics(whole)[-1] == 0, "no statistics of the measurement are left"


def test_a_block_that_gives_no_single_tensor_and_one_that_does_not_fit_are_named() -> None:
    class Both(nn.Module):
        def forward(self, x: Any) -> Any:
            return x, x
    with pytest.raises(ShapeError, match=r'"both" gives a tuple; give the numbers of blocks instead'):
        seconds(nn.Sequential(("both", Both()), ("b", nn.Linear(2, 2))), np.ones((3, 2), np.float32))
    with pytest.raises(ShapeError, match=r'the block "b" cannot take \(3, 4\) \(float32\)'):
        seconds(nn.Sequential(("a", nn.Linear(2, 4)), ("b", nn.Linear(2, 2))), np.ones((3, 2), np.float32))


def test_a_run_that_goes_on_keeps_the_cut_that_fits_its_stages() -> None:
    chosen = {"stages": [0, 3, 4, 9]}
    assert measured_cut.kept("time", 3, chosen) == [3, 1, 5]
    assert measured_cut.kept("time", 2, chosen) == measured_cut.kept("time", 3, None) == "time"
    assert measured_cut.kept("time", 3, {}) == "time"
    assert measured_cut.kept("blocks", 3, chosen) == "blocks" and measured_cut.kept((4, 5), 3, chosen) == (4, 5)
