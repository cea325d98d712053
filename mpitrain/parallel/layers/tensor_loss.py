"""Cross-entropy of logits whose classes are cut over several ranks (Shoeybi et al.: "Megatron-LM", 2019)."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import NO_CLASS, Array, array_module
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.kernels import rows
from mpitrain.nn.loss import CrossEntropy
from mpitrain.ops.loss import check_labels
from mpitrain.parallel.layers.tensor_functions import Group
from mpitrain.placement.tensor_plan import Layer


class CutCrossEntropy(Function):
    """`ops.cross_entropy` of the logits of all ranks together: the sum over rows, on every rank.

    One message is enough. For each row a rank sends its largest logit m, the sum t of exp(logit - m), the label's logit (0 where
    another rank has the label) and, with smoothing, the sum of the logits; a rank's part of the total is t exp(m - largest m).
    """

    floats = 1

    @staticmethod
    def forward(ctx: Context, logits: Array, labels: Array, *, smoothing: float, ignore: int | None, group: Group, first: int,
                classes: int) -> Array:
        if logits.shape[:-1] != labels.shape or logits.ndim == 0 or labels.dtype.kind not in "iu":
            raise ShapeError(f"cross_entropy: logits of shape {(*logits.shape[:-1], classes)} want integer labels of shape "
                             f"{logits.shape[:-1]}, found {labels.dtype} of shape {labels.shape}")
        xp, width = ctx.xp, logits.shape[-1]
        flat = xp.ascontiguousarray(labels, dtype=xp.int64).reshape(-1)
        counted = xp.ones(flat.shape, bool) if ignore is None else flat != ignore
        if xp is np:
            check_labels(flat, classes, ignore, labels)
        here = counted & (flat >= first) & (flat < first + width)
        x, own = logits.reshape(flat.size, width), (xp.arange(flat.size), xp.where(here, flat - first, 0))
        exps, totals = rows.exponentials(*rows.cross_entropy(x, xp.zeros_like(flat), 0.0, None, True)[1:])

        table = xp.zeros((group.size, 4 if smoothing else 3, flat.size), xp.float64)
        mine = table[group.rank]
        mine[0], mine[1] = x.max(axis=1), totals
        mine[2] = xp.where(here, x[own], 0)
        if smoothing:
            mine[3] = x.sum(axis=1, dtype=xp.float64)
        table = group.sum(table, "cross entropy")     # Exact: only one rank has a number in each place.
        largest = table[:, 0].max(axis=0)
        total = (table[:, 1] * xp.exp(table[:, 0] - largest)).sum(axis=0)
        losses = xp.log(total) + largest - (1 - smoothing) * table[:, 2].sum(axis=0)
        if smoothing:
            losses -= smoothing / classes * table[:, 3].sum(axis=0)
        if xp is not np:                              # a device would have to be waited for: such a label's loss is NaN
            losses = xp.where((flat < 0) | (flat >= classes), np.nan, losses)
        ctx.save(exps, xp.exp(mine[0] - largest) / total)                  # The product of the two is the softmax.
        ctx.own, ctx.here, ctx.counted, ctx.shape = own, here, counted, logits.shape
        ctx.smoothing, ctx.uniform = smoothing, smoothing / classes
        return xp.where(counted, losses, 0.0).sum().astype(logits.dtype)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Any, ...]:
        exps, factors = ctx.saved
        own, here, counted, shape, smoothing, uniform = ctx.own, ctx.here, ctx.counted, ctx.shape, ctx.smoothing, ctx.uniform
        ctx.release()                             # The gradient is written over the exponentials.
        exps *= (factors * counted * grad).astype(exps.dtype)[:, None]
        if smoothing:
            exps -= (uniform * counted * grad).astype(exps.dtype)[:, None]
        exps[own] -= (here * ((1 - smoothing) * grad)).astype(exps.dtype)
        return exps.reshape(shape), None


class CutLoss:
    """The loss `cross_entropy` of this rank's logits: classes [first, first + their number) of `classes`."""

    kind = "classes"

    def __init__(self, loss: Any, group: Group, first: int, classes: int, path: str):
        if not isinstance(loss, CrossEntropy) or loss.counted_weight is not None:
            raise ConfigError(f'mesh.plan leaves the outputs of "{path}" cut ("vocabulary"), which is for train.loss = '
                              f'"cross_entropy" without weights; make "{path}" "gathered" for {type(loss).__name__}')
        self.loss, self.group, self.first, self.classes = loss, group, first, classes
        self.ignore_index = loss.ignore_index

    def __call__(self, output: Tensor, target: Any) -> Tensor:
        return CutCrossEntropy.apply(output, target, smoothing=self.loss.label_smoothing, ignore=self.ignore_index,
                                     group=self.group, first=self.first, classes=self.classes)

    def count(self, target: Any) -> int:
        return self.loss.count(target)


def cut_loss(loss: Any, head: Layer | None, group: Group | None) -> Any:
    """`loss` for the outputs as a rank of `group` has them: a `head` leaves them cut. ConfigError where `loss` wants all."""
    return loss if head is None or group is None else CutLoss(loss, group, head.first, head.outputs, head.path)


def largest(output: Array, group: Group, first: int) -> Array:
    """The class of the largest of the ranks' outputs (..., C) in each row: the first of equal ones, as `argmax` has it,
    NO_CLASS where one is NaN."""
    xp = array_module(output)
    shape = output.shape[:-1]
    table = xp.zeros((group.size, 2, int(np.prod(shape))), xp.float64)
    table[group.rank, 0] = output.max(axis=-1).reshape(-1)
    table[group.rank, 1] = output.argmax(axis=-1).reshape(-1) + first
    table = group.sum(table, "largest outputs")
    rank = table[:, 0].argmax(axis=0)
    value, place = table[rank, :, xp.arange(table.shape[2])].T
    return xp.where(xp.isnan(value), NO_CLASS, place).astype(xp.int64).reshape(shape)
