"""Experts on several ranks against the same run on one: losses, norms, evaluation, checkpoints, bits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import meshes
import numpy as np
import pytest

from mpitrain import nn, ops
from mpitrain.autograd import Tensor
from mpitrain.checkpoint import store
from mpitrain.comm.mesh import Mesh
from mpitrain.nn import Sequential
from mpitrain.parallel.gradients.replicas import checksum
from mpitrain.parallel.layers.expert_parallel import Dispatcher

STEPS = {2: 20, 3: 6, 4: 20}


def make(layers: int = 2, recompute: bool = False, **changed: Any) -> Sequential:
    """Some choices are dropped, and the balance is strong."""
    model = meshes.gpt(**{"layers": layers, "heads": 2, "width": 8, "experts": 12, "capacity": 1.0, "balance": 0.5, **changed})
    model.recompute = recompute
    return model


def options(n: int) -> dict[str, Any]:
    """Micro-batches of different numbers of rows: ranks that share experts have different numbers of places for them."""
    micro = 6 if n == 3 else 4
    return {"precision": "float64", "micro_batches": micro, "batch_size": 4 * micro - 2}


def results(n: int, ranks: Any, mesh: dict[str, int], build: Any = make, **asked: Any) -> np.ndarray[Any, Any]:
    """Losses, norms before clipping, tallies of the last step, loss and accuracy of the evaluation; copies must be equal."""
    with meshes.job(ranks, build, mesh, **asked) as run:
        run.trainer.update.want_norm = True
        done = [run.trainer.train_step(run.trainer.loader.load(step)) for step in range(STEPS[n])]
        metrics = run.trainer.evaluator.run()
        own = dict(run.state.model.named_parameters())
        run.context.copies.agree(checksum({name: p.array for name, p in own.items()}), "all parameters")
        run.context.replicas.agree(checksum({name: p.array for name, p in own.items() if "ep" not in p.placement}), "dense ones")
        assert all("ep" in p.placement for name, p in own.items() if name.endswith((".wide", ".narrow"))) == ("ep" in mesh)
        assert 0.05 < done[-1].tally[2] / done[-1].tally[3] < 0.6
        tally = done[-1].tally / mesh.get("tp", 1)                # each of those ranks notes the same
        return np.array([*(s.loss for s in done), *(s.grad_norm for s in done), *tally, metrics["loss"], metrics["accuracy"]])


def cases(n: int) -> list[tuple[dict[str, int], dict[str, Any]]]:
    if n != 4:
        return [({"ep": n}, {}), ({"ep": n}, {"build": partial(make, recompute=True), "algorithm": "ring"})]
    piped = {"pp": 2, "ep": 2}
    return [({"ep": 4}, {}), ({"dp": 2, "ep": 2}, {"algorithm": "direct"}), (piped, {}),
            (piped, {"schedule": "zb_h1", "build": partial(make, recompute=True)}),
            (piped, {"schedule": "interleaved", "chunks": 2}),
            ({"ep": 2, "tp": 2}, {})]


def test_shared_experts_have_the_losses_norms_and_metrics_of_one_rank(comm: Any) -> None:
    from mpi4py import MPI
    n = comm.size
    if n not in STEPS:
        pytest.skip("twelve experts are shared by 2, 3 or 4 ranks")
    found = results(n, MPI.COMM_SELF, {}, **options(n)) if comm.rank == 0 else None
    expected = np.array(comm.bcast(found))
    for mesh, more in cases(n):
        found = results(n, comm, mesh, **options(n) | more)
        np.testing.assert_allclose(found, expected, rtol=1e-8, err_msg=str((mesh, more)))


def test_a_checkpoint_of_shared_experts_goes_on_on_one_rank_and_back(comm: Any, mpi_tmp_path: Path) -> None:
    from mpi4py import MPI
    if comm.size != 2:
        pytest.skip("a small mesh is enough")
    n, asked = comm.size, options(comm.size)
    shared: tuple[Any, dict[str, int]] = (comm, {"ep": n})
    copied: tuple[Any, dict[str, int]] = (comm, {"dp": n})
    single: tuple[Any, dict[str, int]] = (MPI.COMM_SELF, {})
    with meshes.job(comm, make, {"ep": n}, **asked) as run:
        whole = meshes.step_losses(run, 6)
    hashes: dict[int, Any] = {}
    for number, (before, after) in enumerate(((shared, single), (shared, copied), (copied, shared))):
        folder = mpi_tmp_path / str(number)
        with meshes.job(before[0], make, before[1], **asked) as run:
            np.testing.assert_allclose(meshes.step_losses(run, 3), whole[:3], rtol=1e-8)
            store.save(folder, 3, run.state.pieces(), {}, run.channel)
            hashes[number] = run.state.hashes()
        if after is single and comm.rank:
            continue
        with meshes.job(after[0], make, after[1], **asked) as run:
            run.resume(store.latest(folder, run.channel))
            assert run.state.hashes() == hashes[number]
            np.testing.assert_allclose(meshes.step_losses(run, 3, 3), whole[3:], rtol=1e-8)


def test_experts_have_the_same_bits_on_any_ranks_that_have_all_of_them(comm: Any) -> None:
    """`reproducible = "layout"`: parameters, losses and tallies."""
    from mpi4py import MPI
    if comm.size not in (2, 3):
        pytest.skip("one, two and three ranks are enough")

    def bits(ranks: Any) -> list[Any]:
        asked = {"reproducible": "layout", "micro_batches": 6, "batch_size": 22}
        with meshes.job(ranks, make, {}, **asked) as run:
            done = [run.trainer.train_step(run.trainer.loader.load(step)) for step in range(2)]
            return [run.state.hashes(), [(s.loss, s.tally.tolist()) for s in done]]

    found = bits(MPI.COMM_SELF) if comm.rank == 0 else None
    assert bits(comm) == comm.bcast(found)


def test_dense_parameters_start_as_the_first_ranks_and_experts_as_those_of_their_copies(comm: Any) -> None:
    """Values that differ from process to process."""
    def different() -> Sequential:
        model = make(layers=1)
        layer = model["block0"].mixture
        layer.router.weight.init = layer.wide.init = nn.init.constant(float(comm.rank))
        return model

    if comm.size not in (2, 4):
        pytest.skip("two ranks that share experts, and two pairs of them")
    with meshes.job(comm, different, {"ep": 2}) as run:
        values = {name: p.array for name, p in run.state.model.named_parameters()}
        assert (values["block0.mixture.router.weight"] == 0).all()
        assert (values["block0.mixture.wide"] == comm.rank % 2).all()


def test_rows_go_to_the_ranks_of_their_experts_and_come_back_with_their_gradients(comm: Any) -> None:
    """Against what each rank knows the others to have; ranks have different numbers of places."""
    n, here, width = comm.size, 2, 3
    mesh = Mesh(comm, dp=1, ep=n)
    ranks = Dispatcher(mesh.channel("ep", "test"), "layer")
    everyone = [np.random.default_rng(r).standard_normal((n * here, 2 + r, width)) for r in range(n)]
    grads = [np.random.default_rng(9 + r).standard_normal(x.shape) for r, x in enumerate(everyone)]
    factors = 1.0 + np.arange(n * here)
    mine = slice(comm.rank * here, (comm.rank + 1) * here)
    seen: list[Any] = []

    def experts(x: Tensor) -> Tensor:
        """Each multiplies by a number of its own."""
        seen.append(x.array)
        return ops.multiply(x, factors[mine, None, None])

    x = Tensor(everyone[comm.rank], requires_grad=True)
    out = ranks.exchange(x, experts)
    out.backward(grads[comm.rank])
    arrived = seen[0].reshape(here, n, n + 1, width)
    for r, sent in enumerate(everyone):
        np.testing.assert_array_equal(arrived[:, r, :2 + r], sent[mine])
        assert not arrived[:, r, 2 + r:].any()
    np.testing.assert_allclose(out.array, everyone[comm.rank] * factors[:, None, None], rtol=1e-15)
    np.testing.assert_allclose(x.grad, grads[comm.rank] * factors[:, None, None], rtol=1e-15)
    mesh.close()
