"""Windows over series of floats: which steps train, which validate, and in which units predictions come."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from runs import many, record, write

import mpitrain
from mpitrain.config import load_config
from mpitrain.data import Dataset, describe, write_shards
from mpitrain.data.series import SeriesWindows, Windows, series_split
from mpitrain.errors import ConfigError, DataError, MpitrainError
from mpitrain.plan.inspect import inspect_config
from mpitrain.plan.prepare import open_data

NET = """
from mpitrain import nn
def net(length, features, horizon):
    return nn.Sequential(nn.Flatten(), nn.Linear(length * features, horizon))
"""
RUN = """
[model]
name = "net.py:net"
[data]
path = "s.h5"
validation = "tail:0.2"
length = 5
horizon = 2
targets = [1]
transform = ["standardise"]
target_transform = ["standardise"]
[train]
steps = 5
batch_size = 16
micro_batches = 2
loss = "mse"
reproducible = "layout"
"""


def series(n=100):
    t = np.arange(n)
    return np.stack([np.sin(t / 7), 500 + 30 * np.cos(t / 11)], 1).astype(np.float32)


def written(folder, values=None):
    with h5py.File(folder / "s.h5", "w") as file:
        file["z"] = series() if values is None else values
    (folder / "net.py").write_text(NET)
    return write(folder, RUN)


def dataset(folder, values=None):
    written(folder, values)
    return Dataset(describe(folder / "s.h5", series=True))


def test_a_window_has_the_steps_that_follow_one_another(tmp_path):
    windows, z = SeriesWindows(dataset(tmp_path), Windows(5, 2, 3, (1,))), series()
    assert len(windows) == (100 - 7) // 3 + 1
    x, y = windows.read(np.array([0, 4]))
    np.testing.assert_array_equal(x, np.stack([z[0:5], z[12:17]]))
    np.testing.assert_array_equal(y, np.stack([z[5:7, 1:], z[17:19, 1:]]))
    assert windows.where(4) == (str(tmp_path / "s.h5"), 12)


def test_no_step_behind_the_cut_is_trained_on_and_each_one_is_predicted(tmp_path):
    steps = np.arange(100, dtype=np.float32)
    training, validation = series_split(dataset(tmp_path, steps), Windows(5, 2, 1), "tail:0.2")
    x, y = training.read(np.arange(len(training)))
    assert y.max() == 79 and x.max() == 77
    _, told = validation.read(np.arange(len(validation)))
    assert sorted(set(told.reshape(-1))) == [*range(80, 100)]                 # none whose targets lie on both sides
    assert max(float(x.max()) for x, _ in training.steps()) == 79


def test_windows_cross_from_no_series_to_the_next(tmp_path):
    values = np.arange(36, dtype=np.float32).reshape(3, 12, 1)
    whole = SeriesWindows(dataset(tmp_path, values), Windows(4, 1))
    write_shards(tmp_path / "shards", values.reshape(36, 1), kind="series", shard_rows=12)
    files = SeriesWindows(Dataset(describe(tmp_path / "shards")), Windows(4, 1))
    assert len(whole) == len(files) == 3 * 8
    for ours in (whole, files):
        x, y = ours.read(np.arange(24))
        assert (np.diff(np.concatenate([x, y], 1)[..., 0]) == 1).all() and (x[:, 0, 0] // 12 == y[:, 0, 0] // 12).all()


def test_statistics_are_those_of_the_steps_that_train(tmp_path):
    inputs = open_data(load_config(written(tmp_path), []))
    inputs.transforms.fit(inputs.training, inputs.train_rows)
    part = series()[:80].astype(np.float64)
    x, y = inputs.sample(3)
    np.testing.assert_allclose(x[1], (part[1:6] - part.mean(0)) / part.std(0), rtol=1e-4)
    np.testing.assert_allclose(y[1], (part[6:8, 1:] - part[:, 1].mean()) / part[:, 1].std(), rtol=1e-4)


def test_ranks_agree_and_predictions_have_the_units_of_the_targets(tmp_path):
    written(tmp_path)
    many(tmp_path, *[(n, "run.toml", f"run.out=on{n}") for n in (1, 2)])
    assert record(tmp_path / "on1")["parameters_sha256"] == record(tmp_path / "on2")["parameters_sha256"]
    assert load_config(tmp_path / "on1" / "config.toml", []).model.arguments == {"length": 5, "features": 2, "horizon": 2}
    model = mpitrain.load(tmp_path / "on1")
    windows = np.stack([series()[i:i + 5] for i in range(96)])
    plain, inverse = model.predict(windows), model.predict(windows, inverse=True)
    part = series()[:80, 1].astype(np.float64)
    assert plain.shape == (96, 2)
    np.testing.assert_allclose(inverse, plain * part.std() + part.mean(), rtol=1e-5)


@pytest.mark.parametrize(("overrides", "kind", "words"), [
    (["data.length=90"], DataError, "the series has 80 steps to train on, and a window takes 92: data.length = 90"),
    (["data.targets=[2]"], ConfigError, "data.targets names the column 2, and the series have 2, 0 to 1"),
    (["data.validation=0.2"], ConfigError, "windows of series overlap"),
    (["data.length=0"], DataError, "series, with data.length"),
    (["data.path=digits"], DataError, "data.length cuts windows out of the series of one dataset"),
    (["data.path=digits", "data.length=0", "data.target_transform=[]", "data.validation=0.2"], ConfigError,
     "data.horizon and data.targets are for series")])
def test_what_does_not_fit_is_one_line(tmp_path, overrides, kind, words):
    with pytest.raises(MpitrainError) as caught:
        list(inspect_config(load_config(written(tmp_path), overrides), 1))
    assert isinstance(caught.value, kind) and words in caught.value.message


def test_a_step_that_is_no_number_is_named(tmp_path):
    values = series()
    values[31, 1] = np.nan
    with pytest.raises(DataError) as caught:
        list(inspect_config(load_config(written(tmp_path, values), []), 1))
    assert caught.value.row == 31
