"""The first value that is not finite is traced to the layer, or to the forward between layers, that made it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain import Tensor, nn, ops
from mpitrain.data import MicroBatch
from mpitrain.parallel.pipeline.nonfinite import nonfinite_loss, origin_of


class Between(nn.Module):
    """`spoil` says where a value becomes NaN: in what goes to a layer, in the result, or nowhere; a mask of -inf is no fault."""

    def __init__(self, spoil: str = "") -> None:
        self.a, self.b, self.spoil = nn.Linear(2, 3), nn.Sequential(("one", nn.Linear(3, 3))), spoil

    def forward(self, x: Any) -> Any:
        h = self.a(x)
        y = self.b(ops.log(h * 0 - 1) if self.spoil == "given" else h)
        y = Masked()(y, Tensor(np.full(3, -np.inf, np.float32)))
        return ops.log(y * 0 - 1) if self.spoil == "result" else y


class Masked(nn.Module):
    def forward(self, x: Any, mask: Any) -> Any:
        return x + mask.exp()


def test_a_value_made_between_layers_is_the_forwards_around_them() -> None:
    x = np.ones((4, 2), np.float32)
    for spoil, wanted in (("given", r'the model\'s own forward (.*:Between), in what it gives to "b"'.replace("\\", "")),
                          ("result", "the model's own forward (.*:Between); every layer's output is finite"),
                          ("", "the loss function; every layer's output is finite")):
        model = Between(spoil)
        model.initialize(0)
        start, _, end = wanted.partition(".*")
        text = origin_of(model, x).text
        assert text.startswith(start) and text.endswith(end), text


def test_a_module_inside_is_named_with_its_place() -> None:
    model = nn.Sequential(("head", nn.Linear(2, 2)), ("body", Between("result")))
    model.initialize(0)
    assert origin_of(model, np.ones((4, 2), np.float32)).text.startswith('the layer "body" (')


@pytest.mark.parametrize("rows", [1, 4])
def test_the_samples_are_those_of_the_bad_value(rows: int) -> None:
    class Log(nn.Module):
        def __init__(self) -> None:
            self.a = nn.Linear(2, 2)

        def forward(self, x: Any) -> Any:
            return self.a(ops.log(x))

    model = Log()
    model.initialize(0)
    x = np.ones((5, 2), np.float32)
    x[rows] = -1
    assert origin_of(model, x).places == [rows]


@pytest.mark.parametrize(("spoilt", "comes", "advice"), [
    ("model", "the model's own forward (.*:Between); every layer's output is finite",
     "look at what it computes for these samples, or try a smaller optimizer.lr or optimizer.clip_norm"),
    ("loss", "the loss function; every layer's output is finite",
     "look at what it computes for these samples, or try a smaller optimizer.lr or optimizer.clip_norm"),
    ("data", "the input of the model", "look at that data, and at data.transform and data.augment"),
    ("parameter", 'the parameter "a.weight"', "try a smaller optimizer.lr or optimizer.clip_norm")])
def test_the_advice_is_about_what_is_not_finite(spoilt: str, comes: str, advice: str) -> None:
    model, x = Between("result" if spoilt == "model" else ""), np.ones((4, 2), np.float32)
    model.initialize(0)
    if spoilt == "data":
        x[1] = np.nan
    if spoilt == "parameter":
        model.a.weight.array[0] = np.nan
    error = nonfinite_loss(model, Tensor(x), np.nan, MicroBatch(x, x, np.arange(4, dtype=np.uint64), index=0, first=0, step=1))
    start, _, end = comes.partition(".*")
    told = error.message.partition("the first value that is not finite comes from ")[2]
    assert told.startswith(start) and end in told and told.endswith(f"no parameter was changed in this step; {advice}"), told
