"""The names of inputs: those that the data give, and those that the model's first block takes as keywords."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from mpitrain.data.columns import Columns
from mpitrain.data.listed import tables_by_input
from mpitrain.errors import ConfigError, nearest
from mpitrain.nn import Module, Sequential

KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def first_of(model: Module) -> Module:
    """The module whose forward gets the inputs of a model."""
    while isinstance(model, Sequential) and type(model).forward is Sequential.forward and len(model):
        model = model[0]
    return model


def refuse_names(model: Module, x: Any) -> None:
    """ConfigError where the inputs `x` have names that the model's first block does not take, or lack one that it needs."""
    first = first_of(model)
    parameters = inspect.signature(first.forward).parameters
    taken = {name: p for name, p in parameters.items() if p.kind in KEYWORDS}
    needed = [name for name, p in taken.items() if p.default is p.empty]
    given = list(x.values) if isinstance(x, Columns) else []
    block = next((f'the first block of the model, "{name}" ({type(first).__name__}),' for name, module in model.named_modules()
                  if module is first and name), f"the model ({type(first).__name__})")
    if not given:
        if len(needed) > 1:
            listed = ", ".join(f'{name} = "..."' for name in needed)
            raise ConfigError(f"{block} takes inputs by name, {', '.join(taken)}, and data.x gives one without; set data.x = "
                              f"{{{listed}}}, with the dataset of each")
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in given:
        if name not in taken:
            raise ConfigError(f'data.x gives the input "{name}", and {block} has none of that name{nearest(name, taken)}')
    for name in needed:
        if name not in given:
            raise ConfigError(f'{block} needs the input "{name}", and data.x gives {", ".join(given)}; name its dataset: '
                              f'data.x = {{{name} = "...", ...}}')


def refuse_tables(names: Sequence[str], asked: Mapping[str, Any]) -> None:
    """ConfigError where a key of [data], such as data.transform, has an entry for an input that is not there. `names` are those
    of the inputs; `asked` has the value of each key."""
    for key, value in asked.items():
        by_input = tables_by_input(value)
        for name in by_input:
            if name not in names:
                raise ConfigError(f'{key} has an entry for the input "{name}"{nearest(name, names)}' if names else
                                  f'{key} has an entry for the input "{name}", and the inputs have no names: a table is a name '
                                  'and its arguments, such as {name = "scale"}; set data.x = {' + f'{name} = "DATASET"' + "}, or "
                                  "leave the name out")
        if names and value and not by_input:
            raise ConfigError(f"{key} is for one input, and data.x names {', '.join(names)}; say of which: {key} = "
                              f'{{{names[0]} = [...]}}')
