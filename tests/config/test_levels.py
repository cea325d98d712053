"""The tables of [[sync]]: read from TOML and the command line, written back, and refused with the key and what was found."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitrain.config import load_config, to_toml
from mpitrain.config.levels import Level, levels_of
from mpitrain.errors import ConfigError

BASE = """[model]
name = "mlp"
[data]
path = "digits"
[train]
steps = 3
"""


def config_of(folder: Path, text: str, *overrides: str):
    path = folder / "run.toml"
    path.write_text(BASE + text)
    return load_config(path, list(overrides))


def test_tables_become_levels_in_their_order_and_further_keys_are_the_outer_rules(tmp_path: Path) -> None:
    config = config_of(tmp_path, """[[sync]]
over = "node"
what = "gradients"
[[sync]]
every = "5 epochs"
outer = "nesterov"
lr = 1
momentum = 0.9
""")
    assert levels_of(config) == [Level(over="node", what="gradients"),
                                 Level(every="5 epochs", outer="nesterov", lr=1.0, arguments={"momentum": 0.9})]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    config = config_of(tmp_path, "[[sync]]\nevery = 10\nmomentum = 0.6\n")
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert levels_of(load_config(tmp_path / "again.toml", [])) == levels_of(config) != []


def test_a_level_can_be_given_on_the_command_line(tmp_path: Path) -> None:
    assert levels_of(config_of(tmp_path, "", "sync.levels=[{every = 3}]")) == [Level(every=3)]
    assert levels_of(config_of(tmp_path, "[[sync]]\nevery = 10\n", "sync.levels=[{every = 3}]")) == [Level(every=3)]


@pytest.mark.parametrize("line, said", [
    ("every = 0", "sync.every must be a number of steps, at least 1, or epochs, \"5 epochs\", found 0"),
    ('every = "5 steps"', 'found "5 steps"'), ("every = 1.5", "sync.every must be an integer or a string, found 1.5"),
    ("delay = -1", "sync.delay must be at least 0, found -1"), ("fragments = 0", "sync.fragments must be at least 1, found 0"),
    ("lr = 0.0", "sync.lr must be more than 0"), ("lr = nan", "must be finite"), ("alpha = 2.0", "at most 1, found 2"),
    ('over = "sites"', 'sync.over = "sites" is not there (did you mean "site"?)'),
    ('what = "weights"', 'sync.what = "weights" is'),
    ("arguments = 1", "no key arguments")])
def test_a_wrong_value_is_named(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        levels_of(config_of(tmp_path, f"[[sync]]\n{line}\n"))
    assert said in str(caught.value) and "run.toml" in str(caught.value)
