"""A variational autoencoder in runs: what it draws belongs to a sample and a step, and to no rank."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from runs import lines, record, steps, train, write

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


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vae")
    with h5py.File(folder / "images.h5", "w") as file:
        file["images"] = np.random.default_rng(1).uniform(0, 1, (100, 1, 8, 8)).astype(np.float32)
    return write(folder, CONFIG)


def run(n: int, config: Path, name: str, *words: str) -> Path:
    result = train(n, config, f"run.out={name}", *words)
    assert result.rc == 0 and result.error_lines == [], result.out + result.err
    return config.parent / name


def test_its_images_are_its_targets_and_two_ranks_train_it_to_the_bits_of_one(config: Path) -> None:
    one, two = (run(n, config, f"on{n}") for n in (1, 2))
    assert record(one)["parameters_sha256"] == record(two)["parameters_sha256"]
    losses = [line["loss"] for line in steps(one)]
    assert losses == [line["loss"] for line in steps(two)] and losses[-1] < losses[0]
    assert losses[0] == pytest.approx(64 * np.log(2), rel=0.05)      # of logits near 0, and a code near its prior
    assert [line["loss"] for line in lines(one) if "split" in line] == [line["loss"] for line in lines(two) if "split" in line]


def test_what_is_drawn_is_each_sample_s_own_and_not_its_place_s_in_a_micro_batch(config: Path) -> None:
    one, other = (run(1, config, f"by{n}", f"train.micro_batches={n}", "train.steps=1", "train.eval_every=0") for n in (4, 2))
    assert steps(one)[0]["loss"] == pytest.approx(steps(other)[0]["loss"], rel=1e-6)


@pytest.mark.slow
def test_stages_and_recomputed_blocks_draw_what_one_rank_draws(config: Path) -> None:
    expected = record(run(1, config, "whole"))["parameters_sha256"]
    assert record(run(2, config, "stages", "mesh.pp=2"))["parameters_sha256"] == expected
    assert record(run(1, config, "again", "train.recompute=true"))["parameters_sha256"] == expected
    assert record(run(1, config, "other", "run.seed=1"))["parameters_sha256"] != expected
