"""What happens to inputs, and to targets, between the file and the model: scaling with statistics.

A transform is fitted once on the training split (on one rank; the others load its state), and its state goes into the
checkpoint. The user's own are named "pkg.module:name" or "file.py:name": a class like those below, or a plain function `f(x)`,
with x of shape (rows, ...).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.arguments import bound, call, call_with
from mpitrain.data.checks import Source, check_finite
from mpitrain.data.columns import PREFIX, Columns
from mpitrain.data.listed import Asked, entries, tables_by_input
from mpitrain.data.sampler import Index
from mpitrain.data.shards import Values
from mpitrain.errors import CheckpointError, ConfigError, ShapeError
from mpitrain.registry import Registry, named

BY_INPUT = "data.transform"      # takes a table by input; what that has for an input is a list of names and tables again
OF_TARGETS = "target."   # names of what targets' transforms have learned begin so
FIT_ROWS = 4096          # Statistics take rows in blocks of one size, so that they depend on the split alone.


class Transform:
    """Changes inputs row by row. `fit` sees the training rows; what it learns, arrays, is kept in the attributes `learned`.

    `elementwise` stands in the class that has `__call__`, where each number depends on the one that stood there alone, and on its
    channel, or in rows that are no images its place: then a device makes them, of small integers, by a table.
    """

    learned: tuple[str, ...] = ()
    elementwise = False

    def fit(self, blocks: Callable[[], Any]) -> None:
        """`blocks()` gives the training rows as arrays (rows, ...), in a fixed order; it may be called again."""

    def __call__(self, x: Values) -> Values:
        raise TypeError(f"{type(self).__name__} does not say what it does to x")

    def inverse(self, y: Values) -> Values:
        """What gives y, of the dtype of y. NotImplementedError where that is not known: then it transforms no targets."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Values]:
        return {name: getattr(self, name) for name in self.learned}

    def load_state_dict(self, state: dict[str, Values]) -> None:
        owner, shape = type(self).__name__, None
        if state and not self.learned:
            raise CheckpointError(f"transform {owner} keeps no state, but the checkpoint holds {', '.join(state)}")
        for name in self.learned:
            if name not in state:
                raise CheckpointError(f'the checkpoint has no "{name}" for the transform {owner.lower()}; '
                                      f"it was trained with another data.transform")
            own = getattr(self, name)
            shape = shape if own is None else own.shape               # All that one learns has one shape.
            if shape not in (None, state[name].shape):
                raise CheckpointError(f'"{name}" of the transform {owner.lower()} has shape {state[name].shape} in the '
                                      f"checkpoint, but the data needs {shape}")
            setattr(self, name, np.asarray(state[name], np.float64))
            shape = state[name].shape


TRANSFORMS: Registry[type[Transform]] = Registry("transform")


def as_float(x: Values) -> Values:
    """Integers become float32; floats stay what they are."""
    return x if x.dtype.kind == "f" else x.astype(np.float32)


@TRANSFORMS.register("scale")
class Scale(Transform):
    """Divides by the largest magnitude of the training split: bytes 0..255 become 0..1, the digits' 0..16 too."""

    learned = ("largest",)
    elementwise = True

    def __init__(self) -> None:
        self.largest = np.ones(())

    def fit(self, blocks: Callable[[], Any]) -> None:
        largest = max(max(float(x.max()), -float(x.min())) for x in blocks())
        self.largest = np.asarray(largest or 1.0)

    def __call__(self, x: Values) -> Values:
        x = as_float(x)
        out: Values = x / x.dtype.type(self.largest)
        return out

    def inverse(self, y: Values) -> Values:
        out: Values = y * y.dtype.type(self.largest)
        return out


@TRANSFORMS.register("standardise")
class Standardise(Transform):
    """Subtracts the mean and divides by the standard deviation of each feature over the training split.

    A feature is a channel for rows of shape (channels, height, width), and each element of any other row. Float64 sums,
    merged block by block (Chan, Golub and LeVeque, 1979). A feature that never changes is divided by 1.
    """

    learned = ("mean", "deviation")
    elementwise = True

    def __init__(self) -> None:
        self.mean: Values | None = None
        self.deviation: Values | None = None

    def fit(self, blocks: Callable[[], Any]) -> None:
        n, mean, squares = 0, np.zeros(()), np.zeros(())
        for x in blocks():
            values = x.astype(np.float64)
            axes = (0, 2, 3) if x.ndim == 4 else (0,)
            count = values.size // values.mean(axes, keepdims=True).size
            block_mean = values.mean(axes, keepdims=True)[0]
            block_squares = ((values - block_mean) ** 2).sum(axes, keepdims=True)[0]
            gap, total = block_mean - mean, n + count
            squares = squares + block_squares + gap ** 2 * (n * count / total)
            mean = mean + gap * (count / total)
            n = total
        deviation = np.sqrt(squares / n)
        # A constant feature leaves rounding errors of about 1e-16 of its size, not exactly zero.
        constant = deviation <= 1e-12 * np.maximum(np.abs(mean), np.finfo(np.float64).tiny)
        self.mean, self.deviation = np.asarray(mean), np.where(constant, 1.0, deviation)

    def __call__(self, x: Values) -> Values:
        assert self.mean is not None and self.deviation is not None, "standardise is used before fit or load_state_dict"
        if self.mean.size > 1 and self.mean.shape != ((x.shape[1], 1, 1) if x.ndim == 4 else x.shape[1:]):
            raise ShapeError(f"rows have shape {x.shape[1:]}, and standardise has learned from rows that have "
                             f"{len(self.mean)} channels" if self.mean.shape[1:] == (1, 1) else
                             f"rows have shape {x.shape[1:]}, and standardise has learned from rows of shape {self.mean.shape}")
        if x.dtype.kind != "f":                      # Large integers would lose their differences as float32.
            return ((x - self.mean) / self.deviation).astype(np.float32)
        out: Values = (x - self.mean.astype(x.dtype)) / self.deviation.astype(x.dtype)
        return out

    def inverse(self, y: Values) -> Values:
        assert self.mean is not None and self.deviation is not None, "standardise is used before fit or load_state_dict"
        if self.mean.size not in (1, y[0].size) and y.ndim != 4:
            raise ShapeError(f"standardise has learned {self.mean.shape} of the targets, and an output is {y.shape[1:]}")
        across = self.mean.shape if y.ndim == 4 else y.shape[1:] if self.mean.size > 1 else ()
        out: Values = y * self.deviation.astype(y.dtype).reshape(across) + self.mean.astype(y.dtype).reshape(across)
        return out


class PlainFunction(Transform):
    """A user's `f(x)` as a transform without state."""

    def __init__(self, function: Callable[[Values], Values]):
        self.function = function

    def __call__(self, x: Values) -> Values:
        return self.function(x)


class Transforms:
    """The transforms of `data.transform`, applied in the order of their names. Empty: x goes through as it is.

    Inputs by name have transforms each, `by_input`: ``{image = "scale", table = ["standardise"]}``; others stay as they are.
    `by_step`: samples are windows of series, (length, features), and each step is transformed as a row is.
    `targets` are those of `data.target_transform`, which can all be undone; None where there are none.
    """

    def __init__(self, asked: Asked = None, folder: Path | None = None, targets: Asked = None, *, key: str = BY_INPUT,
                 by_step: bool = False):
        by_input = tables_by_input(asked) if key == BY_INPUT else {}
        self.by_input = {name: Transforms(own, folder, key=f"{key}.{name}") for name, own in by_input.items()}
        self.by_step = by_step
        asked_for = [] if by_input else entries(asked, key)
        self.names, self.key = [name for name, _ in asked_for], key
        self.parts = [_transform(name, arguments, folder) for name, arguments in asked_for]
        self.targets = Transforms(targets, folder, key="data.target_transform", by_step=by_step) if targets else None
        for name, part in zip(self.targets.names, self.targets.parts) if self.targets is not None else ():
            if type(part).inverse is Transform.inverse:
                raise ConfigError(f'data.target_transform "{name}" has no `inverse`; take one that has, such as "standardise"')

    def fit(self, source: Source, rows: Index) -> None:
        """Learn the statistics from `rows` (the training split), each transform from the output of those before it."""
        for name, own in self.by_input.items():
            own._fit(source, rows, partial(_input, name), source.names[0][name])
        self._fit(source, rows, itemgetter(0), source.names[0])
        if self.targets is not None:
            self.targets._fit(source, rows, itemgetter(1), source.names[1])

    def _fit(self, source: Source, rows: Index, pick: Callable[[Any], Values], dataset: str) -> None:
        """`pick` takes the values to learn from, of `dataset`, out of what the source reads."""
        for i, part in enumerate(self.parts):
            if type(part).fit is Transform.fit:
                continue

            def blocks(done: int = i) -> Any:
                if self.by_step:                              # every step once, though windows overlap
                    yield from (self._applied(pick(both), done) for both in source.steps())     # type: ignore[attr-defined]
                    return
                for start in range(0, len(rows), FIT_ROWS):
                    chunk = np.asarray(rows[start:start + FIT_ROWS], np.int64)
                    x = pick(source.read(chunk))
                    check_finite(x, chunk, source, dataset)
                    yield self(x, done)
            call(part.fit, f'{self.key} "{self.names[i]}"', {}, blocks)

    def __call__(self, x: Any, stop: int | None = None) -> Any:
        """`x` after the first `stop` transforms, or all."""
        if self.by_input:
            return Columns({name: self.by_input[name](values) if name in self.by_input else values for name, values in x.items()})
        if self.by_step and self.parts:
            return self._applied(x.reshape(-1, x.shape[-1]), stop).reshape(*x.shape[:-1], -1)
        return self._applied(x, stop)

    def _applied(self, x: Any, stop: int | None) -> Any:
        for name, part in zip(self.names[:stop], self.parts):
            x = rows_alike(part, f'{self.key} "{name}"', x)
        return x

    def of_targets(self, y: Values) -> Values:
        return y if self.targets is None else self.targets(y)

    def inverse(self, y: Values) -> Values:
        """Undoes all transforms, the last one first."""
        shape = y.shape
        if self.by_step:
            y = y.reshape(-1, shape[-1] if len(shape) > 1 else 1)
        for part in reversed(self.parts):
            y = part.inverse(y)
        return y.reshape(shape)

    def state_dict(self) -> dict[str, Values]:
        """``"0.standardise.mean"`` -> array: plain named arrays, for the checkpoint and for the other ranks."""
        own = {f"{i}.{name}.{key}": value for i, (name, part) in enumerate(zip(self.names, self.parts))
               for key, value in part.state_dict().items()}
        return own | {f"{prefix}{key}": value for prefix, part in self._inner() for key, value in part.state_dict().items()}

    def _inner(self) -> list[tuple[str, Transforms]]:
        """The transforms of targets, and those of inputs by name, each with what the names of its state begin with."""
        of_targets = [(OF_TARGETS, self.targets)] if self.targets is not None else []
        return of_targets + [(f"{PREFIX}{name}.", own) for name, own in self.by_input.items()]

    def load_state_dict(self, state: dict[str, Values]) -> None:
        left = dict(state)
        for prefix, inner in self._inner():
            theirs = [key for key in left if key.startswith(prefix)]
            inner.load_state_dict({key[len(prefix):]: left.pop(key) for key in theirs})
        for i, (name, part) in enumerate(zip(self.names, self.parts)):
            prefix = f"{i}.{name}."
            part.load_state_dict({key[len(prefix):]: left.pop(key) for key in list(left) if key.startswith(prefix)})
        if left:
            raise CheckpointError(f"the checkpoint's data transforms ({', '.join(sorted(left))}) are not those of this run "
                                  f"({', '.join(self.names) or 'none'}); keep {self.key} as it was")


def _input(name: str, found: tuple[Columns, Values]) -> Values:
    """One of the inputs by name, out of what a source reads."""
    values: Values = found[0].values[name]
    return values


def rows_alike(function: Callable[..., Any], what: str, x: Values, *more: Any) -> Values:
    """``function(x, *more)``. ConfigError where it fails or gives no array, ShapeError where its rows are not as many as x's."""
    found = call(function, what, {}, x, *more)
    if not isinstance(found, np.ndarray):
        raise ConfigError(f"{what} must return an array, found {named(found)}")
    if found.shape[:1] != x.shape[:1]:
        raise ShapeError(f"{what} must return as many rows as it gets, {len(x)}, found the shape {found.shape}")
    return found


def _transform(name: str, arguments: dict[str, Any], folder: Path | None) -> Transform:
    found: Any = TRANSFORMS.resolve(name, folder)
    if isinstance(found, type):
        found, arguments = call_with(found, arguments, f'transform "{name}"', "data.transform"), {}
    if isinstance(found, Transform):
        return found
    if not callable(found):
        raise ConfigError(f'data.transform "{name}" is a {type(found).__name__}; expected a function f(x) or a Transform')
    return PlainFunction(bound(found, arguments, f'transform "{name}"', "data.transform"))
