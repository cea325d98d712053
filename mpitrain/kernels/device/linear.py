"""A linear layer and its gradients on a device; see kernels/linear.py."""

from __future__ import annotations

from mpitrain.backend.namespace import Array, array_module
from mpitrain.kernels.device import device
from mpitrain.kernels.device.code import aligned_rows
from mpitrain.kernels.device.product import multiply
from mpitrain.kernels.pointwise import ACTIVATIONS, Activation
from mpitrain.kernels.sums import column_sums


@device("linear")
def linear(x: Array, weight: Array, bias: Array | None, activation: Activation | None, training: bool,
           operands: str = "") -> tuple[Array, Array | None]:
    """One launch, and one more with an activation; but for an answer that no gradient follows GELU by tanh is in the first. Rows
    of an answer without an activation, such as logits of a vocabulary, begin at multiples of 16 bytes (`aligned_rows`)."""
    if activation is not None and not training and activation is ACTIVATIONS["gelu_tanh"]:
        made = multiply(x, weight.T, bias, operands=operands, ending="gelu_tanh")
        if made is not None:
            return made, None
    out = aligned_rows(array_module(x), len(x), len(weight), x.dtype) if activation is None else None
    made = multiply(x, weight.T, bias, out, operands=operands)
    assert made is not None
    return (made, None) if activation is None else activation.forward(made, ours=True, training=training)


@device("linear_gradients")
def linear_gradients(grad: Array, kept: Array | None, x: Array, weight: Array, activation: Activation | None, sums: Array | None,
                     by_weight: Array | None, wanted: bool, added: bool = False, operands: str = ""
                     ) -> tuple[Array, Array | None]:
    """With `added`, the weight's gradient is added to what `by_weight` has. The bias's is made in one pass with an activation's
    gradient, else with the weight's where the library can."""
    if activation is not None:
        grad = activation.gradient(kept, grad, sums)
        sums = None
    if by_weight is not None:
        beta = 1.0 if added else 0.0
        if sums is not None and by_weight.dtype == sums.dtype and grad.size and x.size and sums.flags.c_contiguous and (
                multiply(grad.T, x, sums, by_weight, operands=operands, beta=beta, ending="row_sums") is not None):
            sums = None
        else:
            multiply(grad.T, x, out=by_weight, operands=operands, beta=beta)
    if sums is not None and grad.size:
        column_sums(grad, sums)
    elif sums is not None:
        sums[...] = 0
    return grad, multiply(grad, weight, operands=operands) if wanted else None
