"""Levels of exchange in whole runs: what is refused, and that a run that goes on ends where an undisturbed one does."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT, mpirun
from runs import SMALL, lines, many, ok, record, refused, steps, write

from mpitrain.checkpoint.manifest import load
from mpitrain.config import load_config
from mpitrain.errors import ConfigError
from mpitrain.models import mlp
from mpitrain.parallel.levels.fragments import cut, fragments_of
from mpitrain.parallel.levels.plan import plan
from mpitrain.parallel.levels.rounds import Rounds
from mpitrain.schedules.grid import Grid

OUTER = 'outer = "nesterov"\nlr = 0.7\nmomentum = 0.6\n'
LEVELS = {
    "diloco": f"every = 6\n{OUTER}",
    "streaming": f'every = 8\n{OUTER}fragments = 3\ndelay = 1\nalpha = 0.5\ncompress = "int4"\n',
    "slowmo": 'every = 5\nafter = 6\nouter = "slowmo"\nmomentum = 0.5\ncompress = "int8"\n',
    "fedadam": 'every = 4\nouter = "fedadam"\nlr = 0.02\nfragments = 2\n',
    "late": 'what = "gradients"\ndelay = 2\n',
}
NET = """
from mpitrain import nn
def net(width: int = 16):
    return nn.Sequential(("flatten", nn.Flatten()), ("linear", nn.Linear(64, width)), ("norm", nn.BatchNorm1d(width)),
                         ("act", nn.ReLU()), ("drop", nn.Dropout(0.5)), ("head", nn.Linear(width, 10)))
"""
BASE = SMALL.replace('name = "mlp"\ninputs = 64\nhidden = [32]\noutputs = 10', 'name = "net.py:net"') \
    .replace("steps = 50", "steps = 21").replace("eval_every = 25", "eval_every = 7") + \
    "[checkpoint]\nevery = 1\nkeep = 99\nbest = false\n"
STOPPED = (9, 5, 12, 18)                          # the 9th step is within a round of each
LAST = "checkpoint.every=99"                      # of runs that go on: the end's alone


def text(level: str, *, sites: int = 2, base: str = BASE) -> str:
    return base + f"[mesh]\nsite = {sites}\n[[sync]]\n{level}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each level's run, undisturbed, and copies of it as if stopped after some steps."""
    folder = tmp_path_factory.mktemp("levels")
    (folder / "net.py").write_text(NET)
    for name, level in LEVELS.items():
        write(folder, text(level), f"{name}.toml")
    told = many(folder, *((2, f"{name}.toml", f"run.out={name}") for name in LEVELS), timeout=120)
    assert not [one for one in told if "message" in one], told
    return folder


def stopped(folder: Path, name: str, step: int, to: str) -> str:
    """A copy of a run as if it had been stopped after a step."""
    shutil.copytree(folder / name, folder / to)
    for path in (folder / to / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    return f"run.out={to}"


@pytest.mark.parametrize("stopped_at", [STOPPED[:1], pytest.param(STOPPED[1:], marks=pytest.mark.slow)], ids=str)
def test_a_run_that_goes_on_ends_with_the_undisturbed_hash(runs: Path, stopped_at: tuple[int, ...]) -> None:
    asked = [(name, step) for name in LEVELS for step in stopped_at]
    told = many(runs, *((2, f"{name}.toml", stopped(runs, name, step, f"{name}-{step}"), "--resume", LAST)
                        for name, step in asked), timeout=150)
    for (name, step), one in zip(asked, told, strict=True):
        whole = record(runs / name)
        assert (one.get("parameters_sha256"), one.get("buffers_sha256")) == (
            whole["parameters_sha256"], whole["buffers_sha256"]), (name, step, one)


def test_a_checkpoint_has_what_each_site_has_of_its_own_and_nothing_else(runs: Path) -> None:
    found = {(name, step): load(runs / name / "checkpoints" / f"step-{step:08d}") for name, step in (
        ("diloco", 9), ("diloco", 12), ("streaming", 16), ("streaming", 19), ("slowmo", 5), ("late", 9))}

    def kinds(name: str, step: int) -> set[str]:
        return {stored.rpartition("/")[0] for stored in found[name, step].arrays} - {"optimizer", "data"}
    shared = {"parameters", "buffers", "optimizer/m", "optimizer/v"}
    inner = {"workers/1/optimizer/m", "workers/1/optimizer/v"}
    own = {f"workers/{k}/{kind}" for k in range(2) for kind in ("parameters", "buffers")}
    residuals = {"workers/0/outer_error", "workers/1/outer_error", "outer/sum_error"}
    assert kinds("diloco", 12) == shared | inner | {"outer/start", "outer/momentum"}
    assert kinds("diloco", 9) == kinds("diloco", 12) | own
    assert kinds("streaming", 16) == kinds("diloco", 9) | residuals | {"outer/sent"}
    assert kinds("streaming", 19) == kinds("diloco", 9) | residuals
    assert kinds("slowmo", 5) == shared | inner | residuals | {"outer/start", "outer/momentum"}
    assert kinds("late", 9) == shared | {"outer/gradients0", "outer/gradients1"}
    one = found["diloco", 9]
    mean = (one.read("workers/0/parameters/linear.weight") + one.read("workers/1/parameters/linear.weight")) / 2
    assert (one.read("parameters/linear.weight") == mean).all() and (mean != one.read("workers/1/parameters/linear.weight")).any()
    assert (one.read("optimizer/m/linear.weight") != one.read("workers/1/optimizer/m/linear.weight")).any()
    assert found["streaming", 19].read("workers/1/outer_error/linear.weight").any()


def test_other_numbers_of_sites_go_on_from_the_end_of_a_round_alone(runs: Path) -> None:
    told = many(runs,
                (2, "diloco.toml", stopped(runs, "diloco", 12, "one"), "mesh.site=1", "sync.levels=[]", "--resume"),
                (4, "diloco.toml", stopped(runs, "diloco", 12, "four"), "mesh.site=4", "--resume"),
                (4, "slowmo.toml", stopped(runs, "slowmo", 11, "four-coded"), "mesh.site=4", "--resume"),
                (2, "diloco.toml", stopped(runs, "diloco", 9, "off-one"), "mesh.site=1", "sync.levels=[]", "--resume"),
                (4, "diloco.toml", stopped(runs, "diloco", 9, "off-four"), "mesh.site=4", "--resume"),
                (2, "streaming.toml", stopped(runs, "streaming", 16, "other"), "--resume",
                 'sync.levels=[{every=7, outer="nesterov", lr=0.7, momentum=0.6, fragments=3, delay=1, compress="int4"}]'),
                timeout=150)
    assert [one.get("steps") for one in told[:3]] == [21] * 3, told
    for one, now in zip(told[3:5], (1, 4)):
        assert f"after step 9 the 2 sites of this run had parameters of their own, and mesh.site = {now} now" in one["message"]
    assert "fragment 0 was under way, and by this run's every, fragments and delay fragment 1 was after step 16" in \
        told[5]["message"]


def test_a_run_goes_on_with_more_steps_though_its_end_was_within_a_round(runs: Path) -> None:
    level = LEVELS["streaming"].replace("fragments = 3", "fragments = 2")      # Of 21 steps, one leaves after the 16th.
    write(runs, text(level), "longer.toml")
    told = many(runs, (2, "longer.toml", "run.out=longer", "train.steps=16"), (2, "longer.toml", "run.out=longer", "--resume"),
                (2, "streaming.toml", stopped(runs, "streaming", 15, "rarer"), "--resume",
                 'sync.levels=[{every=15, outer="nesterov", lr=0.7, momentum=0.6, fragments=3, delay=1, compress="int4"}]'))
    assert [one.get("steps") for one in told] == [16, 21, None], told
    assert "no fragment was under way, and by this run's every, fragments and delay fragment 0 was" in told[2]["message"]


def test_ranks_of_a_site_may_share_one_copy_and_go_on_to_the_same_bits(runs: Path) -> None:
    write(runs, text(f"every = 8\n{OUTER}fragments = 2\ndelay = 3\nalpha = 0.5\n", base=SMALL.replace("steps = 50", "steps = 20"))
          + "[checkpoint]\nevery = 13\nbest = false\n", "shared.toml")
    shared = (4, "shared.toml", "comm.node_shared=true")
    whole, sliced = many(runs, (*shared, "run.out=shared"), (4, "shared.toml", "comm.sharding=optimizer", "run.out=sliced"))
    again, = many(runs, (*shared, stopped(runs, "shared", 13, "shared-13"), "--resume"))
    assert whole["parameters_sha256"] == sliced["parameters_sha256"] == again["parameters_sha256"]


def test_replay_refuses_a_run_of_sites(runs: Path) -> None:
    refused(mpirun(1, "-m", "mpitrain", "replay", "diloco", "--step", "9", cwd=runs), 64, "this run has 2 sites with one each")


def test_lines_of_metrics_tell_what_meetings_cost_and_evaluations_are_of_the_mean(runs: Path) -> None:
    told = steps(runs / "diloco")
    assert "round" not in told[4] and [told[i]["round"] for i in (5, 11, 17, 20)] == [1, 2, 3, 4]
    assert all(0.0 < told[i]["drift"] < 1.0 for i in (5, 11, 17)) and told[5]["wire_bytes"] > 4 * 1250 / 6
    assert told[5]["wire_largest_bytes"] < told[5]["wire_bytes"] * 6, "checkpoints off a round's end send parameters, too"
    assert len([line for line in lines(runs / "diloco") if line.get("split") == "validation"]) == 3
    sites = record(runs / "streaming")["sites"]
    assert sites["number"] == 2 and 0 < sites["wire_bytes"] < 1.5 * sites["dense_bytes"]


def test_a_default_run_imports_no_level() -> None:
    code = ("import sys, mpitrain, mpitrain.run.run, mpitrain.train.build.assembly as a\n"
            "print([m for m in sys.modules if 'levels' in m or 'outer' in m])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_wrong_level_ends_the_job_with_one_line(tmp_path: Path) -> None:
    config = write(tmp_path, text("every = 100\n", base=SMALL))
    refused(mpirun(2, "-m", "mpitrain", "train", config, cwd=tmp_path), 78, "every = 100 is beyond the run, which has 50 steps")
    ok(mpirun(1, "-m", "mpitrain", "inspect", write(tmp_path, text("every = 10\n", base=SMALL)), "--ranks", "2", cwd=tmp_path))


def test_sites_begin_with_the_parameters_of_another_run(runs: Path) -> None:
    levels = 'sync.levels=[{every=2, outer="nesterov", compress="int4"}]', 'sync.levels=[{graph="ring"}]'
    told = many(runs, *((2, "diloco.toml", f"run.out=from{i}", "train.steps=2", "model.init_from=late", "optimizer.lr=1e-9",
                         "optimizer.warmup_steps=0", level) for i, level in enumerate(levels)))
    assert [one.get("steps") for one in told] == [2, 2], told
    before = load(runs / "late/checkpoints/step-00000021").read("parameters/linear.weight")
    for i in range(2):
        after = load(runs / f"from{i}/checkpoints/step-00000002").read("parameters/linear.weight")
        assert abs(after - before).max() < 1e-6


OWN = """
import numpy as np
from mpitrain.parallel.compress.blocks import Int8
class Noise(Int8):
    def encode(self, step, worker, values, *rest):
        super().encode(step, worker, values + np.random.rand(len(values)).astype(np.float32), *rest)
"""


def test_a_compressor_of_ones_own_that_is_wrong_is_refused_by_inspect_as_by_train(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    config = write(tmp_path, text('every = 10\ncompress = "own.py:Noise"\n', base=SMALL))
    for n, *words in ((1, "inspect", config, "--ranks", "2"), (2, "train", config)):
        refused(mpirun(n, "-m", "mpitrain", *words, cwd=tmp_path), 78, "E_COMPRESS", "is not the same twice")


SPOILS = """
from mpi4py import MPI
from mpitrain import optim
class Spoils(optim.SGD):
    def change(self, run, gradients, lr, step, scale):
        super().change(run, gradients, lr, step, scale)
        if step == 3 and MPI.COMM_WORLD.rank == 1:
            self.storage.values[run.start:run.stop] = float("nan")
"""


def test_a_site_whose_parameters_are_spoilt_ends_the_job_before_it_meets_another(tmp_path: Path) -> None:
    (tmp_path / "spoils.py").write_text(SPOILS)
    config = write(tmp_path, text("every = 10\n", base=SMALL.replace('"adamw"', '"spoils.py:Spoils"')))
    refused(mpirun(2, "-m", "mpitrain", "train", config, cwd=tmp_path), 79, "rank=1/2", "step=4", "an earlier step has spoilt")


@pytest.mark.parametrize("level, said", [
    ("every = 0", "sync.every must be a number of steps, at least 1"),
    ("every = 51", "every = 51 is beyond the run, which has 50 steps: sites would not meet; set every to 50 or less"),
    ("every = 45\nafter = 10", "every = 45 after = 10 is beyond the run, which has 50 steps: sites would not meet; set every to "
     "40"),
    ('every = "3 epochs"', 'every = "3 epochs" is beyond the run'),
    ("every = 10\nfragments = 2\ndelay = 5", "delay = 5 steps is not less than every / fragments = 5"),
    ("every = 10\nfragments = 4\ndelay = 2", "set delay to 1 or less"),
    ("every = 4\nfragments = 4\ndelay = 1", "set delay to 0"),
    ("every = 3\nfragments = 4", "set fragments to 3 or less, or every to 4 or more"),
    ("every = 10\nfragments = 5", "fragments = 5 are cut between the parameters of the model, which has 4"),
    ('every = 2\nouter = "nestrov"', 'nestrov'), ("every = 2\nlr = 0.0", "sync.lr must be more than 0"),
    ("every = 2\nmomentum = 0.5", 'outer = "average" has no sync.momentum'),
    ('every = 2\nouter = "nesterov"\nmomentum = 1.0', "momentum"),
    ('every = 2\ncompress = "int7"', '[[sync]] compress = "int7": unknown compressor "int7"'),
    ('every = 2\ncompress = "powersgd:2"', '[[sync]] compress = "powersgd:2" keeps matrices of its own'),
    ('what = "gradients"\nevery = 2', 'adds up the gradients of each step, perhaps those of `delay` steps ago, found every = 2'),
    ('what = "gradients"\ndelay = 50', "delay = 50 is beyond the run"),
    ('what = "gradients"\nfragments = 2', "found fragments = 2"),
    ('over = "workers"\nevery = 2', "is of the clients of [workers], and workers.count = 0"),
    ('every = 2\n[[sync]]\nevery = 3', 'two [[sync]] tables meet over "site"'),
    ('every = 2\n[[sync]]\nover = "node"\nwhat = "gradients"', "go from the inside out, node, site, workers, found site, node"),
    ('over = "node"\nevery = 3\nwhat = "gradients"\n[[sync]]\nevery = 2', 'over = "node" is what each step does')])
def test_a_level_that_cannot_be_had_is_refused_with_a_sentence(tmp_path: Path, level: str, said: str) -> None:
    assert said in message(tmp_path, text(level + "\n", base=SMALL), {"site": 2})


@pytest.mark.parametrize("keys, said", [
    ("train.reproducible=layout train.micro_batches=4", 'train.reproducible = "layout"'), ("train.on_nan=skip", "train.on_nan"),
    ("train.on_lost=go_on", "what a lost site has learned is nowhere else"), ("average.kind=ema", "average.kind"),
    ("shrink.prune=magnitude shrink.sparsity=0.5 shrink.end=20", "shrink.prune"), ("workers.count=8", "workers.count = 8"),
    ("comm.compress=int8", "set compress in [[sync]] instead")])
def test_what_goes_with_no_sites_is_refused(tmp_path: Path, keys: str, said: str) -> None:
    assert said in message(tmp_path, text("every = 2\n", base=SMALL), {"site": 2}, *keys.split())


def test_sites_and_levels_need_each_other(tmp_path: Path) -> None:
    assert "mesh.site = 2 trains as many models, and no [[sync]] says when they meet" in message(
        tmp_path, SMALL + "[mesh]\nsite = 2\n", {"site": 2})
    assert 'and mesh.site = 1: there is nobody to meet' in message(tmp_path, SMALL + "[[sync]]\nevery = 2\n", {})
    few = write(tmp_path, text("every = 2\n", base=SMALL.replace("[optimizer]", "drop_last = false\n[optimizer]").replace(
        "batch_size = 48", "batch_size = 717\nmicro_batches = 4")))
    refused(mpirun(1, "-m", "mpitrain", "inspect", few, "--ranks", "2", cwd=tmp_path), 78, "so each needs rows in each step")
    assert "needs whole parameters on each rank" in message(
        tmp_path, text('every = 2\ncompress = "int8"\n', base=SMALL), {"site": 2, "dp": 2}, "comm.sharding=optimizer")


def message(folder: Path, written: str, mesh: dict[str, int], *keys: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config = load_config(write(folder, written), list(keys))
        plan(config, Grid(mesh), mlp(64, [32], 10), config.train.steps, 24)
    return str(caught.value)


@pytest.mark.parametrize("rounds", [Rounds(10, 0, 1, 0, 47), Rounds(10, 3, 3, 2, 50), Rounds(7, 0, 3, 1, 60),
                                    Rounds(5, 5, 5, 0, 31), Rounds(12, 0, 4, 2, 48)], ids=str)
def test_each_fragment_lands_once_a_round_and_one_alone_is_under_way(rounds: Rounds) -> None:
    flying: list[int] = []
    landed = {f: [rounds.after] for f in range(rounds.fragments)}
    for step in range(1, rounds.steps + 1):
        landing = rounds.landing(step)
        assert all(f in flying for f in landing)
        flying = [f for f in flying if f not in landing] + rounds.leaving(step)
        now = rounds.leaving(step) if not rounds.delay or rounds.ends(step) else []
        flying = [f for f in flying if f not in now]
        for f in [*landing, *now]:
            landed[f].append(step)
        assert flying == rounds.under_way(step) and len(flying) <= 1
        assert not rounds.met(step) or not flying
    for f, at in landed.items():
        first, *others = (b - a for a, b in zip(at, at[1:]))
        assert first == rounds.every + f * rounds.every // rounds.fragments + rounds.delay, f
        assert set(others[:-2]) <= {rounds.every} and at[-1] == rounds.steps


def test_fragments_are_cut_between_parameters_into_parts_of_nearly_equal_size() -> None:
    assert cut([5, 1, 1, 1, 5, 5], 3) == [3, 2, 1]
    assert cut([1, 1, 1], 3) == [1, 1, 1] and cut([9, 1, 1, 1], 3) in ([1, 2, 1], [1, 1, 2])
    sizes = [("a", 30), ("b", 10), ("c", 10), ("d", 10)]
    assert fragments_of(sizes, 2) == {"a": 0, "b": 1, "c": 1, "d": 1}
