"""Host batches -> a rank's part of them, as arrays on the device, in the number format of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.autograd import Tensor
from mpitrain.backend import Array, Device
from mpitrain.data import MicroBatch
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
            return ByName({name: Tensor(self.rounded(self.device.put(self._by_kind(array)))) for name, array in x.items()})
        return Tensor(self.inputs(x))

    def tensors_of(self, micro: MicroBatch) -> Any:
        """`tensors` of a micro-batch's x, which may have been sent ahead."""
        return self.tensors(micro.x) if micro.there is None else self.here(micro.there[0])

    def here(self, x: Array) -> Tensor:
        """The model's input of inputs that have come to the device as `host_inputs` has them."""
        return Tensor(x if self.tokens else self.rounded(x))

    def targets_of(self, micro: MicroBatch) -> Array:
        return self.targets(micro.y) if micro.there is None else micro.there[1]

    def _by_kind(self, values: Any) -> Any:
        if values.dtype.kind == "b":
            return values
        return self._cast(values) if values.dtype.kind == "f" else values.astype(np.int64, copy=False)

    def inputs(self, x: Any) -> Array:
        x = self.device.put(self.host_inputs(x))
        return x if self.tokens else self.rounded(x)

    def host_inputs(self, x: Any) -> Any:
        """`inputs` before they go to the device."""
        x = self.part(x)
        return x if self.tokens else self._cast(x)

    def targets(self, y: Any) -> Array:
        return self.device.put(self.host_targets(y))

    def host_targets(self, y: Any) -> Any:
        """`targets` before they go to the device."""
        y = self.part(y)
        return self._cast(y) if y.dtype.kind == "f" else y

    def rounded(self, values: Array) -> Array:
        """Values of the device in the format of activations; integers as they are."""
        return values.astype(self.compute) if self.compute != self.dtype and values.dtype == self.dtype else values

    def _cast(self, values: Any) -> Any:
        return values if values.dtype == self.dtype else values.astype(self.dtype)
