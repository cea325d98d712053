"""Compressors of each kind that leave nothing out: what is left is the engine's own arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.parallel.compress.compressor import Gathered, Linear, Packed, whole

Array = np.ndarray[Any, Any]


def added(values: Array, error: Array | None) -> Array:
    total: Array = values if error is None else values + error
    if error is not None:
        error[...] = 0
    return total


class IdentityPacked(Packed):
    block, exact = 16, True

    def nbytes(self, first: int, stop: int) -> int:
        return whole(4 * int(self.bounds[stop] - self.bounds[first]))

    def encode(self, step: int, worker: int, values: Array, error: Array | None, first: int, stop: int, message: Array) -> None:
        message[4 * values.size:] = 0
        message[:4 * values.size].view(np.float32)[...] = added(values, error)

    def decode(self, message: Array, first: int, stop: int, total: Array, add: bool) -> None:
        sent = message[:4 * total.size].view(np.float32)
        total[...] = total + sent if add else sent


class IdentityLinear(Linear):
    """In two phases: the first half, then the second."""

    block, exact, phases = None, True, 2

    def _half(self, phase: int) -> slice:
        return slice(0, self.length // 2) if phase == 0 else slice(self.length // 2, self.length)

    def words(self, phase: int) -> int:
        return len(range(self.length)[self._half(phase)])

    def encode(self, phase: int, step: int, values: Array, state: dict[str, Array], message: Array) -> None:
        half = self._half(phase)
        message[...] = added(values[half], state["error"][half])

    def decode(self, phase: int, step: int, arrived: Array, state: dict[str, Array], values: Array) -> None:
        values[self._half(phase)] = arrived


class IdentityGathered(Gathered):
    block, exact = 32, True

    def nbytes(self) -> int:
        return whole(4 * self.length)

    def encode(self, step: int, values: Array, state: dict[str, Array], message: Array) -> None:
        message[4 * self.length:] = 0
        message[:4 * self.length].view(np.float32)[...] = added(values, state["error"])

    def decode(self, step: int, messages: Array, values: Array) -> None:
        values[...] = messages[0, :4 * self.length].view(np.float32)
        for message in messages[1:]:
            values += message[:4 * self.length].view(np.float32)
