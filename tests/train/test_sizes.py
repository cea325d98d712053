"""Sizes of a model that its data know may be left out of [model]."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from runs import SMALL, many, ok, record, write
from standing import train

from mpitrain.config import load_config
from mpitrain.data.importers import import_text
from mpitrain.errors import ConfigError
from mpitrain.plan.inspect import inspect, inspect_config
from mpitrain.plan.prepare import open_data
from mpitrain.train.build.sizes import with_sizes

NONE = SMALL.replace("inputs = 64\n", "").replace("outputs = 10\n", "")
LAYOUT = ("train.steps=4", "train.reproducible=layout", "train.micro_batches=2")
OWN = """
from mpitrain import nn
def net({parameters}):
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
def half(x):
    return x.reshape(len(x), -1)[:, ::2].astype("float32")
"""


def arrays(folder, x, y):
    with h5py.File(folder / "d.h5", "w") as file:
        file["x"], file["y"] = x, y


def sized(folder, parameters, more="", loss="cross_entropy"):
    """The arguments that a model of these parameters gets for the data of `arrays`."""
    (folder / "own.py").write_text(OWN.format(parameters=parameters))
    path = write(folder, f'[model]\nname = "own.py:net"\n[data]\npath = "d.h5"\n{more}\n[train]\nsteps = 1\nloss = "{loss}"')
    config = load_config(path, [])
    return with_sizes(config, open_data(config)).model.arguments


def test_a_run_without_sizes_is_the_run_with_them_and_keeps_them(tmp_path):
    result = ok(train(1, write(tmp_path, NONE), "run.out=found", *LAYOUT))
    assert "sizes from the data: model.inputs = 64, model.outputs = 10" in result.out
    write(tmp_path, name="typed.toml")
    typed, = many(tmp_path, (1, "typed.toml", "run.out=typed", *LAYOUT))
    assert record(tmp_path / "found")["parameters_sha256"] == typed["parameters_sha256"]
    kept = load_config(tmp_path / "found" / "config.toml", [])
    assert kept.model.arguments == {"hidden": [32], "inputs": 64, "outputs": 10}
    assert any("10" in line for line in inspect(tmp_path / "found", []))


def test_inspect_shows_what_the_data_say(tmp_path):
    lines = list(inspect_config(load_config(write(tmp_path, NONE), []), 2))
    assert "sizes from the data: model.inputs = 64, model.outputs = 10" in lines
    assert not any("sizes from" in line for line in inspect_config(load_config(write(tmp_path), []), 2))


def test_a_text_says_its_vocabulary(tmp_path):
    (tmp_path / "t.txt").write_text("abcde" * 50)
    import_text(tmp_path / "t.txt", tmp_path / "text")
    path = write(tmp_path, '[model]\nname = "gpt"\nlayers = 1\nheads = 1\nwidth = 8\nblock = 8\n'
                           '[data]\npath = "text"\nvalidation = "tail:0.2"\n[train]\nsteps = 1')
    config = load_config(path, [])
    assert with_sizes(config, open_data(config)).model.arguments["vocabulary"] == 5


@pytest.mark.parametrize(("shape", "parameters", "found"), [
    ((3, 8, 8), "classes, channels, size", {"classes": 4, "channels": 3, "size": 8}),
    ((7, 5), "features, length", {"features": 5, "length": 7}),
    ((7, 5), "channels, length", {"channels": 7, "length": 5}),
    ((6,), "features, outputs", {"features": 6, "outputs": 4}),
    ((6,), "inputs, classes=3", {"inputs": 6})])
def test_rows_say_sizes(tmp_path, shape, parameters, found):
    arrays(tmp_path, np.ones((10, *shape), np.float32), np.arange(10) % 4)
    assert sized(tmp_path, parameters) == found


@pytest.mark.parametrize(("name", "more", "found"), [
    ("fcn", "", 2), ("inception_time", "", 2), ("tcn", "channels = [4]", 2), ("lstm", "hidden = 4", 2), ("gru", "hidden = 4", 2),
    ("graphsage", "samples = [11]\nhidden = [4]", 2), ("mlp", "hidden = [4]", 24)])
def test_the_inputs_of_a_model_of_positions_are_those_at_each(tmp_path, name, more, found):
    arrays(tmp_path, np.ones((10, 12, 2), np.float32), np.arange(10) % 4)
    config = load_config(write(tmp_path, f'[model]\nname = "{name}"\n{more}\n[data]\npath = "d.h5"\n[train]\nsteps = 1'), [])
    assert with_sizes(config, open_data(config)).model.arguments["inputs"] == found
    inspect_config(config, 1)


def test_targets_of_a_regression_say_the_outputs(tmp_path):
    arrays(tmp_path, np.ones((10, 6), np.float32), np.zeros((10, 3), np.float32))
    assert sized(tmp_path, "outputs", loss="mse") == {"outputs": 3}


def test_a_transform_of_the_users_own_may_change_the_row(tmp_path):
    arrays(tmp_path, np.ones((10, 6), np.float32), np.arange(10) % 2)
    assert sized(tmp_path, "inputs", more='transform = ["standardise", "own.py:half"]') == {"inputs": 3}


def test_sizes_that_no_data_say_stay_asked_for(tmp_path):
    arrays(tmp_path, np.ones((10, 6), np.float32), np.zeros((10, 3), np.float32))
    assert sized(tmp_path, "classes, size, width") == {}
    config = load_config(tmp_path / "run.toml", [])
    with pytest.raises(ConfigError, match=r"needs model\.classes, model\.size, model\.width"):
        list(inspect_config(config, 1))
