"""Sizes of a model that its data know: keys of [model] that the model needs, and that may be left out.

    vocabulary          tokens: the words of the manifest
    classes             labels of classes: the names of the manifest, or the largest label and one
    inputs              the numbers of a row, or, of a model of positions such as lstm, those at each (positions, inputs)
    features            the numbers at a position of a row (positions, features), or of a row (features,)
    length              the positions of such a row, or of a row (channels, length) for a model that has channels
    categories, numeric tables with columns of codes: the codes of each, by the manifest, and the columns of numbers
    horizon             the steps to predict, of series
    channels, size      rows (channels, size, size); the former of rows (channels, length), too
    outputs             what the loss wants of a row: the classes, or the numbers of a target
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from mpitrain import models
from mpitrain.arguments import parameters_of
from mpitrain.config import Config, changed
from mpitrain.data import Dataset, scan_labels
from mpitrain.data.categories import counts
from mpitrain.data.columns import Columns
from mpitrain.train.build.from_config import make_loss
from mpitrain.train.build.inputs import Inputs


class Sizes:
    """The sizes by name, each looked up when it is asked for; None where these data do not say it. Rows are as the model sees
    them, after transforms."""

    def __init__(self, config: Config, inputs: Inputs):
        self.config, self.inputs, self.taken = config, inputs, parameters_of(model_of(config))

    def of(self, name: str) -> int | list[int] | None:
        return FOUND[name](self)

    def vocabulary(self) -> int | None:
        words = getattr(self.inputs.training, "vocabulary", None)
        return len(words) if words else None

    def classes(self) -> int | None:
        if self.inputs.training.kind != "classification":
            return None
        sources = [self.inputs.training, self.inputs.validation]
        named = getattr(self.inputs.training, "classes", None)
        if named:
            return len(named)
        loss = make_loss(self.config, self.inputs.tokens)
        ignore = getattr(loss, "ignore_index", None)
        return max(scan_labels(source, None, ignore) for source in sources if isinstance(source, Dataset))

    def outputs(self) -> int | None:
        if self.inputs.tokens:
            return self.vocabulary()
        loss = make_loss(self.config, self.inputs.tokens)
        return self.classes() if loss.kind == "classes" else numbers(self.target)

    def inputs_(self) -> int | None:
        if self.inputs.tokens or not self.row:
            return None
        return self.row[-1] if getattr(model_of(self.config), "of_positions", False) else numbers(self.row)

    def channels(self) -> int | None:
        return self.row[0] if not self.inputs.tokens and len(self.row) in (2, 3) else None

    def size(self) -> int | None:
        row = () if self.inputs.tokens else self.row
        return row[1] if len(row) == 3 and row[1] == row[2] else None

    def features(self) -> int | None:
        return self.row[-1] if not self.inputs.tokens and len(self.row) in (1, 2) else None

    def length(self) -> int | None:
        if self.inputs.tokens or len(self.row) != 2:
            return None
        return self.row[1 if "channels" in self.taken else 0]

    @cached_property
    def example(self) -> tuple[Any, Any]:
        return self.inputs.example()

    @property
    def row(self) -> tuple[int, ...]:
        """The shape of a row; of several inputs by name, that of the only one with floats, or () where there is no such one."""
        x, _ = self.example
        floats = [values for values in x.values.values() if values.dtype.kind == "f"] if isinstance(x, Columns) else [x]
        return floats[0].shape[1:] if len(floats) == 1 else ()

    @property
    def target(self) -> tuple[int, ...]:
        """The shape of a row's target."""
        shape: tuple[int, ...] = self.example[1].shape[1:]
        return shape


def numbers(shape: tuple[int, ...]) -> int:
    """The number of elements."""
    return int(np.prod(shape, dtype=np.int64))


def categories(sizes: Sizes) -> list[int] | None:
    """How many codes each column of categories has."""
    known = getattr(sizes.inputs.training, "categories", None)
    return counts(known) if known else None


def numeric(sizes: Sizes) -> int | None:
    """The columns of numbers beside those of categories."""
    known, row = getattr(sizes.inputs.training, "categories", None), sizes.row
    by_name = isinstance(sizes.example[0], Columns)
    return row[0] - (0 if by_name else len(known)) if known and len(row) == 1 else None


def horizon(sizes: Sizes) -> int | None:
    """The steps to predict, of series."""
    return sizes.target[0] if sizes.inputs.training.kind == "series" else None


FOUND: dict[str, Callable[[Sizes], int | list[int] | None]] = {
    "vocabulary": Sizes.vocabulary, "classes": Sizes.classes, "outputs": Sizes.outputs, "inputs": Sizes.inputs_,
    "channels": Sizes.channels, "size": Sizes.size, "features": Sizes.features, "length": Sizes.length,
    "horizon": horizon, "categories": categories, "numeric": numeric}


def model_of(config: Config) -> Any:
    """What model.name names."""
    return models.MODELS.resolve(config.model.name, config.folder)


def left_out(config: Config) -> list[str]:
    """The keys of [model] that the model cannot do without, that are not given, and that data may say."""
    return [name for name, parameter in parameters_of(model_of(config)).items()
            if name in FOUND and parameter.default is parameter.empty and name not in config.model.arguments]


def with_sizes(config: Config, inputs: Inputs, first: Callable[[Callable[[], Any]], Any] = lambda action: action()) -> Config:
    """The configuration with the sizes that it leaves out and its data say; others stay left out, and the model asks for them.

    `first` runs an action on rank 0 and gives all ranks its value.
    """
    x = getattr(inputs.training, "names", ("",))[0]
    if isinstance(x, dict) and not config.data.x:            # as the manifest says, for rows of other files later
        config = changed(config, data={"x": x})
    wanted = left_out(config)
    if not wanted:
        return config
    sizes = Sizes(config, inputs)
    found: Mapping[str, Any] = first(lambda: {name: sizes.of(name) for name in wanted})
    known = {name: value for name, value in found.items() if value is not None}
    return changed(config, model={"arguments": {**config.model.arguments, **known}})


def said_by_data(config: Config, sized: Config) -> str:
    """A line about the sizes that `with_sizes` has added; "" where there are none."""
    known = {key: value for key, value in sized.model.arguments.items() if key not in config.model.arguments}
    return f"sizes from the data: {', '.join(f'model.{key} = {value}' for key, value in known.items())}" if known else ""
