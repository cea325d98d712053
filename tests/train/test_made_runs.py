"""A verb that makes a run of a run, or of a file, leaves what it reads as it is, wherever --out points; and what verbs say of
runs that others have made."""

from __future__ import annotations

import dataclasses
import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from standing import mpirun

from mpitrain import nn
from mpitrain.checkpoint import store
from mpitrain.cli import main
from mpitrain.config import made_config
from mpitrain.data import Transforms
from mpitrain.errors import CheckpointError, ConfigError, MpitrainError, OtherModelError, OutputError, UsageError
from mpitrain.shrink.lora import attach
from mpitrain.train.build.adapted import write
from mpitrain.train.build.model import make_model
from mpitrain.train.build.saved import SavedModel, load, save

MODEL = {"name": "mlp", "inputs": 64, "hidden": [32], "outputs": 10}
LORA = {"rank": 2, "layers": ["linear0"]}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return made(tmp_path / "all" / "run")


def made(folder: Path, **sections: object) -> Path:
    config = made_config({"model": MODEL, "data": {"path": "digits"}, "train": {"epochs": 1},
                          "optimizer": {"name": "adamw"}, **sections}, [], "run")
    model = make_model(config)
    model.initialize(3)
    folder.parent.mkdir(exist_ok=True)
    saved = SavedModel(model.eval().requires_grad_(False), config, 7, Transforms((), None), {"seed": 0})
    return save(folder, saved, {"by": "a test"})


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(out: Path, *words: str | Path, source: Path) -> None:
    before = content(source)
    with pytest.raises(OutputError, match="what the model is read from") as found:
        main([*map(str, words), "--out", str(out), "--overwrite"])
    assert "\n" not in found.value.message and before and content(source) == before


VERBS = {"quantize": ["--format", "int8", "--least", "0"], "cut": ["--work", "0.5"],
         "factor": ["--layers", "linear0", "--rank", "2"]}


@pytest.mark.parametrize("verb", VERBS)
def test_a_run_is_not_written_over_its_source(run: Path, verb: str) -> None:
    refused(run, verb, run, *VERBS[verb], source=run)


def test_not_by_way_of_links_nor_into_it_nor_around_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link, other = run.parent / "link", run.parent / "other"
    link.symlink_to(run)
    other.mkdir()
    (other / "config.toml").symlink_to(run / "config.toml")
    (other / "checkpoints").symlink_to(run / "checkpoints")
    monkeypatch.chdir(run)
    for source, out in ((run, link), (link, run), (other, run), (run, run / "checkpoints"), (run, run / "few"), (run, run.parent),
                        (run, Path("."))):
        refused(out, "quantize", source, *VERBS["quantize"], source=run)
    assert not (run / "few").exists()


def test_merge_leaves_the_run_and_the_adapters(run: Path) -> None:
    both = made(run.parent / "both", model={**MODEL, "init_from": str(run)}, lora=LORA)
    refused(both, "merge", both, source=both)
    adapter = run.parent / "merged" / "checkpoints"
    adapter.parent.mkdir()
    base = load(both)
    for name, parameter in base.model.named_parameters():
        parameter.array[...] = 0 if name.endswith(".up") else parameter.array
    write(adapter, base)
    refused(adapter.parent, "merge", run, "--adapter", adapter, source=adapter)


def test_import_leaves_the_run_that_its_file_lies_in(run: Path) -> None:
    file = run / "checkpoints" / "model.safetensors"
    assert main(["export", str(run), str(file)]) == 0
    refused(run, "import", file, source=run)
    shutil.move(file, run.parent / "model.safetensors")
    assert main(["import", str(run.parent / "model.safetensors"), "--out", str(run), "--overwrite"]) == 0


def test_a_folder_beside_it_is_written(run: Path) -> None:
    out = run.with_name("run-int8")                        # a name that begins with that of the source
    for more in ([], ["--overwrite"]):
        assert main(["quantize", str(run), *VERBS["quantize"], "--out", str(out), *more]) == 0
    assert np.isfinite(load(out).model(np.ones((1, 64), np.float32)).array).all()


def said(kind: type[MpitrainError], *words: str | Path) -> str:
    with pytest.raises(kind) as found:
        main([str(word) for word in words])
    assert "\n" not in found.value.message
    return found.value.message


def test_a_run_that_a_verb_made_is_no_run_to_resume(run: Path) -> None:
    out = run.with_name("factored")
    assert main(["factor", str(run), *VERBS["factor"], "--out", str(out)]) == 0
    found = said(CheckpointError, "train", "--resume", out)
    assert "made by mpitrain factor and has no state of an optimizer" in found and "set model.init_from" in found


def test_a_run_that_rounds_its_weights_is_cut_and_exported_with_the_keys_that_it_names(tmp_path: Path) -> None:
    aware = made(tmp_path / "all" / "aware", shrink={"quantize": "int4", "least": 0, "skip": ["head"]})
    off = 'give shrink.quantize="" shrink.least=65536 shrink.skip=[]'
    for verb in ("cut", "factor"):
        assert off in said(UsageError, verb, aware, *VERBS[verb], "--out", tmp_path / "no")
    assert off in said(UsageError, "export", aware, tmp_path / "no.pt")
    keys = ["shrink.quantize=", "shrink.least=65536", "shrink.skip=[]"]
    assert main(["factor", str(aware), *VERBS["factor"], *keys, "--out", str(tmp_path / "factored")]) == 0
    assert main(["export", str(aware), str(tmp_path / "floats.pt"), *keys]) == 0
    with pytest.raises(ConfigError, match='"linear0" rounds its weight, as long as shrink.quantize is set; name other'):
        make_model(made_config({"model": {**MODEL, "init_from": str(aware)}, "data": {"path": "digits"}, "train": {"epochs": 1},
                                "shrink": {"quantize": "int4", "least": 0}, "lora": LORA}, [], "run"))


def test_layers_in_factors_have_no_form_in_few_bits_and_the_cure_is_said(run: Path, tmp_path: Path) -> None:
    few = run.with_name("few")
    assert main(["factor", str(run), "--layers", "*", "--rank", "2", "--out", str(few)]) == 0
    found = said(ConfigError, "quantize", few, *VERBS["quantize"], "--out", tmp_path / "no")
    assert "quantize the run that was factored" in found


def test_layers_that_were_in_few_bits_before_are_not_counted_as_floats(run: Path, tmp_path: Path,
                                                                       capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["quantize", str(run), *VERBS["quantize"], "--skip", "head", "--out", str(first)]) == 0
    assert main(["quantize", str(first), "--format", "int4", "--least", "0", "--out", str(second)]) == 0
    assert f"{second}: 1 layers in int4, 0 in floats, 1 in few bits as before;" in capsys.readouterr().out


def test_adapters_are_not_pruned(run: Path) -> None:
    with pytest.raises(ConfigError, match=r'would prune the adapters .*\(shrink.prune="" shrink.sparsity=0.0\)'):
        made(run.parent / "both", model={**MODEL, "init_from": str(run)}, lora=LORA,
             shrink={"prune": "magnitude", "sparsity": 0.5})


def test_adapters_alone_are_not_written_where_more_was_trained(run: Path, tmp_path: Path) -> None:
    both = made(run.parent / "both", model={**MODEL, "init_from": str(run)}, lora=LORA,
                optimizer={"groups": [{"params": "head.*", "freeze_until": 6}]})
    found = said(UsageError, "adapter", both, "--out", tmp_path / "no")
    assert '"head.weight" and 1 more of the run were trained beside' in found
    later = made(run.parent / "later", model={**MODEL, "init_from": str(run)}, lora=LORA,
                 optimizer={"groups": [{"params": "head.*", "freeze_until": 7}]})
    assert main(["adapter", str(later), "--out", str(tmp_path / "adapter")]) == 0


def test_a_layer_with_a_parameter_that_is_called_as_one_of_an_adapter_is_refused(run: Path) -> None:
    few = run.with_name("few")
    assert main(["factor", str(run), *VERBS["factor"], "--out", str(few)]) == 0
    for layers, expected in ((["*"], '"linear0" is a FactoredLinear'), (["head"], "")):
        with pytest.raises(ConfigError, match=expected) if expected else nullcontext():
            made(few.with_name("both"), model={**MODEL, "init_from": str(few), "ranks": {"linear0": 2}},
                 lora={"rank": 2, "layers": layers})
    model = nn.Sequential(("own", Own()), ("head", nn.Linear(8, 4)))
    with pytest.raises(ConfigError, match='lora.layers names "own" too, which has a parameter "down" of its own'):
        attach(model, 2, 16.0, ["*"])


class Own(nn.Module):
    def __init__(self) -> None:
        self.down = nn.Parameter((8, 8), nn.init.zeros)


def test_a_run_with_adapters_is_merged_before_others_start_from_it(run: Path, tmp_path: Path) -> None:
    both = made(run.parent / "both", model={**MODEL, "init_from": str(run)}, lora=LORA)
    record = {"experiment": {"keys": {"lora.rank": 2}}}
    found = store.latest(both / "checkpoints", purpose=store.READ)
    for rank in (0, 2):
        meta = {**found.meta, **record} if rank else found.meta
        with pytest.raises(OtherModelError) as why:
            dataclasses.replace(found, meta=meta).check_names({"parameters/x": ((2,), "float32")})
        assert ("or what mpitrain merge makes of its run" in why.value.message) == bool(rank)


def test_what_one_process_does_is_done_once_where_several_are_started(run: Path) -> None:
    out, file = run.with_name("factored"), run.with_name("model.pt")
    for words in (["factor", run, *VERBS["factor"], "--out", out], ["export", run, file],
                  ["quantize", run, *VERBS["quantize"], "--out", out, "--overwrite"]):
        done = mpirun(2, "-m", "mpitrain", *map(str, words), cwd=run.parent)
        assert done.rc == 0 and "mpitrain:" not in done.err, done.err
        assert done.out.count(str(words[-1] if words[0] == "export" else out)) == 1 + (words[0] == "quantize"), done.out
    assert load(out).config.model.formats and file.stat().st_size > 0
