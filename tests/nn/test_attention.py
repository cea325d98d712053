"""Multi-head attention with other keys, masks, shared heads and positions, against PyTorch and by formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain import nn, ops
from mpitrain.autograd import Tensor
from mpitrain.backend import random
from mpitrain.errors import MpitrainError, ShapeError
from mpitrain.nn.general_attention import alibi_slopes

torch = pytest.importorskip("torch")
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-12}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def made(*args: Any, **kwargs: Any) -> nn.MultiHeadAttention:
    layer = nn.MultiHeadAttention(*args, **kwargs)
    layer.initialize(seed=1, dtype="float64")
    return layer.eval()


def test_keys_and_values_of_other_widths_and_length_as_in_pytorch() -> None:
    theirs = torch.nn.MultiheadAttention(8, 2, kdim=5, vdim=3, batch_first=True, dtype=torch.float64)
    ours = made(8, 2, key_width=5, value_width=3)
    state = {name: value.detach().numpy() for name, value in theirs.state_dict().items()}
    bias = np.split(state["in_proj_bias"] + 0.1, 3)
    theirs.in_proj_bias.data += 0.1
    ours.load_state_dict({**{f"{name}.weight": state[f"{name[0]}_proj_weight"] for name in ("query", "key", "value")},
                          **{f"{name}.bias": b for name, b in zip(("query", "key", "value"), bias)},
                          "out.weight": state["out_proj.weight"], "out.bias": state["out_proj.bias"]})
    x, key, value = normal(3, 4, 8), normal(3, 6, 5, seed=1), normal(3, 6, 3, seed=2)
    padding = np.arange(6) >= np.array([6, 3, 1])[:, None]
    mine = [Tensor(a, requires_grad=True) for a in (x, key, value)]
    other = [torch.tensor(a, requires_grad=True) for a in (x, key, value)]
    y, weights = ours(mine[0], key=mine[1], value=mine[2], key_padding_mask=padding, need_weights=True)
    expected, average = theirs(*other, key_padding_mask=torch.tensor(padding))
    np.testing.assert_allclose(y.array, expected.detach().numpy(), **CLOSE)
    np.testing.assert_allclose(weights.array.mean(axis=1), average.detach().numpy(), **CLOSE)
    y.backward(normal(3, 4, 8, seed=3))
    expected.backward(torch.tensor(normal(3, 4, 8, seed=3)))
    for a, b in zip(mine, other):
        np.testing.assert_allclose(a.grad, b.grad.numpy(), **CLOSE)
    np.testing.assert_allclose(ours(*map(Tensor, (x, )), key=key, value=value, key_padding_mask=padding).array, y.array, **CLOSE)


def test_heads_that_share_keys_are_heads_with_equal_keys() -> None:
    few, many = made(12, 6, key_heads=2, causal=True), made(12, 6, causal=True)
    state = dict(few.state_dict())
    each = {name: np.repeat(state[f"{name}.weight"].reshape(2, 1, 2, 12), 3, axis=1).reshape(12, 12) for name in ("key", "value")}
    weight = np.concatenate([state["query.weight"], each["key"], each["value"]])
    many.load_state_dict({"qkv.weight": weight, "qkv.bias": np.zeros(36), "out.weight": state["out.weight"],
                          "out.bias": state["out.bias"]})
    x = normal(2, 5, 12)
    np.testing.assert_allclose(few(x).array, many(x).array, **CLOSE)
    y, weights = few(x, need_weights=True)
    np.testing.assert_allclose(y.array, many(x).array, **CLOSE)
    assert weights.shape == (2, 6, 5, 5)


def test_rotary_positions_turn_pairs_and_see_distances_alone() -> None:
    x = normal(2, 3, 4, 6)
    angles = np.arange(4)[:, None] * 100.0 ** (-np.arange(2) / 2)
    z = (x[..., :2] + 1j * x[..., 2:4]) * np.exp(1j * angles)
    turned = ops.rotary_embedding(x, base=100.0, width=4).array
    np.testing.assert_allclose(turned, np.concatenate([z.real, z.imag, x[..., 4:]], axis=-1), **CLOSE)
    pairs = (x[..., 0:4:2] + 1j * x[..., 1:4:2]) * np.exp(1j * angles)
    turned = ops.rotary_embedding(x, base=100.0, width=4, interleaved=True).array
    np.testing.assert_allclose(turned[..., 0:4:2], pairs.real, **CLOSE)
    np.testing.assert_allclose(turned[..., 1:4:2], pairs.imag, **CLOSE)
    q, k = normal(1, 6), normal(1, 6, seed=1)
    scores = [float((ops.rotary_embedding(q, [i]).array * ops.rotary_embedding(k, [i + 3]).array).sum()) for i in (0, 7, 40)]
    np.testing.assert_allclose(scores, scores[0], **CLOSE)


def test_attention_with_rotary_positions_is_the_same_fused_masked_and_explicit() -> None:
    layer, x = made(8, 2, rope=10000.0, causal=True), normal(2, 5, 8)
    plain, *parts = layer(x).array, *np.split(layer.qkv(x).array, 3, axis=-1)
    q, k, v = (part.reshape(2, 5, 2, 4).swapaxes(1, 2) for part in parts)
    q, k = (ops.rotary_embedding(part).array for part in (q, k))
    wanted = ops.scaled_dot_product_attention(q, k, v, is_causal=True).array.swapaxes(1, 2).reshape(2, 5, 8)
    np.testing.assert_allclose(plain, layer.out(wanted).array, **CLOSE)
    np.testing.assert_allclose(layer(x, np.ones((5, 5), bool)).array, plain, **CLOSE)
    np.testing.assert_allclose(layer(x, need_weights=True)[0].array, plain, **CLOSE)


def test_alibi_is_a_mask_of_slopes_times_distances() -> None:
    assert alibi_slopes(4) == [1 / 4, 1 / 16, 1 / 64, 1 / 256]
    np.testing.assert_allclose(alibi_slopes(6), [2 ** -2, 2 ** -4, 2 ** -6, 2 ** -8, 2 ** -1, 2 ** -3])
    layer, plain, x = made(8, 4, alibi=True, causal=True), made(8, 4, causal=True), normal(2, 5, 8)
    plain.load_state_dict(layer.state_dict())
    distances = np.abs(np.arange(5)[:, None] - np.arange(5))
    mask = -np.array(alibi_slopes(4))[:, None, None] * distances
    np.testing.assert_allclose(layer(x).array, plain(x, mask).array, **CLOSE)


@pytest.mark.parametrize("numbers", [False, True])
def test_a_sample_that_is_all_padding_gets_zeros_and_no_nan(numbers: bool) -> None:
    layer, x, padding = made(8, 2), Tensor(normal(2, 3, 8), requires_grad=True), np.array([[True] * 3, [False] * 3])
    padding = np.where(padding, -np.inf, 0.0) if numbers else padding
    y, weights = layer(x, key_padding_mask=padding, need_weights=True)
    assert not weights.array[0].any() and np.allclose(weights.array[1].sum(axis=-1), 1)
    for result in (y, layer(x, key_padding_mask=padding)):
        np.testing.assert_allclose(result.array[0], np.broadcast_to(layer.out.bias.array, (3, 8)), **CLOSE)
        result.backward(np.ones(result.shape))
        assert np.isfinite(x.grad).all()


def test_dropped_weights_of_other_keys_belong_to_the_sample() -> None:
    layer, x, memory = made(8, 2, dropout=0.5).train(), normal(4, 3, 8), normal(4, 6, 8, seed=1)
    with random.use(random.Scope(seed=1, samples=np.arange(4))):
        whole = layer(x, key=memory).array
    with random.use(random.Scope(seed=1, samples=np.arange(2, 4))):
        assert np.array_equal(layer(x[2:], key=memory[2:]).array, whole[2:])
    assert not np.allclose(whole, layer.eval()(x, key=memory).array)


@pytest.mark.parametrize(("wrong", "says"), [
    (lambda: nn.MultiHeadAttention(8, 4, key_heads=3), "a multiple of it"),
    (lambda: made(8, 2)(normal(2, 3, 8), key=normal(2, 3, 7)), r"the key has shape \(2, 3, 7\), expected \(2, length, 8\)"),
    (lambda: made(8, 2)(normal(2, 3, 8), key=normal(1, 3, 8)), "the key has shape"),
    (lambda: made(8, 2)(normal(2, 3, 8), key=normal(2, 3, 8), value=normal(2, 4, 8)), "3 keys and 4 values"),
    (lambda: made(8, 2)(normal(2, 3, 8), key_padding_mask=np.ones((2, 4), bool)), "the key_padding_mask has shape"),
    (lambda: made(8, 2)(normal(2, 3, 4, 8)), "the query has shape"),
    (lambda: ops.scaled_dot_product_attention(normal(1, 4, 3, 2), normal(1, 3, 3, 2), normal(1, 3, 3, 2), enable_gqa=True),
     "no multiple"),
    (lambda: ops.scaled_dot_product_attention(normal(2, 3, 2), normal(3, 3, 2), normal(3, 3, 2)), "do not broadcast"),
    (lambda: ops.rotary_embedding(normal(3, 5)), "even number"),
    (lambda: ops.rotary_embedding(normal(3, 4), [0, 1]), "positions"),
    (lambda: ops.rotary_embedding(normal(2, 3, 4), np.zeros((3, 3))), "positions"),
    (lambda: ops.rotary_embedding(normal(3, 4), 1), "positions"),
    (lambda: ops.rotary_embedding(normal(4)), r"expected \(\.\.\., L, D\)")])
def test_what_does_not_fit_is_refused_in_one_line(wrong: Any, says: str) -> None:
    with pytest.raises(ShapeError, match=says) as caught:
        wrong()
    assert isinstance(caught.value, MpitrainError) and "\n" not in str(caught.value)
