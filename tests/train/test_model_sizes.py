"""Sizes of [model] that do not fit each other: found while the model is built, and told as mistakes of the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitrain.config import load_config
from mpitrain.errors import ArgumentError, ConfigError
from mpitrain.train.build.model import make_model

NET = """
from mpitrain import nn
def net(inputs=64, groups=3): return nn.Conv2d(inputs, 5, 3, groups=groups)
def odd(): return nn.Linear(3, bogus=1)
"""


def made(folder: Path, model: str, *arguments: str) -> None:
    (folder / "net.py").write_text(NET)
    config = folder / "run.toml"
    config.write_text(f'[data]\npath = "digits"\n[train]\nsteps = 1\nbatch_size = 8\n[model]\n{model}\n')
    make_model(load_config(config, list(arguments)))


@pytest.mark.parametrize(("model", "words"), [
    ('name = "swin"\ndepths = [2, 2]\nheads = [5, 4]', "96 cannot be cut into 5 heads; .* change model.width or model.heads"),
    ('name = "ft_transformer"\nnumeric = 4\ncategories = [3]\noutputs = 2\nheads = 5', "multiple of model.heads$"),
    ('name = "lenet"\nsize = 8', "images of at least 12x12, not 8x8; change a size in .model"),
    ('name = "net.py:net"', "cannot have 3 groups, at net.py:3 in net; .* change model.groups")])
def test_sizes_that_do_not_fit_each_other_are_a_mistake_of_the_configuration(tmp_path: Path, model: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as found:
        made(tmp_path, model)
    assert found.value.exit_code == 78 and found.value.file == str(tmp_path / "run.toml")


def test_the_file_is_not_blamed_for_a_size_of_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="on the command line: .* into 5 heads; .* change model.width or model.heads") as found:
        made(tmp_path, 'name = "swin"\ndepths = [2, 2]\nheads = [3, 6]', "model.heads=[5,4]")
    assert found.value.file is None


def test_a_call_with_wrong_arguments_in_a_models_own_code_is_no_mistake_of_a_size(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="at net.py:4 in odd"):
        made(tmp_path, 'name = "net.py:odd"')
