"""Products of matrices on a device; see kernels/product.py. By the runtime's library where it serves them, else by our kernel.

Whatever strides can say is not copied: transposes, rows of a larger matrix, batches of matrices that lie evenly apart, one matrix
for a whole batch.
"""

from __future__ import annotations

from math import prod
from typing import Any

from numpy import broadcast_shapes

from mpitrain.backend.namespace import Array, array_module
from mpitrain.backend.runtime import Operand, ProductForm, runtime
from mpitrain.errors import ShapeError
from mpitrain.kernels.device import device
from mpitrain.kernels.device.code import Source, computed, contiguous

SOURCE, TILE, THREADS, MOST_BLOCKS = Source("product"), 64, 256, 65535             # product.cu's; blocks of a grid in z
ROUNDED = ("bfloat16", "float16")
SIZES = "im in ik ib i i i i i i d d"
_product = SOURCE.function("product", f"X:mk X:kn X?:n X!:bmn {SIZES}")
_wide_product = SOURCE.function("wide_product", f"X:mk X:kn S?:n S!:bmn {SIZES}")


def multiply(x: Array, y: Array, bias: Array | None = None, out: Array | None = None, *, operands: str = "", alpha: float = 1.0,
             beta: float = 0.0, ending: str = "") -> Array | None:
    """out = alpha x y + beta out (+ bias), for x (..., M, K) and y (..., K, N), whose leading dims broadcast; bias (N,).

    `out` is of the operands' format or float32, and new where it is not given. `operands`: "bfloat16" or "float16": x and y of
    float32 are rounded to that first, and out is float32; "tf32": x and y of float32 may be cut to 10 bits of fraction. `ending`
    is that of `ProductForm`; None where it is one that the library has not for this product, and nothing has been done. Raises
    ShapeError where shapes do not fit, TypeError where formats do not.
    """
    if x.shape[-1] != y.shape[-2]:
        raise ShapeError(f"product: shapes {x.shape} and {y.shape} do not fit")
    xp, wide = array_module(x), computed(x.dtype)
    result = x.dtype if out is None else out.dtype
    if operands in ROUNDED and x.dtype == y.dtype == "float32":
        x, y = (part.astype(_half(operands)) for part in (x, y))
    name = "tf32" if operands == "tf32" and x.dtype == "float32" else x.dtype.name
    if x.dtype != y.dtype or (result != x.dtype and result != wide):
        raise TypeError(f"product: {x.dtype} and {y.dtype} in an array of {result}; the first two are one format, and the third "
                        f"is that or {wide}")
    (m, k), n = x.shape[-2:], y.shape[-1]
    lead = broadcast_shapes(x.shape[:-2], y.shape[:-2]) if x.ndim > 2 or y.ndim > 2 else ()
    shape = (*lead, m, n)
    if out is not None and out.shape != shape:
        raise ShapeError(f"product: {x.shape} times {y.shape} is {shape}, and out is {out.shape}")
    made = xp.empty(shape, result) if out is None or not _lies_by_rows(out) else out
    if made is not out and out is not None and beta:
        made[...] = out
    if bias is not None and ending != "row_sums":
        bias, ending = contiguous(bias, result), ending or "bias"
    if made.size:
        if k == 0:
            _without_terms(made, bias, beta, ending)
        elif not _launch(name, x, y, made, bias, alpha, beta, ending):
            return None
    if out is not None and made is not out:
        out[...] = made
    return made if out is None else out


def _launch(name: str, x: Array, y: Array, out: Array, bias: Array | None, alpha: float, beta: float, ending: str) -> bool:
    """The product of non-empty matrices in `out`, whose rows are dense; False where nobody has such an ending."""
    xp, (m, n), k, lead = array_module(x), out.shape[-2:], x.shape[-1], out.shape[:-2]
    batch = prod(lead)
    (x, of_x), (y, of_y), (_, of_out) = (_operand(xp, part, lead) for part in (x, y, out))
    form = ProductForm(m, n, k, batch, of_x, of_y, of_out, name, out.dtype.name, ending, bias is not None)
    device_of = runtime(xp.__name__)
    assert device_of is not None
    if device_of.product(form, x, y, out, bias, alpha, beta):
        return True
    if ending not in ("", "bias"):
        return False
    made = out if out.flags.c_contiguous else contiguous(out)
    (x, *x_strides), (y, *y_strides) = _whole(x, of_x), _whole(y, of_y)
    run = _product if out.dtype == x.dtype else _wide_product
    grid = -(-m // TILE) * -(-n // TILE), 1, min(batch, MOST_BLOCKS)
    run(grid, THREADS, x, y, bias, made, m, n, k, batch, *x_strides, *y_strides, alpha, beta)
    if made is not out:
        out[...] = made
    return True


def _without_terms(out: Array, bias: Array | None, beta: float, ending: str) -> None:
    """A product of matrices without columns and rows: sums of nothing."""
    if ending not in ("", "bias"):
        raise ShapeError(f"product: no terms, and {ending} of them")
    if beta:
        out *= out.dtype.type(beta)
    else:
        out[...] = 0
    if bias is not None:
        out += bias


def _operand(xp: Any, x: Array, lead: tuple[int, ...]) -> tuple[Array, Operand]:
    """Matrices (..., R, C) as an `Operand` of the batch `lead`: as they lie, or a copy where that is none."""
    x = xp.broadcast_to(x, (*lead, *x.shape[-2:])) if x.shape[:-2] != lead else x
    step, matrix = _step(x), _matrix(x)
    if step is None or matrix is None:
        x = xp.ascontiguousarray(x)
        step, matrix = _step(x), _matrix(x)
        assert step is not None and matrix is not None
    return x, Operand(*matrix, step)


def _matrix(x: Array) -> tuple[bool, int] | None:
    """(whether it is stored transposed, leading dimension) of matrices (..., R, C); None where neither dim is dense."""
    rows, columns = x.shape[-2:]
    by_row, by_column = x.strides[-2] // x.itemsize, x.strides[-1] // x.itemsize
    if (by_column == 1 or columns == 1) and (by_row >= columns or rows == 1):
        return False, columns if rows == 1 else by_row
    if (by_row == 1 or rows == 1) and (by_column >= rows or columns == 1):
        return True, rows if columns == 1 else by_column
    return None


def _step(x: Array) -> int | None:
    """How far apart the matrices of a batch (..., R, C) lie, 0 where they are one; None where that differs."""
    step: int | None = None
    whole = 0
    for size, stride in zip(reversed(x.shape[:-2]), reversed(x.strides[:-2])):
        if size == 1:
            continue
        if step is None:
            step = stride
        elif stride != whole:
            return None
        whole = stride * size
    return 0 if step is None else None if step < 0 else step // x.itemsize


def _lies_by_rows(out: Array) -> bool:
    matrix = _matrix(out)
    return matrix is not None and not matrix[0] and _step(out) is not None


def _whole(x: Array, form: Operand) -> tuple[Any, ...]:
    """An operand without gaps, as the kernel wants it: (array, steps from row to row, column to column, matrix to matrix)."""
    if form.step == 0:                                       # one matrix, however large the batch
        x = x[(0,) * (x.ndim - 2)]
    rows, columns = x.shape[-2:]
    step = rows * columns if form.step else 0
    if form.transposed:
        return contiguous(x.swapaxes(-1, -2)), 1, rows, step
    return contiguous(x), columns, 1, step


def _half(name: str) -> Any:
    if name == "bfloat16":
        from ml_dtypes import bfloat16
        return bfloat16
    return name


@device("product")
def product(x: Array, y: Array, bias: Array | None, out: Array | None) -> Array:
    return multiply(x, y, bias, out)
