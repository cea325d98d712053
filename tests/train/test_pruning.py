"""Runs that prune: one set of masks on any ranks, stages and slices; taken up on other ranks; gone back to first values."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import ROOT
from runs import ok, record, steps, without_times, write
from standing import train

from mpitrain.checkpoint import choosing, store
from mpitrain.checkpoint.manifest import Checkpoint
from mpitrain.errors import ConfigError, MeshError
from mpitrain.plan.inspect import inspect

LAYOUT = ("train.reproducible=layout", "train.micro_batches=4", "optimizer.schedule=constant", "optimizer.clip_norm=0",
          "train.steps=12", "train.eval_every=12", "model.hidden=[32,16]", "comm.bucket_mb=0.005")
PRUNE = ("shrink.prune=magnitude", "shrink.sparsity=0.8", "shrink.begin=2", "shrink.end=8", "shrink.every=3",
         "checkpoint.every=5", "checkpoint.keep=9")


def pruned(run: Path) -> tuple[Any, ...]:
    about = record(run)
    return about["pruned"]["masks_sha256"], about["parameters_sha256"], about["pruned"]["zeros"]


def mask_of(found: Checkpoint, layer: str) -> np.ndarray:
    """The mask of a layer's weight in a checkpoint, a bit for each element there."""
    shape, bits = found.arrays[f"parameters/{layer}.weight"].shape, found.read(f"mask/{layer}.weight")
    assert bits.dtype == np.uint8 and bits.shape == (-(-math.prod(shape) // 8),)
    return np.unpackbits(bits, count=math.prod(shape), bitorder="little").reshape(shape)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one rank."""
    folder = tmp_path_factory.mktemp("pruning")
    ok(train(1, write(folder), *LAYOUT, *PRUNE, "run.out=one"))
    return folder


def test_masks_hold_in_the_checkpoint_and_the_schedule_is_the_papers(alone: Path) -> None:
    found = store.latest(alone / "one/checkpoints")
    n = {"linear0": 64 * 32, "linear1": 32 * 16, "head": 16 * 10}
    for layer, size in n.items():
        w, mask = found.read(f"parameters/{layer}.weight"), mask_of(found, layer)
        assert np.array_equal(w != 0, mask != 0), layer
        assert int((mask == 0).sum()) == int(0.8 * size + 0.5)
    assert not any(name.startswith("mask/") and name.endswith("bias") for name in found.arrays)
    fifth = choosing.chosen(alone / "one/checkpoints", 5)
    share = 0.8 * (1 - (1 - (5 - 2) / 6) ** 3)
    assert int((mask_of(fifth, "linear0") == 0).sum()) == int(share * 64 * 32 + 0.5)
    assert record(alone / "one")["pruned"]["of"] == sum(n.values())


@pytest.mark.parametrize(("ranks", "options"), [
    (2, ()),
    pytest.param(2, ("comm.sharding=optimizer",), marks=pytest.mark.slow),
    pytest.param(2, ("comm.node_shared=true",), marks=pytest.mark.slow),
    pytest.param(2, ("mesh.pp=2", "mesh.schedule=1f1b"), marks=pytest.mark.slow),
    pytest.param(2, ("comm.node_shared=true", "comm.sharding=optimizer"), marks=pytest.mark.slow),
    pytest.param(4, (), marks=pytest.mark.slow),
    pytest.param(4, ("mesh.pp=2", "comm.sharding=optimizer"), marks=pytest.mark.slow)])
def test_masks_and_weights_have_the_bits_of_one_rank(alone: Path, ranks: int, options: tuple[str, ...]) -> None:
    out = "-".join(options).replace(".", "").replace("=", "") or f"dp{ranks}"
    ok(train(ranks, alone / "run.toml", *LAYOUT, *PRUNE, f"run.out={out}", *options))
    assert pruned(alone / out) == pruned(alone / "one")


@pytest.mark.slow
def test_updates_inside_the_sum_of_gradients_obey_masks_as_others_do(alone: Path) -> None:
    """One copy per node, where nobody wants a norm: bucket by bucket."""
    rare = ("train.reproducible=run", "log.every=50", "checkpoint.every=0")
    for out, options in (("copies", ()), ("shared", ("comm.node_shared=true",))):
        ok(train(2, alone / "run.toml", *LAYOUT, *PRUNE, *rare, *options, f"run.out={out}"))
    assert pruned(alone / "shared") == pruned(alone / "copies")


def test_a_pruned_run_goes_on_on_another_mesh(alone: Path) -> None:
    """From step 5, between two choices of masks, on two stages."""
    shutil.copytree(alone / "one", alone / "again")
    for step in ("step-00000010", "step-00000012"):
        shutil.rmtree(alone / "again/checkpoints" / step)
    ok(train(2, alone / "run.toml", *LAYOUT, *PRUNE, "run.out=again", "mesh.pp=2", "--resume"))
    assert pruned(alone / "again") == pruned(alone / "one")


@pytest.mark.slow
def test_a_pruned_run_goes_from_mesh_to_mesh(alone: Path) -> None:
    """Two ranks along dp, two stages, slices of the optimizer's state: the bits of one rank; then cut layers and slices of all,
    which add up in another order, and whose masks are those that they have."""
    shutil.copytree(alone / "one", alone / "chain")
    shutil.rmtree(alone / "chain/checkpoints/step-00000010")
    cut = ("train.reproducible=run", 'mesh.plan={linear0="column", linear1="row"}')
    meshes: list[tuple[str, ...]] = [(), ("mesh.pp=2",), ("comm.sharding=optimizer",), ("mesh.tp=2", *cut),
                                     ("comm.sharding=parameters", *cut)]
    for at, mesh in enumerate(meshes, 6):                     # each goes on from the step after which the one before was stopped
        for folder in (alone / "chain/checkpoints").iterdir():
            if folder.name >= f"step-{at:08}":
                shutil.rmtree(folder)
        ok(train(2, alone / "run.toml", *LAYOUT, *PRUNE, "run.out=chain", "checkpoint.every=1", "checkpoint.keep=99", *mesh,
                 "--resume"))
        if not any(word in mesh for word in cut):
            assert pruned(alone / "chain") == pruned(alone / "one"), mesh
    found = store.latest(alone / "chain/checkpoints")
    assert all(np.array_equal(found.read(f"parameters/{name}.weight") != 0, mask_of(found, name) != 0)
               for name in ("linear0", "linear1", "head"))
    assert pruned(alone / "chain")[2] == pruned(alone / "one")[2]


@pytest.mark.slow
def test_with_slices_of_all_states_and_with_cut_layers_masks_are_the_smallest_of_their_own_weights(alone: Path) -> None:
    """Where bits are not those of one rank, the masks still are: chosen once, at the start, of the same first values."""
    once = ("shrink.prune=magnitude", "shrink.sparsity=0.8", "shrink.scope=global", "train.reproducible=run",
            "mesh.plan={linear0=\"column\", linear1=\"row\"}")
    ok(train(1, alone / "run.toml", *LAYOUT, *once, "run.out=whole"))
    for out, options in (("sharded", ("comm.sharding=parameters",)), ("cut", ("mesh.tp=2",))):
        ok(train(2, alone / "run.toml", *LAYOUT, *once, *options, f"run.out={out}"))
        assert pruned(alone / out)[0] == pruned(alone / "whole")[0]
    found = store.latest(alone / "cut/checkpoints")
    assert all(np.array_equal(found.read(f"parameters/{name}.weight") != 0, mask_of(found, name) != 0)
               for name in ("linear0", "linear1", "head"))


@pytest.mark.slow
def test_slices_go_back_too(alone: Path) -> None:
    """In each policy that cuts; the bits of those that sum alike."""
    back = (*LAYOUT, *PRUNE, "shrink.rewind=1")
    ok(train(1, alone / "run.toml", *back, "run.out=back"))
    for out, options in (("cut-o", ("comm.sharding=optimizer",)), ("node", ("comm.node_shared=true",))):
        ok(train(2, alone / "run.toml", *back, *options, f"run.out={out}"))
        assert pruned(alone / out) == pruned(alone / "back")
    for kind in ("gradients", "parameters"):
        ok(train(2, alone / "run.toml", *back, "train.reproducible=run", f"comm.sharding={kind}", f"run.out=cut-{kind}"))
        found = choosing.chosen(alone / f"cut-{kind}/checkpoints", "best")
        assert all(not found.read(f"parameters/{name}.weight")[mask_of(found, name) == 0].any()
                   for name in ("linear0", "linear1", "head"))


@pytest.mark.parametrize(("rewind", "everyone"), [(0, (1, 2)), pytest.param(0, (1, 2, 4), marks=pytest.mark.slow),
                                                  pytest.param(3, (1, 2, 4), marks=pytest.mark.slow)])
def test_a_lottery_ticket_has_one_mask_and_one_curve_on_any_ranks(alone: Path, rewind: int, everyone: tuple[int, ...]) -> None:
    """The weights are those of the step again, and so are the rate and the optimizer; then the ticket trains by itself."""
    options = (*LAYOUT, *PRUNE, f"shrink.rewind={rewind}", "checkpoint.every=1", "checkpoint.keep=99",
               "optimizer.schedule=cosine")
    runs = [alone / f"ticket{ranks}-{rewind}-of-{len(everyone)}" for ranks in everyone]
    for ranks, run in zip(everyone, runs):
        ok(train(ranks, alone / "run.toml", *options, f"run.out={run.name}"))
        assert pruned(run) == pruned(runs[0]) and without_times(steps(run)) == without_times(steps(runs[0]))
    one, two = runs[:2]
    end = choosing.chosen(one / "checkpoints", 8)
    before = choosing.chosen(one / "checkpoints", rewind) if rewind else None
    mask = mask_of(end, "linear0")
    first = end.read("rewind/linear0.weight")
    assert before is None or np.array_equal(first, before.read("parameters/linear0.weight"))
    assert np.array_equal(end.read("parameters/linear0.weight"), first * mask)
    assert not end.read("optimizer/m/linear0.weight").any() and int(end.read("optimizer/steps")) == 0
    rates = [line["lr"] for line in steps(one)]
    assert rates[8:] == rates[rewind:rewind + 4]
    if not rewind:
        return
    for step in (10, 11, 12):
        shutil.rmtree(one / f"checkpoints/step-000000{step}")
    ok(train(2, alone / "run.toml", *options, f"run.out={one.name}", "--resume"))
    assert pruned(one) == pruned(two)


def test_patterns_leave_layers_they_do_not_fit_and_say_so(alone: Path) -> None:
    result = ok(train(2, alone / "run.toml", *LAYOUT, "shrink.prune=n:m", "shrink.pattern=2:4", "run.out=nm", "shrink.skip=head",
                      "train.reproducible=run", "comm.sharding=gradients", "train.steps=2", "train.eval_every=2"))
    assert "pruned 1,280 of 2,560 weights, 50.0%, in 2 layers; these zeros stay" in result.out
    w = store.latest(alone / "nm/checkpoints").read("parameters/linear0.weight")
    assert ((w.reshape(-1, 4) != 0).sum(axis=1) == 2).all()
    result = ok(train(1, alone / "run.toml", *LAYOUT, "shrink.prune=block", "shrink.pattern=16x1", "shrink.sparsity=0.5",
                      "run.out=b", "train.steps=2", "train.eval_every=2"))
    assert "not pruned: head.weight: a side is not a multiple of 16x1" in result.out, result.out
    w = store.latest(alone / "b/checkpoints").read("parameters/linear0.weight").reshape(2, 16, 64) != 0
    assert (w.all(axis=1) == w.any(axis=1)).all() and w.mean() == 0.5


@pytest.mark.parametrize(("ranks", "options", "words"), [
    (1, (*PRUNE, "shrink.end=60"), "shrink.end = 60 lies beyond the 50 steps"),
    (1, (*PRUNE, "shrink.skip=hed"), 'shrink.skip = "hed" names no weight that would be pruned (did you mean "head"'),
    (1, (*PRUNE, "shrink.skip=*"), 'shrink.prune = "magnitude": no weight of the model can be pruned'),
    (1, (*PRUNE, "shrink.prune=none.py:Rule"), "no file"),
    (1, (*PRUNE, "shrink.products=fast"), 'shrink.products = "fast" is not there (known: dense, sparse)'),
    (1, ("shrink.prune=n:m", "shrink.pattern=0:4"), '0 < N < M, and M is a power of two; found "0:4"'),
    (2, ("shrink.prune=n:m", "shrink.pattern=2:4", "mesh.tp=2", "model.hidden=[20,10]",
         'mesh.plan={linear0="column", linear1="row"}'), 'cuts the rows of "linear1.weight" into parts of 10')])
def test_what_does_not_fit_the_run_is_refused(alone: Path, ranks: int, options: tuple[str, ...], words: str) -> None:
    """By `inspect`, which refuses what `train` does (tests/config/test_rules.py)."""
    with pytest.raises((ConfigError, MeshError)) as error:
        list(inspect(alone / "run.toml", list(options), ranks=ranks))
    assert words in str(error.value)


RULES = """
from mpitrain.shrink.rules import Rule

class EverySecond(Rule):
    def choose(self, layers, share, add):
        for layer in layers:
            for part in layer.parts:
                part.kept[...] = part.indices() % 2

class Halves(Rule):
    def choose(self, layers, share, add):
        for layer in layers:
            for part in layer.parts:
                part.kept = part.values * 0.5
"""


def test_a_rule_of_ones_own_prunes_on_all_ranks_and_must_leave_zeros_and_ones(alone: Path) -> None:
    (alone / "mine.py").write_text(RULES)
    options = (*LAYOUT, "shrink.sparsity=0.5", "shrink.end=4", "run.folder=.")
    ok(train(2, alone / "run.toml", *options, "shrink.prune=mine.py:EverySecond", "run.out=second", "mesh.pp=2"))
    w = store.latest(alone / "second/checkpoints").read("parameters/linear1.weight").reshape(-1)
    assert not w[::2].any() and w[1::2].all()
    result = train(2, alone / "run.toml", *options, "shrink.prune=mine.py:Halves", "run.out=halves")
    assert result.rc == 78 and "the pruning rule Halves must leave part.kept of" in result.err


def test_inspect_says_the_share_of_zeros_of_each_weight(alone: Path) -> None:
    lines = [line.split() for line in inspect(alone / "one", [])]
    assert ["linear0.weight", "1,638", "of", "2,048", "80.0%"] in lines and ["all", "2,176", "of", "2,720", "80.0%"] in lines


def test_a_run_that_prunes_nothing_reads_none_of_it(alone: Path) -> None:
    program = ("import sys; from mpitrain.cli import main; main(['inspect', 'run.toml']); "
               "print([name for name in sys.modules if name.startswith('mpitrain.shrink') or name.endswith('pruning')])")
    done = subprocess.run([sys.executable, "-c", program], cwd=alone, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr
