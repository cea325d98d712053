"""Experts on several ranks against the same run on one: losses, norms, evaluation, checkpoints, and what ends a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import meshes
import numpy as np
import pytest

from mpitrain import nn
from mpitrain.errors import ConfigError, MeshError
from mpitrain.nn import Sequential
from mpitrain.train import checkpoint

STEPS = 20
EXACT: dict[str, Any] = {"precision": "float64", "micro_batches": 12, "batch_size": 24}


def make(**changed: Any) -> Sequential:
    """A mixture in each second block; some choices are dropped, the balance is strong."""
    sizes = {"layers": 2, "heads": 2, "width": 8, "experts": 12, "capacity": 1.0, "balance": 0.5, "every": 1}
    return meshes.gpt(**{**sizes, **changed})


def results(ranks: Any, mesh: dict[str, int], steps: int = STEPS, build: Any = make, **options: Any) -> np.ndarray[Any, Any]:
    """Losses, norms before clipping, and the loss and accuracy of the evaluation."""
    with meshes.job(ranks, build, mesh, **EXACT | options) as run:
        run.trainer.update.want_norm = True
        done = [run.trainer.train_step(run.trainer.loader.load(step)) for step in range(steps)]
        metrics = run.trainer.evaluator.run()
        return np.array([*(s.loss for s in done), *(s.grad_norm for s in done), metrics["loss"], metrics["accuracy"]])


def alone(comm: Any, *rest: Any, **options: Any) -> np.ndarray[Any, Any]:
    """The same on one rank, computed by the first and told to all."""
    from mpi4py import MPI
    found = results(MPI.COMM_SELF, {}, *rest, **options) if comm.rank == 0 else None
    return np.asarray(comm.bcast(found))


def every_mesh(n: int) -> list[dict[str, int]]:
    return {2: [{"ep": 2}], 3: [{"ep": 3}], 4: [{"ep": 4}, {"dp": 2, "ep": 2}, {"pp": 2, "ep": 2}, {"ep": 2, "tp": 2}]}.get(n, [])


def test_shared_experts_have_the_losses_norms_and_metrics_of_one_rank(comm: Any) -> None:
    expected = alone(comm) if comm.size in (2, 3, 4) else None
    for mesh in every_mesh(comm.size):
        np.testing.assert_allclose(results(comm, mesh), expected, rtol=1e-9, err_msg=str(mesh))
