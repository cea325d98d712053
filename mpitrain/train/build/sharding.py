"""`comm.sharding`: what it asks for, what it refuses by name, and what it says it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpitrain.comm.mesh import Mesh
from mpitrain.errors import ConfigError, MeshError
from mpitrain.placement.stages import Stage
from mpitrain.schedules.grid import REPLICAS
from mpitrain.schedules.pipeline import Schedule
from mpitrain.schedules.pipeline_check import actions_of, splits_backward
from mpitrain.train.build import reproducible


def refuse_sharding(o: Any, mesh: Mesh, stage: Stage, schedule: Schedule, n_micro: int, fewest: int) -> None:
    """ConfigError and MeshError for what cannot be had together with `o.sharding` (of `assembly.Options`).

    `fewest` is the number of rows of the smallest global batch.
    """
    kind, n = o.sharding, mesh.n_places
    if kind == "none":
        return
    refuse_options(o, kind)
    if mesh[REPLICAS].size == 1:
        return
    if kind in ("gradients", "parameters") and len(stage.chunks) > 1 and n_micro % n:
        raise refuse_uneven(kind, "sums gradients of each micro-batch", n_micro, n)
    if kind == "parameters":
        refuse_uneven_steps(stage, schedule, n_micro, n, fewest)


def refuse_options(o: Any, kind: str) -> None:
    """ConfigError naming the key that does not go together with this kind."""
    what = f'comm.sharding = "{kind}"'
    if o.tune_buckets:
        raise ConfigError(f'{what} cuts states where buckets are cut, found comm.bucket_mb = "auto", which cuts them anew; set '
                          "comm.bucket_mb to a number")
    if kind in ("gradients", "parameters") and o.progress != "poll":
        raise ConfigError(f'{what} starts a message for each bucket of each micro-batch from backward itself, found '
                          f'comm.progress = "{o.progress}"; set comm.progress = "poll"')
    if kind in ("gradients", "parameters") and reproducible.is_asked_for(o.reproducible):
        raise ConfigError(f"{what} keeps no sums of single micro-batches, and {reproducible.MODE} adds those of all ranks in one "
                          'tree; set comm.sharding = "optimizer", or train.reproducible = "run"')


def refuse_uneven_steps(stage: Stage, schedule: Schedule, n_micro: int, n: int, fewest: int) -> None:
    """Raises where ranks would run the model's blocks unequally often, or in halves."""
    if n_micro % n:
        raise refuse_uneven("parameters", "puts parameters together for each micro-batch", n_micro, n)
    if fewest < n_micro:
        raise ConfigError('comm.sharding = "parameters" needs a row for each micro-batch on all ranks, and an epoch ends with a '
                          f"batch of {fewest} rows for {n_micro} micro-batches; set data.drop_last = true, or fewer "
                          "train.micro_batches")
    if stage.n_stages > 1 and splits_backward(list(actions_of(schedule, stage.index, stage.n_stages, n_micro // n,
                                                              len(stage.chunks)))):
        raise ConfigError('comm.sharding = "parameters" lets parameters go after a block\'s backward, and this schedule runs '
                          'backward in two halves; set mesh.schedule = "1f1b", or comm.sharding = "gradients"')


def refuse_uneven(kind: str, does: str, n_micro: int, n: int) -> MeshError:
    fits = max(n, n_micro - n_micro % n)
    return MeshError(f'comm.sharding = "{kind}" {does} on all ranks, so each needs as many: found {n_micro} micro-batches for '
                     f"{n} data-parallel ranks; set train.micro_batches to {fits} or {n_micro + -n_micro % n}")


def memory_text(everyone: Sequence[Sequence[int]], kind: str, *, per_node: bool = False) -> str:
    """One line: what the rank that keeps most keeps of parameters, gradients and optimizer state; with one copy `per_node`, its
    share of that."""
    largest = max(everyone, key=sum)
    parts = ", ".join(f"{name} {n / 2**20:,.2f} MiB" for name, n in zip(("parameters", "gradients", "optimizer"), largest))
    return f'comm.sharding = "{kind}"{", one copy per node" if per_node else ""}: a rank keeps {parts}'
