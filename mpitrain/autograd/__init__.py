"""Reverse-mode differentiation: Tensor, Function, the engine, recomputation, and a gradient check."""

from mpitrain.autograd.engine import Backward, Deferred, current_walk, run_backward
from mpitrain.autograd.function import Context, Function
from mpitrain.autograd.gradcheck import gradcheck
from mpitrain.autograd.recompute import recompute
from mpitrain.autograd.record import Operation, Value, record
from mpitrain.autograd.tensor import Tensor, batch_share, enable_grad, grad_enabled, no_grad, part_of_batch, recomputing

__all__ = ["Backward", "Context", "Deferred", "Function", "Operation", "Tensor", "Value", "batch_share", "current_walk",
           "enable_grad", "grad_enabled", "gradcheck", "no_grad", "part_of_batch", "recompute", "recomputing", "record",
           "run_backward"]

Tensor.backward = run_backward
