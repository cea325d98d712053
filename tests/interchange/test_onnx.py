"""ONNX: every model of the table gives onnxruntime's outputs, at several batches and lengths, with a cache and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain import models
from mpitrain.errors import OutputError, UsageError
from mpitrain.interchange.exporting import Wanted, export

onnx = pytest.importorskip("onnx", reason="needs onnx (pip install mpitrain[onnx])")
runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime (pip install mpitrain[bench])")
from saved_models import fresh, outputs  # noqa: E402

GPT = {"layers": 2, "heads": 4, "width": 32, "block": 12, "vocabulary": 19}


def session(path: Path) -> Any:
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def close(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.shape == theirs.shape and np.abs(ours - theirs).max() <= 1e-5 * np.abs(ours).max()


CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...], bool]] = {
    "mlp": ("mlp", {"inputs": 12, "hidden": [8, 8], "outputs": 3, "activation": "gelu"}, (12,), False),
    "mlp of images": ("mlp", {"inputs": 12, "hidden": [8], "outputs": 3, "activation": "tanh"}, (2, 6), True),
    "lenet": ("lenet", {}, (1, 28, 28), False), "resnet20": ("resnet20", {"channels": 1}, (1, 32, 32), True),
    "resnet32": ("resnet32", {}, (3, 32, 32), True), "resnet56": ("resnet56", {"norm": "sync"}, (3, 16, 24), True),
    "resnet18": ("resnet18", {"classes": 5}, (3, 64, 65), True), "resnet34": ("resnet34", {"classes": 5}, (3, 64, 64), True),
    "gpt": ("gpt", GPT, (), False), "gpt2": ("gpt", {**GPT, "bias": True, "activation": "gelu_tanh", "tied": False}, (), False)}
SLOW = ("resnet32", "resnet56", "resnet18", "resnet34")


@pytest.mark.parametrize("case", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES])
def test_onnxruntime_gives_the_models_outputs(tmp_path: Path, case: str) -> None:
    name, keys, shape, given = CASES[case]
    saved, rng = fresh(name, **keys), np.random.default_rng(0)
    export(saved, Wanted(tmp_path / "m.onnx", shape=shape if given else ()), lambda _: None)
    onnx.checker.check_model(str(tmp_path / "m.onnx"), full_check=True)
    run = session(tmp_path / "m.onnx")
    for rows in (1, 2, 5):
        for length in (1, 4, 12) if name == "gpt" else (0,):
            x = rng.integers(0, 19, (rows, length)) if length else rng.standard_normal((rows, *shape)).astype("f4")
            close(outputs(saved, x), run.run(None, {"input": x})[0])


def test_every_model_of_the_table_is_a_case() -> None:
    assert {name for name, *_ in CASES.values()} == set(models.MODELS)


@pytest.mark.parametrize("bias", [False, True])
def test_with_a_cache_each_token_costs_one(tmp_path: Path, bias: bool) -> None:
    saved = fresh("gpt", **GPT, bias=bias)
    export(saved, Wanted(tmp_path / "m.onnx", cache=True), lambda _: None)
    run, tokens = session(tmp_path / "m.onnx"), np.random.default_rng(1).integers(0, 19, (3, 12))
    wanted, names = outputs(saved, tokens), [one.name for one in run.get_inputs()]
    assert names == ["input", *(f"past_key_values.{i}.{kind}" for i in range(2) for kind in ("key", "value"))]
    for pieces in ([12], [5, 1, 1, 5], [1] * 12):
        past, done = [np.zeros((3, 4, 0, 8), "f4")] * 4, 0
        for n in pieces:
            y, *past = run.run(None, dict(zip(names, [tokens[:, done:done + n], *past])))
            close(wanted[:, done:done + n], y)
            done += n


def test_float64_and_external_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = fresh("mlp", "float64", inputs=40, hidden=[30], outputs=3)
    monkeypatch.setattr("mpitrain.interchange.onnx_writer.EXTERNAL", 0)
    export(saved, Wanted(tmp_path / "m.onnx"), lambda _: None)
    x = np.random.default_rng(0).standard_normal((4, 40))
    assert (tmp_path / "m.onnx.data").stat().st_size == 40 * 30 * 8
    onnx.checker.check_model(str(tmp_path / "m.onnx"))
    assert np.abs(outputs(saved, x) - session(tmp_path / "m.onnx").run(None, {"input": x})[0]).max() < 1e-12


def test_what_has_no_graph_is_refused_in_a_line(tmp_path: Path) -> None:
    plain, mixed = fresh("mlp", inputs=12, hidden=[8], outputs=3), fresh("gpt", **GPT, experts=3)
    images = fresh("resnet20")
    for saved, wanted, said in (
            (mixed, Wanted(tmp_path / "m.onnx"), 'the operation Choose, in "block0.mixture", has no rule'),
            (plain, Wanted(tmp_path / "m.onnx", cache=True), "--cache is for models of tokens"),
            (plain, Wanted(tmp_path / "m.onnx", names="own"), "--names is for files of tensors"),
            (plain, Wanted(tmp_path / "m.pt", cache=True), "--cache is for .onnx"),
            (images, Wanted(tmp_path / "m.onnx"), "--input 3x224x224")):
        with pytest.raises(UsageError, match=said):
            export(saved, wanted, lambda _: None)
    export(plain, Wanted(tmp_path / "m.onnx"), lambda _: None)
    with pytest.raises(OutputError, match="--overwrite"):
        export(plain, Wanted(tmp_path / "m.onnx"), lambda _: None)


def test_onnx_says_that_layers_in_few_bits_have_no_rule(tmp_path: Path) -> None:
    from mpitrain.shrink.quantize import choose, quantize
    saved = fresh("gpt", layers=1, heads=2, width=16, block=8, vocabulary=32)
    quantize(saved.model, choose(saved.model, "int8", least=0).formats)
    with pytest.raises(UsageError, match='layers in few bits have no rule, found "embed.token" and [0-9]+ more; export the run'):
        export(saved, Wanted(tmp_path / "gpt.onnx"))
