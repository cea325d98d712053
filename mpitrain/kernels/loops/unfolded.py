"""Convolutions of any shape as products over windows, image by image, in loops of Numba.

An image is spread over planes, one for each channel and phase of the stride; in such a plane the pixels under one place of the
kernel are a run of `count` numbers, wherever the place: `row` numbers for each row of results, of which the last few are none's.
So the matrix of unfolded windows (im2col) is there without being made: its rows are runs, and the products are told where each
begins. The adjoint adds up such runs. The products are `tile`'s: the bits of an image do not depend on the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import register_jitable

from mpitrain.backend.namespace import Array
from mpitrain.kernels.convolution import Window
from mpitrain.kernels.loops.mathematics import u
from mpitrain.kernels.loops.runs import bring, every_second
from mpitrain.kernels.loops.tile import ROWS, SIDE, WIDE, dots, tile
from mpitrain.kernels.loops.typed import loop

LARGEST = 1 << 26                                 # Bytes of the matrix of an image; larger ones are the reference's.
(C, H, W, O, GROUPS, KH, KW, SH, SW, PH, PW, DH, DW, OH, OW, ROW, TALL, PLANE, STEP) = range(19)


MARGIN = 16                                       # Terms that `dots` adds at a time.
WHOLE = 48                                        # Whole columns of `tile`, and of such terms.


def up(n: int, step: int) -> int:
    return -(-n // step) * step


def geometry(shape: tuple[int, ...], window: Window, outputs: int, groups: int) -> Array:
    """What the loops know of an image and its windows: the numbers that are named above."""
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = window
    oh, ow = window.outputs(*shape[2:])
    below, right = (kh - 1) * dh // sh, (kw - 1) * dw // sw
    row, step = ow + right, up(oh * (ow + right), WHOLE)
    plane = below * row + right + step + MARGIN
    return np.array([*shape[1:], outputs, groups, kh, kw, sh, sw, ph, pw, dh, dw, oh, ow, row, oh + below, plane, step], np.int64)


def places(g: Array) -> Array:
    """Where the run of each channel of a group and place of the kernel begins."""
    y, x = np.arange(g[KH])[:, None] * g[DH], np.arange(g[KW]) * g[DW]
    runs = (y % g[SH] * g[SW] + x % g[SW]) * g[PLANE] + y // g[SH] * g[ROW] + x // g[SW]
    planes = np.arange(g[C] // g[GROUPS]) * (g[SH] * g[SW] * g[PLANE])
    return np.ascontiguousarray(planes[:, None] + runs.reshape(-1), np.int64)


def suits(g: Array, itemsize: int) -> bool:
    return bool(g[C] // g[GROUPS] * g[KH] * g[KW] * g[STEP] * itemsize <= LARGEST and min(g[OH], g[OW]) > 0)


@register_jitable
def ends(g: Any, px: int) -> Any:
    """The columns of a plane of phase px that are the image's."""
    first = max(0, (g[PW] - px + g[SW] - 1) // g[SW])
    return first, max(first, min(g[ROW], (g[W] + g[PW] - px + g[SW] - 1) // g[SW]))


@register_jitable
def spread(x: Any, at: int, g: Any, planes: Any, begin: int) -> None:
    """One channel of an image to its planes, which begin there; what is no pixel's is left."""
    sh, sw, h, w, row = g[SH], g[SW], g[H], g[W], g[ROW]
    for py in range(sh):
        for px in range(sw):
            start, stop = ends(g, px)
            to, first = begin + (py * sw + px) * g[PLANE], at + px - g[PW] + (py - g[PH]) * w
            for y in range(py - g[PH], min(h, g[TALL] * sh + py - g[PH]), sh):
                if y >= 0:
                    if sw == 1:
                        for q in range(start, stop):
                            planes[u(to + q)] = x[u(first + q)]
                    elif sw == 2:
                        every_second(x, first + 2 * start, planes, to + start, stop - start)
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
            for y in range(py - g[PH], min(h, g[TALL] * sh + py - g[PH]), sh):
                if y >= 0:
                    for q in range(start, stop):
                        x[u(to + q * sw)] += planes[u(first + q)]
                first += row
                to += sh * w


@register_jitable
def spread_all(x: Any, image: int, group: int, g: Any, planes: Any) -> None:
    channels, size = g[C] // g[GROUPS], g[H] * g[W]
    for c in range(channels):
        at = (image * g[C] + group * channels + c) * size
        bring(x, at + g[C] * size, size * x.itemsize // 64)          # of the next image
        spread(x, at, g, planes, c * g[SH] * g[SW] * g[PLANE])


@register_jitable
def rows_of(y: Any, image: int, group: int, g: Any, rows: Any) -> None:
    """The results of a group; what is none's is left."""
    outputs, width, size = g[O] // g[GROUPS], g[OW], g[OH] * g[OW]
    for o in range(outputs):
        at = (image * g[O] + group * outputs + o) * size
        bring(y, at + g[O] * size, size * y.itemsize // 64)
        for r in range(g[OH]):
            to, first = o * g[STEP] + r * g[ROW], at + r * width
            for i in range(width):
                rows[u(to + i)] = y[u(first + i)]


@register_jitable
def multiply(left: Any, at: int, terms: int, right: Any, starts: Any, made: Any, rows: int, step: int) -> None:
    """made (rows, step) = left (rows, terms) right (terms, step)."""
    columns = 3 * WIDE // left.itemsize
    for t in range(0, step, columns):
        for r in range(0, rows, ROWS):
            tile(left, at + r * terms, terms, right, t, starts, made, r * step + t, step, terms)


@loop("X X X? X! X! X! L:19 L i i")
def _convolve(x: Any, left: Any, bias: Any, y: Any, planes: Any, rows: Any, g: Any, starts: Any, images: int, whole: int) -> None:
    outputs, terms, width = g[O] // g[GROUPS], g[C] // g[GROUPS] * g[KH] * g[KW], g[OW]
    for image in range(images):
        for group in range(g[GROUPS]):
            spread_all(x, image, group, g, planes)
            multiply(left, group * whole * terms, terms, planes, starts, rows, whole, g[STEP])
            for o in range(outputs):
                channel = group * outputs + o
                shift = bias[channel] if bias.size else y.dtype.type(0)
                for r in range(g[OH]):
                    first, to = o * g[STEP] + r * g[ROW], ((image * g[O] + channel) * g[OH] + r) * width
                    for i in range(width):
                        y[u(to + i)] = rows[u(first + i)] + shift


@loop("X X X? X! X! X! X! L:19 L L i i")
def _adjoint(y: Any, left: Any, bias: Any, x: Any, planes: Any, columns: Any, rows: Any, g: Any, starts: Any, begins: Any,
             images: int, whole: int) -> None:
    outputs, channels, count, area = g[O] // g[GROUPS], g[C] // g[GROUPS], g[OH] * g[ROW], g[KH] * g[KW]
    for image in range(images):
        for group in range(g[GROUPS]):
            rows_of(y, image, group, g, rows)
            multiply(left, group * whole * outputs, outputs, rows, begins, columns, whole, g[STEP])
            for c in range(channels):
                planes[:] = 0
                for k in range(area):
                    to, first = starts[k], (c * area + k) * g[STEP]
                    for t in range(count):
                        planes[u(to + t)] += columns[u(first + t)]
                channel = group * channels + c
                gathered(planes, (image * g[C] + channel) * g[H] * g[W], g, bias[channel] if bias.size else x.dtype.type(0), x)


@loop("X X X! X! X! L:19 L i i i")
def _gradient(x: Any, y: Any, total: Any, planes: Any, rows: Any, g: Any, starts: Any, images: int, left: int,
              right: int) -> None:
    count = (g[OH] * g[ROW] + MARGIN - 1) // MARGIN * MARGIN
    for image in range(images):
        for group in range(g[GROUPS]):
            spread_all(x, image, group, g, planes)
            rows_of(y, image, group, g, rows)
            for k in range(0, right, SIDE):
                for o in range(0, left, SIDE):
                    dots(rows, o * g[STEP], g[STEP], planes, starts, k, total, (group * left + o) * right + k, right, count)


def _planes(g: Array, channels: int, dtype: Any) -> Array:
    return np.zeros(channels * g[SH] * g[SW] * g[PLANE], dtype)


def convolve(x: Array, weight: Array, bias: Array | None, groups: int, g: Array, y: Array) -> None:
    outputs, terms = len(weight) // groups, weight[0].size
    whole = up(outputs, ROWS)
    left = np.zeros((groups, whole, terms), x.dtype)
    left[:, :outputs] = weight.reshape(groups, outputs, terms)
    rows = np.empty(whole * g[STEP], x.dtype)
    _convolve(x, left, bias, y, _planes(g, weight.shape[1], x.dtype), rows, g, places(g), len(x), whole)


def adjoint(y: Array, weight: Array, bias: Array | None, groups: int, g: Array, x: Array) -> None:
    outputs, terms = len(weight) // groups, weight[0].size
    whole = up(terms, ROWS)
    left = np.zeros((groups, whole, outputs), y.dtype)
    left[:, :terms] = weight.reshape(groups, outputs, terms).swapaxes(1, 2)
    columns, rows = np.empty(whole * g[STEP], y.dtype), np.zeros(outputs * g[STEP], y.dtype)
    _adjoint(y, left, bias, x, _planes(g, 1, y.dtype), columns, rows, g, places(g), g[STEP] * np.arange(outputs), len(y), whole)


def kernel_gradient(x: Array, y: Array, window: Window, groups: int, g: Array) -> Array:
    outputs, channels = y.shape[1] // groups, x.shape[1] // groups
    terms = channels * window.kernel[0] * window.kernel[1]
    left, right = up(outputs, SIDE), up(terms, SIDE)
    total, rows = np.zeros((groups, left, right), x.dtype), np.zeros(left * g[STEP], x.dtype)
    starts = np.zeros(right, np.int64)                       # those of no term get sums that nobody takes
    starts[:terms] = places(g).reshape(-1)
    _gradient(x, y, total, _planes(g, channels, x.dtype), rows, g, starts, len(x), left, right)
    return np.ascontiguousarray(total[:, :outputs, :terms]).reshape(y.shape[1], channels, *window.kernel)
