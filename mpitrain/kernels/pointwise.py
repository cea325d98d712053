"""Activations that NumPy has no loop for, or only in several passes over memory; each value and its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from mpitrain.backend.namespace import Array, array_module
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.library import CFunction, host
from mpitrain.kernels.sums import EXACT, sum_rows

SQRT_HALF = math.sqrt(0.5)
INVERSE_SQRT_2PI = 1 / math.sqrt(2 * math.pi)
TANH_SCALE, TANH_CUBIC = math.sqrt(2 / math.pi), 0.044715        # GELU by tanh (Hendrycks and Gimpel, 2016)


def erf(x: Array) -> Array:
    """The error function from its series exp(-x^2) 2x/sqrt(pi) (1 + 2x^2/3 (1 + 2x^2/5 (...))); all terms positive.

    Beyond 6 it is 1 in float64, and exactly so here; there the series has 130 terms.
    """
    xp = array_module(x)
    beyond, sign = xp.abs(x) >= 6, xp.sign(x)
    x = xp.clip(x, -6, 6)
    square = x * x
    total = xp.ones_like(x)
    for n in range(130, 0, -1):
        total *= square * (2 / (2 * n + 1))
        total += 1
    return xp.where(beyond, sign, xp.exp(-square) * total * (x * (2 / math.sqrt(math.pi))))


def _sigmoid(x: Array, out: Array | None = None) -> Array:
    xp = array_module(x)
    small = xp.exp(-xp.abs(x))                    # never overflows
    return _into(out, xp.where(x >= 0, 1, small).astype(x.dtype) / (1 + small))


def _relu(x: Array, out: Array | None = None) -> Array:
    return array_module(x).maximum(x, x.dtype.type(0), out=out)


def _tanh(x: Array, out: Array | None = None) -> Array:
    return array_module(x).tanh(x, out=out)


def _gelu(x: Array, out: Array | None = None) -> Array:
    return _into(out, x * _normal_distribution(x))


def _gelu_tanh(x: Array, out: Array | None = None) -> Array:
    return _into(out, 0.5 * x * (1 + _inner_tanh(x)))


def _silu(x: Array, out: Array | None = None) -> Array:
    return _into(out, x * _sigmoid(x))


def _gelu_and_slope(x: Array, slope: Array) -> Array:
    result, below = _gelu(x), _normal_distribution(x)
    slope[...] = below + x * array_module(x).exp(-0.5 * x * x) * INVERSE_SQRT_2PI
    return result


def _gelu_tanh_and_slope(x: Array, slope: Array) -> Array:
    result, t = _gelu_tanh(x), _inner_tanh(x)
    slope[...] = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * TANH_SCALE * (1 + 3 * TANH_CUBIC * x * x)
    return result


def _silu_and_slope(x: Array, slope: Array) -> Array:
    result, s = _silu(x), _sigmoid(x)
    slope[...] = s * (1 + x * (1 - s))
    return result


def _normal_distribution(x: Array) -> Array:
    return 0.5 * (1 + erf(x * SQRT_HALF))


def _inner_tanh(x: Array) -> Array:
    return array_module(x).tanh(TANH_SCALE * (x + TANH_CUBIC * x * x * x))


def _into(out: Array | None, result: Array) -> Array:
    if out is None:
        return result
    out[...] = result
    return out


def _slope_grad(slope: Array, grad: Array, sums: Array | None) -> Array:
    slope *= grad
    return _summed(slope, sums)


def _relu_grad(y: Array, grad: Array, sums: Array | None) -> Array:
    return _summed(array_module(y).where(y <= 0, grad.dtype.type(0), grad), sums)


def _tanh_grad(y: Array, grad: Array, sums: Array | None) -> Array:
    return _summed((1 - y * y) * grad, sums)


def _sigmoid_grad(y: Array, grad: Array, sums: Array | None) -> Array:
    return _summed((1 - y) * y * grad, sums)


def _summed(result: Array, sums: Array | None) -> Array:
    if sums is not None:
        sum_rows(result, sums)
    return result


def _run(call: CFunction, x: Array, out: Array | None = None) -> Array:
    x = np.asarray(x, order="C")
    result = np.empty_like(x) if out is None else out
    call(x, result, x.size)
    return result


def _run_and_slope(call: CFunction, x: Array, slope: Array) -> Array:
    x = np.asarray(x, order="C")
    result = np.empty_like(x)
    call(x, slope, result, x.size)
    return result


def _run_gradient(call: CFunction, kept: Array, grad: Array, sums: Array | None, in_place: bool = False) -> Array:
    kept, grad = np.asarray(kept, order="C"), np.asarray(grad, order="C")
    result = kept if in_place else np.empty_like(kept)
    apart = sums is not None and len(kept) > EXACT             # C adds up row after row
    call(kept, grad, result, None if apart else sums, *((1, kept.size) if sums is None or apart else kept.shape))
    return _summed(result, sums) if apart else result


AND_SLOPE, GRADIENT = (_run_and_slope, "X:n X!:n X!:n in"), (_run_gradient, "X:rn X:rn X!:rn X?!:n ir in")


def _kernel(name: str, reference: Callable[..., Array], run: Callable[..., Array] = _run,
            signature: str = "X:n X!:n in") -> Kernel:
    version = host("pointwise", name, signature)(run)
    return Kernel(name, reference, version, version.loop("pointwise"))


relu, sigmoid = _kernel("relu", _relu), _kernel("sigmoid", _sigmoid)
slope_grad = _kernel("slope_grad", _slope_grad, partial(_run_gradient, in_place=True), GRADIENT[1])


@dataclass(frozen=True)
class Activation:
    """A function of each element, with what its gradient needs.

    ``values(x, out=None)`` is the function; `out` may be x. ``gradient(kept, grad, sums)`` is grad times the derivative;
    where `sums` is given, kept is a matrix, and the sums of the result over its rows go there. What is kept is the result
    itself, or, where there is ``and_slope(x, slope)``, which is the function again, the derivative that this writes to
    `slope`, perhaps the memory of x; the gradient takes its place.
    """

    values: Kernel
    gradient: Kernel
    and_slope: Kernel | None = None
    number: int = 0                               # its place in the tables of native/linear.h; 0 where it has none

    def forward(self, x: Array, *, ours: bool, training: bool) -> tuple[Array, Array]:
        """(result, what to keep for `gradient`); x may be overwritten where it is `ours`."""
        ours = ours and x.flags.c_contiguous
        if training and self.and_slope is not None:
            slope = x if ours else array_module(x).empty(x.shape, x.dtype)
            return self.and_slope(x, slope), slope
        result = self.values(x, x if ours else None)
        return result, result


ACTIVATIONS = {
    "relu": Activation(relu, _kernel("relu_grad", _relu_grad, *GRADIENT), number=1),
    "tanh": Activation(Kernel("tanh", _tanh), _kernel("tanh_grad", _tanh_grad, *GRADIENT)),
    "sigmoid": Activation(sigmoid, _kernel("sigmoid_grad", _sigmoid_grad, *GRADIENT), number=2),
    "gelu": Activation(_kernel("gelu", _gelu), slope_grad, _kernel("gelu_and_slope", _gelu_and_slope, *AND_SLOPE), 3),
    "gelu_tanh": Activation(_kernel("gelu_tanh", _gelu_tanh), slope_grad,
                            _kernel("gelu_tanh_and_slope", _gelu_tanh_and_slope, *AND_SLOPE), 4),
    "silu": Activation(_kernel("silu", _silu), slope_grad, _kernel("silu_and_slope", _silu_and_slope, *AND_SLOPE), 5),
}
"""By name; those that can be computed where their input is made."""
