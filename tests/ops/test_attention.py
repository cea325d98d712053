"""Attention against PyTorch, masks of every kind, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain import ops
from mpitrain.errors import ShapeError
from mpitrain.kernels import KERNELS
from tests.ops.parity import check, check_gradient, normal

SHAPES = [(2, 3, 5, 5, 4, 4), (1, 2, 40, 40, 8, 8), (2, 1, 3, 37, 4, 6), (1, 1, 20, 7, 3, 5), (2, 2, 0, 4, 3, 3),
          (0, 2, 4, 4, 3, 3)]


@pytest.fixture(params=["native", "plain arrays"], autouse=True)
def version(request, monkeypatch):
    if request.param == "plain arrays":
        for name in ("attention_weights", "attention_weights_gradient", "flash_attention", "flash_attention_grad"):
            monkeypatch.setattr(KERNELS[name], "host", lambda: None)


def torch_attention(**options):
    torch = pytest.importorskip("torch")
    return lambda q, k, v, mask=None: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)


def inputs(b, h, n, s, d, e):
    return (b, h, n, d), (b, h, s, d), (b, h, s, e)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_attention_equals_pytorch(shape, causal):
    check(lambda q, k, v: ops.scaled_dot_product_attention(q, k, v, is_causal=causal), torch_attention(is_causal=causal),
          *inputs(*shape))


@pytest.mark.parametrize("scale", [0.3, -2.0])
def test_the_scale_can_be_chosen(scale):
    check(lambda q, k, v: ops.scaled_dot_product_attention(q, k, v, scale=scale), torch_attention(scale=scale),
          *inputs(2, 2, 6, 6, 3, 3))


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (5, 7), (2, 1, 1, 7), (1, 3, 5, 7)], ids=str)
def test_masks_hide_or_shift_scores(shape):
    sizes = inputs(2, 3, 5, 7, 4, 4)
    check(lambda q, k, v, m: ops.scaled_dot_product_attention(q, k, v, attn_mask=m), torch_attention(), *sizes, normal(*shape))
    seen = normal(*shape) > -0.3
    seen[..., 0] = True
    check(lambda q, k, v, m: ops.scaled_dot_product_attention(q, k, v, attn_mask=m), torch_attention(), *sizes, seen)


def test_causal_and_a_mask_together_hide_what_either_hides():
    q, k, v = (normal(1, 2, 6, 3, seed=i) for i in range(3))
    seen = normal(6, 6, seed=5) > 0
    np.fill_diagonal(seen, True)
    both = ops.scaled_dot_product_attention(q, k, v, is_causal=True, attn_mask=seen).array
    one = ops.scaled_dot_product_attention(q, k, v, attn_mask=seen & np.tri(6, dtype=bool)).array
    np.testing.assert_allclose(both, one, atol=1e-14)


def test_a_query_that_may_look_nowhere_gets_zeros():
    q, k, v = (normal(1, 1, 3, 2, seed=i) for i in range(3))
    seen = np.ones((3, 3), bool)
    seen[1] = False
    result = ops.scaled_dot_product_attention(q, k, v, attn_mask=seen).array[0, 0]
    assert not result[1].any() and np.abs(result[[0, 2]]).min() > 0


def test_a_nan_score_shows_and_large_scores_do_not_overflow():
    q, k, v = (normal(1, 1, 4, 2, seed=i) for i in range(3))
    k[0, 0, 2] = np.nan
    result = ops.scaled_dot_product_attention(q, k, v, is_causal=True).array[0, 0]
    assert np.isfinite(result[:2]).all() and np.isnan(result[2:]).all()
    assert np.isfinite(ops.scaled_dot_product_attention(q * 1e4, v, v).array).all()


def test_attention_passes_the_gradient_check():
    for shape in ((2, 2, 5, 5, 3, 4), (1, 1, 1, 1, 1, 1)):
        check_gradient(lambda q, k, v: ops.scaled_dot_product_attention(q, k, v, is_causal=True), *inputs(*shape))


def test_attention_takes_any_number_of_leading_dims():
    for leading in ((), (3,), (2, 1, 3, 2)):
        check(lambda q, k, v: ops.scaled_dot_product_attention(q, k, v, is_causal=True), torch_attention(is_causal=True),
              (*leading, 5, 3), (*leading, 5, 3), (*leading, 5, 4))


def test_a_query_whose_scores_are_all_minus_infinity_gets_zeros():
    q, k, v = np.ones((1, 1, 2, 1)), np.full((1, 1, 3, 1), -np.inf), normal(1, 1, 3, 2)
    assert not ops.scaled_dot_product_attention(q, k, v).array.any()


def test_heads_split_off_a_row_join_again_without_a_copy():
    x = normal(2, 5, 3 * 4).reshape(2, 5, 3, 4).transpose(0, 2, 1, 3)
    result = ops.scaled_dot_product_attention(x, x, x).array
    assert np.shares_memory(result, result.transpose(0, 2, 1, 3).reshape(2, 5, 12))


def test_shapes_that_do_not_fit_are_refused():
    q = np.zeros((2, 3, 5, 4))
    with pytest.raises(ShapeError, match=r"expected q \(..., L, D\), k \(..., S, D\) and v \(..., S, E\), found \(2, 3, 5, 4\)"):
        ops.scaled_dot_product_attention(q, q[..., :3], q)
    with pytest.raises(ShapeError, match=r"the mask has shape \(4, 5\), expected one that broadcasts to \(2, 3, 5, 5\)"):
        ops.scaled_dot_product_attention(q, q, q, attn_mask=np.ones((4, 5), bool))


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_a_boolean_mask_hides_keys_whatever_the_scale(scale: float) -> None:
    q, k, v = (normal(1, 1, 4, 3, seed=seed) for seed in range(3))
    mask = np.tril(np.ones((4, 4), bool))
    found = ops.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).array
    np.testing.assert_allclose(found, ops.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).array, rtol=1e-12)


def test_a_mask_of_integers_is_refused() -> None:
    q = normal(1, 1, 4, 3)
    with pytest.raises(ShapeError, match="the mask is int64, expected bool, True where a query may look, or float"):
        ops.scaled_dot_product_attention(q, q, q, attn_mask=np.ones((4, 4), np.int64))
