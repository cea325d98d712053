"""The search for the first NaN or infinity: another forward pass that looks at every layer's output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpitrain.autograd import Tensor, no_grad
from mpitrain.backend import Array, array_module, asnumpy, is_float
from mpitrain.data import MicroBatch
from mpitrain.data.stored import StoredRows
from mpitrain.errors import NumericsError
from mpitrain.nn import Module
from mpitrain.nn.by_name import ByName
from mpitrain.registry import is_own, named


def is_finite(array: Array) -> bool:
    """True where every value is finite, as all integers are."""
    with np.errstate(over="ignore", invalid="ignore"):
        return (not is_float(array.dtype) or bool(np.isfinite(asnumpy(array.sum())))
                or bool(array_module(array).isfinite(array).all()))              # large numbers may have a sum that is not


STEP = "try a smaller optimizer.lr or optimizer.clip_norm"
LISTED = 4                               # a message lists at most so many rows


class _Found(Exception):
    """Ends the forward pass at the first layer that is not finite."""


class Origin(NamedTuple):
    """The origin, in words, of the first value that is not finite, and the numbers of the samples that have one there: none
    where that cannot be told, or where all have one."""

    text: str
    places: Sequence[int] = ()
    advice: str = "look at what it computes for these samples, or try a smaller optimizer.lr or optimizer.clip_norm"


def origin_of(model: Module, x: Any) -> Origin:
    """The parameter, the input, the layer, the model's own forward or the loss that is the first not to be finite; `x` is an
    array, a tensor, or inputs by name."""
    x = x if isinstance(x, Tensor | ByName) else Tensor(x)
    for name, given in x.items() if isinstance(x, ByName) else [("", x)]:
        if not is_finite(given.array):
            return Origin(f'the input "{name}" of the model' if name else "the input of the model",
                          bad_places(given.array, given.shape[0]), "look at that data, and at data.transform and data.augment")
    if not all(parameter.allocated for parameter in model.parameters()):
        return Origin('a layer that cannot be named where ranks have slices of the parameters; set comm.sharding = "gradients" '
                      "to see it", advice=STEP)
    for name, parameter in model.named_parameters():
        if not is_finite(parameter.master):
            return Origin(f'the parameter "{name}", which an earlier step has spoilt (train.on_nan = "skip" looks at each '
                          "gradient before the update)", advice=STEP)
    search = Search(model, n_rows(x))
    remove = search.hooks()
    try:
        with no_grad(), np.errstate(all="ignore"), nobody_else(model) as missed:
            model(x)
    except _Found:
        pass
    finally:
        for undo in remove:
            undo()
    return search.found or Origin(", or ".join((*missed, "the loss function; every layer's output")) + " here" * bool(
        missed) + " is finite")


def n_rows(x: Any) -> int:
    """The samples of a tensor, or of inputs by name."""
    return int((next(iter(x.values())) if isinstance(x, ByName) else x).shape[0])


def first_bad(values: Any) -> Tensor | None:
    """The first tensor of a tuple, or the one tensor, that is not finite."""
    for t in values if isinstance(values, tuple) else (values,):
        if isinstance(t, Tensor) and not is_finite(t.array):
            return t
    return None


class Search:
    """Looks at what modules take and give in a forward pass of `n` samples, and ends it at the first output that is not finite.

    A module that was given a bad value is not to blame, but the forward around it, which made it between its layers. A mask
    of -inf is such a value, too, so the output decides.
    """

    def __init__(self, model: Module, n: int):
        self.model, self.n = model, n
        self.found: Origin | None = None
        self.inside: list[tuple[str, Module, Tensor | None]] = []      # running modules, with a bad value they were given

    def hooks(self) -> list[Any]:
        """The ways to remove the hooks, which are set on all modules."""
        return [remove for name, module in self.model.named_modules()
                for remove in (module.before_forward(partial(self.enter, name)), module.after_forward(self.leave))]

    def enter(self, name: str, module: Module, inputs: Any) -> None:
        self.inside.append((name, module, first_bad(inputs)))

    def leave(self, module: Module, inputs: Any, output: Any) -> None:
        bad = first_bad(output)
        if bad is None:
            self.inside.pop()
            return
        taker = ""
        while len(self.inside) > 1 and self.inside[-1][2] is not None:
            taker, _, bad = self.inside.pop()
        assert bad is not None
        name, module, _ = self.inside[-1]
        kind = type(module).__name__ if name or not is_own(module) else named(module)
        where = f'the layer "{name}" ({kind})' if name else f"the model's own forward ({kind})"
        between = f', in what it gives to "{taker}"' if taker else "" if name else "; every layer's output is finite"
        self.found = Origin(where + between, bad_places(bad.array, self.n))
        raise _Found


def bad_places(array: Array, n: int) -> list[int]:
    """The samples, out of `n` along the first dim, that are not finite; none where all are, or where the dim is another."""
    if array.shape[:1] != (n,):
        return []
    bad = ~np.isfinite(asnumpy(array).reshape(n, -1)).all(axis=1)
    return [] if bad.all() else [int(i) for i in np.flatnonzero(bad)]


@contextmanager
def nobody_else(model: Module) -> Iterator[list[str]]:
    """Replaces the way to other ranks by stand-ins; yields in words the parts of the model that are not seen then."""
    asking = [(module, across) for _, module in model.named_modules() if (across := module.across) and not across.lockstep]
    for module, across in asking:
        module.across = across.alone()
    try:
        yield list({across.absent: None for _, across in asking if across.absent})
    finally:
        for module, across in asking:
            module.across = across


def nonfinite_loss(model: Module, x: Any, value: float, micro: MicroBatch) -> NumericsError:
    """The error that names the step, the micro-batch, the layer and the samples."""
    origin = origin_of(model, x)
    host = micro.x.values if isinstance(micro.x, StoredRows) else micro.x
    for given, stored in zip(x.values(), micro.x.values.values()) if isinstance(x, ByName) else [(x, host)]:
        if not is_finite(given.array) and is_finite(stored):
            origin = Origin(f"the data's {stored.dtype} values, which are too large for the model's {given.dtype}",
                            bad_places(given.array, given.shape[0]), 'scale the data, or set train.precision = "float64"')
    rows = [int(micro.samples[i]) for i in origin.places] or [int(row) for row in micro.samples]
    error = NumericsError(f"the loss of micro-batch {micro.index} is {value}; the first value that is not finite comes from "
                          f"{origin.text}, samples {listed(rows)}; no parameter was changed in this step; {origin.advice}",
                          step=micro.step + 1)
    error.micro_batch, error.rows = micro.index, rows
    return error


def listed(rows: Sequence[int]) -> str:
    """``3, 17, 20, 4 and 12 more``."""
    more = f" and {len(rows) - LISTED} more" if len(rows) > LISTED else ""
    return ", ".join(map(str, rows[:LISTED])) + more
