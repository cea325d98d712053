"""Products with weights in few bits on a device; see kernels/lowbit.py.

Of few rows, as of a text that is being written, the weights are read as they are kept; of many they are made floats first, whose
product is the library's.
"""

from __future__ import annotations

from mpitrain.backend.namespace import Array, array_module
from mpitrain.backend.runtime import Grid
from mpitrain.kernels.device import device
from mpitrain.kernels.device.code import Source, computed, contiguous
from mpitrain.kernels.device.product import multiply
from mpitrain.kernels.library import misfit
from mpitrain.kernels.lowbit import GROUP, unpacked

SOURCE, THREADS, ROWS = Source("lowbit"), 128, 4              # lowbit.cu's
FEW = 16                                                      # rows: the weights are read once for each ROWS of them
_int8 = SOURCE.function("lowbit_int8", "X:mk B:nk F:n X?:n X!:mn im in ik")
_int4 = SOURCE.function("lowbit_int4", "X:mk B:ng16 H:ng X?:n X!:mn im in ik ig")


def _grid(m: int, n: int) -> Grid:
    return -(-n // (THREADS // 32)), -(-m // ROWS)


@device("lowbit_int8")
def int8(x: Array, w: Array, scale: Array, bias: Array | None) -> Array:
    (m, k), n, xp = x.shape, len(w), array_module(x)
    if k != w.shape[1] or n != len(scale):
        misfit("int8", x, w, scale)
    bias = contiguous(bias, x.dtype)
    if m > FEW:
        wide = computed(x.dtype)
        return multiply(x, (w.astype(wide) * scale.astype(wide)[:, None]).astype(x.dtype, copy=False).T, bias)
    y = xp.empty((m, n), x.dtype)
    if y.size:
        _int8(_grid(m, n), THREADS, contiguous(x), contiguous(w), contiguous(scale, "float32"), bias, y, m, n, k)
    return y


@device("lowbit_int4")
def int4(x: Array, w: Array, scale: Array, bias: Array | None) -> Array:
    (m, k), (n, groups, _), xp = x.shape, w.shape, array_module(x)
    if w.shape[:2] != scale.shape or groups != -(-k // GROUP):
        misfit("int4", x, w, scale)
    bias = contiguous(bias, x.dtype)
    if m > FEW:
        wide = computed(x.dtype)
        whole = (unpacked(w).astype(wide) * scale.astype(wide)[..., None]).reshape(n, groups * GROUP)[:, :k]
        return multiply(x, whole.astype(x.dtype, copy=False).T, bias)
    y = xp.empty((m, n), x.dtype)
    if y.size:
        _int4(_grid(m, n), THREADS, contiguous(x), contiguous(w), contiguous(scale, "float16"), bias, y, m, n, k, groups)
    return y
