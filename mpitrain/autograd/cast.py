"""Between float32 and formats of 16 bits, on devices; see `half`."""

from __future__ import annotations

from typing import Any

from mpitrain.autograd.context import Context
from mpitrain.autograd.function import Function
from mpitrain.autograd.half import SINGLE
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, is_array, is_half


class Cast(Function):
    """x in another format of floats. The gradient goes back in the format that its receiver has (`accumulate.fit`)."""

    half = "any"

    @staticmethod
    def forward(ctx: Context, x: Array, *, dtype: Any) -> Array:
        ctx.kind = x.dtype
        return x.astype(dtype)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        return grad

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Any:
        return Cast.apply(grad, dtype=ctx.kind)


def in_single(x: Any) -> Any:
    """A tensor or an array of 16 bits in float32; anything else as it is."""
    return Cast.apply(x, dtype=SINGLE) if (isinstance(x, Tensor) or is_array(x)) and is_half(x.dtype) else x
