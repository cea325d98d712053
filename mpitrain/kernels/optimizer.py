"""Optimizer updates in one pass over flat slices, and the sums of squares that norms are made of.

All arrays of a call are one-dimensional, of one dtype and length; `values` and the state change in place, `gradients`
do not. `scale` multiplies the gradients on the way in (the factor of clipping), so clipping costs no pass of its own.
Scalars are rounded to the arrays' dtype first, as PyTorch does.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from mpitrain.backend import native
from mpitrain.backend.namespace import Array, array_module
from mpitrain.kernels.kernel import Function, Kernel
from mpitrain.kernels.library import CFunction, host

NORM_BLOCK = 4096          # elements of a parameter whose squares are added before anything else: part of the result's bits


def _kernel(name: str, reference: Function, arrays: int, scalars: int) -> Kernel:
    """A kernel of so many arrays and then scalars, which go to C as one array of the arrays' dtype."""
    @host("optimizer", name, " ".join(["X!:n", "X:n", *["X!:n"] * (arrays - 2), f"X:{scalars}", "in"]))
    def update(run: CFunction, *arguments: Any) -> None:
        run(*arguments[:arrays], np.array(arguments[arrays:], arguments[0].dtype), arguments[0].size)
    return Kernel(name, reference, update, update.loop("optimizer"))


def part_function(kernel: Kernel, dtype: Any) -> int:
    """The address of the C function that does `kernel` for a part of its arrays, whoever calls it; 0 where there is none.

    ``void f(T *const *arrays, const T *gradients, const T *scalars, int64_t from, int64_t n)``: `arrays` are the values and
    the state, of which elements [from, from + n) change; `gradients` are those n alone.
    """
    library = native.load("optimizer")
    name = f"{kernel.name}_part_{np.dtype(dtype).name}"
    function = getattr(library, name, None) if library is not None else None
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0


def _sgd_reference(values: Array, gradients: Array, lr: float, decay: float, scale: float) -> None:
    values -= lr * (gradients * scale + decay * values)


sgd = _kernel("sgd", _sgd_reference, 2, 3)
"""(values, gradients, lr, decay, scale)."""


def _sgd_momentum_reference(values: Array, gradients: Array, buffer: Array, lr: float, momentum: float, own: float,
                            ahead: float, decay: float, scale: float) -> None:
    g = gradients * scale + decay * values
    buffer *= momentum
    buffer += g
    values -= lr * (own * g + ahead * buffer)


sgd_momentum = _kernel("sgd_momentum", _sgd_momentum_reference, 3, 6)
"""(values, gradients, buffer, lr, momentum, own, ahead, decay, scale): the step is own * gradient + ahead * buffer."""


def _adam_reference(values: Array, gradients: Array, m: Array, v: Array, step_size: float, keep: float, penalty: float,
                    new1: float, old2: float, new2: float, root: float, eps: float, scale: float) -> None:
    g = gradients * scale + penalty * values
    m += new1 * (g - m)
    v *= old2
    v += new2 * g * g
    values *= keep
    values -= step_size * m / (array_module(v).sqrt(v) * root + eps)


adam = _kernel("adam", _adam_reference, 4, 9)
"""(values, gradients, m, v, step_size, keep, penalty, new1, old2, new2, root, eps, scale).

new1 = 1 - beta1, old2 = beta2, new2 = 1 - beta2, root = 1 / sqrt(1 - beta2^step), step_size = lr / (1 - beta1^step);
AdamW's decay is keep = 1 - lr * decay, Adam's is penalty = decay.
"""


def _lamb_reference(values: Array, gradients: Array, direction: Array, m: Array, v: Array, new1: float, old2: float,
                    new2: float, correct1: float, root: float, eps: float, decay: float, scale: float) -> None:
    g = gradients * scale
    m += new1 * (g - m)
    v *= old2
    v += new2 * g * g
    direction[...] = correct1 * m / (array_module(v).sqrt(v) * root + eps) + decay * values


lamb = _kernel("lamb", _lamb_reference, 5, 8)
"""(values, gradients, direction, m, v, new1, old2, new2, correct1, root, eps, decay, scale): writes LAMB's direction.

correct1 = 1 / (1 - beta1^step), the others as in `adam`; `values` is only read.
"""


def _rmsprop_reference(values: Array, gradients: Array, square: Array, buffer: Array, lr: float, momentum: float, old: float,
                       new: float, eps: float, decay: float, scale: float) -> None:
    g = gradients * scale + decay * values
    square *= old
    square += new * g * g
    buffer *= momentum
    buffer += g / (array_module(square).sqrt(square) + eps)
    values -= lr * buffer


rmsprop = _kernel("rmsprop", _rmsprop_reference, 4, 7)
"""(values, gradients, square, buffer, lr, momentum, old, new, eps, decay, scale); old = alpha, new = 1 - alpha."""


def _dampened_reference(values: Array, gradients: Array, buffer: Array, lr: float, momentum: float, new: float, own: float,
                        ahead: float, decay: float, scale: float) -> None:
    g = gradients * scale + decay * values
    buffer *= momentum
    buffer += new * g
    values -= lr * (own * g + ahead * buffer)


sgd_dampened = Kernel("sgd_dampened", _dampened_reference)
"""As `sgd_momentum`, with the factor `new` of the gradient in the buffer (1 - dampening)."""


def _amsgrad_reference(values: Array, gradients: Array, m: Array, v: Array, largest: Array, step_size: float, keep: float,
                       penalty: float, new1: float, old2: float, new2: float, root: float, eps: float, scale: float) -> None:
    xp = array_module(values)
    g = gradients * scale + penalty * values
    m += new1 * (g - m)
    v *= old2
    v += new2 * g * g
    xp.maximum(largest, v, out=largest)
    values *= keep
    values -= step_size * m / (xp.sqrt(largest) * root + eps)


amsgrad = Kernel("amsgrad", _amsgrad_reference)
"""As `adam`, with the largest v so far in its place (Reddi, Kale, Kumar, 2018)."""


def _centered_reference(values: Array, gradients: Array, square: Array, buffer: Array, mean: Array, lr: float, momentum: float,
                        old: float, new: float, eps: float, decay: float, scale: float) -> None:
    g = gradients * scale + decay * values
    square *= old
    square += new * g * g
    mean += new * (g - mean)
    xp = array_module(square)
    buffer *= momentum
    buffer += g / (xp.sqrt(xp.maximum(square - mean * mean, square.dtype.type(0))) + eps)      # Rounding may leave less than 0.
    values -= lr * buffer


rmsprop_centered = Kernel("rmsprop_centered", _centered_reference)
"""As `rmsprop`, over the variance: the square of the running mean of the gradient is taken off (Graves, 2013)."""


def _square_sums_reference(x: Array) -> Array:
    xp = array_module(x)
    squares = xp.zeros((-(-len(x) // NORM_BLOCK), NORM_BLOCK), xp.float64)
    squares.reshape(-1)[:len(x)] = x
    squares *= squares
    while squares.shape[1] > 1:
        half = squares.shape[1] // 2
        squares = squares[:, :half] + squares[:, half:]
    return squares[:, 0]


@host("optimizer", "square_sums", "X:n in D!:n/4096")
def _square_sums_host(fill: CFunction, x: Array) -> Array:
    out = np.empty(-(-len(x) // NORM_BLOCK), np.float64)
    fill(x, len(x), out)
    return out


square_sums = Kernel("square_sums", _square_sums_reference, _square_sums_host, _square_sums_host.loop("optimizer"))
"""float64 (blocks,): the sum of the squares of each 4,096 elements of x (n,), the last block filled up with zeros.

A block is folded in halves, square i plus square i + 2048 first: a fixed order, so the bits depend on nothing else, which
vectorises as well (0.6 ms for 1.9 million float32 on one core; eight running sums took 1.5 ms).
"""


NUMBERS = 8                # float64: 64 bytes, which one copy brings to the host
RATE, ROOT, FIRST = range(3)
"""Kinds of an update's scalars that depend on the step t: lr / (1 - beta^t); 1 / sqrt(1 - beta^t); beta, and 1 at the first."""
NORM, FACTOR, FOUND, SCALE, GOOD, LEFT_OUT, LOSSES = range(7)
"""Places in the numbers of a step: the gradient's norm, before clipping; what the update multiplies gradients with; 1 where one
is not finite, and nothing may change; the scale of the loss, of which gradients are multiples; good steps since it changed;
steps of the run that have been left out. Those from LOSSES on have room for what comes down with them."""


def _conclude_norm_reference(numbers: Array, sums: Array, limit: float, interval: int, growth: float, backoff: float) -> None:
    xp = array_module(sums)
    total = xp.cumsum(sums)[-1] if len(sums) else xp.zeros((), "float64")                     # one after the other
    scale, good = numbers[SCALE].copy(), numbers[GOOD].copy()
    norm = xp.sqrt(total) / scale
    found = ~xp.isfinite(norm)
    numbers[NORM], numbers[FOUND] = norm, found
    clipped = limit > 0
    numbers[FACTOR] = (xp.where(found, 1.0, xp.minimum(1.0, limit / (norm + 1e-6))) if clipped else 1.0) / scale
    if interval:
        grows = ~found & (good + 1 >= interval)
        grown = xp.where(xp.isfinite((scale * growth).astype("float32")), scale * growth, scale)
        numbers[SCALE] = xp.where(found, scale * backoff, xp.where(grows, grown, scale))
        numbers[GOOD] = xp.where(found | grows, 0.0, good + 1)
        numbers[LEFT_OUT] += found


conclude_norm = Kernel("conclude_norm", _conclude_norm_reference)
"""(numbers, sums, limit, interval, growth, backoff): the numbers of a step, float64, of the sums of squares of blocks (n,).

The sums are added one after the other; none is less than 0. The norm is the root of that over `scale`, clipped at `limit` (0:
not). With an `interval`, steps with a gradient that is not finite are counted as left out, and the scale of the loss is changed
for the next step: times `backoff` where a gradient is not finite, times `growth` after so many good steps without a change,
unless float32 has no such number (as torch.amp.GradScaler). `numbers` change in place.
"""
