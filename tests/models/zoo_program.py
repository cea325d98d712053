"""mpirun -n 2 python zoo_program.py '[{"model": ...}]' run,layout: tiny models, trained in several ways; see `zoo`."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configs import flat  # noqa: E402

from mpitrain import data, nn, optim  # noqa: E402
from mpitrain.bench.train import Memory  # noqa: E402
from mpitrain.checkpoint import store  # noqa: E402
from mpitrain.comm.mesh import Mesh  # noqa: E402
from mpitrain.models import MODELS  # noqa: E402
from mpitrain.train.build.assembly import assemble  # noqa: E402
from mpitrain.train.build.inputs import Inputs  # noqa: E402
from mpitrain.train.build.model import keep_inputs_only  # noqa: E402
from mpitrain.train.machine import threads  # noqa: E402

STEPS, MICRO_BATCHES = 2, 2


def samples(case: dict[str, Any], rows: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(3)
    shape = (rows, *case["x"])
    x = rng.integers(0, case["tokens"], shape) if case["tokens"] else rng.standard_normal(shape, dtype=np.float32)
    target = (rows, *(case["target"] or ()))
    if case["target"] is None or case["kind"] == "tokens":
        return x, rng.integers(0, case["classes"], target)
    return x, rng.standard_normal(target, dtype=np.float32)


def train(comm: Any, case: dict[str, Any], *, pp: int = 1, tp: int = 1, recompute: bool = False, first: int = 0,
          steps: int = STEPS, folder: str = "", **options: Any) -> tuple[list[float], Any]:
    """(losses, hashes) of some steps on the ranks of `comm`; `folder` gets a checkpoint, or has that of step `first`."""
    x, y = samples(case, STEPS * case["batch"])
    source = Memory(x, y, case["kind"])
    model = MODELS[case["model"]](**case["arguments"])
    if recompute:
        keep_inputs_only(model, True)
    mesh = Mesh(comm, pp=pp, tp=tp)
    inputs = Inputs(source, range(len(x)), None, range(0), data.Transforms())
    asked = {"micro_batches": MICRO_BATCHES, **case["settings"], **options}
    job = assemble(model, inputs, mesh, loss=nn.LOSSES[case["loss"]](), quiet=True,
                   optimizer=lambda storage: optim.SGD(storage, lr=case["lr"], momentum=0.9),
                   config=flat(steps=first + steps, batch_size=case["batch"], **asked))
    trainer: Any = job.trainer
    if first:
        job.resume(store.latest(Path(folder), job.channel))
    hashes = job.state.hashes()
    losses = [trainer.train_step(batch).loss for _, batch in trainer.loader.iterate(first, first + steps)]
    if folder and not first:
        store.save(Path(folder), steps, job.state.pieces(), {}, job.channel)
    hashes = hashes if first else job.state.hashes()
    trainer.loader.close()
    trainer.pipeline.reducer.close()
    mesh.close()
    return losses, hashes


def check(case: dict[str, Any], modes: list[str]) -> None:
    world, alone = MPI.COMM_WORLD, MPI.COMM_SELF
    ways: dict[str, dict[str, Any]] = {"dp = 2": {}, "pp = 2": {"pp": 2}}
    for mode in modes:
        one, again = world.allgather(train(alone, case, recompute=world.rank == 1, reproducible=mode))    # Both at a time.
        assert all(map(np.isfinite, one[0])) and one[0][0] != one[0][1], (case["model"], one)
        assert again == one, f"{case['model']}, {mode}: recomputed {again}, else {one}"
        for name, keys in ways.items():
            found = train(world, case, reproducible=mode, **keys)
            np.testing.assert_allclose(found[0], one[0], rtol=1e-5, err_msg=f"{case['model']}, {mode}, {name}")
            assert mode == "run" or found == one, f"{case['model']}, layout mode, {name}: {found} on one rank {one}"
    if case["tp"]:                                            # which layout mode refuses
        check_cut(case)
    if world.rank == 0:
        print(f"same: {case['model']}", flush=True)


def check_cut(case: dict[str, Any]) -> None:
    """Two steps on tp = 2, and one that goes on from their checkpoint on one rank, are three steps on one rank."""
    world, alone = MPI.COMM_WORLD, MPI.COMM_SELF
    with tempfile.TemporaryDirectory() as own:
        folder = world.bcast(own)
        cut, saved = train(world, case, tp=2, folder=folder)
        again, read = train(alone, case, first=STEPS, steps=1, folder=folder)
        assert read["parameters_sha256"] == saved["parameters_sha256"], f"{case['model']}: a checkpoint of tp = 2 on one rank"
        one = train(alone, case, steps=STEPS + 1)[0]
        np.testing.assert_allclose(cut + again, one, rtol=1e-5, err_msg=f"{case['model']}, tp = 2, then one rank")
        world.barrier()


if __name__ == "__main__":
    threads.pin(1)
    for each in json.loads(sys.argv[1]):
        check(each, sys.argv[2].split(","))
