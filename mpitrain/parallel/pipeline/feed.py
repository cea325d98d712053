"""Host batches -> a rank's part of them, as arrays on the device, in the number format of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.backend import Array, Device


class Feed:
    """`inputs` become the model's dtype unless they are tokens; float `targets` too, labels stay integers.

    `part` gives this rank's part of the samples of a host batch (default: all).
    """

    def __init__(self, device: Device, dtype: Any, *, tokens: bool = False, part: Callable[[Any], Any] | None = None):
        self.device, self.dtype, self.tokens = device, np.dtype(dtype), tokens
        self.part = part or (lambda x: x)

    def inputs(self, x: Any) -> Array:
        x = self.part(x)
        return self.device.put(x if self.tokens else self._cast(x))

    def targets(self, y: Any) -> Array:
        y = self.part(y)
        return self.device.put(self._cast(y) if y.dtype.kind == "f" else y)

    def _cast(self, values: Any) -> Any:
        return values if values.dtype == self.dtype else values.astype(self.dtype)
