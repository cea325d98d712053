"""Samples go to a device as they are stored: runs have the losses of the host, and a step brings up little beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import fakegpu
import h5py
import numpy as np
import pytest
from device_counts import counted
from runs import lines, steps, write
from standing import ON_DEVICE, mpirun, train

from mpitrain import nn
from mpitrain.backend import Device, namespace
from mpitrain.bench.train import adam
from mpitrain.comm.job.start import start
from mpitrain.comm.mesh import Mesh
from mpitrain.config.sections import Config, TrainConfig
from mpitrain.data import Loader, Sampler, Transforms, augmentations
from mpitrain.parallel.pipeline.feed import Feed
from mpitrain.train.build.assembly import assemble
from mpitrain.train.build.inputs import Inputs, open_data

IMAGES = """
[model]
name = "own.py:make"
[data]
path = "images.h5"
transform = ["scale", "standardise"]
augment = ["crop", "flip"]
validation = "tail:0.2"
[optimizer]
name = "adamw"
lr = 3e-3
clip_norm = 1.0
[train]
steps = 7
batch_size = 15
micro_batches = 2
eval_every = 3
[log]
every = 1
progress_s = 0
"""
OWN = """
from mpitrain import nn
from mpitrain.data import TRANSFORMS, Transform
def make(): return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 10))
def brighter(x): return x + 1.0
def noise(x, keys): return x * (keys % 7).reshape(-1, 1, 1, 1).astype(x.dtype)
class Squares(Transform):
    elementwise = True
    def __call__(self, x): return x.astype("float32") ** 2
class Rows(TRANSFORMS["scale"]):
    def __call__(self, x): return x / x.max(axis=(1, 2, 3), keepdims=True)
"""


@pytest.mark.parametrize(("n", "graph"), [(1, "on"), pytest.param(2, "off", marks=pytest.mark.slow)])
def test_a_run_on_bytes_that_a_device_makes_numbers_of_and_augments_has_the_losses_of_the_host(
        tmp_path: Path, n: int, graph: str) -> None:
    """Evaluations too."""
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "images.h5", "w") as file:
        file["x"], file["y"] = rng.integers(0, 256, (60, 3, 16, 16), np.uint8), rng.integers(0, 10, 60).astype(np.uint8)
    (tmp_path / "own.py").write_text(OWN)
    config = write(tmp_path, IMAGES)
    assert train(1, config, "run.out=cpu").rc == 0
    result = mpirun(n, ON_DEVICE, "train", config, "train.device=gpu", f"train.graph={graph}", "run.out=gpu", cwd=tmp_path)
    assert result.rc == 0, result.err
    on_host, on_device = ([line["loss"] for line in lines(tmp_path / name)] for name in ("cpu", "gpu"))
    assert len(on_host) > len(steps(tmp_path / "cpu")) == 7, "no evaluation"
    np.testing.assert_allclose(on_device, on_host, rtol=2e-5)


def opened(folder: Path, kind: str = "images", dtype: str = "uint8", **more: Any) -> Inputs:
    """Images and labels, or tokens, of numbers that such a dtype has, all of them used."""
    rng, limits = np.random.default_rng(1), np.iinfo(dtype)
    with h5py.File(folder / "data.h5", "w") as file:
        if kind == "tokens":
            file["tokens"] = rng.integers(0, 32, 400, dtype)
        else:
            shape = (48, 3, 16, 24) if kind == "images" else (48, 40)
            file["x"] = rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
            file["y"] = rng.integers(0, 10, 48).astype(np.uint8)
    return open_data(folder / "data.h5", validation=0, **more)


@pytest.mark.parametrize(("graph", "kind"), [("off", "images"), ("on", "images"), ("off", "tokens"), ("on", "tokens")])
def test_a_step_brings_up_its_batch_as_it_is_stored_and_little_else(
        tmp_path: Path, graph: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace, "_cupy", lambda: (fakegpu.xp, ""))
    if kind == "tokens":
        model, data = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32)), opened(tmp_path, kind, "uint16", block=8)
        stored = 12 * 8 * 2 * 2
    else:
        model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 24, 10))
        data = opened(tmp_path, transform=["scale", "standardise"], augment=["flip", "crop"])
        stored = 12 * (3 * 16 * 24 + 1)
    config = Config(train=TrainConfig(steps=9, batch_size=12, micro_batches=2, device="gpu", graph=graph))
    mesh = Mesh(start().comm)
    job = assemble(model, data, mesh, loss=nn.LOSSES["cross_entropy"](), optimizer=adam, config=config, quiet=True)
    trainer: Any = job.trainer
    trainer.update.want_norm = False                          # as in steps whose line is not logged
    batches = trainer.ahead(trainer.loader.iterate(0, 9))
    for _ in range(5):
        trainer.train_step(next(batches)[1])
    with counted() as counts:
        trainer.train_step(next(batches)[1])
    trainer.loader.close()
    trainer.pipeline.reducer.close()
    mesh.close()
    assert stored <= counts.up <= stored + 1024
    assert set(counts.syncs) <= {"event"}, "of the copies two steps ago, and of the loss of the step before"
    assert kind == "tokens" or counts.launches["rows_of_bytes_float32"] == 2  # a micro-batch has one


SCALED, MOVED = ["scale", "standardise"], ["flip", "crop"]
CASES = [("bytes", "images", "uint8", SCALED, MOVED), ("bytes", "images", "uint8", [], ["crop", "flip", "flip"]),
         ("bytes", "images", "int8", ["standardise", "own.py:Squares"], ["crop"]),
         ("bytes", "rows", "uint8", ["standardise"], []),
         ("bytes", "rows", "uint8", ["scale"], []), ("bytes", "rows", "uint8", [], []),
         ("bytes", "images", "uint16", ["standardise"], ["flip"]), ("floats", "images", "int32", ["standardise"], ["flip"]),
         ("floats", "images", "uint8", ["own.py:brighter"], MOVED), ("floats", "images", "uint8", ["own.py:Rows"], ["crop"]),
         ("host", "images", "uint8", SCALED, ["flip", "own.py:noise"]), ("host", "images", "uint8", SCALED, ["crop", "crop"]),
         ("host", "images", "uint8", ["own.py:Rows"], [])]


@pytest.mark.parametrize(("up", "kind", "dtype", "transform", "augment"), CASES)
def test_what_a_device_makes_of_stored_rows_has_the_bits_of_the_host(
        tmp_path: Path, up: str, kind: str, dtype: str, transform: list[str], augment: list[str]) -> None:
    """And is the host's rounded, where activations have 16 bits."""
    (tmp_path / "own.py").write_text(OWN)
    data = opened(tmp_path, kind, dtype)
    data = replace(data, transforms=Transforms(transform, tmp_path), augment=augmentations(augment, tmp_path))
    data.transforms.fit(data.training, data.train_rows)
    here, device = data.as_stored(), Device("gpu", fakegpu.xp)
    sampler = Sampler(data.train_rows, 20, seed=5)
    for step in (0, 3):
        found, wanted = (Loader(one.training, sampler, 3, 1, 3, transforms=one.transforms, augment=one.augment,
                                workers=0).load(step) for one in (here, data))
        for micro, right in zip(found, wanted, strict=True):
            assert ("host" if isinstance(micro.x, np.ndarray) else "floats" if micro.x.table is None else "bytes") == up
            assert (micro.y == right.y).all()
            for number, compute in (("float32", "float32"), ("float64", "float64"), ("float32", "float16")):
                made = Feed(device, number, compute=np.dtype(compute)).tensors(micro.x).array
                expected = Feed(namespace.CPU, number).tensors(right.x).array.astype(compute)
                assert made.dtype == compute and made.get().tobytes() == expected.tobytes()
