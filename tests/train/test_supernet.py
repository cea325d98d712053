"""Runs of supernets: one hash on any ranks, after a resume too; paths that are evaluated, searched and cut out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from runs import record, write
from standing import mpirun, train

from mpitrain.autograd import Tensor
from mpitrain.nn.elastic import in_use
from mpitrain.plan.inspect import open_data
from mpitrain.train.build.model import make_model
from mpitrain.train.build.saved import load

RESNET = """
[model]
name = "elastic_resnet"
classes = 10
channels = 1
widths = [4, 8]
depths = [1, 2]
kernels = [3, 5]
[data]
path = "digits"
transform = ["scale"]
validation = "tail:0.1"
[optimizer]
name = "adamw"
lr = 3e-3
weight_decay = 0.1
[train]
steps = 10
batch_size = 48
micro_batches = 8
eval_every = 5
reproducible = "layout"
[log]
progress_s = 0
"""
GPT = """
[model]
name = "elastic_gpt"
depths = [1, 2]
heads = [1, 2]
hidden = [16, 32]
width = 16
block = 8
dropout = 0.1
[data]
path = "tokens"
validation = "tail:0.2"
[train]
steps = 4
batch_size = 8
micro_batches = 4
"""


def done(folder: Path, *words: str, ranks: int = 1) -> str:
    found = mpirun(ranks, "-m", "mpitrain", *words, cwd=folder)
    assert found.rc == 0, found.err
    return found.out


def ran(ranks: int, config: Path, out: str, *more: str) -> dict[str, str]:
    found = train(ranks, config, *more, f"run.out={out}", "--resume" if (config.parent / out).exists() else "--overwrite")
    assert found.rc == 0, found.err
    return hashes(config.parent / out)


def hashes(folder: Path) -> dict[str, str]:
    run = record(folder)
    return {key: run[key] for key in ("parameters_sha256", "buffers_sha256")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `super`, a run of RESNET."""
    made = tmp_path_factory.mktemp("supernet")
    write(made, RESNET)
    ran(1, made / "run.toml", "super")
    return made


def test_a_supernet_has_one_hash_on_any_ranks_stages_and_slices_and_after_a_resume(folder: Path) -> None:
    config = folder / "run.toml"
    one = hashes(folder / "super")
    for name, ranks, more in (("two", 2, ("comm.sharding=optimizer",)), ("four", 4, ("mesh.pp=2",))):
        assert ran(ranks, config, name, *more) == one, name
    ran(2, config, "again", "train.steps=6")
    assert ran(1, config, "again", "train.steps=10") == one


@pytest.mark.slow
def test_stages_of_blocks_that_are_left_out_and_slices_of_all_states_train_alike(folder: Path) -> None:
    config = folder / "run.toml"
    for name, ranks, more in (("stages", 3, ("mesh.pp=3", "train.recompute=true")), ("node", 2, ("comm.node_shared=true",))):
        assert ran(ranks, config, name, *more) == hashes(folder / "super"), name
    losses = []
    for name, cuts in (("gradients", "gradients"), ("parameters", "parameters")):
        ran(2, config, name, "train.reproducible=run", f"comm.sharding={cuts}")
        losses.append(record(folder / name)["metrics"]["loss"])
    assert losses == pytest.approx([record(folder / "super")["metrics"]["loss"]] * 2, rel=1e-4)


def test_a_run_moves_what_the_path_of_its_step_uses_and_nothing_else(folder: Path) -> None:
    ran(2, folder / "run.toml", "step", "train.steps=1", "train.eval_every=1", "optimizer.schedule=constant")
    saved = load(folder / "step")
    elastic, first = saved.model.elastic, make_model(saved.config)
    first.initialize(saved.config.run.seed)
    with elastic.taken(elastic.draw(saved.config.run.seed, 0)):
        used = in_use(saved.model)
    before, left = first.state_dict(), 0
    for name, parameter in saved.model.named_parameters():
        mask = np.zeros(parameter.shape, bool)
        if name in used:
            mask[... if (index := used[name]) is None else np.ix_(*index)] = True
        moved = saved.model.state_dict()[name] != before[name]
        assert not moved[~mask].any() and (not mask.any() or moved[mask].mean() > 0.5), name
        left += int((~mask).sum())
    assert left > 100


def test_a_sandwich_has_one_hash_on_any_ranks_with_recomputed_blocks_and_split_backwards(folder: Path) -> None:
    config, same = folder / "run.toml", ("model.sampling=sandwich",)
    one = ran(1, config, "s1", *same)
    assert one != hashes(folder / "super")
    assert ran(2, config, "s2", *same, "train.recompute=true") == one
    assert ran(4, config, "s4", *same, "mesh.pp=2", "mesh.schedule=zb_h1") == one


def test_a_path_that_is_cut_out_gives_the_same_metrics_and_is_trained_on(folder: Path) -> None:
    text = "stage1.depth=1, stage1_block0.width=2, stage2_block1.kernel=3"
    found = json.loads(done(folder, "paths", "super", "--path", text, ranks=2))
    said = done(folder, "cut", "super", "--path", text, "--out", "cut", ranks=2)
    assert f"model.path = {found['path']}" in said
    alone = json.loads(done(folder, "evaluate", "cut"))
    assert {key: alone[key] for key in ("loss", "accuracy")} == {key: found[key] for key in ("loss", "accuracy")}
    assert load(folder / "cut").model.count_parameters() == found["parameters"] < load(folder / "super").model.count_parameters()
    assert done(folder, "cut", "super", "--path", text, "--out", "cut1") and load(folder / "cut1").hashes() == \
        load(folder / "cut").hashes()                            # on one rank as on two
    went_on = train(1, folder / "cut/config.toml", f"model.init_from={folder / 'cut'}", f"run.out={folder / 'more'}",
                    "train.steps=12", "--overwrite")
    assert went_on.rc == 0, went_on.err


def test_the_statistics_of_a_path_are_those_of_its_chunks_of_training_rows(folder: Path) -> None:
    """The first norm's, by NumPy: means over 8 chunks of 64 rows of each chunk's mean and unbiased variance."""
    done(folder, "cut", "super", "--path", "smallest", "--out", "small")
    saved = load(folder / "small")
    inputs = open_data(saved.config)
    x = inputs.reader(saved.transforms).read(np.arange(512))[0].astype(np.float32)
    y = saved.model["conv"](Tensor(x)).array.astype(np.float64).reshape(8, 64, 4, 64)       # type: ignore[index]
    found = saved.model.state_dict()
    np.testing.assert_allclose(found["norm.running_mean"], y.mean(axis=(1, 3)).mean(axis=0), rtol=1e-5)
    variances = y.swapaxes(1, 2).reshape(8, 4, -1).var(axis=2, ddof=1).mean(axis=0)
    np.testing.assert_allclose(found["norm.running_var"], variances, rtol=1e-5)


def test_a_path_in_bfloat16_is_cut_out_to_the_bit(folder: Path) -> None:
    ran(1, folder / "run.toml", "rounded", "train.precision=bfloat16", "train.steps=4", "train.eval_every=4")
    found = json.loads(done(folder, "paths", "rounded", "--path", "stage1.depth=1, stage2_block0.width=2"))
    done(folder, "cut", "rounded", "--path", found["path"], "--out", "rounded-cut")
    assert json.loads(done(folder, "evaluate", "rounded-cut"))["loss"] == found["loss"]


def test_a_search_over_paths_evaluates_and_gives_a_front(folder: Path) -> None:
    words = ("paths", "super", "--trials", "12", "--objective", "accuracy", "--objective=-flops", "--parents", "4",
             "--tournament", "2")
    lines = [json.loads(line) for line in done(folder, *words, ranks=2).splitlines()]
    assert lines == [json.loads(line) for line in done(folder, *words).splitlines()]
    trials, best = lines[:12], lines[12:]
    assert best and all(line["front"] for line in best)
    for line in best:                                            # nobody is better in both
        assert not any(other["accuracy"] >= line["accuracy"] and other["flops"] < line["flops"] for other in trials)
    largest, smallest = trials[:2]
    assert [largest["flops"], smallest["flops"]] == [end(line["flops"] for line in trials) for end in (max, min)]
    assert largest["loss"] == pytest.approx(json.loads(done(folder, "evaluate", "super"))["loss"], abs=0)


@pytest.mark.parametrize(("words", "said"), [
    (("train", "run.toml", "run.out=x", "optimizer.name=muon", "optimizer.weight_decay=0"), "looks at whole parameters"),
    (("train", "run.toml", "run.out=x", "model.sampling=sandwich", "train.micro_batches=6"), "multiple of 4"),
    (("train", "run.toml", "run.out=x", "comm.compress=top_k"), "a supernet"),
    (("train", "run.toml", "run.out=x", "shrink.prune=magnitude", "shrink.sparsity=0.5"), "a supernet"),
    (("paths", "super", "--path", "stage9.depth=1"), "has no choice stage9.depth"),
    (("paths", "super", "--trials", "1"), "2 trials at least"),
    (("paths", "super", "--trials", "3", "--objective=-J"), "not measured for paths"),
    (("paths", "super", "--trials", "3", "--objective", "flops"), "costs have a minus"),
    (("paths", "super", "--trials", "3", "--objective", "accurcy"), "accurcy"),
    (("paths", "super", "--path", "largest", "--objective", "loss"), "for a search"),
    (("cut", "super", "--path", "smallest", "--importance", "taylor", "--out", "y"), "is for --work"),
    (("cut", "super", "--work", "0.5", "--out", "y"), "cut a path out"),
    (("factor", "super", "--layers", "head", "--rank", "2", "--out", "y"), "cut a path out"),
    (("quantize", "super", "--format", "int8", "--out", "y"), "cut a path out")])
def test_what_a_supernet_cannot_is_refused_by_name(folder: Path, words: tuple[str, ...], said: str) -> None:
    found = mpirun(1, "-m", "mpitrain", *words, cwd=folder)
    assert found.rc != 0 and said in found.err, found.err


def test_layers_are_not_cut_and_a_plain_run_has_no_paths(folder: Path) -> None:
    config = folder / "run.toml"
    assert 'a supernet of 1,764 networks, model.sampling = "uniform"' in done(folder, "inspect", "run.toml")
    found = train(2, config, "mesh.tp=2", "train.reproducible=run", "run.out=x")
    assert found.rc != 0 and "set mesh.tp = 1" in found.err
    assert ran(1, config, "alone", "model.path=smallest")
    found = mpirun(1, "-m", "mpitrain", "paths", "alone", cwd=folder)
    assert found.rc != 0 and 'path "smallest" alone, has no paths' in found.err


def test_a_supernet_of_decoders_trains_on_ranks(tmp_path: Path) -> None:
    config = write(tmp_path, GPT)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over it " * 40)
    done(tmp_path, "data", "import", "text", "text.txt", "--out", "tokens")
    size = ("model.vocabulary=64", "train.reproducible=layout")
    assert ran(1, config, "one", *size) == ran(2, config, "two", *size)
    done(tmp_path, "cut", "two", "--path", "smallest", "--out", "small")
    smallest = json.loads(done(tmp_path, "paths", "two", "--path", "smallest"))
    assert json.loads(done(tmp_path, "evaluate", "small"))["loss"] == smallest["loss"]
