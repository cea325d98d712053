"""A variational autoencoder in runs: what it draws belongs to a sample and a step, and to no rank."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from runs import lines, many, record, steps, write

CONFIG = '''
[model]
name = "vae"
size = 8
widths = [4]
code = 3
[data]
path = "images.h5"
x = "images"
y = "images"
validation = 0.1
[optimizer]
name = "adamw"
lr = 1e-2
[train]
loss = "elbo"
steps = 6
batch_size = 16
micro_batches = 4
eval_every = 6
reproducible = "layout"
[log]
every = 1
progress_s = 0
'''


def made(folder: Path) -> Path:
    with h5py.File(folder / "images.h5", "w") as file:
        file["images"] = np.random.default_rng(1).uniform(0, 1, (100, 1, 8, 8)).astype(np.float32)
    write(folder, CONFIG)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = made(tmp_path_factory.mktemp("vae"))
    many(folder, (1, "run.toml", "run.out=on1"), (2, "run.toml", "run.out=on2"),
         (1, "run.toml", "run.out=by2", "train.micro_batches=2", "train.steps=1", "train.eval_every=0"))
    return folder


def test_its_images_are_its_targets_and_two_ranks_train_it_to_the_bits_of_one(runs: Path) -> None:
    one, two = (runs / f"on{n}" for n in (1, 2))
    assert record(one)["parameters_sha256"] == record(two)["parameters_sha256"]
    losses = [line["loss"] for line in steps(one)]
    assert losses == [line["loss"] for line in steps(two)] and losses[-1] < losses[0]
    assert losses[0] == pytest.approx(64 * np.log(2), rel=0.05)      # of logits near 0, and a code near its prior
    assert [line["loss"] for line in lines(one) if "split" in line] == [line["loss"] for line in lines(two) if "split" in line]


def test_what_is_drawn_is_each_sample_s_own_and_not_its_place_s_in_a_micro_batch(runs: Path) -> None:
    assert steps(runs / "by2")[0]["loss"] == pytest.approx(steps(runs / "on1")[0]["loss"], rel=1e-6)


@pytest.mark.slow
def test_stages_and_recomputed_blocks_draw_what_one_rank_draws(tmp_path: Path) -> None:
    ways = ((), ("mesh.pp=2",), ("train.recompute=true",), ("run.seed=1",))
    asked = [(2 if "mesh.pp=2" in way else 1, "run.toml", f"run.out=way{i}", *way) for i, way in enumerate(ways)]
    whole, *same, other = (found["parameters_sha256"] for found in many(made(tmp_path), *asked))
    assert same == [whole, whole] and other != whole
