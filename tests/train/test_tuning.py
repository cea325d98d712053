"""A trained model is tuned by adapters alone, learns from a teacher, and is cut into factors; each as a run of its own."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import mpirun
from runs import record

from mpitrain import nn
from mpitrain.autograd import Tensor, no_grad
from mpitrain.checkpoint import store
from mpitrain.cli import main
from mpitrain.config import load_config
from mpitrain.errors import CheckpointError, ConfigError, NumericsError, OutputError, UsageError
from mpitrain.models import MODELS
from mpitrain.shrink.factor import attach, candidates, factor, of_energy, of_rank, of_work
from mpitrain.shrink.graph import Product
from mpitrain.train.build.model import make_model
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
[train]
steps = 6
batch_size = 8
micro_batches = 4
reproducible = "layout"
"""
LORA = ("model.init_from=base", "lora.rank=4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, a run of its model, and runs of two adapted models, on one rank and on two."""
    found = tmp_path_factory.mktemp("tuning")
    words = random.Random(0)
    (found / "text.txt").write_text("abcdefghijklmnopqrstuvwxyz " + " ".join(
        "".join(words.choices("abcdefghijklmnopqrstuvwxyz", k=4)) for _ in range(600)))
    main(["data", "import", "text", str(found / "text.txt"), "--out", str(found / "text")])
    (found / "run.toml").write_text(TEXT)
    train(found, 1, "run.out=base")
    return found


def train(folder: Path, n: int, *keys: str, rc: int = 0) -> str:
    done = mpirun(n, "-m", "mpitrain", "train", "run.toml", *keys, cwd=folder)
    assert done.rc == rc, done.err
    return done.err


@pytest.fixture(scope="module")
def adapted(folder: Path) -> Path:
    for n in (1, 2):
        train(folder, n, *LORA, f"run.out=adapted{n}")
    return folder / "adapted1"


def test_adapters_alone_are_trained_with_the_same_bits_on_one_rank_and_two(folder: Path, adapted: Path) -> None:
    assert record(adapted)["parameters_sha256"] == record(folder / "adapted2")["parameters_sha256"]
    before, after = (dict(load(path).model.named_parameters()) for path in (folder / "base", adapted))
    new = {name for name in after if name not in before}
    assert new == {f"block{i}.attention.{layer}.{part}" for i in (0, 1) for layer in ("qkv", "out") for part in ("down", "up")}
    assert all(np.array_equal(before[name].numpy(), after[name].numpy()) for name in before)
    assert all(after[name].numpy().any() for name in new)
    found = store.latest(adapted / "checkpoints", purpose=store.EVALUATE).arrays
    held = {name.split("/")[-1] for name in found if name.startswith("optimizer/")}
    assert held == new | {"steps"}


def test_merged_it_gives_what_it_gave_with_adapters_and_is_a_run_without(folder: Path, adapted: Path) -> None:
    assert main(["merge", str(adapted), "--out", str(folder / "merged")]) == 0
    one, other = load(adapted), load(folder / "merged")
    assert other.config.lora.rank == 0 and other.step == one.step
    for words in (["cut", "--work", "0.5"], ["factor", "--layers", "*", "--rank", "2"]):
        with pytest.raises(UsageError, match="has adapters beside its weights; merge them first .*, and take RUN2"):
            main([words[0], str(adapted), *words[1:], "--out", str(folder / "none")])
    tokens = np.random.default_rng(0).integers(0, 27, (3, 16))
    with no_grad():
        a, b, base = (saved.model(Tensor(tokens)).numpy() for saved in (one, other, load(folder / "base")))
    assert np.abs(a - b).max() <= 1e-6 * np.abs(a).max() < np.abs(a - base).max()
    lines = [mpirun(1, "-m", "mpitrain", "evaluate", str(path), cwd=folder).out.splitlines()[-1]
             for path in (adapted, folder / "merged")]
    assert json.loads(lines[0])["loss"] == pytest.approx(json.loads(lines[1])["loss"], rel=1e-6)
    with pytest.raises(UsageError, match="has no adapters to merge"):
        main(["merge", str(folder / "merged"), "--out", str(folder / "again")])


def test_adapters_alone_go_back_on_their_base_and_on_no_other(folder: Path, adapted: Path) -> None:
    assert main(["adapter", str(adapted), "--out", str(folder / "small")]) == 0
    assert main(["merge", str(folder / "base"), "--adapter", str(folder / "small"), "--out", str(folder / "apart")]) == 0
    assert main(["merge", str(adapted), "--out", str(folder / "whole")]) == 0
    assert record(folder / "apart")["parameters_sha256"] == record(folder / "whole")["parameters_sha256"]
    kept = store.latest(folder / "small", purpose=store.READ).arrays
    assert len(kept) == 8 and all(name.endswith((".down", ".up")) for name in kept)
    with pytest.raises(CheckpointError, match="adapters are of a base whose parameters have the hash"):
        main(["merge", str(folder / "whole"), "--adapter", str(folder / "small"), "--out", str(folder / "no")])
    with pytest.raises(CheckpointError, match="is not one of adapters alone"):
        main(["merge", str(folder / "base"), "--adapter", str(folder / "base" / "checkpoints"), "--out", str(folder / "no")])
    with pytest.raises(OutputError, match="is not empty"):
        main(["adapter", str(adapted), "--out", str(folder / "small")])
    assert not (folder / "no").exists()


@pytest.mark.slow
def test_stages_slices_and_a_resumed_run_tune_the_same(folder: Path, adapted: Path) -> None:
    known = record(adapted)["parameters_sha256"]
    for name, n, keys in (("stages", 2, ["mesh.pp=2"]), ("slices", 2, ["comm.sharding=optimizer"])):
        train(folder, n, *LORA, f"run.out={name}", *keys)
        assert record(folder / name)["parameters_sha256"] == known
    train(folder, 1, *LORA, "run.out=parts", "checkpoint.every=3", "train.steps=3")
    train(folder, 2, *LORA, "run.out=parts", "--resume", "auto")
    assert record(folder / "parts")["parameters_sha256"] == known


@pytest.mark.parametrize(("keys", "message"), [
    (["lora.layers=head"], '"head" has one weight with "embed.token"'),
    (["lora.layers=block*.attn"], 'no linear layer is called "block\\*.attn"'),
    (["lora.rank=33"], 'more than the rank of "block0.attention.qkv"'),
    (["model.init_from="], "model.init_from names none"),
    (["lora.alpha=0"], "lora.alpha must be more than 0"),
    (["lora.rank=0", "lora.alpha=3"], "lora.alpha is there, and lora.rank is 0")])
def test_wrong_adapters_are_refused_by_name(tmp_path: Path, keys: list[str], message: str) -> None:
    (tmp_path / "run.toml").write_text(TEXT)
    with pytest.raises(ConfigError, match=message):
        make_model(load_config(tmp_path / "run.toml", [*LORA, *keys]))


def test_a_teacher_is_followed_with_the_same_bits_on_one_rank_and_on_two_stages(folder: Path) -> None:
    train(folder, 1, "distil.teacher=base", "run.out=student1")
    train(folder, 2, "distil.teacher=base", "run.out=student2", "mesh.pp=2")
    one, two, alone = (record(folder / name)["parameters_sha256"] for name in ("student1", "student2", "base"))
    assert one == two != alone


def test_a_teacher_of_other_classes_is_refused(folder: Path) -> None:
    said = train(folder, 1, "distil.teacher=base", "run.out=refused", "model.vocabulary=30", rc=78)
    assert "distil.teacher tells 27 classes apart, and the model 30" in said
    assert not (folder / "refused").exists()
    said = train(folder, 2, "distil.teacher=base", "run.out=refused", "mesh.tp=2",
                 "train.reproducible=run", rc=78)
    assert "[distil] compares whole outputs, and mesh.tp = 2 leaves those of the last layer" in said


def test_the_loss_of_a_teacher_is_pytorchs() -> None:
    torch = pytest.importorskip("torch")
    from mpitrain import nn
    from mpitrain.shrink.distil import Teacher
    draw = np.random.default_rng(0)
    x, w, logits = draw.normal(size=(5, 3)), draw.normal(size=(4, 3)), draw.normal(size=(5, 4))
    labels = np.array([0, 3, -1, 2, 1])
    model = nn.Linear(3, 4, bias=False)
    model.initialize(0, "float64")
    model.weight.array[...] = w
    output, T, a = Tensor(logits, requires_grad=True), 3.0, 0.3
    hard = nn.LOSSES["cross_entropy"](ignore_index=-1)(output, labels)
    loss = Teacher(lambda x: model(x).detach(), T, a, -1)(Tensor(x), output, labels, hard)
    loss.backward()
    t = torch.tensor(logits, requires_grad=True)
    f, kept = torch.nn.functional, labels >= 0
    soft = f.kl_div(f.log_softmax(t[kept] / T, -1), f.softmax(torch.tensor(x @ w.T)[kept] / T, -1), reduction="sum")
    expected = (1 - a) * f.cross_entropy(t, torch.tensor(labels), ignore_index=-1, reduction="sum") + a * T * T * soft
    expected.backward()
    assert float(loss.array) == pytest.approx(expected.item(), rel=1e-12)
    np.testing.assert_allclose(output.grad, t.grad.numpy(), atol=1e-12)


def test_factors_are_the_best_of_their_rank_and_a_run_of_their_own(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["factor", str(folder / "base"), "--out", str(folder / "factored"), "--rank", "8", "--layers", "block*.wide",
                 "block*.attention.qkv"]) == 0
    told = json.loads(capfd.readouterr().out.splitlines()[-1])
    before, after = load(folder / "base"), load(folder / "factored")
    for layer in told["layers"]:
        path = layer["layer"]
        whole = dict(before.model.named_parameters())[f"{path}.weight"].numpy().astype(np.float64)
        parts = {name: leaf.numpy().astype(np.float64) for name, leaf in after.model.named_parameters() if name.startswith(path)}
        s = np.linalg.svd(whole, compute_uv=False)
        left = whole - parts[f"{path}.weight"] @ parts[f"{path}.down"]
        assert np.linalg.norm(left) == pytest.approx(np.linalg.norm(s[8:]), rel=1e-5)
        assert layer["error"] == pytest.approx(np.linalg.norm(s[8:]) / np.linalg.norm(s), rel=1e-9)
    assert told["parameters"] == [before.model.count_parameters(), after.model.count_parameters()]
    assert len(told["layers"]) == 4 and told["parameters"][1] < told["parameters"][0]
    done = mpirun(1, "-m", "mpitrain", "evaluate", str(folder / "factored"), cwd=folder)
    assert done.rc == 0 and json.loads(done.out.splitlines()[-1])["loss"] < 4, done.err


def test_the_rank_follows_the_energy() -> None:
    model = nn.Sequential(("first", nn.Linear(20, 30)), ("last", nn.Linear(30, 4)))
    model.initialize(0, "float64")
    draw = np.random.default_rng(0)
    u, v = (np.linalg.qr(draw.normal(size=(n, 4)))[0] for n in (30, 20))
    model.blocks["first"].weight.array[...] = u * [4.0, 3.0, 2.0, 1.0] @ v.T            # squares 16, 9, 4, 1 of 30
    layers, left = candidates(model, ["*"])
    assert of_energy(layers, 24 / 30)["first"] == 2 and not left
    assert of_energy(candidates(model, ["first"])[0], 26 / 30) == {"first": 3}
    assert of_rank(candidates(model, ["last"])[0], 4) == {}                             # would be larger


def test_the_ranks_of_a_share_of_the_work_lose_the_least_energy() -> None:
    """Against all pairs of ranks; a rank's loss falls convexly, so a price finds the best of its work."""
    model = nn.Sequential(("first", nn.Linear(16, 24)), ("last", nn.Linear(24, 20)))
    model.initialize(0, "float64")
    products = [Product("first.weight", (24, 16), 3, 3), Product("last.weight", (20, 24), 1, 1)]
    layers = candidates(model, ["*"])[0]
    total = 3 * 24 * 16 + 20 * 24
    spectra = {path: np.linalg.svd(layer.weight.array, compute_uv=False) ** 2 for path, layer in layers.items()}

    def lost(ranks: Mapping[str, int]) -> float:
        return sum(float(spectra[path][rank:].sum() / spectra[path].sum()) for path, rank in ranks.items())
    for share in (0.2, 0.5, 0.7):
        ranks, work = of_work(layers, products, share)
        counted = 3 * 40 * ranks.get("first", 24 * 16 / 40) + 44 * ranks.get("last", 20 * 24 / 44)
        assert work <= share and work == pytest.approx(counted / total)
        better = [(a, b) for a in range(1, 17) for b in range(1, 21) if 3 * 40 * a + 44 * b <= total * work
                  and lost({"first": a, "last": b}) < lost(ranks) - 1e-12]
        assert not better or "first" not in ranks or "last" not in ranks
    with pytest.raises(UsageError, match=r"0\.01 of the work cannot be reached: 0\.1"):
        of_work(layers, products, 0.01)


@pytest.mark.parametrize("conv", [{}, {"stride": 2, "padding": 1}, {"padding": "same", "padding_mode": "reflect", "bias": False}])
def test_a_convolution_of_full_rank_in_two_is_the_same(conv: dict[str, Any]) -> None:
    whole, two = (nn.Sequential(("conv", nn.Conv2d(3, 4, 3, **conv)), ("norm", nn.BatchNorm2d(4))) for _ in range(2))
    attach(two, {"conv": 4})
    for model in (whole, two):
        model.initialize(0, "float64")
    assert factor(whole, two)["conv"] < 1e-12
    x = np.random.default_rng(0).standard_normal((2, 3, 8, 8))
    with no_grad():
        np.testing.assert_allclose(two.eval()(x).numpy(), whole.eval()(x).numpy(), rtol=1e-10, atol=1e-12)


def test_what_has_no_factors_is_refused_by_name_or_left_and_told() -> None:
    model = MODELS["gpt"](layers=1, heads=2, width=16, block=8, vocabulary=11, experts=2)
    model.initialize(0)
    layers, left = candidates(model, ["*"])
    assert list(layers) == ["block0.attention.qkv", "block0.attention.out"] and len(left) == 2
    for name, why in (("head", "has one weight with"), ("block0.mixture.router", "belongs to a mixture of experts")):
        with pytest.raises(ConfigError, match=why):
            candidates(model, ["block*", name])
    with pytest.raises(ConfigError, match='is called "blok"'):
        candidates(model, ["blok"])
    with pytest.raises(ConfigError, match="a convolution of 2 groups"):
        attach(nn.Sequential(("conv", nn.Conv2d(4, 4, 3, groups=2))), {"conv": 2})
    model["block0"].attention.out.weight.array[0, 0] = np.nan
    with pytest.raises(NumericsError, match='layer "block0.attention.out": the weight has NaN'):
        of_energy(candidates(model, ["*"])[0], 0.5)


@pytest.mark.parametrize(("key", "message"), [
    ('{"block0.wid" = 4}', 'no linear layer or convolution is called "block0.wid"'),
    ('{"head" = 4}', '"head" has one weight with'),
    ('{"block0.wide" = 0}', 'an integer of 1 to 32, found 0'), ('{"block0.wide" = 33}', 'an integer of 1 to 32, found 33')])
def test_wrong_ranks_are_refused_by_name(tmp_path: Path, key: str, message: str) -> None:
    (tmp_path / "run.toml").write_text(TEXT)
    with pytest.raises(ConfigError, match=message):
        make_model(load_config(tmp_path / "run.toml", [f"model.ranks={key}"]))


@pytest.mark.parametrize(("keys", "message"), [
    (["distil.temperature=0"], "distil.temperature must be more than 0"), (["distil.weight=1.5"], "distil.weight must lie in"),
    (["distil.teacher=", "distil.weight=0.9"], "distil.weight is there, and no teacher"),
    (["train.loss=mse"], 'distil.teacher is for train.loss = "cross_entropy"'), (["mesh.cp=2"], "mesh.cp = 2 cuts them"),
    (["train.device=gpu"], 'distil.teacher is for train.device = "cpu"')])
def test_wrong_keys_of_a_teacher_are_refused(tmp_path: Path, keys: list[str], message: str) -> None:
    (tmp_path / "run.toml").write_text(TEXT)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "run.toml", ["distil.teacher=base", *keys])


def test_adapters_of_rank_8_are_a_twentieth_of_a_gpt_at_most(tmp_path: Path) -> None:
    """The bar of the optimizer's state, by shapes: adapters of rank 8 on nanoGPT's model for a CPU."""
    (tmp_path / "run.toml").write_text(TEXT)
    keys = ["model.layers=4", "model.heads=4", "model.width=128", "model.block=64", "model.vocabulary=65", "model.init_from=base"]
    whole, adapted = (make_model(load_config(tmp_path / "run.toml", [*keys, *more])) for more in ([], ["lora.rank=8"]))
    new = adapted.count_parameters() - whole.count_parameters()
    assert 0 < new <= 0.05 * whole.count_parameters()
