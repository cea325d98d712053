"""Adapters on layers that ranks share, beside weights in few bits, and what other verbs say of a run that has some."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from launch import mpirun
from runs import SMALL, lines, record

from mpitrain.autograd import Tensor, no_grad
from mpitrain.checkpoint import store
from mpitrain.cli import main
from mpitrain.errors import CheckpointError, UsageError
from mpitrain.train.build.saved import load

TEXT = """
[model]
name = "gpt"
layers = 2
heads = 2
width = 32
block = 16
vocabulary = 27
[data]
path = "text"
validation = "tail:0.1"
[optimizer]
lr = 1e-2
clip_norm = 0.5
[train]
steps = 6
batch_size = 8
micro_batches = 4
"""
ALL = 'lora.layers=["block*.attention.*", "block*.wide", "block*.narrow"]'
LORA = ("model.init_from=base", "lora.rank=4", ALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("adapters")
    words = random.Random(0)
    (found / "text.txt").write_text("abcdefghijklmnopqrstuvwxyz " + " ".join(
        "".join(words.choices("abcdefghijklmnopqrstuvwxyz", k=4)) for _ in range(600)))
    main(["data", "import", "text", str(found / "text.txt"), "--out", str(found / "text")])
    (found / "run.toml").write_text(TEXT)
    train(found, 1, "run.toml", "run.out=base")
    train(found, 1, "run.toml", *LORA, "run.out=alone")
    return found


def train(folder: Path, n: int, *words: str, rc: int = 0) -> str:
    done = mpirun(n, "-m", "mpitrain", "train", *words, cwd=folder)
    assert done.rc == rc, done.err
    return done.err


def adapters(run: Path) -> dict[str, np.ndarray]:
    return {name: leaf.numpy() for name, leaf in load(run).model.named_parameters() if name.endswith((".up", ".down"))}


def same(run: Path, other: Path, close: float) -> None:
    """Whether their adapters differ by no more than this part of the largest number of each."""
    a, b = adapters(run), adapters(other)
    assert len(a) == 16 and all(value.any() for value in a.values())
    for name, value in a.items():
        assert np.abs(value - b[name]).max() <= close * np.abs(value).max(), name
    assert record(run)["metrics"]["loss"] == pytest.approx(record(other)["metrics"]["loss"], rel=1e-5)


def test_layers_that_two_ranks_share_are_adapted_as_on_one(folder: Path, tmp_path: Path) -> None:
    train(folder, 2, "run.toml", *LORA, "run.out=shared", "mesh.tp=2")
    same(folder / "alone", folder / "shared", 2e-3)
    assert main(["adapter", str(folder / "shared"), "--out", str(tmp_path / "small")]) == 0
    whole = store.latest(tmp_path / "small", purpose=store.READ).arrays
    assert {name.removeprefix("parameters/"): tuple(array.shape) for name, array in whole.items()} == \
        {name: value.shape for name, value in adapters(folder / "alone").items()}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [["mesh.tp=2"], ["mesh.tp=2", "mesh.sequence=true"], ["comm.sharding=parameters"],
                                  ["comm.sharding=gradients"], ["comm.node_shared=true"]])
def test_in_float64_they_differ_by_rounding_alone(folder: Path, mesh: list[str]) -> None:
    if not (folder / "base64").exists():
        train(folder, 1, "run.toml", "run.out=base64", "train.precision=float64")
        train(folder, 1, "run.toml", *LORA, "model.init_from=base64", "run.out=alone64", "train.precision=float64")
    train(folder, 2, "run.toml", *LORA, "model.init_from=base64", "run.out=found64", "train.precision=float64", *mesh,
          "--overwrite")
    same(folder / "alone64", folder / "found64", 1e-9)


@pytest.mark.slow
def test_in_bfloat16_the_same_bits_are_found_on_stages(folder: Path) -> None:
    words = ("run.toml", *LORA, "train.precision=bfloat16", "train.reproducible=layout")
    for n, name, mesh in ((1, "half1", "mesh.pp=1"), (2, "half2", "mesh.pp=2")):
        train(folder, n, *words, f"run.out={name}", mesh)
    assert record(folder / "half1")["parameters_sha256"] == record(folder / "half2")["parameters_sha256"]


@pytest.fixture(scope="module")
def low(folder: Path) -> Path:
    """Adapters beside weights in four bits, trained on one rank and on two stages."""
    assert main(["quantize", str(folder / "base"), "--format", "int4", "--least", "0", "--out", str(folder / "int4")]) == 0
    for n, name, mesh in ((1, "low", "mesh.pp=1"), (2, "low2", "mesh.pp=2")):
        train(folder, n, "int4/config.toml", *LORA, "model.init_from=int4", f"run.out={name}", mesh,
              "train.reproducible=layout", f"data.path={folder / 'text'}")
    return folder / "low"


def test_weights_in_few_bits_stay_and_adapters_beside_them_are_trained(folder: Path, low: Path) -> None:
    assert record(low)["parameters_sha256"] == record(folder / "low2")["parameters_sha256"]
    assert record(low)["buffers_sha256"] == record(folder / "int4")["buffers_sha256"]
    assert all(value.any() for value in adapters(low).values())
    tokens = np.random.default_rng(0).integers(0, 27, (3, 16))
    one, base = load(low), load(folder / "int4")
    layer, before = one.model.blocks["block0"].wide, base.model.blocks["block0"].wide
    x = np.random.default_rng(1).normal(size=(5, 32)).astype(np.float32)
    with no_grad():
        assert np.abs(one.model(Tensor(tokens)).numpy() - base.model(Tensor(tokens)).numpy()).max() > 1e-3
        found, plain = layer(Tensor(x)).numpy(), before.format.dequantize(before.arrays(), 32).astype(np.float64)
    up, down = (leaf.numpy().astype(np.float64) for leaf in (layer.up, layer.down))
    y = x.astype(np.float64) @ (plain + 4.0 * up @ down).T
    exact = layer.after(Tensor(y)).numpy()
    assert np.abs(found - exact).max() <= 1e-6 * np.abs(exact).max()


def test_they_are_merged_into_floats_alone_and_go_on_no_other_base(folder: Path, low: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match='"block0.attention.qkv" and 7 more keep their weights in few bits.*--dequantize'):
        main(["merge", str(low), "--out", str(tmp_path / "no")])
    with pytest.raises(UsageError, match="--dequantize is for adapters of weights in few bits"):
        main(["merge", str(folder / "alone"), "--out", str(tmp_path / "no"), "--dequantize"])
    assert main(["merge", str(low), "--out", str(tmp_path / "floats"), "--dequantize"]) == 0
    one, other = load(low), load(tmp_path / "floats")
    assert set(other.config.model.formats) == {"embed.token", "embed.position", "head"}
    tokens = np.random.default_rng(0).integers(0, 27, (3, 16))
    with no_grad():
        a, b = (saved.model(Tensor(tokens)).numpy() for saved in (one, other))
    assert np.abs(a - b).max() <= 1e-5 * np.abs(a).max()
    assert main(["adapter", str(low), "--out", str(tmp_path / "small")]) == 0
    assert main(["merge", str(folder / "int4"), "--adapter", str(tmp_path / "small"), "--out", str(tmp_path / "again"),
                 "--dequantize"]) == 0
    assert record(tmp_path / "again")["parameters_sha256"] == record(tmp_path / "floats")["parameters_sha256"]
    assert main(["quantize", str(folder / "base"), "--format", "int8", "--least", "0", "--out", str(tmp_path / "int8")]) == 0
    with pytest.raises(CheckpointError, match="adapters are of a base whose parameters have the hash"):
        main(["merge", str(tmp_path / "int8"), "--adapter", str(tmp_path / "small"), "--out", str(tmp_path / "no")])


def test_verbs_that_change_layers_ask_for_a_merged_run(folder: Path, tmp_path: Path) -> None:
    for words in (["quantize", "--format", "int8"], ["cut", "--work", "0.5"], ["factor", "--layers", "*", "--rank", "2"]):
        with pytest.raises(UsageError, match=r"has adapters beside its weights; merge them first \(mpitrain merge"):
            main([words[0], str(folder / "alone"), *words[1:], "--out", str(tmp_path / "no")])


@pytest.mark.slow
def test_a_text_is_the_same_on_two_ranks_and_follows_the_adapters(folder: Path) -> None:
    """Greedy, with a cache: each token is the largest logit of the whole text before it."""
    said = [mpirun(n, "-m", "mpitrain", "generate", "alone", "--prompt", "abc", "--tokens", "8", mesh, cwd=folder)
            for n, mesh in ((1, "mesh.tp=1"), (2, "mesh.tp=2"))]
    assert said[0].rc == said[1].rc == 0 and said[0].out == said[1].out, said[1].err
    saved, letters = load(folder / "alone"), json.loads((folder / "text" / "manifest.json").read_text())["vocabulary"]
    text = said[0].out.rstrip("\n")
    numbers = [letters.index(letter) for letter in text]
    assert len(numbers) == 11
    with no_grad():
        for end in range(3, 11):
            assert int(saved.model(Tensor(np.array([numbers[:end]]))).numpy()[0, -1].argmax()) == numbers[end]


@pytest.mark.slow
def test_parameters_that_are_never_trained_take_no_memory_for_gradients_and_state(tmp_path: Path) -> None:
    """AdamW's two moments and the gradients are three times the parameters; what is frozen has none of them. (Ranks that add
    gradients in shared memory have room for all there.)"""
    (tmp_path / "run.toml").write_text(SMALL)
    words = ("run.toml", "model.hidden=[2048,2048,2048]", "train.steps=2", "train.eval_every=2", "train.batch_size=8",
             "train.micro_batches=2", "optimizer.warmup_steps=0")
    peaks = []
    for n in (1, 2):
        train(tmp_path, n, *words, f"run.out=whole{n}")
        train(tmp_path, n, *words, f"run.out=part{n}", 'optimizer.groups=[{params=["linear*"],frozen=true}]')
        peaks.append([max(line.get("peak_rss_mb", 0) for line in lines(tmp_path / f"{name}{n}")) for name in ("whole", "part")])
    size = 4 * (64 * 2048 + 2 * 2048 * 2048) / 1e6
    assert all(whole - part > times * size for (whole, part), times in zip(peaks, (2.7, 1.8))), peaks


@pytest.mark.slow
def test_other_parts_thaw_beside_adapters_with_the_same_bits_on_any_ranks_and_after_a_return(folder: Path) -> None:
    """Norms are trained from step 3 on; all but adapters and norms stays."""
    words = ("run.toml", *LORA, "train.reproducible=layout", "checkpoint.every=2",
             'optimizer.groups=[{params=["*norm*"],freeze_until=3,lr=1e-3}]')
    train(folder, 1, *words, "run.out=thaw1")
    for name, mesh in (("thaw2", ["mesh.dp=2"]), ("thaw3", ["mesh.pp=2"]), ("thaw4", ["comm.sharding=optimizer"])):
        train(folder, 2, *words, f"run.out={name}", *mesh)
        assert record(folder / "thaw1")["parameters_sha256"] == record(folder / name)["parameters_sha256"], name
    before, after = (dict(load(folder / run, step).model.named_parameters()) for run, step in (("base", None), ("thaw1", None)))
    moved = {name for name, leaf in before.items() if not np.array_equal(leaf.numpy(), after[name].numpy())}
    assert moved and all("norm" in name for name in moved)
    train(folder, 1, *words, "run.out=thaw5", "train.steps=2")
    train(folder, 2, *words, "run.out=thaw5", "--resume", "auto")
    assert record(folder / "thaw1")["parameters_sha256"] == record(folder / "thaw5")["parameters_sha256"]
