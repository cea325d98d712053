"""What a model of text is to say of a window of tokens, where that is not the next token: inputs and targets of one window.

    mask     some tokens are hidden, and are to be found from those around them (Devlin et al. 2019)
    spans    some runs of tokens are hidden, and are to be said one after the other (Raffel et al. 2020)

A task is a function ``f(x, y, keys)`` of windows x (rows, N), what follows each token y (rows, N), which is IGNORE where a window
has no more text, and keys (rows,); it gives (x, y). What it draws is a function of the key: of (seed, epoch, row) in training, of
(seed, row) in validation. The user's own are named "pkg.module:name" or "file.py:name". Letters: `N` tokens, `P` runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mpitrain.arguments import bound, call
from mpitrain.data.keyed import draw, key, mix, sample_keys
from mpitrain.data.listed import Asked, entries
from mpitrain.data.shards import Rows, Values
from mpitrain.data.tokens import IGNORE
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.registry import Registry, named

Keys = NDArray[np.uint64]
Pair: TypeAlias = "tuple[Values, Values]"
Task: TypeAlias = Callable[[Values, Values, Keys], Pair]
ONE = 1 << 31                                     # draws from 0 ... ONE - 1 say whether something of a probability happens

TASKS: Registry[Callable[..., Pair]] = Registry("task of tokens")


class Tasks:
    """The tasks of `data.augment` for tokens, in their order."""

    def __init__(self, asked: Asked, seed: int, folder: Path | None = None):
        self.seed, self.functions = seed, list[tuple[str, Task]]()
        for name, arguments in entries(asked, "data.augment"):
            function = TASKS.resolve(name, folder)
            if not callable(function):
                raise ConfigError(f'data.augment "{name}" is a {type(function).__name__}; expected a function f(x, y, keys)')
            self.functions.append((name, bound(function, arguments, f'task "{name}"', "data.augment")))

    def __call__(self, x: Values, y: Values, rows: Rows, epoch: int | None) -> Pair:
        """Inputs and targets of windows, which are `rows` of the text; `epoch` is None for validation."""
        keys = sample_keys(key(self.seed, "task", -1 if epoch is None else epoch), rows)
        for name, function in self.functions:
            what = f'data.augment "{name}"'
            found = call(function, what, {}, x, y, keys)
            if not (isinstance(found, tuple) and len(found) == 2 and all(isinstance(part, np.ndarray) for part in found)):
                raise ConfigError(f"{what} must return two arrays, inputs and targets, found {named(found)}")
            if not len(found[0]) == len(found[1]) == len(rows):
                raise ShapeError(f"{what} must return as many rows as it gets, {len(rows)}, found the shapes {found[0].shape} "
                                 f"and {found[1].shape}")
            x, y = found
        return x, y


def _each(keys: Keys, count: int, stream: int, limit: int) -> NDArray[np.int64]:
    """A number in [0, limit) for each of `count` places of each row."""
    places = mix(np.arange(count, dtype=np.uint64))
    return draw(mix(keys[:, None] ^ places), stream, limit)


def _probability(name: str, value: float, task: str) -> float:
    if not 0.0 < value < 1.0:
        raise ConfigError(f'data.augment "{task}": {name} lies between 0 and 1, found {value}; change it')
    return value


def _token(name: str, value: int, task: str) -> int:
    if value < 0:
        raise ConfigError(f'data.augment "{task}": {name} is the number of a token, 0 or more, found {value}; change it')
    return value


@TASKS.register("mask")
def mask(x: Values, y: Values, keys: Keys, *, token: int, vocabulary: int | None = None, probability: float = 0.15,
         keep: Sequence[int] = ()) -> Pair:
    """Each token is chosen with `probability`: of ten chosen ones eight become `token`, one another token, one stays as it is.

    Targets are the chosen tokens, and IGNORE elsewhere. Others are drawn from 0 ... `vocabulary` - 1, by default from those below
    `token`. Tokens of `keep`, which are no text, are never chosen.
    """
    others = _token("token", token, "mask") if vocabulary is None else vocabulary
    if others < 1:
        raise ConfigError(f'data.augment "mask": other tokens are drawn from 0 ... vocabulary - 1, and vocabulary is {others}')
    chosen = _each(keys, x.shape[1], 0, ONE) < int(_probability("probability", probability, "mask") * ONE)
    chosen &= (y != IGNORE) & ~np.isin(x, list(keep))
    how = _each(keys, x.shape[1], 1, 10)
    hidden = np.where(chosen & (how < 8), token, x)
    other = np.where(chosen & (how == 8), _each(keys, x.shape[1], 2, others), hidden)
    return other, np.where(chosen, x, IGNORE)


def _runs(keys: Keys, total: int, parts: int, stream: int) -> NDArray[np.int64]:
    """The lengths (rows, P) of `parts` random runs, each of 1 or more, that are `total` together."""
    order = np.argsort(_each(keys, total - 1, stream, ONE), axis=1, kind="stable")[:, :parts - 1]
    return np.diff(np.sort(order, axis=1) + 1, axis=1, prepend=0, append=total)


def span_sizes(tokens: int, density: float = 0.15, mean: float = 3.0) -> tuple[int, int, int]:
    """(hidden tokens, runs, tokens of a source) of a window of so many tokens."""
    hidden = min(max(round(tokens * density), 1), tokens - 1)
    runs = min(max(round(hidden / mean), 1), tokens - hidden)
    return hidden, runs, tokens - hidden + runs + 1


@TASKS.register("spans")
def spans(x: Values, y: Values, keys: Keys, *, sentinel: int, end: int, begin: int = 0, density: float = 0.15,
          mean: float = 3.0) -> Pair:
    """A part `density` of the tokens is hidden, in runs of `mean` tokens on average, as T5 is trained.

    The source has a sentinel in place of each run (`sentinel`, and below it one for each further run) and `end`; the answer is
    each run behind its sentinel, and `end`. Inputs are the source and the answer moved on by one, behind `begin`; targets are the
    answer. All rows have equal lengths; a window that is not full has no targets.
    """
    count, tokens = x.shape
    if tokens < 2 or mean < 1:
        raise ConfigError(f'data.augment "spans": runs of {mean} tokens on average in windows of {tokens}; both must be larger')
    hidden, runs, source = span_sizes(tokens, _probability("density", density, "spans"), mean)
    if _token("sentinel", sentinel, "spans") < runs or min(end, begin) < 0:
        raise ConfigError(f'data.augment "spans": {runs} runs want sentinels {sentinel} ... {sentinel - runs + 1}, and end and '
                          f"begin are tokens, {end} and {begin}; set sentinel to the largest of tokens that are no text")
    lengths = np.stack([_runs(keys, tokens - hidden, runs, 0), _runs(keys, hidden, runs, 1)], axis=2).reshape(count, 2 * runs)
    starts = np.cumsum(lengths, axis=1) - lengths
    first = np.zeros(x.shape, bool)
    np.put_along_axis(first, starts, True, axis=1)
    run = np.cumsum(first, axis=1) - 1            # shown and hidden ones in turn, a shown one first
    away, number = run % 2 == 1, sentinel - run // 2

    def joined(mine: Any, others: Any) -> Values:
        """Tokens of `mine`, and a sentinel in place of each of the others' runs, and the end."""
        kept = np.where(others & first, number, x)[mine | (others & first)].reshape(count, -1)
        return np.concatenate([kept, np.full((count, 1), end)], axis=1)

    seen, answer = joined(~away, away), joined(away, ~away)
    assert seen.shape[1] == source
    moved = np.concatenate([np.full((count, 1), begin), answer[:, :-1]], axis=1)
    answer[(y == IGNORE).any(axis=1)] = IGNORE
    return np.concatenate([seen, moved], axis=1), answer
