"""Batch norm folded into the convolution or linear layer before it, for a model whose statistics do not change any more.

    norm(w x + b) = s (w x + b - mean) + shift = (s w) x + (s (b - mean) + shift),        s = weight / sqrt(variance + eps)

(Jacob et al.: "Quantization and training of neural networks for efficient integer-arithmetic-only inference", 2018, section 3.2.)
It works on the operations of a forward (`autograd.record`), which say what follows what. The new weights are computed in float64
and rounded once, so outputs change in their last bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np

from mpitrain.autograd import Operation, Value
from mpitrain.backend import Array
from mpitrain.ops.conv import Conv2d
from mpitrain.ops.linalg import Linear
from mpitrain.ops.normalisation import FixedNorm

BEFORE = (Conv2d, Linear)                 # with inputs (x, weight, bias), and outputs in the weight's first dim


def folded(operations: Sequence[Operation], result: Value) -> list[Operation]:
    """The operations without those norms whose input is the output of a convolution or linear layer, and nobody else's input."""
    values = [value for one in operations for value in (*one.inputs, *one.outputs) if isinstance(value, Value)]
    numbers = count(1 + max(value.number for value in values))
    users = Counter(value.number for one in operations for value in one.inputs if isinstance(value, Value))
    users[result.number] += 1
    kept: list[Operation] = []
    made_at: dict[int, int] = {}                                # place in `kept` of what makes a value
    for one in operations:
        place = made_at.get(one.inputs[0].number) if one.function is FixedNorm else None
        if place is not None and _fits(kept[place], one) and users[one.inputs[0].number] == 1:
            kept[place] = _together(kept[place], one, numbers)
        else:
            place = len(kept)
            kept.append(one)
        made_at.update((value.number, place) for value in one.outputs)
    return kept


def _fits(before: Operation, norm: Operation) -> bool:
    """Whether the layer does nothing after its product, and the numbers of both are known and no input."""
    known = (*before.inputs[1:], *norm.inputs[1:])
    return (before.function in BEFORE and before.attributes.get("activation") is None and not before.attributes.get("operands")
            and not before.links and not norm.links and len(before.outputs[0].shape) in (2, 4)
            and all(value is None or isinstance(value, Value) and value.array is not None for value in known))


def _together(before: Operation, norm: Operation, numbers: Any) -> Operation:
    weight, bias = (None if value is None else value.array for value in before.inputs[1:])
    new = scaled(weight, bias, *[None if value is None else value.array for value in norm.inputs[1:]], eps=norm.attributes["eps"])
    given = tuple(Value(next(numbers), array) for array in new)
    return before._replace(inputs=(before.inputs[0], *given), outputs=norm.outputs, path=norm.path)


def scaled(weight: Array, bias: Array | None, scale: Array | None, shift: Array | None, mean: Array, variance: Array, *,
           eps: float) -> tuple[Array, Array]:
    """Weight (O, ...) and bias (O,) of the layer that does what a layer and the norm (O,) after it do."""
    s = (1.0 if scale is None else scale.astype(np.float64)) / np.sqrt(variance.astype(np.float64) + eps)
    b = s * ((0.0 if bias is None else bias.astype(np.float64)) - mean)
    if shift is not None:
        b = b + shift
    made = weight.astype(np.float64) * s.reshape(-1, *[1] * (weight.ndim - 1))
    return made.astype(weight.dtype), b.astype(weight.dtype)
