"""Channels that depend on each other are found, the least important are cut, and what is left is a run as any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import mpirun

from mpitrain import models, nn, ops
from mpitrain.autograd import no_grad
from mpitrain.config import load_run
from mpitrain.errors import ConfigError, ShapeError, UsageError
from mpitrain.shrink.cut import choose, transfer
from mpitrain.shrink.graph import RULES, lines
from mpitrain.shrink.tracing import trace
from mpitrain.train.build.saved import load

RNG = np.random.default_rng(0)


def rows(*shape: int) -> Any:
    return RNG.standard_normal((2, *shape), dtype=np.float32)


def ready(model: nn.Module, *, seed: int = 0, dtype: str = "float32") -> nn.Module:
    model.initialize(seed, dtype)
    for name, buffer in model.named_buffers():
        buffer.array[...] = 0.5 + RNG.random(buffer.shape) if "running" in name else buffer.array
    return model.eval()


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
    chosen = choose(model, graph, 0.9)
    assert chosen.sizes == {"widths": [16, 8]}
    assert chosen.left[0] == "16 channels of first.weight stay: there is no rule of channels for the operation Flip"
    with pytest.raises(UsageError, match=r"0\.1 of the work cannot be reached: 0\.\d+ is left at the smallest sizes; 16"):
        choose(model, graph, 0.1)
    for wrong in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(UsageError, match="more than 0 and less than 1"):
            choose(model, graph, wrong)
    with pytest.raises(UsageError, match="no channels of this model can go"):
        gpt = ready(models.gpt(1, 2, 16, 8, 11))
        choose(gpt, trace(gpt, np.zeros((2, 8), np.int64)), 0.5)


def test_a_wrong_rule_is_found_by_the_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ready(Reversed())
    flip = trace(model, rows(4)) and next(type_ for type_ in _functions(model) if type_.__name__ == "Flip")
    monkeypatch.setitem(RULES, flip, lambda relations, operation: [
        relations.link(operation.inputs[0], dim, operation.outputs[0], dim) for dim in (0, 1)])
    x = rows(4)
    chosen = choose(model, trace(model, x), 0.4)
    with pytest.raises(ShapeError, match="does not compute what the model with zeros does"):
        transfer(model, ready(Reversed(tuple(chosen.sizes["widths"]))), chosen, x)       # type: ignore[arg-type]


def _functions(model: nn.Module) -> list[type[Any]]:
    from mpitrain.autograd import record
    with record() as operations:
        model(rows(4))
    return [operation.function for operation in operations]


MADE = {"lenet": (models.lenet, {}, (1, 28, 28), 0.32), "resnet20": (models.resnet20, {"channels": 1}, (1, 16, 16), 0.5),
        "resnet18": (models.resnet18, {"classes": 5}, (3, 32, 32), 0.6),
        "mlp": (models.mlp, {"inputs": 12, "hidden": [32, 24], "outputs": 5}, (12,), 0.5)}


@pytest.mark.parametrize("name", MADE)
def test_a_cut_model_computes_what_the_masked_one_does(name: str) -> None:
    make, arguments, shape, work = MADE[name]
    model, x = ready(make(**arguments), dtype="float64"), rows(*shape).astype(np.float64)        # type: ignore[operator]
    before = {key: value.copy() for key, value in model.state_dict().items()}
    chosen = choose(model, trace(model, x), work)
    smaller = ready(make(**{**arguments, **chosen.sizes}), seed=1, dtype="float64")              # type: ignore[operator]
    transfer(model, smaller, chosen, x)
    assert all(np.array_equal(before[key], value) for key, value in model.state_dict().items())
    masked, more = dict(before), rows(*shape).astype(np.float64)
    for (leaf, dim), kept in chosen.kept.items():
        mask = np.isin(np.arange(before[leaf].shape[dim]), kept).astype(float)
        masked[leaf] = masked[leaf] * mask.reshape([-1 if d == dim else 1 for d in range(before[leaf].ndim)])
    model.load_state_dict(masked)
    with no_grad():
        np.testing.assert_allclose(smaller(more).numpy(), model(more).numpy(), rtol=1e-6, atol=1e-9)
    assert 0.5 * work < chosen.work <= work
    (sizes,), (were,) = chosen.sizes.values(), chosen.before.values()
    assert all(size % 8 == 0 for size, was in zip(sizes, were, strict=True) if was >= 16 and size != was)


def test_the_least_important_go_and_equal_ones_by_index() -> None:
    model = ready(models.mlp(4, [16], 2))
    weight = model.state_dict()["linear0.weight"] * 0
    norms = np.array([9, 1, 1, 8, 1, 7, 1, 6, 1, 5, 1, 4, 1, 3, 1, 1], np.float32)
    weight[:, 0] = norms
    model.load_state_dict({**model.state_dict(), "linear0.weight": weight, "head.weight": np.zeros((2, 16), np.float32)})
    chosen = choose(model, trace(model, rows(4)), 0.5)
    assert chosen.sizes == {"hidden": [8]} and chosen.work == 0.5
    assert chosen.kept["linear0.weight", 0].tolist() == [0, 1, 3, 5, 7, 9, 11, 13]


def test_sizes_are_checked() -> None:
    for make, key, wrong in ((models.lenet, "widths", [6, 16, 120]), (models.lenet, "widths", [6, 16, 120, 0]),
                             (models.resnet20, "inner", [8] * 8), (models.resnet18, "inner", "8"), (models.lenet, "widths", 6)):
        with pytest.raises(ConfigError, match=rf"model\.{key} must be a list of \d integers of at least 1"):
            make(**{key: wrong})                                                                 # type: ignore[operator]


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
    assert low.rc == 64 and "LowBitProduct of linear0" in low.err and len(low.error_lines) == 1
    again = mpirun(1, "-m", "mpitrain", "cut", "whole", "--work", "0.01", "--out", "none", cwd=tmp_path)
    assert again.rc == 64 and "cannot be reached" in again.err and len(again.error_lines) == 1
