"""Tables of names: what other programs call the parameters and buffers of our models, for both directions.

A table gives an `Entry` for each name of a model; two names of one parameter (a tied one) give two. A user's own table is a class
like those of `name_tables.py`, named "file.py:name".
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import ConfigError, UsageError
from mpitrain.interchange.tensors import Array, Stored, TensorFile
from mpitrain.nn import Module
from mpitrain.registry import Registry

COUNTER = "num_batches_tracked"                   # PyTorch's batch norm counts its steps, in an int64 of its own
Shapes = Mapping[str, tuple[int, ...]]


class Entry(NamedTuple):
    """One name of `theirs` for `ours`; transposed: a matrix that they store as (inputs, outputs)."""

    theirs: str
    ours: str
    transposed: bool = False


class NameTable:
    """Names by `rules`: (pattern at the start of our name, what they write for it); the rest of a name stays as it is.

    Names of theirs that match `transposed` are matrices on their side, those that match `passed_over` are no parameters.
    `prefix` is one that a file's names may begin with or not; a file that is written has them without it.
    """

    rules: Sequence[tuple[str, str]] = ()
    transposed: Sequence[str] = ()
    passed_over: Sequence[str] = ()
    prefix = ""

    def entries(self, model: Module) -> list[Entry]:
        """An entry for each name of the model's parameters and buffers. ConfigError where the table has none."""
        first = {id(leaf): name for name, leaf in (*model.named_parameters(), *model.named_buffers())}
        found = []
        for name, leaf in every_leaf(model):
            theirs = self.name_of(name, model)
            found.append(Entry(theirs, first[id(leaf)], any(fnmatch.fnmatchcase(theirs, p) for p in self.transposed)))
        return found

    def name_of(self, ours: str, model: Module) -> str:
        for pattern, theirs in self.rules:
            if match := re.match(pattern, ours):
                return match.expand(theirs) + ours[match.end():]
        raise ConfigError(f'the table of names has none for "{ours}": it is for another model; names "own" and "pytorch" are for '
                          "every model")

    def also(self, model: Module) -> dict[str, Array]:
        """What a file of theirs has besides."""
        return {}

    def incoming(self, tensors: Mapping[str, Stored], entries: Sequence[Entry]) -> Mapping[str, Stored]:
        """Their tensors, with those put together that are one of ours."""
        return tensors

    def outgoing(self, arrays: dict[str, Array]) -> dict[str, Array]:
        """Our arrays by their names, with those cut that are several of theirs."""
        return arrays

    def keys(self, shapes: Shapes, file: TensorFile, given: Mapping[str, str]) -> dict[str, Any]:
        """The [model] that a file of theirs is of, as far as its shapes say; `given` has the user's keys, as texts."""
        return {}


NAMES: Registry[Callable[[], NameTable]] = Registry("table of names")
for _name, _place in {"pytorch": "name_tables:PyTorch", "gpt2": "name_tables:GPT2", "nanogpt": "name_tables:NanoGPT",
                      "torchvision": "torchvision_names:TorchVision", "akamaster": "name_tables:Akamaster",
                      **{name: f"transformers_names:{place}" for name, place in
                         {"bert": "Bert", "llama": "Llama", "t5": "T5"}.items()}}.items():
    NAMES.register_later(_name, f"mpitrain.interchange.{_place}")


@NAMES.register("own")
class Own(NameTable):
    """The names of checkpoints, of each parameter one."""

    def entries(self, model: Module) -> list[Entry]:
        return [Entry(name, name) for name, _ in (*model.named_parameters(), *model.named_buffers())]

    def keys(self, shapes: Shapes, file: TensorFile, given: Mapping[str, str]) -> dict[str, Any]:
        return mlp_sizes(shapes, given)


def mlp_sizes(shapes: Shapes, given: Mapping[str, str]) -> dict[str, Any]:
    """The sizes of an mlp, where the user says that it is one and the shapes are; {} otherwise."""
    chain: list[tuple[int, ...]] = []
    while shape := shapes.get(f"linear{len(chain)}.weight"):
        chain.append(shape)
    chain.append(shapes.get("head.weight", ()))
    is_mlp = given.get("model.name", "").strip("\"'") == "mlp" and all(len(shape) == 2 for shape in chain)
    if not is_mlp or any(one[0] != other[1] for one, other in pairwise(chain)):
        return {}
    return {"inputs": chain[0][1], "hidden": [shape[0] for shape in chain[:-1]], "outputs": chain[-1][0]}


def every_leaf(model: Module) -> Iterator[tuple[str, Any]]:
    """(name, leaf) of all parameters and buffers; a tied one comes under each of its names."""
    seen: set[str] = set()
    for path, module in _all_modules(model, ""):
        for name, leaf in module._members():
            if not isinstance(leaf, Module) and (full := f"{path}{name}") not in seen:
                seen.add(full)
                yield full, leaf


def _all_modules(module: Module, path: str) -> Iterator[tuple[str, Module]]:
    yield path, module
    for name, child in module._members():
        if isinstance(child, Module):
            yield from _all_modules(child, f"{path}{name}.")


def outgoing(table: NameTable, model: Module) -> tuple[dict[str, Array], dict[str, str]]:
    """(arrays by their names, further names of theirs -> the first one) of a model with memory. Arrays are views."""
    leaves: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    arrays: dict[str, Array] = {}
    aliases: dict[str, str] = {}
    first: dict[str, str] = {}
    for entry in table.entries(model):
        if entry.ours in first:
            aliases[entry.theirs] = first[entry.ours]
            continue
        first[entry.ours] = entry.theirs
        values = np.asarray(leaves[entry.ours].numpy())
        arrays[entry.theirs] = values.T if entry.transposed else values
        if entry.theirs.rpartition(".")[2] == COUNTER:
            arrays[entry.theirs] = np.asarray(np.rint(values), np.int64)
    return table.outgoing(arrays | table.also(model)), aliases


def table_for(model: Any, names: Any) -> NameTable:
    """The table of these names. UsageError for what is no model."""
    if not isinstance(model, Module) or not isinstance(names, str):
        raise UsageError(f"expected an mpitrain.nn.Module and the name of a table of names, found {type(model).__name__} and "
                         f"{names!r:.40}; of mpitrain.load(RUN) give its .model")
    return NAMES.resolve(names, Path.cwd())()


def state_dict(model: Module, names: str = "pytorch") -> dict[str, Array]:
    """The arrays of a model with memory under the names of a table, a tied one under each of its names: what
    `load_state_dict` of theirs takes as tensors. They are copies. ConfigError for a table of names that is for other models."""
    arrays, aliases = outgoing(table_for(model, names), model)
    found = {name: np.array(array, order="C") for name, array in arrays.items()}
    return found | {name: found[first] for name, first in aliases.items()}
