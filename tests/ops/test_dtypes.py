"""Arrays that compiled code would misread are refused, by an error that names the operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpitrain import ops
from mpitrain.autograd.function import Function
from mpitrain.errors import ShapeError
from tests.ops.parity import normal

IMAGES, KERNEL, BIAS = (array.astype(np.float32) for array in (normal(2, 3, 5, 5), normal(4, 3, 3, 3), normal(4)))
ROWS, WIDE = normal(4, 3).astype(np.float32), normal(3).astype(np.float32)
HEADS = normal(1, 2, 4, 3).astype(np.float32)
CASES: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "Conv2d": (ops.conv2d, (IMAGES, KERNEL, BIAS)), "ConvTranspose2d": (ops.conv_transpose2d, (IMAGES, normal(3, 2, 2, 2))),
    "Linear": (ops.linear, (ROWS, normal(5, 3), normal(5))), "RowNorm": (ops.layer_norm, (ROWS, WIDE, WIDE)),
    "AddRowNorm": (ops.add_layer_norm, (ROWS, ROWS, WIDE, WIDE)), "BatchNorm": (ops.batch_norm, (ROWS, WIDE, WIDE)),
    "GroupNorm": (lambda x, w, b: ops.group_norm(x, 1, w, b), (IMAGES, WIDE, WIDE)),
    "Attention": (ops.scaled_dot_product_attention, (HEADS, HEADS, HEADS)), "Softmax": (ops.softmax, (ROWS,)),
    "Pointwise": (ops.gelu, (ROWS,)), "MaxPool": (lambda x: ops.max_pool2d(x, 2), (IMAGES,)),
    "CrossEntropy": (lambda x: ops.cross_entropy(x, np.zeros(4, np.int64)), (ROWS,)),
    "Dropout": (lambda x, r: ops.dropout(x, 0.5, "a layer", residual=r), (ROWS, ROWS)),
}


PLACES = [(name, place) for name, (_, arrays) in CASES.items() for place in range(len(arrays))]


@pytest.mark.parametrize("dtype", ["int64", "int8", "bool", "complex64", "float16", ">f4"])
@pytest.mark.parametrize(("name", "place"), PLACES)
def test_what_is_no_float_is_refused_by_name(name: str, place: int, dtype: str) -> None:
    op, arrays = CASES[name]
    given = [array.astype(np.float32) for array in arrays]
    given[place] = given[place].real.astype(dtype)
    message = f"^{name}: (an input is {np.dtype(dtype)}, expected float32 or float64; convert it first|inputs of )"
    with pytest.raises(ShapeError, match=message):
        op(*given)


@pytest.mark.parametrize(("here", "elsewhere"), [("float64", "float32"), ("float32", "float64")])
@pytest.mark.parametrize(("name", "place"), [(name, place) for name, place in PLACES if len(CASES[name][1]) > 1])
def test_one_input_of_the_other_precision_is_refused_before_anything_is_computed(name: str, place: int, here: str,
                                                                                 elsewhere: str) -> None:
    """Also as the first one: compiled code that reads the others by its size would read past their ends."""
    op, arrays = CASES[name]
    given = [array.astype(here if i == place else elsewhere) for i, array in enumerate(arrays)]
    message = f"^{name}: inputs of (float32 and float64|float64 and float32); convert one of them first"
    with pytest.raises(ShapeError, match=message):
        op(*given)


def test_a_result_of_less_precision_than_float64_inputs_is_refused() -> None:
    class Shorten(Function):
        @staticmethod
        def forward(ctx: Any, x: np.ndarray) -> np.ndarray:
            return x.astype(np.float32)

    with pytest.raises(ShapeError, match="Shorten: the result is float32, expected float64; a promotion crept in"):
        Shorten.apply(np.ones(3))
