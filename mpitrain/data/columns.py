"""Inputs by name: what `data.x = {tokens = "ids", types = "token_types"}` makes of the inputs of a dataset.

A described shard has a dataset under each label: "x" and "y", or, with inputs by name, "x.tokens", "x.types" and "y".
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping
from typing import Any

import numpy as np

Asked = str | Mapping[str, str]          # the dataset of the inputs, or that of each input by its name
PREFIX = "x."


def labelled(x: Asked, y: str | None = None) -> dict[str, str]:
    """Label -> name of the dataset."""
    found = {"x": x} if isinstance(x, str) else {f"{PREFIX}{name}": dataset for name, dataset in x.items()}
    return found if y is None else {**found, "y": y}


def inputs_of(shard: Mapping[str, Any]) -> list[str]:
    """The labels of the inputs of a described shard."""
    return ["x"] if shard.get("x") else [label for label in shard if label.startswith(PREFIX)]


def labels_of(shard: Mapping[str, Any]) -> list[str]:
    """The labels of all datasets of a described shard: inputs, then targets where there are some."""
    return [*inputs_of(shard), *(["y"] if shard.get("y") else [])]


def rows_of(shard: Mapping[str, Any]) -> int:
    """The rows of a described shard."""
    return int(shard[inputs_of(shard)[0]]["shape"][0])


def named_as(shard: Mapping[str, Any]) -> Any:
    """What `data.x` would be: the name of the inputs' dataset, or a table of names by input."""
    names = {label: shard[label]["name"] for label in inputs_of(shard)}
    return names["x"] if "x" in names else {label[len(PREFIX):]: name for label, name in names.items()}


class Columns:
    """Rows of several inputs by name: arrays of as many rows each, in the order of `data.x`.

    As far as rows go it is used as an array is: it has a length, and is sliced, copied and repeated along the first dim.
    """

    def __init__(self, values: Mapping[str, Any]):
        self.values = dict(values)

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))

    def __iter__(self) -> Iterator[str]:
        raise TypeError("inputs by name are gone through with items()")

    def items(self) -> ItemsView[str, Any]:
        return self.values.items()

    def each(self, function: Callable[[Any], Any]) -> Columns:
        """`function` of every input's array."""
        return Columns({name: function(array) for name, array in self.values.items()})

    def __getitem__(self, rows: Any) -> Columns:
        return self.each(lambda array: array[rows])

    def copy(self) -> Columns:
        return self.each(np.copy)

    def repeat(self, n: int, axis: int = 0) -> Columns:
        """What `np.repeat` calls."""
        return self.each(lambda array: np.repeat(array, n, axis=axis))

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.values.values())

    @property
    def shape(self) -> Any:
        """The shape of each input by its name, in words where it is printed."""
        return Shapes({name: tuple(array.shape) for name, array in self.values.items()})

    @property
    def dtype(self) -> str:
        """The kinds of numbers of the inputs, for messages."""
        return ", ".join(f"{name} {array.dtype}" for name, array in self.values.items())


class Shapes(dict[str, tuple[int, ...]]):
    """The shapes of inputs by name; those of a row are ``shapes[1:]``, as of an array's shape."""

    def __getitem__(self, key: Any) -> Any:
        return Shapes({name: shape[key] for name, shape in self.items()}) if isinstance(key, slice) else super().__getitem__(key)

    def __str__(self) -> str:
        return ", ".join(f"{name} {shape}" for name, shape in self.items())


def each_of(x: Any, names: Any) -> Iterator[tuple[Any, str]]:
    """(array, name of its dataset) of inputs: of each one by name, or of the one there is."""
    if isinstance(x, Columns):
        yield from ((array, names[name]) for name, array in x.items())
    else:
        yield x, names
