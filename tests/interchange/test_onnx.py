"""ONNX: every model of the table gives onnxruntime's outputs, at several batches and lengths, with a cache and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain import models, nn, ops
from mpitrain.errors import ConfigError, GraphError, OtherModelError, OutputError, UsageError
from mpitrain.interchange import bring_in
from mpitrain.interchange.exporting import Wanted, export
from mpitrain.shrink.quantize import choose, quantize
from mpitrain.train.build.model import make_model

onnx = pytest.importorskip("onnx", reason="needs onnx (pip install mpitrain[onnx])")
runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime (pip install mpitrain[bench])")
from onnx_cases import CASES, GPT, LLAMA, PRESETS, REFUSED, SLOW, TOKENS  # noqa: E402
from saved_models import fresh, outputs  # noqa: E402


def session(path: Path) -> Any:
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def close(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.shape == theirs.shape and np.abs(ours - theirs).max() <= 1e-5 * np.abs(ours).max()


def inputs(name: str, keys: dict[str, Any], shape: tuple[int, ...], rows: int, length: int, rng: Any) -> np.ndarray:
    if name in TOKENS:
        return rng.integers(0, 19, (rows, *(shape or (length,))))
    x = rng.standard_normal((rows, *shape)).astype("f4")
    for place, count in enumerate(keys.get("categories", ()), keys.get("numeric", 0)):
        x[:, place] = rng.integers(0, count, rows)
    return x


@pytest.mark.parametrize("case", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES])
def test_onnxruntime_gives_the_models_outputs(tmp_path: Path, case: str) -> None:
    name, keys, shape, given = CASES[case]
    saved, rng = fresh(name, **keys), np.random.default_rng(0)
    export(saved, Wanted(tmp_path / "m.onnx", shape=shape if given else ()), lambda _: None)
    onnx.checker.check_model(str(tmp_path / "m.onnx"), full_check=True)
    run = session(tmp_path / "m.onnx")
    for rows in (1, 2, 5):
        for length in (1, 4, 12) if name in TOKENS and not shape else (0,):
            x = inputs(name, keys, shape, rows, length, rng)
            close(outputs(saved, x), run.run(None, {"input": x})[0])


def test_every_model_of_the_table_is_a_case_or_refused_by_name() -> None:
    assert {name for name, *_ in CASES.values()} | set(REFUSED) | set(PRESETS) == set(models.__all__) - {"MODELS"}
    assert not set(PRESETS) & {name for name, *_ in CASES.values()}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_the_format_does_not_have_is_refused(tmp_path: Path, name: str) -> None:
    keys, shape, said = REFUSED[name]
    with pytest.raises((UsageError, GraphError), match=said):
        export(fresh(name, **keys), Wanted(tmp_path / "m.onnx", shape=shape), lambda _: None)


WITH_CACHE: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt", GPT), "gpt with biases": ("gpt", {**GPT, "bias": True}), "llama": ("llama", LLAMA),
    "llama of few keys": ("llama", {**LLAMA, "key_heads": 2})}


@pytest.mark.parametrize("case", WITH_CACHE)
def test_with_a_cache_each_token_costs_one(tmp_path: Path, case: str) -> None:
    name, keys = WITH_CACHE[case]
    saved = fresh(name, **keys)
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


VARIANTS: dict[str, dict[str, Any]] = {
    "nanogpt": {}, "gpt2": {"bias": True, "activation": "gelu_tanh"},
    "untied": {"tied": False, "eps": 1e-3, "activation": "relu"}}


@pytest.mark.parametrize("format", ["", "int8", "int4-dynamic"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_text_of_onnxruntime_with_a_cache_is_ours(tmp_path: Path, variant: str, format: str) -> None:
    saved = fresh("gpt", **GPT, **VARIANTS[variant])
    saved = in_few_bits(saved, format) if format else saved
    export(saved, Wanted(tmp_path / "m.onnx", cache=True), lambda _: None)
    run = session(tmp_path / "m.onnx")
    names = [one.name for one in run.get_inputs()]
    for rows in (1, 2, 5):
        ours = np.random.default_rng(rows).integers(0, 19, (rows, 3))
        texts, new, past = ours, ours, [np.zeros((rows, 4, 0, 8), "f4")] * 4
        while texts.shape[1] < 12:
            logits, *past = run.run(None, dict(zip(names, [new, *past])))
            new = logits[:, -1:].argmax(-1)
            texts = np.concatenate([texts, new], 1)
            ours = np.concatenate([ours, outputs(saved, ours)[:, -1:].argmax(-1)], 1)
        assert np.array_equal(texts, ours)


def with_layers(*layers: nn.Module) -> Any:
    """A saved model of tokens that no name stands for."""
    model = nn.Sequential(nn.Embedding(19, 8), *layers)
    model.initialize(0)
    return fresh("mlp", inputs=12, hidden=[8], outputs=3).made_into(model.eval().requires_grad_(False))


class Outputs(nn.Module):
    """Of a recurrent layer, its outputs alone."""

    def __init__(self, layer: nn.Module):
        self.layer = layer

    def forward(self, x: Any) -> Any:
        return self.layer(x)[0]


LAYERS: dict[str, Any] = {
    "LSTM": lambda: Outputs(nn.LSTM(8, 5, 2, bidirectional=True)), "GRU": lambda: Outputs(nn.GRU(8, 5, bias=False)),
    "RNN": lambda: Outputs(nn.RNN(8, 5, nonlinearity="relu"))}


@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_layers_take_tokens_of_all_lengths(tmp_path: Path, name: str) -> None:
    saved = with_layers(LAYERS[name]())
    export(saved, Wanted(tmp_path / "m.onnx"), lambda _: None)
    run = session(tmp_path / "m.onnx")
    for shape in ((1, 1), (2, 4), (5, 12)):
        x = np.random.default_rng(0).integers(0, 19, shape)
        close(outputs(saved, x), run.run(None, {"input": x})[0])


def test_a_graph_of_one_length_where_others_cannot_be(tmp_path: Path) -> None:
    """Turns of positions, of which a layer does not say how many there are."""
    saved = with_layers(nn.MultiHeadAttention(8, 2, causal=True, rope=True))
    with pytest.raises(GraphError, match="does not say how many there are; give the length .*--input LENGTH"):
        export(saved, Wanted(tmp_path / "m.onnx"), lambda _: None)
    export(saved, Wanted(tmp_path / "m.onnx", shape=(6,)), lambda _: None)
    x = np.random.default_rng(0).integers(0, 19, (4, 6))
    close(outputs(saved, x), session(tmp_path / "m.onnx").run(None, {"input": x})[0])


def test_what_has_no_rule_is_refused_by_name(tmp_path: Path) -> None:
    t5 = fresh("t5", layers=1, heads=2, width=8, head_width=4, hidden=8, source=9, block=12, vocabulary=19)
    for saved, wanted, said in (
            (with_layers(Outputs(nn.LSTM(8, 5, proj_size=2))), {}, 'LSTM in "1.layer" has a projection'),
            (with_layers(nn.Softplus()), {}, 'the operation Softplus, in "1", has no rule'), (t5, {}, "--input LENGTH"),
            (fresh("bert", **GPT), {"cache": True}, 'the attention in "block0.attention" looks at what comes later')):
        with pytest.raises(UsageError, match=said):
            export(saved, Wanted(tmp_path / "m.onnx", **wanted), lambda _: None)


def test_parts_of_a_batch_are_no_parts_of_a_graph(tmp_path: Path) -> None:
    class Rest(nn.Module):
        def forward(self, x: Any) -> Any:
            return ops.split(x, [1, x.shape[0] - 1])[1]
    plain = fresh("mlp", inputs=12, hidden=[8], outputs=3)
    model = nn.Sequential(nn.Flatten(12), nn.Linear(12, 4), Rest())
    model.initialize(0)
    with pytest.raises(GraphError, match=r'Split in "2" has parts of sizes 1, 1, which depends on the batch'):
        export(plain.made_into(model.eval().requires_grad_(False)), Wanted(tmp_path / "m.onnx"), lambda _: None)


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


FORMATS = ("int8", "int4", "int8-dynamic", "int4-dynamic", "int8-static")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_layers_in_few_bits_give_onnxruntimes_outputs_and_come_back(tmp_path: Path, name: str, format: str) -> None:
    """1e-5, as of floats: whole numbers are equal, and what is left is the order of sums of floats."""
    keys = {"inputs": 70, "hidden": [64, 50], "outputs": 10} if name == "mlp" else {**GPT, "width": 40, "bias": True}
    saved, rng = in_few_bits(fresh(name, **keys), format), np.random.default_rng(0)
    export(saved, Wanted(tmp_path / "m.onnx"), lambda _: None)
    onnx.checker.check_model(str(tmp_path / "m.onnx"), full_check=True)
    run = session(tmp_path / "m.onnx")
    for rows in (1, 2, 9):
        x = rng.integers(0, 19, (rows, 7)) if name == "gpt" else rng.standard_normal((rows, 70)).astype("f4")
        close(outputs(saved, x), run.run(None, {"input": x})[0])
    if name == "mlp":
        x[1, 3], x[2] = np.nan, 0
        ours, theirs = outputs(saved, x), run.run(None, {"input": x})[0]
        assert np.isnan(ours[1]).all() and np.isnan(theirs[1]).all()
        close(ours[2:], theirs[2:])
    kinds = {str(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(one.data_type))) for one in onnx.load(tmp_path / "m.onnx"
             ).graph.initializer if ".weight" in one.name and len(one.dims) > 1}
    assert kinds - {"float32"} == {"uint8" if "int4" in format else "int8"}
    for ending in ("onnx", "safetensors"):
        export(saved, Wanted(tmp_path / f"m.{ending}", overwrite=True), lambda _: None)
        back = bring_in(tmp_path / f"m.{ending}", tmp_path / ending, tell=lambda _: None)
        assert back.hashes() == saved.hashes() and back.config.model.formats == saved.config.model.formats


def test_floats_in_place_of_few_bits_are_those_that_the_layers_compute_with(tmp_path: Path) -> None:
    saved = in_few_bits(fresh("gpt", **GPT), "int4")
    x = np.random.default_rng(0).integers(0, 19, (2, 12))
    for ending, names in (("safetensors", "gpt2"), ("pt", "nanogpt"), ("safetensors", "own")):
        export(saved, Wanted(tmp_path / f"m.{ending}", names, dequantize=True, overwrite=True), lambda _: None)
        back = bring_in(tmp_path / f"m.{ending}", tmp_path / "run", names=names, overwrite=True, tell=lambda _: None,
                        overrides=["model.heads=4", "model.activation=gelu"])
        close(outputs(saved, x), outputs(back, x))
    with pytest.raises(UsageError, match="--dequantize is for layers in few bits"):
        export(back, Wanted(tmp_path / "x.pt", dequantize=True))
    with pytest.raises(UsageError, match='"embed.token" is in few bits; give --dequantize'):
        export(saved, Wanted(tmp_path / "x.pt", "gpt2"))
    export(saved, Wanted(tmp_path / "few.pt"), lambda _: None)
    with pytest.raises(OtherModelError, match='"embed.token" is in few bits, and the file does not say in which format'):
        bring_in(tmp_path / "few.pt", tmp_path / "run", names="pytorch", overrides=["model.name=gpt", *(
            f"model.{key}={value}" for key, value in GPT.items())], overwrite=True)
    apart = in_few_bits(fresh("gpt", **GPT), "int8-static")                    # its table stays in floats
    with pytest.raises(ConfigError, match=r"are one weight in the model of floats.*model.tied=false"):
        export(apart, Wanted(tmp_path / "x.pt", dequantize=True))


def test_runs_that_compute_with_more_than_their_weights_say_what_to_do_first(tmp_path: Path) -> None:
    plain = fresh("mlp", inputs=12, hidden=[8], outputs=3)
    for sections, said in (({"lora": {"rank": 2}}, "mpitrain merge RUN --out RUN2"),
                           ({"shrink": {"quantize": "int4"}}, "mpitrain quantize RUN --format int4 --out RUN2")):
        with pytest.raises(UsageError, match=said):
            export(plain.made_into(plain.model, **sections), Wanted(tmp_path / "x.safetensors"))


def test_a_factored_and_a_sparse_model_go_out_and_come_back(tmp_path: Path) -> None:
    from mpitrain.shrink import factor
    saved = fresh("mlp", inputs=12, hidden=[8], outputs=3)
    dict(saved.model.named_parameters())["linear0.weight"].array[::2] = 0
    made = saved.made_into(saved.model, model={"ranks": {"linear0": 2}})
    other = make_model(made.config)
    other.initialize(0)
    factor.factor(saved.model, other)
    x = np.random.default_rng(0).standard_normal((3, 12)).astype("f4")
    for one in (saved, made.made_into(other.eval().requires_grad_(False))):
        for ending in ("onnx", "safetensors"):
            export(one, Wanted(tmp_path / f"m.{ending}", overwrite=True), lambda _: None)
            back = bring_in(tmp_path / f"m.{ending}", tmp_path / "run", overwrite=True, tell=lambda _: None)
            assert back.hashes() == one.hashes() and back.config.model.ranks == one.config.model.ranks
        close(outputs(one, x), session(tmp_path / "m.onnx").run(None, {"input": x})[0])


def in_few_bits(saved: Any, format: str) -> Any:
    chosen = choose(saved.model, format, least=0)
    quantize(saved.model, chosen.formats, input_scales=dict.fromkeys(chosen.formats, 0.05))
    return saved.made_into(saved.model.eval().requires_grad_(False), model={"formats": chosen.formats})
