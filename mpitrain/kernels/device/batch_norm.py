"""Batch and group norm on a device; see kernels/batch_norm.py. What belongs to a channel is in the format that x is computed in.

Two kernels each way: one adds up, in parts; the other joins the parts of its channels, and goes over the numbers once more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mpitrain.backend.namespace import Array, array_module
from mpitrain.backend.runtime import Grid
from mpitrain.kernels.batch_norm import NOWHERE, RELU, Into, _check, fill, unbiased
from mpitrain.kernels.device import device
from mpitrain.kernels.device.code import Source, computed, contiguous
from mpitrain.kernels.library import misfit

SOURCE, THREADS = Source("batch_norm"), 256                           # batch_norm.cu's THREADS
SIZES = "in ic il is i i i"
_moments = SOURCE.function("moments", f"X:ncl S!:2sc {SIZES}")
_normalise = SOURCE.function("normalise", f"X:ncl S?:c S?:c X?:ncl S:2sc X?!:ncl S!:c S!:c S?!:c D?!:2c+1 d d {SIZES} i")
_sums = SOURCE.function("sums", f"X:ncl X:ncl X?:ncl S:c S?:c S?:c S?:c X?!:ncl S!:2sc {SIZES} i")
_gradients = SOURCE.function("gradients", f"X:ncl X:ncl S:c S?:c S?:c S?:c S:2sc X?!:ncl S!:c S!:c S?!:c S?!:c {SIZES} i")
_combine = SOURCE.function("combine", f"X?:ncl X:ncl S:c S?:c S:c S:c X!:ncl {SIZES}")
_move = SOURCE.function("move_running", "X!:n D!:n D:r L:2r in ir")
SMALL = 8                                         # numbers of a plane below which threads beside each other have channels apart
BLOCKS = 1024                                     # that a GPU of 132 multiprocessors is filled with, several times over
MOST = 1 << 31                                    # numbers of a channel, which kernels count in 32 bits


class Plan(NamedTuple):
    """How blocks share the channels of x (N, C, L): see batch_norm.cu."""

    shape: tuple[int, ...]
    wide: int
    apart: int
    vector: bool
    tiles: int
    units: int                                    # of a channel
    rows: int                                     # units that a block takes of a channel at a time

    @classmethod
    def of(cls, x: Array) -> Plan:
        n, c, length = x.shape
        if n * length >= MOST:
            misfit(f"a norm of fewer than {MOST} numbers in a channel", x)
        at_once = 16 // x.dtype.itemsize
        vector = length % at_once == 0
        units = n * (length // at_once) if vector else n * length
        wide = 1
        while wide < 8 and THREADS // wide > units:
            wide *= 2
        wide = 32 if length < SMALL else wide
        return cls(x.shape, wide, wide if length < SMALL else 1, vector, max(1, -(-c // wide)), units, THREADS // wide)

    @property
    def parts(self) -> int:
        """Blocks that add up a channel."""
        return max(1, min(-(-BLOCKS // self.tiles), -(-self.units // (8 * self.rows)), THREADS))

    def grid(self, parts: int) -> Grid:
        return self.tiles, parts

    @property
    def whole(self) -> Grid:
        """The grid of what goes over the numbers alone."""
        return self.tiles, max(1, min(-(-4 * BLOCKS // self.tiles), -(-self.units // (4 * self.rows))))

    def sizes(self, parts: int = 0) -> tuple[int, ...]:
        return *self.shape, parts, self.wide, self.apart, self.vector


def _by_channel(values: Array | None, x: Array) -> Any:
    return contiguous(values, computed(x.dtype))


def _parts_of(x: Array, plan: Plan) -> tuple[Any, int, Array]:
    """(array module, number of parts, memory for two sums of each part)."""
    xp, parts = array_module(x), plan.parts
    return xp, parts, xp.empty((2, parts, x.shape[1]), computed(x.dtype))


@device("channel_moments")
def channel_moments(x: Array) -> tuple[Array, Array]:
    x = contiguous(x)
    plan = Plan.of(x)
    xp, parts, partial = _parts_of(x, plan)
    mean, squares = xp.empty((2, x.shape[1]), partial.dtype)
    _moments(plan.grid(parts), THREADS, x, partial, *plan.sizes(parts))
    _normalise(plan.grid(1), THREADS, x, None, None, None, partial, None, mean, squares, None, None, 0.0, 0.0, *plan.sizes(parts),
               0)
    return mean, squares


@device("batch_norm")
def batch_norm(x: Array, weight: Array | None, bias: Array | None, residual: Array | None, eps: float,
               activation: int, tally: Array | None = None) -> tuple[Array, Array, Array, Array]:
    _check("batch_norm", activation, residual)
    x = contiguous(x)
    plan = Plan.of(x)
    xp, parts, partial = _parts_of(x, plan)
    y, (mean, variance, inverse) = xp.empty(x.shape, x.dtype), xp.empty((3, x.shape[1]), partial.dtype)
    _moments(plan.grid(parts), THREADS, x, partial, *plan.sizes(parts))
    _normalise(plan.whole, THREADS, x, _by_channel(weight, x), _by_channel(bias, x), contiguous(residual), partial, y, mean,
               variance, inverse, tally, unbiased(x.shape[0] * x.shape[2]), eps, *plan.sizes(parts), activation)
    return y, mean, variance, inverse


@device("channel_sums")
def channel_sums(grad: Array, x: Array, centre: Array) -> tuple[Array, Array]:
    grad, x, centre = contiguous(grad), contiguous(x), _by_channel(centre, x)
    plan = Plan.of(x)
    xp, parts, partial = _parts_of(x, plan)
    plain, product = xp.empty((2, x.shape[1]), partial.dtype)
    _sums(plan.grid(parts), THREADS, grad, x, None, centre, None, None, None, None, partial, *plan.sizes(parts), 0)
    _gradients(plan.grid(1), THREADS, grad, x, centre, None, None, None, partial, None, plain, product, None, None,
               *plan.sizes(parts), 0)
    return plain, product


@device("batch_norm_gradients")
def batch_norm_gradients(grad: Array, x: Array, y: Array | None, centre: Array, weight: Array | None, bias: Array | None,
                         inverse: Array, activation: int, wanted: bool,
                         into: Into = NOWHERE) -> tuple[Array | None, Array, Array, Array]:
    _check("batch_norm_gradients", activation, y)
    grad, x, y = contiguous(grad), contiguous(x), contiguous(y) if activation == RELU else None
    centre, weight, bias, inverse = (_by_channel(values, x) for values in (centre, weight, bias, inverse))
    plan = Plan.of(x)
    xp, parts, partial = _parts_of(x, plan)
    before = xp.empty(x.shape, x.dtype) if y is not None else None
    result, (plain, product) = xp.empty(x.shape, x.dtype) if wanted else None, xp.empty((2, x.shape[1]), partial.dtype)
    _sums(plan.grid(parts), THREADS, grad, x, y, centre, weight, bias, inverse, before, partial, *plan.sizes(parts), activation)
    if before is not None:
        grad, activation = before, 0
    direct = [out if out is not None and out.dtype == plain.dtype and out.flags.c_contiguous else None for out in into]
    _gradients(plan.whole if wanted else plan.grid(1), THREADS, grad, x, centre, weight, bias, inverse, partial, result, plain,
               product, *direct, *plan.sizes(parts), activation)
    if any(out is not made for out, made in zip(into, direct)):
        fill(into, plain, product, inverse)
    return result, grad, plain, product


@device("channel_affine")
def channel_affine(x: Array, centre: Array, scale: Array, shift: Array) -> Array:
    return channel_combine(None, x, centre, None, scale, shift)


@device("channel_combine")
def channel_combine(grad: Array | None, x: Array, centre: Array, a: Array | None, b: Array, d: Array) -> Array:
    grad, x = contiguous(grad), contiguous(x)
    centre, a, b, d = (_by_channel(values, x) for values in (centre, a, b, d))
    plan, result = Plan.of(x), array_module(x).empty(x.shape, x.dtype)
    _combine(plan.whole, THREADS, grad, x, centre, a, b, d, result, *plan.sizes())
    return result


@device("move_running")
def move_running(values: Array, sums: Array, momenta: Array, table: Array) -> None:
    if len(table):
        _move((len(table),), THREADS, values, sums, momenta, table, values.size, len(table))
