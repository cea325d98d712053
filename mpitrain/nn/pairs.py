"""Layers of two inputs: a bilinear form, a similarity, a distance."""

from __future__ import annotations

import math
from typing import Any

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ShapeError
from mpitrain.nn import init
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter

__all__ = ["Bilinear", "CosineSimilarity", "PairwiseDistance"]


class Bilinear(Module):
    """y_o = sum_ij x_i W_oij z_j + b_o, of x (..., I) and z (..., J); weight (O, I, J)."""

    by_position = True

    def __init__(self, first: int, second: int, outputs: int, bias: bool = True):
        values = init.uniform(1.0 / math.sqrt(first) if first else 0.0)
        self.weight = Parameter((outputs, first, second), values)
        self.bias = Parameter((outputs,), values) if bias else None

    def forward(self, x: Any, z: Any) -> Tensor:
        outputs, first, second = self.weight.shape
        if (not len(x.shape) or tuple(x.shape[:-1]) != tuple(z.shape[:-1]) or x.shape[-1] != first or z.shape[-1] != second):
            raise ShapeError(f"Bilinear expects inputs (..., {first}) and (..., {second}) with the same leading dims, got shapes "
                             f"{tuple(x.shape)} and {tuple(z.shape)}")
        weight = ops.reshape(ops.transpose(self.weight, 1, 0, 2), first, outputs * second)
        rows = ops.reshape(ops.matmul(ops.reshape(x, math.prod(x.shape[:-1]), first), weight), *x.shape[:-1], outputs, second)
        y = (rows * ops.expand_dims(z, -2)).sum(-1)
        return y if self.bias is None else y + self.bias


class CosineSimilarity(Module):
    """x z / (|x| |z|) along `dim`, neither length below eps."""

    def __init__(self, dim: int = 1, eps: float = 1e-8):
        self.dim, self.eps = dim, eps

    def forward(self, x: Any, z: Any) -> Tensor:
        return ops.cosine_similarity(x, z, self.dim, self.eps)


class PairwiseDistance(Module):
    """The p-norm of x - z + eps over the last dim; p is any number but 0, math.inf too."""

    def __init__(self, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False):
        if p == 0 or math.isnan(p):
            raise ShapeError(f"PairwiseDistance: p is {p}, expected another number")
        self.p, self.eps, self.keepdim = p, eps, keepdim

    def forward(self, x: Any, z: Any) -> Tensor:
        return ops.pairwise_distance(x, z, self.p, self.eps, self.keepdim)
