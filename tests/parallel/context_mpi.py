"""Samples whose positions are cut over the ranks that run this: attention, losses and checkpoints, against one rank with all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import meshes
import numpy as np
import pytest
from fakegpu import put

from mpitrain import data, nn, ops
from mpitrain.autograd import Tensor
from mpitrain.backend import asnumpy, random
from mpitrain.bench.train import Memory
from mpitrain.checkpoint import store
from mpitrain.comm.mesh import Mesh
from mpitrain.errors import MeshError
from mpitrain.nn import Sequential
from mpitrain.parallel.layers import ring_attention as module
from mpitrain.parallel.layers.ring_attention import Ring, ring_attention
from mpitrain.parallel.pipeline.nonfinite import origin_of
from mpitrain.placement import zigzag
from mpitrain.train.build.inputs import Inputs

BLOCK = 24                                                       # 2 x 2, 2 x 3 and 2 x 4 chunks
Make = Callable[[], Sequential]


CASES: list[tuple[int, int, int, int, bool, float]] = [           # positions of a chunk, batch, heads, width, causal, dropout
    (1, 1, 1, 1, True, 0.0), (1, 3, 2, 5, False, 0.3), (2, 2, 3, 4, True, 0.3), (3, 1, 2, 8, False, 0.0),
    (70, 2, 4, 9, True, 0.0), (33, 2, 1, 16, True, 0.5)]


@pytest.mark.parametrize(("here", "cases"), [(np.array, CASES), (put, CASES[:4])], ids=["host", "device"])
def test_ring_attention_is_that_of_one_rank(comm: Any, here: Any, cases: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradient, to 1e-12, down to chunks of one position; dropped are the weights that one rank drops."""
    n, rng = comm.size, np.random.default_rng(11)
    mesh = Mesh(comm, cp=n)
    ring = Ring(mesh.link("cp", "test"))
    monkeypatch.setattr(module, "AT_ONCE", 1000)                 # several pieces in some cases
    for size, batch, heads, width, causal, dropout in cases:
        length = 2 * n * size
        qkv, grad = rng.standard_normal((batch, length, 3 * heads * width)), rng.standard_normal((batch, length, heads * width))
        qkv[:, :, :2 * heads * width] *= 6                       # scores far apart
        known: dict[str, Any] = {"causal": causal, "dropout": dropout, "layer": "a", "part": 1}
        rows = np.arange(40, 40 + batch, dtype=np.uint64)
        whole = Tensor(qkv, requires_grad=True)
        with random.use(random.Scope(3, 5, rows)):
            expected = ops.self_attention(whole, heads, **known)
        expected.backward(grad)
        mine = zigzag.positions(2 * size, mesh.coordinate("cp"), n)
        x = Tensor(here(qkv[:, mine]), requires_grad=True)
        with random.use(random.Scope(3, 5, rows)):
            found = ring_attention(x, heads, ring=ring, **known)
        found.backward(here(grad[:, mine]))
        for a, b in ((found.array, expected.array), (x.grad, whole.grad)):
            np.testing.assert_allclose(asnumpy(a), b[:, mine], rtol=1e-12, atol=1e-12 * np.abs(b).max())
    mesh.close()


def alone(comm: Any, make: Make, steps: int, **options: Any) -> np.ndarray[Any, Any]:
    """The losses on one rank, computed by the first and told to all."""
    found = None
    if comm.rank == 0:
        from mpi4py import MPI
        found = results(MPI.COMM_SELF, make, {}, steps, **options)
    return np.array(comm.bcast(found))


def results(comm: Any, make: Make, mesh: dict[str, int], steps: int, **options: Any) -> list[float]:
    """Losses, norms of gradients, and validation metrics."""
    options = {"precision": "float64", "loss": nn.LOSSES["cross_entropy"](label_smoothing=0.1, ignore_index=3), **options}
    with meshes.job(comm, make, mesh, **options) as run:
        run.trainer.update.want_norm = True
        done = [run.trainer.train_step(run.trainer.loader.load(step)) for step in range(steps)]
        metrics = run.trainer.evaluator.run()
        return [*(s.loss for s in done), *(s.grad_norm for s in done), metrics["loss"], metrics["accuracy"]]


def runs(n: int) -> list[tuple[dict[str, int], dict[str, Any]]]:
    """Meshes with a cp axis, and options to have with them."""
    return {1: [],
            2: [({"cp": 2}, {}), ({"cp": 2}, {"sharding": "parameters"}), ({"cp": 2}, {"node_shared": True})],
            3: [({"cp": 3}, {"sharding": "gradients"})],
            4: [({"cp": 4}, {}), ({"pp": 2, "cp": 2}, {"schedule": "zb_h1"}), ({"dp": 2, "cp": 2}, {"sharding": "optimizer"}),
                ({"cp": 2, "tp": 2}, {"sequence": True}), ({"cp": 2, "tp": 2}, {})]}[n]


def test_every_mesh_has_the_losses_of_one_rank(comm: Any) -> None:
    """Also norms, evaluation, ignored labels, and dropout everywhere, with blocks that are computed again in backward."""
    def make() -> Sequential:
        model = meshes.gpt(block=BLOCK, width=48)
        model.recompute = frozenset({"block0"})
        return model

    expected = alone(comm, make, 4)
    for mesh, options in runs(comm.size):
        np.testing.assert_allclose(results(comm, make, mesh, 4, **options), expected, rtol=1e-9, err_msg=f"{mesh} {options}")


def test_rotary_embeddings_turn_by_the_positions_of_the_whole_sample(comm: Any) -> None:
    def turning(rope: float | None = 100.0) -> Sequential:
        embed = nn.Embedding(26, 24)
        embed.block = BLOCK
        return nn.Sequential(("embed", embed), ("attention", nn.MultiHeadAttention(24, 4, causal=True, rope=rope)),
                             ("head", nn.Linear(24, 26)))

    expected = alone(comm, turning, 3)
    np.testing.assert_allclose(results(comm, turning, {"cp": comm.size}, 3), expected, rtol=1e-9)
    assert np.abs(alone(comm, partial(turning, None), 3) / expected - 1).max() > 1e-4


def test_a_checkpoint_goes_on_with_other_meshes(comm: Any, mpi_tmp_path: Path) -> None:
    """Saved once, whole: each rank has all parameters; the next losses are those of a run that was not interrupted."""
    if comm.size == 1:
        pytest.skip("positions are cut over two ranks or more")
    make, first, more = partial(meshes.gpt, block=BLOCK), 2, 2
    with meshes.job(comm, make, {"cp": comm.size}, precision="float64") as run:
        meshes.step_losses(run, first)
        store.save(mpi_tmp_path, first, run.state.pieces(), {}, run.channel)
        hashes = run.state.hashes()
        expected = meshes.step_losses(run, more, first)
    for mesh in ({"dp": comm.size}, {"cp": comm.size}):
        with meshes.job(comm, make, mesh, precision="float64") as run:
            run.resume(store.latest(mpi_tmp_path, run.channel))
            assert run.state.hashes() == hashes
            np.testing.assert_allclose(meshes.step_losses(run, more, first), expected, rtol=1e-9)


def test_where_values_stop_being_finite_is_found_by_one_rank_alone(comm: Any) -> None:
    """The others are elsewhere then: nobody may wait for them."""
    if comm.size == 1:
        pytest.skip("positions are cut over two ranks or more")
    with meshes.job(comm, partial(meshes.gpt, block=BLOCK), {"cp": comm.size}, precision="float64") as run:
        model = run.context.stage.model
        model["embed"].position.weight.array[-1, 0] = 1e200          # the last position, which rank 0 has: its square is infinite
        x = run.trainer.pipeline.feed.part(run.trainer.loader.load(0)[0].x)
        for rank in range(comm.size):
            found = origin_of(model, x).text if rank == comm.rank else ""
            comm.barrier()
            if rank == comm.rank:
                assert ("block0.norm1" if rank == 0 else "another rank's positions") in found, found
        assert model["block0"].attention.across.ring.size == comm.size


def test_samples_without_positions_are_refused(comm: Any) -> None:
    if comm.size == 1:
        pytest.skip("positions are cut over two ranks or more")
    rng = np.random.default_rng(0)
    flat = Memory(rng.standard_normal((64, 20), np.float32), rng.integers(0, 10, 64))
    inputs = Inputs(flat, range(64), None, range(0), data.Transforms())
    wanted = r"mesh.cp = \d cuts inputs and targets along their positions .* and a sample here is \(20,\) with a target \(\)"
    with pytest.raises(MeshError, match=wanted), meshes.job(
            comm, lambda: nn.Sequential(nn.Linear(20, 10)), {"cp": comm.size}, inputs=inputs):
        raise AssertionError("it was not refused")
