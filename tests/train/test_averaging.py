"""Averages of weights: PyTorch's, the same bits on any ranks and sharding, kept in checkpoints, and made into runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from runs import SMALL, many, record, write

from mpitrain import nn
from mpitrain.checkpoint.choosing import chosen
from mpitrain.checkpoint.state import State
from mpitrain.cli import main
from mpitrain.config.sections import AverageConfig
from mpitrain.errors import ConfigError, UsageError
from mpitrain.nn.statistics import running_layers
from mpitrain.plan.prepare import open_data
from mpitrain.train.build.averaged import averaged
from mpitrain.train.build.saved import load
from mpitrain.train.observers.averaging import Averaging

EMA = ("average.kind=ema", "average.decay=0.9", "train.reproducible=layout", "train.micro_batches=6", "train.steps=20",
       "train.eval_every=10", "optimizer.schedule=constant")


NORM = """
from mpitrain import nn
def net(width: int = 16):
    return nn.Sequential(("flatten", nn.Flatten()), ("linear", nn.Linear(64, width)), ("norm", nn.BatchNorm1d(width)),
                         ("act", nn.ReLU()), ("drop", nn.Dropout(0.5)), ("head", nn.Linear(width, 10)))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs: whole; on two ranks with slices; cut short on two and resumed on one; without an average; of a norm."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "net.py").write_text(NORM)
    write(folder)
    write(folder, SMALL.replace('name = "mlp"\ninputs = 64\nhidden = [32]\noutputs = 10', 'name = "net.py:net"'), "norm.toml")
    sharded = "comm.sharding=optimizer"
    told = many(folder, (1, "run.toml", *EMA, "run.out=whole"), (2, "run.toml", *EMA, "run.out=sharded", sharded),
         (2, "run.toml", *EMA, "run.out=cut", "train.steps=10", sharded), (1, "run.toml", *EMA, "run.out=cut", "--resume"),
         (1, "run.toml", *EMA[2:], "run.out=plain"),
         (1, "norm.toml", "run.out=swa", "average.kind=swa", "average.start=10", "average.every=5", "checkpoint.every=5",
          "checkpoint.keep=20"))
    assert not [one for one in told if "message" in one]
    return folder


def results(run: Path) -> tuple[str, str, float]:
    about = record(run)
    return about["parameters_sha256"], about["average"]["parameters_sha256"], about["metrics"]["loss"]


def steps_of_weights(config: AverageConfig, n: int) -> tuple[Any, list[Any]]:
    """Averaging over n made-up steps of a small model, and the weights after each."""
    model = nn.Linear(5, 3)
    storage = model.initialize(0, "float64")
    policy: Any = SimpleNamespace(storage=storage, shards=None, blamed="", masks=None, own=lambda: storage.segments,
                                  publish=lambda: None, settle=lambda: None)
    one, seen, rng = Averaging(config, policy, State(model)), [], np.random.default_rng(2)
    for step in range(1, n + 1):
        storage.values += rng.normal(size=storage.values.shape) * 0.1
        seen.append([np.array(p.array) for p in model.parameters()])
        one.after_step(step, None, 0.0)                      # type: ignore[arg-type]
    return one, seen


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_averages_are_those_of_pytorch(kind: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from torch.optim import swa_utils
    one, seen = steps_of_weights(AverageConfig(kind=kind, decay=0.9, warmup=False, start=4, every=3), 30)    # type: ignore[arg-type]
    shadow = torch.nn.Linear(5, 3, dtype=torch.float64)
    more = {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)} if kind == "ema" else {}
    average = swa_utils.AveragedModel(shadow, **more)
    for values in seen[3::3]:
        for p, value in zip(shadow.parameters(), values):
            p.data[...] = torch.from_numpy(value)
        average.update_parameters(shadow)
    assert one.models == int(average.n_averaged) == 9
    for placed, wanted in zip(one.kind.placed(), average.module.parameters()):
        assert placed.array == pytest.approx(wanted.detach().numpy(), rel=1e-14)


def test_an_exponential_average_warms_up() -> None:
    one, seen = steps_of_weights(AverageConfig(kind="ema", decay=0.99), 3)
    first = seen[0][0]
    second = first + (1 - 2 / 11) * (seen[1][0] - first)
    third = second + (1 - 3 / 12) * (seen[2][0] - second)
    assert next(iter(one.kind.placed())).array == pytest.approx(third, rel=1e-14)


def test_the_model_has_its_weights_again_after_an_evaluation() -> None:
    one, _ = steps_of_weights(AverageConfig(kind="swa"), 5)
    storage = one.policy.storage
    weights, mean = storage.values.copy(), one.mean.copy()
    with one.in_use():
        assert all((storage.values[s.start:s.stop] == mean[s.start:s.stop]).all() for s in storage.segments)
    assert (storage.values == weights).all() and (one.mean == mean).all()


def test_the_average_has_one_set_of_bits_on_any_ranks_and_the_weights_are_those_without(runs: Path) -> None:
    first = results(runs / "whole")
    assert results(runs / "sharded") == first
    plain = record(runs / "plain")
    assert plain["parameters_sha256"] == first[0] and plain["metrics"]["loss"] != first[2]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["mesh.pp=2", "comm.node_shared=true"])
def test_the_average_has_these_bits_by_stages_and_with_one_copy_a_node_too(tmp_path: Path, runs: Path, way: str) -> None:
    write(tmp_path)
    many(tmp_path, (2, "run.toml", *EMA, "run.out=other", way))
    assert results(tmp_path / "other") == results(runs / "whole")


@pytest.mark.slow
def test_the_average_of_other_ways_to_cut_is_near(tmp_path: Path) -> None:
    write(tmp_path)
    ways = (("comm.sharding=gradients",), ("comm.sharding=parameters",), ("comm.sharding=optimizer", "comm.node_shared=true"),
            ("mesh.tp=2", 'mesh.plan={linear0 = "column", head = "row"}'))
    first, *others = many(tmp_path, *[(1 if not way else 2, "run.toml", *EMA, "train.reproducible=run", *way, f"run.out=way{i}")
                                      for i, way in enumerate(((), *ways))])
    assert [other["loss"] for other in others] == pytest.approx([first["loss"]] * 4, rel=1e-5)


def test_a_resumed_run_has_the_average_of_one_that_was_not(runs: Path) -> None:
    assert results(runs / "cut") == results(runs / "whole")


def test_a_run_of_the_average_has_statistics_of_its_own(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    saved = load(runs / "swa")
    inputs = open_data(saved.config)
    made = averaged(saved, lambda: inputs)
    layer, = running_layers(made.model)
    x = made.transforms(inputs.training.read(np.asarray(inputs.train_rows))[0]).reshape(-1, 64)
    linear: Any = dict(made.model.named_modules())["linear"]
    twin = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.BatchNorm1d(16))
    with torch.no_grad():
        twin[0].weight[...], twin[0].bias[...] = (torch.from_numpy(np.array(p.array)) for p in linear.parameters())
    batches = [torch.from_numpy(x[i:i + 48]) for i in range(0, len(x) - 47, 48)]
    torch.optim.swa_utils.update_bn(batches, twin)
    for buffer, wanted in zip(layer.buffers, (twin[1].running_mean, twin[1].running_var)):
        assert np.array(buffer.array) == pytest.approx(wanted.numpy(), rel=1e-4, abs=1e-5)
    assert main(["average", str(runs / "swa"), "--out", str(tmp_path / "made")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["parameters_sha256"] == record(runs / "swa")["average"]["parameters_sha256"]
    again, before = (running_layers(load(folder).model)[0] for folder in (tmp_path / "made", runs / "swa"))
    for kept, ours, of_run in zip(again.buffers, layer.buffers, before.buffers):
        assert (kept.array == ours.array).all() and (kept.array != of_run.array).any()


PRUNED = ("shrink.prune=magnitude", "shrink.sparsity=0.6", "shrink.begin=2", "shrink.end=8", "shrink.every=3", "train.steps=12")


def test_the_average_of_a_pruned_run_is_pruned_by_its_last_masks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is the mean of the weights of each step, zero where masks are; whatever ranks have of it."""
    write(tmp_path)
    keys = ("run.toml", *EMA, *PRUNED, "checkpoint.every=1", "checkpoint.keep=20")
    many(tmp_path, (1, *keys, "run.out=one"), (2, *keys, "run.out=two", "comm.sharding=optimizer"))
    assert results(tmp_path / "one") == results(tmp_path / "two")
    mean, name = None, "head.weight"
    for step in range(1, 13):
        found = chosen(tmp_path / "one" / "checkpoints", step)
        weights = np.array(found.read(f"parameters/{name}"), np.float64)
        mean = weights if mean is None else mean + (1 - min(0.9, step / (9 + step))) * (weights - mean)
        if step >= 2:
            bits = found.read(f"mask/{name}")
            kept = np.unpackbits(bits, bitorder="little")[:weights.size].reshape(weights.shape)
            mean *= kept
            assert not weights[kept == 0].any() and not found.read(f"average/{name}")[kept == 0].any()
        assert found.read(f"average/{name}") == pytest.approx(mean, rel=1e-5, abs=1e-8), step
    assert 0.5 < (mean == 0).mean() < 0.7
    assert main(["average", str(tmp_path / "one"), "--out", str(tmp_path / "made")]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["parameters_sha256"] == results(tmp_path / "one")[1]
    assert ((dict(load(tmp_path / "made").model.named_parameters())[name].array == 0) == (mean == 0)).all()


def test_what_is_predicted_of_copies_of_the_weights_is_what_they_take(tmp_path: Path, runs: Path) -> None:
    """One whole copy of 64 x 32 + 32 + 32 x 10 + 10 numbers, padded, or two; half of them on two ranks with slices."""
    def copies(run: Path) -> tuple[list[int], list[int]]:
        told = record(run)["memory"]
        return [one["copies"] for one in told["predicted"]], [one["copies"] for one in told["measured"]]
    write(tmp_path)
    back = ("run.toml", *EMA, *PRUNED, "shrink.rewind=1", "average.start=8")
    many(tmp_path, (1, *back, "run.out=one"), (2, *back, "run.out=node", "comm.node_shared=true", "train.reproducible=run"))
    weights = record(runs / "whole")["memory"]["measured"][0]["parameters"]
    assert copies(runs / "whole") == ([weights], [weights]) and weights >= 4 * (64 * 32 + 32 + 320 + 10)
    assert copies(tmp_path / "one") == ([2 * weights], [2 * weights])
    assert copies(tmp_path / "node") == ([2 * weights], [2 * weights] * 2)
    predicted, measured = copies(runs / "sharded")
    assert predicted == [weights // 2] and sum(measured) == weights, "slices end where blocks do, as those of the state"
    assert [2 * n for n in measured] == [one["optimizer"] for one in record(runs / "sharded")["memory"]["measured"]]
    assert copies(runs / "plain") == ([0], [0])


def test_an_average_over_the_way_back_to_first_weights_is_refused(tmp_path: Path) -> None:
    asked = [str(write(tmp_path)), *EMA, *PRUNED, "shrink.rewind=1"]
    with pytest.raises(ConfigError, match=r"average.start = 0 begins before step 8.*set average.start to 8"):
        main(["inspect", *asked])


def test_a_run_without_an_average_is_not_made_into_one(runs: Path) -> None:
    saved = load(runs / "swa", 5)
    with pytest.raises(UsageError, match="had averaged nothing at step 5"):
        averaged(saved, lambda: open_data(saved.config))
