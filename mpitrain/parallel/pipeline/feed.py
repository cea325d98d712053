"""Host batches -> a rank's part of them, as arrays on the device, in the number format of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.autograd import Tensor
from mpitrain.backend import Array, Device
from mpitrain.data.columns import Columns
from mpitrain.nn.by_name import ByName


class Feed:
    """`inputs` become the model's dtype unless they are tokens; float `targets` too, labels stay integers. Where `compute`, the
    dtype of activations, has 16 bits, float inputs are rounded to it once they are on the device.

    `part` gives this rank's part of the samples of a host batch (default: all).
    """

    def __init__(self, device: Device, dtype: Any, *, tokens: bool = False, part: Callable[[Any], Any] | None = None,
                 compute: Any = None):
        self.device, self.dtype, self.tokens = device, np.dtype(dtype), tokens
        self.part = part or (lambda x: x)
        self.compute = self.dtype if compute is None else compute

    def tensors(self, x: Any) -> Any:
        """What the model is called with: a tensor of `inputs`, or a `ByName` of `Columns`, whose integers are int64."""
        if isinstance(x, Columns):
            return ByName({name: Tensor(self._rounded(self.device.put(self._by_kind(array)))) for name, array in x.items()})
        return Tensor(self.inputs(x))

    def _by_kind(self, values: Any) -> Any:
        if values.dtype.kind == "b":
            return values
        return self._cast(values) if values.dtype.kind == "f" else values.astype(np.int64, copy=False)

    def inputs(self, x: Any) -> Array:
        x = self.part(x)
        return self.device.put(x) if self.tokens else self._rounded(self.device.put(self._cast(x)))

    def targets(self, y: Any) -> Array:
        y = self.part(y)
        return self.device.put(self._cast(y) if y.dtype.kind == "f" else y)

    def _rounded(self, values: Array) -> Array:
        return values.astype(self.compute) if self.compute != self.dtype and values.dtype == self.dtype else values

    def _cast(self, values: Any) -> Any:
        return values if values.dtype == self.dtype else values.astype(self.dtype)
