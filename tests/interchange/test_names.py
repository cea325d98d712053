"""State dicts of PyTorch's GPT-2 and ResNet-18, and ours, in both directions: equal bits, and outputs to 1e-5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain.errors import ConfigError, DataError, OtherModelError, UsageError
from mpitrain.interchange.exporting import Wanted, export
from mpitrain.interchange.importing import bring_in
from mpitrain.train.build.saved import load

torch = pytest.importorskip("torch", reason="needs PyTorch (pip install mpitrain[bench])")
pytest.importorskip("safetensors", reason="needs safetensors (pip install mpitrain[bench])")
from safetensors.torch import load_file, load_model, save_file, save_model  # noqa: E402
from saved_models import fresh, outputs  # noqa: E402
from torch_models import HuggingFaceGPT2, NanoGPT, ResNet, randomise  # noqa: E402

SIZES = {"layers": 2, "heads": 4, "width": 32, "block": 12, "vocabulary": 19}
TOKENS = np.random.default_rng(0).integers(0, 19, (3, 12))
IMAGES = np.random.default_rng(0).standard_normal((2, 3, 64, 64)).astype("f4")


def close(ours: np.ndarray, theirs: Any) -> None:
    theirs = theirs.detach().numpy()
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


def equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert set(one) == set(other)
    for name in one:
        assert one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]), name


@pytest.mark.parametrize(("names", "kind", "keys"), [
    ("nanogpt", NanoGPT, {"bias": True}), ("nanogpt", NanoGPT, {"bias": False}), ("gpt2", HuggingFaceGPT2, {})])
@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_a_gpt_of_pytorch_comes_in_and_goes_out(tmp_path: Path, names: str, kind: Any, keys: dict[str, Any], ending: str) -> None:
    theirs = randomise(kind(**SIZES, **keys))
    path = tmp_path / f"m.{ending}"
    save_model(theirs, path) if ending == "safetensors" else torch.save(theirs.state_dict(), path)
    saved = bring_in(path, tmp_path / "run", names=names, overrides=["model.heads=4"], tell=lambda _: None)
    close(outputs(saved, TOKENS), theirs(torch.from_numpy(TOKENS)))
    assert load(tmp_path / "run").hashes() == saved.hashes()
    back = tmp_path / f"back.{ending}"
    export(saved, Wanted(back, names), lambda _: None)
    again = kind(**SIZES, **keys)
    load_model(again, back) if ending == "safetensors" else again.load_state_dict(torch.load(back))
    equal(theirs.state_dict(), again.state_dict())


def test_a_checkpoint_of_nanogpt_says_its_heads_and_wrappers_are_taken_off(tmp_path: Path) -> None:
    theirs = randomise(NanoGPT(**SIZES, bias=True))
    state = {f"_orig_mod.module.{name}": value for name, value in theirs.state_dict().items()}
    torch.save({"model": state, "model_args": {"n_head": 4}, "iter_num": 3, "best_val_loss": torch.tensor(1.5)},
               tmp_path / "ckpt.pt")
    lines: list[str] = []
    saved = bring_in(tmp_path / "ckpt.pt", tmp_path / "run", names="nanogpt", tell=lines.append)
    close(outputs(saved, TOKENS), theirs(torch.from_numpy(TOKENS)))
    assert [line.split('"')[1] for line in lines[:2]] == ["_orig_mod.", "module."]


def test_gpt2_reads_config_json_an_untied_head_and_half_precision(tmp_path: Path) -> None:
    theirs = randomise(HuggingFaceGPT2(**SIZES)).half()
    theirs.lm_head.weight = torch.nn.Parameter(torch.randn(19, 32).half())
    state = {f"transformer.{name}" if "lm_head" not in name else name: value.contiguous() for name,
             value in theirs.state_dict().items()}
    save_file(state | {"transformer.h.0.attn.bias": torch.ones(1, 1, 12, 12)}, tmp_path / "m.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_head": 4, "n_embd": 32,
                                                      "layer_norm_epsilon": 1e-5}))
    with pytest.raises(OtherModelError, match="further name.*model.tied=false"):
        bring_in(tmp_path / "m.safetensors", tmp_path / "run", names="gpt2", tell=lambda _: None)
    lines: list[str] = []
    saved = bring_in(tmp_path / "m.safetensors", tmp_path / "run", names="gpt2", overrides=["model.tied=false"],
                     tell=lines.append)
    close(outputs(saved, TOKENS), theirs.float()(torch.from_numpy(TOKENS)))
    assert "of float16 made float32, exactly" in lines[0]
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(DataError, match="of a model of type bert"):
        bring_in(tmp_path / "m.safetensors", tmp_path / "run2", names="gpt2", tell=lambda _: None)


@pytest.mark.parametrize("ending", ["safetensors", pytest.param("pt", marks=pytest.mark.slow)])
def test_a_resnet_of_torchvision_comes_in_and_goes_out(tmp_path: Path, ending: str) -> None:
    theirs = randomise(ResNet([2, 2, 2, 2], classes=7)).eval()
    path = tmp_path / f"m.{ending}"
    save_model(theirs, path) if ending == "safetensors" else torch.save(theirs.state_dict(), path)
    saved = bring_in(path, tmp_path / "run", names="torchvision", tell=lambda _: None)
    assert saved.config.model.name == "resnet18"
    close(outputs(saved, IMAGES), theirs(torch.from_numpy(IMAGES)))
    export(saved, Wanted(tmp_path / f"back.{ending}", "torchvision"), lambda _: None)
    back = load_file(tmp_path / "back.safetensors") if ending == "safetensors" else torch.load(tmp_path / "back.pt")
    equal(theirs.state_dict(), dict(back))


@pytest.mark.parametrize(("name", "keys"), [
    ("mlp", {"inputs": 12, "hidden": [8], "outputs": 3}), ("lenet", {}), ("resnet20", {"channels": 1}),
    pytest.param("resnet34", {"classes": 3}, marks=pytest.mark.slow),
    ("gpt", {**SIZES, "bias": True, "activation": "gelu_tanh"}), ("gpt", {**SIZES, "tied": False, "eps": 1e-6}),
    ("gpt", {**SIZES, "experts": 4})])
@pytest.mark.parametrize(("ending", "names"), [("safetensors", "own"), ("safetensors", "pytorch"), ("pt", "pytorch")])
def test_every_model_comes_back_with_its_bits(tmp_path: Path, name: str, keys: dict[str, Any], ending: str, names: str) -> None:
    saved = fresh(name, **keys)
    export(saved, Wanted(tmp_path / f"m.{ending}", names), lambda _: None)
    words = [f"model.{key}={json.dumps(value)}" for key, value in {"name": name, **keys}.items()] if ending == "pt" else []
    again = bring_in(tmp_path / f"m.{ending}", tmp_path / "run", names=names if words else "", overrides=words,
                     tell=lambda _: None)
    assert again.hashes() == saved.hashes() and again.config.model.arguments == saved.config.model.arguments
    assert again.step == (7 if ending == "safetensors" else 0)


def test_names_and_shapes_of_another_model_are_refused_with_the_nearest(tmp_path: Path) -> None:
    saved, keys = fresh("mlp", inputs=12, hidden=[8], outputs=3), ["model.name=mlp", "model.inputs=12", "model.hidden=[8]"]
    export(saved, Wanted(tmp_path / "m.pt"), lambda _: None)
    state = torch.load(tmp_path / "m.pt")

    def refused(changed: dict[str, Any], said: str, names: str = "pytorch", more: str = "model.outputs=3",
                error: type[Exception] = OtherModelError) -> None:
        torch.save(changed, tmp_path / "x.pt")
        with pytest.raises(error, match=said):
            bring_in(tmp_path / "x.pt", tmp_path / "run", names=names, overrides=[*keys, more], tell=lambda _: None)
        assert not (tmp_path / "run").exists()
    head = state["head.weight"]
    rest = {name: value for name, value in state.items() if name != "head.weight"}
    refused({**rest, "heads.weight": head}, r'wants "head.weight", which the file has not \(did you mean "heads.weight"')
    refused({**state, "head.bias2": head}, r'has "head.bias2", which the model has not \(did you mean "head.bias"')
    refused({**state, "head.weight": head.T}, r"has shape \(8, 3\), the model wants \(3, 8\): it is transposed")
    refused(state, "has shape", more="model.outputs=4")
    refused(state, "unknown table of names", names="pytroch", error=ConfigError)
    refused(state, "does not say whose names", names="", error=UsageError)
    refused({**rest, "head.weight": torch.full_like(head, float("nan"))}, "not finite", error=Exception)
    with pytest.raises(ConfigError, match="has none for"):
        export(saved, Wanted(tmp_path / "y.pt", "gpt2"), lambda _: None)


def test_nothing_that_a_file_says_is_run_or_built_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpitrain.interchange import safetensors
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("open('ran', 'w')\nrun = None\n")
    gpt, evil = {"name": "gpt", **SIZES}, "evil.py:run"
    for about, said in (
            ({"model": {**gpt, "name": evil}}, "names code of somebody's own"),
        ({"names": evil, "model": gpt}, "give --names yourself"),
            ({"model": {**gpt, "activation": evil}}, "names code of somebody's own"),
            ({"model": gpt, "transform": [evil]}, "names code of somebody's own"),
            ({"model": gpt, "transform": [{"name": evil, "a": 1}]}, "names code of somebody's own"),
            ({"model": {**gpt, "formats": {"head": evil}}}, "names code of somebody's own"),
            ({"model": {**gpt, "formats": {"head": ["int8"]}}}, "model.layer is"),
            ({"model": {**gpt, "ranks": {"head": 10**9}}}, "model.layer = 1000000000"),
            ({"model": {**gpt, "shapes": {"head.weight": [3, 10**9]}}}, "model.layer = 1000000000"),
            ({"model": {**gpt, "shapes": {"head.weight": [[3]]}}}, "model.layer is"),
            ({"model": gpt, "target_transform": [evil]}, "names code of somebody's own"),
            ({"model": gpt, "target_transform": "scale"}, "target_transform"),
            ({"model": {**gpt, "layers": 10**9}}, "layers = 1000000000 for 3 tensors"),
        ({"model": {**gpt, "width": 10**9}}, "width ="),
            ({"model": {**gpt, "init_from": "x"}}, "model.init_from is x"),
        ({"model": {**gpt, "tied": None}}, "model.tied is None"),
            ({"model": {**gpt, "name": "\n"}}, "model.name is"), ({"model": gpt, "names": "\n"}, "not what export writes"),
        ({"model": 3}, "no table"),
            ({"model": gpt, "transform": [["scale"]]}, "transform"), ({"model": gpt, "precision": "float8"}, "precision")):
        safetensors.write(tmp_path / "x", dict.fromkeys("abc", np.ones(3)),
                          {"mpitrain": json.dumps({"names": "own", **about})}, overwrite=True)
        with pytest.raises((ConfigError, DataError, UsageError), match=said) as caught:
            bring_in(tmp_path / "x", tmp_path / "run", tell=lambda _: None)
        assert str(caught.value).isprintable() and not (tmp_path / "ran").exists() and not (tmp_path / "run").exists()
