"""Attention on a device, run on the CPU: against PyTorch's, twice, with weights dropped, with NaN, and what it refuses."""

from __future__ import annotations

from typing import Any

import device_counts
import ml_dtypes
import numpy as np
import pytest
from device_on_host import compiler
from fakegpu import put
from kernel_examples import KEY

from mpitrain.errors import ShapeError
from mpitrain.kernels.device import version_of
from mpitrain.kernels.dropout import Dropping
from mpitrain.kernels.flash_attention import flash_attention

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
LEAST = {"float32": 3e-6, "float64": 1e-13, "float16": 2e-3, "bfloat16": 2e-2}


def interleaved(dtype: Any, length: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    return (rng.standard_normal((2, length, 3, 2, width)).astype(dtype), rng.standard_normal((2, length, 2, width)).astype(dtype))


def parts(x: Any) -> Any:
    return x.transpose(2, 0, 3, 1, 4)


def run(qkv: np.ndarray, grad: np.ndarray, causal: bool, dropping: Dropping | None = None) -> tuple[np.ndarray, np.ndarray]:
    """out (B, L, H, D), and the gradient of qkv."""
    attend, gradient = version_of("flash_attention"), version_of("flash_attention_grad")
    assert attend is not None and gradient is not None
    given, slope = put(qkv), put(grad)
    out, result = put(np.full_like(grad, np.nan)), put(np.full_like(qkv, np.nan))
    known = attend(*parts(given), out.swapaxes(1, 2), 0.25, causal, dropping)
    gradient(*parts(given), out.swapaxes(1, 2), slope.swapaxes(1, 2), *known, 0.25, causal, *parts(result), dropping)
    return out.get(), result.get()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [np.dtype("float32"), np.dtype("float64"), np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)])
def test_it_is_torchs_of_an_interleaved_array_with_the_same_bits_each_time_and_no_copy(dtype: Any, causal: bool) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    qkv, grad = interleaved(dtype, 67, 24)
    with device_counts.counted() as counts:
        out, result = run(qkv, grad, causal)
    assert counts.n_launches == 4                                         # forward, sums of queries, gradients of both sides
    for first, second in zip((out, result), run(qkv, grad, causal)):
        assert first.tobytes() == second.tobytes()
    given = torch.tensor(qkv.astype("float64"), requires_grad=True)
    expected = torch.nn.functional.scaled_dot_product_attention(*given.permute(2, 0, 3, 1, 4), is_causal=causal, scale=0.25)
    expected.backward(torch.tensor(grad.astype("float64")).transpose(1, 2))
    for made, wanted in ((out, expected.detach().transpose(1, 2).numpy()), (result, given.grad.numpy())):
        assert np.abs(made.astype("float64") - wanted).max() <= LEAST[dtype.name] * np.abs(wanted).max()


def test_the_weights_that_are_dropped_are_the_hosts() -> None:
    """With values that are an identity matrix, what comes out are the weights."""
    rng = np.random.default_rng(2)
    q, k = rng.standard_normal((2, 2, 3, 37, 16)).astype("float32")
    values = np.broadcast_to(np.eye(37, dtype="float32"), (2, 3, 37, 37))
    one, other = Dropping(np.array([5, 1 << 40], np.uint64), KEY, 0.4, 3), Dropping(np.array([0, 9], np.uint64), 1, 0.7)
    for dropping, key in ((one, KEY), (other, 1), (one, put(np.array([KEY], np.uint64)))):
        host, out = np.empty((2, 3, 37, 37), "float32"), put(np.empty((2, 3, 37, 37), "float32"))
        flash_attention(q, k, values, host, 0.3, False, dropping)
        attend = version_of("flash_attention")
        assert attend is not None
        attend(*map(put, (q, k, values)), out, 0.3, False, Dropping(put(dropping.rows), key, dropping.p, dropping.part))
        assert ((host == 0) == (out.get() == 0)).all() and 0.2 < (host == 0).mean() < 0.8
        np.testing.assert_allclose(out.get(), host, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.dtype("float32"), np.dtype("float16")])
def test_nan_of_a_key_reaches_those_who_see_it_and_none_before_its_tile(dtype: Any) -> None:
    qkv, grad = interleaved(dtype, 130, 16)
    clean, _ = run(qkv, grad, True)
    qkv[:, 128, 1] = np.nan                                               # a key in the third tile of queries and keys
    out, _ = run(qkv, grad, True)
    assert np.isnan(out[:, 128:]).all()
    assert out[:, :128].tobytes() == clean[:, :128].tobytes()


def test_a_query_whose_scores_are_all_minus_infinity_gets_zeros_and_gives_none() -> None:
    for dtype in (np.dtype("float32"), np.dtype("float16")):
        qkv, grad = interleaved(dtype, 5, 16)
        qkv[:, :, 1, :, 0], qkv[:, :, 0, :, 0] = np.inf, 1
        qkv[:, 2, 0, :, 0] = -np.inf
        out = put(np.full_like(grad, np.nan))
        attend = version_of("flash_attention")
        assert attend is not None
        tops, inverses = attend(*parts(put(qkv)), out.swapaxes(1, 2), 0.25, False)
        assert not out.get()[:, 2].any() and not tops.get()[:, :, 2].any() and not inverses.get()[:, :, 2].any()


def test_what_a_kernel_would_misread_is_refused() -> None:
    attend = version_of("flash_attention")
    assert attend is not None
    x = put(np.zeros((1, 1, 4, 16), "float32"))
    with pytest.raises(TypeError, match="argument 3 has rows with gaps"):
        attend(x, x, x, put(np.zeros((1, 1, 4, 32), "float32"))[..., ::2], 1.0, False)
    with pytest.raises(TypeError, match=r"argument 3 has shape \(1, 1, 3, 16\), and the numbers of the call say \(1, 1, 4, 16\)"):
        attend(x, x, x, x[:, :, :3], 1.0, False)
    wide = put(np.zeros((1, 1, 4, 257), "float32"))
    with pytest.raises(ShapeError, match="heads are 257 wide, and kernels of a device take 256 at most"):
        attend(wide, wide, wide, wide, 1.0, False)
