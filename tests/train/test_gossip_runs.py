"""Runs whose sites meet their neighbours in a graph: resumed to the same bits, also after a rank was killed in a round; the mean
of the sites is the result; and what is refused before the first message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import SMALL, many, ok, record, steps, train, write

from mpitrain.checkpoint.manifest import load
from mpitrain.config import load_config
from mpitrain.errors import ConfigError
from mpitrain.models import mlp
from mpitrain.parallel.levels.plan import plan
from mpitrain.schedules.grid import Grid

SITES = 3
GOSSIP = SMALL.replace("steps = 50", "steps = 30").replace("eval_every = 25", "eval_every = 15") + """
[mesh]
site = 3
[checkpoint]
every = 10
keep = 9
[[sync]]
graph = "random"
method = "push-sum"
"""
KILLER = """
import os, signal
from mpitrain.train.observers.observer import Observer

class Killer(Observer):
    def begin(self, run):
        self.doomed = run.rank == 1 and run.step == 0

    def before_step(self, step):
        if self.doomed and step == 26:
            os.kill(os.getpid(), signal.SIGKILL)
"""
WRONG = """
from fractions import Fraction

def thirds(round, n):
    for i in range(n):
        yield i, (i + 1) % n, Fraction(333, 1000)
        yield i, (i + 2) % n, Fraction(333 + (i == 0), 1000)

def beyond(round, n):
    yield 0, n, Fraction(1, 2)

def itself(round, n):
    yield 0, 0, Fraction(1, 2)

def apart(round, n):
    yield 0, 1, Fraction(1, 2)
    yield 1, 0, Fraction(1, 2)

number = 3
"""
RING = 'sync.levels=[{graph="ring"}]'
CUTS = [(2,), (4, "comm.sharding=parameters"), (4, "mesh.pp=2"), (4, "comm.node_shared=true")]
REFUSED = [
    ('[{graph="wrong.py:thirds"}]', 'round 0 of 3 workers: what worker 0 keeps and receives adds up to 999/1000'),
    ('[{graph="wrong.py:beyond"}]', "there is no worker 3 (int); they are 0 to 2"),
    ('[{graph="wrong.py:itself"}]', "worker 0 sends to itself"),
    ('[{graph="wrong.py:apart"}]', "is not connected: nothing of worker 0 ever comes to worker 2"),
    ('[{graph="wrong.py:number"}]', 'sync.graph = "wrong.py:number" must be a function of (round, n)'),
    ('[{graph="rings"}]', 'unknown graph "rings" (did you mean "ring"?)'),
    ('[{graph="random"}]', 'D-PSGD needs exactly 1'),
    ('[{graph="ring",method="sgp"}]', 'sync.method must be "d-psgd" or "push-sum", found "sgp"'),
    ('[{graph="ring",outer="nesterov"}]', 'found outer = "nesterov"; leave it out'),
    ('[{graph="ring",fragments=2}]', "found fragments = 2; leave it out"),
    ('[{graph="ring",what="gradients"}]', 'found graph = "ring"; leave it out, or set what = "parameters"'),
    ('[{graph="ring",momentum=0.9}]', "with a graph has no key momentum"),
    ('[{graph="ring",every=99}]', "is beyond the run, which has 30 steps"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("gossip")
    write(folder, GOSSIP)
    (folder / "killer.py").write_text(KILLER)
    (folder / "wrong.py").write_text(WRONG)
    runs = [(SITES, "run.toml", "run.out=whole"),
            (SITES, "run.toml", "run.out=peer", 'sync.levels=[{graph="one_peer_exponential",every=2,after=5}]'),
            (SITES, "run.toml", "run.out=refused", f"sync.levels={REFUSED[0][0]}"),
            (2, "evaluate", "whole"),
            (SITES, "run.toml", "run.out=frozen", "train.steps=8", RING, 'optimizer.groups=[{params="linear0.*", frozen=true}]'),
            *((n, "run.toml", f"run.out=cut{i}", "mesh.site=2", "train.steps=8", "train.micro_batches=4", RING, *keys)
              for i, (n, *keys) in enumerate(CUTS))]
    return folder, many(folder, *runs, timeout=120)


@pytest.mark.parametrize("levels, words", REFUSED)
def test_wrong_graphs_and_keys_are_refused_in_one_line(tmp_path: Path, levels: str, words: str) -> None:
    write(tmp_path, GOSSIP)
    (tmp_path / "wrong.py").write_text(WRONG)
    config = load_config(tmp_path / "run.toml", [f"sync.levels={levels}"])
    with pytest.raises(ConfigError) as caught:
        plan(config, Grid({"site": SITES}), mlp(inputs=64, hidden=[32], outputs=10), 30, 25)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_wrong_graph_is_refused_on_all_ranks_before_anything_is_written(results: Any) -> None:
    folder, found = results
    assert found[2]["status"] == 78 and REFUSED[0][1] in found[2]["message"]
    assert not (folder / "refused").exists()


def test_every_line_tells_how_far_apart_sites_are(results: Any) -> None:
    folder, _ = results
    lines = steps(folder / "whole")
    assert len(lines) == 30 and all(0 < line["drift"] < 1 for line in lines)
    assert [line["round"] for line in lines] == [*range(30)] and 4 * 2410 < lines[-1]["wire_bytes"] < 5 * 2410
    peer = steps(folder / "peer")
    assert all("drift" not in line for line in peer[:5]) and all(0 < line["drift"] < 1 for line in peer[5:])
    assert peer[-1]["round"] == 12


def test_a_site_of_several_ranks_learns_what_one_of_a_single_rank_does(results: Any) -> None:
    """Slices of parameters travel where the optimizer has slices, and a site clips by its own norm."""
    _, found = results
    assert len({one["parameters_sha256"] for one in found[5:]}) == 1 and len(found[5:]) == len(CUTS)


def test_the_mean_of_the_sites_is_what_is_evaluated_and_kept(results: Any) -> None:
    folder, found = results
    assert found[3] == {name: found[0][name] for name in ("loss", "accuracy")}
    arrays = json.loads((folder / "whole/checkpoints/step-00000020/manifest.json").read_text())["arrays"]
    assert "sites/weights" in arrays
    for k in range(SITES):
        assert any(name.startswith(f"workers/{k}/parameters/") for name in arrays)
    assert any(name.startswith("workers/2/optimizer/") for name in arrays)


def test_a_mean_over_sites_leaves_what_is_frozen_as_it_is(results: Any) -> None:
    checkpoint = load(results[0] / "frozen/checkpoints/step-00000008")
    for name in ("linear0.weight", "linear0.bias"):
        assert (checkpoint.read(f"parameters/{name}") == checkpoint.read(f"workers/0/parameters/{name}")).all()
    assert (checkpoint.read("parameters/head.weight") != checkpoint.read("workers/0/parameters/head.weight")).any()


def test_a_rank_killed_in_a_round_ends_the_job_and_the_run_goes_on_to_the_same_bits(results: Any) -> None:
    folder, found = results
    killed = train(SITES, folder / "run.toml", "run.out=cut", 'log.observers=["killer.py:Killer"]')
    assert killed.rc != 0 and len(killed.error_lines) <= 1, killed.err
    assert record(folder / "cut")["status"] == "running"
    resumed = ok(train(SITES, folder / "run.toml", "run.out=cut", "--resume"))
    assert "resumed at step 20" in resumed.out
    assert record(folder / "cut")["parameters_sha256"] == found[0]["parameters_sha256"]
    assert record(folder / "cut")["parameters_sha256"] != found[1]["parameters_sha256"]
