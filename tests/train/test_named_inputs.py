"""Several inputs by name: `data.x = {tokens = "ids", values = "numbers"}`."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from runs import many, ok, record, refused, write
from standing import train

import mpitrain
from mpitrain.autograd import Tensor
from mpitrain.config import load_config
from mpitrain.data import Dataset, describe, write_shards
from mpitrain.data.columns import Columns
from mpitrain.data.transforms import Transforms
from mpitrain.errors import ConfigError, DataError, ShapeError
from mpitrain.nn.by_name import ByName
from mpitrain.plan.inspect import inspect_config
from mpitrain.plan.prepare import open_data
from mpitrain.train.build.averaged import averaged
from mpitrain.train.build.saved import load
from mpitrain.verbs import first_rows

NET = """
from mpitrain import nn
class Both(nn.Module):
    def __init__(self, vocabulary, width, features):
        self.table, self.line = nn.Embedding(vocabulary, width), nn.Linear(features, width)
    def forward(self, tokens, values=None):
        rows = self.table(tokens).mean(1)
        return rows if values is None else rows + self.line(values)
def net(features, classes, vocabulary=9, width=8):
    return nn.Sequential(("embed", Both(vocabulary, width, features)), ("wide", nn.Linear(width, 16, activation="relu")),
                         ("head", nn.Linear(16, classes)))
"""
RUN = """
[model]
name = "net.py:net"
[data]
path = "{path}"
transform = {{values = "standardise"}}
[train]
steps = 6
batch_size = 16
micro_batches = 4
reproducible = "layout"
"""
NAMED = "data.x={tokens='ids',values='numbers'}"


def rows(n=50):
    rng = np.random.default_rng(0)
    return rng.integers(0, 9, (n, 7)), rng.normal(3, 2, (n, 3)).astype(np.float32), rng.integers(0, 3, n)


def folder_of(folder, more=""):
    tokens, values, labels = rows()
    write_shards(folder / "shards", {"tokens": tokens, "values": values}, labels, kind="classification", shard_rows=20)
    with h5py.File(folder / "d.h5", "w") as file:
        file["ids"], file["numbers"], file["labels"], file["few"] = tokens, values, labels, values[:9]
    (folder / "net.py").write_text(NET)
    return write(folder, RUN.format(path="shards") + more)


def inspected(path, *overrides):
    return list(inspect_config(load_config(path, list(overrides)), 2))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    folder_of(folder)
    ways = (("one", 1), ("two", 2), ("stages", 2, "mesh.pp=2", "train.recompute=true"),
            ("plain", 1, "data.path=d.h5", "data.y=labels", NAMED))
    many(folder, *[(n, "run.toml", f"run.out={out}", *more) for out, n, *more in ways])
    return folder


def test_every_layout_gives_one_hash_and_predictions_are_those_of_the_model(runs):
    hashes = {out: record(runs / out)["parameters_sha256"] for out in ("one", "two", "stages", "plain")}
    assert len(set(hashes.values())) == 1, hashes
    assert load_config(runs / "one" / "config.toml", []).data.x == {"tokens": "/x.tokens", "values": "/x.values"}
    model, (tokens, values, _) = mpitrain.load(runs / "one"), rows()
    found = model.predict({"tokens": tokens, "values": values})
    scaled = (values - values[model_rows(runs)].mean(0)) / values[model_rows(runs)].std(0)
    direct = model.model(tokens=Tensor(tokens), values=Tensor(scaled.astype(np.float32))).array
    np.testing.assert_allclose(found, direct, rtol=1e-5, atol=1e-6)


def model_rows(folder):
    return open_data(load_config(folder / "run.toml", [])).train_rows


def test_a_dataset_reads_columns_that_are_cut_as_arrays_are(tmp_path):
    folder_of(tmp_path)
    tokens, values, labels = rows()
    x, y = Dataset(describe(tmp_path / "shards")).read(np.array([3, 41, 7]))
    assert isinstance(x, Columns) and len(x) == 3 and x.values["tokens"].dtype == np.int64
    np.testing.assert_array_equal(x[1:].values["tokens"], tokens[[41, 7]])
    np.testing.assert_array_equal(np.repeat(x, 2, axis=0).values["values"], values[[3, 3, 41, 41, 7, 7]])
    np.testing.assert_array_equal(y, labels[[3, 41, 7]])


def test_transforms_are_of_one_input_and_come_back_from_their_state(tmp_path):
    path = folder_of(tmp_path)
    inputs = open_data(load_config(path, []))
    inputs.transforms.fit(inputs.training, inputs.train_rows)
    x, _ = inputs.sample(40)
    assert x.values["tokens"].dtype == np.int64 and abs(x.values["values"].mean()) < 0.5
    again = Transforms([{"values": "standardise"}])
    again.load_state_dict(inputs.transforms.state_dict())
    raw, _ = inputs.training.read(inputs.train_rows[:40])
    np.testing.assert_array_equal(again(raw).values["values"], x.values["values"])


def test_modules_take_inputs_by_name_as_keywords():
    class Sum(mpitrain.nn.Module):
        def forward(self, a, b=0.0):
            return a + b
    given = ByName({"a": Tensor(np.ones(2)), "b": Tensor(np.full(2, 3.0))})
    model = mpitrain.nn.Sequential(Sum(), Sum())
    for found in (Sum()(given), model(given), model(a=given["a"], b=given["b"])):
        np.testing.assert_array_equal(found.array, [4.0, 4.0])


@pytest.mark.parametrize(("overrides", "words"), [
    (["data.x={ids='x.tokens',values='x.values'}", "data.y=y"], 'the input "ids", and the first block of the model, "embed"'),
    (["data.x={values='x.values'}", "data.y=y"], 'needs the input "tokens", and data.x gives values'),
    (["data.x={tokens='x.tokens',valeus='x.values'}", "data.y=y", "data.transform=[]"], 'did you mean "values"'),
    (["data.transform={vales='scale'}"], 'data.transform has an entry for the input "vales" (did you mean "values"?)'),
    (["data.x={tokens=3}"], "data.x.tokens must be the name of a dataset, found 3"),
    (["data.x={name='x'}"], 'data.x names an input "name"'),
    (["data.transform=scale"], "say of which: data.transform = {tokens = [...]}"),
    (["data.augment=flip"], "say of which: data.augment"),
    (["data.x=x.tokens", "data.y=y"], "and the inputs have no names"),
    (["data.path=d.h5", "data.y=labels", "data.x={tokens='ids',values='few'}"], '50 rows in "/ids", but 9 in "/few"')])
def test_names_and_rows_that_do_not_fit_are_one_line(tmp_path, overrides, words):
    path = folder_of(tmp_path)
    with pytest.raises((ConfigError, DataError)) as caught:
        inspected(path, *overrides)
    assert words in caught.value.message


def test_a_model_that_wants_names_says_so_of_data_without(tmp_path):
    path = folder_of(tmp_path)
    (tmp_path / "net.py").write_text(NET.replace("values=None", "values"))
    with pytest.raises(ConfigError, match=r'takes inputs by name, tokens, values, .*set data.x = \{tokens = "...", values'):
        inspected(path, "data.path=d.h5", "data.x=ids", "data.y=labels", "data.transform=[]", "model.features=3")


def test_what_looks_at_training_rows_gives_them_by_name(tmp_path):
    path = folder_of(tmp_path)
    (tmp_path / "net.py").write_text(NET.replace('"head"', '"norm", nn.BatchNorm1d(16)), ("head"'))
    assert "multiply-adds of a sample: 200 forward, 3 times as many in a training step" in inspected(path)
    ok(train(1, path, "run.out=run", "average.kind=ema"))
    saved = load(tmp_path / "run")
    inputs = open_data(saved.config)
    made = averaged(saved, lambda: inputs)
    hidden = made.model.slice(0, 2)(first_rows(made, 32)).array           # two whole batches of the 40 rows that train
    mean = dict(made.model.named_buffers())["norm.running_mean"].array
    np.testing.assert_allclose(mean, hidden.mean(0), rtol=1e-4, atol=1e-6)


def test_predictions_refuse_other_names_and_broken_integers(runs):
    model, (tokens, values, _) = mpitrain.load(runs / "one"), rows()
    with pytest.raises(ConfigError, match='needs the input "tokens"'):
        model.predict({"values": values})
    with pytest.raises(ShapeError, match="as many rows"):
        model.predict({"tokens": tokens, "values": values[1:]})
    whole = model.predict({"tokens": tokens, "values": values})
    np.testing.assert_array_equal(model.predict({"tokens": tokens.astype(np.float32), "values": values}), whole)
    with pytest.raises(DataError, match='"tokens" is of whole numbers, found 0.5') as caught:
        model.predict({"tokens": np.array([[0.0], [0.5]]), "values": values[:2]})
    assert caught.value.row == 1


@pytest.mark.parametrize("place", [(37, 4), (5, 0)])
def test_an_integer_that_a_table_lacks_is_named_with_its_row_before_training(tmp_path, place):
    path, (tokens, values, labels) = folder_of(tmp_path), rows()
    tokens[place] = 9
    write_shards(tmp_path / "shards", {"tokens": tokens, "values": values}, labels, kind="classification", shard_rows=20,
                 overwrite=True)
    with pytest.raises(DataError) as caught:
        inspected(path)
    assert f'the input "tokens" is 9 in column {place[1]}, and the model has no place for it' in caught.value.message
    assert (caught.value.row, caught.value.dataset) == (place[0] % 20, "/x.tokens")


def test_an_unknown_name_ends_the_run_before_it_starts(tmp_path):
    refused(train(1, folder_of(tmp_path), "data.x={ids='x.tokens',values='x.values'}", "data.y=y"), 78, 'the input "ids"')
