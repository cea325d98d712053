"""Products of bfloat16 numbers against float64: what is rounded, what is not, and in which order sums are made."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mpitrain.backend import native
from mpitrain.kernels import product as module
from mpitrain.kernels.product import has_bfloat16_instruction, product
from mpitrain.ops import linear, matmul

SIZES = [(8, 32, 16), (1, 1, 1), (9, 49, 513), (16, 96, 512), (7, 47, 511), (40, 1100, 3), (33, 530, 1025), (64, 600, 34),
         (8, 64, 1)]
EPS = 2.0 ** -7                                              # bfloat16 has eight significant bits
compiled = module.native_bfloat16.host()
needs_compiler = pytest.mark.skipif(compiled is None, reason=f"no compiled version: {native.missing()}")
versions = [pytest.param(compiled, marks=needs_compiler, id="compiled"),
            pytest.param(module.native_bfloat16.reference, id="expression")]


def matrix(rows: int, columns: int, turned: bool = False, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((columns, rows)).T if turned else rng.standard_normal((rows, columns))).astype(np.float32)


def rounded(x: np.ndarray) -> np.ndarray:
    """The nearest numbers of eight significant bits, ties to even, in float64; by powers of two, not by bits."""
    fraction, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(np.rint(fraction * 256) / 256, exponent)


@pytest.mark.parametrize("version", versions)
@pytest.mark.parametrize("size", SIZES)
def test_every_layout_and_size_equals_float64_of_rounded_operands(size: tuple[int, int, int], version) -> None:
    m, n, k = size
    for left, right, with_bias, with_out in itertools.product((False, True), repeat=4):
        x, y = matrix(m, k, left), matrix(k, n, right, 2)
        bias = matrix(1, n, seed=3)[0] if with_bias else None
        out = np.full((m, n), np.nan, np.float32) if with_out else None
        found = version(x, y, bias, out)
        p, q = rounded(x), rounded(y)
        wanted = p @ q + (0 if bias is None else bias)
        assert (found is out or out is None) and found.dtype == np.float32
        single = (k + 3) * np.finfo(np.float32).eps * (np.abs(p) @ np.abs(q) + 1 + np.abs(wanted))
        assert (np.abs(found - wanted) <= single).all(), "the sums are float32's"
        exact = x.astype(np.float64) @ y.astype(np.float64) + (0 if bias is None else bias)
        bound = (EPS + EPS * EPS / 4) * (np.abs(x).astype(np.float64) @ np.abs(y)) + single
        assert (np.abs(found - exact) <= bound).all(), "each operand is off by half of its last bit at most"


@needs_compiler
def test_the_compiled_product_multiplies_and_adds_as_the_instruction_does() -> None:
    """The law that makes the bits: blocks of 512 terms; in each pair after pair, the later term first, all fused."""
    x, y, bias = matrix(9, 1101), matrix(1101, 50, seed=2), matrix(1, 50, seed=3)[0]
    p, q = (np.concatenate([a, np.zeros_like(a[:1])]) for a in (rounded(x).T, rounded(y)))     # 1101 is odd
    wanted = np.zeros((9, 50), np.float32)
    for start in range(0, 1102, 512):
        block = np.zeros((9, 50), np.float32)
        for pair in range(start, min(start + 512, 1102), 2):
            for k in (pair + 1, pair):
                block = (block.astype(np.float64) + p[k][:, None] * q[k]).astype(np.float32)
        wanted = wanted + block if start else block
    found = compiled(x, y, bias, None)
    if has_bfloat16_instruction():                           # it may round between the two products in a way of its own
        assert np.abs(found - (wanted + bias)).max() < 1e-4
    else:
        assert found.tobytes() == (wanted + bias).tobytes()


@needs_compiler
def test_a_row_has_the_same_bits_in_any_batch_and_any_layout() -> None:
    x, y = matrix(65, 700), matrix(700, 530, seed=2)
    whole = compiled(x, y, None, None)
    for rows in (1, 8, 13, 64):
        assert compiled(x[:rows], y, None, None).tobytes() == whole[:rows].tobytes()
    assert compiled(np.asfortranarray(x), np.asfortranarray(y), None, None).tobytes() == whole.tobytes()
    columns = np.ascontiguousarray(y[:, 40:90])
    assert compiled(x, columns, None, None).tobytes() == np.ascontiguousarray(whole[:, 40:90]).tobytes()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("version", versions)
def test_nan_and_infinity_stay_in_their_rows_and_columns(version, turned: bool) -> None:
    x, y = matrix(16, 300, turned), matrix(300, 64, turned, 2)
    x[3, 7], y[299, 49] = np.float32(np.nan), np.inf
    x.view(np.uint32)[5, 8] = 0x7F800001                     # a NaN that rounding its bits would make infinite
    x[6, 9], y[9, 20] = np.finfo(np.float32).max, 1          # beyond the largest bfloat16
    with np.errstate(all="ignore"):
        found = version(x, y, None, None)
    touched = np.zeros((16, 64), bool)
    touched[3], touched[5], touched[6], touched[:, 49] = True, True, True, True
    assert (np.isfinite(found) == ~touched).all() and np.isnan(found[5]).all()


@needs_compiler
def test_no_terms_leave_the_bias() -> None:
    bias = np.arange(40, dtype=np.float32)
    assert (compiled(np.zeros((9, 0), np.float32), np.zeros((0, 40), np.float32), bias, None) == bias).all()


@pytest.mark.parametrize(("dtype", "size", "rounds"), [(np.float32, 256, True), (np.float64, 256, False),
                                                       (np.float32, 40, False)])
def test_only_large_products_of_float32_round_their_operands(dtype: type, size: int, rounds: bool) -> None:
    x, y = matrix(size, size).astype(dtype), matrix(size, size, seed=2).astype(dtype)
    found = product(x, y, operands="bfloat16")
    error = np.abs(found - x.astype(np.float64) @ y).max()
    assert found.dtype == dtype and (error > 1e-3) == rounds
    assert np.abs(product(x, y) - x.astype(np.float64) @ y).max() < 1e-3


def test_a_layer_whose_weight_asks_for_it_rounds_forward_and_both_gradients() -> None:
    from mpitrain import Tensor, nn
    layers = []
    for precision in ("float32", "bfloat16"):
        layer = nn.Linear(256, 192)
        layer.initialize(3, precision)
        assert layer.weight.array.dtype == np.float32
        layers.append(layer)
    inputs = [Tensor(matrix(128, 256), requires_grad=True) for _ in layers]
    grad, weight = matrix(128, 192, seed=5), layers[0].weight.array
    outputs = [layer(x) for layer, x in zip(layers, inputs)]
    for output in outputs:
        output.backward(grad)
    bias = layers[0].bias.array
    exact, near = (
        [p @ q.T + bias, g @ q, g.T @ p] for p, q, g in
        ((inputs[0].array.astype(np.float64), weight.astype(np.float64), grad.astype(np.float64)),
         (rounded(inputs[0].array), rounded(weight), rounded(grad))))
    for layer, x, output, wanted in zip(layers, inputs, outputs, (exact, near)):
        for found, value in zip((output.array, x.grad, layer.weight.grad), wanted):
            assert np.abs(found - value).max() <= 1e-6 * 256 * max(1, np.abs(value).max())
    assert np.abs(exact[0] - near[0]).max() > 1e-4, "the two could not be told apart"
    assert (layers[1].bias.grad == layers[0].bias.grad).all(), "sums over the batch are not rounded"


def test_a_matrix_product_with_a_parameter_rounds_on_either_side() -> None:
    from mpitrain import nn
    layer = nn.Linear(256, 256, bias=False)
    layer.initialize(3, "bfloat16")
    x, w = matrix(256, 256), layer.weight.array
    near = [rounded(x) @ rounded(w), rounded(w) @ rounded(x), rounded(x) @ rounded(w).T]
    for found, wanted in zip((matmul(x, layer.weight), matmul(layer.weight, x), linear(x, layer.weight)), near):
        assert np.abs(found.array - wanted).max() < 1e-4


def test_a_copied_model_keeps_its_precision() -> None:
    import copy

    from mpitrain import nn
    layer = nn.Linear(4, 4)
    storage = layer.initialize(0, "bfloat16")
    twin = copy.deepcopy(layer)
    assert (twin.weight.operands, twin.storage.precision, storage.dtype) == ("bfloat16", "bfloat16", np.float32)
    layer.initialize(0, "float32")
    assert layer.weight.operands == ""


@needs_compiler
@pytest.mark.parametrize(("shape", "rounds"), [
    ((16, 256, 256), True), ((15, 256, 256), False), ((16, 256, 255), False), ((8, 8, 1 << 14), True), ((7, 8, 1 << 15), False),
    ((8, 7, 1 << 15), False)])
def test_products_below_2_to_the_20_multiplications_stay_float32(shape: tuple[int, int, int], rounds: bool) -> None:
    """docs/running.md says so: (M, N, K), M N K >= 2^20 and M, N >= 8."""
    m, n, k = shape
    x, y = matrix(m, k), matrix(k, n, seed=2)
    found = product(x, y, operands="bfloat16")
    np.testing.assert_array_equal(found, module.native_bfloat16(x, y, None, None) if rounds else np.matmul(x, y))
    assert (np.abs(found - x.astype(np.float64) @ y).max() > 1e-3 * k ** 0.5) == rounds
