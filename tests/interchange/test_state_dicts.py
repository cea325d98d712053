"""A model's state_dict under the names of others, from Python, both ways; and the files that a disk or a user spoils."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpitrain
from mpitrain import nn
from mpitrain.cli import main
from mpitrain.errors import (
    AccessError,
    DataError,
    MpitrainError,
    NumericsError,
    OtherModelError,
    OutputError,
    StorageError,
    UsageError,
)
from mpitrain.interchange import bring_in, load_state_dict, safetensors, state_dict
from mpitrain.interchange.exporting import Wanted, export
from mpitrain.interchange.names import NAMES
from mpitrain.models import MODELS

torch = pytest.importorskip("torch", reason="needs PyTorch (pip install mpitrain[bench])")
from saved_models import fresh, outputs  # noqa: E402
from torch_models import HuggingFaceGPT2, NanoGPT, ResNet, Three, randomise  # noqa: E402

GPT = {"layers": 2, "heads": 4, "width": 32, "block": 12, "vocabulary": 19}


@pytest.mark.parametrize(("names", "name", "theirs", "keys"), [
    ("nanogpt", "gpt", lambda: NanoGPT(**GPT, bias=True), {**GPT, "bias": True}),
    ("gpt2", "gpt", lambda: HuggingFaceGPT2(**GPT), {**GPT, "bias": True, "activation": "gelu_tanh"}),
    ("torchvision", "resnet18", lambda: ResNet([2, 2, 2, 2], 3), {"classes": 3}),
    pytest.param("torchvision", "resnet50", lambda: ResNet([3, 4, 6, 3], 3, Three, 4), {"classes": 3}, marks=pytest.mark.slow),
    pytest.param("torchvision", "resnet34", lambda: ResNet([3, 4, 6, 3], 3), {"classes": 3}, marks=pytest.mark.slow)])
def test_a_state_dict_goes_both_ways(tmp_path: Path, names: str, name: str, theirs: Any, keys: dict[str, Any]) -> None:
    model, ours = randomise(theirs()).eval(), fresh(name, **keys)
    load_state_dict(ours.model, model.state_dict(), names)
    x: Any = np.random.default_rng(0).integers(0, 19, (2, 12))
    x = x if name == "gpt" else np.random.default_rng(0).standard_normal((2, 3, 32, 32)).astype("f4")
    wanted = model(torch.from_numpy(x)).detach().numpy()
    assert np.abs(outputs(ours, x) - wanted).max() <= 1e-5 * np.abs(wanted).max()
    back = state_dict(ours.model, names)
    assert set(back) == set(model.state_dict())
    again = theirs()
    again.load_state_dict({key: torch.from_numpy(value) for key, value in back.items()})
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())
    saved = bring_in(model.state_dict(), tmp_path / "run", names=names, tell=lambda _: None,
                     overrides=["model.heads=4"] if name == "gpt" else [])
    assert saved.hashes() == ours.hashes() == mpitrain.load(tmp_path / "run").hashes()


@pytest.mark.slow
def test_the_gradients_of_resnet50_in_training_are_pytorch_s() -> None:
    ours, theirs = MODELS["resnet50"](classes=4), ResNet([3, 4, 6, 3], 4, Three, 4).double().train()
    ours.initialize(1, "float64")
    theirs.load_state_dict({name: torch.from_numpy(value) for name, value in state_dict(ours, "torchvision").items()})
    x, labels = np.random.default_rng(0).standard_normal((4, 3, 48, 48)), np.arange(4)
    nn.LOSSES["cross_entropy"]()(ours(x), labels).backward()
    torch.nn.functional.cross_entropy(theirs(torch.from_numpy(x)), torch.from_numpy(labels), reduction="sum").backward()
    wanted, found = dict(theirs.named_parameters()), dict(ours.named_parameters())
    for entry in NAMES["torchvision"]().entries(ours):
        if entry.theirs in wanted:
            grad = wanted[entry.theirs].grad.numpy()
            apart = np.abs(np.asarray(found[entry.ours].grad) - grad).max()
            assert apart <= 1e-9 * np.abs(grad).max(), entry.ours


def test_layers_of_torch_nn_go_both_ways() -> None:
    theirs = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(),
                                 torch.nn.Linear(16, 3))
    ours = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    ours.initialize(0)
    load_state_dict(ours, randomise(theirs).state_dict())
    x = np.random.default_rng(0).standard_normal((2, 1, 4, 4)).astype("f4")
    wanted = theirs.eval()(torch.from_numpy(x)).detach().numpy()
    assert np.allclose(ours.eval()(x).numpy(), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    theirs.load_state_dict({name: torch.from_numpy(value) for name, value in state_dict(ours).items()})
    for kind in (torch.float16, torch.bfloat16, torch.float64):
        load_state_dict(ours, {name: value.to(kind) for name, value in theirs.state_dict().items()})


def test_a_dict_that_does_not_fit_is_refused_in_a_line() -> None:
    model = fresh("mlp", inputs=4, hidden=[], outputs=2).model
    good = state_dict(model)
    for changed, error, said in (({**good, "head.weight": good["head.weight"].T}, OtherModelError, "it is transposed"),
                                 ({"head.weight": good["head.weight"]}, OtherModelError, 'wants "head.bias"'),
                                 ({**good, 3: 4}, DataError, "found the key 3"),
                                 ({**good, "a": None}, DataError, '"a" is no array'), ({}, OtherModelError, "wants"),
                                 ({**good, "a": [[1], [1, 2]]}, DataError, '"a" is no array'),
                                 ({**good, "a": np.zeros(2, "c8")}, DataError, "found an array of complex64")):
        with pytest.raises(error, match=said) as caught:
            load_state_dict(model, changed)
        assert str(caught.value).isprintable()
    for call, said in ((lambda: state_dict(3), "found int and 'pytorch'"), (lambda: state_dict(model, 3), "and 3"),
                       (lambda: state_dict(fresh("mlp", inputs=4, hidden=[], outputs=2)), "give its .model"),
                       (lambda: load_state_dict(model, [1]), "expected a dict of arrays by name, found list"),
                       (lambda: bring_in(3, "x"), "found int"), (lambda: state_dict(nn.Linear(2, 2)), "no memory yet")):
        with pytest.raises(MpitrainError, match=said):
            call()
    load_state_dict(model, {f"module.{name}": value for name, value in good.items()})


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_floats_go_out_in_half_precision_as_pytorch_rounds_them(tmp_path: Path, kind: str, ending: str) -> None:
    load_file = pytest.importorskip("safetensors.torch", reason="needs safetensors (pip install mpitrain[bench])").load_file
    saved, path = fresh("mlp", inputs=12, hidden=[8], outputs=3), tmp_path / f"m.{ending}"
    export(saved, Wanted(path, dtype=kind), lambda _: None)
    found = load_file(path) if ending == "safetensors" else torch.load(path)
    for name, value in state_dict(saved.model).items():
        assert torch.equal(found[name], torch.from_numpy(value).to(getattr(torch, kind))), name
    back = bring_in(path, tmp_path / "run", names="own", tell=lambda _: None, overrides=["model.name=mlp"])
    assert all(np.array_equal(value, found[name].float().numpy()) for name, value in state_dict(back.model).items())
    dict(saved.model.named_parameters())["head.bias"].array[0] = 3.4e38
    with pytest.raises(NumericsError, match=f'"head.bias" has numbers beyond the range of {kind}'):
        export(saved, Wanted(path, dtype=kind, overwrite=True), lambda _: None)
    with pytest.raises(UsageError, match="--dtype is for files of tensors"):
        export(saved, Wanted(tmp_path / "x.onnx", dtype=kind), lambda _: None)


@pytest.mark.parametrize(("call", "number", "error", "said"), [
    ("posix_fallocate", errno.ENOSPC, StorageError, "No space left on device.*free some space or write to another file system"),
    ("open", errno.EACCES, AccessError, "Permission denied.*write to a folder of yours"),
    ("open", errno.EROFS, OutputError, "Read-only file system.*write to a folder that can be written"),
    ("fsync", errno.EIO, StorageError, "syncing")])
@pytest.mark.parametrize("ending", ["safetensors", "pt", "onnx"])
def test_a_disk_that_takes_no_file_is_said_in_words_of_this_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str,
                                                                 call: str, number: int, error: type[Exception], said: str
                                                                 ) -> None:
    if ending == "onnx":
        pytest.importorskip("onnx")
    saved, original = fresh("mlp", inputs=4, hidden=[], outputs=2), getattr(os, call)

    def failing(first: Any, *more: Any, **words: Any) -> Any:
        if call != "open" or ".tmp-" in str(first):
            raise OSError(number, os.strerror(number))
        return original(first, *more, **words)
    with monkeypatch.context() as patched, pytest.raises(error, match=said) as caught:
        patched.setattr(os, call, failing)
        export(saved, Wanted(tmp_path / f"m.{ending}"), lambda _: None)
    assert "run.out" not in str(caught.value) and not list(tmp_path.iterdir())


def test_names_of_files_that_cannot_be_are_refused(tmp_path: Path) -> None:
    saved = fresh("mlp", inputs=4, hidden=[], outputs=2)
    (tmp_path / "folder.pt").mkdir()
    (tmp_path / "file").touch()
    for name, said in (("folder.pt", "found a folder"), ("none/m.pt", "there is no folder"), ("file/m.pt", "there is no folder"),
                       ("x" * 300 + ".pt", "File name too long.*write to a shorter name")):
        with pytest.raises(OutputError, match=said) as caught:
            export(saved, Wanted(tmp_path / name), lambda _: None)
        assert "run.out" not in str(caught.value)


def test_a_run_goes_out_comes_in_is_tuned_and_goes_out_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    from launch import mpirun
    keys = ("train.steps=2", "run.seed=3")
    done = mpirun(1, "-m", "mpitrain", "train", *keys, "run.out=first", cwd=tmp_path)
    assert done.rc == 0, done.err
    for ending in ("pt", "safetensors"):
        assert main(["export", "first", f"m.{ending}", "--names", "pytorch"]) == 0
    assert main(["import", "m.safetensors", "--out", "back"]) == 0
    done = mpirun(1, "-m", "mpitrain", "train", *keys, "run.out=tuned", "model.init_from=back", cwd=tmp_path)
    assert done.rc == 0, done.err
    assert main(["export", "tuned", "tuned.safetensors"]) == 0 and main(["import", "tuned.safetensors", "--out", "last"]) == 0
    first, tuned, last = (mpitrain.load(tmp_path / name).hashes() for name in ("first", "tuned", "last"))
    assert first == mpitrain.load(tmp_path / "back").hashes() and tuned == last and first != tuned
    loaded = torch.load(tmp_path / "m.pt")
    assert {name: value.numpy().tobytes() for name, value in loaded.items()} == {
        name: stored.values().tobytes() for name, stored in safetensors.read(tmp_path / "m.safetensors").tensors.items()}
    assert json.loads((tmp_path / "last" / "run.json").read_text())["made"]["by"] == "import"
