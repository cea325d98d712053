"""The three products of convolutions, on images (N, C, H, W): native loops, beside matrix products over unfolded windows.

With x an image, y (N, O, OH, OW) its convolution and w (O, C/groups, kh, kw) the kernel:

    convolve:          y = w * windows(x) + bias
    convolve_adjoint:  x = the adjoint of that map applied to y, plus a bias of its own
    kernel_gradient:   w = y * windows(x), and the gradient of a bias, the sum of y or of x in each channel
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.kernels.kernel import Function, Kernel
from mpitrain.kernels.library import CFunction, Scratch, host, misfit, packed
from mpitrain.kernels.product import products
from mpitrain.kernels.sums import sum_rows

Pair = tuple[int, int]
Shape: TypeAlias = tuple[int, ...]

MEMORY = "M!:b ib L!:1"                          # memory, its size, and a place for the size that C wants
FORWARD, GRADIENT = "X X X? X! L:16 " + MEMORY, "X X X! X?! i L:16 " + MEMORY
MOST = 1 << 31                                    # of strides and the like
MOST_KEPT = 16 << 20                              # bytes of working memory kept between calls; the rest is had anew by each


class Window(NamedTuple):
    """The geometry of a convolution: kernel size, stride, padding and dilation in y and x."""

    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)

    def outputs(self, height: int, width: int) -> Pair:
        """The number of windows in an image, in y and x; zero or less where the image is too small."""
        oh, ow = ((size + 2 * p - d * (k - 1) - 1) // s + 1
                  for size, k, s, p, d in zip((height, width), self.kernel, self.stride, self.padding, self.dilation))
        return oh, ow


def _parts(padded: Array, window: Window, outputs: Pair) -> Iterator[tuple[int, Array]]:
    """For each position in the window: its number, and the pixels of `padded` there, one for each output."""
    (kh, kw), (sh, sw), _, (dh, dw) = window
    oh, ow = outputs
    for ky in range(kh):
        for kx in range(kw):
            yield ky * kw + kx, padded[:, :, ky * dh:ky * dh + sh * (oh - 1) + 1:sh, kx * dw:kx * dw + sw * (ow - 1) + 1:sw]


def unfold(x: Array, window: Window) -> Array:
    """im2col: (N, C*kh*kw, OH*OW) from (N, C, H, W)."""
    xp = array_module(x)
    n, c, h, w = x.shape
    (ph, pw), area = window.padding, window.kernel[0] * window.kernel[1]
    oh, ow = window.outputs(h, w)
    padded = xp.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    columns = xp.empty((n, c, area, oh, ow), x.dtype)
    for i, pixels in _parts(padded, window, (oh, ow)):
        columns[:, :, i] = pixels
    return columns.reshape(n, c * area, oh * ow)


def fold(columns: Array, window: Window, size: Pair) -> Array:
    """The adjoint of `unfold`, col2im: (N, C, *size), where overlapping windows are added."""
    xp = array_module(columns)
    (ph, pw), area = window.padding, window.kernel[0] * window.kernel[1]
    outputs = window.outputs(*size)
    split = columns.reshape(len(columns), columns.shape[1] // area, area, *outputs)
    padded = xp.zeros((*split.shape[:2], size[0] + 2 * ph, size[1] + 2 * pw), columns.dtype)
    for i, pixels in _parts(padded, window, outputs):
        pixels += split[:, :, i]
    return padded[:, :, ph:ph + size[0], pw:pw + size[1]]


def _chunks(x: Array, window: Window, outputs: Pair) -> Iterator[slice]:
    """Images of x to unfold together: their columns stay in a core's cache, or fill a GPU."""
    columns_bytes = x.shape[1] * window.kernel[0] * window.kernel[1] * outputs[0] * outputs[1] * x.itemsize
    step = max(1, (1 << 19 if array_module(x) is np else 1 << 28) // max(1, columns_bytes))
    for start in range(0, len(x), step):
        yield slice(start, start + step)


def _convolve(x: Array, weight: Array, bias: Array | None, window: Window, groups: int) -> Array:
    xp = array_module(x)
    outputs = len(weight)
    oh, ow = window.outputs(*x.shape[2:])
    matrix = weight.reshape(groups, outputs // groups, -1)
    y = xp.empty((len(x), outputs, oh, ow), x.dtype)
    for part in _chunks(x, window, (oh, ow)):
        columns = unfold(x[part], window)
        y[part] = products(matrix, columns.reshape(len(columns), groups, matrix.shape[2], oh * ow)).reshape(y[part].shape)
    if bias is not None:
        y += bias[:, None, None]
    return y


def _adjoint(y: Array, weight: Array, bias: Array | None, window: Window, groups: int, size: Pair) -> Array:
    xp = array_module(y)
    n, outputs, oh, ow = y.shape
    matrix = weight.reshape(groups, outputs // groups, -1).swapaxes(1, 2)
    x = xp.empty((n, weight.shape[1] * groups, *size), y.dtype)
    for part in _chunks(x, window, (oh, ow)):
        columns = products(matrix, y[part].reshape(-1, groups, outputs // groups, oh * ow))
        x[part] = fold(columns.reshape(len(columns), -1, oh * ow), window, size)
    if bias is not None:
        x += bias[:, None, None]
    return x


def _kernel_gradient(x: Array, y: Array, window: Window, groups: int, out: Array | None = None,
                     bias_of: str = "") -> tuple[Array, Array | None]:
    bias = channel_sums(x if bias_of == "x" else y) if bias_of else None
    xp = array_module(x)
    _, outputs, oh, ow = y.shape
    shape = (outputs, x.shape[1] // groups, *window.kernel)
    total = xp.zeros((groups, outputs // groups, shape[1] * shape[2] * shape[3]), x.dtype)
    for part in _chunks(x, window, (oh, ow)):
        columns = unfold(x[part], window)
        right = columns.reshape(len(columns), groups, -1, oh * ow)
        left = y[part].reshape(len(columns), groups, outputs // groups, oh * ow)
        total += products(left, right.swapaxes(2, 3)).sum(axis=0)
    if out is None:
        return total.reshape(shape), bias
    out[...] = total.reshape(shape)
    return out, bias


def channel_sums(x: Array) -> Array:
    """(C,) of images (N, C, H, W)."""
    return sum_rows(x.sum(axis=(2, 3)))


@lru_cache(1024)
def _geometry(function: Any, product: str, x_shape: Shape, y_shape: Shape, weight_shape: Shape, bias_shape: Shape | None,
              window: Window, groups: int, dtype: Any) -> tuple[Array, Array]:
    """The C code's struct Geometry, and where it writes how many bytes of working memory it wants: the same at each call.

    Raises ShapeError where the arrays do not fit each other: C takes their sizes from these numbers."""
    outputs = weight_shape[0]
    numbers = tuple(window.kernel + window.stride + window.padding + window.dilation)
    if (len(x_shape) != 4 or len(numbers) != 8 or not all(isinstance(n, int) and n < MOST for n in (*numbers, groups))
            or min(*window.kernel, *window.stride, *window.dilation, groups) < 1 or min(window.padding) < 0
            or weight_shape != (outputs, x_shape[1] // groups, *window.kernel) or x_shape[1] % groups or outputs % groups
            or bias_shape not in (None, (outputs if product == "forward" else x_shape[1],))
            or min(window.outputs(*x_shape[2:])) < 1
            or y_shape != (x_shape[0], outputs, *window.outputs(*x_shape[2:]))):
        misfit(f"convolution with {window} and {groups} groups", x_shape, weight_shape, bias_shape, y_shape)
    return np.array((*x_shape, *numbers, *window.outputs(*x_shape[2:]), outputs, groups), np.int64), np.zeros(1, np.int64)


_scratch = Scratch()


def _call(function: Callable[..., None], arrays: tuple[Any, ...], geometry: Array, wanted: Array) -> None:
    memory = _scratch.room(min(int(wanted[0]), MOST_KEPT))
    function(*arrays, geometry, memory, len(memory), wanted)


def run_forward(function: CFunction, x: Array, weight: Array, bias: Array | None, window: Window, groups: int) -> Array:
    if 0 in weight.shape or 0 in x.shape:
        return _convolve(x, weight, bias, window, groups)
    y = np.empty((len(x), len(weight), *window.outputs(*x.shape[2:])), x.dtype)
    _call(function, (packed(x), packed(weight), packed(bias), y), *_geometry(
        function, "forward", x.shape, y.shape, weight.shape, None if bias is None else bias.shape, window, groups, x.dtype))
    return y


def run_adjoint(function: CFunction, y: Array, weight: Array, bias: Array | None, window: Window, groups: int,
                size: Pair) -> Array:
    if 0 in weight.shape or 0 in y.shape:
        return _adjoint(y, weight, bias, window, groups, size)
    x = np.empty((len(y), weight.shape[1] * groups, *size), y.dtype)
    _call(function, (packed(y), packed(weight), packed(bias), x),
          *_geometry(function, "adjoint", x.shape, y.shape, weight.shape, None if bias is None else bias.shape, window, groups,
                     x.dtype))
    return x


def run_gradient(function: CFunction, x: Array, y: Array, window: Window, groups: int, out: Array | None = None,
                 bias_of: str = "") -> tuple[Array, Array | None]:
    outputs = y.shape[1]
    if 0 in x.shape or 0 in y.shape or (out is not None and not out.flags.c_contiguous):
        return _kernel_gradient(x, y, window, groups, out, bias_of)
    weight = np.empty((outputs, x.shape[1] // groups, *window.kernel), x.dtype) if out is None else out
    bias = np.empty(x.shape[1] if bias_of == "x" else outputs, x.dtype) if bias_of else None
    _call(function, (packed(x), packed(y), weight, bias, bias_of == "x"),
          *_geometry(function, "gradient", x.shape, y.shape, weight.shape, None, window, groups, x.dtype))
    return weight, bias


def _kernel(name: str, reference: Function, function: str, signature: str, body: Callable[..., Any]) -> Kernel:
    version = host("convolution", function, signature, answers=True)(body)
    return Kernel(name, reference, version, version.composed("convolution"))


convolve = _kernel("convolve", _convolve, "forward", FORWARD, run_forward)
"""y (N, O, OH, OW) from (x, weight, bias or None, window, groups)."""

convolve_adjoint = _kernel("convolve_adjoint", _adjoint, "adjoint", FORWARD, run_adjoint)
"""x (N, C, *size) from (y, weight, bias or None, window, groups, size)."""

kernel_gradient = _kernel("kernel_gradient", _kernel_gradient, "kernel_gradient", GRADIENT, run_gradient)
"""weight (O, C/groups, kh, kw) from (x, y, window, groups, out=None, bias_of=""), in `out` where given; and what is added to each
channel of "x" or "y", `bias_of`: its gradient, else None."""


def prepared(shape: Shape, weight: Array, bias: Array | None, window: Window, groups: int) -> Callable[[Array], Array] | None:
    """`convolve` of images of one shape, dtype and kernel, as a function of the images; None where nothing is compiled for it."""
    version = convolve.host()
    if version is None or 0 in weight.shape or 0 in shape:
        return None
    function, weight, bias = version.args[0], packed(weight), packed(bias)            # type: ignore[attr-defined]
    made = (shape[0], len(weight), *window.outputs(*shape[2:]))
    geometry, wanted = _geometry(function, "forward", shape, made, weight.shape, None if bias is None else bias.shape, window,
                                 groups, weight.dtype)

    def run(x: Array) -> Array:
        if x.shape != shape:
            misfit("a prepared convolution", x, weight)
        y = np.empty(made, x.dtype)
        _call(function, (packed(x), weight, bias, y), geometry, wanted)
        return y
    return run
