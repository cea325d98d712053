"""Convolutions of any shape as products over unfolded windows, image by image, in loops of Numba.

An image is spread over planes, one for each phase of the stride; in such a plane the pixels under one place of the kernel are a
run of `count` numbers, wherever the place: `row` numbers for each row of results, of which the last few are none's. So unfolding
(im2col) copies runs, and its adjoint adds them. The products are `tile`'s: the bits of an image do not depend on the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import register_jitable

from mpitrain.backend.namespace import Array
from mpitrain.kernels.convolution import Window
from mpitrain.kernels.loops.mathematics import u
from mpitrain.kernels.loops.tile import ROWS, SIDE, WIDE, dots, tile
from mpitrain.kernels.loops.typed import loop

LARGEST = 1 << 26                                 # Bytes of unfolded windows of an image; larger ones are the reference's.
(C, H, W, O, GROUPS, KH, KW, SH, SW, PH, PW, DH, DW, OH, OW, ROW, PLANE, STEP) = range(18)


def up(n: int, step: int) -> int:
    return -(-n // step) * step


def geometry(shape: tuple[int, ...], window: Window, outputs: int, groups: int, itemsize: int) -> Array:
    """What the loops know of an image and its windows: the numbers that are named above."""
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = window
    oh, ow = window.outputs(*shape[2:])
    row = ow + (kw - 1) * dw // sw
    plane = (oh + (kh - 1) * dh // sh + 1) * row
    step = up(oh * row, 192 // itemsize)                     # whole columns of `tile`, whole vectors of `dots`
    return np.array([*shape[1:], outputs, groups, kh, kw, sh, sw, ph, pw, dh, dw, oh, ow, row, plane, step], np.int64)


def suits(g: Array, itemsize: int) -> bool:
    return bool(g[C] // g[GROUPS] * g[KH] * g[KW] * g[STEP] * itemsize <= LARGEST and min(g[OH], g[OW]) > 0)


@register_jitable
def ends(g: Any, px: int) -> Any:
    """The columns of a plane of phase px that are the image's."""
    first = max(0, (g[PW] - px + g[SW] - 1) // g[SW])
    return first, max(first, min(g[ROW], (g[W] + g[PW] - px + g[SW] - 1) // g[SW]))


@register_jitable
def spread(x: Any, at: int, g: Any, planes: Any) -> None:
    """One channel of an image to its planes."""
    planes[:] = 0
    sh, sw, h, w, row = g[SH], g[SW], g[H], g[W], g[ROW]
    for py in range(sh):
        for px in range(sw):
            start, stop = ends(g, px)
            to, first = (py * sw + px) * g[PLANE], at + px - g[PW] + (py - g[PH]) * w
            for y in range(py - g[PH], min(h, (g[PLANE] // row) * sh + py - g[PH]), sh):
                if y >= 0:
                    if sw == 1:
                        for q in range(start, stop):
                            planes[u(to + q)] = x[u(first + q)]
                    elif sw == 2:
                        for q in range(start, stop):
                            planes[u(to + q)] = x[u(first + 2 * q)]
                    else:
                        for q in range(start, stop):
                            planes[u(to + q)] = x[u(first + q * sw)]
                to += row
                first += sh * w


@register_jitable
def gathered(planes: Any, at: int, g: Any, shift: Any, x: Any) -> None:
    """The opposite way, plus `shift`."""
    sh, sw, h, w, row = g[SH], g[SW], g[H], g[W], g[ROW]
    for i in range(at, at + h * w):
        x[u(i)] = shift
    for py in range(sh):
        for px in range(sw):
            start, stop = ends(g, px)
            first, to = (py * sw + px) * g[PLANE], at + px - g[PW] + (py - g[PH]) * w
            for y in range(py - g[PH], min(h, (g[PLANE] // row) * sh + py - g[PH]), sh):
                if y >= 0:
                    for q in range(start, stop):
                        x[u(to + q * sw)] += planes[u(first + q)]
                first += row
                to += sh * w


@register_jitable
def run_of(g: Any, ky: int, kx: int) -> int:
    """Where the pixels under a place of the kernel begin."""
    y, x = ky * g[DH], kx * g[DW]
    return (y % g[SH] * g[SW] + x % g[SW]) * g[PLANE] + y // g[SH] * g[ROW] + x // g[SW]


@register_jitable
def unfold(x: Any, image: int, group: int, g: Any, planes: Any, columns: Any) -> None:
    channels, count, k = g[C] // g[GROUPS], g[OH] * g[ROW], 0
    for c in range(channels):
        spread(x, (image * g[C] + group * channels + c) * g[H] * g[W], g, planes)
        for ky in range(g[KH]):
            for kx in range(g[KW]):
                first, to = run_of(g, ky, kx), k * g[STEP]
                for t in range(count):
                    columns[u(to + t)] = planes[u(first + t)]
                for t in range(count, g[STEP]):
                    columns[u(to + t)] = 0
                k += 1


@register_jitable
def rows_of(y: Any, image: int, group: int, g: Any, rows: Any) -> None:
    """The results of a group, zeros where none are."""
    outputs, width = g[O] // g[GROUPS], g[OW]
    rows[:] = 0
    for o in range(outputs):
        for r in range(g[OH]):
            to, first = o * g[STEP] + r * g[ROW], ((image * g[O] + group * outputs + o) * g[OH] + r) * width
            for i in range(width):
                rows[u(to + i)] = y[u(first + i)]


@register_jitable
def multiply(left: Any, at: int, terms: int, right: Any, made: Any, rows: int, step: int) -> None:
    """made (rows, step) = left (rows, terms) right (terms, step)."""
    columns = 3 * WIDE // left.itemsize
    for t in range(0, step, columns):
        for r in range(0, rows, ROWS):
            tile(left, at + r * terms, terms, right, t, step, made, r * step + t, step, terms)


@loop("X X X? X! X! X! X! L:18 i i")
def _convolve(x: Any, left: Any, bias: Any, y: Any, planes: Any, columns: Any, rows: Any, g: Any, images: int,
              whole: int) -> None:
    outputs, terms, width = g[O] // g[GROUPS], g[C] // g[GROUPS] * g[KH] * g[KW], g[OW]
    for image in range(images):
        for group in range(g[GROUPS]):
            unfold(x, image, group, g, planes, columns)
            multiply(left, group * whole * terms, terms, columns, rows, whole, g[STEP])
            for o in range(outputs):
                channel = group * outputs + o
                shift = bias[channel] if bias.size else y.dtype.type(0)
                for r in range(g[OH]):
                    first, to = o * g[STEP] + r * g[ROW], ((image * g[O] + channel) * g[OH] + r) * width
                    for i in range(width):
                        y[u(to + i)] = rows[u(first + i)] + shift


@loop("X X X? X! X! X! X! L:18 i i")
def _adjoint(y: Any, left: Any, bias: Any, x: Any, planes: Any, columns: Any, rows: Any, g: Any, images: int,
             whole: int) -> None:
    outputs, channels, count = g[O] // g[GROUPS], g[C] // g[GROUPS], g[OH] * g[ROW]
    for image in range(images):
        for group in range(g[GROUPS]):
            rows_of(y, image, group, g, rows)
            multiply(left, group * whole * outputs, outputs, rows, columns, whole, g[STEP])
            k = 0
            for c in range(channels):
                planes[:] = 0
                for ky in range(g[KH]):
                    for kx in range(g[KW]):
                        to, first = run_of(g, ky, kx), k * g[STEP]
                        for t in range(count):
                            planes[u(to + t)] += columns[u(first + t)]
                        k += 1
                channel = group * channels + c
                gathered(planes, (image * g[C] + channel) * g[H] * g[W], g, bias[channel] if bias.size else x.dtype.type(0), x)


@loop("X X X! X! X! X! L:18 i i i")
def _gradient(x: Any, y: Any, total: Any, planes: Any, columns: Any, rows: Any, g: Any, images: int, left: int,
              right: int) -> None:
    for image in range(images):
        for group in range(g[GROUPS]):
            unfold(x, image, group, g, planes, columns)
            rows_of(y, image, group, g, rows)
            for o in range(0, left, SIDE):
                for k in range(0, right, SIDE):
                    dots(rows, o * g[STEP], g[STEP], columns, k * g[STEP], g[STEP], total, (group * left + o) * right + k, right,
                         g[STEP])


def _memory(g: Array, dtype: Any, terms: int, outputs: int) -> tuple[Array, Array, Array]:
    """Planes, unfolded windows, results."""
    planes = np.empty(g[SH] * g[SW] * g[PLANE] + g[ROW], dtype)
    return planes, np.zeros(terms * g[STEP], dtype), np.zeros(outputs * g[STEP], dtype)


def convolve(x: Array, weight: Array, bias: Array | None, groups: int, g: Array, y: Array) -> None:
    outputs, terms = len(weight) // groups, weight[0].size
    whole = up(outputs, ROWS)
    left = np.zeros((groups, whole, terms), x.dtype)
    left[:, :outputs] = weight.reshape(groups, outputs, terms)
    _convolve(x, left, bias, y, *_memory(g, x.dtype, terms, whole), g, len(x), whole)


def adjoint(y: Array, weight: Array, bias: Array | None, groups: int, g: Array, x: Array) -> None:
    outputs, terms = len(weight) // groups, weight[0].size
    whole = up(terms, ROWS)
    left = np.zeros((groups, whole, outputs), y.dtype)
    left[:, :terms] = weight.reshape(groups, outputs, terms).swapaxes(1, 2)
    _adjoint(y, left, bias, x, *_memory(g, y.dtype, whole, outputs), g, len(y), whole)


def kernel_gradient(x: Array, y: Array, window: Window, groups: int, g: Array) -> Array:
    outputs, channels = y.shape[1] // groups, x.shape[1] // groups
    terms = channels * window.kernel[0] * window.kernel[1]
    left, right = up(outputs, SIDE), up(terms, SIDE)
    total = np.zeros((groups, left, right), x.dtype)
    _gradient(x, y, total, *_memory(g, x.dtype, right, left), g, len(x), left, right)
    return np.ascontiguousarray(total[:, :outputs, :terms]).reshape(y.shape[1], channels, *window.kernel)
