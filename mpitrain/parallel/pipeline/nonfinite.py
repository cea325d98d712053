"""The search for the first NaN or infinity: another forward pass that looks at every layer's output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpitrain.autograd import Tensor, no_grad
from mpitrain.backend import Array, asnumpy, is_float
from mpitrain.errors import NumericsError
from mpitrain.nn import Module


def is_finite(array: Array) -> bool:
    """True where every value is finite, as all integers are."""
    with np.errstate(over="ignore", invalid="ignore"):
        return not is_float(array.dtype) or bool(np.isfinite(asnumpy(array.sum())))


class _Found(Exception):
    """Ends the forward pass at the first layer that is not finite."""


def first_bad_layer(model: Module, x: Any) -> str:
    """The origin, in words, of the first value that is not finite: a parameter, the input, a layer, or the loss itself."""
    if not is_finite(x):
        return "the input of the model"
    if not all(parameter.allocated for parameter in model.parameters()):
        return 'a layer that cannot be named where ranks have slices of the parameters; set comm.sharding = "gradients" to see it'
    for name, parameter in model.named_parameters():
        if not is_finite(parameter.array):
            return f'the parameter "{name}"'
    found: list[str] = []

    def look(name: str, kind: str) -> Any:
        def hook(module: Module, inputs: Any, output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            if not all(is_finite(t.array) for t in outputs if isinstance(t, Tensor)):
                found.append(f'the layer "{name}" ({kind})')
                raise _Found
        return hook

    remove = [module.after_forward(look(name, type(module).__name__)) for name, module in model.named_modules() if name]
    try:
        with no_grad(), np.errstate(all="ignore"), nobody_else(model) as missed:
            model(Tensor(x))
    except _Found:
        pass
    finally:
        for undo in remove:
            undo()
    return found[0] if found else ", or ".join((*missed, "the loss function; every layer's output")) + " here" * bool(
        missed) + " is finite"


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


def refuse_nonfinite_loss(model: Module, x: Any, value: float, *, step: int, micro_batch: int) -> None:
    """Raises NumericsError naming the step, the micro-batch and the layer."""
    raise NumericsError(f"the loss of micro-batch {micro_batch} is {value}; the first value that is not finite comes from "
                        f"{first_bad_layer(model, x)}; no parameter was changed in this step; "
                        "look at that data, or try a smaller optimizer.lr or optimizer.clip_norm", step=step)
