"""Layer and RMS norm on a device; see kernels/layer_norm.py. Weights, statistics, sums over rows are float32 beside 16 bits."""

from __future__ import annotations

from typing import Any, NamedTuple

from mpitrain.backend.namespace import Array, array_module
from mpitrain.kernels.device import device
from mpitrain.kernels.device.code import DeviceFunction, Source, computed, contiguous
from mpitrain.kernels.device.random import key_of
from mpitrain.kernels.dropout import WORDS, Dropping
from mpitrain.kernels.layer_norm import Gradients, Normed, Outs
from mpitrain.kernels.library import misfit

MOST, UNIT = 256, 8                               # layer_norm.h: threads of a block, numbers that a thread holds side by side
MOST_UNITS = {8: 2}                               # that a thread holds of a row, by the bytes of a number; else 4
TOGETHER = 128                                    # threads of a block whose rows are shorter
BLOCKS = 264                                      # that stay for gradients: two for each of an H100's 132 multiprocessors
ROWS_A_SUM, TOTAL_WARPS = 64, 32                  # layer_norm_gradients.cu's MOST_ROWS_A_SUM and TOTAL_WARPS
FORWARD, BACKWARD = Source("layer_norm"), Source("layer_norm_gradients")
UNITS = {1: "1", 2: "2", 4: "4", 0: "long"}       # the kernels, by the units that a thread holds: see Plan
_NORM = "X:rn X?:rn X?!:rn S:n S?:n X!:rn S!:r S!:r d ir in i L?:r/p L?:r/p B?!:rn/8 L?:1 i i i ip d i"
_norms = {units: FORWARD.function(f"row_norm_{name}", _NORM) for units, name in UNITS.items()}
_gradients = {units: BACKWARD.function(f"row_gradients_{name}", (
    "X:rn X:rn S:n X?:rn S:r S:r X?!:rn S?!:2bn B?:rn/8 X?!:rn d ir in ib i i")) for units, name in {**UNITS, -1: "sums"}.items()}
_totals = {name: BACKWARD.function(f"column_totals_{name}", f"{letter}:2rn {letter}!:n {letter}!:n ir in")
           for name, letter in (("float32", "F"), ("float64", "D"))}


class Plan(NamedTuple):
    """How threads share rows: `group` threads have one, each `units` of UNIT numbers of it (0: as many as there are)."""

    units: int
    group: int
    threads: int                                  # of a block

    @property
    def rows(self) -> int:
        """That a block has at a time."""
        return self.threads // self.group


def plan(columns: int, itemsize: int) -> Plan:
    """For rows of so many numbers of so many bytes: a warp or a part of it while they fit in its registers, then a block."""
    count, most = max(1, -(-columns // UNIT)), MOST_UNITS.get(itemsize, 4)
    units = 1
    while units < most and count > 32 * units:
        units *= 2
    group = 1 << max(0, -(-count // units) - 1).bit_length()
    if group > MOST:
        return Plan(0, MOST, MOST)
    return Plan(units, group, group if group > 32 else TOGETHER)


@device("row_norm")
def row_norm(x: Array, added: Array | None, weight: Array, bias: Array | None, eps: float, centred: bool,
             dropping: Dropping | None = None) -> Normed:
    xp, x, made_in = array_module(x), contiguous(x), computed(x.dtype)
    y, means, inverses = xp.empty(x.shape, x.dtype), xp.empty(len(x), made_in), xp.empty(len(x), made_in)
    total = x if added is None else xp.empty(x.shape, x.dtype)
    drops: tuple[Any, ...] = (None, None, None, None, 0, 0, 0, 1, 0.0)
    if dropping is not None and added is not None:
        drops = _dropped(dropping, x)
    if x.size:
        p = plan(x.shape[1], x.dtype.itemsize)
        _norms[p.units]((-(-len(x) // p.rows),), p.threads, x, contiguous(added), None if added is None else total,
                        contiguous(weight, made_in), contiguous(bias, made_in), y, means, inverses, eps, *x.shape, centred,
                        *drops, p.group)
    return y, total, means, inverses, drops[2]


def _dropped(dropping: Dropping, x: Array) -> tuple[Any, ...]:
    """What the kernel takes of it: rows, first words, bits to write, stored key, key, least, first word, parts, factor."""
    if x.shape[1] % 8:
        misfit("row_norm with dropout, in parts of 8", x)
    samples = max(len(dropping.rows), 1)
    first = dropping.first(x.size // samples)
    bits = array_module(x).empty((len(dropping.rows), x.size // (8 * samples)), "uint8")
    firsts, first = (None, first) if isinstance(first, int) else (contiguous(first), 0)
    return (contiguous(dropping.rows), firsts, bits, *key_of(dropping.key), round(dropping.p * WORDS), first,
            max(len(x) // samples, 1), dropping.scale)


@device("row_norm_gradients")
def row_norm_gradients(grad: Array, x: Array, weight: Array, around: Array | None, means: Array, inverses: Array, centred: bool,
                       wanted: tuple[bool, bool], bits: Array | None = None, p: float = 0.0,
                       outs: Outs = (None, None)) -> Gradients:
    xp, grad, x, made_in, (rows, columns) = array_module(x), contiguous(grad), contiguous(x), computed(x.dtype), x.shape
    if bits is not None and columns % 8:
        misfit("row_norm_gradients with dropout, in parts of 8", x)
    dx = xp.empty(x.shape, x.dtype) if wanted[0] else None
    dropped = xp.empty(x.shape, x.dtype) if bits is not None and wanted[0] else None
    product, plain = [xp.empty(columns, made_in) if out is None or out.dtype != made_in else out
                      for out in outs] if wanted[1] else (None, None)
    if not x.size or not any(wanted):
        for sums in (product, plain):
            if sums is not None:
                sums[...] = 0
        return dx, *_landed(outs, (product, plain)), dropped
    how = plan(columns, x.dtype.itemsize)
    blocks = min(-(-rows // how.rows), BLOCKS) if how.units else -(-rows // ROWS_A_SUM)
    partial = xp.empty((2, blocks, columns), made_in) if wanted[1] else None

    def run(kernel: DeviceFunction, grid: tuple[int, ...], dx: Array | None, partial: Array | None) -> None:
        kernel(grid, how.threads, grad, x, contiguous(weight, made_in), contiguous(around), contiguous(means, made_in),
               contiguous(inverses, made_in), dx, partial, None if dropped is None else contiguous(bits), dropped, 1 / (1 - p),
               rows, columns, blocks, centred, how.group)

    if how.units:
        run(_gradients[how.units], (blocks,), dx, partial)
    else:
        if dx is not None:
            run(_gradients[0], (rows,), dx, None)
        if partial is not None:
            run(_gradients[-1], (-(-columns // how.group), blocks), None, partial)
    if partial is not None:
        _totals[made_in]((-(-columns // 32), 2), 32 * TOTAL_WARPS, partial, product, plain, blocks, columns)
    return dx, *_landed(outs, (product, plain)), dropped


def _landed(outs: Outs, made: Outs) -> Outs:
    """What was made for `outs`, there: memory of another dtype gets a copy."""
    found: list[Array | None] = []
    for out, values in zip(outs, made):
        if out is not None and values is not None and values is not out:
            out[...] = values
        found.append(values if out is None or values is None else out)
    return found[0], found[1]
