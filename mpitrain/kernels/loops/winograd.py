"""Convolutions of 3 x 3 with stride 1 by Winograd's F(2 x 2, 3 x 3) (Lavin and Gray, 2016): 16 matrix products of BLAS instead of
9 times the arithmetic, between transforms that are loops of Numba.

    y = A' [(G w G') * (B' d B)] A      d a tile of 4 x 4 pixels, y of 2 x 2, * of elements, summed over channels

Tiles of `tall` rows of `wide + 1` are numbered as they lie, with one too many at the end of each row: so the pixels of a place in
the tile lie STEP numbers after each other's in all of them, and a transform is one loop without rows. Rows of an image are
kept in two planes, even and odd ones, for the same reason. The number i of 16 in a tile of channel c is at
``values[c, i, tile]``, ROOM numbers apart: a distance that LLVM knows, without which it makes no vector code of so many results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba.extending import register_jitable

from mpitrain.backend.namespace import Array
from mpitrain.kernels.library import Scratch
from mpitrain.kernels.loops.mathematics import u
from mpitrain.kernels.loops.runs import bring
from mpitrain.kernels.loops.tile import ROWS, SIDE, WIDE, dots, tile
from mpitrain.kernels.loops.typed import loop

ROOM = 144                                        # Tiles at a time, whole columns of `tile`: half of an image of 32 x 32.
STEP = 16 * ROOM + 16                             # Numbers between channels, which else met in few lines of the cache.
COLUMNS = 3 * WIDE                                # Bytes of a row of `tile`.
HALF = 4 * ROOM                                   # Numbers of a plane, where rows of an image have ROOM pixels at most.
G = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
BOTH = np.kron(G, G)                              # (16, 9): G w G' of a flat w.


class Tiles(NamedTuple):
    """Results of (height, width) in tiles of 2 x 2, a few images or a few rows of tiles at a time."""

    height: int
    width: int

    @property
    def tall(self) -> int:
        return (self.height + 1) // 2

    @property
    def row(self) -> int:
        """Tiles of a row, and one."""
        return (self.width + 1) // 2 + 1

    def parts(self, images: int) -> Array:
        """(first image, number, first row of tiles, number of rows) of each part."""
        rows = min(self.tall, ROOM // self.row)
        together = ROOM // (rows * self.row) if rows == self.tall else 1
        return np.array([(image, min(together, images - image), row, min(rows, self.tall - row))
                         for image in range(0, images, together) for row in range(0, self.tall, rows)], np.int64)


def suits(x: Array, weight: Array, window: Any, groups: int) -> bool:
    """Whether a convolution is done here: a rule on shapes alone, that of native/convolution_choice.h."""
    return (groups == 1 and window.kernel == (3, 3) and window.stride == window.dilation == (1, 1) and min(weight.shape[:2]) >= 16
            and max(window.padding) <= 2 and x.shape[3] + 8 <= 2 * ROOM)


@register_jitable
def spread(x: Any, plane: int, height: int, width: int, top: int, left: int, rows: int, row: int, planes: Any) -> None:
    """`rows` rows of an image from row `top` on go to two planes of rows 2 * row wide, zeros where they are none of its."""
    size = (rows // 2 + 1) * 2 * row
    for i in range(size):
        planes[i] = 0
        planes[u(HALF + i)] = 0
    for r in range(rows):
        y = top + r
        if 0 <= y < height:
            to, first = r % 2 * HALF + r // 2 * 2 * row + left, plane + y * width
            for i in range(width):
                planes[u(to + i)] = x[u(first + i)]


@register_jitable
def _tiles(x: Any, values: Any, planes: Any, image: int, images: int, first: int, rows: int, row: int, channels: int,
           height: int, width: int, above: int, left: int) -> None:
    """B' d B of each tile."""
    n = rows * row
    for b in range(images):
        for c in range(channels):
            spread(x, ((image + b) * channels + c) * height * width, height, width, 2 * first - above, left, 2 * rows + 2, row,
                   planes)
            to = c * STEP + b * n
            for t in range(n):
                e0, e1, e2, e3 = planes[u(2 * t)], planes[u(2 * t + 1)], planes[u(2 * t + 2)], planes[u(2 * t + 3)]
                s = 2 * t + HALF
                f0, f1, f2, f3 = planes[u(s)], planes[u(s + 1)], planes[u(s + 2)], planes[u(s + 3)]
                s = 2 * t + 2 * row
                g0, g1, g2, g3 = planes[u(s)], planes[u(s + 1)], planes[u(s + 2)], planes[u(s + 3)]
                s = 2 * t + 2 * row + HALF
                h0, h1, h2, h3 = planes[u(s)], planes[u(s + 1)], planes[u(s + 2)], planes[u(s + 3)]
                p, q, v, w = e0 - g0, e1 - g1, e2 - g2, e3 - g3
                at = to + t
                values[u(at)], values[u(at + ROOM)] = p - v, q + v
                values[u(at + 2 * ROOM)], values[u(at + 3 * ROOM)] = v - q, q - w
                p, q, v, w = f0 + g0, f1 + g1, f2 + g2, f3 + g3
                values[u(at + 4 * ROOM)], values[u(at + 5 * ROOM)] = p - v, q + v
                values[u(at + 6 * ROOM)], values[u(at + 7 * ROOM)] = v - q, q - w
                p, q, v, w = g0 - f0, g1 - f1, g2 - f2, g3 - f3
                values[u(at + 8 * ROOM)], values[u(at + 9 * ROOM)] = p - v, q + v
                values[u(at + 10 * ROOM)], values[u(at + 11 * ROOM)] = v - q, q - w
                p, q, v, w = f0 - h0, f1 - h1, f2 - h2, f3 - h3
                values[u(at + 12 * ROOM)], values[u(at + 13 * ROOM)] = p - v, q + v
                values[u(at + 14 * ROOM)], values[u(at + 15 * ROOM)] = v - q, q - w


@register_jitable
def _results(values: Any, bias: Any, y: Any, spoilt: Any, planes: Any, image: int, images: int, first: int, rows: int, row: int,
             channels: int, height: int, width: int) -> None:
    """A' m A of each tile, and the bias, to rows of y; images that get a number that is not finite are marked."""
    n = rows * row
    for b in range(images):
        for c in range(channels):
            start = c * STEP + b * n
            for t in range(n):
                at = start + t
                m0, m1, m2, m3 = values[u(at)], values[u(at + ROOM)], values[u(at + 2 * ROOM)], values[u(at + 3 * ROOM)]
                at += 4 * ROOM
                n0, n1, n2, n3 = values[u(at)], values[u(at + ROOM)], values[u(at + 2 * ROOM)], values[u(at + 3 * ROOM)]
                at += 4 * ROOM
                o0, o1, o2, o3 = values[u(at)], values[u(at + ROOM)], values[u(at + 2 * ROOM)], values[u(at + 3 * ROOM)]
                at += 4 * ROOM
                p0, p1, p2, p3 = values[u(at)], values[u(at + ROOM)], values[u(at + 2 * ROOM)], values[u(at + 3 * ROOM)]
                a0, a1, a2, a3 = m0 + n0 + o0, m1 + n1 + o1, m2 + n2 + o2, m3 + n3 + o3
                b0, b1, b2, b3 = n0 - o0 - p0, n1 - o1 - p1, n2 - o2 - p2, n3 - o3 - p3
                planes[u(2 * t)], planes[u(2 * t + 1)] = a0 + a1 + a2, a1 - a2 - a3
                planes[u(2 * t + HALF)], planes[u(2 * t + 1 + HALF)] = b0 + b1 + b2, b1 - b2 - b3
            shift = bias[c] if bias.size else y.dtype.type(0)
            plane, bad = ((image + b) * channels + c) * height * width, 0
            for r in range(min(2 * rows, height - 2 * first)):
                start, to = r % 2 * HALF + r // 2 * 2 * row, plane + (2 * first + r) * width
                for i in range(width):
                    value = planes[u(start + i)] + shift
                    y[u(to + i)] = value
                    bad |= value - value != 0
            spoilt[image + b] |= bad


@register_jitable
def _slopes(y: Any, values: Any, planes: Any, image: int, images: int, first: int, rows: int, row: int, channels: int,
            height: int, width: int) -> None:
    """A g A' of each tile of a gradient: what the products of `_tiles` get."""
    n = rows * row
    for b in range(images):
        for c in range(channels):
            spread(y, ((image + b) * channels + c) * height * width, height, width, 2 * first, 0, 2 * rows, row, planes)
            to = c * STEP + b * n
            for t in range(n):
                e, f = planes[u(2 * t)], planes[u(2 * t + 1)]
                g, h = planes[u(2 * t + HALF)], planes[u(2 * t + 1 + HALF)]
                p, q, v, w = e + g, f + h, e - g, f - h
                at = to + t
                values[u(at)], values[u(at + ROOM)], values[u(at + 2 * ROOM)], values[u(at + 3 * ROOM)] = e, e + f, e - f, -f
                at += 4 * ROOM
                values[u(at)], values[u(at + ROOM)], values[u(at + 2 * ROOM)], values[u(at + 3 * ROOM)] = p, p + q, p - q, -q
                at += 4 * ROOM
                values[u(at)], values[u(at + ROOM)], values[u(at + 2 * ROOM)], values[u(at + 3 * ROOM)] = v, v + w, v - w, -w
                at += 4 * ROOM
                values[u(at)], values[u(at + ROOM)], values[u(at + 2 * ROOM)], values[u(at + 3 * ROOM)] = -g, -g - h, h - g, h


@register_jitable
def following(image: int, images: int, first: int, rows: int, tall: int, size: int, itemsize: int, calls: int) -> Any:
    """Of the next images, of `size` numbers each, as much as of these is done in this part: where it begins, and how many lines
    of it are brought to the cache at each of so many calls. The CPU by itself looks no further than to the end of a page.
    """
    share = images * size * rows // tall
    return (image + images) * size + images * size * first // tall, (share * itemsize // 64 + calls) // calls


@register_jitable
def _products(left: Any, values: Any, places: Any, made: Any, outputs: int, channels: int, count: int, x: Any, x_next: int,
              x_lines: int) -> None:
    """made (outputs, 16, count) = left (16, outputs, channels) values (channels, 16, count)."""
    columns, line = COLUMNS // left.itemsize, 64 // left.itemsize
    for k in range(16):
        for t in range(0, count, columns):
            for o in range(0, outputs, ROWS):
                bring(x, x_next, x_lines)
                x_next += x_lines * line
                tile(left, (k * outputs + o) * channels, channels, values, k * ROOM + t, places, made, o * STEP + k * ROOM + t,
                     STEP, channels)


@register_jitable
def _sums(slopes: Any, values: Any, places: Any, total: Any, outputs: int, channels: int, count: int, x: Any, x_next: int,
          x_lines: int, y: Any, y_next: int, y_lines: int) -> None:
    """total (16, outputs, channels) += slopes (outputs, 16, count) values (channels, 16, count)'; whole vectors of them."""
    line = 64 // total.itemsize
    for k in range(16):
        for o in range(0, outputs, SIDE):
            for c in range(0, channels, SIDE):
                bring(x, x_next, x_lines)
                bring(y, y_next, y_lines)
                x_next += x_lines * line
                y_next += y_lines * line
                dots(slopes, o * STEP + k * ROOM, STEP, values, places, k * channels + c, total, (k * outputs + o) * channels + c,
                     channels, count)


@loop("X X X? X! B!:n in X! X! X! L:4p ip L:c ic i i i i i i i i i")
def _convolve(x: Any, left: Any, bias: Any, y: Any, spoilt: Any, n: int, values: Any, made: Any, planes: Any, parts: Any,
              count: int, places: Any, channels: int, whole: int, outputs: int, h: int, w: int, above: int, before: int, row: int,
              height: int, width: int) -> None:
    for p in range(0, 4 * count, 4):
        image, images, first, rows = parts[p], parts[p + 1], parts[p + 2], parts[p + 3]
        _tiles(x, values, planes, image, images, first, rows, row, channels, h, w, above, before)
        tiles, tall = images * rows * row, (height + 1) // 2
        calls = 16 * ((tiles * x.itemsize + COLUMNS - 1) // COLUMNS) * (whole // ROWS)
        x_next, x_lines = following(image, images, first, rows, tall, channels * h * w, x.itemsize, calls)
        _products(left, values, places, made, whole, channels, tiles, x, x_next, x_lines)
        _results(made, bias, y, spoilt, planes, image, images, first, rows, row, outputs, height, width)


@loop("X X X! X! X! X! L:4p ip L:16r i i ir i i i i i i i i")
def _gradient(x: Any, y: Any, total: Any, values: Any, slopes: Any, planes: Any, parts: Any, there: int, places: Any,
              channels: int, outputs: int, right: int, left: int, h: int, w: int, above: int, before: int, row: int, height: int,
              width: int) -> None:
    for p in range(0, 4 * there, 4):
        image, images, first, rows = parts[p], parts[p + 1], parts[p + 2], parts[p + 3]
        count = images * rows * row
        stop = (count + 15) // 16 * 16
        for c in range(right):
            for to in range(c * STEP, c * STEP + 16 * ROOM, ROOM):
                for i in range(to + count, to + stop):
                    values[u(i)] = 0
        for o in range(left):
            for to in range(o * STEP, o * STEP + 16 * ROOM, ROOM):
                for i in range(to + count, to + stop):
                    slopes[u(i)] = 0
        _tiles(x, values, planes, image, images, first, rows, row, channels, h, w, above, before)
        _slopes(y, slopes, planes, image, images, first, rows, row, outputs, height, width)
        tall, calls = (height + 1) // 2, 16 * (left // SIDE) * (right // SIDE)
        x_next, x_lines = following(image, images, first, rows, tall, channels * h * w, x.itemsize, calls)
        y_next, y_lines = following(image, images, first, rows, tall, outputs * height * width, x.itemsize, calls)
        _sums(slopes, values, places, total, left, right, stop, x, x_next, x_lines, y, y_next, y_lines)


_scratch = [Scratch(), Scratch(), Scratch()]


def _memory(which: int, shape: tuple[int, ...], dtype: Any) -> Array:
    """The same memory as the last time: fresh pages cost more than what is done in them."""
    count = int(np.prod(shape))
    return _scratch[which].room(count * dtype.itemsize)[:count * dtype.itemsize].view(dtype).reshape(shape)


def convolve(x: Array, weight: Array, bias: Array | None, padding: tuple[int, int], y: Array) -> Array:
    """y (N, O, OH, OW), from weight (O, C, 3, 3); which images have a number that is not finite (N,)."""
    outputs, channels = weight.shape[:2]
    n, _, h, w = x.shape
    tiles, whole = Tiles(h + 2 * padding[0] - 2, w + 2 * padding[1] - 2), up(outputs, ROWS)
    left = np.zeros((16, whole, channels), x.dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        left[:, :outputs] = (BOTH.astype(x.dtype) @ weight.reshape(-1, 9).T).reshape(16, outputs, channels)
    values, made = _memory(0, (channels, STEP), x.dtype), _memory(1, (whole, STEP), x.dtype)
    planes, parts = _memory(2, (2 * HALF,), x.dtype), tiles.parts(n)
    places, spoilt = STEP * np.arange(channels), np.zeros(n, bool)
    _convolve(x, left, bias, y, spoilt, n, values, made, planes, parts, len(parts), places, channels, whole, outputs, h, w,
              *padding, tiles.row, tiles.height, tiles.width)
    return spoilt


def up(n: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-n // step) * step


def adjoint(y: Array, weight: Array, bias: Array | None, padding: tuple[int, int], x: Array) -> Array:
    """x, from y and weight (O, C, 3, 3): a convolution with the kernel turned round."""
    turned = np.ascontiguousarray(weight.swapaxes(0, 1)[:, :, ::-1, ::-1])
    return convolve(y, turned, bias, (2 - padding[0], 2 - padding[1]), x)


def kernel_gradient(x: Array, y: Array, padding: tuple[int, int]) -> Array:
    """weight (O, C, 3, 3)."""
    n, channels, h, w = x.shape
    outputs, tiles = y.shape[1], Tiles(*y.shape[2:])
    left, right = up(outputs, SIDE), up(channels, SIDE)
    total = np.zeros((16, left, right), x.dtype)
    values, slopes = _memory(0, (right, STEP), x.dtype), _memory(1, (left, STEP), x.dtype)
    values[channels:], slopes[outputs:] = 0, 0
    planes, parts = _memory(2, (2 * HALF,), x.dtype), tiles.parts(n)
    places = ROOM * np.arange(16)[:, None] + STEP * np.arange(right)
    _gradient(x, y, total, values, slopes, planes, parts, len(parts), places, channels, outputs, right, left, h, w, *padding,
              tiles.row, tiles.height, tiles.width)
    made = BOTH.T.astype(x.dtype) @ total[:, :outputs, :channels].reshape(16, -1)
    return np.ascontiguousarray(made.T).reshape(outputs, channels, 3, 3)
