"""Plans: each is one that `train` accepts, with the memory that `inspect` says, and none that is faster is left out."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from launch import mpirun
from planned import BLOCK, LAYERS, WIDTH

from mpitrain.config import load_config
from mpitrain.config.sections import STATES
from mpitrain.errors import ConfigError, MpitrainError
from mpitrain.machines.machine import load_machine
from mpitrain.plan.inspect import inspect_config
from mpitrain.plan.memory import forecast_of
from mpitrain.plan.planner import search
from mpitrain.plan.planner.bound import near, rough
from mpitrain.plan.planner.candidates import Candidate, Cuts, candidate_of
from mpitrain.plan.planner.problem import Problem
from mpitrain.plan.planner.result import PARTS, figures
from mpitrain.plan.planner.search import Plan, all_of, best_first
from mpitrain.plan.planner.work import step_time, work_of
from mpitrain.plan.prepare import grid_of, open_data, prepare
from mpitrain.train.build.sizes import with_sizes

pytestmark = pytest.mark.usefixtures("counted")


@pytest.fixture(scope="module")
def plans(gpt: Problem) -> dict[int, list[Plan]]:
    """The best of 4 and of 8 ranks."""
    return {ranks: list(islice(best_first(gpt, ranks), 12)) for ranks in (4, 8)}


def every(problem: Problem, ranks: int) -> list[Candidate]:
    """All candidates that `allows` lets pass, and that can be cut so."""
    return [c for c in all_of(problem, ranks) if problem.allows(c) and problem.cut(c) is not None]


def test_memory_of_a_plan_is_that_of_inspect(folder: Path, gpt: Problem, plans: dict[int, list[Plan]]) -> None:
    """From the command line's keys, through what `inspect` calls, with another model and none of the planner's passes."""
    inputs = open_data(gpt.written)
    for ranks, found in plans.items():
        some = {(c.cuts, c.sharding): c for c in every(gpt, ranks) if c.schedule != "gpipe"} if ranks == 8 else {}
        others = [c for c in list(some.values())[::3] if gpt.accepts(c)]
        assert ranks != 8 or (len({c.cuts for c in others}) > 3 and {c.sharding for c in others} == {*STATES})
        for c, forecast in [*((plan.candidate, plan.forecast) for plan in found), *((c, gpt.forecast(c)) for c in others)]:
            config = with_sizes(load_config(folder / "gpt.toml", c.overrides(gpt.written)), inputs)
            run = prepare(config, grid_of(config, ranks), inputs)
            assert forecast_of(run.config, run.placed(), inputs) == forecast, c
            assert forecast.stages[0].pool


def test_inspect_accepts_every_plan(folder: Path, plans: dict[int, list[Plan]], gpt: Problem) -> None:
    for ranks, found in plans.items():
        assert len(found) == 12
        for plan in found[::3]:
            lines = inspect_config(load_config(folder / "gpt.toml", plan.candidate.overrides(gpt.written)), ranks)
            assert "parameters" in next(lines)


def test_what_the_planner_lets_pass_and_drops_is_what_inspect_does(folder: Path, gpt: Problem) -> None:
    """One candidate of 4 ranks for each schedule and sharding on each of some meshes: those that are refused, too."""
    said = list[bool]()
    chosen = {(c.cuts, c.schedule, c.sharding): c for c in all_of(gpt, 4) if c.cuts.pp == 2 or c.cuts.tp == 2}
    for c in list(chosen.values())[::3]:
        passed = gpt.allows(c) and gpt.cut(c) is not None and gpt.accepts(c)
        try:
            next(inspect_config(load_config(folder / "gpt.toml", c.overrides(gpt.written)), 4))
        except MpitrainError:
            said.append(False)
        else:
            said.append(True)
        assert passed == said[-1], c
    assert {*said} == {True, False}


def test_what_only_a_sample_or_the_loss_tells_is_refused_too(folder: Path) -> None:
    """Class weights do not go with classes that are cut along tp."""
    problem = Problem(load_config(folder / "gpt.toml", [f"train.weight={[1.0] * 12}"]), load_machine(folder / "slow.toml"))
    assert all(plan.candidate.cuts.tp == 1 for plan in best_first(problem, 2))
    assert any("without weights" in message for message in problem.refused)
    plain = Problem(load_config(folder / "gpt.toml", []), load_machine(folder / "slow.toml"))
    assert any(plan.candidate.cuts.tp == 2 for plan in best_first(plain, 2))


def test_stages_that_share_a_parameter_are_neither_planned_nor_inspected_with_momenta_at_one_bit(folder: Path) -> None:
    own = ["optimizer.freeze=2", "optimizer.name=onebit_adam"]
    problem = Problem(load_config(folder / "gpt.toml", own), load_machine(folder / "made-up.toml"))
    assert {plan.candidate.cuts.pp for plan in islice(best_first(problem, 4), 8)} == {1}
    assert any('"embed.token.weight" has a gradient of which two stages have parts' in said for said in problem.refused)
    assert "parameters" in next(inspect_config(load_config(folder / "gpt.toml", own), 2))
    for name in ("onebit_adam", "onebit_lamb", "zeroone_adam"):
        with pytest.raises(ConfigError, match=r"set mesh\.pp = 1, untie it"):
            next(inspect_config(load_config(folder / "gpt.toml", [*own, f"optimizer.name={name}", "mesh.pp=2"]), 2))


@pytest.mark.parametrize(("machine", "ranks"), [("made-up.toml", 1), ("made-up.toml", 8), ("slow.toml", 4)])
def test_the_first_plans_are_the_fastest_of_all_candidates(folder: Path, machine: str, ranks: int) -> None:
    problem = Problem(load_config(folder / "gpt.toml", []), load_machine(folder / machine))
    steps = sorted((step_time(problem, c).total, c) for c in every(problem, ranks))
    found = list(islice(best_first(problem, ranks), 10))
    expected = list(islice((total for total, c in steps if problem.accepts(c)), len(found)))
    assert [plan.step.total for plan in found] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("machine", "own"), [("made-up.toml", []), ("slow.toml", []), ("measured.toml", []),
                                              ("slow.toml", ["comm.algorithm=halving_doubling", "train.batch_size=64"])])
def test_no_step_is_below_its_bounds_and_parts_add_up(folder: Path, machine: str, own: list[str]) -> None:
    problem = Problem(load_config(folder / "gpt.toml", own), load_machine(folder / machine))
    for c in every(problem, 8)[::5]:
        step = step_time(problem, c)
        assert rough(problem, c) <= near(problem, c) * (1 + 1e-9) <= step.total * (1 + 2e-9), c
        assert sum(getattr(step, part) for part in PARTS) == pytest.approx(step.total)


def test_few_candidates_of_many_are_timed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(load_config(folder / "gpt.toml", ["train.batch_size=64"]), load_machine(folder / "made-up.toml"))
    timed = list[Candidate]()

    def counting(problem: Problem, c: Candidate) -> object:
        timed.append(c)
        return step_time(problem, c)
    monkeypatch.setattr(search, "step_time", counting)
    next(best_first(problem, 64))
    assert len(timed) < len(list(all_of(problem, 64))) / 3


def test_collectives_of_layers_are_those_of_megatron(gpt: Problem) -> None:
    """Two all-reduces of (rows, positions, width) forward and two backward in each block (Shoeybi et al., 2019, figure 4)."""
    c = Candidate(Cuts(1, 1, 1, 2), 2, "1f1b", 1, 2, "none", False)
    heard, rows = gpt.traffic(c.cuts), gpt.rows(c)
    assert rows == 4
    for block in heard[1:1 + LAYERS]:
        for way in (block.forward, block.backward):
            assert [(one.operation, one.axes, one.nbytes, one.count) for one in way] == [
                ("all_reduce", ("tp",), 4 * BLOCK * WIDTH, 2)]
    once, again = (work_of(gpt, c._replace(recompute=which)).stages[0] for which in (False, True))
    assert sum(one.count for one in again.in_backward) == sum(one.count for one in (*once.in_backward, *once.in_forward))
    assert again.backward == pytest.approx(once.backward + once.forward)


def test_keys_and_values_go_once_round_the_ring_forward(gpt: Problem) -> None:
    """n - 1 messages of a rank's keys and values in each block: an all-gather of all of them (Liu et al., 2023)."""
    block = gpt.traffic(Cuts(1, 1, 4, 1))[1]
    assert sum(one.nbytes * one.count for one in block.ring_forward) == pytest.approx(4 * 2 * BLOCK * WIDTH)
    assert not block.forward and sum(one.nbytes * one.count for one in block.ring_backward) > 4 * 2 * BLOCK * WIDTH


def test_all_gradients_travel_once_a_step(gpt: Problem) -> None:
    """The bytes of buckets are those of the parameters, on the stage that has them, whatever states are cut."""
    c = Candidate(Cuts(2, 1, 1, 1), 2, "interleaved", 2, 4, "none", False)
    cut = gpt.cut(c)
    assert cut is not None
    n_bytes = 4 * sum(layout.size for layout in cut.layouts)
    for sharding, way in (("none", "all_reduce"), ("optimizer", "reduce_scatter"), ("gradients", "reduce_scatter"),
                          ("parameters", "reduce_scatter")):
        work = work_of(gpt, c._replace(sharding=sharding))
        buckets = [bucket for stage in work.stages for bucket in stage.buckets]
        assert sum(bucket.nbytes for bucket in buckets) == n_bytes and {bucket.operation for bucket in buckets} == {way}
        gathered = [one for stage in work.stages for one in stage.fetched_forward if one.operation == "all_gather"]
        assert sum(one.nbytes for one in gathered) == (n_bytes if sharding == "parameters" else 0)
        assert bool(work.after) == (sharding in ("optimizer", "gradients"))


def test_the_configuration_itself_is_a_candidate(gpt: Problem) -> None:
    config = load_config(Path(gpt.written.folder) / "gpt.toml", ["mesh.pp=2", "mesh.tp=2", "train.micro_batches=8"])
    c = candidate_of(config, 8)
    assert c.mesh == {"pp": 2, "dp": 2, "ep": 1, "cp": 1, "tp": 2} and c.micro_batches == 4
    assert c.overrides(config) == ["mesh.dp=2"]


def test_joules_are_estimated_from_watts_or_unknown(folder: Path, plans: dict[int, list[Plan]], gpt: Problem) -> None:
    plan = plans[4][0]
    busy = plan.step.compute + plan.step.update
    expected = 4 * (20.0 * busy + 5.0 * (plan.step.total - busy)) / 16
    assert figures(gpt, plan).joules == pytest.approx(expected)
    unknown = Problem(load_config(folder / "gpt.toml", []), load_machine(folder / "slow.toml"))
    assert figures(unknown, next(best_first(unknown, 2))).joules is None


def test_plans_train_and_a_run_is_told_beside_its_prediction(folder: Path, gpt: Problem, tmp_path: Path) -> None:
    """Some plans of 2 ranks in one job; a run without log.machine imports nothing of the planner."""
    chosen = {plan.candidate.cuts: plan.candidate.overrides(gpt.written) for plan in islice(best_first(gpt, 2), 40)}
    assert len(chosen) >= 3
    result = mpirun(2, str(Path(__file__).with_name("planner_program.py")), str(folder / "gpt.toml"), str(tmp_path),
                    json.dumps(list(chosen.values())), timeout=120)
    assert result.rc == 0, result.err
    told = json.loads((tmp_path / "beside/run.json").read_text())["plan"]
    lines = [json.loads(line) for line in (tmp_path / "beside/metrics.jsonl").read_text().splitlines()]
    steps = [line["step_s"] for line in lines if "step_s" in line]
    assert told["measured"]["steps"] == len(steps) and min(steps) <= told["measured"]["median"] <= max(steps)
    expected = step_time(gpt, candidate_of(gpt.config, 2))
    assert told["machine"] == "made-up" and told["predicted"]["total"] == pytest.approx(expected.total)
    assert told["predicted_over_measured"] == pytest.approx(expected.total / told["measured"]["median"])
    assert "plan" not in json.loads((tmp_path / "0/run.json").read_text())
