"""A module as text, and a Sequential that grows."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain import nn
from mpitrain.autograd import Tensor
from mpitrain.errors import ShapeError


def test_a_model_is_printed_one_line_for_each_module() -> None:
    model = nn.Sequential(nn.Linear(4, 8), ("act", nn.Sequential(nn.Dropout(0.1), nn.RMSNorm(8))), nn.ReLU())
    assert repr(model).splitlines() == [
        "Sequential(", "  (0): Linear(weight (8, 4), bias (8,))", "  (act): Sequential(", "    (0): Dropout(p=0.1)",
        "    (1): RMSNorm(shape=(8,), weight (8,))", "  )", "  (2): ReLU()", ")"]


def test_modules_of_ones_own_are_printed_with_their_parameters() -> None:
    class Two(nn.Module):
        def __init__(self, width: int, *, deep: bool = False):
            self.width, self.deep = width, deep
            self.scale = nn.Parameter((3,), nn.init.ones)
            self.parts = [nn.Tanh(), nn.Linear(2, 2, bias=False)]

    assert repr(Two(3)) == "Two(\n  width=3, scale (3,)\n  (parts.0): Tanh()\n  (parts.1): Linear(weight (2, 2))\n)"


def test_a_sequential_grows_until_it_has_memory() -> None:
    rng = np.random.default_rng(0)
    whole = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), ("last", nn.Linear(4, 2)))
    grown = nn.Sequential().append(nn.Linear(3, 4)).extend([nn.Tanh(), ("last", nn.Linear(4, 2))])
    for model in (whole, grown):
        model.initialize(seed=1, dtype="float64")
    x = Tensor(rng.standard_normal((5, 3)))
    assert np.array_equal(whole(x).numpy(), grown(x).numpy()) and list(grown.blocks) == ["0", "1", "last"]
    with pytest.raises(ShapeError, match="append blocks before initialize"):
        grown.append(nn.Tanh())
    with pytest.raises(ShapeError, match="need different names"):
        nn.Sequential(nn.Tanh()).append(("0", nn.Tanh()))
    with pytest.raises(ShapeError, match="block 1 is 3, expected a Module"):
        nn.Sequential(nn.Tanh()).append(3)  # type: ignore[arg-type]
