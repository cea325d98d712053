"""Complex numbers in backward, for all ops at once that are analytic functions of their inputs.

With PyTorch's convention a gradient is dL/dRe + i dL/dIm, and passes an analytic y = f(x) as

    grad_x = grad_y conj(f'(x)) = conj( conj(grad_y) f'(x) )

The bracket is what `backward` of such an op computes, being written for real numbers. So a node with complex outputs conjugates
what goes into its op's backward and what comes out; a real input gets the real part.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from mpitrain.autograd.context import Context
from mpitrain.autograd.function import Function
from mpitrain.autograd.tensor import Tensor


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
    from mpitrain.ops.complex_numbers import conj, real
    result = function.derivative(ctx, *map(conj, grads))
    found = result if isinstance(result, tuple) else (result,)
    return tuple([x if x is None else real(x) if dtype is not None and dtype.kind == "f" else conj(x)
                  for x, dtype in zip(found, _dtypes(ctx))])


def _dtypes(ctx: Context) -> list[Any]:
    """Those of the inputs that have gradients."""
    return [None if edge is None else edge[0].output_meta[edge[1]][1] if type(edge) is tuple else meta[1]
            for edge, meta in zip(ctx.edges, ctx.leaf_meta)]
