"""A run in few bits is a run as any other: made from a trained one, evaluated, inspected, loaded; on any ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from standing import mpirun

from mpitrain import nn
from mpitrain.cli import main
from mpitrain.errors import ConfigError, NumericsError, OtherModelError, OutputError, UsageError
from mpitrain.shrink.quantize import LowBitLinear, choose, quantize
from mpitrain.train.build.saved import load

RUN = """
[model]
name = "mlp"
inputs = 64
hidden = [256, 256]
outputs = 10
[data]
path = "digits"
transform = ["scale"]
[train]
steps = 20
"""
OWN = """
import numpy as np
from mpitrain.nn import Format


class Halves(Format):
    def leaves(self, outputs, inputs):
        return {"weight": ((outputs, inputs), "float16")}

    def quantize(self, weight):
        return {"weight": weight.astype(np.float16)}

    def dequantize(self, arrays, inputs):
        return arrays["weight"].astype(np.float32)


class Wrong(Halves):
    def quantize(self, weight):
        return {"weight": weight.astype(np.float64)}


class Missing(Format):
    pass


class Narrow(Halves):
    def dequantize(self, arrays, inputs):
        return arrays["weight"][:, :3].astype(np.float32)


class Same(Halves):
    def product(self, x, arrays, bias):
        return x[:, :3]


class Needs(Halves):
    def __init__(self, bits):
        pass
"""


GPT = """
[model]
name = "gpt"
layers = 2
heads = 2
width = 64
block = 16
vocabulary = 7
[data]
path = "text"
validation = "tail:0.2"
[train]
steps = 2
batch_size = 4
"""


@pytest.fixture(scope="module")
def few_gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantize-gpt")
    (folder / "gpt.toml").write_text(GPT)
    (folder / "text.txt").write_text("".join("abcdefg"[i * i % 7 % (1 + i % 7)] for i in range(600)))
    assert main(["data", "import", "text", str(folder / "text.txt"), "--out", str(folder / "text")]) == 0
    assert mpirun(1, "-m", "mpitrain", "train", "gpt.toml", "model.vocabulary=7", cwd=folder).rc == 0
    out = folder / "runs" / "few"
    assert main(["quantize", str(folder / "runs" / "gpt"), "--format", "int8", "--least", "0", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantize")
    (folder / "run.toml").write_text(RUN)
    (folder / "own.py").write_text(OWN)
    assert mpirun(1, "-m", "mpitrain", "train", "run.toml", cwd=folder).rc == 0
    return folder / "runs" / "run"


def made(trained: Path, name: str, *more: str) -> Path:
    out = trained.with_name(f"made-{name}".replace(":", "-"))
    assert main(["quantize", str(trained), "--format", name, "--out", str(out), "--overwrite", *more]) == 0
    return out


@pytest.mark.parametrize("name", ["int8", "int4", "own.py:Halves"])
def test_a_run_in_few_bits_has_the_values_that_its_formats_stand_for(trained: Path, name: str) -> None:
    floats, few = load(trained), load(made(trained, name))
    layer = dict(few.model.named_modules())["linear1"]
    assert isinstance(layer, LowBitLinear) and few.config.model.formats == {"linear1": name}
    weight = dict(floats.model.named_parameters())["linear1.weight"].array
    expected = layer.format.dequantize(layer.format.quantize(weight), 256)
    assert np.array_equal(layer.dequantized(), expected)
    x = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    dict(floats.model.named_parameters())["linear1.weight"].array[...] = expected
    assert np.allclose(few.model(x).array, floats.model(x).array, rtol=1e-5, atol=1e-5)


def test_evaluate_takes_it_on_two_ranks(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = made(trained, "int8")
    found = mpirun(2, "-m", "mpitrain", "evaluate", str(few))
    one = mpirun(2, "-m", "mpitrain", "evaluate", str(trained))
    assert found.rc == one.rc == 0, found.err
    assert abs(json.loads(found.out)["loss"] - json.loads(one.out)["loss"]) < 0.005


def test_a_language_model_in_few_bits_has_the_same_metrics_along_pp_and_dp_and_sharded(few_gpt: Path) -> None:
    ways = [(1, []), (2, ["mesh.pp=2"]), (2, ["mesh.dp=2"]), (2, ["comm.sharding=parameters"])]
    found = [mpirun(n, "-m", "mpitrain", "evaluate", str(few_gpt), *keys) for n, keys in ways]
    assert all(one.rc == 0 for one in found), [one.err for one in found]
    assert len({one.out for one in found}) == 1, [one.out for one in found]


def test_layers_in_few_bits_are_not_cut_along_tp(few_gpt: Path) -> None:
    found = mpirun(2, "-m", "mpitrain", "evaluate", str(few_gpt), "mesh.tp=2")
    assert found.rc == 78 and found.out == ""
    assert 'mesh.plan: "embed.token" is in few bits, and such a layer is not cut along tp; set mesh.tp = 1 and use mesh.pp' in \
        found.err


def test_layers_that_would_not_gain_stay_in_floats(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    from mpitrain.shrink import measure
    assert 0 < measure.gain(nn.ReLU(), nn.Tanh(), np.ones((2, 4), np.float32)) < 1e6
    gains = {(8, 64, 256): 0.5, (8, 256, 256): 3.0, (8, 256, 10): 1.0}
    monkeypatch.setattr(measure, "gain", lambda layer, few, x: gains[*x.shape, few.outputs])
    few = made(trained, "int8", "--measure", "8", "--least", "0")
    assert main(["inspect", str(few)]) == 0
    said = capsys.readouterr().out
    assert "gain, 8 rows" in said and "linear0 stays in floats: int8 runs at 0.50 times the speed of floats here, on 8" in said
    assert set(load(few).config.model.formats) == {"linear1", "head"}
    monkeypatch.setattr(measure, "gain", lambda layer, few, x: 0.9)
    with pytest.raises(ConfigError, match="nothing to quantize: linear1: int8 runs at 0.90 times the speed of floats here, row"):
        made(trained, "int8", "--measure", "1")
    with pytest.raises(UsageError, match="--measure: must be at least 1 row, found 0"):
        made(trained, "int8", "--measure", "0")


def test_errors_of_outputs_are_those_on_the_rows(trained: Path) -> None:
    from mpitrain.verbs import first_rows
    few = made(trained, "int4")
    row, floats = json.loads((few / "run.json").read_text())["made"]["layers"][0], load(trained)
    values = floats.model.state_dict()
    x = np.maximum(first_rows(floats, 32).reshape(-1, 64) @ values["linear0.weight"].T + values["linear0.bias"], 0)
    weight, kept = values["linear1.weight"], dict(load(few).model.named_modules())["linear1"].dequantized()
    law = np.linalg.norm(x @ (kept - weight).T) / np.linalg.norm(x @ weight.T)
    assert row["path"] == "linear1" and row["gain"] is None and abs(row["output_error"] - law) < 1e-4 * law


def test_a_run_without_its_data_is_quantized_and_that_is_said(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                                              ) -> None:
    made(trained, "int8", "data.path=nowhere")
    said = capsys.readouterr().out
    assert "no errors of outputs: " in said and "nowhere" in said


@pytest.mark.parametrize(("name", "expected"), [
    ("Wrong", r'layer "linear1": the format "own.py:Wrong" says its arrays are .*float16.* gave .*float64'),
    ("Missing", 'format "own.py:Missing": Missing does not define leaves and quantize and dequantize'),
    ("Narrow", r'layer "linear1": dequantize of the format "own.py:Narrow" must give an array \(256, 256\), found \(256, 3\)'),
    ("Same", r'layer "linear1": product of the format "own.py:Same" must give an array \(32, 256\), found \(32, 3\)'),
    ("Needs", 'format "own.py:Needs".*bits'),
])
def test_a_format_of_ones_own_is_held_to_what_it_says(trained: Path, name: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        made(trained, f"own.py:{name}", "--least", "0", "--skip", "linear0")


def test_inspect_shows_each_layer(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = made(trained, "int8")
    capsys.readouterr()
    assert main(["inspect", str(few)]) == 0
    said = capsys.readouterr().out
    assert "linear1  int8" in said and "66,560" in said and "head stays in floats: 2,560 weights" in said
    assert "buffers/linear1.weight     int8" in said


@pytest.mark.parametrize(("words", "expected"), [
    (["--format", "int5"], 'unknown format "int5"'),
    (["--format", "own.py:np"], "must give an mpitrain.nn.Format"),
    (["--format", "int8", "--skip", "nothing*"], 'no layer with a weight matches "nothing*"'),
    (["--format", "int8", "--skip", "*"], "nothing to quantize"),
    (["--format", "int8", "--calibrate", "5"], "--calibrate 5 does nothing: --format int8 looks at no training rows"),
    (["--format", "int8", "--least", "-5"], "must be 0 or more weights, found -5"),
    (["--format", "int8", "--least", "1000000"], "pay from 1,000,000 on; --least 0 (in a run, shrink.least = 0) takes small"),
])
def test_mistakes_are_told_in_a_line(trained: Path, tmp_path: Path, words: list[str], expected: str) -> None:
    with pytest.raises((ConfigError, UsageError)) as found:
        main(["quantize", str(trained), "--out", str(tmp_path / "out"), *words])
    assert expected in found.value.message and not (tmp_path / "out").exists()


def test_what_is_in_few_bits_is_not_quantized_again(trained: Path, tmp_path: Path) -> None:
    few = made(trained, "int8")
    with pytest.raises(ConfigError, match="in few bits already.*; quantize the run of floats that this one was made of$"):
        main(["quantize", str(few), "--format", "int4", "--out", str(tmp_path / "out")])


def test_an_output_folder_with_something_in_it_is_left_alone(trained: Path) -> None:
    few = made(trained, "int8")
    with pytest.raises(OutputError):
        main(["quantize", str(trained), "--format", "int8", "--out", str(few)])


@pytest.mark.parametrize(("formats", "expected"), [
    ({"linear9": "int8"}, 'no layer is called "linear9"'),
    ({"flatten": "int8"}, "has no form in few bits"),
    ({"linear1": 8}, "a format is a name"),
])
def test_formats_that_no_layer_can_have_are_refused(formats: dict[str, str], expected: str) -> None:
    model = nn.Sequential(("flatten", nn.Flatten()), ("linear1", nn.Linear(4, 4)))
    model.initialize()
    with pytest.raises(ConfigError, match=expected):
        quantize(model, formats)


def test_tied_layers_are_found() -> None:
    from mpitrain import models
    model = models.gpt(layers=1, heads=2, width=128, block=16, vocabulary=600)
    model.initialize(0)
    tokens = np.arange(16).reshape(1, 16)
    before = model(tokens).array
    chosen = choose(model, "int8")
    assert set(chosen.formats) == {"embed.token", "block0.wide", "block0.narrow", "head"}
    quantize(model, chosen.formats)
    after = model(tokens).array
    assert 0 < np.abs(after - before).max() < 0.05 * np.abs(before).max()


@pytest.mark.parametrize("stays", ["head", "embed.token"])
def test_one_of_two_tied_layers_stays_in_floats(stays: str) -> None:
    from mpitrain import models
    model = models.gpt(layers=1, heads=2, width=128, block=16, vocabulary=600)
    model.initialize(0)
    before = {name: np.array(array) for name, array in model.state_dict().items()}
    quantize(model, choose(model, "int8", [stays]).formats)
    weight = dict(model.named_parameters())[f"{stays}.weight"]
    assert "head.weight" not in before and np.array_equal(weight.array, before["embed.token.weight"])


def test_tables_in_few_bits_give_rows_of_the_models_own_precision() -> None:
    from mpitrain import models
    model = models.gpt(layers=1, heads=2, width=32, block=16, vocabulary=60)
    model.initialize(0, "float64")
    tokens = np.arange(16).reshape(1, 16)
    before = model(tokens).array
    quantize(model, choose(model, "int8", least=0).formats)
    after = model(tokens).array
    assert after.dtype == np.float64 and 0 < np.abs(after - before).max() < 0.05 * np.abs(before).max()


def test_gradients_reach_what_lies_before_a_layer_in_few_bits() -> None:
    model = nn.Sequential(("a", nn.Linear(8, 256)), ("b", nn.Linear(256, 256, activation="gelu")))
    model.initialize(0)
    quantize(model, {"b": "int8"})
    x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    model(x).sum().backward()
    weight = dict(model.named_modules())["b"].dequantized()
    plain = nn.Sequential(("a", nn.Linear(8, 256)), ("b", nn.Linear(256, 256, activation="gelu")))
    plain.initialize(0)
    plain.load_state_dict({**{n: p.array for n, p in model.named_parameters()}, "b.weight": weight})
    plain(x).sum().backward()
    for name in ("a.weight", "b.bias"):
        assert np.allclose(dict(model.named_parameters())[name].grad, dict(plain.named_parameters())[name].grad, atol=1e-4), name


def test_scales_of_inputs_have_the_same_bits_on_any_ranks(trained: Path) -> None:
    found = []
    for n in (1, 2, 4):
        out = trained.with_name(f"static-{n}")
        made_on = mpirun(n, "-m", "mpitrain", "quantize", str(trained), "--format", "int8-static", "--out", str(out), "--least",
                         "0", "--calibrate", "300")
        assert made_on.rc == 0, made_on.err
        found.append(json.loads((out / "run.json").read_text())["buffers_sha256"])
    assert len(set(found)) == 1
    few = load(out)
    x = np.random.default_rng(0).random((7, 64)).astype(np.float32)
    whole = load(trained).model(x).array
    assert np.abs(few.model(x).array - whole).max() < 0.05 * np.abs(whole).max()


@pytest.mark.parametrize("name", ["int8-static", "int4-static"])
def test_static_formats_are_close_to_dynamic_ones(name: str) -> None:
    from mpitrain.checkpoint.store import ALONE
    from mpitrain.shrink.calibrate import ranges
    x, found = np.random.default_rng(0).random((9, 70)).astype(np.float32), []
    for kind in (name, name.replace("static", "dynamic")):
        model = nn.Sequential(("a", nn.Linear(70, 33)))
        model.initialize(0)
        quantize(model, {"a": kind}, input_scales=ranges(model, ["a"], lambda chunk: x, 1, ALONE))
        found.append(model(x).array)
        assert model(x[3:4]).array.tobytes() == found[-1][3].tobytes()
    assert 0 < np.abs(found[0] - found[1]).max() < 0.02 * np.abs(found[1]).max()


def test_layers_of_more_inputs_than_exact_sums_hold_stay_in_floats() -> None:
    model = nn.Sequential(("a", nn.Linear(1 << 16, 1)), ("b", nn.Linear(1, 1)), ("c", nn.Linear((1 << 16) + 1, 1)))
    chosen = choose(model, "int8-dynamic", least=2)
    assert set(chosen.formats) == {"a"} and ("c", "sums of whole numbers have 65,536 inputs at most") in chosen.left
    assert set(choose(model, "int8", least=2).formats) == {"a", "c"}


def test_weights_that_are_not_finite_are_refused_by_name() -> None:
    model = nn.Sequential(("a", nn.Linear(4, 4)), ("b", nn.Linear(4, 4)))
    model.initialize(0)
    dict(model.named_parameters())["b.weight"].array[1, 2] = np.nan
    with pytest.raises(NumericsError, match='layer "b": the weight has NaN or infinite values'):
        quantize(model, {"a": "int8", "b": "int8"})


def test_calibration_chooses_the_range_with_the_least_error() -> None:
    from mpitrain.checkpoint.store import ALONE
    from mpitrain.shrink.calibrate import ranges
    x = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32)
    x[0, 0] = 30                                  # one number far out, which is not worth a coarse scale for all
    model = nn.Sequential(("a", nn.Linear(256, 256)))
    model.initialize(0)
    scale = ranges(model, ["a"], lambda chunk: x, 1, ALONE)["a"]

    def error(s: float) -> float:
        return float(((np.clip(np.rint(x / s), -127, 127) * s - x) ** 2).sum())
    tried = [error(s) for s in np.geomspace(2 / 127, 40 / 127, 200)]
    assert error(scale) < 1.05 * min(tried) and scale < 29 / 127


@pytest.mark.parametrize(("value", "expected"), [(np.nan, "not finite"), (0.0, "inputs are zeros")])
def test_calibration_refuses_inputs_without_a_range(value: float, expected: str) -> None:
    from mpitrain.checkpoint.store import ALONE
    from mpitrain.shrink.calibrate import ranges
    model = nn.Sequential(("a", nn.Linear(4, 4)))
    model.initialize(0)
    with pytest.raises(NumericsError, match=expected):
        ranges(model, ["a"], lambda chunk: np.full((2, 4), value, np.float32), 1, ALONE)


@pytest.mark.parametrize("name", ["int8-dynamic", "int4-dynamic"])
def test_dynamic_formats_are_close_and_do_not_depend_on_the_batch(trained: Path, name: str) -> None:
    few, x = load(made(trained, name, "--least", "0")), np.random.default_rng(0).random((9, 64)).astype(np.float32)
    y = few.model(x).array
    whole = load(trained).model(x).array
    assert np.abs(y - whole).max() < (0.03 if "8" in name else 0.3) * np.abs(whole).max()
    assert all(few.model(x[i:i + 1]).array.tobytes() == y[i].tobytes() for i in range(9))


def test_training_in_few_bits_gives_the_weights_that_it_computed_with(trained: Path) -> None:
    folder = trained.parents[1]
    train = ("-m", "mpitrain", "train", "run.toml", "shrink.quantize=int4", "shrink.least=0", "train.steps=6",
             "train.reproducible=layout", "train.micro_batches=2", "model.init_from=runs/run")
    for n in (1, 2):
        done = mpirun(n, *train, f"run.out=runs/aware-{n}", cwd=folder)
        assert done.rc == 0, done.err
    aware, again = (load(folder / "runs" / f"aware-{n}") for n in (1, 2))
    assert aware.hashes() == again.hashes() and aware.hashes() != load(trained).hashes()
    few = load(made(folder / "runs" / "aware-1", "int4", "--least", "0"))
    x = np.random.default_rng(0).random((5, 64)).astype(np.float32)
    assert np.allclose(few.model(x).array, aware.model(x).array, rtol=1e-5, atol=1e-5)
    assert few.config.shrink.quantize == ""
    for verb, words in (("cut", ("--work", "0.7")), ("factor", ("--layers", "*", "--rank", "2"))):
        with pytest.raises(UsageError, match='rounded to "int4" .*, and its floats can be .*: give shrink.quantize=""'):
            main([verb, str(folder / "runs" / "aware-1"), *words, "--out", str(folder / verb)])
        assert main([verb, str(folder / "runs" / "aware-1"), *words, "--out", str(folder / verb), "shrink.quantize="]) == 0
    assert main(["export", str(folder / "runs" / "aware-1"), str(folder / "aware.pt"), "shrink.quantize="]) == 0


def test_the_gradient_of_rounding_goes_straight_through() -> None:
    from mpitrain.shrink.quantize import rounded_anew
    model = nn.Sequential(("a", nn.Linear(64, 8)))
    rounded_anew(model, "int4", (), None, 0)
    model.initialize(0)
    x = np.random.default_rng(0).random((5, 64)).astype(np.float32)
    model(x).sum().backward()
    assert np.allclose(dict(model.named_parameters())["a.weight"].grad, np.tile(x.sum(0), (8, 1)), rtol=1e-5)


@pytest.mark.parametrize("value", [np.nan, 1e6])
def test_a_weight_that_training_drives_beyond_a_format_is_named_with_a_cure_for_training(value: float) -> None:
    from mpitrain.nn.lowbit import RoundedLinear
    from mpitrain.shrink.formats import FORMATS
    layer = RoundedLinear.of(nn.Linear(32, 8), FORMATS["int4"]())
    model = nn.Sequential(("a", layer))
    model.initialize(0)
    layer.weight.array[0, 0] = value
    with pytest.raises(NumericsError, match=r'^"a.weight", which is rounded .*smaller optimizer\.lr.*shrink\.skip'):
        model(np.ones((2, 32), np.float32))


def test_formats_whose_inputs_have_a_range_are_not_for_training() -> None:
    from mpitrain.shrink.quantize import rounded_anew
    with pytest.raises(ConfigError, match="the range of inputs changes"):
        rounded_anew(nn.Sequential(("a", nn.Linear(64, 8))), "int8-static", (), None, 0)


def test_training_in_few_bits_is_refused_alike_by_train_and_inspect(trained: Path) -> None:
    few = made(trained, "int8")
    for command in (["train", str(few / "config.toml"), "run.out=" + str(few.with_name("no"))], ["train", "--resume", str(few)],
                    ["inspect", str(few / "config.toml")]):
        with pytest.raises(ConfigError, match=r'model\.formats keeps layers in few bits, "linear1" in int8, .*shrink\.quantize'):
            main(command)
    assert not few.with_name("no").exists() and "formats" in (few / "config.toml").read_text()


def test_a_run_of_floats_does_not_start_from_a_quantized_one(trained: Path) -> None:
    few, config = made(trained, "int8"), trained.parents[1] / "run.toml"
    for command in ("train", "inspect"):
        with pytest.raises(OtherModelError) as found:
            main([command, str(config), f"model.init_from={few}", f"run.out={few.with_name('no')}"])
        assert "of a quantized run: 1 weights are in few bits (parameters/linear1.weight)" in found.value.message
        assert f"that it was made of, {trained}," in found.value.message


def test_quantize_takes_keys_and_traceback_as_other_verbs_do(trained: Path) -> None:
    few = made(trained, "int8", "--traceback", "data.validation=0.5")
    assert load(few).config.data.validation == 0.5
