"""The memory report: formulas against what reducers and steps do, what a stage holds at once, and what it says in words."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpitrain import models, nn, optim
from mpitrain.backend import memory as pools
from mpitrain.backend import native
from mpitrain.config import CommConfig, MeshConfig, TrainConfig, load_config
from mpitrain.config.sections import STATES
from mpitrain.parallel.gradients.bucket_sum import AllReduce, TreeSum
from mpitrain.parallel.gradients.reducer import GradientReducer
from mpitrain.placement.bytes import Forecast, Use, sums_at_once
from mpitrain.placement.place import place
from mpitrain.placement.shard_cuts import probe
from mpitrain.plan.activations import Course, Phase, most, trace
from mpitrain.plan.inspect import inspect_config
from mpitrain.plan.memory import NOBODY, _whole, forecast
from mpitrain.plan.memory_lines import forecast_lines, report_lines
from mpitrain.schedules.grid import Grid
from mpitrain.schedules.microtree import RankTree, share
from mpitrain.schedules.pipeline import SCHEDULES
from mpitrain.schedules.pipeline_check import actions_of
from mpitrain.train.build.from_config import describe

needs_pool = pytest.mark.skipif(native.compiler() is None, reason="no C compiler")
LOSS = nn.LOSSES["cross_entropy"]()
ALONE = Grid({})
MIB = 1 << 20


def in_pool(monkeypatch: pytest.MonkeyPatch, action: Callable[[pools.Pool], Any]) -> Any:
    """What `action` returns, where the pool counts as this process's; only while it runs."""
    pool = pools.pool()
    assert pool is not None
    monkeypatch.setattr(pools, "_used", [pool])

    def run() -> Any:
        pool.use()
        return action(pool)
    return contextvars.Context().run(run)


@pytest.mark.parametrize(("n_micro", "n", "tree"), [(1, 1, False), (3, 1, False), (7, 1, False), (8, 1, False), (8, 3, False),
                                                    (1, 1, True), (6, 1, True), (7, 1, True)])
def test_a_reducer_keeps_as_many_sums_as_predicted(n_micro: int, n: int, tree: bool) -> None:
    found = 0
    for rank in range(n):
        model = nn.Sequential(nn.Linear(3, 2))
        storage, alone = model.initialize(0), SimpleNamespace(size=1)
        reducer = GradientReducer(storage, TreeSum(alone, RankTree(n_micro, rank, n)) if tree else AllReduce(alone))
        first, last = share(rank, n, n_micro)
        reducer.begin()
        for micro in range(first, last):
            reducer.begin_micro_batch(micro, last=micro == last - 1)
            for parameter in model.parameters():
                parameter.grad = parameter.grad_buffer
                for hook in parameter.grad_hooks:
                    hook(parameter)
        reducer.finish()
        found = max(found, len(reducer.arenas))
    assert sums_at_once(n_micro, n, tree=tree) == found


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "interleaved"])
def test_a_stage_holds_what_its_schedule_keeps_in_flight(name: str) -> None:
    """With forwards that keep 10, and nothing else, the peak is the one that the checker proves; messages come on top."""
    chunks = 2 if name == "interleaved" else 1
    phases = {"F": Phase(10, 10), "B": Phase(0, 0 if name == "zb_h1" else -10), "W": Phase(0, -10)}
    for stage in range(2):
        program = list(actions_of(SCHEDULES[name], stage, 2, 6, chunks))
        live = peak = 0
        for action in program:
            live += {"F": 1, "W": -1, "B": 0 if name == "zb_h1" else -1}[action.kind]
            peak = max(peak, live)
        plain, with_messages = ([Course(phases, size, size) for _ in range(2 * chunks)] for size in (0, 1))
        assert most(program, lambda chunk: chunk * 2, plain) == 10 * peak
        assert 10 * peak < most(program, lambda chunk: chunk * 2, with_messages) <= 10 * peak + 2


@needs_pool
def test_a_few_rows_tell_what_all_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line through 2 and 4 rows against a pass of all 24, in one and in two halves of backward; parameters are not made."""
    def look(pool: pools.Pool) -> None:
        for recompute in (False, True):
            for split in (False, True):
                found = []
                for few in (2, 24):
                    monkeypatch.setattr("mpitrain.plan.activations.FEW", few)
                    model = models.gpt(2, 2, 64, 32, 50)
                    model.recompute = recompute
                    x = np.arange(32)[None]
                    found.append(trace([model], LOSS, x, x, 24, pool=pool, seed=0, precision="float32", tokens=True, split=split))
                    assert not model.parameters()[0].allocated
                (line,), (all_of_them,) = found
                assert list(line.phases) == ["F", "B", "W"][:2 + split] and line.phases["F"].kept > 100_000
                for kind, phase in all_of_them.phases.items():
                    assert line.phases[kind].peak == pytest.approx(phase.peak, rel=0.02, abs=5_000), kind
                    assert line.phases[kind].kept == pytest.approx(phase.kept, rel=0.02, abs=5_000), kind
                assert abs(sum(phase.kept for phase in line.phases.values())) < 5_000, "all of it is let go of"
    in_pool(monkeypatch, look)


class Odd(nn.Module):
    def __init__(self) -> None:
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        return {}["key"]


def predict(model: nn.Module, sample: Any = None, grid: Grid = ALONE, *, micro_batches: int = 0, device: str = "cpu",
            offload: str = "none", **comm: Any) -> Forecast:
    placement = place(model, grid, MeshConfig(), TrainConfig(batch_size=12, micro_batches=micro_batches, device=device),
                      CommConfig(**comm))
    return forecast(placement, sample, loss=LOSS, optimizer=lambda storage: optim.AdamW(storage), tokens=False,
                    schedule=SCHEDULES["1f1b"], offload=offload)


@needs_pool
def test_what_cannot_be_predicted_is_said_and_the_rest_is(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = np.zeros((1, 4), np.float32), np.zeros(1, np.int64)
    assert predict(Odd(), sample).why == NOBODY
    found: Forecast = in_pool(monkeypatch, lambda pool: predict(Odd(), sample))
    assert found.stages == [Use(4 * 32, 4 * 32, 8 * 32, 0, None, None)] and "KeyError" in found.why
    lines = list(forecast_lines(found))
    assert lines[0].startswith("memory of a rank in MiB, predicted (activations are not: ")
    assert lines[-1].split()[-2:] == ["-", "-"]


@needs_pool
@pytest.mark.parametrize(("cut", "keys"), [({"tp": 2}, {}), ({"tp": 2}, {"sequence": True}), ({"cp": 2}, {}),
                                           ({"cp": 2, "tp": 2}, {"sequence": True}), ({"ep": 2}, {}), ({"pp": 2, "ep": 2}, {})])
def test_a_model_that_ranks_have_together_runs_on_one_of_them(monkeypatch: pytest.MonkeyPatch, cut: dict[str, int],
                                                              keys: dict[str, Any]) -> None:
    """The others' answers are made up: activations are fewer than those of one rank, and more than its share of them."""
    def found(lengths: dict[str, int], **keys: Any) -> int:
        model = models.gpt(2, 2, 64, 32, 50, **({"experts": 4} if "ep" in cut else {}))
        placement = place(model, Grid(lengths), MeshConfig(**keys), TrainConfig(batch_size=8, micro_batches=2), CommConfig())
        x = np.arange(32)[None]
        told = forecast(placement, (x, x), loss=LOSS, optimizer=lambda storage: optim.AdamW(storage), tokens=True,
                        schedule=SCHEDULES["1f1b"])
        assert not told.why, told.why
        return max(use.activations or 0 for use in told.stages)

    alone = in_pool(monkeypatch, lambda pool: found(dict.fromkeys(cut, 1)))
    here = in_pool(monkeypatch, lambda pool: found(cut, **keys))
    n = int(np.prod([size for axis, size in cut.items() if axis != "ep"]))     # experts have other ranks' rows in place of some
    assert alone / n * 0.9 < here < alone * 1.1, (alone, here)


@needs_pool
def test_channels_and_gates_that_two_ranks_share_are_half_on_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gated inverted residuals: parameters by their plan, and activations less those of the inputs that both have."""
    def found(n: int) -> Use:
        model = models.efficientnet_b0(classes=10, width=0.25, halvings=3, drop_path=0.0)
        placement = place(model, Grid({"tp": n}), MeshConfig(), TrainConfig(batch_size=4, micro_batches=2), CommConfig())
        told = forecast(placement, (np.zeros((1, 3, 16, 16), np.float32), np.zeros(1, np.int64)), loss=LOSS,
                        optimizer=lambda storage: optim.AdamW(storage), tokens=False, schedule=SCHEDULES["1f1b"])
        assert not told.why, told.why
        return told.stages[0]

    alone, here = (in_pool(monkeypatch, lambda pool, n=n: found(n)) for n in (1, 2))
    assert here.parameters == pytest.approx(alone.parameters / 2, rel=0.05)
    assert alone.activations and here.activations and 0.5 < here.activations / alone.activations < 0.75


@needs_pool
@pytest.mark.parametrize("keys", [{}, {"experts": 4}])
def test_matrices_without_memory_leave_the_forecast_as_it_is(monkeypatch: pytest.MonkeyPatch, keys: dict[str, int]) -> None:
    x = np.arange(32)[None]

    def told(large: int) -> list[Use]:
        monkeypatch.setattr("mpitrain.plan.lent.LARGE", large)
        placed = place(models.gpt(2, 2, 64, 32, 50, **keys), ALONE, MeshConfig(), TrainConfig(batch_size=8, micro_batches=2),
                       CommConfig())
        found = forecast(placed, (x, x), loss=LOSS, optimizer=lambda storage: optim.AdamW(storage), tokens=True,
                         schedule=SCHEDULES["1f1b"])
        assert not found.why, found.why
        return found.stages

    without, with_memory = (in_pool(monkeypatch, lambda pool, large=large: told(large)) for large in (16, 1 << 60))
    assert without == with_memory and without[0].activations


@pytest.mark.parametrize(("name", "kind"), [("adamw", 2), ("sgd", 1), ("adafactor", 0)])
@pytest.mark.parametrize("groups", ["[]", '[{params="linear*",frozen=true}]',
                                    '[{params="linear0.*",frozen=true},{params="*.bias"}]',
                                    '[{params="*.bias",frozen=true},{params="head.*",freeze_until=9}]'])
def test_the_state_that_is_predicted_is_the_one_that_is_made(name: str, kind: int, groups: str) -> None:
    config = load_config(None, [f"optimizer.name={name}", f"optimizer.groups={groups}"])
    made = describe(config, tokens=False)
    placed = place(made.model, ALONE, config.mesh, config.train, config.comm)
    told = placed.bytes(placed.layout(), "none", made.optimizer(probe())).optimizer
    storage = describe(config, tokens=False).model.initialize(0)
    assert told == made.optimizer(storage).nbytes
    assert (told == kind * storage.values.nbytes) == (kind > 0 and "true" not in groups)
    assert kind or told < 0.1 * storage.values.nbytes


def test_each_part_has_its_formula() -> None:
    """1,000 numbers in each of two stages: 1,008 with the ends of lines; AdamW has two numbers for each."""
    def two() -> nn.Module:
        return nn.Sequential(nn.Linear(10, 100, bias=False), nn.Linear(100, 10, bias=False))

    line = 4 * 1008
    assert predict(two()).stages[0] == Use(2 * line, 2 * line, 4 * line, 0, None, None)
    assert predict(two(), grid=Grid({"pp": 2}), micro_batches=4).stages == [Use(line, 3 * line, 2 * line, 0, None, None)] * 2
    assert predict(two(), grid=Grid({"dp": 4}), sharding="parameters").stages[0][:3] == (line // 2, line // 2, line)
    one_copy = [predict(two(), grid=Grid({"dp": 4}), sharding=kind, node_shared=True).stages[0][:3] for kind in STATES]
    plain, sliced = predict(two(), grid=Grid({"dp": 4})).stages[0][:3], (2 * line, line // 2, line)
    assert one_copy == [plain, plain, sliced, sliced], "the node's one copy, which has slices of its own"
    assert predict(two(), offload="file").stages[0][2:4] == (0, 4 * line)
    assert predict(two(), offload="host", device="gpu").stages[0][2:4] == (0, 8 * line)


def test_the_pool_holds_all_parts_and_an_eighth_of_the_activations_between_blocks() -> None:
    assert _whole(Use(100, 200, 300, 7000, None, None), 8000, 5) == Use(100, 200, 300, 7000, 8000, 100 + 200 + 300 + 9000 + 5)


def test_the_report_shows_the_rank_of_each_stage_that_has_most() -> None:
    found = Forecast([Use(MIB, MIB, 2 * MIB, 0, MIB, 5 * MIB), Use(2 * MIB, MIB, 2 * MIB, 0, None, None)])
    small, large = Use(MIB, MIB, MIB, MIB, MIB, MIB), Use(MIB, 3 * MIB, MIB, MIB, MIB, MIB)
    lines = list(report_lines(found, [(0, small), (0, large), (1, small), (1, small)]))
    assert [" ".join(line.split()) for line in lines] == [
        "memory of a rank in MiB, predicted / measured",
        "stage rank parameters gradients optimizer offloaded activations pool",
        "0 1 1.00 / 1.00 1.00 / 3.00 2.00 / 1.00 0.00 / 1.00 1.00 / 1.00 5.00 / 1.00",
        "1 2 2.00 / 1.00 1.00 / 1.00 2.00 / 1.00 0.00 / 1.00 - / 1.00 - / 1.00"]


@needs_pool
def test_inspect_has_a_row_for_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(__file__).parents[2] / "examples/digits.toml"

    def lines(*overrides: str) -> list[str]:
        found: list[str] = in_pool(monkeypatch, lambda pool: list(inspect_config(load_config(path, list(overrides)), 4)))
        return found[[line.startswith("memory of a rank") for line in found].index(True):]
    head, names, *rows, kept = lines("mesh.pp=2")
    assert kept.startswith("  a row of a micro-batch keeps ") and kept.endswith(" KiB for backward")
    assert head == "memory of a rank in MiB, predicted" and names.split()[0] == "stage" and len(rows) == 2
    assert all(float(cell) >= 0 for row in rows for cell in row.split())


@needs_pool
def test_inspect_tells_the_multiply_adds_of_a_sample_whatever_the_cut(tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "examples/digits.toml"
    for overrides in ([], ["mesh.pp=2"], ["mesh.tp=2"]):
        found = [line for line in inspect_config(load_config(path, overrides), 2) if line.startswith("multiply-adds")]
        assert found == [f"multiply-adds of a sample: {64 * 128 + 128 * 128 + 1280:,} forward, 3 times as many in a "
                         "training step"]
    (tmp_path / "net.py").write_text("""
from mpitrain import nn
class Own(nn.Module):
    def forward(self, x):
        assert x.array.any()
        return x
def net():
    return nn.Sequential(("flatten", nn.Flatten()), ("cut", nn.Linear(64, 10)), ("own", Own()))
""")
    (tmp_path / "run.toml").write_text("""
[model]
name = "net.py:net"
[data]
path = "digits"
[train]
steps = 1
batch_size = 8
""")
    found = [line for line in inspect_config(load_config(tmp_path / "run.toml", []), 1) if line.startswith("multiply-adds")]
    assert len(found) == 1 and found[0].startswith("multiply-adds of a sample: not counted (AssertionError")
