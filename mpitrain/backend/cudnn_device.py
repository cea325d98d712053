"""What graphs of cuDNN need of a device, for attention and for convolutions, which have working memory of their own."""

from __future__ import annotations

from typing import Any

from mpitrain.backend.namespace import Array

ALIGNED = 16                                      # bytes that rows begin at multiples of, for cuDNN's attention


class Cupy:
    """The current device and stream of CuPy, and its arrays."""

    def __init__(self) -> None:
        import cupy
        self.cupy = cupy
        self._memory: dict[tuple[int, int], Any] = {}

    def ordinal(self) -> int:
        return int(self.cupy.cuda.runtime.getDevice())

    def capability(self) -> int:
        """90 of sm_90."""
        return int(self.cupy.cuda.Device().compute_capability)

    def stream(self) -> int:
        return int(self.cupy.cuda.get_current_stream().ptr)

    def pointer(self, x: Array) -> Any:
        return int(x.data.ptr)

    def is_aligned(self, x: Array) -> bool:
        return int(x.data.ptr) % ALIGNED == 0

    def memory(self, size: int) -> Any:
        """Working memory of so many bytes, kept for this device and stream."""
        where = self.ordinal(), self.stream()
        if where not in self._memory or self._memory[where].size < size:
            self._memory[where] = self.cupy.empty(size, "uint8")
        return self.pointer(self._memory[where])
