"""Lower clocks where a pipeline waits, against linear programs, all choices there are, and `lowtime`."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from configs import flat
from slack import compared, made_table

from mpitrain.cli import main
from mpitrain.errors import ConfigError, DataError, MissingError, MpitrainError, UsageError
from mpitrain.plan.energy_lines import energy_lines
from mpitrain.schedules.clocks import Clock, Table, read_table, write_table
from mpitrain.schedules.pipeline import SCHEDULES
from mpitrain.schedules.pipeline_check import flow
from mpitrain.schedules.pipeline_simulate import Cost, simulate_pipeline
from mpitrain.schedules.slack import Pipeline, at_time, front_of, lines_of, pareto, write_clocks
from mpitrain.schedules.time_cost import convex, cost_at


def drawn_table(seed: int, n_stages: int, kinds: str = "FB", n_clocks: int = 4) -> Table:
    """Clocks whose joules fall with their seconds, not always on a convex line, as measured ones do not."""
    draw, table = random.Random(seed), Table()
    for place in itertools.product(range(n_stages), kinds):
        seconds, joules = draw.uniform(1, 3), draw.uniform(50, 100)
        for number in range(n_clocks):
            table.setdefault(place, []).append(Clock(1000.0 - 100 * number, seconds, joules))
            seconds, joules = seconds + draw.uniform(0.1, 1), joules - draw.uniform(-1, 12)
    return table


def least_by_linear_program(pipeline: Pipeline, seconds: float, message: float) -> float:
    """The least joules of a step of so many seconds at any clocks on the polylines, waiting left out, by scipy."""
    optimize = pytest.importorskip("scipy.optimize", reason="scipy is not installed")
    places = pipeline.places
    n, number = len(places), {place: index for index, place in enumerate(pipeline.places)}
    rows, bounds = [], []                                    # variables: start, duration and joules of each action

    def row(entries: dict[int, float], most: float) -> None:
        rows.append([entries.get(index, 0.0) for index in range(3 * n)])
        bounds.append(most)
    limits: list[tuple[float, float]] = [(0, seconds)] * n
    for index, place in enumerate(places):
        hull = convex([(c.seconds, c.joules - pipeline.idle_watts * c.seconds) for c in pipeline.options[place]])
        limits.append((hull[0][0], hull[-1][0]))
        row({index: 1, n + index: 1}, seconds)
        for (fast, dear), (slow, cheap) in itertools.pairwise(hull):
            slope = (cheap - dear) / (slow - fast)
            row({n + index: slope, 2 * n + index: -1}, slope * fast - dear)
        if len(hull) == 1:
            row({2 * n + index: -1}, -hull[0][1])
    for stage, program in enumerate(pipeline.programs):
        for one, other in itertools.pairwise(program):
            row({number[stage, one]: 1, n + number[stage, one]: 1, number[stage, other]: -1}, 0)
    for stage, action, need in flow(pipeline.programs, pipeline.chunks):
        if need is not None:
            row({number[need]: 1, n + number[need]: 1, number[stage, action]: -1}, -message)
    found = optimize.linprog([0.0] * 2 * n + [1.0] * n, rows, bounds, bounds=limits + [(None, None)] * n, method="highs")
    return float(found.fun)


@pytest.mark.parametrize(("schedule", "n_stages", "n_micro", "chunks", "message", "idle"), [
    ("1f1b", 3, 4, 1, 0.0, 0.0), ("gpipe", 2, 3, 1, 0.25, 0.0), ("zb_h1", 3, 3, 1, 0.1, 5.0), ("interleaved", 2, 3, 2, 0.0, 3.0),
    ("1f1b", 1, 3, 1, 0.5, 2.0)])
def test_each_point_of_the_front_is_a_linear_programs_optimum(schedule: str, n_stages: int, n_micro: int, chunks: int,
                                                              message: float, idle: float) -> None:
    table = drawn_table(7, n_stages * chunks, "FBW" if schedule == "zb_h1" else "FB")
    pipeline = Pipeline(table, SCHEDULES[schedule], n_stages, n_micro, chunks, message=message, idle_watts=idle)
    corners = list(pipeline.network.corners())[::-1]
    assert corners[0].total == pytest.approx(pipeline.highest().seconds, rel=1e-9)
    waits = message if n_stages > 1 else 0.0
    for share in (0.0, 0.1, 0.37, 0.8, 1.0):
        wanted = corners[0].total + share * (corners[-1].total - corners[0].total)
        point = at_time(corners, wanted)
        assert point.cost == pytest.approx(least_by_linear_program(pipeline, wanted + 1e-9, waits), rel=1e-6)
        spent = sum(cost_at(activity.options, taken) for activity, taken in zip(pipeline.network.activities, point.seconds))
        assert spent == pytest.approx(point.cost, rel=1e-9)              # its seconds are what that costs


@pytest.mark.parametrize("seed", range(3))
def test_a_small_pipelines_clocks_are_near_the_best_of_all_choices(seed: int) -> None:
    pipeline = Pipeline(drawn_table(seed, 2, n_clocks=3), SCHEDULES["1f1b"], 2, 2)
    front = front_of(pipeline)
    best = min(sum(clock.joules for clock in chosen) for chosen in itertools.product(*pipeline.options.values())
               if pipeline.simulated(dict(zip(pipeline.places, chosen))).seconds <= front.highest.seconds * (1 + 1e-9))
    assert front.least <= best * (1 + 1e-9) <= front.fastest.joules * (1 + 2e-9)
    assert front.fastest.joules <= 1.02 * best


def test_four_stages_of_which_one_is_longer_take_the_same_step_for_a_tenth_less_energy() -> None:
    table = made_table(4, longer=1.3)
    front = front_of(Pipeline(table, SCHEDULES["1f1b"], 4, 8))
    fastest = {place: clocks[0].seconds for place, clocks in table.items()}
    cost = Cost([fastest[stage, "F"] for stage in range(4)], [fastest[stage, "B"] for stage in range(4)], weight=0.0)
    step = simulate_pipeline(SCHEDULES["1f1b"], 4, 8, cost).total
    assert front.highest.seconds == pytest.approx(step, rel=1e-12) and front.fastest.seconds <= step * (1 + 1e-9)
    assert front.fastest.joules <= 0.9 * front.highest.joules
    assert front.least <= front.fastest.joules <= 1.005 * front.least
    assert all(a.seconds < b.seconds and a.joules > b.joules for a, b in itertools.pairwise(front.points))


def test_where_nothing_waits_no_clock_is_lowered() -> None:
    front = front_of(Pipeline(made_table(1), SCHEDULES["1f1b"], 1, 4))
    assert front.fastest.chosen == front.highest.chosen


def test_waiting_is_paid_for_and_clocks_that_cost_more_than_waiting_are_not_taken() -> None:
    table = made_table(4)
    idle = Pipeline(table, SCHEDULES["1f1b"], 4, 8, idle_watts=70.0)
    front = front_of(idle)
    assert front.highest.joules == pytest.approx(
        sum(8 * clocks[0].joules for clocks in table.values())
        + 70 * sum(share * front.highest.seconds for share in front.highest.timeline.idle()))
    clocks = [Clock(2, 1.0, 100.0), Clock(1, 2.0, 90.0)]
    assert pareto(clocks, 0.0) == clocks and pareto(clocks, 8.0) == clocks and len(pareto(clocks[::-1], -20.0)) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")                        # of its fit of exponentials
@pytest.mark.parametrize("idle", [0.0, 70.0])
def test_clocks_are_within_a_hundredth_of_lowtimes(tmp_path: Path, idle: float) -> None:
    pytest.importorskip("lowtime", reason="lowtime is not installed (pip install lowtime==0.3.0)")
    write_table(tmp_path / "zeus.csv", made_table())
    table = read_table(tmp_path / "zeus.csv")
    theirs, ours = compared(Pipeline(table, SCHEDULES["1f1b"], 4, 8, idle_watts=idle), table, 0.001)
    assert ours.seconds <= max(theirs.seconds, 1.608) * (1 + 1e-9)
    assert ours.joules <= 1.01 * theirs.joules


def test_a_table_comes_back_from_its_file_and_the_command_prints_the_front(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = made_table()
    write_table(tmp_path / "zeus.csv", table)
    assert read_table(tmp_path / "zeus.csv") == table
    files = [str(tmp_path / name) for name in ("zeus.csv", "clocks.csv")]
    assert main(["slack", files[0], "--micro", "8", "--points", "3", "--out", files[1]]) == 0
    said = capsys.readouterr().out
    assert "the same step at clocks by slack: 1.608 s" in said and "11.9% less" in said
    lines = (tmp_path / "clocks.csv").read_text().splitlines()
    assert lines[0] == "stage,instruction,frequency,time,energy,micro_batch,chunk" and len(lines) == 1 + 4 * 16
    assert [line.split(",")[:3] for line in lines if line.startswith("3,")] == [
        ["3", word, "1410"] for word in ("forward", "backward") * 8]       # all of the longest stage is on the longest way


def test_the_clocks_written_make_the_step_that_was_told(tmp_path: Path) -> None:
    pipeline = Pipeline(made_table(2, n_clocks=5), SCHEDULES["gpipe"], 2, 3)
    fast = front_of(pipeline, 2).fastest
    write_clocks(tmp_path / "clocks.csv", fast)
    joules = sum(float(line.split(",")[4]) for line in (tmp_path / "clocks.csv").read_text().splitlines()[1:])
    assert joules == pytest.approx(fast.joules)


def test_joules_are_those_of_all_ranks_and_of_a_sample() -> None:
    pipeline = Pipeline(made_table(2, n_clocks=3), SCHEDULES["1f1b"], 2, 2)
    front = front_of(pipeline)
    said = list(lines_of(front, pipeline, samples=32, replicas=4))
    assert f"{4 * front.highest.joules:.4g} J" in said[0] and f"{4 * front.fastest.joules / 32:.4g}" in said[-len(front.points)]


RUN = """
[model]
name = "mlp"
inputs = 64
hidden = [64, 64, 64, 64, 64]
outputs = 10
[data]
path = "digits"
[train]
epochs = 1
batch_size = 64
"""
HEADER = "stage,instruction,frequency,time,energy\n"


@pytest.mark.parametrize(("text", "says"), [
    ("stage,instruction,frequency,time\n0,forward,1,1\n", "found no energy"), ("", "found no stage"), (HEADER, "found no row"),
    (HEADER + "0,forwards,1410,1,1\n", 'line 2: the instruction "forwards" is not there .did you mean "forward"'),
    (HEADER + "0,forward,1410,1,1\n0,forward,fast,1,1\n", 'line 3: frequency must be more than 0, found "fast"'),
    (HEADER + "0.5,forward,1410,1,1\n", "stage must be a whole number from 0 on"),
    (HEADER + "0,forward,1410,-1,1\n", "time must be more than 0"),
    (HEADER + "0,forward,1410,1,nan\n", "energy must be 0 or more"),
    (HEADER + "0,forward,1410\n", "line 2: expected a value for each of stage,instruction,frequency,time,energy, and the row "
                                  "ends before time"),
    (HEADER + "0\n", "the row ends before instruction"),
    (HEADER + "0,forward,1410,1,1\n0,forward,1410,2,1\n", "1410 MHz of forward on stage 0 are there twice"),
    (HEADER + "0,forward,1410,1,1\n2000000000,forward,1410,1,1\n", "there is stage 2000000000 and no stage 1"),
    ("\0\xff", "found no stage|not a table")])
def test_a_table_that_cannot_be_understood_is_refused_by_its_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "zeus.csv").write_text(text, encoding="latin-1")
    with pytest.raises(DataError, match=says):
        read_table(tmp_path / "zeus.csv")


@pytest.mark.parametrize(("arguments", "error", "says"), [
    (["--micro", "0"], UsageError, "--micro must be a finite number, 1 or more, found 0"),
    (["--chunks", "3"], UsageError, "--chunks 3 does not divide the 2 stages"),
    (["--idle-watts", "-1"], UsageError, "--idle-watts must be a finite number, 0 or more"),
    (["--schedule", "1f2b"], ConfigError, "did you mean"), (["--schedule", "zb_h1"], ConfigError, "has no weight of stage 0"),
    (["--points", "1"], UsageError, "--points must be")])
def test_what_the_command_cannot_do_it_says(tmp_path: Path, arguments: list[str], error: type[MpitrainError], says: str) -> None:
    write_table(tmp_path / "zeus.csv", made_table(2, n_clocks=2))
    with pytest.raises(error, match=says):
        main(["slack", str(tmp_path / "zeus.csv"), *arguments])


def test_a_table_that_is_not_there_or_lacks_a_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="no such table of clocks"):
        read_table(tmp_path / "nowhere.csv")
    with pytest.raises(ConfigError, match="has no forward of stage 2, and the pipeline has 3 stages"):
        Pipeline(made_table(2), SCHEDULES["1f1b"], 3, 4)




def test_plan_prints_the_clocks_of_the_best_plan_whose_stages_the_table_has(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_table(tmp_path / "zeus.csv", made_table(2, n_clocks=4))
    (tmp_path / "run.toml").write_text(RUN)
    asked = ["plan", str(tmp_path / "run.toml"), "--ranks", "4", "--machine", "dgx-a100", "--energy", str(tmp_path / "zeus.csv")]
    assert main([*asked, "mesh.pp=2", "--top", "20"]) == 0
    said = capsys.readouterr().out.splitlines()
    place = next(index for index, line in enumerate(said) if "clocks of " in line)
    name = said[place].partition(":")[0]                     # not the best plan: zb_h1 needs the instruction weight
    assert "zb_h1" not in next(line for line in said if line.startswith(f"{name}: mpirun -n 4"))
    assert said[place + 1].startswith("2 stages, ") and "J a sample" in "\n".join(said[place:])
    with pytest.raises(ConfigError, match="none of the 5 plans shown can have clocks of this table; the best: this table has"):
        main([*asked, "mesh.pp=4"])


def test_a_plans_front_has_the_joules_of_all_its_ranks(tmp_path: Path) -> None:
    write_table(tmp_path / "zeus.csv", made_table(2, n_clocks=3))
    plan = SimpleNamespace(mesh={"pp": 2, "dp": 3, "ep": 1, "cp": 1, "tp": 2}, schedule="1f1b", chunks=1, micro_batches=4)
    front = front_of(Pipeline(read_table(tmp_path / "zeus.csv"), SCHEDULES["1f1b"], 2, 4, idle_watts=50.0))
    file = tmp_path / "zeus.csv"
    said = list(energy_lines(flat(batch_size=96), plan, 50.0, read_table(file), file))
    assert f"{6 * front.fastest.joules:.4g} J" in said[1] and f"{6 * front.fastest.joules / 96:.4g}" in said[-len(front.points)]
    with pytest.raises(ConfigError, match="this table has clocks of 2 stages, and the plan has 1 stage;"):
        list(energy_lines(flat(), SimpleNamespace(**{**vars(plan), "mesh": {"pp": 1}}), 0.0, read_table(file), file))
