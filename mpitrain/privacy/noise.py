"""Gaussian noise that nobody can draw again: keyed by the operating system's random numbers, which are never written.

A stream of SHAKE-128 under a key of 256 bits, as float64 by the method of Box and Muller (1958). Numbers have 53 bits, so none is
beyond 8.6 standard deviations, which happens with probability 1e-17. Sums are of floats: who reads the last bits of many results
learns more than the theory of real numbers says (Mironov, 2012).
"""

from __future__ import annotations

import os
from typing import Any, Protocol

import numpy as np

from mpitrain.privacy.key_agreement import stream
from mpitrain.schedules.ring import ring_all_gather
from mpitrain.schedules.steps import part

Numbers = np.ndarray[Any, np.dtype[np.float64]]


class Gathers(Protocol):
    """What connects the ranks; a `comm` channel is one."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_gather(self, array: Any, algorithm: Any, *, name: str) -> None:
        """Each part i of `array` becomes rank i's."""


def gaussian(key: bytes, purpose: str, length: int) -> Numbers:
    """`length` numbers of the standard normal distribution: a function of the key and the purpose."""
    pairs = -(-length // 2)
    words = np.frombuffer(stream(key, 16 * pairs, f"gaussian {purpose}"), "<u8") >> np.uint64(11)
    radius = np.sqrt(-2.0 * np.log((words[:pairs] + 1.0) * 2.0 ** -53))          # of (0, 1]
    angle = words[pairs:] * (2.0 * np.pi * 2.0 ** -53)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:length]


class Noise:
    """Adds noise to sums that all ranks of `channel` have, with the same bits on all: each rank draws that of its own part of the
    elements, with a new key each time. With a `seed` noise is a function of it and the step, for tests, and hides nothing."""

    def __init__(self, channel: Gathers, seed: int | None = None):
        self.channel, self.seed = channel, seed

    def add(self, total: Any, deviation: float, step: int) -> None:
        """Adds noise of a standard deviation to a flat float array, in place. It communicates."""
        if self.seed is not None:
            total += (gaussian(self.seed.to_bytes(32, "little"), f"step {step}", total.size) * deviation).astype(total.dtype)
            return
        own = part(self.channel.rank, self.channel.size, total.size)
        noise = np.zeros_like(total)
        noise[own.start:own.stop] = gaussian(os.urandom(32), "own part", own.stop - own.start) * deviation
        if self.channel.size > 1:
            self.channel.all_gather(noise, ring_all_gather, name="noise")
        total += noise
