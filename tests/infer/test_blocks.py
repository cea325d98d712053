"""Blocks in one call of C against the ops, to the bit; and those that C does not run, which go op by op."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain import nn
from mpitrain.autograd import Tensor, no_grad, row_by_row
from mpitrain.backend import native
from mpitrain.infer.blocks import joined
from mpitrain.infer.cache import Cache
from mpitrain.kernels.few_rows import few_rows
from mpitrain.kernels.few_rows import row_by_row as by_rows
from mpitrain.kernels.kernel import has_numba
from mpitrain.kernels.library import bind
from mpitrain.kernels.linear import pack
from mpitrain.models import MODELS
from mpitrain.nn.lowbit import LowBitLinear
from mpitrain.shrink.formats import FORMATS, Int8
from mpitrain.shrink.quantize import quantize, weighted

pytestmark = pytest.mark.skipif(native.load("decode") is None, reason="needs C: blocks are run by it")


def gpt(dtype: str = "float32", **keys: Any) -> Any:
    model = MODELS["gpt"](**{"layers": 3, "heads": 3, "width": 57, "block": 70, "vocabulary": 11, **keys})
    model.initialize(4, dtype)
    for parameter in model.parameters():
        parameter.array[...] = np.random.default_rng(parameter.size).standard_normal(parameter.shape) / 3
    return model.eval()


OWN_SIZES = {"heads": 2, "head_width": 19, "hidden": 70}


@pytest.mark.parametrize(("dtype", "keys", "format"), [
    ("float32", {}, ""), ("float32", {"bias": True}, ""), ("float64", {"bias": True}, ""), ("float32", OWN_SIZES, ""),
    ("float32", {**OWN_SIZES, "bias": True}, "int8-dynamic"), *(("float32", {"bias": True}, name) for name in FORMATS)])
def test_they_have_the_bits_of_the_ops(dtype: str, keys: dict[str, Any], format: str) -> None:
    """Blocks and head, the weights as they lie, packed, and in few bits."""
    rng, wanted = np.random.default_rng(0), []
    steps = [(rng.standard_normal((rows, 1, 57)).astype(dtype), rng.permutation(5)[:rows].tolist())
             for rows in (1, 5, 2, 3, 4) * 12]
    for way in ("ops", "together", "packed"):
        model = gpt(dtype, **keys)
        if format:
            paths = [path for path, _ in weighted(model) if "embed" not in path]
            quantize(model, dict.fromkeys(paths, format), input_scales=dict.fromkeys(paths, 0.03))
        cache, lengths = Cache(model, 5, 70, dtype), [0] * 5
        blocks = list(model.blocks.items())[1:]
        found = joined(blocks, pack=way == "packed")
        assert [together is not None for _, _, together, _ in found] == [True, False, False, True, False]
        assert [count for *_, count in found] == [3, 1, 1, 2, 1]
        run = [block for _, block in blocks] if way == "ops" else [found[0][2], found[3][2]]
        with no_grad(), row_by_row():
            for number, (x, slots) in enumerate(steps):
                cache.use(slots, [lengths[slot] for slot in slots])
                y = Tensor(x)
                for step in run:
                    y = step(y)
                for slot in slots:
                    lengths[slot] += 1
                if way != "ops":
                    assert y.array.tobytes() == wanted[number], (way, number)
                wanted.append(y.array.tobytes())


class Halves(Int8):
    """A format of the user's own, whose product C does not know."""


class Other(nn.Linear):
    """A layer in another format."""


def test_a_block_that_is_not_plain_is_left_to_the_ops() -> None:
    model = gpt()
    Cache(model, 1, 70, "float32")
    model["block1"].wide = Other(57, 228, False, activation="gelu")
    model["block2"].narrow.before_forward(lambda module, inputs: None)
    model["head"].before_forward(lambda module, inputs: None)
    found = joined(list(model.blocks.items()))
    assert [together is not None for _, _, together, _ in found] == [False, True, False, False, False, False]
    assert [count for *_, count in found] == [1] * 6
    assert joined(list(gpt().blocks.items()))[1][2] is None                    # without a cache
    model = gpt()
    Cache(model, 1, 70, "float32")
    model["block1"].wide = LowBitLinear.of(model["block1"].wide, Halves())
    assert [count for *_, count in joined(list(model.blocks.items()))] == [1, 1, 1, 1, 2, 1]
    model = gpt(heads=[2, 2, 3], head_width=19, hidden=[40, 40, 48])           # blocks of other sizes have a call of their own
    Cache(model, 1, 70, "float32")
    assert [count for _, _, together, count in joined(list(model.blocks.items())) if together is not None] == [2, 1, 2]


def from_packed(x: Any, w: Any, bias: Any) -> Any:
    call, packed = bind("product", "few_rows_packed", "X:mk X X?:n X!:mn im in ik"), pack(w)
    y = np.empty((len(x), len(w)), x.dtype)
    assert call is not None
    call(np.ascontiguousarray(x), packed, bias, y, *y.shape, x.shape[1])
    return y


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_row_has_the_same_bits_among_any_number_of_rows(dtype: str) -> None:
    rng = np.random.default_rng(0)
    for inputs in (1, 7, 16, 31, 65, 384, 385, 1200):
        for outputs in (1, 8, 16, 37, 65):
            x, w = (rng.standard_normal(shape).astype(dtype) for shape in ((20, inputs), (outputs, inputs)))
            bias = rng.standard_normal(outputs).astype(dtype)
            whole = by_rows(x, w, bias)
            for rows in (1, 2, 7, 8, 9, 19):
                assert by_rows(x[:rows], w, bias).tobytes() == whole[:rows].tobytes(), (inputs, outputs, rows)
                assert few_rows.host()(x[:rows], w, bias).tobytes() == whole[:rows].tobytes()
                assert from_packed(x[:rows], w, bias).tobytes() == whole[:rows].tobytes()
            if has_numba() and inputs < 100:
                assert few_rows.numba()(x, w, bias).tobytes() == whole.tobytes()
            exact, tolerance = x.astype("float64") @ w.T + bias, 1e-4 if dtype == "float32" else 1e-12
            np.testing.assert_allclose(whole, exact, rtol=0, atol=tolerance)
