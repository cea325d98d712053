"""Study files: what they describe, and what is refused before anything starts."""

from __future__ import annotations

import dataclasses
import re
import tomllib
import typing
from pathlib import Path
from typing import Any

import pytest
from acted import RUN, SEARCH, SPACE, study_file
from launch import ROOT
from runs import DIGITS

from mpitrain.config import load_config
from mpitrain.errors import CheckpointError, ConfigError, MissingError, MpitrainError
from mpitrain.plan.inspect import open_data
from mpitrain.search.judged import refuse_choices
from mpitrain.search.pruners import PRUNERS, Median
from mpitrain.search.samplers import SAMPLERS
from mpitrain.search.settings import KEYS, SearchConfig
from mpitrain.search.study_file import is_study, read_study, refuse_unbuildable


def test_a_trial_is_the_run_with_its_values_in_a_folder_of_its_own(tmp_path: Path) -> None:
    study = read_study(study_file(tmp_path), ["run.out=found", "optimizer.lr=0.5", "search.trials=5"])
    action, _ = study.decisions().next()
    config = study.config(action.trial)                                                     # type: ignore[union-attr]
    values = action.trial.values                                                            # type: ignore[union-attr]
    assert study.trials == 5 and study.rungs == (1, 3, 9) and config.train.epochs == 9
    assert config.run.out == "found/trials/0000" and config.run.name == "study-0000"
    assert (config.optimizer.lr, config.train.batch_size) == (values["optimizer.lr"], values["train.batch_size"])
    assert config.model.arguments == {"inputs": 64, "hidden": values["model.hidden"], "outputs": 10}
    plain = tmp_path / "run.toml"
    plain.write_text(RUN)
    alone = load_config(plain, [f"{key}={value}" for key, value in values.items()])
    assert dataclasses.replace(config, run=alone.run) == alone                              # as train would have it


def test_the_length_of_a_run_is_the_last_rung(tmp_path: Path) -> None:
    without = RUN.replace("[train]\nepochs = 9\n", "")
    assert read_study(study_file(tmp_path, run=without), []).base.train.epochs == 9
    assert read_study(study_file(tmp_path, search="[search]\ntrials = 3"), []).rungs == (9,)
    grid = read_study(study_file(tmp_path, search='[search]\nsampler = "grid"\npoints = 2\nrungs = [1, 9]'), [])
    assert grid.trials == 2 * 2 * 2 * 8


def test_train_and_inspect_say_how_a_study_is_started(tmp_path: Path) -> None:
    path = study_file(tmp_path)
    assert is_study(path)
    with pytest.raises(ConfigError) as error:
        load_config(path, [])
    assert "start it with search (mpirun -n 2 python -m mpitrain search study.toml)" in str(error.value)
    path.write_text(RUN + SPACE)
    with pytest.raises(ConfigError, match="start it with search"):
        load_config(path, [])
    with pytest.raises(ConfigError, match=r"has a section \[search\], and this file has none"):
        read_study(path, [])
    with pytest.raises(MissingError):
        read_study(tmp_path / "none.toml", [])


SPACES = [
    ('"optimiser.lr" = {log = [1e-4, 1e-1]}', 'unknown section [optimiser] (did you mean "optimizer"?)'),
    ('"optimizer.weight_decai" = {uniform = [0, 1]}', "optimizer.weight_decai"),
    ('"data.stryde" = {integer = [1, 2]}', 'unknown key data.stryde (did you mean "stride"?)'),
    ('lr = {log = [1e-4, 1e-1]}', '[space] "lr" must be a key of the run'),
    ('"optimizer.lr.x" = {log = [1e-4, 1e-1]}', "must be a key of the run"),
    ('"optimizer.lr" = {log = [1e-1, 1e-4]}', "low must not be above high"),
    ('"optimizer.lr" = {log = [0, 1e-4]}', "logarithm of 0"),
    ('"optimizer.lr" = {choices = [0.1, "fast"]}', 'optimizer.lr must be a number, found "fast"'),
    ('"train.batch_size" = {choices = [32, 0.5]}', "train.batch_size must be an integer, found 0.5"),
    ('"train.batch_size" = {integer = [0, 64], step = 32}', "train.batch_size must be at least 1, found 0"),
    ('"optimizer.weight_decay" = {uniform = [-0.1, 0.1]}', "optimizer.weight_decay must be a finite number, 0 or more"),
    ('"model.hidden" = {choices = []}', "at least one value"),
    ('"optimizer.momentum" = {uniform = [0, 1]}', '[space] "optimizer.momentum" = 1.0: optimizer.momentum must lie in [0, 1)'),
    ('"data.path" = {choices = ["digits"]}', "the same for all trials"), ('"data.x" = {choices = ["a"]}', "the same for all"),
    ('"data.y" = {choices = ["a"]}', "the same for all"), ('"data.validation" = {uniform = [0.1, 0.2]}', "the same for all"),
    ('"run.seed" = {integer = [0, 9]}', "the same for all"), ('"run.out" = {choices = ["a"]}', "the same for all"),
    ('"mesh.pp" = {choices = [1, 2]}', "the same for all"), ('"checkpoint.keep" = {integer = [1, 2]}', "the same for all"),
    ('"train.epochs" = {integer = [1, 9]}', "the same for all"), ("", "must be a table of at least one key")]


@pytest.mark.parametrize(("line", "told"), SPACES)
def test_a_space_that_is_wrong_is_refused_in_one_line(tmp_path: Path, line: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        study = read_study(study_file(tmp_path, space=f"[space]\n{line}\n"), [])
        refuse_unbuildable(study, open_data(study.base))
    assert told in str(error.value) and str(tmp_path / "study.toml") in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("lines", "told"), [
    ('"comm.compress" = {choices = ["", "int8", "onebitt"]}', '"comm.compress" = "onebitt": comm.compress = "onebitt": unknown'),
    ('"train.batch_size" = {choices = [32, 100000]}', '"train.batch_size" = 100000: train.batch_size=100000 is more than'),
    ('"train.batch_size" = {choices = [32, 100000]}\n"data.drop_last" = {choices = [true, false]}', ""),   # one mends the other
    ('"comm.compress" = {choices = ["", "int8"]}\n"comm.bucket_mb" = {choices = ["auto", 25.0]}', ""),      # a pair, in a trial
    ('"train.batch_size" = {choices = [32, 64]}\n"optimizer.name" = {choices = ["sgd", "adamw"]}', "")])
def test_choices_that_no_trial_could_have_are_refused_before_the_first(tmp_path: Path, lines: str, told: str) -> None:
    study = read_study(study_file(tmp_path, space=f"[space]\n{lines}\n"), [])
    if told:
        with pytest.raises(ConfigError) as error:
            refuse_choices(study, open_data(study.base))
        assert told in str(error.value) and "\n" not in str(error.value)
    else:
        refuse_choices(study, open_data(study.base))


FEDERATION = DIGITS + """
[train]
batch_size = 16
[workers]
count = 20
each_round = 4
"""


def test_rungs_of_a_federation_are_rounds(tmp_path: Path) -> None:
    space = '[space]\n"workers.count" = {integer = [5, 60]}\n'
    path = study_file(tmp_path, run=FEDERATION, search="[search]\ntrials = 3\nrungs = [4, 6, 12]\n", space=space)
    study = read_study(path, [])
    config = study.config_with({"workers.count": 50})         # whose own default is an evaluation in 12 rounds
    assert (study.base.train.steps, study.base.train.epochs, config.train.eval_every) == (12, 0, 2)
    assert [study.steps_of(rung, 5) for rung in range(3)] == [4, 6, 12] and study.decisions().table.unit == "rounds"
    assert study.header()["search"]["unit"] == "rounds" and "unit" not in read_study(study_file(tmp_path), []).header()["search"]
    for override, told in (("train.epochs=12", "a federation's length is its rounds, and rungs count these; set train.steps"),
                           ("train.steps=9", "search.rungs ends at 12 rounds, beyond train.steps = 9"),
                           ("train.eval_every=4", "train.eval_every = 4 evaluates after others; leave it out, or set it to 2")):
        path = study_file(tmp_path, run=FEDERATION, search="[search]\ntrials = 3\nrungs = [4, 6, 12]\n", space=space)
        with pytest.raises(ConfigError) as error:
            read_study(path, [override])
        assert told in str(error.value)


SEARCHES = [
    ("trials = 0", "search.trials is missing"), ("trials = -1", "search.trials must be at least 0"),
    ('trials = "many"', "search.trials must be an integer"), ("trials = 9\neta = 1", "search.eta must be at least 2, found 1"),
    ("trials = 9\nranks = 0", "search.ranks must be at least 1"), ("trials = 9\nahead = 0", "search.ahead must be at least 1"),
    ("trials = 9\nrungs = [3, 1]", "must be numbers of epochs that rise"), ("trials = 9\nrungs = [1, 1, 9]", "that rise"),
    ("trials = 9\nrungs = [0, 9]", "that rise from 1 on"), ("trials = 9\nrungs = [1, 27]", "beyond train.epochs = 9"),
    ("trials = 9\nrungs = [1, 3]", "train.epochs = 9 is the last rung; add 9"),
    ('trials = 9\nobjective = ["acuracy"]', 'is no metric of an evaluation (did you mean "accuracy"?)'),
    ('trials = 9\nobjective = ["f1"]', "is no metric of an evaluation"), ('trials = 9\nobjective = ["ms"]', 'write "-ms"'),
    ('trials = 9\nobjective = ["-loss"]', 'write "loss"'), ("trials = 9\nobjective = []", "is empty"),
    ('trials = 9\nobjective = ["loss", "loss"]', "twice"),
    ('trials = 9\nsampler = "evolutoin"', 'unknown sampler "evolutoin" (did you mean "evolution"?)'),
    ('trials = 9\npruner = "hyper"', 'unknown pruner "hyper"'), ('trials = 9\norder = "fix"', "one of free, fixed"),
    ("trials = 9\ntrails = 3", 'unknown key search.trails (did you mean "trials"?)'),
    ("trials = 9\nparents = 5", "unknown key search.parents"),
    ('trials = 9\nsampler = "evolution"\nparents = 3\ntournament = 5', "search.tournament from 1 to it"),
    ('trials = 9\nsampler = "evolution"\nparents = "all"', "search.parents must be an integer"),
    ('trials = 9\npruner = "median"\nstartup = 0', "search.startup must be at least 1"),
    ('trials = 9\npruner = "median"\nobjective = ["accuracy", "loss"]', "median"),
    ('trials = 999\nsampler = "grid"', "search.trials = 999, and the grid has 5 points"),
    ('trials = 9\nsampler = "none.py:f"', "no file"), ("trials = 9\nseed = -2", "search.seed must be at least -1")]


@pytest.mark.parametrize(("lines", "told"), SEARCHES)
def test_a_search_that_is_wrong_is_refused_in_one_line(tmp_path: Path, lines: str, told: str) -> None:
    space = '[space]\n"optimizer.lr" = {log = [1e-4, 1e-1]}\n'
    with pytest.raises(ConfigError) as error:
        read_study(study_file(tmp_path, search=f"[search]\n{lines}\n", space=space), [])
    assert told in str(error.value) and str(tmp_path / "study.toml") in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("overrides", "told"), [
    (["search.eta=1"], "search.eta must be at least 2"), (["train.steps=100"], "a study counts epochs"),
    (["train.on_lost=go_on"], 'set it to "stop": a study'), (["data.validation=0.0"], "trials are compared at evaluations"),
    (["search.name=3", "search.sampler=own.py:f"], "search.name"),
    (["train.epochs=3"], "beyond train.epochs = 3"), (["search.sampler=nobody"], 'unknown sampler "nobody"'),
    (["model.hiden=[3]"], "hiden"), (["optimizer.name=sdg"], "sdg"), (["search.=3"], "unknown key search.")])
def test_what_the_command_line_says_is_looked_at_too(tmp_path: Path, overrides: list[str], told: str) -> None:
    (tmp_path / "own.py").write_text("def f(space, history, number, seed): return {}\n")
    with pytest.raises(MpitrainError) as error:
        study = read_study(study_file(tmp_path), overrides)
        refuse_unbuildable(study, open_data(study.base))
    assert told in str(error.value) and "[space]" not in str(error.value)


@pytest.mark.parametrize(("line", "told"), [
    ('"model.hiden" = {choices = [[3]]}', "model.hiden"), ('"model.hidden" = {choices = [[64], [0]]}', "hidden"),
    ('"model.hidden" = {choices = [[64], "wide"]}', "hidden"), ('"model.name" = {choices = ["mlp", "mpl"]}', "mpl"),
    ('"optimizer.name" = {choices = ["adamw", "adamm"]}', "adamm"), ('"optimizer.schedule" = {choices = ["cosin"]}', "cosin"),
    ('"train.loss" = {choices = ["cross_entropy", "cross"]}', "cross")])
def test_what_only_building_shows_is_refused_for_every_end_and_choice(tmp_path: Path, line: str, told: str) -> None:
    """Open sections take any key; the model, the optimizer and the loss are made once for each."""
    study = read_study(study_file(tmp_path, space=f"[space]\n{line}\n"), [])
    with pytest.raises(ConfigError) as error:
        refuse_unbuildable(study, open_data(study.base))
    assert told in str(error.value) and '[space] "' in str(error.value) and "\n" not in str(error.value)


def test_a_space_that_can_be_built_passes(tmp_path: Path) -> None:
    study = read_study(study_file(tmp_path, run=RUN.replace("inputs = 64\n", "").replace("outputs = 10\n", "")), [])
    refuse_unbuildable(study, open_data(study.base))                  # sizes come from the data


def test_what_the_model_needs_may_be_left_to_the_space(tmp_path: Path) -> None:
    without = RUN.replace("hidden = [32]\n", "")
    study = read_study(study_file(tmp_path, run=without), [])
    refuse_unbuildable(study, open_data(study.base))
    assert study.base.model.arguments["hidden"] == [64] and study.left_out["optimizer.lr"] == 1e-4
    assert "hidden" not in study.as_written().model.arguments
    study = read_study(study_file(tmp_path, run=without, space='[space]\n"optimizer.lr" = {log = [1e-4, 1e-1]}\n'), [])
    with pytest.raises(ConfigError, match='^model "mlp" needs model.hidden$'):
        refuse_unbuildable(study, open_data(study.base))


@pytest.mark.parametrize(("change", "told"), [
    ({"space": SPACE.replace("1e-4", "1e-5")}, "[space]"), ({"search": SEARCH + "eta = 4\n"}, "[search]"),
    ({"search": SEARCH + "ranks = 2\n"}, "[search]"),
    ({"search": SEARCH + "seed = 4\n"}, "[search]"), ({"run": RUN.replace("hidden = [32]", "hidden = [16]")}, "the run"),
    ({"search": SEARCH.replace("27", "26")}, "is of 27 trials")])
def test_a_journal_of_another_study_is_refused(tmp_path: Path, change: dict[str, str], told: str) -> None:
    header = read_study(study_file(tmp_path), []).header()
    other = read_study(study_file(tmp_path, **change), [])
    with pytest.raises(CheckpointError) as error:
        other.refuse_other(header, tmp_path / "journal.jsonl")
    assert told in str(error.value) and error.value.code == "E_CHECKPOINT"


def test_what_does_not_change_a_study_may_change(tmp_path: Path) -> None:
    """More trials, another folder, another interval of the log."""
    header = read_study(study_file(tmp_path), []).header()
    more = study_file(tmp_path, run=RUN + "[log]\nevery = 7\n", search=SEARCH.replace("27", "30"))
    read_study(more, ["run.out=elsewhere", "checkpoint.keep=3"]).refuse_other(header, tmp_path / "journal.jsonl")


def test_settings_of_samplers_and_pruners_are_keys_of_search(tmp_path: Path) -> None:
    study = read_study(study_file(tmp_path), ["search.sampler=evolution", "search.parents=7", "search.tournament=3",
                                              "search.pruner=median", "search.startup=2"])
    assert (study.sampler.parents, study.sampler.tournament) == (7, 3)                      # type: ignore[attr-defined]
    assert isinstance(study.pruner, Median) and study.pruner.startup == 2


def test_the_page_on_search_knows_every_key_its_default_and_every_name() -> None:
    text = (ROOT / "docs/search.md").read_text()
    rows: dict[str, Any] = {key: tomllib.loads(f"v = {default}")["v"] for key, default in
                            re.findall(r"^\| `(\w+)` \| [a-z ]+ \| `([^`]+)` \|", text, re.MULTILINE)}
    defaults = {field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
                for field in dataclasses.fields(SearchConfig)}
    assert {key: rows.get(key) for key in KEYS} == {key: list(value) if isinstance(value, tuple) else value
                                                    for key, value in defaults.items() if key != "arguments"}
    assert typing.get_args(KEYS["order"]) == ("free", "fixed") and '`"fixed"`' in text
    assert all(f"`{name}`" in text for name in (*SAMPLERS, *PRUNERS, "parents", "tournament", "points", "startup"))
