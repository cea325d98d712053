"""cuDNN's attention without a GPU: what the frontend takes, and, by a stand-in that computes what graphs say, our way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fakegpu import put, xp

from mpitrain.backend import cudnn_attention
from mpitrain.backend.cudnn_attention import STATS, Attention, Key, Operand, attention_of, graph_of, kept_of, logarithms_of
from mpitrain.kernels.flash_attention import flash_attention, flash_attention_grad, join_attention


class Tensor:
    def __init__(self, **known: Any):
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("set_"):
            raise AttributeError(name)
        return lambda value: vars(self).update({name[4:]: value}) or self


class Graph:
    """Computes attention in float64 from the memory that operands name."""

    built = 0

    def __init__(self, **kinds: Any):
        self.tensors: list[Tensor] = []

    def tensor(self, **known: Any) -> Tensor:
        self.tensors.append(Tensor(**known))
        return self.tensors[-1]

    def sdpa(self, **given: Any) -> tuple[Tensor, ...]:
        self.given, results = given, (Tensor(), Tensor())
        self.tensors += results
        return results

    def sdpa_backward(self, **given: Any) -> tuple[Tensor, ...]:
        assert given["use_deterministic_algorithm"]
        self.given, results = given, (Tensor(), Tensor(), Tensor())
        self.tensors += results
        return results

    def __getattr__(self, name: str) -> Any:
        if name not in ("validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans"):
            raise AttributeError(name)
        return lambda *given: None

    def get_workspace_size(self) -> int:
        return 24

    def execute(self, memory: dict[int, Any], room: Any, handle: Any) -> None:
        for tensor in self.tensors:                                       # shapes and strides are those of the memory
            x = memory[tensor.uid]
            assert tensor.stride[:len(x.shape)] == [step // x.itemsize for step in x.strides][:4]
            assert tuple(tensor.dim) in (x.shape, (*x.shape, 1))
        q, k, v = (memory[i].astype(np.float64) for i in (1, 2, 3))
        scores = self.given["attn_scale"] * q @ k.swapaxes(-1, -2)
        if "diagonal_band_right_bound" in self.given:
            scores[..., ~np.tri(*scores.shape[-2:], dtype=bool)] = -np.inf
        if "stats" not in self.given:
            top = scores.max(-1, keepdims=True)
            memory[STATS][...] = (top + np.log(np.exp(scores - top).sum(-1, keepdims=True)))[..., 0]
            memory[4][...] = np.exp(scores - memory[STATS][..., None]) @ v
            return
        out, grad = (memory[i].astype(np.float64) for i in (4, 5))
        weights = np.exp(scores - memory[STATS][..., None])
        slopes = weights * (grad @ v.swapaxes(-1, -2) - (out * grad).sum(-1, keepdims=True)) * self.given["attn_scale"]
        memory[6][...], memory[7][...] = slopes @ k, slopes.swapaxes(-1, -2) @ q
        memory[8][...] = weights.swapaxes(-1, -2) @ grad


class Cudnn:
    data_type = SimpleNamespace(FLOAT="f", BFLOAT16="b", HALF="h")
    diagonal_alignment = SimpleNamespace(TOP_LEFT="corner")
    heur_mode = SimpleNamespace(A="a", FALLBACK="b")
    cudnnGraphNotSupportedError = NotImplementedError                     # noqa: N815

    def __init__(self) -> None:
        self.graphs: list[Graph] = []

    def pygraph(self, **given: Any) -> Graph:
        self.graphs.append(Graph())
        return self.graphs[-1]

    def create_handle(self) -> str:
        return "handle"

    def set_stream(self, handle: str, stream: int) -> None:
        assert (handle, stream) == ("handle", 7)


DEVICE = SimpleNamespace(ordinal=lambda: 0, stream=lambda: 7, capability=lambda: 80, memory=lambda size: None,
                         pointer=lambda x: x._memory, is_aligned=lambda x: True)


def parts(dtype: Any, length: int = 9, width: int = 16) -> tuple[Any, ...]:
    """q, k and v in one array, out, its gradient, and one array for gradients."""
    rng = np.random.default_rng(3)
    qkv = rng.standard_normal((2, length, 3, 2, width)).astype(dtype)
    grad = rng.standard_normal((2, length, 2, width)).astype(dtype)
    return qkv, np.zeros_like(grad), grad


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_values_and_gradients_are_the_references_and_a_graph_is_made_once(dtype: Any, causal: bool) -> None:
    cudnn = Cudnn()
    library = Attention(cudnn, DEVICE)
    host = parts(dtype)
    qkv, out, grad = map(put, host)
    results = put(np.zeros_like(host[0]))
    (q, k, v), (dq, dk, dv) = (x.transpose(2, 0, 3, 1, 4) for x in (qkv, results))
    out, grad = out.swapaxes(1, 2), grad.swapaxes(1, 2)
    for _ in range(2):
        assert library.takes(q, k, v, out)
        known = library.forward(q, k, v, out, 0.3, causal)
        assert known is not None
        assert library.backward((q, k, v, out, grad), *known, 0.3, causal, (dq, None, dv)) and not dk.get().any()
    assert library.backward((q, k, v, out, grad), *known, 0.3, causal, (dq, dk, dv))
    assert len(cudnn.graphs) == 3                                         # without a place for dk, its strides are others
    given = [x.astype(np.float64).swapaxes(1, 2) for x in host]
    q64, k64, v64 = host[0].astype(np.float64).transpose(2, 0, 3, 1, 4)
    expected = np.empty(q64.shape)
    tops, inverses = flash_attention.reference(q64, k64, v64, expected, 0.3, causal)
    np.testing.assert_allclose(out.get().astype(np.float64), expected, atol=3e-2)
    np.testing.assert_allclose(known[0].get() - np.log(known[1].get()), tops - np.log(inverses), rtol=1e-5, atol=1e-5)
    right = [np.empty(q64.shape) for _ in range(3)]
    flash_attention_grad.reference(q64, k64, v64, expected, given[2], tops, inverses, 0.3, causal, *right)
    for made, wanted in zip((dq, dk, dv), right):
        np.testing.assert_allclose(made.get().astype(np.float64), wanted, atol=6e-2)


def test_what_is_kept_joins_as_that_of_our_kernels_does() -> None:
    rng = np.random.default_rng(5)
    q, k, v = rng.standard_normal((3, 1, 2, 6, 8))
    outs = np.empty((3, 1, 2, 6, 8))
    known = [flash_attention.reference(q, k[:, :, part], v[:, :, part], out, 0.4, False)
             for part, out in zip((slice(0, 2), slice(2, 6), slice(0, 6)), outs)]
    first, second = (kept_of(logarithms_of(*x)) for x in known[:2])
    assert set(first[1].ravel()) == {1.0}
    join_attention.reference(outs[0], *first, outs[1], *second)
    np.testing.assert_allclose(outs[0], outs[2], atol=1e-12)


def test_a_query_without_weights_keeps_zeros_and_weighs_nothing() -> None:
    tops, inverses = kept_of(np.array([-np.inf, 1.5, np.nan]))
    assert tops[:2].tolist() == [0, 1.5] and inverses[:2].tolist() == [0, 1] and np.isnan(tops[2])
    assert logarithms_of(tops, inverses)[:2].tolist() == [np.inf, 1.5]


def test_arrays_that_it_would_misread_or_that_are_too_wide_are_not_taken() -> None:
    library = Attention(Cudnn(), DEVICE)

    def head(width: int, dtype: Any = np.float16, step: int = 0) -> Any:
        return put(np.zeros((1, 1, 4, width + step), dtype))[..., :width]
    assert library.takes(head(128)) and library.takes(head(8, step=8))
    assert not library.takes(head(136)) and not library.takes(head(12)) and not library.takes(head(8, step=4))
    assert not library.takes(head(8, np.float32)) and not library.takes(head(16)[..., ::2])
    assert Attention(Cudnn(), SimpleNamespace(**{**vars(DEVICE), "capability": lambda: 90})).takes(head(256))
    assert attention_of("fakegpu") is None and xp is not None


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_frontend_takes_our_graphs_with_interleaved_strides(causal: bool, backward: bool) -> None:
    cudnn = pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")
    one, out = Operand((2, 3, 70, 64), (70 * 576, 64, 576, 1)), Operand((2, 3, 70, 64), (70 * 192, 64, 192, 1))
    graph = graph_of(cudnn, Key("bfloat16", (one, one, one, out, *((out, one, one, one) if backward else ())), causal, 0.125))
    graph.validate()
    made = {uid: graph.find_tensor(uid) for uid in ((6, 7, 8) if backward else (4, STATS))}
    assert {uid: tuple(x.stride) for uid, x in made.items()} == (
        dict.fromkeys((6, 7, 8), one.strides) if backward else {4: out.strides, STATS: (210, 70, 1, 1)})
    assert backward or made[STATS].data_type == cudnn.data_type.FLOAT


@pytest.mark.parametrize("installed", [True, False])
def test_a_frontend_without_its_library_is_as_none(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def version() -> int:
        if not installed:
            raise RuntimeError("Unable to find symbol cudnnGetVersion")
        return 91900
    monkeypatch.setattr(cudnn_attention, "find_spec", lambda name: name)
    monkeypatch.setattr(cudnn_attention, "import_module", lambda name: SimpleNamespace(backend_version=version))
    monkeypatch.setitem(cudnn_attention.DEVICES, "cupy", SimpleNamespace)
    assert (cudnn_attention.attention_of.__wrapped__("cupy") is not None) == installed
