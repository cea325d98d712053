"""A mixture of experts: against a loop over rows, PyTorch, and itself with rows run again or in two halves."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mpitrain import nn, ops
from mpitrain.autograd import Tensor, no_grad, part_of_batch, recompute, run_backward
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.models import gpt

try:
    import torch
except ImportError:
    torch = None

WIDTH, HIDDEN, EXPERTS = 6, 10, 4


def mixture(top_k: int = 2, capacity: float = 0.75, dtype: str = "float64", **more: Any) -> nn.MixtureOfExperts:
    """One whose biases are no zeros, and that drops some choices."""
    made = nn.MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, top_k, capacity, **more)
    made.initialize(3, dtype)
    rng = np.random.default_rng(1)
    for leaf in (made.wide_bias, made.narrow_bias, made.router.weight):
        if leaf is not None:
            with no_grad():
                leaf.copy_(rng.standard_normal(leaf.shape))
    return made


def x_of(*shape: int, dtype: str = "float64") -> np.ndarray:
    return np.random.default_rng(2).standard_normal((*shape, WIDTH)).astype(dtype)


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def row_by_row(layer: nn.MixtureOfExperts, x: np.ndarray, normalised: bool) -> tuple[np.ndarray, int]:
    """The definition, and how many choices were dropped."""
    values = {name: np.asarray(leaf.array, np.float64) for name, leaf in layer.named_parameters()}
    rows = x.reshape(-1, WIDTH)
    logits = rows @ values["router.weight"].T
    scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    left = [math.ceil(layer.capacity * layer.top_k * len(rows) / EXPERTS)] * EXPERTS
    out, dropped = np.zeros_like(rows), 0
    for k in range(layer.top_k):
        for t, row in enumerate(rows):
            ranked = sorted(range(EXPERTS), key=lambda e: -scores[t, e])[:layer.top_k]
            e = ranked[k]
            if not left[e]:
                dropped += 1
                continue
            left[e] -= 1
            gate = scores[t, e] / (sum(scores[t, i] for i in ranked) if normalised else 1.0)
            hidden = gelu(values["wide"][e] @ row + values.get("wide_bias", np.zeros((EXPERTS, 1)))[e])
            out[t] += gate * (values["narrow"][e] @ hidden + values.get("narrow_bias", np.zeros((EXPERTS, 1)))[e])
    return out.reshape(x.shape), dropped


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_a_mixture_is_what_a_loop_over_rows_gives(top_k: int, bias: bool) -> None:
    layer, x = mixture(top_k, bias=bias), x_of(3, 7)
    expected, dropped = row_by_row(layer, x, normalised=top_k > 1)
    np.testing.assert_allclose(layer(x).array, expected, rtol=1e-12, atol=1e-13)
    value, rows, lost, choices = layer.take_tally()
    assert dropped > 0 and (rows, lost, choices) == (21, dropped, 21 * top_k) and 1 <= value / rows < EXPERTS
    assert not layer.take_tally().any()
    single = mixture(top_k, dtype="float32", bias=bias)(x.astype(np.float32)).array
    np.testing.assert_allclose(single, expected, rtol=1e-4, atol=1e-5)


def test_enough_places_drop_nothing_and_the_order_of_rows_does_not_matter() -> None:
    layer, x = mixture(2, capacity=EXPERTS), x_of(9)
    order = np.random.default_rng(0).permutation(9)
    np.testing.assert_allclose(layer(x[order]).array, layer(x).array[order], rtol=1e-12)
    assert layer.take_tally()[2] == 0
    layer.capacity = 1e308                                # finite, and the places it asks for are not
    layer(x)
    assert layer.take_tally()[2] == 0


@pytest.mark.parametrize("top_k", [1, 2])
def test_gradients_are_those_of_torch_with_the_balance_added_to_the_loss(top_k: int) -> None:
    """The same layer put together of PyTorch's functions, with the choices as they fall."""
    if torch is None:
        pytest.skip("PyTorch is not installed")
    layer, x, grad = mixture(top_k, balance=0.7), x_of(13), x_of(13) ** 2
    given = Tensor(x, requires_grad=True)
    with part_of_batch(lambda: 0.2):
        layer(given).backward(grad)

    theirs = {name: torch.tensor(leaf.array, requires_grad=True) for name, leaf in layer.named_parameters()}
    rows = torch.tensor(x, requires_grad=True)
    scores = torch.softmax(rows @ theirs["router.weight"].T, dim=1)
    best = torch.topk(scores, top_k, dim=1)
    gates = best.values / best.values.sum(dim=1, keepdim=True) if top_k > 1 else best.values
    out = torch.zeros_like(rows)
    places = [math.ceil(layer.capacity * top_k * 13 / EXPERTS)] * EXPERTS
    for k in range(top_k):
        for e in range(EXPERTS):
            mine = (best.indices[:, k] == e).nonzero().reshape(-1)
            kept = mine[:places[e]]
            places[e] -= len(kept)
            hidden = torch.nn.functional.gelu(rows[kept] @ theirs["wide"][e].T + theirs["wide_bias"][e])
            out = out.index_add(0, kept, gates[kept, k:k + 1] * (hidden @ theirs["narrow"][e].T + theirs["narrow_bias"][e]))
    shares = torch.bincount(best.indices.reshape(-1), minlength=EXPERTS).double() / (13 * top_k)
    ((out * torch.tensor(grad)).sum() + 0.2 * 0.7 * EXPERTS * (shares * scores.mean(dim=0)).sum()).backward()
    np.testing.assert_allclose(given.grad, rows.grad.numpy(), rtol=1e-10, atol=1e-12)
    for name, leaf in layer.named_parameters():
        np.testing.assert_allclose(leaf.grad, theirs[name].grad.numpy(), rtol=1e-10, atol=1e-12, err_msg=name)


def test_rows_run_again_and_backward_in_two_halves_have_the_same_gradients() -> None:
    layer, x, grad = mixture(), x_of(2, 8), x_of(2, 8)

    def gradients(run: Any, split: bool) -> dict[str, np.ndarray]:
        for _, leaf in layer.named_parameters():
            leaf.zero_grad()
        given = Tensor(x, requires_grad=True)
        with part_of_batch(lambda: 0.5):
            rest = run_backward(run(given), grad, split=split)
        if rest is not None:
            rest.run()
        return {"x": given.grad} | {name: leaf.grad.copy() for name, leaf in layer.named_parameters()}

    expected = gradients(layer, False)
    rows = layer.take_tally()[1]
    for run in (layer, lambda given: recompute(layer, given)):
        for split in (False, True):
            for name, found in gradients(run, split).items():
                np.testing.assert_array_equal(found, expected[name], err_msg=f"{name} {split}")
    assert layer.take_tally()[1] == 4 * rows                    # what runs again is not counted again


def test_evaluation_notes_nothing_and_balances_nothing() -> None:
    layer = mixture(balance=1e6)
    layer.eval()
    x = Tensor(x_of(4), requires_grad=True)
    layer(x).backward(np.zeros((4, WIDTH)))
    assert not x.grad.any() and not layer.take_tally().any()
    with no_grad():
        layer.train()(x)


def test_the_router_computes_in_float32_where_products_round_to_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.MixtureOfExperts(256, 8, 8, 2)
    layer.initialize(0, "bfloat16")
    x = np.random.default_rng(0).standard_normal((600, 256)).astype(np.float32)
    seen: list[Any] = []
    softmax = ops.softmax
    monkeypatch.setattr(ops, "softmax", lambda logits: (seen.append(softmax(logits).array), softmax(logits))[1])
    layer(x)
    exact = softmax(x.astype(np.float64) @ layer.router.weight.array.astype(np.float64).T).array
    np.testing.assert_allclose(seen[0], exact, rtol=1e-5)


def test_an_expert_starts_as_a_layer_of_its_own_and_a_part_as_that_of_the_whole() -> None:
    whole, part = nn.MixtureOfExperts(50, 80, 6), nn.MixtureOfExperts(50, 80, 6)
    for leaf in (part.wide, part.wide_bias, part.narrow, part.narrow_bias):
        leaf.narrow("ep", 0, 2, 4)
    whole.initialize(7)
    part.initialize(7)
    for name, leaf in part.named_parameters():
        expected = dict(whole.named_parameters())[name].array
        np.testing.assert_array_equal(leaf.array, expected if name == "router.weight" else expected[2:4], err_msg=name)
    assert abs(whole.wide.array).max() == pytest.approx(1 / math.sqrt(50), rel=0.01)
    assert abs(whole.narrow.array).max() == pytest.approx(1 / math.sqrt(80), rel=0.01)


def test_gpt_has_experts_in_every_block_or_some() -> None:
    sizes = {"layers": 4, "heads": 2, "width": 8, "block": 6, "vocabulary": 11}
    plain, some, all_ = gpt(**sizes), gpt(**sizes, experts=3, every=2), gpt(**sizes, experts=3)
    assert [name for name, _ in nn.mixtures(some)] == ["block1.mixture", "block3.mixture"]
    assert len(nn.mixtures(all_)) == 4 and not nn.mixtures(plain)
    assert "block*.wide" in some.plan and "block*.wide" not in all_.plan
    for model in (plain, some, all_):
        model.initialize(0)
    own = dict(plain.named_parameters())
    for name, leaf in some.named_parameters():                  # what is not a mixture is as it was
        assert "mixture" in name or np.array_equal(leaf.array, own[name].array)
    loss = nn.LOSSES["cross_entropy"]()
    tokens = np.random.default_rng(0).integers(0, 11, (3, 7))
    loss(all_(tokens[:, :-1]), tokens[:, 1:]).backward()
    assert all(leaf.grad is not None and leaf.grad.any() for _, leaf in all_.named_parameters())


@pytest.mark.parametrize(("call", "message"), [
    (lambda: nn.MixtureOfExperts(4, 4, 2, 3), "2 experts of which each row takes 3; experts must be 1 or more, and top_k from 1"),
    (lambda: nn.MixtureOfExperts(4, 4, 2, 1, 0.0), "capacity must be a finite number above 0, found 0.0"),
    (lambda: nn.MixtureOfExperts(4, 4, 2, 1, balance=-1.0), "balance must be a finite number, 0 or more, found -1.0"),
    (lambda: nn.MixtureOfExperts(4, 4, 2, 1, activation="softmax"), 'the activation of experts is one of .* not "softmax"'),
    (lambda: gpt(2, 1, 4, 4, 4, experts=2, every=3), "gpt: with model.every = 3, none of 2 blocks has experts; set it to 2 at"),
])
def test_what_no_mixture_can_be_made_of_is_named(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_an_input_of_another_width_is_named() -> None:
    with pytest.raises(ShapeError, match=r"a mixture of experts expects input of width 6, got shape \(2, 5\)"):
        mixture()(np.zeros((2, 5)))
