"""Reverse-mode differentiation: Tensor, Function, the engine, derivatives as values, recomputation, and a gradient check."""

import importlib
from typing import Any

from mpitrain.autograd.analytic import conjugating
from mpitrain.autograd.cast import Cast, in_single
from mpitrain.autograd.context import Context
from mpitrain.autograd.derivatives import differentiate, grad, stand_in
from mpitrain.autograd.engine import Backward, Deferred, current_walk, run_backward
from mpitrain.autograd.function import Function
from mpitrain.autograd.gradcheck import gradcheck
from mpitrain.autograd.mode import (
    batch_share,
    enable_grad,
    grad_enabled,
    in_place_of_forward,
    keep_inputs,
    no_grad,
    part_of_batch,
    recomputing,
    row_by_row,
)
from mpitrain.autograd.recompute import recompute
from mpitrain.autograd.record import Operation, Value, record
from mpitrain.autograd.tensor import Tensor

__all__ = ["Backward", "Context", "Deferred", "Function", "Operation", "Tensor", "Value", "batch_share", "current_walk",
           "differentiate", "enable_grad", "grad", "grad_enabled", "gradcheck", "hessian", "hvp", "in_place_of_forward",
           "in_single", "jacobian", "jvp", "keep_inputs", "no_grad", "part_of_batch", "recompute", "recomputing", "record",
           "row_by_row", "run_backward", "stand_in", "vjp"]

Tensor.backward = run_backward
Function.conjugating = staticmethod(conjugating)
Function.cast = staticmethod(Cast.apply)


def __getattr__(name: str) -> Any:
    """Products with Jacobians are read when one is asked for: most runs need none."""
    if name in ("hessian", "hvp", "jacobian", "jvp", "vjp"):
        return getattr(importlib.import_module("mpitrain.autograd.functional"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
