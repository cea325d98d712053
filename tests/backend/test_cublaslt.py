"""Products by cuBLASLt: operands, leading dimensions and endings as a stand-in for the library reads them, by columns.

The real library's descriptors, too, where it is installed: they need no GPU.
"""

from __future__ import annotations

import ctypes
import itertools
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fakecublaslt import EPILOGUE_BGRADB, FakeCublasLt
from fakegpu import counted, put, runtime, xp

from mpitrain import models, nn
from mpitrain.backend import Device, cublaslt
from mpitrain.backend.cublaslt import CublasLt
from mpitrain.backend.runtime import Operand, ProductForm
from mpitrain.errors import ShapeError
from mpitrain.kernels.device.product import multiply
from mpitrain.kernels.linear import linear, linear_gradients
from mpitrain.kernels.product import product, products
from mpitrain.kernels.rows import cross_entropy, cross_entropy_grad

DTYPES = {"float32": np.dtype("float32"), "float64": np.dtype("float64"), "float16": np.dtype("float16"),
          "bfloat16": np.dtype(ml_dtypes.bfloat16)}
TOLERANCE = {"float32": 2e-6, "float64": 1e-14, "float16": 2e-3, "bfloat16": 1e-2}      # of the largest number of a result
STREAM, WORKSPACE = 0x77, 0x100000


class ByTheLibrary:
    """The stand-in's products, launched through our file on a stand-in for the library."""

    def __init__(self) -> None:
        self.library = FakeCublasLt()
        self.products = CublasLt(self.library)

    def product(self, form: ProductForm, x: Any, y: Any, out: Any, bias: Any, alpha: float, beta: float) -> bool:
        addresses = [0 if array is None else array._memory.ctypes.data for array in (x, y, out, bias)]
        return self.products.run(form, tuple(addresses), alpha, beta, STREAM, WORKSPACE)


@pytest.fixture(params=["library", "stand-in", "kernel"])
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Who makes the products: our calls of cuBLASLt, the stand-in's NumPy, and a kernel of ours where no library serves."""
    if request.param == "stand-in":
        return None
    way: Any = ByTheLibrary() if request.param == "library" else None
    monkeypatch.setattr(runtime, "product", way.product if way else lambda *_: False)
    return way


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeCublasLt:
    way = ByTheLibrary()
    monkeypatch.setattr(runtime, "product", way.product)
    return way.library


def numbers(*shape: int, dtype: Any = "float32", seed: int = 0) -> Any:
    return put(np.random.default_rng(seed).standard_normal(shape).astype(DTYPES[dtype]))


def stored(x: Any, how: str) -> Any:
    """The same matrices, lying otherwise: by rows, by columns, or as part of larger ones of either kind."""
    values = x.get()
    if how == "rows":
        return put(values)
    if how == "columns":
        return put(np.ascontiguousarray(values.swapaxes(-1, -2))).swapaxes(-1, -2)
    wide = np.zeros((*values.shape[:-2], values.shape[-2] + 3, values.shape[-1] + 5), values.dtype)
    wide[..., 2:-1, 1:-4] = values
    if how == "part":
        return put(wide)[..., 2:-1, 1:-4]
    return put(np.ascontiguousarray(wide.swapaxes(-1, -2)))[..., 1:-4, 2:-1].swapaxes(-1, -2)


def close(found: Any, wanted: np.ndarray, dtype: str) -> None:
    got = found.get().astype("float64")
    assert got.shape == wanted.shape
    assert np.abs(got - wanted).max() <= TOLERANCE[dtype] * np.abs(wanted).max()


def wide(x: Any) -> np.ndarray:
    return x.get().astype("float64")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("of_x", "of_y"), [*itertools.product(("rows", "columns", "part", "part of columns"), repeat=2)])
def test_a_product_is_right_however_its_operands_lie(way: Any, of_x: str, of_y: str, dtype: str) -> None:
    x, y, bias = numbers(7, 21, dtype=dtype), numbers(21, 13, dtype=dtype, seed=1), numbers(13, dtype=dtype, seed=2)
    x, y = stored(x, of_x), stored(y, of_y)
    close(multiply(x, y), wide(x) @ wide(y), dtype)
    close(multiply(x, y, bias), wide(x) @ wide(y) + wide(bias), dtype)
    out = numbers(9, 17, dtype=dtype, seed=3)[1:8, 2:15]                               # with gaps: a leading dimension of 17
    before = wide(out)
    assert multiply(x, y, out=out, alpha=-0.5, beta=2.0) is out
    close(out, 2 * before - 0.5 * (wide(x) @ wide(y)), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_of_16_bits_are_added_to_sums_of_float32(way: Any, dtype: str) -> None:
    x, y, out = numbers(40, 7, dtype=dtype), numbers(40, 13, dtype=dtype, seed=1), numbers(7, 13)
    before = wide(out)
    for step in (1, 2, 3):
        multiply(x.T, y, out=out, beta=1.0)
        close(out, before + step * (wide(x).T @ wide(y)), "float32")


@pytest.mark.parametrize("dtype", DTYPES)
def test_batches_lie_as_they_like(way: Any, dtype: str) -> None:
    x, y = numbers(2, 3, 7, 21, dtype=dtype), numbers(2, 3, 21, 13, dtype=dtype, seed=1)
    for left, right in [(x, y), (stored(x, "part"), stored(y, "columns")), (x.swapaxes(0, 1), y.swapaxes(0, 1)),
                        (x[:, :1], y), (x, y[0, 0]), (x[0], y), (x.transpose(1, 0, 3, 2), numbers(7, 5, dtype=dtype))]:
        close(products(left, right), wide(left) @ wide(right), dtype)
    for repeated in (xp.broadcast_to(numbers(7, 1, dtype=dtype), (7, 21)), xp.broadcast_to(numbers(21, dtype=dtype), (7, 21))):
        close(products(repeated, y), wide(repeated) @ wide(y), dtype)
    heads = numbers(2, 70, 3, 19, dtype=dtype).swapaxes(1, 2)                          # (B, H, L, D) cut out of (B, L, H, D)
    close(products(heads[:1], heads[:1].swapaxes(-1, -2)), wide(heads[:1]) @ wide(heads[:1]).swapaxes(-1, -2), dtype)


def test_what_strides_can_say_is_not_copied(library: FakeCublasLt) -> None:
    x = numbers(3, 5, 2, 4)
    with counted() as counts:
        products(x[0].swapaxes(0, 1), x[0].transpose(1, 2, 0))     # matrices of a batch that lie between each other
        multiply(numbers(6, 9)[:, 2:6], numbers(5, 4).T)
    assert counts.n_launches == 0 and len(library.launches) == 2
    assert library.launches[0] == (STREAM, WORKSPACE, cublaslt.WORKSPACE)


def test_gelu_and_sums_of_rows_are_made_with_the_product(library: FakeCublasLt) -> None:
    x, y, bias = numbers(7, 21), numbers(21, 13, seed=1), numbers(13, seed=2)
    before = wide(x) @ wide(y) + wide(bias)
    gelu = 0.5 * before * (1 + np.tanh(np.sqrt(2 / np.pi) * (before + 0.044715 * before ** 3)))
    close(multiply(x, y, bias, ending="gelu_tanh"), gelu, "float32")
    sums, grad = numbers(7), numbers(40, 7, dtype="bfloat16")
    by_weight = numbers(7, 13)
    multiply(grad.T, numbers(40, 13, dtype="bfloat16"), sums, by_weight, ending="row_sums")
    close(sums, wide(grad).sum(axis=0), "float32")
    library.unsupported.add(EPILOGUE_BGRADB)
    assert multiply(grad.T, numbers(40, 12, dtype="bfloat16"), sums, numbers(7, 12), ending="row_sums") is None


def test_a_plan_is_made_once_for_each_form_and_alignment_and_its_algorithm_is_the_first(library: FakeCublasLt) -> None:
    x, y = numbers(8, 16), numbers(16, 32)
    for _ in range(3):
        multiply(x, y)
    assert library.calls.count("cublasLtMatmulAlgoGetHeuristic") == 1 and library.calls.count("cublasLtMatmul") == 3
    multiply(numbers(8, 17)[:, 1:], y)                                 # 4 bytes off: x, the second operand
    assert library.preferences[1][6] == 4 and library.preferences[0][6] >= 16
    before = library.calls.count("cublasLtMatmulAlgoGetHeuristic")
    product(x, y, operands="tf32")
    assert library.calls.count("cublasLtMatmulAlgoGetHeuristic") == before + 1
    assert {of["compute"] for of in library.objects.values() if of["kind"] == "desc"} == {68, 77}      # TF32 by its name alone


def test_a_model_in_tf32_has_all_its_products_so_and_all_else_in_float32(library: FakeCublasLt) -> None:
    """CUBLAS_COMPUTE_32F_FAST_TF32 is 77; launches are float32's."""
    tokens, launches = put(np.arange(12).reshape(2, 6)), []
    for precision, compute in (("float32", 68), ("tf32", 77)):
        library.objects = {at: of for at, of in library.objects.items() if of["kind"] != "desc"}
        model = models.gpt(layers=1, heads=2, width=8, block=6, vocabulary=17, bias=True, activation="gelu_tanh")
        storage = model.initialize(seed=1, dtype=precision, device=Device("gpu", xp))
        before = library.calls.count("cublasLtMatmul")
        with counted() as counts:
            nn.LOSSES["cross_entropy"]()(model(tokens), tokens).backward()
        assert {of["compute"] for of in library.objects.values() if of["kind"] == "desc"} == {compute}
        assert library.calls.count("cublasLtMatmul") - before == 15          # four layers and the head, three each
        assert {storage.dtype, storage.compute_dtype, *(p.grad.dtype for p in model.parameters())} == {DTYPES["float32"]}
        launches.append(counts.launches)
    assert launches[0] == launches[1]


def test_on_the_host_tf32_is_float32() -> None:
    """As where a run is evaluated or exported without a GPU."""
    made = [models.mlp(inputs=4, hidden=[8], outputs=3) for _ in range(2)]
    for model, precision in zip(made, ("tf32", "float32")):
        model.initialize(seed=1, dtype=precision)
        assert {p.operands for p in model.parameters()} == {""}
    x = np.random.default_rng(1).standard_normal((5, 4)).astype("float32")
    assert made[0](x).array.tobytes() == made[1](x).array.tobytes()


def test_parts_of_sums_are_added_in_float32_whatever_the_result_is_written_in(library: FakeCublasLt) -> None:
    for out in ("bfloat16", "float32"):
        multiply(numbers(8, 16, dtype="bfloat16"), numbers(16, 8, dtype="bfloat16"), out=numbers(8, 8, dtype=out))
    assert [found.get(3) for found in library.preferences] == [2, None]       # CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE alone


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_all_three_products_of_an_odd_vocabulary_have_aligned_rows(library: FakeCublasLt, dtype: str) -> None:
    """Of GPT-2's head and its loss, as 50,257 is odd: tensor cores load 16 bytes at once where rows begin at such places."""
    x, weight, labels = numbers(16, 24, dtype=dtype), numbers(1031, 24, dtype=dtype, seed=1), put(np.arange(16))
    logits, _ = linear(x, weight, None, None, True)
    close(logits, wide(x) @ wide(weight).T, dtype)
    _, kept, totals = cross_entropy(logits, labels, 0.0, None, True)
    assert kept is logits
    grad = cross_entropy_grad(kept, labels, totals, 0.0, None, put(np.ones((), "float32")))
    by_weight = numbers(1031, 24)
    with counted() as counts:
        _, by_x = linear_gradients(grad, None, x, weight, None, None, by_weight, True)
    assert not counts.n_launches, "nothing is copied: cuBLASLt's launches are not the stand-in's"
    close(by_x, wide(grad) @ wide(weight), dtype)
    close(by_weight, wide(grad).T @ wide(x), "float32")
    layouts = [of for of in library.objects.values() if of["kind"] == "layout"]
    assert len(layouts) == 9 and 1088 in {of["ld"] for of in layouts} and all(of["ld"] % 8 == 0 for of in layouts)
    assert {found[place] % 16 for found in library.preferences for place in (5, 6, 7, 8)} == {0}          # alignments


def test_operands_are_rounded_on_a_device_too(way: Any) -> None:
    x, y = numbers(7, 21), numbers(21, 13, seed=1)
    rounded = [part.get().astype(ml_dtypes.bfloat16).astype("float64") for part in (x, y)]
    found = product(x, y, operands="bfloat16")
    assert found.dtype == "float32"
    close(found, rounded[0] @ rounded[1], "float32")
    assert np.abs(wide(found) - wide(x) @ wide(y)).max() > 1e-4


def test_sums_of_nothing(way: Any) -> None:
    bias, out = numbers(5), numbers(3, 5)
    before = wide(out)
    close(multiply(numbers(3, 0), numbers(0, 5), bias), np.tile(wide(bias), (3, 1)), "float32")
    close(multiply(numbers(3, 0), numbers(0, 5), out=out, beta=2.0), 2 * before, "float32")
    assert multiply(numbers(0, 4), numbers(4, 5)).shape == (0, 5)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"shapes \(3, 4\) and \(5, 6\) do not fit"):
        multiply(numbers(3, 4), numbers(5, 6))
    with pytest.raises(ShapeError, match=r"is \(3, 5\), and out is \(5, 3\)"):
        multiply(numbers(3, 4), numbers(4, 5), out=numbers(5, 3))
    with pytest.raises(TypeError, match="float32 and float64 in an array of float32"):
        multiply(numbers(3, 4), numbers(4, 5, dtype="float64"))
    with pytest.raises(TypeError, match="float16 and float16 in an array of bfloat16"):
        multiply(numbers(3, 4, dtype="float16"), numbers(4, 5, dtype="float16"), out=numbers(3, 5, dtype="bfloat16"))


def test_a_status_is_told_in_one_line() -> None:
    fake = FakeCublasLt()
    fake.statuses["cublasLtCreate"] = 7
    with pytest.raises(RuntimeError, match=r"^cublasLtCreate: CUBLAS_STATUS_INVALID_VALUE \(7\)$"):
        CublasLt(fake)
    fake.statuses = {"cublasLtMatmul": 7}
    one = Operand(False, 1)
    x = np.ones(1, "float32")
    with pytest.raises(RuntimeError, match="^cublasLtMatmul: CUBLAS_STATUS_INVALID_VALUE"):
        CublasLt(fake).run(ProductForm(1, 1, 1, 1, one, one, one, "float32", "float32"), (*[x.ctypes.data] * 3, 0), 1, 0, 0, 0)


@pytest.fixture(scope="module")
def real() -> ctypes.CDLL:
    found = cublaslt.load()
    if found is None:
        pytest.skip("cuBLASLt is not installed (nvidia-cublas-cu12)")
    for name, types in cublaslt.FUNCTIONS.items():
        getattr(found, name).argtypes = types
    return found


@pytest.mark.parametrize(("make", "kind", "attributes"), [
    (("MatmulDesc", 68, 0), "MatmulDesc",
     {cublaslt.TRANSA: 4, cublaslt.TRANSB: 4, cublaslt.EPILOGUE: 4, cublaslt.BIAS_POINTER: 8}),
    (("MatrixLayout", 14, 8, 4, 8), "MatrixLayout", {cublaslt.BATCH_COUNT: 4, cublaslt.BATCH_STEP: 8}),
    (("MatmulPreference",), "MatmulPreference", {cublaslt.MOST_BYTES: 8, **dict.fromkeys(
        (cublaslt.SCHEMES, *cublaslt.ALIGNMENTS), 4)})])
def test_the_library_takes_our_attributes_and_gives_them_back(real: ctypes.CDLL, make: Any, kind: str,
                                                              attributes: dict[int, int]) -> None:
    made = ctypes.c_void_p()
    assert getattr(real, f"cublasLt{make[0]}Create")(ctypes.byref(made), *make[1:]) == 0
    read = getattr(real, f"cublasLt{kind}GetAttribute")
    read.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    for attribute, size in attributes.items():
        value, back, needed = (ctypes.c_char * size)(1), (ctypes.c_char * size)(), ctypes.c_size_t()
        write = getattr(real, f"cublasLt{kind}SetAttribute")
        assert write(made, attribute, ctypes.byref(value), size) == 0
        assert write(made, attribute, ctypes.byref(value), size // 2) != 0
        assert read(made, attribute, ctypes.byref(back), size, ctypes.byref(needed)) == 0
        assert bytes(back) == bytes(value) and needed.value == size


def test_numbers_are_those_of_the_headers(real: ctypes.CDLL) -> None:
    folder = Path(real._name).parents[1] / "include"
    if not (folder / "cublasLt.h").exists():
        pytest.skip("the library came without its headers")
    text = (folder / "cublasLt.h").read_text() + (folder / "cublas_api.h").read_text()

    def value(name: str) -> int:
        found = re.search(rf"\b{name} = ([^,\n/]+)", text)
        assert found is not None, name
        return eval(re.sub(r"CUBLAS\w+", lambda other: str(value(other[0])), found[1]))     # the header's own expression
    assert [value(f"CUBLASLT_MATMUL_DESC_{name}") for name in ("TRANSA", "TRANSB", "EPILOGUE", "BIAS_POINTER")] == [
        cublaslt.TRANSA, cublaslt.TRANSB, cublaslt.EPILOGUE, cublaslt.BIAS_POINTER]
    assert [value(f"CUBLASLT_EPILOGUE_{name}") for name in ("DEFAULT", "BIAS", "GELU", "GELU_BIAS", "BGRADB")] == [
        *cublaslt.EPILOGUES.values()]
    assert [value(f"CUBLASLT_MATRIX_LAYOUT_{name}") for name in ("BATCH_COUNT", "STRIDED_BATCH_OFFSET")] == [
        cublaslt.BATCH_COUNT, cublaslt.BATCH_STEP]
    assert [value(f"CUBLASLT_MATMUL_PREF_{name}") for name in (
        "MAX_WORKSPACE_BYTES", "REDUCTION_SCHEME_MASK", *(f"MIN_ALIGNMENT_{x}_BYTES" for x in "ABCD"))] == [
            cublaslt.MOST_BYTES, cublaslt.SCHEMES, *cublaslt.ALIGNMENTS]
    assert value("CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE") == cublaslt.IN_SUMS_FORMAT
    assert [value(f"CUBLAS_COMPUTE_{name}") for name in ("32F", "64F", "32F_FAST_TF32")] == [
        cublaslt.COMPUTE[name] for name in ("float32", "float64", "tf32")]
    assert (value("CUBLAS_STATUS_SUCCESS"), value("CUBLAS_STATUS_NOT_SUPPORTED")) == (cublaslt.OK, cublaslt.NOT_SUPPORTED)
    assert ctypes.sizeof(cublaslt.Found) == 96 and cublaslt.Found.state.offset == 72
