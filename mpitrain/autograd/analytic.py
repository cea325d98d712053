"""Complex numbers in backward, for all ops at once that are analytic functions of their inputs.

With PyTorch's convention a gradient is dL/dRe + i dL/dIm, and passes an analytic y = f(x) as

    grad_x = grad_y conj(f'(x)) = conj( conj(grad_y) f'(x) )

The bracket is what `backward` of such an op computes, being written for real numbers. So a node with complex outputs conjugates
what goes into its op's backward and what comes out; a real input gets the real part.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from mpitrain.autograd.context import Context
from mpitrain.autograd.function import Function
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array

PAIRS = {"f": "F", "d": "D", "F": "f", "D": "d"}  # dtype of a complex number by that of its parts, and back


@cache
def conjugating(function: type[Function]) -> type[Function]:
    """`function` with backward and derivative for complex outputs; the same class for each node."""
    members: dict[str, Any] = {"__module__": function.__module__, "complex_inputs": "own"}
    members["derivative"] = staticmethod(lambda ctx, *grads: _tensors(function, ctx, grads))
    if function.backward is Function.backward:        # it runs the derivative, which conjugates
        members["backward"] = staticmethod(Function.backward)
    else:
        members["backward"] = staticmethod(lambda ctx, *grads: _arrays(function, ctx, grads))
    return type(function.__name__, (function,), members)


def _arrays(function: type[Function], ctx: Context, grads: tuple[Any, ...]) -> tuple[Any, ...]:
    ctx.out_requests = None                           # memory for a real gradient holds none of its complex forerunners
    result = function.backward(ctx, *[grad.conj() for grad in grads])
    found = result if isinstance(result, tuple) else (result,)
    return tuple([None if x is None else _as(x.conj(), dtype) for x, dtype in zip(found, _dtypes(ctx))])


def _as(x: Any, dtype: Any) -> Any:
    x = x.real if dtype is not None and dtype.kind == "f" else x
    return x if dtype is None or x.dtype == dtype else x.astype(dtype)


def _tensors(function: type[Function], ctx: Context, grads: tuple[Tensor, ...]) -> tuple[Any, ...]:
    result = function.derivative(ctx, *[Conjugate.apply(grad) for grad in grads])
    found = result if isinstance(result, tuple) else (result,)
    return tuple([x if x is None else _plain(x, dtype)
                  for x, dtype in zip(found, _dtypes(ctx))])


def _dtypes(ctx: Context) -> list[Any]:
    """Those of the inputs that have gradients."""
    return [None if edge is None else edge[0].output_meta[edge[1]][1] if type(edge) is tuple else meta[1]
            for edge, meta in zip(ctx.edges, ctx.leaf_meta)]


def _plain(x: Tensor, dtype: Any) -> Tensor:
    if x.dtype.kind == "c":
        x = Real.apply(x) if dtype is not None and dtype.kind == "f" else Conjugate.apply(x)
    return x


class Complex(Function):
    """real + i imag."""

    broadcasts = True
    floats = 2

    @staticmethod
    def forward(ctx: Context, real: Array, imag: Any) -> Array:
        result = ctx.xp.empty(np.broadcast_shapes(real.shape, getattr(imag, "shape", ())), PAIRS[real.dtype.char])
        result.real[...] = real
        result.imag[...] = imag
        return result

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        return Real.apply(grad) if ctx.needs[0] else None, Imaginary.apply(grad) if ctx.needs[1] else None


class Real(Function):
    complex_inputs = "own"

    @staticmethod
    def forward(ctx: Context, z: Array) -> Array:
        return z.real.copy()

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return Complex.apply(grad, 0.0)


class Imaginary(Function):
    complex_inputs = "own"

    @staticmethod
    def forward(ctx: Context, z: Array) -> Array:
        return z.imag.copy()

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return Complex.apply(grad * 0.0, grad)


class Conjugate(Function):
    complex_inputs = "own"

    @staticmethod
    def forward(ctx: Context, z: Array) -> Array:
        return z.conj()

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return Conjugate.apply(grad)
