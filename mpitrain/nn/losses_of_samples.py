"""Losses of a run with one term a sample: the error of a whole field, and the bound that a variational autoencoder learns by."""

from __future__ import annotations

import math
from typing import Any

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.backend import Array
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.nn.loss import Loss
from mpitrain.ops.inputs import door

__all__ = ["ELBO", "RelativeL2"]

PARTS = ("binary", "normal")


class RelativeL2(Loss):
    """|output - target| / |target|, both norms over all numbers of a sample; one term a sample (Li et al. 2021).

    A target that is zero throughout has no such error: the loss is not finite then.
    """

    def total(self, output: Tensor, target: Array) -> Tensor:
        n = len(target)
        errors = ops.norm(ops.reshape(output - target, n, -1), dim=1)
        return ops.sum(errors / ops.norm(Tensor(target.reshape(n, -1)), dim=1))

    def count(self, target: Array) -> int:
        return len(target)


class ELBO(Loss):
    """The negative lower bound on the evidence, for a sample: reconstruction + beta x divergence (Kingma and Welling 2014).

    The output (N, P + 2 Z) has P numbers for those of a target, then the means and the logarithms of the variances of Z
    independent normal distributions, whose divergence from the standard one is the second part. The first is, summed over the P
    numbers, the cross-entropy of logits and targets in 0 ... 1 (`reconstruction` "binary"), or half the squared differences
    ("normal": a variance of 1). `beta` other than 1: Higgins et al. 2017.
    """

    kind = "rows"

    def __init__(self, reconstruction: str = "binary", beta: float = 1.0):
        if reconstruction not in PARTS:
            raise ConfigError(f'the elbo loss has a reconstruction of {" or ".join(PARTS)}, not "{reconstruction}"')
        if not 0.0 <= beta < math.inf:
            raise ConfigError(f"the beta of the elbo loss is a number of 0 or more, not {beta}")
        self.reconstruction, self.beta = reconstruction, beta
        self.bounds = (0.0, 1.0) if reconstruction == "binary" else Loss.bounds

    @door
    def __call__(self, output: Any, target: Any) -> Tensor:
        n = len(target)
        numbers = math.prod(target.shape[1:])
        codes, rest = divmod(output.shape[1] - numbers, 2) if len(output.shape) == 2 else (0, 0)
        if codes < 1 or rest:
            raise ShapeError(f"the elbo loss expects an output (N, {numbers} + 2 Z) for targets {tuple(target.shape)}, found "
                             f"{output.shape}; the model gives a reconstruction, flat, then Z means and Z log-variances")
        wanted = target.reshape(n, numbers).astype(output.dtype, copy=False)
        made, mean, log_variance = ops.split(output, [numbers, codes, codes], 1)
        if self.reconstruction == "binary":
            first = ops.binary_cross_entropy_with_logits(made, wanted)
        else:
            first = ops.mse(made, wanted) * 0.5
        second = ops.sum(mean * mean + ops.exp(log_variance) - log_variance - 1.0) * 0.5
        return first + second * self.beta

    def count(self, target: Array) -> int:
        return len(target)


relative_l2, elbo = RelativeL2, ELBO
