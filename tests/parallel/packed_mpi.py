"""Slices that travel as few bits, on real ranks: against rounding and sums written anew here, and against runs of float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import meshes
import numpy as np
import pytest
from meshes import gpt, nodes

from mpitrain import nn
from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.messages.meter import metered
from mpitrain.parallel.compress.compressor import make_compressor
from mpitrain.parallel.compress.slices import CompressedSlices
from mpitrain.placement.buckets import plan_buckets
from mpitrain.placement.shards import Shards
from mpitrain.train.build.assembly import Job

KINDS = ("optimizer", "gradients", "parameters")
PACKED = {"compress_parameters": "int8", "compress_force": True, "bucket_bytes": 6000, "clip_norm": 0.5}
Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def several(comm: Any) -> None:
    if comm.size == 1:
        pytest.skip("one rank has nobody to share with")


def rounded(x: Array, most: int = 127) -> Array:
    """One parameter's elements in blocks of 256, each of them -most .. most times the block's largest size over that."""
    found = np.empty_like(x)
    for start in range(0, len(x), 256):
        block = x[start:start + 256]
        scale = np.float32(np.abs(block).max() / np.float32(most))
        inverse = np.float32(0) if scale < 2.0 ** -100 else np.float32(1) / scale
        found[start:start + 256] = np.rint(block * inverse).astype(np.float32) * scale
    return found


def wide() -> nn.Sequential:
    """Parameters that several ranks have parts of."""
    return nn.Sequential(nn.Linear(20, 150), nn.ReLU(), nn.Linear(150, 90), nn.ReLU(), nn.Linear(90, 10))


def masters(comm: Any, job: Job) -> Array:
    """The owners' float32 values of all parameters, on every rank, in the layout's order."""
    update: Any = job.trainer.update
    whole = np.zeros(update.layout.size, np.float32)
    for unit in update.shards.units:
        whole[unit.own] = update.shards.values[unit.shard]
    found = np.empty_like(whole)
    comm.Allreduce(whole, found)
    return found


def run(comm: Any, make: Callable[[], nn.Sequential], kind: str, count: int = 3, **options: Any) -> list[float]:
    """Losses and norms of some steps; then all ranks compute with the rounded values of the owners."""
    with meshes.job(comm, make, {}, sharding=kind, **{**PACKED, **options}) as job:
        found = []
        posted = metered(job.trainer.update.ranks, list(range(comm.size)))
        job.trainer.update.packed.sent_bytes = 0
        for step in range(count):
            job.trainer.update.want_norm = True
            result = job.trainer.train_step(job.trainer.loader.load(step))
            found += [result.loss, result.grad_norm]
        update, values = job.trainer.update, masters(comm, job)
        assert posted.sent == update.packed.sent_bytes
        if kind != "parameters":
            assert len(set(comm.allgather(update.values.tobytes()))) == 1
            for s in update.layout.segments:
                np.testing.assert_array_equal(update.values[s.start:s.stop], rounded(values[s.start:s.stop]))
            assert any((update.values[s.start:s.stop] != values[s.start:s.stop]).any() for s in update.layout.segments)
        assert job.state.hashes() == comm.bcast(job.state.hashes())
        return found


@pytest.mark.parametrize("make", [gpt, wide], ids=["gpt", "mlp"])
def test_everybody_computes_with_what_owners_send_and_owners_keep_float32(comm: Any, make: Callable[[], nn.Sequential]) -> None:
    """All three kinds with the bits of each other where gradients are summed in one order; and close to float32."""
    each = {"micro_batches": comm.size, "batch_size": 4 * comm.size}
    whole = meshes.losses(comm, make, {}, 3, bucket_bytes=6000, **each)
    first = run(comm, make, KINDS[0], **each)
    np.testing.assert_allclose(first[::2], whole, rtol=0.02)
    assert first[::2] != whole
    second, third = (run(comm, make, kind, **each) for kind in KINDS[1:])
    assert second == third
    np.testing.assert_allclose(second, first, rtol=1e-4)


def test_rounding_does_not_add_up_over_steps(comm: Any) -> None:
    """Owners' own values take updates that are far below a step of the rounding."""
    options = {"rate": 1e-5, "clip_norm": 0.0, "micro_batches": comm.size, "batch_size": 4 * comm.size}
    with meshes.job(comm, wide, {}, sharding="optimizer", **{**PACKED, **options}) as job:
        before = masters(comm, job)
        meshes.step_losses(job, 8)
        moved = np.abs(masters(comm, job) - before)
        rate = 1e-5 * 8
        assert 0.2 * rate < moved[before != 0].mean() < 2 * rate


def test_nodes_with_a_copy_each_give_each_other_few_bits(comm: Any) -> None:
    """The second copy of ZeRO++, on the node: nothing is gathered inside, and between nodes int8 travels."""
    if comm.size < 4:
        pytest.skip("two nodes of two ranks")
    each = {"micro_batches": comm.size, "batch_size": 4 * comm.size, "compress_force": False}
    plain = run_on_nodes(comm, "", **each)
    for kind in KINDS[:2]:
        found = run_on_nodes(comm, kind, **each)
        np.testing.assert_allclose(found, plain, rtol=0.02)
        assert found != plain


def test_both_halves_are_packed_between_nodes_without_being_forced(comm: Any) -> None:
    if comm.size < 4:
        pytest.skip("two nodes of two ranks")
    options = {**PACKED, "compress_force": False, "compress": "int4", "sharding": "optimizer", "micro_batches": comm.size}
    with nodes(comm, 2), meshes.job(comm, wide, {}, **options) as job:
        found = meshes.step_losses(job, 3)
        update: Any = job.trainer.update
        assert update.packed is not None and update.compressed.flat.keys() == {"error"}
        assert len(set(comm.allgather(update.values.tobytes()))) == 1
    plain = meshes.losses(comm, wide, {}, 3, bucket_bytes=6000, micro_batches=comm.size)
    np.testing.assert_allclose(found, plain, rtol=0.02)


def run_on_nodes(comm: Any, kind: str, **options: Any) -> list[float]:
    packed = {**PACKED, **options, "compress_parameters": "int8" if kind else ""}
    with nodes(comm, 2), meshes.job(comm, wide, {}, sharding=kind or "gradients", node_shared=True, **packed) as job:
        found = meshes.step_losses(job, 4)
        update: Any = job.trainer.update
        assert len(set(comm.allgather(update.values.tobytes()))) == 1
        if kind:
            values = masters(comm, job)
            for s in update.layout.segments:
                np.testing.assert_array_equal(update.values[s.start:s.stop], rounded(values[s.start:s.stop]))
            assert 3.5 < update.packed.dense_bytes / update.packed.sent_bytes < 4
        return found


@pytest.mark.parametrize(("text", "most"), [("int8", 127), ("int4", 7)])
def test_owners_add_up_what_was_sent_in_float32_in_the_order_of_the_ranks(comm: Any, text: str, most: int) -> None:
    channel, model = Channel(comm.Dup(), "test"), nn.Sequential(nn.Linear(37, 150), nn.Linear(150, 90))
    layout = model.initialize(seed=3, dtype="float32")
    shards = Shards(layout, comm.rank, comm.size, bucket_bytes=20_000, cuts=[len(layout.segments)], whole=False)
    buckets = plan_buckets(layout.segments, layout.size, 5000, [len(layout.segments)])
    summed = CompressedSlices(channel, shards, make_compressor(text), step=lambda: 0)
    summed.open(buckets)
    given = [np.random.default_rng([7, k]).standard_normal(layout.size).astype(np.float32) for k in range(comm.size)]
    expected = np.zeros(layout.size, np.float32)
    for k, contribution in enumerate(given):
        for s in layout.segments:
            part = rounded(contribution[s.start:s.stop], most)
            expected[s.start:s.stop] = part if k == 0 else expected[s.start:s.stop] + part
    arena, sent = given[comm.rank].copy(), summed.meter.sent
    for bucket in buckets:
        summed.prepare(bucket, [arena[bucket.start:bucket.stop]]).run()
        for part in shards.units[bucket.index].parts:
            at = part.start - shards.units[bucket.index].at + shards.units[bucket.index].own.start
            np.testing.assert_array_equal(arena[at:at + part.stop - part.start], expected[at:at + part.stop - part.start])
    assert summed.meter.sent - sent == summed.coded_bytes
    assert (3.5 if text == "int8" else 6.8) < summed.dense_bytes / summed.coded_bytes < (4 if text == "int8" else 8)
    arena = given[comm.rank].copy()
    arena[layout.segments[0].start + 3] = np.nan if comm.rank == comm.size - 1 else 1.0
    last = next(bucket for bucket in buckets if bucket.start <= layout.segments[0].start < bucket.stop)
    summed.prepare(last, [arena[last.start:last.stop]]).run()
    unit = shards.units[last.index]
    if unit.own.start <= layout.segments[0].start < unit.own.stop:
        assert np.isnan(arena[layout.segments[0].start])
    channel.close()
