"""Channels that depend on each other are found, the least important are cut, and what is left is a run as any other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import mpirun

from mpitrain import models, nn, ops
from mpitrain.autograd import Tensor, no_grad
from mpitrain.cli import main
from mpitrain.config import load_run, made_config
from mpitrain.data import Transforms, write_shards
from mpitrain.errors import ConfigError, NumericsError, ShapeError, UsageError
from mpitrain.models.gpt2_sizes import _gpt2
from mpitrain.plan.flops import count
from mpitrain.shrink.costs import cost, work
from mpitrain.shrink.cut import Chosen, choose, transfer
from mpitrain.shrink.graph import RULES, Graph, Product, lines
from mpitrain.shrink.importance import norms, taylor
from mpitrain.shrink.shapes import give_shapes
from mpitrain.shrink.tracing import trace
from mpitrain.train.build.model import make_model
from mpitrain.train.build.saved import SavedModel, load, save

RNG = np.random.default_rng(0)
FIRST = RNG.bit_generator.state


def rows(*shape: int) -> Any:
    return RNG.standard_normal((2, *shape), dtype=np.float32)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Each test draws what it draws alone: by others' numbers all outputs of a small net may be 0."""
    RNG.bit_generator.state = FIRST


def ready(model: nn.Module, *, seed: int = 0, dtype: str = "float32") -> nn.Module:
    model.initialize(seed, dtype)
    for name, buffer in model.named_buffers():
        buffer.array[...] = 0.5 + RNG.random(buffer.shape) if "running" in name else buffer.array
    return model.eval()


def choose_by_norms(model: nn.Module, graph: Graph, work: float) -> Chosen:
    return choose(model, graph, norms(model), work)


def groups(model: nn.Module, x: Any) -> list[str]:
    return lines(trace(ready(model), x))


def test_the_groups_of_lenet() -> None:
    assert groups(models.lenet(), rows(1, 28, 28)) == [
        "1 conv1.weight:1 (it meets the model's input, or a constant)",
        "6 conv1.weight:0, conv1.bias:0, conv2.weight:1",
        "16 conv2.weight:0, conv2.bias:0, linear1.weight:1",
        "120 linear1.weight:0, linear1.bias:0, linear2.weight:1",
        "84 linear2.weight:0, linear2.bias:0, head.weight:1",
        "10 head.weight:0, head.bias:0 (it is the model's output)"]


def test_the_groups_of_an_mlp() -> None:
    assert groups(models.mlp(12, [16, 8], 5), rows(12)) == [
        "12 linear0.weight:1 (it meets the model's input, or a constant)",
        "16 linear0.weight:0, linear0.bias:0, linear1.weight:1",
        "8 linear1.weight:0, linear1.bias:0, head.weight:1",
        "5 head.weight:0, head.bias:0 (it is the model's output)"]


def test_the_groups_of_a_gpt() -> None:
    """A head goes with its queries, keys, values and the columns of `out` that read it; the residual stream is one group."""
    leaves = ("norm1.weight:0", "attention.qkv.weight:1", "attention.out.weight:0", "norm2.weight:0", "wide.weight:1",
              "narrow.weight:0")
    stream = [f"block{b}.{leaf}" for b in range(2) for leaf in leaves]
    inner = [line for b in range(2) for line in (f"4 block{b}.attention.qkv.weight:0, block{b}.attention.out.weight:1",
                                                 f"64 block{b}.wide.weight:0, block{b}.narrow.weight:1")]
    graph = trace(ready(models.gpt(2, 4, 16, 8, 11)), np.zeros((2, 8), np.int64))
    assert lines(graph) == [
        "16 " + ", ".join(["embed.token.weight:1", "embed.position.weight:1", *stream, "norm.weight:0"])
        + " (the statistics of block0.norm1 are over these channels)",
        "11 embed.token.weight:0 (it is the table's number of rows)",
        "8 embed.position.weight:0 (it is the table's number of rows)",
        *inner]
    heads = next(group for group in graph.groups if ("block0.attention.qkv.weight", 0) in group.members).members
    assert heads["block0.attention.qkv.weight", 0][2].tolist() == [8, 9, 10, 11, 24, 25, 26, 27, 40, 41, 42, 43]
    assert heads["block0.attention.out.weight", 1][2].tolist() == [8, 9, 10, 11]


def test_the_groups_of_resnet18() -> None:
    """Shortcuts are convolutions, so each stage's stream is a group of its own."""
    found = lines(trace(ready(models.resnet18(classes=5)), rows(3, 32, 32)))
    inner = [f"{64 << s} " + ", ".join([f"stage{s + 1}_block{b}.conv1.weight:0", *normed(f"stage{s + 1}_block{b}.norm1"),
                                        f"stage{s + 1}_block{b}.conv2.weight:1"]) for s in range(4) for b in range(2)]

    def stream(s: int) -> str:
        first = ["conv.weight:0", *normed("norm"), "stage1_block0.conv1.weight:1"] if s == 1 else []
        ends = [name for b in range(2) for name in (
            *([f"stage{s}_block1.conv1.weight:1"] if b else []), f"stage{s}_block{b}.conv2.weight:0",
            *([f"stage{s}_block0.shortcut.conv.weight:0", *normed(f"stage{s}_block0.shortcut.norm")] if s > 1 and not b else []),
            *normed(f"stage{s}_block{b}.norm2"))]
        after = [f"stage{s + 1}_block0.{name}.weight:1" for name in ("conv1", "shortcut.conv")] if s < 4 else ["head.weight:1"]
        return f"{32 << s} " + ", ".join([*first, *ends, *after])
    ends = ["3 conv.weight:1 (it meets the model's input, or a constant)",
            "5 head.weight:0, head.bias:0 (it is the model's output)"]
    assert sorted(found) == sorted([*inner, *map(stream, range(1, 5)), *ends])


def normed(name: str) -> list[str]:
    return [f"{name}.{leaf}:0" for leaf in ("weight", "bias", "running_mean", "running_var")]


def test_the_groups_of_resnet20() -> None:
    inner = [f"{16 << s} " + ", ".join([f"stage{s + 1}_block{b}.conv1.weight:0", *normed(f"stage{s + 1}_block{b}.norm1"),
                                        f"stage{s + 1}_block{b}.conv2.weight:1"]) for s in range(3) for b in range(3)]
    blocks = [(s, b, [f"stage{s}_block{b}.conv1.weight:1"],
               [f"stage{s}_block{b}.conv2.weight:0", *normed(f"stage{s}_block{b}.norm2")]) for s in (1, 2, 3) for b in range(3)]

    def from_stage(first: int) -> list[str]:
        """The channels that begin in a stage: the shortcut hands them on, between channels of zeros that are new."""
        return [name for s, b, reads, writes in blocks if s >= first
                for name in (*(reads if s > first or b > 0 or first == 1 else []), *writes)]
    around = ["16 " + ", ".join(["conv.weight:0", *normed("norm"), *from_stage(1), "head.weight:1"]),
              "16 " + ", ".join([*from_stage(2), "head.weight:1"]), "32 " + ", ".join([*from_stage(3), "head.weight:1"])]
    ends = ["3 conv.weight:1 (it meets the model's input, or a constant)",
            "10 head.weight:0, head.bias:0 (it is the model's output)"]
    graph = trace(ready(models.resnet20()), rows(3, 32, 32))
    assert sorted(lines(graph)) == sorted(inner + around + ends)
    first = next(group.members for group in graph.groups if ("conv.weight", 0) in group.members)
    for leaf, zeros in (("conv.weight", 0), ("stage2_block0.norm2.weight", 8), ("stage3_block2.conv2.weight", 8 + 16)):
        assert first[leaf, 0][:, 0].tolist() == list(range(zeros, zeros + 16))


class Reversed(nn.Module):
    """An operation that has no rule, between two layers."""

    size_keys = {"widths": ("first", "second")}

    def __init__(self, widths: tuple[int, int] = (16, 16)):
        self.first, self.second, self.head = nn.Linear(4, widths[0]), nn.Linear(widths[0], widths[1]), nn.Linear(widths[1], 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.second(ops.flip(self.first(x), 1)))


def test_what_an_operation_without_a_rule_touches_stays_and_is_named() -> None:
    model = ready(Reversed())
    graph = trace(model, rows(4))
    chosen = choose_by_norms(model, graph, 0.9)
    assert chosen.sizes == {"widths": [16, 8]}
    assert chosen.left[0] == "16 channels of first.weight stay: there is no rule of channels for the operation Flip"
    with pytest.raises(UsageError, match=r"0\.1 of the work cannot be reached: 0\.\d+ is left at the smallest sizes; 16"):
        choose_by_norms(model, graph, 0.1)
    for wrong in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(UsageError, match="more than 0 and less than 1"):
            choose_by_norms(model, graph, wrong)
    with pytest.raises(UsageError, match="no channels of this model can go: 4 channels of weight stay: it is the model's output"):
        choose_by_norms(alone := ready(nn.Linear(5, 4)), trace(alone, rows(5)), 0.5)


class Attending(nn.Module):
    """Attention among the positions of a sample, and the mean over them; nothing says sizes."""

    def __init__(self) -> None:
        self.embed, self.attention, self.head = nn.Linear(6, 16), nn.MultiHeadAttention(16, 4), nn.Linear(16, 3)

    def forward(self, x: Any) -> Any:
        y = self.embed(x)
        return self.head(ops.mean(y + self.attention(y), 1))


class Sequences(nn.Module):
    def __init__(self) -> None:
        self.cells, self.wide, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Any) -> Tensor:
        return self.head(ops.relu(self.wide(self.cells(x)[0][:, -1])))


def test_work_that_is_not_counted_is_told() -> None:
    model = Sequences()
    model.initialize(0)
    graph = trace(model.eval(), np.ones((2, 5, 8), np.float32))
    told = "the work of the operation LSTM of cells is not counted: it has no rule of channels"
    assert graph.uncounted == (told,) and sum(p.positions for p in graph.products) == 2
    assert told in choose(model, graph, norms(model), 0.5).left


def test_a_model_without_keys_is_cut_by_shapes_and_its_modules_follow() -> None:
    model, smaller, x = ready(Attending(), dtype="float64"), Attending(), RNG.standard_normal((2, 5, 6))
    graph = trace(model, x)
    assert lines(graph)[-2:] == ["4 attention.qkv.weight:0, attention.qkv.bias:0, attention.out.weight:1",
                                 "3 head.weight:0, head.bias:0 (it is the model's output)"]
    chosen = choose_by_norms(model, graph, 0.4)
    give_shapes(smaller, chosen.shapes)
    assert smaller.attention.heads == chosen.shapes["attention.qkv.weight"][0] // 12 < 4 and not chosen.sizes
    transfer(model, ready(smaller, seed=1, dtype="float64"), chosen, x)


def test_a_wrong_rule_is_found_by_the_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ready(Reversed())
    flip = trace(model, rows(4)) and next(type_ for type_ in _functions(model) if type_.__name__ == "Flip")
    monkeypatch.setitem(RULES, flip, lambda relations, operation: [
        relations.link(operation.inputs[0], dim, operation.outputs[0], dim) for dim in (0, 1)])
    x = rows(4)
    chosen = choose_by_norms(model, trace(model, x), 0.4)
    with pytest.raises(ShapeError, match="does not compute what the model with zeros does"):
        transfer(model, ready(Reversed(tuple(chosen.sizes["widths"]))), chosen, x)       # type: ignore[arg-type]


def _functions(model: nn.Module) -> list[type[Any]]:
    from mpitrain.autograd import record
    with record() as operations:
        model(rows(4))
    return [operation.function for operation in operations]


IMAGES = {"channels": 1}
GPT = {"layers": 2, "heads": 4, "width": 32, "block": 12, "vocabulary": 19, "bias": True}
TEXT = {"layers": 2, "heads": 4, "width": 16, "hidden": 32, "block": 12, "vocabulary": 19}
MADE: dict[str, tuple[dict[str, Any], tuple[int, ...], float]] = {
    "lenet": ({}, (1, 28, 28), 0.32), "resnet20": (IMAGES, (1, 16, 16), 0.5), "resnet32": (IMAGES, (1, 16, 16), 0.5),
    "resnet56": (IMAGES, (1, 16, 16), 0.6), "resnet18": ({"classes": 5}, (3, 32, 32), 0.6),
    "resnet34": ({"classes": 5}, (3, 32, 32), 0.7), "resnet50": ({"classes": 5}, (3, 32, 32), 0.6),
    **{name: ({"classes": 5, "width": 0.25, "halvings": 3}, (3, 16, 16), 0.8) for name in (
        "mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large", "mnasnet", "efficientnet_b0")},
    "shufflenet_v2": ({"classes": 5, "width": 0.5, "halvings": 3}, (3, 16, 16), 0.8),
    "convnext_tiny": ({"widths": [8, 8, 8, 8], "blocks": [1, 1, 1, 1], "scale": 0.5, "halvings": 3}, (3, 8, 8), 0.8),
    "resnext50": ({"classes": 5, "width": 16, "groups": 2, "group_width": 8}, (3, 32, 32), 0.8),
    "wide_resnet50": ({"classes": 5, "width": 8}, (3, 32, 32), 0.6),
    "vgg11": ({"classes": 5, "width": 8, "hidden": 32}, (3, 32, 32), 0.6),
    "alexnet": ({"classes": 5, "widths": [8, 16, 16, 16, 16], "hidden": 32}, (3, 63, 63), 0.6),
    "densenet121": ({"classes": 5, "growth": 8, "layers": [1, 2, 1, 1]}, (3, 32, 32), 0.8),
    "squeezenet": ({"classes": 5, "width": 8}, (3, 33, 33), 0.6),
    "googlenet": ({"classes": 5, "width": 16}, (3, 32, 32), 0.8),
    "vit": ({"classes": 5, "size": 8, "patch": 4, "width": 16, "layers": 2, "heads": 4}, (3, 8, 8), 0.6),
    "swin": ({"classes": 5, "patch": 2, "width": 16, "depths": [2, 1], "heads": [4, 4], "window": 2}, (3, 8, 8), 0.8),
    "unet": ({"width": 8, "levels": 2}, (1, 8, 8), 0.6),
    "fno": ({"width": 8, "modes": [2, 2], "layers": 2, "hidden": 32}, (1, 8, 8), 0.7),
    **{name: ({"size": 8, "widths": [16, 16], "code": 4}, (1, 8, 8), 0.6) for name in ("autoencoder", "vae")},
    "mlp": ({"inputs": 12, "hidden": [32, 24], "outputs": 5}, (12,), 0.5),
    "tcn": ({"inputs": 2, "channels": [16, 16], "outputs": 5, "weight_norm": False}, (9, 2), 0.6),
    "fcn": ({"inputs": 1, "outputs": 5, "channels": [16, 32, 16]}, (12, 1), 0.5),
    "inception_time": ({"inputs": 2, "outputs": 5, "depth": 3, "filters": 4, "bottleneck": 8, "kernel": 8}, (16, 2), 0.9),
    "ft_transformer": ({"numeric": 3, "outputs": 5, "width": 16, "heads": 4, "layers": 2}, (3,), 0.6),
    "gpt": (GPT, (), 0.6), "gpt2": ({key: value for key, value in GPT.items() if key != "bias"} | {"dropout": 0.0}, (), 0.6),
    "bert": (TEXT, (), 0.9), "llama": (TEXT | {"key_heads": 2}, (), 0.6),
    "t5": (TEXT | {"head_width": 8, "source": 8, "vocabulary": 60}, (), 0.9),
    "elastic_mlp": ({"inputs": 12, "outputs": 5, "path": "depth=2"}, (12,), 0.6),          # a path of a supernet, by itself
    "elastic_resnet": (IMAGES | {"widths": [8, 16], "inner": [1.0, 2.0], "path": "largest"}, (1, 8, 8), 0.6),
    "elastic_gpt": ({"depths": [1, 2], "heads": [2, 4], "hidden": [64, 128], "path": "depth=2"} |
                    {key: GPT[key] for key in ("width", "block", "vocabulary", "bias")}, (), 0.6)}
BUILT: dict[str, Any] = {"gpt2": _gpt2}           # in place of a name of sizes that are too large for a test
SAME = {"resnet50": "resnet101 resnet152", "vgg11": "vgg16", "vit": "vit_ti_16 vit_s_16 vit_b_16", "swin": "swin_t",
        "gpt2": "gpt2_medium gpt2_large gpt2_xl", "bert": "distilbert"}      # further names of one builder, in other sizes
NO_RULE = "there is no rule of channels for the operation "
WHOLE: dict[str, tuple[dict[str, Any], tuple[int, ...], str]] = {
    "lstm": ({"inputs": 3, "hidden": 8, "outputs": 5}, (6, 3), NO_RULE + "LSTM of layer0.cells"),
    "gru": ({"inputs": 3, "hidden": 8, "outputs": 5}, (6, 3), NO_RULE + "GRU of layer0.cells"),
    "tcn": ({"inputs": 2, "channels": [8, 8], "outputs": 5}, (9, 2), "Sum goes over them"),
    "deepfm": ({"categories": [3, 3], "width": 4, "hidden": [16, 8]}, (2,), NO_RULE + "Concatenate of hidden0"),
    "graphsage": ({"inputs": 3, "outputs": 5, "samples": [3, 2], "hidden": [8, 8]}, (10, 3), "Sum goes over them")}
SLOW = ("resnet18", "resnet32", "resnet34", "resnet50", "resnet56", "mobilenet_v3_small", "mobilenet_v3_large", "mnasnet",
        "efficientnet_b0", "shufflenet_v2", "wide_resnet50")


def samples(name: str, dtype: str = "float64") -> Any:
    shape = MADE[name][1]
    return RNG.standard_normal((2, *shape)).astype(dtype) if shape else RNG.integers(0, GPT["vocabulary"], (2, 12))


def test_every_model_of_the_table_is_cut() -> None:
    """Or refused with the reason in WHOLE. Keys of sizes are arguments of the function that a name means."""
    shared = {other: name for name, others in SAME.items() for other in others.split()}
    assert {*MADE, *WHOLE, *shared} == set(models.MODELS)
    for name in models.MODELS:
        make = models.MODELS[name]
        model = make(**({} if name in (*shared, *BUILT) else (MADE | WHOLE)[name][0]))
        keys = {*model.size_keys, *(model.sized_with if model.size_keys else ())}
        assert keys <= set(signature(make).parameters), name


@pytest.mark.parametrize("name", WHOLE)
def test_a_model_that_stays_whole_is_refused_in_a_line_before_anything_is_written(name: str, tmp_path: Path) -> None:
    arguments, shape, why = WHOLE[name]
    x = RNG.integers(0, 3, (8, *shape)).astype(np.float32)
    kind = {"kind": "classification"} if name != "deepfm" else {"kind": "regression"}
    write_shards(tmp_path / "data", x, RNG.integers(0, 5, 8) if name != "deepfm" else x[:, :1], **kind)
    config = made_config({"model": {"name": name, **arguments}, "data": {"path": str(tmp_path / "data")}, "train": {"epochs": 1}},
                         [], "run")
    model = make_model(config)
    model.initialize(0, "float32")
    save(tmp_path / "run", SavedModel(model.eval().requires_grad_(False), config, 1, Transforms((), None), {"seed": 0}),
         {"by": "a test"})
    with pytest.raises(UsageError) as found:
        main(["cut", str(tmp_path / "run"), "--work", "0.9", "--out", str(tmp_path / "none")])
    assert found.value.message.startswith("no channels of this model can go: ") and why in found.value.message
    assert "\n" not in found.value.message and not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in MADE])
@pytest.mark.parametrize("exact", [False, True])
def test_a_cut_model_computes_what_the_masked_one_does(name: str, exact: bool) -> None:
    """To 1e-6; where each row of a matrix has one number, sums have no order, to the bit."""
    arguments, _, work = MADE[name]
    build = BUILT.get(name, models.MODELS[name])
    model, x = ready(build(**arguments), dtype="float64"), samples(name)
    model.load_state_dict({key: value if value.any() else RNG.normal(0, 0.5, value.shape)      # a head that begins with zeros
                           for key, value in model.state_dict().items()})
    if exact:
        model.load_state_dict({key: one_in_a_row(value) if value.ndim > 1 and "embed" not in key else value
                               for key, value in model.state_dict().items()})
    before = {key: value.copy() for key, value in model.state_dict().items()}
    chosen = choose_by_norms(model, trace(model, x), work)
    smaller = build(**{**arguments, **chosen.sizes})
    give_shapes(smaller, chosen.shapes)
    ready(smaller, seed=1, dtype="float64")
    transfer(model, smaller, chosen, x)
    assert all(np.array_equal(before[key], value) for key, value in model.state_dict().items())
    masked, more = dict(before), samples(name)
    for (leaf, dim), kept in chosen.kept.items():
        mask = np.isin(np.arange(before[leaf].shape[dim]), kept).astype(float)
        masked[leaf] = masked[leaf] * mask.reshape([-1 if d == dim else 1 for d in range(before[leaf].ndim)])
    model.load_state_dict(masked)
    with no_grad():
        np.testing.assert_allclose(smaller(more).numpy(), wanted := model(more).numpy(), rtol=0 if exact else 1e-6,
                                   atol=0 if exact else 1e-9)
    assert 0.5 * work < chosen.work <= work and wanted.any()
    for key, were in chosen.before.items():
        assert all(size % 8 == 0 for size, was in zip(chosen.sizes[key], were, strict=True) if was >= 16 and size != was)


def test_a_model_of_bfloat16_is_compared_in_float32() -> None:
    arguments, model = {"layers": 2, "heads": 4, "width": 64, "block": 32, "vocabulary": 65}, models.gpt
    whole, x = ready(model(**arguments), dtype="bfloat16"), np.tile(np.arange(32), (2, 1))
    chosen = choose_by_norms(whole, trace(whole, x), 0.6)
    smaller = ready(model(**{**arguments, **chosen.sizes}), seed=1, dtype="bfloat16")
    transfer(whole, smaller, chosen, x)
    assert {p.operands for p in (*whole.parameters(), *smaller.parameters())} == {"bfloat16"}


def one_in_a_row(value: Any) -> Any:
    """Zeros but for a number in each row, so that no sum has two terms; those of rows of few columns begin again."""
    matrix = np.zeros((len(value), value[0].size))
    matrix[np.arange(len(value)), np.arange(len(value)) * 7 % value[0].size] = RNG.uniform(0.5, 1, len(value))
    return matrix.reshape(value.shape)


def test_the_least_important_go_and_equal_ones_by_index() -> None:
    model = ready(models.mlp(4, [16], 2))
    weight = model.state_dict()["linear0.weight"] * 0
    norms = np.array([9, 1, 1, 8, 1, 7, 1, 6, 1, 5, 1, 4, 1, 3, 1, 1], np.float32)
    weight[:, 0] = norms
    model.load_state_dict({**model.state_dict(), "linear0.weight": weight, "head.weight": np.zeros((2, 16), np.float32)})
    chosen = choose_by_norms(model, trace(model, rows(4)), 0.5)
    assert chosen.sizes == {"hidden": [8]} and chosen.work == 0.5
    assert chosen.kept["linear0.weight", 0].tolist() == [0, 1, 3, 5, 7, 9, 11, 13]


class One:
    """The only rank, or one of two whose messages are known."""

    def __init__(self, rank: int = 0, size: int = 1, sent: Sequence[Any] = ()):
        self.rank, self.size, self.sent, self.said = rank, size, list(sent), None

    def gather_objects(self, value: Any) -> list[Any]:
        self.said = value
        return self.sent or [value, *[{}] * (self.size - 1)]

    def broadcast_object(self, value: Any) -> Any:
        return value


def test_importance_by_gradients_is_what_numbers_move_the_loss_by_on_any_ranks() -> None:
    model, x, y = ready(models.mlp(3, [4], 2), dtype="float64"), RNG.standard_normal((6, 3)), RNG.integers(0, 2, 6)
    graph = trace(model, x[:2])

    def loss(chunk: int) -> Any:
        return ops.cross_entropy(model(Tensor(x[2 * chunk:2 * chunk + 2])), y[2 * chunk:2 * chunk + 2])
    expected = np.zeros(4)
    for chunk in range(3):
        of = {"linear0.weight": lambda i: i // 3, "linear0.bias": lambda i: i, "head.weight": lambda i: i % 4}
        for name, rows_of in of.items():
            flat = dict(model.named_parameters())[name].array.reshape(-1)
            for i, value in enumerate(flat.copy()):
                ends = []
                for step in (1e-5, -1e-5):
                    flat[i] = value + step
                    ends.append(float(loss(chunk).array))
                flat[i] = value
                expected[rows_of(i)] += abs(value * (ends[0] - ends[1]) / 2e-5)
    group = next(group for group in graph.groups if ("head.weight", 1) in group.members)
    found = taylor(model, graph, loss, 3, One())(group)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    sent = []
    for rank in range(2):
        channel = One(rank, 2)
        with pytest.raises(KeyError):                      # the other's chunks are not there
            taylor(model, graph, loss, 3, channel)
        sent.append(channel.said)
    assert taylor(model, graph, loss, 3, One(1, 2, sent))(group).tobytes() == found.tobytes()
    with pytest.raises(UsageError, match="no training rows"):
        taylor(model, graph, loss, 0, One())
    dict(model.named_parameters())["head.bias"].array[0] = np.nan
    with pytest.raises(NumericsError, match="not finite on the calibration rows"):
        taylor(model, graph, loss, 3, One())


def test_costs_follow_the_columns_of_kernels() -> None:
    """9 outputs cost what 16 do; work counts them."""
    image, plain = Product("w", (16, 16, 3, 3), 64, 64, True), Product("w", (16, 32), 1, 1)
    for product in (image, plain):
        assert cost([product], {("w", 0): 9}) > 0.9 * cost([product], {("w", 0): 16}) or product is image
        assert work([product], {("w", 0): 9}) * 16 == work([product], {}) * 9
    assert cost([image], {}) < 64 * (16 * 16 * 9) < cost([image._replace(turned=False)], {})


@pytest.mark.parametrize("name", ["fcn", "swin", "inception_time", "resnext50"])
def test_work_is_what_the_plan_of_a_run_counts(name: str) -> None:
    """Of windows that are cut out of a sample, and of convolutions of series, too; the biases of swin's windows are shared."""
    arguments, x = MADE[name][0], samples(name)
    counted = count(models.MODELS[name](**arguments), x[:1])[0]
    found = work(trace(ready(models.MODELS[name](**arguments), dtype="float64"), x).products, {})
    assert found == pytest.approx(counted.get("Linear", 0) + counted.get("Conv2d", 0), rel=5e-3 if name == "swin" else 0)


def test_places_of_a_kernel_are_no_channels() -> None:
    found = groups(models.fcn(2, 3, [16, 24], [5, 3]), rows(9, 2))
    assert [line for line in found if line.startswith("5 ")] == [
        "5 block0.conv.weight:2 (it is no channel, but a place of the kernel)"]
    assert "16 block0.conv.weight:0, block0.conv.bias:0, " + ", ".join(normed("block0.norm")) + ", block1.conv.weight:1" in found


def test_a_dim_with_channels_of_several_groups_keeps_those_of_all() -> None:
    """Of a residual stream that shortcuts of zeros make wider; the model has that many zeros, and says so."""
    model, smaller, x = ready(models.resnet20(channels=1), dtype="float64"), models.resnet20(channels=1), samples("resnet20")
    model.size_keys = {}
    chosen = choose_by_norms(model, trace(model, x), 0.5)
    assert all(len(kept) == chosen.shapes[name][dim] for (name, dim), kept in chosen.kept.items() if name in chosen.shapes)
    give_shapes(smaller, chosen.shapes)
    with pytest.raises(ShapeError, match="does not compute what the model with zeros does: .* sizes of its own"):
        transfer(model, ready(smaller, seed=1, dtype="float64"), chosen, x)


def test_sizes_are_checked() -> None:
    for make, key, wrong in ((models.lenet, "widths", [6, 16, 120]), (models.lenet, "widths", [6, 16, 120, 0]),
                             (models.resnet20, "inner", [8] * 8), (models.resnet18, "inner", "8"), (models.lenet, "widths", 6)):
        with pytest.raises(ConfigError, match=rf"model\.{key} must be a list of \d integers of at least 1"):
            make(**{key: wrong})                                                                 # type: ignore[operator]


@pytest.mark.slow
def test_a_run_is_cut_evaluated_and_trained_on(tmp_path: Path) -> None:
    def done(*words: str, ranks: int = 1) -> str:
        found = mpirun(ranks, "-m", "mpitrain", *words, cwd=tmp_path)
        assert found.rc == 0, found.err
        return found.out
    done("train", "train.steps=20", "train.epochs=0", "run.out=whole", "model.hidden=[32, 32]", ranks=2)
    said = done("cut", "whole", "--work", "0.5", "--out", "half")
    saved, whole = load(tmp_path / "half"), load(tmp_path / "whole")
    sizes = load_run(tmp_path / "half", []).model.arguments["hidden"]
    assert f"model.hidden = {sizes}, was [32, 32]" in said and sum(sizes) < 64 and saved.step == whole.step == 20
    about = json.loads((tmp_path / "half" / "run.json").read_text())
    assert about["made"]["by"] == "cut" and 0 < about["made"]["work"] <= 0.5
    assert json.loads(done("evaluate", "half", ranks=2).splitlines()[-1])["step"] == 20
    assert "linear0.weight" in done("inspect", "half")
    done("train", "half/config.toml", f"model.init_from={tmp_path / 'half'}", "run.out=tuned", "train.steps=5", ranks=2)
    assert json.loads((tmp_path / "tuned" / "run.json").read_text())["status"] == "done"
    done("quantize", "whole", "--format", "int8", "--least", "1", "--out", "low")
    low = mpirun(1, "-m", "mpitrain", "cut", "low", "--work", "0.5", "--out", "none", cwd=tmp_path)
    assert low.rc == 64 and "the run is in few bits (model.formats)" in low.err and len(low.error_lines) == 1
    again = mpirun(1, "-m", "mpitrain", "cut", "whole", "--work", "0.01", "--out", "none", cwd=tmp_path)
    assert again.rc == 64 and "cannot be reached" in again.err and len(again.error_lines) == 1
