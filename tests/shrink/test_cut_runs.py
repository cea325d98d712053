"""Cut runs are runs as any other: evaluated, trained on, used, handed over, on any mesh; and what cannot be cut is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from standing import mpirun

from mpitrain.cli import main
from mpitrain.config import load_run
from mpitrain.errors import MpitrainError
from mpitrain.train.build.saved import load

ROOT = Path(__file__).resolve().parents[2]
GPT = ("model.name=gpt", "model.layers=2", "model.heads=4", "model.width=32", "model.block=24", "model.vocabulary=96",
       "train.steps=20", "train.epochs=0", "train.batch_size=8", "data.path=tokens", "data.validation=tail:0.1")
NET = '''
from mpitrain import nn, ops


class Net(nn.Module):
    def __init__(self, fixed: bool = False):
        self.conv1, self.norm1 = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.linear, self.head = nn.Conv2d(16, 24, 3), nn.Linear(24 * 36, 20), nn.Linear(20, 10)
        self.fixed = fixed

    def forward(self, x):
        y = ops.relu(self.norm1(self.conv1(ops.reshape(x, x.shape[0], 1, 8, 8))))
        y = ops.relu(self.conv2(y))
        y = ops.reshape(y, x.shape[0], 24 * 36 if self.fixed else y.shape[1] * 36)
        return self.head(ops.relu(self.linear(y)))
'''


def done(folder: Path, *words: str, ranks: int = 1) -> str:
    found = mpirun(ranks, "-m", "mpitrain", *words, cwd=folder)
    assert found.rc == 0, found.err
    return found.out


def refused(*words: Any, said: str) -> None:
    with pytest.raises(MpitrainError, match=re.escape(said)):
        main([str(word) for word in words])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `gpt`, a run, and `mine`, one of a user's own model."""
    made = tmp_path_factory.mktemp("cut")
    text = (ROOT / "docs" / "architecture.md").read_text().encode("ascii", "replace").decode()
    (made / "text.txt").write_text(text[:8000])
    (made / "mine.py").write_text(NET)
    (made / "run.toml").write_text("")
    main(["data", "import", "text", str(made / "text.txt"), "--out", str(made / "tokens")])
    done(made, "train", "run.toml", *GPT, "run.out=gpt")
    done(made, "train", "run.toml", "model.name=mine.py:Net", "data.path=digits", "data.validation=tail:0.2", "train.steps=20",
         "train.epochs=0", "run.out=mine")
    return made


@pytest.fixture(scope="module")
def half(folder: Path) -> Path:
    main(["cut", str(folder / "gpt"), "--work", "0.5", "--out", str(folder / "half")])
    return folder / "half"


def test_a_gpt_that_was_cut_is_a_run_as_any_other(folder: Path, half: Path) -> None:
    model = load_run(half, []).model
    heads, hidden = model.arguments["heads"], model.arguments["hidden"]
    assert model.arguments["head_width"] == 8 and sum(heads) + sum(hidden) < 8 + 256 and all(n % 8 == 0 for n in hidden)
    saved, whole = load(half), load(folder / "gpt")
    assert saved.step == whole.step == 20 and saved.model.count_parameters() < 0.7 * whole.model.count_parameters()
    assert saved.model["block0"].attention.qkv.weight.shape == (3 * 8 * heads[0], 32)
    found = [json.loads(done(folder, "evaluate", "half", *words, ranks=2).splitlines()[-1]) for words in ((), ("mesh.pp=2",))]
    assert found[0]["step"] == 20 and abs(found[0]["loss"] - found[1]["loss"]) < 1e-5
    texts = [done(folder, "generate", "half", "--prompt", "The ", "--tokens", "16", *words) for words in ((), ("--no-cache",))]
    assert texts[0] == texts[1] and len(texts[0]) > 15


@pytest.mark.slow
def test_a_cut_gpt_is_trained_on_cut_again_quantized_factored_and_handed_over(folder: Path, half: Path) -> None:
    done(folder, "train", "half/config.toml", f"model.init_from={half}", "run.out=tuned", "train.steps=6", "mesh.pp=2", ranks=2)
    done(folder, "train", "half/config.toml", f"model.init_from={half}", "run.out=whole", "train.steps=12", "checkpoint.every=6")
    assert load(folder / "tuned").meta["model"]["hidden"] == load_run(half, []).model.arguments["hidden"]
    main(["cut", str(half), "--work", "0.7", "--out", str(folder / "quarter")])
    assert sum(load_run(folder / "quarter", []).model.arguments["hidden"]) < sum(load_run(half, []).model.arguments["hidden"])
    main(["quantize", str(half), "--format", "int8", "--least", "1", "--out", str(folder / "low")])
    main(["factor", str(half), "--layers", "*", "--work", "0.7", "--out", str(folder / "factored")])
    for run in ("low", "factored", "quarter", "tuned"):
        assert np.isfinite(json.loads(done(folder, "evaluate", run, "mesh.pp=1").splitlines()[-1])["loss"])
        assert len(done(folder, "generate", run, "mesh.pp=1", "--prompt", "The ", "--tokens", "8")) > 8
    for words in (("half.safetensors",), ("half.pt", "--names", "pytorch")):
        main(["export", str(half), str(folder / words[0]), *words[1:]])
    refused("export", half, folder / "other.safetensors", "--names", "gpt2", said="GPT-2 has heads as wide as the model")


@pytest.mark.slow
def test_blocks_of_different_sizes_train_and_generate_on_all_meshes(folder: Path) -> None:
    sizes = ("model.heads=[2, 4]", "model.head_width=12", "model.hidden=[64, 24]")
    done(folder, "train", "run.toml", *GPT, *sizes, "run.out=sizes", "mesh.tp=2", ranks=2)
    wanted = done(folder, "generate", "sizes", "--prompt", "The ", "--tokens", "16", "mesh.tp=1")
    for words in (("mesh.tp=2",), ("mesh.tp=1", "mesh.pp=2"), ("--no-cache", "mesh.tp=2"), ("mesh.tp=1",)):
        assert done(folder, "generate", "sizes", "--prompt", "The ", "--tokens", "16", *words, ranks=2) == wanted, words
    main(["cut", str(folder / "sizes"), "--work", "0.7", "--out", str(folder / "fewer"), "mesh.tp=1"])
    done(folder, "evaluate", "fewer", "mesh.tp=1")


def test_a_model_without_size_keys_is_cut_by_the_shapes_of_its_parameters(folder: Path) -> None:
    main(["cut", str(folder / "mine"), "--work", "0.4", "--out", str(folder / "less")])
    shapes = load_run(folder / "less", []).model.shapes
    channels = shapes["conv1.weight"][0]
    assert shapes["norm1.running_var"] == [channels] and shapes["conv2.weight"][1] == channels < 16
    assert shapes["linear.weight"][1] == 36 * shapes["conv2.weight"][0] and "head.bias" not in shapes
    saved = load(folder / "less")
    assert {name: list(value.shape) for name, value in saved.model.state_dict().items() if name in shapes} == shapes
    assert json.loads(done(folder, "evaluate", "less", ranks=2).splitlines()[-1])["step"] == 20
    assert str(shapes["conv2.weight"][0]) in done(folder, "inspect", "less")
    for shape, said in (("[9]", 'the shape of "conv1.weight" is a list of 4 integers'), ("[99,1,3,3]", "at most that of"),
                        ("3", "is a list of 4 integers")):
        refused("evaluate", folder / "less", f'model.shapes={{"conv1.weight"={shape}}}', said=said)
    refused("evaluate", folder / "less", 'model.shapes={"conv9.weight"=[1]}', said='did you mean "conv')
    main(["export", str(folder / "less"), str(folder / "less.safetensors")])
    main(["import", str(folder / "less.safetensors"), "--out", str(folder / "back"), f"model.name={saved.config.model.name}",
          f"run.folder={saved.config.folder}"])
    assert load(folder / "back").hashes() == saved.hashes() and load_run(folder / "back", []).model.shapes == shapes



@pytest.mark.slow
def test_a_model_with_shapes_is_trained_on_resumed_and_cut_again(folder: Path) -> None:
    main(["cut", str(folder / "mine"), "--work", "0.4", "--out", str(folder / "less"), "--overwrite"])
    saved = load(folder / "less")
    words = ("train", "less/config.toml", f"model.init_from={folder / 'less'}", "run.out=more", "checkpoint.every=4", "--quiet")
    done(folder, *words, "train.steps=4")
    done(folder, *words, "train.steps=8", "--resume", "latest", "--change", "train.steps", ranks=2)
    assert json.loads((folder / "more" / "run.json").read_text())["status"] == "done"
    main(["cut", str(folder / "less"), "--work", "0.8", "--out", str(folder / "lesser")])
    assert load(folder / "lesser").model.count_parameters() < saved.model.count_parameters()


def test_importance_by_gradients_has_the_same_bits_on_any_number_of_ranks(folder: Path) -> None:
    hashes = []
    for number, ranks in enumerate((1, 2)):
        done(folder, "cut", "mine", "--work", "0.4", "--importance", "taylor", "--calibrate", "100", "--out", f"taylor{number}",
             ranks=ranks)
        about = json.loads((folder / f"taylor{number}" / "run.json").read_text())
        assert about["made"]["importance"] == "taylor"
        hashes.append(about["parameters_sha256"])
    assert len(set(hashes)) == 1


def test_what_cannot_be_cut_is_refused_in_a_line(folder: Path, half: Path) -> None:
    out = ("--out", folder / "none")
    for work in ("0", "1", "-0.5", "nan", "1.5"):
        refused("cut", half, "--work", work, *out, said="must be more than 0 and less than 1")
    refused("cut", half, "--work", "half", *out, said="invalid float value: 'half'")
    refused("cut", half, "--work", "0.01", *out, said="is left at the smallest sizes")
    refused("cut", half, "--work", "0.5", "--out", half, said="is what the model is read from")
    refused("cut", folder / "gpt", "--work", "0.5", "--out", half, said="--overwrite deletes the run that is there")
    refused("cut", half, "--work", "0.5", "--importance", "size", *out, said="invalid choice: 'size'")
    refused("cut", half, "--work", "0.5", "--calibrate", "0", *out, said="at least 1 row")
    refused("cut", folder / "mine", "--work", "0.4", *out, "model.fixed=true", said="with sizes of its own; its channels")
    refused("cut", folder / "gpt", "--work", "0.6", *out, "mesh.tp=4", said="mesh.tp = 4 does not divide")
    main(["factor", str(folder / "mine"), "--layers", "*", "--work", "0.6", "--out", str(folder / "two"), "--overwrite"])
    assert "conv2" in load_run(folder / "two", []).model.ranks
    for share in ("0", "1", "nan"):
        refused("factor", half, "--layers", "*", "--work", share, *out, said="--work must lie in (0, 1)")
    refused("factor", half, "--layers", "*", "--work", "0.01", *out, said="cannot be reached")
    refused("cut", folder / "two", "--work", "0.5", *out, said="the run is factored (model.ranks)")
    assert not (folder / "none").exists()
