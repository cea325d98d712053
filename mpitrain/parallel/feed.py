"""Host batches -> arrays on the device, in the number format of the model."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.backend import Array, Device


class Feed:
    """`inputs` become the model's dtype unless they are tokens; float `targets` too, labels stay integers."""

    def __init__(self, device: Device, dtype: Any, *, tokens: bool = False):
        self.device, self.dtype, self.tokens = device, np.dtype(dtype), tokens

    def inputs(self, x: Any) -> Array:
        return self.device.put(x if self.tokens else self._cast(x))

    def targets(self, y: Any) -> Array:
        return self.device.put(self._cast(y) if y.dtype.kind == "f" else y)

    def _cast(self, values: Any) -> Any:
        return values if values.dtype == self.dtype else values.astype(self.dtype)
