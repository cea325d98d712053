"""Models of text trained on tasks of tokens: the same on one and on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import lines, many, without_times, write

from mpitrain.data import write_shards
from mpitrain.plan.prepare import open_data
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("runs")
    write_shards(folder / "text", np.random.default_rng(0).integers(0, 30, 400), kind="tokens")
    write(folder, CONFIG, "bert.toml")
    write(folder, T5, "t5.toml")
    return folder, many(folder, (1, "bert.toml", "run.out=bert1"), (2, "bert.toml", "run.out=bert2"),
                        (1, "t5.toml", "run.out=t5"), (2, "t5.toml", "run.out=pp", "mesh.pp=2"),
                        (1, "t5.toml", "run.out=other", "model.source=30"))


def test_masked_training_is_the_same_on_one_and_two_ranks(runs: Any) -> None:
    one, two = (without_times(lines(runs[0] / f"bert{n}")) for n in (1, 2))
    assert one == two and any("accuracy" in line for line in one)


def test_spans_train_an_encoder_and_a_decoder(runs: Any) -> None:
    folder, told = runs
    one, two = ([line["loss"] for line in lines(folder / out)] for out in ("t5", "pp"))
    np.testing.assert_allclose(two, one, rtol=1e-5)
    assert told[-1]["status"] == 65
    assert all(words in told[-1]["message"] for words in ("(16, 40)", "the targets are (9,)")), told[-1]
    saved = load(folder / "t5")
    rows = first_rows(saved, 3)                   # source and answer, not windows of text: what verbs look at the model with
    np.testing.assert_array_equal(rows, open_data(saved.config).sample(3)[0])
    assert rows.shape == (3, 46) and first_rows(saved, 3, tokens=100).shape == (2, 46)
