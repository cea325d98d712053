"""Pruned models at work: layers whose zeros pay compute with what is left, and nothing else about the model changes."""

from __future__ import annotations

import numpy as np

from mpitrain import nn, no_grad
from mpitrain.nn.sparse import SparseLinear, form_that_pays
from mpitrain.shrink.sparse import sparsify


def pruned(rng: np.random.Generator) -> nn.Sequential:
    """A model with a weight in blocks, one of scattered numbers, one of few zeros, and a list of layers."""
    class Branches(nn.Module):
        def __init__(self) -> None:
            self.parts = [nn.Linear(32, 24, activation="gelu"), nn.Linear(24, 10)]

        def forward(self, x: object) -> object:
            return self.parts[1](self.parts[0](x))

    model = nn.Sequential(("wide", nn.Linear(20, 64, activation="relu")), ("narrow", nn.Linear(64, 32)), ("rest", Branches()))
    model.initialize(3)
    weights = {name: p.array for name, p in model.named_parameters()}
    weights["wide.weight"] *= np.repeat(rng.random((4, 20)) < 0.3, 16, axis=0)
    weights["narrow.weight"] *= rng.random((32, 64)) < 0.3
    weights["rest.parts.0.weight"] *= rng.random((24, 32)) < 0.1
    return model.eval()


def test_layers_whose_zeros_pay_give_the_same_outputs_under_the_same_names() -> None:
    rng = np.random.default_rng(0)
    model = pruned(rng)
    before, x = model.state_dict(), rng.normal(size=(40, 20)).astype(np.float32)
    with no_grad():
        wanted = model(x).numpy()
        done = {one.name: one for one in sparsify(model, least=1)}
        assert {name: one.form for name, one in done.items()} == {"wide": "blocks", "narrow": "", "rest.parts.0": "csr",
                                                                  "rest.parts.1": ""}
        assert str(done["narrow"]).endswith("zeros, stays dense") and done["wide"].nbytes < 64 * 20 * 4
        found = model(x).numpy()
        np.testing.assert_allclose(found, wanted, atol=1e-5)
        for rows in (1, 17):
            np.testing.assert_allclose(model(x[:rows]).numpy(), wanted[:rows], atol=1e-5)
    after = model.state_dict()
    assert list(after) == list(before) and all(np.array_equal(after[name], before[name]) for name in before)
    assert type(model["wide"]) is SparseLinear and not model["wide"].training


def test_a_layer_that_is_trained_computes_as_before() -> None:
    model = pruned(np.random.default_rng(0))
    x = np.ones((3, 20), np.float32)
    wanted = model(x).numpy()
    sparsify(model, least=1)
    found = model(x)
    assert np.array_equal(found.numpy(), wanted)
    found.sum().backward()
    assert model["wide"].weight.grad is not None


def test_the_rule_looks_at_zeros_and_shapes_alone() -> None:
    w = np.ones((32, 40), np.float32)
    assert form_that_pays(w, 1) == "" and form_that_pays(w[:, :0], 0) == ""
    w[:16] = 0
    assert form_that_pays(w, 1) == "blocks" and form_that_pays(w) == "" and form_that_pays(w, w.size + 1) == ""
    w[:, 3:] = 0
    w[0] = 1
    assert form_that_pays(w[:17], 1) == "csr" and form_that_pays(w[:17].astype(np.float64), 1) == "csr"


def test_a_weight_that_changes_is_taken_as_it_is() -> None:
    model = pruned(np.random.default_rng(0))
    sparsify(model, least=1)
    x = np.ones((40, 20), np.float32)
    with no_grad():
        before = model(x).numpy()
        model.load_state_dict({name: 2 * array for name, array in model.state_dict().items()})
        assert type(model["wide"]) is SparseLinear
        plain = nn.Linear.forward(model["wide"], x).numpy()
        np.testing.assert_allclose(model["wide"](x).numpy(), plain, atol=1e-5)
        assert not np.array_equal(model(x).numpy(), before)
