"""Runs whose masks stay: products by blocks alone, in training and in inference, with the bits of dense ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import ok, record, write
from standing import mpirun, train

import mpitrain
from mpitrain.checkpoint import store
from mpitrain.kernels.product import is_fast
from mpitrain.nn.sparse import SparseLinear
from mpitrain.plan.inspect import inspect

KEYS = ("train.reproducible=layout", "train.micro_batches=4", "optimizer.schedule=constant", "optimizer.name=adamw",
        "optimizer.clip_norm=0", "train.steps=10", "train.eval_every=10", "model.hidden=[512,256]", "shrink.prune=block",
        "shrink.pattern=16x1", "shrink.sparsity=0.8", "shrink.begin=2", "shrink.end=5", "shrink.every=2", "shrink.skip=head",
        "checkpoint.every=6", "checkpoint.keep=9")
SAID = "products by what is left of linear1, in blocks"         # linear0 is too small


def bits(run: Path) -> tuple[Any, ...]:
    about = record(run)
    return about["parameters_sha256"], about["pruned"]["masks_sha256"], about["metrics"]["loss"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("blocks")
    assert SAID in ok(train(1, write(made), *KEYS, "run.out=one")).out
    return made


def test_weights_are_those_of_dense_products(folder: Path) -> None:
    dense = ok(train(1, folder / "run.toml", *KEYS, "run.out=dense", "shrink.products=dense"))
    assert SAID not in dense.out and bits(folder / "dense") == bits(folder / "one")
    moments = [store.latest(folder / f"{run}/checkpoints").read("optimizer/m/linear1.weight") for run in ("dense", "one")]
    kept = store.latest(folder / "one/checkpoints").read("parameters/linear1.weight") != 0
    assert np.array_equal(moments[0][kept], moments[1][kept])
    assert np.abs(moments[1][~kept]).max() < np.abs(moments[0][~kept]).max()      # no gradient where weights are pruned


@pytest.mark.parametrize(("ranks", "options"), [
    (2, ("mesh.pp=2", "mesh.schedule=zb_h1")),
    pytest.param(2, (), marks=pytest.mark.slow),
    pytest.param(2, ("mesh.pp=2", "mesh.schedule=1f1b"), marks=pytest.mark.slow),
    pytest.param(2, ("comm.sharding=optimizer",), marks=pytest.mark.slow),
    pytest.param(2, ("comm.node_shared=true",), marks=pytest.mark.slow),
    pytest.param(4, ("mesh.pp=2",), marks=pytest.mark.slow)])
def test_other_ranks_have_the_same_bits(folder: Path, ranks: int, options: tuple[str, ...]) -> None:
    out = "-".join(options).replace(".", "").replace("=", "") or f"dp{ranks}"
    ok(train(ranks, folder / "run.toml", *KEYS, f"run.out={out}", *options))
    assert bits(folder / out) == bits(folder / "one")


@pytest.mark.slow
@pytest.mark.parametrize("options", [("comm.sharding=parameters",), ("comm.sharding=gradients",), ("mesh.tp=2",
                                     'mesh.plan={linear0="column", linear1="row"}')])
def test_slices_and_cut_layers_train_near_them(folder: Path, options: tuple[str, ...]) -> None:
    """Where bits are those of other sums, the run is still the same one but for rounding; it goes on on one rank."""
    out = options[0].replace(".", "").replace("=", "")
    ok(train(2, folder / "run.toml", *KEYS, "train.reproducible=run", f"run.out={out}", *options))
    assert record(folder / out)["metrics"]["loss"] == pytest.approx(record(folder / "one")["metrics"]["loss"], rel=1e-3)
    shutil.rmtree(folder / out / "checkpoints/step-00000010")
    ok(train(1, folder / "run.toml", *KEYS, "train.reproducible=run", f"run.out={out}", "--resume"))
    found = store.latest(folder / out / "checkpoints")
    assert (found.read("parameters/linear1.weight") == 0).mean() == pytest.approx(0.8, abs=1e-3)


def test_a_run_goes_on_with_the_blocks_of_its_checkpoint(folder: Path) -> None:
    shutil.copytree(folder / "one", folder / "again")
    shutil.rmtree(folder / "again/checkpoints/step-00000010")
    assert SAID in ok(train(2, folder / "run.toml", *KEYS, "run.out=again", "--resume")).out
    assert bits(folder / "again") == bits(folder / "one")


@pytest.mark.skipif(not is_fast(), reason="needs C and AVX-512, where dense products are ours")
def test_what_is_predicted_has_the_bits_of_dense_products(folder: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 17, (70, 1, 8, 8)).astype(np.uint8)
    np.savez(folder / "rows.npz", x=rows)
    for out, options in (("sparse", ()), ("dense", ("shrink.products=dense",))):
        done = mpirun(1, "-m", "mpitrain", "predict", "one", "rows.npz", "--out", f"{out}.npz", *options, cwd=folder)
        assert done.rc == 0, done.err
    found = {out: np.load(folder / f"{out}.npz")["predictions"] for out in ("sparse", "dense")}
    assert np.array_equal(found["sparse"][:64], found["dense"][:64])
    model = mpitrain.load(folder / "one")
    assert np.array_equal(model.predict(rows), found["sparse"])
    layer = dict(model.model.named_modules())["linear1"]
    assert type(layer) is SparseLinear and layer.form == "blocks"
    dense = mpitrain.load(folder / "one", overrides=["shrink.products=dense"])
    assert np.array_equal(dense.predict(rows), found["dense"])
    assert type(dict(dense.model.named_modules())["linear1"]) is not SparseLinear


def test_inspect_says_which_layers_are_sparse_and_their_bytes(folder: Path) -> None:
    line, = (line for line in inspect(folder / "one", []) if line.split()[0] == "linear1.weight" and "zeros" not in line
             and "%" in line)
    assert "blocks, " in line and "of 524,288 bytes" in line


@pytest.mark.parametrize("options", [
    ("optimizer.name=asgd", "optimizer.t0=3", "comm.node_shared=true"),
    pytest.param(("optimizer.name=asgd", "optimizer.t0=3", 'optimizer.groups=[{params=["linear*"], lr=0.5}]'),
                 marks=pytest.mark.slow),
    pytest.param(("optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.weight_decay=0.1"), marks=pytest.mark.slow),
    pytest.param(("optimizer.name=adamw", "optimizer.weight_decay=0.5", "train.precision=bfloat16"), marks=pytest.mark.slow),
    pytest.param(("optimizer.name=lamb", "comm.sharding=none"), marks=pytest.mark.slow),
    pytest.param(("optimizer.name=muon",), marks=pytest.mark.slow),
    pytest.param(("optimizer.name=lion", "comm.sharding=gradients"), marks=pytest.mark.slow)])
def test_pruned_weights_are_zero_in_the_end_whatever_updates_them(folder: Path, options: tuple[str, ...]) -> None:
    """In the parameters, in means of them, and in what is handed over."""
    out = "-".join(options).replace(".", "").replace("=", "")[:60].strip("[{ ")
    ok(train(2, folder / "run.toml", *KEYS, "train.reproducible=run", f"run.out={out}", *options))
    found = store.latest(folder / out / "checkpoints")
    done = mpirun(1, "-m", "mpitrain", "export", out, f"{out}.safetensors", cwd=folder)
    assert done.rc == 0, done.err
    handed_over = read(folder / f"{out}.safetensors")
    for layer in ("linear0.weight", "linear1.weight"):        # the first has gradients of its pruned weights
        pruned = unpacked(found, layer) == 0
        assert pruned.mean() == pytest.approx(0.8, abs=1e-3) and not handed_over[layer][pruned].any()
        kinds = [name for name in found.arrays if name in (f"parameters/{layer}", f"optimizer/average/{layer}")]
        assert len(kinds) == 1 + ("asgd" in options[0])
        for name in kinds:
            w = found.read(name)
            assert not w[pruned].any() and (w[~pruned] != 0).mean() > 0.99, name


def unpacked(found: Any, name: str) -> np.ndarray:
    shape = found.arrays[f"parameters/{name}"].shape
    return np.unpackbits(found.read(f"mask/{name}"), count=int(np.prod(shape)), bitorder="little").reshape(shape)


def read(path: Path) -> dict[str, np.ndarray]:
    """float32 arrays of a safetensors file, by its header."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, about in json.loads(data[8:start]).items():
        if about.get("dtype") == "F32":
            first, stop = about["data_offsets"]
            found[name] = np.frombuffer(data[start + first:start + stop], "<f4").reshape(about["shape"])
    return found
