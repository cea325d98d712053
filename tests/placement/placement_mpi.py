"""What a placement says of any rank, worked out elsewhere from numbers alone, against what that rank really holds in a run."""

from __future__ import annotations

from functools import partial
from typing import Any

import meshes
import numpy as np
import pytest

from mpitrain.config import CommConfig, MeshConfig, TrainConfig
from mpitrain.nn import Sequential
from mpitrain.placement.place import Placement, place
from mpitrain.placement.shard_cuts import needs_whole_parameters
from mpitrain.schedules.grid import AXES, Grid
from mpitrain.train.build.assembly import Job

BUCKET = 6000                                                 # bytes
Case = tuple[Any, dict[str, int], dict[str, Any]]             # model, mesh, options

experts = partial(meshes.gpt, heads=2, experts=4)
CASES: dict[int, list[Case]] = {
    1: [(meshes.gpt, {}, {}), (meshes.mlp, {}, {"reproducible": "layout"})],
    2: [(meshes.gpt, {"pp": 2}, {}), (meshes.gpt, {"tp": 2}, {"sequence": True}), (meshes.gpt, {"cp": 2}, {}),
        (meshes.gpt, {}, {"sharding": "optimizer"}), (meshes.mlp, {}, {"sharding": "gradients"}),
        (meshes.gpt, {}, {"sharding": "parameters"}), (experts, {"ep": 2}, {}),
        (partial(meshes.gpt, layers=4), {"pp": 2}, {"chunks": 2, "schedule": "interleaved", "micro_batches": 8}),
        (meshes.gpt, {"pp": 2}, {"stages": (1, 4)}), (meshes.mlp, {}, {"reproducible": "layout", "micro_batches": 3})],
    3: [(meshes.gpt, {"pp": 3}, {}), (meshes.gpt, {"tp": 3}, {}),
        (meshes.mlp, {}, {"sharding": "parameters", "micro_batches": 6}),
        (meshes.gpt, {}, {"sharding": "optimizer", "micro_batches": 5})],
    4: [(meshes.gpt, {"pp": 2, "tp": 2}, {}), (meshes.gpt, {"cp": 2, "tp": 2}, {"sequence": True}),
        (experts, {"ep": 2, "tp": 2}, {}), (experts, {"pp": 2, "ep": 2}, {}), (meshes.gpt, {"pp": 2}, {"sharding": "gradients"}),
        (meshes.gpt, {"tp": 2}, {"sharding": "parameters"}), (meshes.gpt, {"cp": 2}, {"sharding": "parameters"})]}


def numbers(model: Sequential, micro_batches: Any, shards: Any, buckets: Any, part: Any) -> dict[str, Any]:
    """What can be compared, as lists and numbers."""
    sample = np.arange(2 * meshes.LENGTH).reshape(2, -1)
    return {"parameters": [[name, list(p.shape), list(p.offset), sorted(p.placement)] for name, p in model.named_parameters()],
            "micro-batches": list(micro_batches), "positions": (sample if part is None else part(sample)).tolist(),
            "buckets": [[b.name, b.start, b.stop] for b in buckets],
            "slices": [[s.name, s.start, s.stop, s.first] for s in shards.segments]}


def held(job: Job) -> dict[str, Any]:
    """Of this rank: the shapes are those of its arrays, the bytes those of its memory."""
    model, loader, optimizer = job.state.model, job.trainer.loader, job.state.optimizer
    assert optimizer is not None
    for _, p in model.named_parameters():
        assert not p.allocated or p.array.shape == p.shape
    found = numbers(model, (loader.micro.start, loader.micro.stop), optimizer.storage, job.trainer.pipeline.reducer.buckets,
                    job.trainer.pipeline.feed.part)
    return {**found, "bytes": list(job.trainer.update.measured())}


def expected(p: Placement, job: Job) -> dict[str, Any]:
    layout = p.layout()
    whole = needs_whole_parameters(type(job.state.optimizer))
    shards = layout if p.kind == "none" else p.shards(layout, whole=whole)
    found = numbers(p.stage.model, p.own_micro_batches, shards, p.buckets(layout), p.part)
    itemsize, own = layout.dtype.itemsize, shards.size * layout.dtype.itemsize
    cut = ("none", "optimizer", "gradients", "parameters").index(p.kind)
    return {**found, "bytes": [own if cut >= 3 else layout.size * itemsize, own if cut >= 2 else layout.size * itemsize, 2 * own]}


def grid_of(rank: int, lengths: dict[str, int]) -> Grid:
    sizes = [lengths[axis] for axis in AXES]
    return Grid(lengths, dict(zip(AXES, map(int, np.unravel_index(rank, sizes)))))


@pytest.mark.parametrize("case", range(max(map(len, CASES.values()))))
def test_a_rank_holds_what_its_placement_says_elsewhere(comm: Any, case: int) -> None:
    if case >= len(CASES.get(comm.size, ())):
        pytest.skip("fewer cases for so many ranks")
    make, mesh, options = CASES[comm.size][case]
    told = {"micro_batches": 4, "bucket_bytes": BUCKET, **options}
    with meshes.job(comm, make, mesh, **told) as job:
        lengths, neighbour = job.context.mesh.lengths, (comm.rank + 1) % comm.size
        p = place(make(), grid_of(neighbour, lengths),
                  MeshConfig(**{key: told[key] for key in ("chunks", "stages", "sequence") if key in told}),
                  TrainConfig(batch_size=meshes.BATCH, micro_batches=told["micro_batches"],
                              reproducible=told.get("reproducible", "run")),
                  CommConfig(bucket_mb=BUCKET / 2**20, sharding=told.get("sharding", "none")))
        everyone = job.channel.gather_objects(held(job))
        found = expected(p, job)
        for key, value in found.items():
            assert value == everyone[neighbour][key], f"{key} of rank {neighbour}"
        whole = {name: np.zeros(leaf.shape, bool) for name, leaf in make().named_parameters()}
        for rank in range(comm.size):                         # together the ranks have all of the model
            model = place(make(), grid_of(rank, lengths), p.mesh, p.train, p.comm).stage.model
            for name, leaf in model.named_parameters():
                for own, start in leaf.boxes():
                    whole[leaf.twin_of or name][tuple(slice(a, a + s.stop - s.start) for a, s in zip(start, own))] = True
        assert all(np.all(there) for there in whole.values())
