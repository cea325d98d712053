"""Convolutions on a device; see kernels/convolution.py and native/device/convolution.cu.

NVIDIA's cuDNN computes them where it and its frontend are installed (`backend.cudnn_convolution`), and our kernels anywhere, and
in float64. What is installed and the shapes decide, so that all ranks compute alike.
Gradients of kernels are in the format that x is computed in: float32 where x has 16 bits. `operands` "tf32" lets cuDNN cut
numbers of float32 to 10 bits of fraction; our kernels never do.
"""

from __future__ import annotations

from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

from mpitrain.backend.namespace import Array, array_module
from mpitrain.kernels.convolution import Pair, Shape, Window, _adjoint, _convolve, _kernel_gradient
from mpitrain.kernels.device import device
from mpitrain.kernels.device.code import DeviceFunction, Source, computed, contiguous, over
from mpitrain.kernels.device.sums import sum_partials
from mpitrain.kernels.library import misfit

SOURCE, THREADS = Source("convolution"), 256                          # convolution.cu's THREADS
SIZES = "in ic ih iw ik il i i i i i i ia ib io ig"
LINEAR, ADJOINT = f"X:nchw X:ockl/g X?:o X!:noab {SIZES}", f"X:noab X:ockl/g X?:c X!:nchw {SIZES}"
GRADIENT = f"X:nchw X:noab S!:pockl/g {SIZES} ip"
_forward = {rows: SOURCE.function(f"forward_{rows}", LINEAR) for rows in (16, 64)}
_backward = {rows: SOURCE.function(f"adjoint_{rows}", ADJOINT) for rows in (16, 64)}
_gradient = {rows: SOURCE.function(f"gradient_{rows}", GRADIENT) for rows in (16, 64)}
_depthwise, _depthwise_adjoint = SOURCE.function("depthwise", LINEAR), SOURCE.function("depthwise_adjoint", ADJOINT)
_depthwise_gradient = SOURCE.function("depthwise_gradient", GRADIENT)
_plane_sums = SOURCE.function("plane_sums", "X:ncl S!:pc in ic il ip")
TILE, NARROW = 4096, 32                           # numbers of a tile; up to so many rows it is one of 16 x 256, else of 64 x 64
BLOCKS = 512                                      # that a GPU of 132 multiprocessors is filled with
MOST, MOST_Y = 1 << 31, 65535                     # of offsets in 32 bits; of a grid's second and third size


@lru_cache(1024)
def _geometry(x: Shape, weight: Shape, bias: Shape | None, y: Shape, window: Window, groups: int, biased: int) -> tuple[int, ...]:
    """The sizes that kernels take. ShapeError where the arrays do not fit each other, or are too large for 32 bits."""
    numbers, outputs = (*window.kernel, *window.stride, *window.padding, *window.dilation), weight[0]
    if (len(x) != 4 or groups < 1 or x[1] % groups or outputs % groups or weight != (outputs, x[1] // groups, *window.kernel)
            or bias not in (None, ((outputs, x[1])[biased],)) or min(*window.kernel, *window.stride, *window.dilation) < 1
            or min(window.padding) < 0 or min(window.outputs(*x[2:])) < 1 or y != (x[0], outputs, *window.outputs(*x[2:]))):
        misfit(f"convolution with {window} and {groups} groups", x, weight, bias, y)
    reach = max(s + 2 * p for s, p in zip(x[2:], window.padding)) * x[3]
    most = max(x[1] * x[2] * x[3], outputs * y[2] * y[3]) + reach                      # of an image
    if max(x[0] * max(x[1], outputs, x[2] * x[3], y[2] * y[3]), most) >= MOST // 2:
        misfit(f"convolution of fewer than {MOST // 2} pixels and planes, and numbers in an image", x, weight, y)
    return *x, *numbers, *y[2:], outputs, groups


@cache
def _installed(module: str) -> Any:
    if module != "cupy" or find_spec("cudnn") is None:
        return None
    from mpitrain.backend.cudnn_convolution import convolutions
    return convolutions()


def _library(x: Array) -> Any:
    """cuDNN's convolutions where they serve x, else None."""
    found = _installed(array_module(x).__name__)
    return found if found is not None and found.takes(x.dtype) and len(x) else None


def _biased(made: Any, bias: Array | None) -> Any:
    if bias is not None:
        made += bias[:, None, None]
    return made


def _shape(bias: Array | None) -> Shape | None:
    return None if bias is None else bias.shape


def _is_depthwise(c: int, o: int, groups: int) -> bool:
    """One channel of input for each output, and few outputs of a channel: there is no product of matrices."""
    return c == groups > 1 and o <= 4 * groups


def _tiled(run: dict[int, DeviceFunction], rows: int, columns: int, groups: int) -> tuple[DeviceFunction, tuple[int, int]]:
    """The kernel for products of so many rows in each of the groups, and the first two sizes of its grid."""
    high = 16 if rows <= NARROW else 64
    bands = groups * -(-rows // high)
    if bands > MOST_Y:
        misfit(f"convolution of at most {MOST_Y} groups", groups)
    return run[high], (-(-columns // (TILE // high)), bands)


@device("convolve")
def convolve(x: Array, weight: Array, bias: Array | None, window: Window, groups: int,
             operands: str = "") -> Array:
    if 0 in weight.shape or 0 in x.shape[1:]:
        return _convolve(x, weight, bias, window, groups)
    shape = (len(x), len(weight), *window.outputs(*x.shape[2:]))
    sizes, library = _geometry(x.shape, weight.shape, _shape(bias), shape, window, groups, 0), _library(x)
    if library is not None and (made := library.convolve(x, weight, shape, window, operands)) is not None:
        return _biased(made, bias)
    y = array_module(x).empty(shape, x.dtype)
    given = contiguous(x), contiguous(weight), contiguous(bias), y
    if _is_depthwise(x.shape[1], len(weight), groups):
        _depthwise(over(y.size), THREADS, *given, *sizes)
    elif len(x):
        run, grid = _tiled(_forward, len(weight) // groups, len(x) * y.shape[2] * y.shape[3], groups)
        run(grid, THREADS, *given, *sizes)
    return y


@device("convolve_adjoint")
def convolve_adjoint(y: Array, weight: Array, bias: Array | None, window: Window, groups: int, size: Pair,
                     operands: str = "") -> Array:
    if 0 in weight.shape or 0 in y.shape[1:] or 0 in size:
        return _adjoint(y, weight, bias, window, groups, size)
    shape = (len(y), weight.shape[1] * groups, *size)
    sizes, library = _geometry(shape, weight.shape, _shape(bias), y.shape, window, groups, 1), _library(y)
    if library is not None and (made := library.adjoint(y, weight, shape, window, operands)) is not None:
        return _biased(made, bias)
    x = array_module(y).empty(shape, y.dtype)
    given, (sh, sw) = (contiguous(y), contiguous(weight), contiguous(bias), x), window.stride
    if _is_depthwise(x.shape[1], len(weight), groups):
        _depthwise_adjoint(over(x.size), THREADS, *given, *sizes)
    elif len(y):
        if sh * sw > MOST_Y:
            misfit(f"the adjoint of a convolution whose strides are {sh} x {sw}", x, y)
        run, grid = _tiled(_backward, weight.shape[1], len(x) * -(-size[0] // sh) * -(-size[1] // sw), groups)
        run((*grid, sh * sw), THREADS, *given, *sizes)
    return x


@device("kernel_gradient")
def kernel_gradient(x: Array, y: Array, window: Window, groups: int, out: Array | None = None,
                    bias_of: str = "", operands: str = "") -> tuple[Array, Array | None]:
    if 0 in x.shape or 0 in y.shape:
        weight, bias = _kernel_gradient(x, y, window, groups, out, bias_of)
        return weight, None if bias is None else bias.astype(weight.dtype, copy=False)
    shape, xp = (y.shape[1], x.shape[1] // groups, *window.kernel), array_module(x)
    sizes, library = _geometry(x.shape, shape, None, y.shape, window, groups, 0), _library(x)
    if library is not None and (made := library.gradient(x, y, shape, window, operands)) is not None:
        if out is not None:
            out[...] = made
        return made if out is None else out, _channel_sums(contiguous(x if bias_of == "x" else y)) if bias_of else None
    x, y = contiguous(x), contiguous(y)
    if out is None:
        out = xp.empty(shape, computed(x.dtype))
    run, grid, parts = _gradient_plan(x.shape, y.shape, window, groups)
    direct = parts == 1 and out.flags.c_contiguous and out.dtype == computed(x.dtype)
    partial = out if direct else xp.empty((parts, *shape), computed(x.dtype))
    run(grid, THREADS, x, y, partial, *sizes, parts)
    if not direct:
        sum_partials(partial.reshape(parts, -1), out)
    return out, _channel_sums(x if bias_of == "x" else y) if bias_of else None


@lru_cache(1024)
def _gradient_plan(x: Shape, y: Shape, window: Window, groups: int) -> tuple[DeviceFunction, tuple[int, ...], int]:
    """(kernel, grid, number of parts that the images are added up in)."""
    taps, (n, outputs, oh, ow) = window.kernel[0] * window.kernel[1], y
    if _is_depthwise(x[1], outputs, groups):
        parts = max(1, min(n, -(-2 * BLOCKS // outputs), MOST_Y))
        return _depthwise_gradient, (outputs, parts, -(-taps // 9)), parts
    run, grid = _tiled(_gradient, outputs // groups, x[1] // groups * taps, groups)
    parts = max(1, min(-(-BLOCKS // (grid[0] * grid[1])), -(-n * oh * ow // 256)))
    return run, (*grid, parts), parts


def _channel_sums(x: Any) -> Array:
    """(C,) of images (N, C, H, W), in the format that they are computed in."""
    (n, c), xp = x.shape[:2], array_module(x)
    parts = max(1, min(n, -(-BLOCKS // c)))
    partial, sums = xp.empty((parts, c), computed(x.dtype)), xp.empty(c, computed(x.dtype))
    _plane_sums((c, parts), THREADS, x, partial, n, c, x.shape[2] * x.shape[3], parts)
    sum_partials(partial, sums)
    return sums
