"""Choosing the next token from a row of logits: greedy, or drawn at a temperature among the likeliest (top-k, top-p).

A draw is a function of (seed, request, position) and the logits alone, so a request gives one text in any company.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitrain.backend.namespace import Array, array_module, asnumpy
from mpitrain.backend.random import stream_key, words
from mpitrain.errors import NumericsError, UsageError


@dataclass(frozen=True)
class Sampling:
    """`temperature` 0 takes the largest logit, the first of equal ones. `top_k` 0 leaves all tokens, `top_p` 1 too: else the
    likeliest ones whose probabilities add up to it (Holtzman et al. 2020). UsageError for what lies outside."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        _require("temperature", self.temperature, 0 <= self.temperature < math.inf, "a number of 0 or more")
        _require("top-k", self.top_k, type(self.top_k) is int and self.top_k >= 0, "a whole number of 0 or more")
        _require("top-p", self.top_p, 0 < self.top_p <= 1, "a number in (0, 1]")
        _require("seed", self.seed, type(self.seed) is int and self.seed >= 0, "a whole number of 0 or more")

    @property
    def wanted(self) -> int:
        """How many of the largest logits a choice needs; 0: all of them."""
        return 1 if self.temperature == 0 else self.top_k

    def choose(self, values: Array, tokens: Array, request: int, position: int) -> int:
        """The token at `position` of a text, by what `likeliest` found of its logits."""
        if not np.isfinite(values[0]):
            raise NumericsError(f"the logits at position {position} of request {request} are not finite; the checkpoint's "
                                "parameters are damaged or diverged, take an earlier one with --step")
        if self.temperature == 0:
            return int(tokens[0])
        count = self.top_k or len(values)
        with np.errstate(all="ignore"):           # a low temperature makes others than the likeliest impossible
            weights = np.exp((values[:count] - values[0]) / self.temperature)
        shares = np.cumsum(weights)
        if self.top_p < 1:
            shares = shares[:int(np.searchsorted(shares, self.top_p * shares[-1])) + 1]
        found = int(np.searchsorted(shares, self._uniform(request, position) * shares[-1], side="right"))
        return int(tokens[min(found, len(shares) - 1)])

    def _uniform(self, request: int, position: int) -> float:
        """A number in [0, 1) of 53 bits."""
        high, low = words(stream_key(self.seed, "generate", request), np.array([position], np.uint64), 2, np)[0].tolist()
        return float((high >> 5) * 67108864 + (low >> 6)) / 9007199254740992.0


def likeliest(logits: Array, count: int) -> tuple[Array, Array]:
    """The `count` largest (0: all) of some logits (V,) in float64, and their places: largest first, equal ones in their order.

    Where one is no number, the first value is none.
    """
    row = np.asarray(logits, np.float64)
    if count == 1 or np.isnan(row.max()):
        place = row.argmax(axis=0, keepdims=True)         # that of the first NaN, where there is one
        return row[place], place
    places = np.nonzero(row >= np.partition(row, -count)[-count])[0] if 0 < count < len(row) else np.arange(len(row))
    places = places[np.argsort(-row[places], kind="stable")][:count or None]
    return row[places], places


def likeliest_there(logits: Array) -> list[tuple[Array, Array]]:
    """`likeliest` of each row of logits (B, V) on a device, for a count of 1: two numbers of a row come to the host, in one copy.
    It waits for them."""
    xp = array_module(logits)
    logits = logits.astype("float32") if logits.dtype.itemsize == 2 else logits
    places = logits.argmax(axis=1)
    values = xp.take_along_axis(logits, places[:, None], axis=1)[:, 0]
    both = asnumpy(xp.stack([values.astype("float64"), places.astype("float64")], axis=1))
    return [(row[:1], row[1:].astype(np.int64)) for row in both]


def _require(name: str, value: Any, holds: bool, expected: str) -> None:
    if not holds:
        raise UsageError(f"--{name} is {value}, expected {expected}")
