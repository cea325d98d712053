"""For each kernel of the package: arguments to compare its compiled versions with its reference on, and how close they come."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from mpitrain.kernels import attention, flash_attention, lowbit, optimizer, rows, sparse
from mpitrain.kernels.convolution import Window
from mpitrain.kernels.dropout import Dropping, DroppingWindow
from mpitrain.kernels.pointwise import ACTIVATIONS
from mpitrain.kernels.pool import Side, window_maximum
from mpitrain.kernels.resample import Taps
from mpitrain.shrink.formats import FORMATS

KEY = 0xF234567890ABCDEF


class Example(NamedTuple):
    """The tolerance is for float32, relative to the largest value of a result; a millionth of it is float64's."""

    arguments: Callable[[Any, Any], tuple[Any, ...]]          # from (rng, dtype)
    tolerance: float = 0.0
    dtypes: tuple[str, ...] = ("float32", "float64")


def normal(rng: Any, dtype: Any, *shapes: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def of_shapes(*shapes: tuple[int, ...], then: tuple[Any, ...] = (), tolerance: float = 0.0) -> Example:
    """Normal numbers in arrays of these shapes, followed by what stands in `then`."""
    return Example(lambda rng, dtype: (*normal(rng, dtype, *shapes), *then), tolerance)


def flash_arguments(rng: Any, dtype: Any, backward: bool) -> tuple[Any, ...]:
    qkv = rng.standard_normal((2, 70, 3, 3, 19)).astype(dtype)         # heads as a layer cuts them out of one product
    q, k, v = qkv.transpose(2, 0, 3, 1, 4)
    out = np.full((2, 70, 3, 19), np.nan, dtype).swapaxes(1, 2)
    dropping = Dropping(np.array([5, 1 << 40], np.uint64), KEY, 0.25, 2)
    if not backward:
        return q, k, v, out, 0.3, True, dropping
    known = flash_attention.flash_attention.reference(q, k, v, out, 0.3, True, dropping)
    grads = np.full_like(qkv, np.nan).transpose(2, 0, 3, 1, 4)
    return q, k, v, out, rng.standard_normal(out.shape).astype(dtype), *known, 0.3, True, *grads, dropping


def wide_flash_arguments(rng: Any, dtype: Any, backward: bool, queries: int, keys: int, width: int, values: int, causal: bool,
                         dropping: Dropping | None = None, without: tuple[int, ...] = ()) -> tuple[Any, ...]:
    """Heads in arrays of their own; the gradients at `without` are not asked for."""
    q, k, v = normal(rng, dtype, (2, 2, queries, width), (2, 2, keys, width), (2, 2, keys, values))
    out = np.full((2, queries, 2, values), np.nan, dtype).swapaxes(1, 2)
    if not backward:
        return q, k, v, out, width ** -0.5, causal, dropping
    known = flash_attention.flash_attention.reference(q, k, v, out, width ** -0.5, causal, dropping)
    grads = [None if i in without else np.full_like(x, np.nan) for i, x in enumerate((q, k, v))]
    return q, k, v, out, rng.standard_normal(out.shape).astype(dtype), *known, width ** -0.5, causal, *grads, dropping


# Sizes beside those of tiles, more keys than queries and fewer, each width, and words from places that no part of 4 begins at.
FLASH = ((33, 129, 32, 24, False, None, (0,)), (130, 65, 64, 64, True, None, (1,)), (64, 128, 128, 128, False, None, (2,)),
         (67, 70, 72, 136, True, Dropping(np.array([5, 1 << 40], np.uint64), KEY, 0.4, 0, np.array([1, 1 << 33], np.uint64))),
         (67, 70, 64, 64, True, DroppingWindow(np.array([5, 1 << 40], np.uint64), KEY, 0.4, 0, None, (1 << 17, 1 << 18),
                                               (1, 7, 70001))), (70, 200, 64, 64, True, None), (129, 129, 16, 16, True, None))


def joined_arguments(rng: Any, dtype: Any) -> tuple[Any, ...]:
    outs = rng.standard_normal((2, 2, 3, 50, 19)).astype(dtype)
    tops = (30 * rng.standard_normal((2, 2, 3, 50))).astype(dtype)
    inverses = rng.uniform(0.01, 1, (2, 2, 3, 50)).astype(dtype)
    outs[:, 0, 0, :4], tops[:, 0, 0, :4], inverses[:, 0, 0, :4] = 0, 0, 0                      # without keys
    outs[1, 1, 1, :4], tops[1, 1, 1, :4], inverses[1, 1, 1, :4] = 0, 0, 0
    return outs[0].transpose(0, 2, 1, 3).copy().swapaxes(1, 2), tops[0], inverses[0], outs[1].copy(), tops[1], inverses[1]


def update(arrays: int, *scalars: float, n: int = 1000) -> Example:
    """An optimizer's update of so many arrays; its scalars."""
    return Example(lambda rng, dtype: (*(abs(rng.standard_normal(n)).astype(dtype) for _ in range(arrays)), *scalars))


def decoding(heads: int, groups: int, width: int, capacity: int, at: tuple[int, ...]) -> Example:
    """New positions of texts whose slots are in no order, to a cache of so many positions."""
    slots = np.array([3, 0, 1, 4, 2][:len(at)])
    return Example(lambda rng, dtype: (*normal(rng, dtype, (len(at), heads * (groups + 2) * width), (5, heads, capacity, width),
                                               (5, heads, capacity, width)), slots, np.array(at)), 2e-6)


def numbers_of_a_step(n: int, limit: float, interval: int, good: float = 2, found: float = 1.0) -> Example:
    """The end of a norm of n sums, one of which is times `found`."""
    def arguments(rng: Any, dtype: Any) -> tuple[Any, ...]:
        sums = abs(rng.standard_normal(n))
        if n:
            sums[n // 2] *= found
        return np.array([np.nan, np.nan, np.nan, 1024.0, good, 7, 8, 9]), sums, limit, interval, 2.0, 0.5
    return Example(arguments, dtypes=("float64",))


def tallied(shape: tuple[int, ...]) -> Example:
    """A batch norm whose statistics are added to those of others. They are float64 in all formats, which are tried elsewhere."""
    return Example(lambda rng, dtype: (*normal(rng, dtype, shape), None, None, None, 1e-5, 0, *normal(rng, dtype, (
        2 * shape[1] + 1,))), 1e-5, dtypes=("float64",))


def moved_running(sizes: tuple[int, ...], momenta: tuple[float, ...]) -> Example:
    """Running statistics of layers of those sizes; the last one has recorded nothing."""
    def arguments(rng: Any, dtype: Any) -> tuple[Any, ...]:
        starts = [0, *accumulate(size + 1 for size in sizes)]
        values, sums = normal(rng, dtype, (starts[-1],), (starts[-1],))
        for number, stop in enumerate(starts[1:]):
            values[stop - 1], sums[stop - 1] = 3, 2 if number < len(sizes) - 1 or number == 0 else 0
        table = np.array([*zip(starts, sizes)], np.int64).reshape(-1, 2)
        return values, sums, np.array(momenta), table
    return Example(arguments, dtypes=("float64",))


def points(rng: Any, dtype: Any) -> np.ndarray:
    x: np.ndarray = (3 * rng.standard_normal((5, 33))).astype(dtype)
    x[0, :8] = [0, -0.0, 1e-8, -20, 20, -100, 100, 5.9]
    return x


def product_arguments(rng: Any, dtype: Any) -> tuple[Any, ...]:
    return (rng.standard_normal((300, 45)).astype(dtype).T, rng.standard_normal((75, 300)).astype(dtype).T,
            rng.standard_normal(75).astype(dtype), None)


def pairs(rng: Any, dtype: Any, *shape: int) -> np.ndarray:
    """Complex numbers of this precision."""
    return normal(rng, dtype, (*shape, 2))[0].view({"f": "F", "d": "D"}[np.dtype(dtype).char])[..., 0]


def matrix(rng: Any, dtype: Any) -> np.ndarray:
    x: np.ndarray = (4 * rng.standard_normal((6, 37))).astype(dtype)
    return x


def labels(rng: Any, third: int = 0) -> np.ndarray:
    found: np.ndarray = rng.integers(0, 37, 6)
    found[2] = third
    return found


def random_rows(rng: Any) -> np.ndarray:
    found: np.ndarray = rng.integers(0, 1 << 40, 5).astype(np.uint64)
    return found


def recurrent(*widths: tuple[int, ...] | None, then: tuple[Any, ...] = (), tolerance: float = 2e-6) -> Example:
    """Arrays of these shapes: 24 rows in 4 steps of up to 9 sequences, from the last step to the first.

    Numbers are as small as layers have them: from step to step rounding grows with the norm of the recurrent weight.
    """
    return Example(lambda rng, dtype: (*(None if w is None else (normal(rng, dtype, w)[0] / 6).astype(dtype) for w in widths),
                                       np.array([9, 8, 6, 1]), True, *then), tolerance)


def sparse_arguments(rng: Any, dtype: Any, form: str) -> tuple[Any, ...]:
    x, w, bias = normal(rng, dtype, (75, 45), (48, 45), (48,))
    w *= rng.random((48, 45)) < 0.3 if form == "csr" else np.repeat(rng.random((3, 45)) < 0.3, 16, axis=0)
    return x, *(sparse.to_csr(w) if form == "csr" else sparse.to_blocks(w)), bias


def sparse_gradient(rng: Any, dtype: Any, of: str) -> tuple[Any, ...]:
    x, starts, columns, values, _ = sparse_arguments(rng, dtype, "blocks")
    grad, w = normal(rng, dtype, (75, 48), (48, 45))
    return {"values": (w, starts, columns), "x": (grad, starts, columns, values, 45),
            "w": (grad, x, starts, columns, np.empty((48, 45), dtype))}[of]


def stored(shape: tuple[int, ...], kind: str | None, tables: int = 1, moved: bool = False) -> Example:
    """Rows of `kind` (None: numbers that are not looked up), some images mirrored and moved, two of them out of sight."""
    def arguments(rng: Any, dtype: Any) -> tuple[Any, ...]:
        out, moves = np.full(shape, np.nan, dtype), rng.integers(-5, 6, (shape[0], 2)).astype(np.int16)
        moves[:2] = np.array([[0, 200], [-200, 0]], np.int16)[:len(moves)]
        if kind is None:
            return out, *normal(rng, dtype, shape), None, moves if moved else None
        limits = np.iinfo(kind)
        values = rng.integers(limits.min, limits.max, shape, kind, endpoint=True)
        return out, values, *normal(rng, dtype, (tables, 1 << limits.bits)), moves if moved else None
    return Example(arguments)


WINDOW = Window((3, 2), (2, 1), (1, 2), (1, 2))           # images of 7x6 become 4x8
ROWS, COLUMNS = Side((0, 1, 3, 3), (2, 4, 5, 6), 6), Side((0, 2, 3), (3, 4, 5), 5)
VALUES = Example(lambda rng, dtype: (points(rng, dtype),), 2e-6)
AND_SLOPE = Example(lambda rng, dtype: ((x := points(rng, dtype)), x), 2e-6)
GRADIENT = Example(lambda rng, dtype: (points(rng, dtype), points(rng, dtype), np.empty(33, dtype)), 2e-6)
STREAM = Example(lambda rng, dtype: (np.empty(1037, dtype), KEY, (1 << 40) - 5), dtypes=("float64",))

def low_bits(name: str, whole: bool = False, rows: int = 9, inputs: int = 131) -> Example:
    """A product with a weight (21, inputs) in the format `name`, of floats or (`whole`) of whole numbers."""
    def arguments(rng: Any, dtype: Any) -> tuple[Any, ...]:
        x, weight, bias = normal(rng, dtype, (rows, inputs), (21, inputs), (21,))
        arrays = FORMATS[name]().quantize(weight)
        given = lowbit.rows.reference(x, lowbit.VECTOR if name == "int8" else lowbit.SPAN, -1.0) if whole else (x,)
        return *given, arrays["weight"], arrays["scale"], bias
    return Example(arguments, 0.0 if whole else 1e-6, ("float32",))


EXAMPLES: dict[str, Example] = {
    "lowbit_int4": low_bits("int4"),
    "lowbit_int4_integers": low_bits("int4", whole=True),
    "lowbit_int8": low_bits("int8"),
    "lowbit_int8_integers": low_bits("int8", whole=True),
    "lowbit_rows": Example(lambda rng, dtype: (*normal(rng, dtype, (9, 131)), 32, -1.0), 0.0, ("float32",)),
    "attention_weights": of_shapes((2, 3, 21, 19), then=(0.5, True), tolerance=1e-6),
    "attention_weights_gradient": Example(lambda rng, dtype: (
        attention.attention_weights.reference(*normal(rng, dtype, (2, 21, 19)), 0.5, True), *normal(rng, dtype, (2, 21, 19)),
        0.5, True), 1e-6),
    "batch_norm": of_shapes((3, 4, 37), (4,), (4,), (3, 4, 37), then=(1e-5, True), tolerance=1e-5),
    "batch_norm_gradients": Example(lambda rng, dtype: (
        *normal(rng, dtype, (3, 4, 37), (3, 4, 37), (3, 4, 37), (4,), (4,), (4,)), abs(rng.standard_normal(4)) + 0.1, True,
        True), 1e-5),
    "move_running": moved_running((4,), (0.1,)),
    "channel_affine": of_shapes((3, 4, 37), (4,), (4,), (4,), tolerance=1e-5),
    "channel_combine": of_shapes((3, 4, 37), (3, 4, 37), (4,), (4,), (4,), (4,), tolerance=1e-5),
    "channel_moments": of_shapes((3, 4, 37), tolerance=1e-5),
    "channel_sums": of_shapes((3, 4, 37), (3, 4, 37), (4,), tolerance=1e-5),
    "column_sums": Example(lambda rng, dtype: (*normal(rng, dtype, (4500, 37)), np.empty(37, dtype))),
    "row_sums": of_shapes((19, 1037)),
    "stored_rows": stored((5, 3, 9, 13), "uint8", 3, moved=True),
    "variances": of_shapes((3, 150, 37)),
    "convolve": of_shapes((3, 4, 7, 6), (6, 2, 3, 2), (6,), then=(WINDOW, 2), tolerance=1e-5),
    "convolve_adjoint": of_shapes((3, 6, 4, 8), (6, 2, 3, 2), (4,), then=(WINDOW, 2, (7, 6)), tolerance=1e-5),
    "kernel_gradient": of_shapes((3, 4, 7, 6), (3, 6, 4, 8), then=(WINDOW, 2, None, "y"), tolerance=1e-5),
    "convolve_bfloat16": of_shapes((3, 6, 7, 6), (6, 3, 3, 2), (6,), then=(WINDOW, 2), tolerance=1e-5)._replace(
        dtypes=("float32",)),
    "convolve_adjoint_bfloat16": of_shapes((3, 6, 4, 8), (6, 3, 3, 2), (6,), then=(WINDOW, 2, (7, 6)), tolerance=1e-5)._replace(
        dtypes=("float32",)),
    "kernel_gradient_bfloat16": of_shapes((3, 6, 7, 6), (3, 6, 4, 8), then=(WINDOW, 2, None, "y"), tolerance=1e-5)._replace(
        dtypes=("float32",)),
    "cross_entropy": Example(lambda rng, dtype: (matrix(rng, dtype), labels(rng), 0.1, None, True), 2e-6),
    "cross_entropy_grad": Example(lambda rng, dtype: (
        e := np.exp(-abs(matrix(rng, dtype))), labels(rng, -1), e.sum(1), 0.1, -1, np.asarray(0.5, dtype)), 2e-6),
    "resample": of_shapes((3, 9, 5), then=(Taps(9, [2, 0, 3], [0, 8, 4, 4, 1], [0.25, 0.75, 1.0, -0.5, 0.125]), 1),
                          tolerance=1e-6),
    "full_transform": Example(lambda rng, dtype: (pairs(rng, dtype, 3, 272, 2, 30), (1, 3), True, 0.5), 1e-6),
    "half_transform": Example(lambda rng, dtype: (*normal(rng, dtype, (19, 6, 44)), (0,), 0.5, 2.0), 1e-6),
    "real_transform": Example(lambda rng, dtype: (pairs(rng, dtype, 19, 3, 26), 51, (0,), 0.5, 0.5), 1e-6),
    "softmax": Example(lambda rng, dtype: (matrix(rng, dtype),), 4e-7),
    "softmax_grad": Example(lambda rng, dtype: (rows.softmax.reference(matrix(rng, dtype)), matrix(rng, dtype)), 2e-6),
    "log_softmax": Example(lambda rng, dtype: (matrix(rng, dtype),), 4e-7),
    "log_softmax_grad": Example(lambda rng, dtype: (rows.log_softmax.reference(matrix(rng, dtype)), matrix(rng, dtype)), 2e-6),
    "dropout": Example(lambda rng, dtype: (
        *normal(rng, dtype, (5, 1037)), random_rows(rng), KEY, 0.3, *normal(rng, dtype, (5, 1037)), 3 * 1037)),
    "dropout_grad": Example(lambda rng, dtype: (
        *normal(rng, dtype, (5, 37)), rng.integers(0, 256, (5, 5)).astype(np.uint8), 0.3)),
    "flash_attention": Example(lambda rng, dtype: flash_arguments(rng, dtype, False), 1e-6),
    "flash_attention_grad": Example(lambda rng, dtype: flash_arguments(rng, dtype, True), 2e-6),
    "flash_attention_bfloat16": Example(lambda rng, dtype: flash_arguments(rng, dtype, False), 2e-3, ("float32",)),
    "flash_attention_grad_bfloat16": Example(lambda rng, dtype: flash_arguments(rng, dtype, True), 4e-3, ("float32",)),
    "join_attention": Example(joined_arguments, 1e-6),
    "row_norm": of_shapes((9, 568), (9, 568), (568,), (568,), then=(
        1e-5, True, Dropping(np.array([3, 1 << 40, 7], np.uint64), KEY, 0.3, 5)), tolerance=1e-5),
    "row_norm_gradients": Example(lambda rng, dtype: (
        *normal(rng, dtype, (24, 104), (24, 104), (104,), (24, 104), (24,), (24,)), True, (True, True),
        rng.integers(0, 256, (3, 104), dtype=np.uint8), 0.3), 1e-5),
    "linear": of_shapes((75, 45), (60, 45), (60,), then=(ACTIVATIONS["gelu"], True), tolerance=3e-6),
    "cached_attention": Example(lambda rng, dtype: (
        *normal(rng, dtype, (3, 114), (4, 2, 150, 19), (4, 2, 150, 19)), np.array([3, 0, 1]), np.array([149, 70, 5])), 1e-6),
    "few_rows": of_shapes((5, 403), (37, 403), (37,), tolerance=3e-6),
    "linear_gradients": Example(lambda rng, dtype: (
        *normal(rng, dtype, (75, 60), (75, 60), (75, 45), (60, 45)), ACTIVATIONS["gelu"], np.zeros(60, dtype),
        np.zeros((60, 45), dtype), True), 3e-6),
    "lstm": recurrent((24, 148), (9, 21), (9, 37), (24, 21), (24, 37), (24, 37), (148, 21), (21, 37)),
    "lstm_gradients": recurrent((24, 148), (24, 21), (9, 21), (9, 37), (9, 37), (24, 37), (24, 21), (148, 21), (21, 37),
                                tolerance=1e-5),
    "gru": recurrent((24, 111), (9, 37), (24, 37), (24, 37), (111, 37), (111,)),
    "gru_gradients": recurrent((24, 111), (24, 111), (24, 37), (9, 37), (9, 37), (24, 37), (24, 37), (111, 37), tolerance=1e-5),
    "rnn": recurrent((24, 37), (9, 37), (24, 37), (37, 37), then=(False,)),
    "rnn_gradients": recurrent((24, 37), (24, 37), (9, 37), (24, 37), (37, 37), then=(False,), tolerance=1e-5),
    "sgd": update(2, 0.1, 0.01, 0.5),
    "sgd_momentum": update(3, 0.1, 0.9, 1.0, 0.9, 0.01, 0.5),
    "adam": update(4, 0.01, 0.99, 0.1, 0.1, 0.99, 0.01, 1.5, 1e-8, 0.5),
    "lamb": update(5, 0.1, 0.99, 0.01, 1.5, 1.5, 1e-6, 0.01, 0.5),
    "rmsprop": update(4, 0.01, 0.9, 0.99, 0.01, 1e-8, 0.01, 0.5),
    "sgd_dampened": update(3, 0.1, 0.9, 0.7, 1.0, 0.9, 0.01, 0.5),
    "amsgrad": update(5, 0.01, 0.99, 0.1, 0.1, 0.99, 0.01, 1.5, 1e-8, 0.5),
    "rmsprop_centered": update(5, 0.01, 0.9, 0.99, 0.01, 1e-8, 0.01, 0.5),
    "square_sums": of_shapes((2 * optimizer.NORM_BLOCK + 13,)),
    "conclude_norm": numbers_of_a_step(2500, 1.5, 3),
    **dict.fromkeys(("relu", "tanh", "sigmoid", "gelu", "gelu_tanh", "silu"), VALUES),
    **dict.fromkeys(("gelu_and_slope", "gelu_tanh_and_slope", "silu_and_slope"), AND_SLOPE),
    **dict.fromkeys(("slope_grad", "relu_grad", "tanh_grad", "sigmoid_grad"), GRADIENT),
    "product": Example(product_arguments, 3e-6),
    "block_product": Example(lambda rng, dtype: sparse_arguments(rng, dtype, "blocks"), 3e-6),
    "csr_product": Example(lambda rng, dtype: sparse_arguments(rng, dtype, "csr"), 3e-6),
    "keep_bits": Example(lambda rng, dtype: (points(rng, dtype).reshape(-1), rng.integers(0, 256, 21).astype(np.uint8), 3), 0.0),
    "block_values": Example(lambda rng, dtype: sparse_gradient(rng, dtype, "values"), 3e-6),
    "block_input_gradient": Example(lambda rng, dtype: sparse_gradient(rng, dtype, "x"), 3e-6),
    "block_weight_gradient": Example(lambda rng, dtype: sparse_gradient(rng, dtype, "w"), 3e-6),
    "product_bfloat16": Example(product_arguments, 3e-6, ("float32",)),
    "rotary": Example(lambda rng, dtype: (*normal(rng, dtype, (42, 13), (14, 5), (14, 5)), 7, 3, False, False), 1e-6),
    "random_words": Example(lambda rng, dtype: (random_rows(rng), 0x1234567890ABCDEF, 13)),
    "random_uniform": STREAM,
    "random_normal": STREAM._replace(tolerance=1e-9),
    **dict.fromkeys(("erf", "erfc", "erfcx", "erfinv", "lgamma", "digamma", "trigamma"), Example(
        lambda rng, dtype: (np.append(rng.uniform(-0.99, 0.99, 700), [1e-7, -1e-4, 0.5]).astype(dtype),), 1e-5)),
    **dict.fromkeys(("remainder", "fmod"), of_shapes((700,), (700,))),
    "logaddexp": of_shapes((700,), (700,), tolerance=3e-7),
    "replace": of_shapes((70,), then=(0.5, 3.0, -4.0)),
    "cumsum": of_shapes((7, 9, 5), then=(1, True)),
    "cumprod": of_shapes((9, 13), then=(1,)),
    "cumprod_gradient": of_shapes((9, 13), (9, 13), tolerance=1e-6),
    "prod_gradient": of_shapes((9, 13), (9,), tolerance=1e-6),
    "prod": of_shapes((9, 37), tolerance=1e-6),
    "cumextremum": Example(lambda rng, dtype: (np.rint(rng.standard_normal((3, 40, 5))).astype(dtype), 1, False)),
    "extreme": Example(lambda rng, dtype: (np.rint(rng.normal(0, 3, (3, 400))).astype(dtype), 90, True)),
    "place_of_rank": Example(lambda rng, dtype: (
        np.rint(rng.normal(0, 3, (3, 400))).astype(dtype), np.array([[0], [7], [399]]))),
    "gather": Example(lambda rng, dtype: (*normal(rng, dtype, (4, 6, 5)), rng.integers(0, 6, (3, 9, 4)), 1)),
    "scatter": Example(lambda rng, dtype: (*normal(rng, dtype, (3, 6, 5)), rng.integers(0, 6, (3, 9, 5)),
                                           *normal(rng, dtype, (3, 9, 5)), 1, True)),
    "triangle": of_shapes((3, 5, 7), then=(-2, False)),
    "scatter_add_rows": Example(lambda rng, dtype: (
        *normal(rng, dtype, (7, 5)), rng.integers(0, 7, 20), *normal(rng, dtype, (20, 5)))),
    "take_rows": Example(lambda rng, dtype: (*normal(rng, dtype, (7, 5)), rng.integers(0, 7, (4, 5)))),
    "subsample": of_shapes((2, 3, 5, 37), then=(2, 1, 2)),
    "subsample_gradient": of_shapes((2, 6, 3, 19), then=((2, 3, 5, 37), 2, 1)),
    "window_maximum": of_shapes((2, 3, 6, 5), then=(ROWS, COLUMNS)),
    "window_maximum_gradient": Example(lambda rng, dtype: (
        *normal(rng, dtype, (2, 3, 4, 3)), window_maximum.reference(rng.standard_normal((2, 3, 6, 5)), ROWS, COLUMNS)[1], ROWS,
        COLUMNS), 1e-6),
    "window_total": of_shapes((2, 3, 6, 5), then=(ROWS, COLUMNS), tolerance=1e-6),
    "window_total_gradient": of_shapes((2, 3, 4, 3), then=(ROWS, COLUMNS), tolerance=1e-6),
}


def losses_of(classes: int, smoothing: float, ignore: int | None, training: bool = True, infinite: bool = False) -> Example:
    """Logits far from 0, so that digits are lost where the largest is not taken off first."""
    def arguments(rng: Any, dtype: Any) -> tuple[Any, ...]:
        logits = (100 + 4 * rng.standard_normal((9, classes))).astype(dtype)
        if infinite:
            logits[2, 5], logits[4, 0] = -np.inf, -np.inf
        found = rng.integers(0, classes, 9)
        found[[1, 6]] = 0 if ignore is None else ignore
        return logits, found, smoothing, ignore, training
    return Example(arguments)


def gradient_of(classes: int, smoothing: float, ignore: int | None) -> Example:
    def arguments(rng: Any, dtype: Any) -> tuple[Any, ...]:
        logits, found, *_ = losses_of(classes, smoothing, ignore).arguments(rng, dtype)
        return logits, found, None, smoothing, ignore, np.asarray(0.5, dtype)
    return Example(arguments)


def rows_taken(n: int, entries: int, width: int) -> Example:
    return Example(lambda rng, dtype: (*normal(rng, dtype, (entries, width)), rng.integers(0, entries, n)))


def rows_added(n: int, entries: int, width: int) -> Example:
    """Half of the indices are one and the same."""
    return Example(lambda rng, dtype: (*normal(rng, dtype, (entries, width)), np.where(
        rng.random(n) < 0.5, rng.integers(0, entries, n), entries // 2), *normal(rng, dtype, (n, width))), 2e-6)


def hidden_scores(rng: Any, dtype: Any) -> tuple[Any, ...]:
    scores, = normal(rng, dtype, (2, 9, 37))
    scores[0, 3], scores[1, :, :20] = -np.inf, -np.inf                     # a row of zeros; hidden keys
    return scores, 0.5, False


def extremes(rng: Any, dtype: Any) -> tuple[Any, ...]:
    x = (100 * rng.standard_normal((7, 70))).astype(dtype)
    x[1, 3:9], x[2, 0], x[3, 69] = -np.inf, np.nan, 1000
    return (x,)


ROWS_OF_VECTORS, WIDE_ROWS, EXTREMES = of_shapes((9, 64)), of_shapes((3, 5003)), Example(extremes)
TWO_OF_VECTORS, TWO_WIDE = of_shapes((9, 64), (9, 64)), of_shapes((3, 5003), (3, 5003))


# More arguments for the device versions alone: paths that the examples above do not take. float32 among the dtypes of an example
# means that it is tried in 16 bits, too.
PLANE = Side((0,), (9,), 9), Side((0,), (7,), 7)          # a window is the whole plane
LARGE_ROWS, LARGE_COLUMNS = Side((0, 2, 8), (7, 9, 9), 9), Side((0, 1), (5, 7), 7)
BACK = Side((0, 4, 0), (2, 6, 5), 7)                      # the second window lies between others that see the same positions
MANY = Side(tuple(range(0, 40, 2)), tuple(range(2, 42, 2)), 40)


def maxima(n: int, rows: Side, columns: Side, relu: bool = False) -> Example:
    return Example(lambda rng, dtype: (
        *normal(rng, dtype, (2, n, rows.count, columns.count)),
        window_maximum.reference(rng.standard_normal((2, n, rows.size, columns.size)), rows, columns, relu)[1], rows, columns),
        1e-6)


def norm_backward(shape: tuple[int, ...], relu: bool, wanted: bool = True) -> Example:
    c = (shape[1],)
    return Example(lambda rng, dtype: (*normal(rng, dtype, shape, shape), normal(rng, dtype, shape)[0] if relu else None,
                                       *normal(rng, dtype, c, c, c), abs(rng.standard_normal(c)) + 0.1, relu, wanted), 1e-5)


# Images, outputs, window, groups: several tiles, strides, depthwise, windows that miss pixels, no images.
CONVOLUTIONS = (
    ((2, 3, 13, 11), 70, Window((3, 3), (1, 1), (1, 1)), 1), ((2, 40, 9, 9), 36, Window((1, 1), (2, 2)), 1),
    ((3, 5, 12, 17), 18, Window((3, 2), (3, 2), (2, 1), (2, 3)), 1), ((2, 6, 15, 9), 6, Window((3, 3), (2, 2), (1, 1)), 6),
    ((2, 3, 11, 14), 9, Window((5, 4), (1, 2), (2, 1), (1, 2)), 3), ((2, 4, 10, 10), 4, Window((2, 2), (3, 3)), 2),
    ((0, 3, 9, 9), 5, Window((3, 3)), 1), ((1, 1, 40, 40), 4, Window((7, 7), (1, 1), (3, 3)), 1),
    ((1, 70, 1, 1), 3, Window((1, 1)), 1))


def convolutions(product: str) -> tuple[Example, ...]:
    found = []
    for shape, outputs, window, groups in CONVOLUTIONS:
        y, weight = (shape[0], outputs, *window.outputs(*shape[2:])), (outputs, shape[1] // groups, *window.kernel)
        if product == "convolve":
            found.append(of_shapes(shape, weight, (outputs,), then=(window, groups), tolerance=1e-5))
        elif product == "adjoint":
            found.append(of_shapes(y, weight, (shape[1],), then=(window, groups, shape[2:]), tolerance=1e-5))
        else:
            found.append(of_shapes(shape, y, then=(window, groups, None, "xy"[len(found) % 2]), tolerance=1e-5))
    return tuple(found)


CHANNELS = ((66, 5, 1), (3, 40, 1), (70, 3, 49), (37, 4, 64), (1, 9, 4), (3, 2, 6000), (0, 3, 5), (2, 0, 5))
DEVICE_EXAMPLES: dict[str, tuple[Example, ...]] = {
    **dict.fromkeys(("relu", "tanh", "sigmoid", "gelu", "gelu_tanh", "silu"), (of_shapes((3, 856), tolerance=2e-6),)),
    **dict.fromkeys(("gelu_and_slope", "gelu_tanh_and_slope", "silu_and_slope"), (Example(
        lambda rng, dtype: ((x := normal(rng, dtype, (3, 856))[0]), np.empty_like(x)), 2e-6),)),
    **dict.fromkeys(("slope_grad", "relu_grad", "tanh_grad", "sigmoid_grad"), (
        Example(lambda rng, dtype: (*normal(rng, dtype, (130, 264), (130, 264)), np.empty(264, dtype)), 2e-6),
        of_shapes((3, 859), (3, 859), then=(None,)))),
    "column_sums": (Example(lambda rng, dtype: (*normal(rng, dtype, (130, 520)), np.empty(520, dtype)), 2e-6),),
    "dropout": (
        Example(lambda rng, dtype: (*normal(rng, dtype, (5, 2008)), random_rows(rng), KEY, 0.3, None, 8)),
        Example(lambda rng, dtype: (*normal(rng, dtype, (5, 1040)), random_rows(rng), KEY, 0.3, *normal(rng, dtype, (5, 1040)),
                                    rng.integers(0, 1 << 40, 5).astype(np.uint64)))),
    "dropout_grad": (Example(lambda rng, dtype: (
        *normal(rng, dtype, (9, 1040)), rng.integers(0, 256, (9, 130)).astype(np.uint8), 0.3)),),
    "stored_rows": (
        stored((5, 2, 8, 16), "uint8", 2, moved=True), stored((4, 2, 7, 16), "int8", 1, moved=True),
        stored((3, 40, 1, 1), "uint8", 40),
        stored((3, 19, 8, 24), "uint8", 19, moved=True), stored((9, 64, 3, 5), "uint8", 1), stored((3, 2, 4, 24), "uint16", 2),
        stored((3, 1, 5, 7), "int16", 1, moved=True), stored((5, 3, 6, 16), None, moved=True), stored((3, 3, 9, 5), None),
        stored((0, 3, 9, 5), "uint8", 3, moved=True)),
    "rotary": tuple(
        Example(lambda rng, dtype, width=width, half=half, between=between, interleaved=interleaved: (
            *normal(rng, dtype, (84, width), (14, half), (14, half)), 7, between, interleaved, True), 1e-6)
        for width, half, between, interleaved in ((13, 5, 6, True), (64, 32, 1, False), (64, 32, 2, True), (104, 24, 3, False),
                                                  (104, 24, 3, True), (9, 0, 1, False), (10, 5, 1, False))),
    **{f"lowbit_{name}": (low_bits(name, rows=17), low_bits(name, rows=1, inputs=1088), low_bits(name, rows=4, inputs=56))
       for name in ("int4", "int8")},
    "cached_attention": (decoding(2, 1, 64, 300, (299, 64, 63, 0, 130)), decoding(1, 5, 128, 70, (69, 0)),
                         decoding(3, 2, 40, 65, (64, 7)), decoding(1, 3, 200, 64, (63,)), decoding(1, 4, 16, 8200, (8199, 5000))),
    "random_words": (Example(lambda rng, dtype: (random_rows(rng), KEY, 1036), dtypes=("float64",)),),
    "sgd": (update(2, 0.1, 0.01, 0.5, n=4103),),
    "adam": (update(4, 0.01, 0.99, 0.1, 0.1, 0.99, 0.01, 1.5, 1e-8, 0.5, n=4103),),
    "lamb": (update(5, 0.1, 0.99, 0.01, 1.5, 1.5, 1e-6, 0.01, 0.5, n=2049),),
    "rmsprop_centered": (update(5, 0.01, 0.9, 0.99, 0.01, 1e-8, 0.01, 0.5, n=3),),
    "square_sums": (of_shapes((0,)), of_shapes((4095,)), of_shapes((2048,)), of_shapes((1,))),
    "conclude_norm": (numbers_of_a_step(1, 0.0, 0), numbers_of_a_step(0, 1.0, 5), numbers_of_a_step(1024, 1.0, 5, 0),
                      numbers_of_a_step(1025, 1e9, 5, 4, np.inf), numbers_of_a_step(3000, 1.0, 0, 4, np.nan)),
    "convolve": convolutions("convolve"),
    "convolve_adjoint": convolutions("adjoint"),
    "kernel_gradient": (*convolutions("gradient"), Example(lambda rng, dtype: (
        *normal(rng, dtype, (3, 4, 7, 6), (3, 6, 4, 8)), WINDOW, 2, np.empty((6, 2, 3, 2), dtype), "x"), 1e-5)),
    "batch_norm": (*(of_shapes(s, (s[1],), (s[1],), then=(None, 1e-5, i % 5), tolerance=1e-5) for i, s in enumerate(CHANNELS)),
                   of_shapes((37, 4, 64), then=(None, None, None, 1e-3, 0), tolerance=1e-5),
                   of_shapes((37, 4, 64), (4,), (4,), (37, 4, 64), then=(1e-3, 0), tolerance=1e-5), *map(tallied, CHANNELS[:6])),
    "move_running": (moved_running((300, 5, 600), (0.1, 0.0, 1.0)), moved_running((), ())),
    "batch_norm_gradients": (*(norm_backward(s, i % 2 > 0, i != 2) for i, s in enumerate(CHANNELS)), Example(
        lambda rng, dtype: (*norm_backward((37, 4, 64), True).arguments(rng, dtype), tuple(np.empty((2, 4), dtype))), 1e-5)),
    "channel_affine": tuple(of_shapes(s, *[(s[1],)] * 3, tolerance=1e-5) for s in CHANNELS),
    "channel_combine": tuple(of_shapes(s, s, *[(s[1],)] * 4, tolerance=1e-5) for s in CHANNELS),
    "channel_moments": tuple(of_shapes(s, tolerance=1e-5) for s in CHANNELS),
    "channel_sums": tuple(of_shapes(s, s, (s[1],), tolerance=1e-5) for s in CHANNELS),
    "subsample": (of_shapes((2, 3, 41, 37), then=(3, 0, 0)), of_shapes((0, 3, 5, 7), then=(2, 1, 2))),
    "subsample_gradient": (of_shapes((2, 3, 14, 13), then=((2, 3, 41, 37), 3, 0)),),
    "window_maximum": (of_shapes((2, 3, 9, 7), then=PLANE), of_shapes((2, 5, 40, 40), then=(MANY, MANY, True)),
                       of_shapes((0, 5, 40, 40), then=(MANY, MANY, True))),
    "window_maximum_gradient": (maxima(3, *PLANE), maxima(5, MANY, MANY, True), maxima(5, LARGE_ROWS, LARGE_COLUMNS)),
    "window_total": (of_shapes((2, 21, 9, 7), then=PLANE, tolerance=1e-6),
                     of_shapes((2, 5, 40, 40), then=(MANY, MANY), tolerance=1e-6),
                     of_shapes((2, 5, 9, 7), then=(LARGE_ROWS, LARGE_COLUMNS), tolerance=1e-6),
                     of_shapes((2, 5, 40, 40), then=(Side((0,), (40,), 40), Side((0, 7), (40, 9), 40)), tolerance=1e-6)),
    "window_total_gradient": (of_shapes((2, 21, 1, 1), then=PLANE, tolerance=1e-6),
                              of_shapes((2, 5, 20, 20), then=(MANY, MANY), tolerance=1e-6),
                              of_shapes((2, 5, 3, 2), then=(LARGE_ROWS, LARGE_COLUMNS), tolerance=1e-6),
                              of_shapes((2, 5, 3, 3), then=(BACK, BACK), tolerance=1e-6)),
    **dict.fromkeys(("softmax", "log_softmax"), (ROWS_OF_VECTORS, WIDE_ROWS, EXTREMES)),
    **dict.fromkeys(("softmax_grad", "log_softmax_grad"), (TWO_OF_VECTORS, TWO_WIDE)),
    "cross_entropy": (losses_of(40, 0.0, None), losses_of(5003, 0.0, 3), losses_of(5003, 0.2, None, training=False),
                      losses_of(40, 0.2, -100, infinite=True), losses_of(1, 0.1, None)),
    "cross_entropy_grad": (gradient_of(40, 0.0, None), gradient_of(5003, 0.0, 3), gradient_of(4096, 0.2, -100),
                           gradient_of(1, 0.1, None)),
    "row_sums": (of_shapes((3, 40_001)), of_shapes((130, 7)), of_shapes((1, 70_000), tolerance=1e-6)),
    "variances": (of_shapes((2, 5000, 1)), of_shapes((1, 1, 3)), of_shapes((7, 129, 300)), of_shapes((1, 2100, 2))),
    "take_rows": (rows_taken(300, 40, 64), rows_taken(9, 3, 1037)),
    "scatter_add_rows": (rows_added(500, 30, 64), rows_added(2500, 300, 24), rows_added(700, 70000, 9), rows_added(1100, 2, 16)),
    "attention_weights": (of_shapes((5, 24, 64), then=(-0.5, False)), of_shapes((2, 7, 3, 1030), then=(2.0, False)),
                          of_shapes((3, 40, 40), then=(0.3, True)), Example(hidden_scores)),
    "attention_weights_gradient": (of_shapes((5, 24, 64), (5, 24, 64), then=(-0.5, False)),
                                   of_shapes((2, 3, 1030), (2, 3, 1030), then=(2.0, False))),
    "flash_attention": tuple(Example(lambda rng, dtype, given=given: wide_flash_arguments(rng, dtype, False, *given[:6]), 1e-6)
                             for given in FLASH),
    "flash_attention_grad": tuple(Example(lambda rng, dtype, given=given: wide_flash_arguments(rng, dtype, True, *given), 3e-6)
                                  for given in FLASH),
}
