"""Convolutions, products and attention of bfloat16 numbers: their bits are those of the same C without the CPU's instruction."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.backend import native
from mpitrain.kernels import convolution, product
from mpitrain.kernels import convolution_bfloat16 as module
from mpitrain.kernels import flash_attention_bfloat16 as attention
from mpitrain.kernels.convolution import Window
from mpitrain.kernels.flash_attention import BACKWARD, FORWARD, run_backward, run_forward
from mpitrain.kernels.library import Scratch, bind
from mpitrain.kernels.product import has_bfloat16_instruction, rounded

needs_instruction = pytest.mark.skipif(not has_bfloat16_instruction(), reason="no AVX512-BF16, or no compiler that knows it")
# images, channels, outputs, size, kernel, stride, padding, dilation, groups
CASES = [(4, 16, 16, 9, 3, 1, 1, 1, 1), (5, 3, 16, 9, 3, 1, 1, 1, 1), (3, 10, 6, 8, 3, 2, 1, 1, 2), (1, 8, 24, 5, 1, 1, 0, 1, 1),
         (2, 5, 7, 11, 5, 1, 2, 1, 1), (7, 6, 40, 12, 3, 2, 2, 2, 1), (2, 33, 35, 6, 2, 1, 0, 1, 1)]
KERNELS = (module.convolve_bfloat16, module.convolve_adjoint_bfloat16, module.kernel_gradient_bfloat16)


def normal(rng: Any, *shape: int) -> np.ndarray:
    made: np.ndarray = rng.standard_normal(shape).astype(np.float32)
    return made


def calls(case: tuple[int, ...]) -> list[tuple[Any, ...]]:
    """Arguments of the three kernels."""
    n, channels, outputs, size, kernel, stride, padding, dilation, groups = case
    rng, window = np.random.default_rng(sum(case)), Window((kernel,) * 2, (stride,) * 2, (padding,) * 2, (dilation,) * 2)
    x, weight = normal(rng, n, channels, size, size + 1), normal(rng, outputs, channels // groups, kernel, kernel)
    y = normal(rng, n, outputs, *window.outputs(size, size + 1))
    return [(x, weight, normal(rng, outputs), window, groups), (y, weight, normal(rng, channels), window, groups, x.shape[2:]),
            (x, y, window, groups, None, "y")]


def arrays(result: Any) -> list[np.ndarray]:
    return [a for a in (result if isinstance(result, tuple) else (result,)) if a is not None]


@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_float64_of_rounded_numbers(case: tuple[int, ...]) -> None:
    exact = (convolution.convolve, convolution.convolve_adjoint, convolution.kernel_gradient)
    for kernel, in_float64, arguments in zip(KERNELS, exact, calls(case)):
        if kernel.host() is None:
            pytest.skip(f"no compiled version: {native.missing()}")
        wide = [a if i == 2 or not isinstance(a, np.ndarray) else rounded(a) for i, a in enumerate(arguments)]
        wide = [a.astype(np.float64) if isinstance(a, np.ndarray) else a for a in wide]
        found, wanted = arrays(kernel(*arguments)), arrays(in_float64.reference(*wide))
        assert np.abs(found[0] - wanted[0]).max() < 1e-6 * np.abs(wanted[0]).max()
        if len(found) > 1:                        # what is summed for a bias is not rounded
            np.testing.assert_allclose(found[1], arguments[1].sum(axis=(0, 2, 3), dtype=np.float64), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Loads libraries as `native.load` does, those of bfloat16 compiled without the instruction."""
    folder, cc = tmp_path_factory.mktemp("twin"), native.compiler()
    assert cc is not None
    made: dict[str, ctypes.CDLL] = {}

    def load(name: str) -> Any:
        if not name.endswith("_bfloat16"):
            return native.load(name)
        if name not in made:
            made[name] = library = ctypes.CDLL(str(compiled(folder, name, cc)))
            assert not getattr(library, f"{name}_is_fast")()
        return made[name]
    return load


def compiled(folder: Path, name: str, cc: tuple[str, ...]) -> Path:
    made = folder / f"{name}.so"
    source = native.source_folder() / f"{name}.c"
    subprocess.run([*cc, *native.FLAGS, "-mno-avx512bf16", "-o", str(made), str(source), "-lm"], check=True)
    return made


@needs_instruction
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_the_twin(case: tuple[int, ...], twin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("forward_bfloat16", "adjoint_bfloat16", "kernel_gradient_bfloat16")
    runs = (convolution.run_forward, convolution.run_adjoint, convolution.run_gradient)
    signatures = [text.replace("X", "F") for text in (module.FORWARD, module.FORWARD, module.GRADIENT)]
    for name, run, signature, kernel, arguments in zip(names, runs, signatures, KERNELS, calls(case)):
        with monkeypatch.context() as patch:
            patch.setattr("mpitrain.kernels.library.native.load", twin)
            call: Any = bind(module.LIBRARY, name, signature, answers=True)
        for a, b in zip(arrays(kernel(*arguments)), arrays(run(call, *arguments)), strict=True):
            assert a.tobytes() == b.tobytes()


@needs_instruction
def test_products_have_the_bits_of_the_twin_but_for_denormals(twin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    native_load = native.load
    monkeypatch.setattr("mpitrain.kernels.library.native.load", lambda name: (
        twin if name == "product_bfloat16" else native_load)(name))
    call: Any = bind("product_bfloat16", "product_bfloat16", product.SIGNATURE.replace("X", "F"))
    monkeypatch.undo()
    run, ours = partial(product._packing, Scratch(), lambda: 2 << 20, call), product.native_bfloat16.host()
    assert ours is not None
    rng = np.random.default_rng(0)
    for m, n, k, scale in itertools.product((1, 9, 64), (1, 49, 100), (3, 512, 1025), (1e-15, 1.0, 1e14)):
        x, y = normal(rng, m, k) * np.float32(scale), normal(rng, k, n)
        assert ours(x, y, None, None).tobytes() == run(x, y, None, None).tobytes()
    tiny = np.full((8, 8), 1e-20, np.float32)
    assert (ours(tiny, tiny, None, None) == 0).all(), "the instruction makes zeros of results below 2^-126"
    assert (run(tiny, tiny, None, None) > 0).all()
    low, large = np.full((8, 8), 1e-39, np.float32), np.full((8, 8), 1e30, np.float32)
    assert (ours(low, large, None, None) == 0).all(), "and takes operands below 2^-126 for zeros"
    assert (run(low, large, None, None) > 0).all()


@needs_instruction
@pytest.mark.parametrize("queries, keys, width, values, causal", [
    (64, 64, 64, 64, True), (70, 70, 19, 19, True), (33, 131, 16, 40, False), (1, 5, 3, 2, False), (150, 150, 48, 33, True)])
def test_attention_has_the_bits_of_the_twin(queries: int, keys: int, width: int, values: int, causal: bool, twin: Any,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("mpitrain.kernels.library.native.load", twin)
        slow: Any = [bind(attention.LIBRARY, f"{name}_bfloat16", signature.replace("X", "F")) for name, signature in (
            ("forward", FORWARD), ("backward", BACKWARD))]
    rng = np.random.default_rng(queries + width)
    q, k, v, grad = (normal(rng, 2, 3, *shape) for shape in ((queries, width), (keys, width), (keys, values), (queries, values)))
    found, ours = [], (attention.flash_attention_bfloat16, attention.flash_attention_grad_bfloat16)
    theirs = partial(run_forward, attention.LIBRARY, slow[0]), partial(run_backward, attention.LIBRARY, slow[1])
    for forward, backward in (ours, theirs):
        out, grads = np.empty((2, 3, queries, values), np.float32), [np.empty_like(x) for x in (q, k, v)]
        known = forward(q, k, v, out, 0.3, causal, None)
        backward(q, k, v, out, grad, *known, 0.3, causal, *grads, None)
        found.append([x.tobytes() for x in (out, *known, *grads)])
    assert found[0] == found[1]


class Rounded(Tensor):
    operands = "bfloat16"


def test_an_operation_rounds_where_its_weight_says_so() -> None:
    rng = np.random.default_rng(0)
    x, weight = Tensor(normal(rng, 2, 4, 6, 6), requires_grad=True), Rounded(normal(rng, 8, 4, 3, 3), requires_grad=True)
    exact = ops.conv2d(x, weight.array, padding=1)
    for op, arguments in ((ops.conv2d, {"padding": 1}), (ops.conv_transpose2d, {"groups": 1})):
        given = x if op is ops.conv2d else Tensor(normal(rng, 2, 8, 6, 6), requires_grad=True)
        found = op(given, weight, **arguments)
        plain = Tensor(rounded(weight.array), requires_grad=True)
        wanted = op(Tensor(rounded(given.array), requires_grad=True), plain, **arguments)
        np.testing.assert_allclose(found.array, wanted.array, rtol=1e-5, atol=1e-5)
        grad = rounded(normal(rng, *found.shape))
        weight.grad = None
        ops.sum(found * grad).backward()
        ops.sum(wanted * grad).backward()
        np.testing.assert_allclose(weight.grad, plain.grad, rtol=1e-5, atol=1e-4)
    assert 1e-4 < np.abs(ops.conv2d(x, weight, padding=1).array - exact.array).max() < 0.2
    deep = Rounded(normal(rng, 4, 1, 3, 3))       # depthwise convolutions stay exact
    assert ops.conv2d(x, deep, groups=4).array.tobytes() == ops.conv2d(x, deep.array, groups=4).array.tobytes()
