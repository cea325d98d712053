"""Models of text trained on tasks of tokens: the same on one and on two ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from runs import lines, ok, refused, train, without_times, write

from mpitrain.data import write_shards
from mpitrain.plan.inspect import open_data
from mpitrain.train.build.saved import load
from mpitrain.verbs import first_rows

CONFIG = """
[model]
name = "bert"
layers = 1
heads = 2
width = 8
hidden = 16
block = 16
vocabulary = 31
dropout = 0.0
[data]
path = "text"
validation = "tail:0.2"
augment = [{name = "mask", token = 30}]
[optimizer]
name = "adamw"
lr = 1e-2
[train]
steps = 4
batch_size = 8
eval_every = 2
micro_batches = 2
reproducible = "layout"
[log]
every = 1
"""


def test_masked_training_is_the_same_on_one_and_two_ranks(tmp_path: Path):
    write_shards(tmp_path / "text", np.random.default_rng(0).integers(0, 30, 400), kind="tokens")
    found = []
    for n in (1, 2):
        ok(train(n, write(tmp_path, CONFIG), f"run.out={tmp_path / str(n)}"))
        found.append(without_times(lines(tmp_path / str(n))))
    assert found[0] == found[1] and any("accuracy" in line for line in found[0])


T5 = """
[model]
name = "t5"
layers = 1
heads = 2
width = 8
head_width = 4
hidden = 16
block = 40
source = 37
vocabulary = 40
[data]
path = "text"
validation = "tail:0.2"
augment = [{name = "spans", sentinel = 39, end = 31, begin = 30}]
[train]
steps = 3
batch_size = 4
eval_every = 3
micro_batches = 2
"""


def test_spans_train_an_encoder_and_a_decoder(tmp_path: Path):
    write_shards(tmp_path / "text", np.random.default_rng(0).integers(0, 30, 400), kind="tokens")
    config = write(tmp_path, T5)
    losses = []
    for n, mesh in ((1, "mesh.pp=1"), (2, "mesh.pp=2")):
        ok(train(n, config, mesh, f"run.out={tmp_path / str(n)}"))
        losses.append([line["loss"] for line in lines(tmp_path / str(n))])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    saved = load(tmp_path / "1")
    rows = first_rows(saved, 3)                   # source and answer, not windows of text: what verbs look at the model with
    np.testing.assert_array_equal(rows, open_data(saved.config).sample(3)[0])
    assert rows.shape == (3, 46) and first_rows(saved, 3, tokens=100).shape == (2, 46)
    refused(train(1, config, "model.source=30", f"run.out={tmp_path / 'other'}"), 65, "(16, 40)", "the targets are (9,)")
