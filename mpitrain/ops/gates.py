"""Smooth activations that are short expressions of others, and gated ones (Dauphin et al. 2016; Shazeer 2020)."""

from __future__ import annotations

from typing import Any

from mpitrain.autograd import Tensor
from mpitrain.errors import ShapeError
from mpitrain.ops.activation import sigmoid, silu, softmax, softplus, tanh
from mpitrain.ops.elementwise import absolute, multiply, negative, subtract
from mpitrain.ops.inputs import float_tensor, only_floats
from mpitrain.ops.shape import split

__all__ = ["glu", "log_sigmoid", "mish", "softmin", "softsign", "swiglu", "tanhshrink"]


def log_sigmoid(x: Any) -> Tensor:
    """log(1 / (1 + exp(-x))) without overflow."""
    return negative(softplus(negative(x)))


def mish(x: Any) -> Tensor:
    """x tanh(log(1 + exp(x))); Misra, 2019."""
    return multiply(x, tanh(softplus(x)))


def softsign(x: Any) -> Tensor:
    """x / (1 + |x|)."""
    return x / (1.0 + absolute(x))


def tanhshrink(x: Any) -> Tensor:
    """x - tanh(x)."""
    x = float_tensor("tanhshrink", x)
    return subtract(x, tanh(x))


def softmin(x: Any, dim: int = -1) -> Tensor:
    """exp(-x) / sum exp(-x) along `dim`."""
    return softmax(negative(x), dim=dim)


def glu(x: Any, dim: int = -1) -> Tensor:
    """a sigmoid(b), of the first half a and the second half b of x along `dim`; ShapeError where its size is odd."""
    a, b = _halves("glu", x, dim)
    return a * sigmoid(b)


def swiglu(x: Any, dim: int = -1) -> Tensor:
    """silu(a) b, of the first half a and the second half b of x along `dim`; ShapeError where its size is odd."""
    a, b = _halves("swiglu", x, dim)
    return silu(a) * b


def _halves(name: str, x: Any, dim: int) -> tuple[Tensor, ...]:
    shape = tuple(only_floats(name, x).shape)
    if not -len(shape) <= dim < len(shape) or shape[dim] % 2:
        raise ShapeError(f"{name}: halves along dim {dim} of an input of shape {shape}: expected an even size there")
    if not shape[dim]:
        raise ShapeError(f"{name}: the input has shape {shape}, expected 2 or more along dim {dim}")
    return split(x, shape[dim] // 2, dim=dim)
