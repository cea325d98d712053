"""DeepFM, FT-Transformer and GraphSAGE beside formulas, PyTorch's layers and the package of the paper's authors."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from zoo import declared, images, like_torch

from mpitrain.errors import ConfigError, DataError, ShapeError
from mpitrain.models import MODELS


def whole(categories: list[int], rows: int) -> Any:
    rng = np.random.default_rng(0)
    return np.stack([rng.integers(0, n, rows) for n in categories], axis=1).astype("f4")


def torch_deepfm(categories: list[int], width: int, hidden: list[int]) -> Any:
    torch, _ = declared()

    class Theirs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.Embedding(sum(categories), 1)
            self.rows = torch.nn.Embedding(sum(categories), width)
            self.bias = torch.nn.Parameter(torch.zeros(1))
            sizes = [len(categories) * width, *hidden]
            self.layers = torch.nn.ModuleList([torch.nn.Linear(a, b) for a, b in zip(sizes, hidden)])
            self.head = torch.nn.Linear(sizes[-1], 1, bias=False)

        def forward(self, x: Any) -> Any:
            numbers = x.detach().long() + torch.tensor([0, *np.cumsum(categories)[:-1]])
            rows, y = self.rows(numbers), self.rows(numbers).flatten(1)
            products = [(rows[:, i] * rows[:, j]).sum(-1) for i, j in combinations(range(len(categories)), 2)]
            for layer in self.layers:
                y = layer(y).relu()
            return self.head(y) + sum(products)[:, None] + self.weights(numbers).sum(1) + self.bias
    return Theirs()


def test_deepfm_sums_the_products_of_each_two_columns() -> None:
    arguments = ([5, 3, 7, 2], 4, [8, 6])
    ours, theirs = MODELS["deepfm"](*arguments, dropout=0.1), torch_deepfm(*arguments)
    named = {"embed.bias": "bias", "embed.weights.table.weight": "weights.weight", "embed.rows.table.weight": "rows.weight",
             "hidden0.linear.weight": "layers.0.weight", "hidden0.linear.bias": "layers.0.bias",
             "hidden1.linear.weight": "layers.1.weight", "hidden1.linear.bias": "layers.1.bias",
             "head.linear.weight": "head.weight"}
    like_torch(ours, theirs, whole(arguments[0], 6).astype("i8"), names=named.get)


def test_deepfm_has_the_parameters_of_its_formula() -> None:
    n, fields, width = 1000 + 50 + 7, 3, 10
    layers = (fields * width + 1) * 400 + 2 * 401 * 400 + 400
    assert MODELS["deepfm"]([1000, 50, 7]).count_parameters() == n * (width + 1) + 1 + layers


def authors() -> Any:
    declared()
    return pytest.importorskip("rtdl_revisiting_models",
                               reason="needs rtdl_revisiting_models: pip install --no-deps rtdl_revisiting_models==0.0.2")


def test_ft_transformer_has_as_many_parameters_as_the_authors_at_each_size() -> None:
    theirs = authors().FTTransformer
    for layers, width in enumerate((96, 128, 192, 256, 320, 384), 1):
        for numeric, categories in ((8, []), (0, [4, 9]), (57, [3])):
            wanted = theirs(n_cont_features=numeric, cat_cardinalities=categories, d_out=2, **theirs.get_default_kwargs(layers))
            ours = MODELS["ft_transformer"](numeric, 2, categories, width, layers)
            assert ours.count_parameters() == sum(p.numel() for p in wanted.parameters())


def ours_of(theirs: dict[str, Any], torch: Any, layers: int) -> dict[str, Any]:
    """The authors' parameters, or the gradients of those, as our fewer and larger ones, by our names."""
    ours = {"embed.class_token": theirs["cls_embedding.weight"][None, None]}
    if "cont_embeddings.weight" in theirs:
        ours["embed.weight"] = theirs["cont_embeddings.weight"]
    tables = [value for name, value in theirs.items() if name.startswith("cat_embeddings.embeddings")]
    if tables:
        ours["embed.columns.table.weight"] = torch.cat(tables)
    ours["embed.bias"] = torch.cat([theirs[name] for name in ("cont_embeddings.bias", "cat_embeddings.bias") if name in theirs])
    for kind in ("weight", "bias"):
        for i in range(layers):
            block = f"backbone.blocks.{i}."
            value, gate = theirs[f"{block}ffn.linear1.{kind}"].chunk(2)
            parts = {"attention.qkv": torch.cat([theirs[f"{block}attention.W_{part}.{kind}"] for part in "qkv"]),
                     "attention.out": theirs[f"{block}attention.W_out.{kind}"], "value": value, "gate": gate,
                     "down": theirs[f"{block}ffn.linear2.{kind}"], "norm2": theirs[f"{block}ffn_normalization.{kind}"]}
            if i:
                parts["norm1"] = theirs[f"{block}attention_normalization.{kind}"]
            ours |= {f"block{i}.{name}.{kind}": part for name, part in parts.items()}
        ours[f"head.norm.{kind}"] = theirs[f"backbone.output.normalization.{kind}"]
        ours[f"head.linear.{kind}"] = theirs[f"backbone.output.linear.{kind}"]
    return {name: value.detach().numpy() for name, value in ours.items()}


@pytest.mark.parametrize(("numeric", "categories"), [(3, [4, 6]), (3, []), (0, [4, 6])])
@pytest.mark.parametrize("layers", [1, 3])
def test_ft_transformer_is_the_authors(numeric: int, categories: list[int], layers: int) -> None:
    torch, _ = declared()
    theirs = authors().FTTransformer(n_cont_features=numeric, cat_cardinalities=categories, d_out=2, n_blocks=layers, d_block=24,
                                     attention_n_heads=4, attention_dropout=0.1, ffn_d_hidden=20, ffn_d_hidden_multiplier=None,
                                     ffn_dropout=0.1, residual_dropout=0.1, ffn_activation="ReGLU")

    ours = MODELS["ft_transformer"](numeric, 2, categories, 24, layers, 4, 20)
    ours.initialize()
    ours.load_state_dict(ours_of(dict(theirs.named_parameters()), torch, layers))
    x = np.concatenate([images(5, numeric), whole(categories, 5)] if categories else [images(5, numeric)], axis=1)
    theirs.eval()
    wanted = theirs(torch.tensor(x[:, :numeric]) if numeric else None,
                    torch.tensor(x[:, numeric:]).long() if categories else None)
    y = ours.eval()(x)
    np.testing.assert_allclose(y.array, wanted.detach().numpy(), rtol=0, atol=1e-4 * float(wanted.detach().abs().max()))
    weights = images(*y.shape, seed=1)
    y.backward(weights)
    wanted.backward(torch.tensor(weights))
    grads = ours_of({name: p.grad for name, p in theirs.named_parameters()}, torch, layers)
    largest = max(np.abs(grad).max() for grad in grads.values())
    for name, p in ours.named_parameters():
        bar = 1e-3 * max(np.abs(grads[name]).max(), 1e-3 * largest)
        np.testing.assert_allclose(p.grad, grads[name], rtol=0, atol=bar, err_msg=name)


def torch_graphsage(inputs: int, outputs: int, samples: list[int], hidden: list[int]) -> Any:
    """On an edge list: each node of the row has its parent, to which it sends what it knows."""
    torch, _ = declared()
    parents, level = [], [0]
    for sampled in samples:
        following = []
        for node in level:
            for _ in range(sampled):
                following.append(1 + len(parents))
                parents.append(node)
        level = following
    child, parent = torch.arange(1, 1 + len(parents)), torch.tensor(parents)

    class Theirs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = [inputs, *hidden]
            self.layers = torch.nn.ModuleList([torch.nn.Linear(2 * a, b) for a, b in zip(widths, hidden)])
            self.head = torch.nn.Linear(hidden[-1], outputs)

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                total = torch.zeros_like(x).index_add(1, parent, x[:, child])
                count = torch.zeros(x.shape[1]).index_add(0, parent, torch.ones(len(parents))).clamp(min=1)
                x = layer(torch.cat([x, total / count[:, None]], -1)).relu()
                x = torch.nn.functional.normalize(x, dim=-1)
            return self.head(x[:, 0])
    return Theirs()


@pytest.mark.parametrize(("samples", "hidden"), [([3], [6]), ([4, 3], [6, 5]), ([2, 1, 2], [6, 5, 4])])
def test_graphsage_is_messages_along_edges(samples: list[int], hidden: list[int]) -> None:
    ours, theirs = MODELS["graphsage"](5, 3, samples, hidden, 0.1), torch_graphsage(5, 3, samples, hidden)
    widths = [5, *hidden]
    formula = sum(2 * a * b + b for a, b in zip(widths, hidden)) + 3 * hidden[-1] + 3
    assert ours.count_parameters() == formula == sum(p.numel() for p in theirs.parameters())
    nodes = 1 + sum(int(np.prod(samples[:i + 1])) for i in range(len(samples)))
    like_torch(ours, theirs, images(4, nodes, 5))


@pytest.mark.parametrize(("value", "column", "most"), [(5.0, 0, 4), (-1.0, 1, 2), (1.5, 1, 2)])
def test_a_number_that_its_column_does_not_have_is_named(value: float, column: int, most: int) -> None:
    model = MODELS["deepfm"]([5, 3], 2, [4])
    model.initialize()
    x = np.zeros((3, 2), "f4")
    x[1, column] = value
    with pytest.raises(DataError) as caught:
        model(x)
    assert caught.value.row == 1 and caught.value.message == (
        f"column {column} of the model's whole numbers holds {value:g}, expected a whole number in 0 ... {most}; "
        "model.categories counts the values of each column")


def test_settings_that_do_not_fit_are_named() -> None:
    for make, message in ((lambda: MODELS["deepfm"]([]), "model.categories is empty"),
                          (lambda: MODELS["ft_transformer"](0, 2), "model.numeric is 0 and model.categories is empty"),
                          (lambda: MODELS["graphsage"](3, 2, [], []), "model.samples is empty"),
                          (lambda: MODELS["graphsage"](3, 2, [2, 2], [4]), "model.hidden must be a list of 2 integers")):
        with pytest.raises(ConfigError, match=message):
            make()
    with pytest.raises(ShapeError, match="a width of 10 cannot be cut into 4 heads"):
        MODELS["ft_transformer"](3, 2, width=10, heads=4)
    model = MODELS["graphsage"](3, 2, [2], [4])
    model.initialize()
    with pytest.raises(ShapeError, match=r"graphsage expects input of shape \(any, 3, 3\), got \(2, 4, 3\); set model.inputs"):
        model(images(2, 4, 3))
