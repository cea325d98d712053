"""Gradients that meet are added: in place where nobody else has the memory, into the memory that a leaf asks for, else anew."""

from __future__ import annotations

from sys import getrefcount
from typing import Any

import numpy as np

from mpitrain.autograd.context import Context
from mpitrain.autograd.half import gradient_dtype, in_format
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module, is_array, is_half
from mpitrain.errors import GraphError
from mpitrain.kernels.sums import sum_over


def accumulate(node: Context, output: int, grad: Array) -> None:
    before, node.grads[output] = node.grads[output], None
    if before is None:
        node.grads[output] = grad
    elif getrefcount(before) == ONE and is_private(before, gaps=True):
        before += grad
        node.grads[output] = before
    else:
        node.grads[output] = before + grad            # an op may pass one array twice


def _count_of_one() -> int:
    alone = object()
    return getrefcount(alone)


ONE = _count_of_one()                                 # The reference count of an object that one local variable holds.


def is_private(array: Array, gaps: bool = False) -> bool:
    """True where memory that is shown by `array`, and by no other variable, is whole, writable, and nobody else's. With `gaps`, a
    device's may be the first columns of a wider matrix, as logits of a vocabulary are."""
    flags = array.flags
    if type(array) is not np.ndarray:                 # CuPy's views keep the array that has the memory, too
        return (bool(flags.c_contiguous) or (gaps and _by_rows(array))) and (
            bool(flags.owndata) or (type(array.base) is type(array) and getrefcount(array.base) == ONE))
    return flags.c_contiguous and flags.writeable and (
        flags.owndata or (type(array.base) is np.ndarray and array.base.flags.owndata and getrefcount(array.base) == ONE))


def _by_rows(array: Array) -> bool:
    """Whether rows are without gaps, in order, and evenly apart: no number of memory is there twice."""
    sizes, steps = array.shape, array.strides
    if array.ndim < 2 or steps[-1] != array.itemsize or steps[-2] < sizes[-1] * array.itemsize:
        return False
    return all(step == size * inner for step, size, inner in zip(steps[:-2], sizes[1:-1], steps[1:-1]))


def add_to_leaf(leaf: Tensor, contribution: Array, ours: bool) -> None:
    if leaf.grad is not None:
        leaf.grad += contribution
    elif ours:
        leaf.grad = contribution
    elif leaf.grad_buffer is not None:
        array_module(contribution).copyto(leaf.grad_buffer, contribution)
        leaf.grad = leaf.grad_buffer
    else:
        leaf.grad = contribution.copy()           # the op may have handed the same array to someone else


def fit(node: Context, i: int, grad: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """The gradient of input i, summed back over broadcast dims where the op broadcasts, and checked."""
    if not is_array(grad):
        grad = node.xp.asarray(grad)              # NumPy's arithmetic on 0-d arrays gives scalars
    if node.function.broadcasts and grad.shape != shape:
        grad = sum_to_shape(grad, shape)
    if is_half(dtype) or (grad.dtype is not dtype and is_half(grad.dtype)):
        dtype = gradient_dtype(node.edges[i], dtype)
        grad = in_format(grad, dtype)
    if grad.shape != shape or (grad.dtype is not dtype and grad.dtype != dtype):
        raise GraphError(f"{node.function.__name__}: the gradient of input {i} is {grad.shape} {grad.dtype}, "
                         f"the input is {shape} {dtype}")
    return grad


def sum_to_shape(grad: Array, shape: tuple[int, ...]) -> Array:
    """Sums `grad` over the dims along which an array of `shape` was repeated."""
    extra = grad.ndim - len(shape)
    dims = tuple(range(extra)) + tuple(extra + i for i, n in enumerate(shape) if n == 1 and grad.shape[extra + i] != 1)
    return sum_over(grad, dims, True).reshape(shape) if dims else grad.reshape(shape)
