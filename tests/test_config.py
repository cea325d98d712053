"""What a configuration may say, and what is said about one that is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest

from mpitrain.comm.job.failure import describe
from mpitrain.config import SECTIONS, Config, load_config, to_toml
from mpitrain.errors import ConfigError, MissingError, MpitrainError

ROOT = Path(__file__).resolve().parents[1]
GOOD = """
[model]
name = "mlp"
inputs = 4
hidden = [8, 8]
outputs = 2
[data]
path = "d.h5"
[train]
steps = 10
"""


def write(folder: Path, text: str = GOOD) -> Path:
    path = folder / "net.toml"
    path.write_text(text)
    return path


def test_the_built_in_run_needs_no_file():
    config = load_config(None, [])
    assert config.data.path == "digits" and config.run.out == "runs/digits"


def test_a_file_gives_the_name_the_folder_and_the_models_arguments(tmp_path):
    config = load_config(write(tmp_path), [])
    assert config.run.name == "net" and config.run.out == "runs/net" and config.folder == tmp_path
    assert config.model.arguments == {"inputs": 4, "hidden": [8, 8], "outputs": 2}


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    (tmp_path / "run.toml").write_bytes(b'\xef\xbb\xbf[model]\nname = "mlp"\n[data]\npath = "digits"\n')
    assert load_config(tmp_path / "run.toml", ["train.steps=3"]).train.steps == 3


def test_overrides_win_and_are_read_as_toml_or_else_as_words(tmp_path):
    config = load_config(write(tmp_path), ["train.steps=20", "optimizer.betas=[0.8, 0.9]", "optimizer.lr=1",
                                           "data.transform=scale", "model.hidden=[3]", "data.validation=tail:0.1",
                                           "run.name=a=b"])
    assert config.train.steps == 20 and config.optimizer.betas == (0.8, 0.9) and config.optimizer.lr == 1.0
    assert config.data.transform == ("scale",) and config.model.arguments["hidden"] == [3]
    assert config.data.validation == "tail:0.1" and config.run.name == "a=b"


def test_the_length_of_the_run_may_be_said_anew(tmp_path):
    config = load_config(write(tmp_path), ["train.epochs=3"])
    assert config.train.epochs == 3 and config.train.steps == 0
    with pytest.raises(ConfigError, match="not both"):
        load_config(write(tmp_path), ["train.epochs=3", "train.steps=3"])


@pytest.mark.parametrize("text", [
                                  '[run]\nname = "q\\"u\\u00e9\\n\\\\x"', "[optimizer]\nlr = 1e-30\nbetas = [0.5, 0.25]",
                                  "[data]\npath = 'p'\nvalidation = 0",
                                  "[model]\nname='f.py:m'\nnested = {a = [1, 2], b = true}"])
def test_what_is_written_back_reads_as_the_same(tmp_path, text):
    merged = GOOD
    for section in ("[data]", "[model]"):
        if text.startswith(section):
            merged = {"[data]": GOOD.replace('[data]\npath = "d.h5"', ""),
                      "[model]": '[data]\npath = "d.h5"\n[train]\nsteps = 10\n'}[section]
    config = load_config(write(tmp_path, merged + text + "\n"), [])
    (tmp_path / "elsewhere").mkdir()
    assert load_config(write(tmp_path / "elsewhere", to_toml(config)), []) == config


@pytest.mark.parametrize("key, message", [
    ("mesh.chunk=3", 'unknown key mesh.chunk (did you mean "chunks"?)'),
    ("optimizer.arguments={}", "unknown key optimizer.arguments: arguments of what [optimizer] names are keys of [optimizer]"),
    ("trian.steps=3", 'unknown section [trian] (did you mean "train"?)'),
    ("train.steps=abc", "train.steps must be an integer"),
    ("train.steps=1.5", "train.steps must be an integer, found 1.5 (a number)"),
    ("train.steps=true", "train.steps must be an integer, found true (true or false)"),
    ("comm.algorithm=['ring']", 'comm.algorithm must be a string, found ["ring"] (a list)'),
    ("train.steps=2026-01-02", 'train.steps must be an integer, found "2026-01-02" (a date)'),
    ("train.steps", "an override is section.key=value"),
    ("steps=3", "an override is section.key=value"),
    ("optimizer.lr=fast", "optimizer.lr must be a number"),
    ("optimizer.lr=nan", "optimizer.lr must be a finite number"),
    ("optimizer.eps=inf", "optimizer.eps must be finite, found inf"),
    ("model.limits=[1.0, [inf]]", "model.limits must be finite, found [1.0, [inf]]"),
    ("optimizer.lr=-1", "optimizer.lr must be a finite number, 0 or more, found -1"),
    ("optimizer.lr=-0.25", "optimizer.lr must be a finite number, 0 or more, found -0.25"),
    ("train.cached_mb=-1", "train.cached_mb must be a finite number, 0 or more, found -1"),
    ("optimizer.betas=[0.9]", "optimizer.betas must be two numbers"),
    ("optimizer.betas=[0.9, 'x']", "optimizer.betas must be a list of numbers"),
    ("data.transform=[1]", "data.transform must be a list of strings"),
    ("comm.bucket_mb=0", 'comm.bucket_mb must be more than 0, at most 1048576, or "auto", found 0; set it to 4.0'),
    ("comm.bucket_mb=-1", "comm.bucket_mb must be more than 0"),
    ("comm.bucket_mb=nan", "comm.bucket_mb must be more than 0"),
    ("comm.bucket_mb=1e305", "comm.bucket_mb must be more than 0, at most 1048576"),
    ("optimizer.milestones=[3, -1]", "optimizer.milestones must be steps, at least 0 each, found [3, -1]"),
    ("train.batch_size=0", "train.batch_size must be at least 1"),
    ("train.micro_batches=65", "is more than the 64 samples"),
    ("train.device=tpu", 'train.device = "tpu" is not there'),
    ("train.precision=float8", 'train.precision = "float8" is not there'),
    ("optimizer.decay=some", 'optimizer.decay = "some" is not there'),
    ("mesh.plan=column", 'mesh.plan must be a table, found "column" (a string)'),
    ('mesh.stages="halves"', 'mesh.stages = "halves" is not there'),
    ("train.reproducible=always", 'train.reproducible = "always" is not there'),
    ("comm.progress=threads", 'comm.progress = "threads" is not there (did you mean "thread"?)'),
    ("comm.bucket_mb=many", 'comm.bucket_mb must be more than 0, at most 1048576, or "auto", found "many"'),
    ("comm.bucket_mb=-1", 'comm.bucket_mb must be more than 0, at most 1048576, or "auto", found -1'),
    ("comm.wire_dtype=float8", 'comm.wire_dtype = "float8" is not there'),
    ("comm.node_shared=yes", "comm.node_shared must be true or false"),
    ("comm.compression=topk", "unknown key comm.compression"),
    ("model.name=''", "model.name is missing"),
    ("data.path=''", "data.path is missing"),
    ("train.steps=0", "give train.epochs or train.steps, one of them"),
    ("workers.each_round=5", "workers.each_round is there, and there is no federation; set workers.count"),
    ("workers.spread=2", "workers.spread is there, and there is no federation"),
])
@pytest.mark.promise("F2")
def test_a_wrong_key_or_value_is_named_on_one_line(tmp_path, key, message):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path), [key])
    assert message in str(caught.value) and "\n" not in str(caught.value) and caught.value.exit_code == 78


@pytest.mark.parametrize("key", ["train.epochs", "train.steps", "train.batch_size", "train.micro_batches", "train.threads",
                                 "train.eval_every", "train.copy_every", "data.stride", "data.workers", "mesh.pp", "mesh.dp",
                                 "data.length", "data.horizon",
                                 "mesh.site", "mesh.cp", "mesh.ep", "mesh.tp", "mesh.chunks", "log.every", "checkpoint.every",
                                 "checkpoint.keep", "optimizer.warmup_steps", "run.seed", "shrink.begin", "shrink.end",
                                 "shrink.every", "shrink.least", "lora.rank", "stop.patience", "average.start",
                                 "average.every", "comm.compress_after", "comm.compress_warmup", "workers.count",
                                 "workers.in_flight", "workers.buffer", "workers.staleness"])
def test_no_count_is_less_than_zero(tmp_path, key):
    others = ["train.epochs=0"] if key == "train.steps" else ["train.steps=0"] if key == "train.epochs" else []
    with pytest.raises(ConfigError, match=f"{key} must be at least [01], found -1"):
        load_config(write(tmp_path), [*others, f"{key}=-1"])


def test_every_integer_of_the_schema_is_known_to_that_test():
    integers = {f"{name}.{f.name}" for name, section in SECTIONS.items() for f in fields(section) if f.type is int}
    mark, = test_no_count_is_less_than_zero.pytestmark
    assert integers == set(mark.args[1])


def test_a_mistake_in_the_file_names_the_file_and_one_on_the_command_line_does_not(tmp_path):
    path = write(tmp_path, GOOD + "[data.more]\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, [])
    assert caught.value.file == str(path)
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path), ["log.evry=1"])
    assert caught.value.file is None and caught.value.message.startswith("on the command line: unknown key")


@pytest.mark.parametrize("override", ["optimizer.lr=-1", "optimizer.betas=[1, 1]", "train.batch_size=0", "train.device=tpu",
                                      "mesh.tp=0", "model.name=''", "data.path=''", "train.steps=0", "train.micro_batches=65"])
def test_a_value_that_is_refused_names_the_command_line_where_it_came_from_there_and_else_the_file(tmp_path, override):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path), ["log.every=5", override])
    assert caught.value.file is None and caught.value.message.startswith("on the command line: "), caught.value
    key, _, value = override.partition("=")
    section, _, name = key.partition(".")
    lines = [line for line in GOOD.splitlines() if not line.startswith(f"{name} =")]
    if f"[{section}]" not in lines:
        lines.append(f"[{section}]")
    value = '"tpu"' if value == "tpu" else value
    lines.insert(lines.index(f"[{section}]") + 1, f"{name} = {value}")
    path = write(tmp_path, "\n".join(lines))
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["log.every=5"])
    assert caught.value.file == str(path) and "command line" not in caught.value.message


def test_two_keys_that_do_not_go_together_name_the_command_line_if_one_of_them_came_from_there(tmp_path):
    path = write(tmp_path, GOOD + "batch_size = 8\nmicro_batches = 8\n")
    with pytest.raises(ConfigError, match="on the command line: train.micro_batches = 8 is more than the 4 samples"):
        load_config(path, ["train.batch_size=4"])
    with pytest.raises(ConfigError, match="on the command line: give train.epochs or train.steps, not both"):
        load_config(path, ["train.steps=1", "train.epochs=1"])


def test_a_missing_or_unreadable_file_is_an_error_of_its_own(tmp_path):
    with pytest.raises(MissingError) as caught:
        load_config(tmp_path / "no.toml", [])
    assert caught.value.exit_code == 66
    with pytest.raises(ConfigError, match="folder"):
        load_config(tmp_path, [])
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(write(tmp_path, "[model\n"), [])
    (tmp_path / "net.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(MpitrainError, match="not valid TOML"):
        load_config(tmp_path / "net.toml", [])


@pytest.mark.promise("F2")
def test_a_deep_or_huge_configuration_is_refused_in_a_line_at_once(tmp_path):
    for text, words in (("a = " + "[" * 5000 + "]" * 5000, "more than 32 deep"),
                        ("a = " + "[" * 40 + "]" * 40, "more than 32 deep"),
                        (GOOD + "k" * (10 << 20) + " = 1\n", "at most 1,048,576 bytes"),
                        (GOOD + "[log]\n" + "k" * (1 << 19) + " = 1\n", "unknown key")):
        before = time.process_time()
        with pytest.raises(ConfigError, match=words) as caught:
            load_config(write(tmp_path, text), [])
        assert len(describe(caught.value).line(0, 2)) <= 500 and caught.value.exit_code == 78
        assert time.process_time() - before < 2
    with pytest.raises(ConfigError, match="on the command line: model.a: .*more than 32 deep"):
        load_config(write(tmp_path), ["model.a=" + "[" * 5000])
    assert load_config(write(tmp_path), ["model.hidden=" + "[" * 20 + "]" * 20]).model.arguments["hidden"]


@pytest.mark.promise("C10", "F2")
@pytest.mark.parametrize("key", ["run.out", "run.name", "data.path", "model.file"])
def test_a_name_that_is_no_text_is_refused_in_a_line(tmp_path, key):
    with pytest.raises(ConfigError, match=f"{key} = .* is not UTF-8") as caught:
        load_config(write(tmp_path), [f"{key}={os.fsdecode(bytes([99, 0xE9]))}"])
    assert r"c\xe9" in describe(caught.value).line(0, 1)
    load_config(write(tmp_path), [f"{key}=caf\u00e9\U0001f600"])


@pytest.mark.promise("C10")
@pytest.mark.parametrize("key, longest, words", [
    ("run.out", "a" * 255, "run.out has a name of 256 bytes, and file systems take 255 at most; shorten it"),
    ("data.path", "files/" + "\u00e4" * 127 + "a", "data.path has a name of 256 bytes, and file systems take 255 at most"),
    ("run.name", "a" * 255, "run.out has a name of 256 bytes"),
    ("model.init_from", "b/" * 2047 + "b", "model.init_from is a path of 4096 bytes, and 4095 are the most that the"),
    ("run.out", "b/" * 1997 + "b", "run.out is a path of 3996 bytes, and 3995 are the most")])
def test_a_name_that_is_longer_than_systems_take_is_refused_in_a_line(tmp_path, key, longest, words):
    load_config(write(tmp_path), [f"{key}={longest}"])
    with pytest.raises(ConfigError, match=f"on the command line: {words}") as caught:
        load_config(write(tmp_path), [f"{key}={longest}a"])
    assert caught.value.exit_code == 78


NAMED = """if True:
    import pathlib, sys
    from mpitrain.config import load_config
    from mpitrain.errors import ConfigError
    try:
        load_config(pathlib.Path(sys.argv[1]), sys.argv[2:])
    except ConfigError as error:
        print(ascii(error.message))"""


@pytest.mark.promise("C10")
def test_letters_that_the_locale_has_not_are_its_fault(tmp_path):
    def said(*words, **environment):
        done = subprocess.run([sys.executable, "-c", NAMED, *words], capture_output=True, text=True, cwd=ROOT,
                              env={**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": "C", **environment})
        assert done.returncode == 0, done.stderr
        return done.stdout
    inside = write(tmp_path, GOOD + '[run]\nout = "\u00f6 \u00fc"\n')
    for words in ((inside,), (inside, "run.out=\u00f6 \u00fc\nx")):
        assert said(*words, PYTHONUTF8="1") == ""
        text = said(*words, PYTHONUTF8="0")
        assert "letters that this locale, whose encoding is ascii, has not: set LC_ALL=C.UTF-8, or PYTHONUTF8=1" in text, text
        assert "rename" not in text


def test_every_default_has_the_type_its_key_asks_for():
    assert set(SECTIONS) == {"run", "model", "data", "optimizer", "train", "mesh", "comm", "shrink", "lora", "distil",
                             "sync", "workers", "privacy", "checkpoint", "stop", "average", "energy", "log"}
    assert isinstance(Config(), Config)
