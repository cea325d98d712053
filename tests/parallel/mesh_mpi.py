"""Runs on every mesh of the ranks that run this, against the same run on one rank: losses, evaluation, checkpoints."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import meshes
import numpy as np
import pytest
from fakegpu import put

from mpitrain import models, nn, ops, optim
from mpitrain.autograd import Tensor
from mpitrain.backend import asnumpy
from mpitrain.checkpoint import store
from mpitrain.comm.mesh import Mesh
from mpitrain.config import CommConfig, MeshConfig, TrainConfig
from mpitrain.errors import DataError, ShapeError
from mpitrain.nn import Sequential
from mpitrain.parallel.gradients.replicas import checksum
from mpitrain.parallel.layers.join import join
from mpitrain.parallel.layers.tensor_functions import Collect, Enter, Gather, Group, Leave, Scatter
from mpitrain.parallel.layers.tensor_loss import CutLoss, largest
from mpitrain.placement import place as placing

EVERY = os.environ.get("MPITRAIN_EVERY_MESH") == "1"             # all schedules on all meshes, more steps: minutes
STEPS = 20 if EVERY else 6
Make = Callable[[], Sequential]


def alone(comm: Any, make: Make, steps: int = STEPS, **options: Any) -> np.ndarray[Any, Any]:
    """The losses on one rank, computed by the first and told to all."""
    found = None
    if comm.rank == 0:
        from mpi4py import MPI
        found = meshes.losses(MPI.COMM_SELF, make, {}, steps, **options)
    meshes.come_together(comm)
    return np.array(comm.bcast(found))


def close(found: list[float], expected: np.ndarray[Any, Any], what: object) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=str(what))


def schedules(pp: int) -> list[tuple[str, int]]:
    """(name, chunks) of what may run `pp` stages."""
    if pp == 1:
        return [("1f1b", 1)]
    return [("gpipe", 1), ("1f1b", 1), ("zb_h1", 1), ("interleaved", 2)]


def runs(n: int) -> list[tuple[dict[str, int], str, int, bool]]:
    """(mesh, schedule, chunks, sequence): all, or a cover, in which each mesh with tp has one run, and schedules take turns."""
    found = []
    for place, mesh in enumerate(meshes.factorisations(n)):
        if not EVERY and mesh["tp"] == 1:
            continue
        able = schedules(mesh["pp"])
        chosen = able if EVERY else [able[place % len(able)]]
        found += [(mesh, name, chunks, (place + turn) % 2 == 0) for turn, (name, chunks) in enumerate(chosen)]
    return found


def eight(n: int) -> dict[str, int]:
    """What makes gpt fit 8 ranks."""
    return {"heads": 24, "block": 24} if n == 8 else {}


def size(mesh: dict[str, int], chunks: int) -> int:
    """Layers that are enough for the stages: gpt has three blocks more than layers, mlp two."""
    return max(2, mesh["pp"] * chunks - 2)


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_every_mesh_has_the_losses_of_one_rank(comm: Any, name: str) -> None:
    make_any: Any = {"mlp": meshes.mlp, "gpt": partial(meshes.gpt, **eight(comm.size))}[name]
    known: dict[int, np.ndarray[Any, Any]] = {}
    for mesh, schedule, chunks, sequence in runs(comm.size):
        layers = size(mesh, chunks)
        make = partial(make_any, layers=layers)
        if layers not in known:
            known[layers] = alone(comm, make)
        cut = mesh["tp"] > 1 and name == "gpt" and sequence
        found = meshes.losses(comm, make, mesh, STEPS, schedule=schedule, chunks=chunks, sequence=cut,
                              micro_batches=max(4, mesh["dp"]))
        close(found, known[layers], (mesh, schedule, cut))


def test_smoothing_ignored_labels_norms_and_accuracy_are_those_of_one_rank(comm: Any) -> None:
    """Evaluation through cut logits, too; the gradient's norm over parts; parameters that ranks share stay equal to the bit."""
    def results(ranks: Any, mesh: dict[str, int], **options: Any) -> list[float]:
        loss = nn.LOSSES["cross_entropy"](label_smoothing=0.1, ignore_index=3)
        with meshes.job(ranks, partial(meshes.gpt, **eight(comm.size)), mesh, loss=loss, **options) as run:
            run.trainer.update.want_norm = True
            steps = [run.trainer.train_step(run.trainer.loader.load(step)) for step in range(5)]
            metrics = run.trainer.evaluator.run()
            same = {name: p.array for name, p in run.state.model.named_parameters() if "tp" not in p.placement}
            if run.context.group is not None:
                run.context.group.channel.messages.agree(checksum(same), "the parameters that are not cut")
            return [*(s.loss for s in steps), *(s.grad_norm for s in steps), metrics["loss"], metrics["accuracy"]]

    if comm.size == 1:
        pytest.skip("layers are cut over two ranks or more")
    expected = None
    if comm.rank == 0:
        from mpi4py import MPI
        expected = results(MPI.COMM_SELF, {})
    expected = np.array(comm.bcast(expected))
    close(results(comm, {"tp": comm.size}), expected, "heads and tokens cut")
    close(results(comm, {"tp": comm.size}, sequence=True, algorithm="ring"), expected, "by messages, along the sequence")


def dropping() -> nn.Sequential:
    """Dropout and batch norm of channels, and of features, that are cut."""
    model = nn.Sequential(
        ("conv1", nn.Conv2d(1, 12, 3)), ("norm1", nn.BatchNorm2d(12)), ("drop1", nn.Dropout(0.3)), ("conv2", nn.Conv2d(12, 2, 3)),
        ("flatten", nn.Flatten()), ("wide", nn.Linear(128, 24)), ("norm2", nn.BatchNorm1d(24)), ("drop2", nn.Dropout(0.3)),
        ("head", nn.Linear(24, 10)))
    model.plan = {"conv1": "column", "conv2": "row", "wide": "column", "head": "row", "norm?": "channels", "drop?": "channels"}
    return model


def windows() -> nn.Sequential:
    """What may stand between a column and its row, and what a row pads with."""
    model = nn.Sequential(
        ("conv1", nn.Conv2d(1, 12, 3)), ("norm1", nn.BatchNorm2d(12, bias=False)), ("pool", nn.MaxPool2d(2)),
        ("pad", nn.ZeroPad2d(1)), ("norm2", nn.BatchNorm2d(12, affine=False, track_running_stats=False)),
        ("conv2", nn.Conv2d(12, 4, 3, padding=1, padding_mode="circular")), ("flatten", nn.Flatten()),
        ("head", nn.Linear(196, 10)))
    model.plan = {"conv1": "column", "norm?": "channels", "conv2": "row"}
    return model


def tokens(max_norm: float | None = None) -> nn.Sequential:
    """An encoder layer whose own dropout lies between its linear layers, and a table with a row that is padding."""
    embed = nn.Embedding(26, 24, padding_idx=4, max_norm=max_norm)
    embed.block = meshes.LENGTH
    model = nn.Sequential(("embed", embed), ("layer", nn.TransformerEncoderLayer(24, 12, 48, 0.3)), ("head", nn.Linear(24, 26)))
    model.plan = {"embed": "vocabulary", "layer.self_attn.qkv": "column", "layer.self_attn.out": "row", "layer.linear1": "column",
                  "layer.dropout": "channels", "layer.linear2": "row", "head": "vocabulary"}
    return model


def test_dropout_of_features_and_a_padding_row_are_those_of_one_rank(comm: Any) -> None:
    if comm.size == 1:
        pytest.skip("layers are cut over two ranks or more")
    options: dict[str, Any] = {"precision": "float64"}
    np.testing.assert_allclose(meshes.losses(comm, tokens, {"tp": comm.size}, 4, **options), alone(comm, tokens, 4, **options),
                               rtol=1e-10)


class Mixed(nn.Module):
    """A layer of a user's: a matrix (inputs, outputs) at each pixel of images."""

    channel_dims = 1, 0

    def __init__(self, inputs: int, outputs: int) -> None:
        self.weight = nn.Parameter((inputs, outputs), nn.init.normal(0.3))

    def forward(self, x: Any) -> Any:
        return ops.permute(ops.permute(x, (0, 2, 3, 1)) @ self.weight, (0, 3, 1, 2))


class Sums(nn.Module):
    """Two layers side by side, whose outputs are added."""

    paths = ("one",), ("other",)

    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        self.one, self.other = one, other

    def forward(self, x: Any) -> Any:
        return ops.tanh(self.one(x) + self.other(x))


def grouped() -> nn.Sequential:
    """Groups of channels, their gates, layers whose weights have their dims elsewhere, and series."""
    model = nn.Sequential(
        ("wide", nn.Conv2d(3, 24, 1)), ("norm", nn.BatchNorm2d(24, activation="hardswish")),
        ("groups", nn.Conv2d(24, 48, 3, padding=1, groups=12)), ("gates", nn.SqueezeExcitation(48, 5, gate="hardsigmoid")),
        ("narrow", nn.Conv2d(48, 4, 1)), ("sums1", Sums(Mixed(4, 12), nn.Conv2d(4, 12, 1))),
        ("sums2", Sums(Mixed(12, 4), nn.Conv2d(12, 4, 1))), ("up", nn.ConvTranspose2d(4, 12, 2, 2)),
        ("down", nn.ConvTranspose2d(12, 2, 3)), ("rows", nn.Flatten(start=2)), ("long", nn.Conv1d(2, 12, 3)), ("act", nn.GELU()),
        ("short", nn.Conv1d(12, 12, 5, groups=12)), ("last", nn.Conv1d(12, 3, 4)), ("some", nn.Conv1d(3, 12, 2)))
    model.plan = {"wide": "column", "norm": "channels", "groups": "channels", "gates.squeeze": "row", "gates.expand": "column",
                  "narrow": "row", "sums1.*": "column", "sums2.*": "row", "up": "column", "down": "row", "long": "column",
                  "short": "channels", "last": "row", "some": "gathered"}
    return model


def passed(comm: Any, n: int) -> tuple[Any, Any, dict[str, Any]]:
    """The output, the input's gradient, and (offset, gradient, whether it is cut) of each parameter on n ranks along tp."""
    model = grouped()
    mesh = Mesh(comm, tp=n, dp=comm.size // n)
    join(placing.place(model, mesh, MeshConfig(tp=n), TrainConfig(), CommConfig()), mesh, shared=True)
    model.initialize(seed=3, dtype="float64")
    rng = np.random.default_rng(4)
    x = Tensor(rng.standard_normal((2, 3, 5, 5)), requires_grad=True)
    y = model(x)
    y.backward(rng.standard_normal(y.shape))
    mesh.close()
    return y.array, x.grad, {name: (p.offset, p.grad, "tp" in p.placement) for name, p in model.named_parameters()}


def test_gradients_of_groups_gates_and_series_are_those_of_one_rank(comm: Any) -> None:
    if comm.size == 1:
        pytest.skip("layers are cut over two ranks or more")
    (y, dx, whole), (cut_y, cut_dx, cut) = passed(comm, 1), passed(comm, comm.size)
    np.testing.assert_allclose(cut_y, y, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(cut_dx, dx, rtol=1e-9, atol=1e-12)
    for name, (start, grad, _) in cut.items():
        part = whole[name][1][tuple(slice(first, first + length) for first, length in zip(start, grad.shape))]
        np.testing.assert_allclose(grad, part, rtol=1e-9, atol=1e-12, err_msg=name)
    assert {name for name, (*_, there) in cut.items() if not there} == {f"{row}.bias" for row in (
        "gates.squeeze", "narrow", "sums2.other", "down", "last")}


def test_rows_that_any_rank_looks_up_are_scaled_on_all(comm: Any) -> None:
    """Some rows only one rank's samples have: the tables stay equal to the bit, and are those of one rank; so are losses."""
    def trained(ranks: Any, mesh: dict[str, int], **options: Any) -> tuple[list[float], np.ndarray[Any, Any]]:
        with meshes.job(ranks, partial(tokens, 0.5), mesh, precision="float64", **options) as run:
            found = meshes.step_losses(run, 3)
            table = run.state.arrays()["parameters/embed.weight"]
            run.channel.agree(checksum({"table": table}), "the table")
            return found, np.array(table)

    expected = None
    if comm.rank == 0:
        from mpi4py import MPI
        expected = trained(MPI.COMM_SELF, {}, micro_batches=comm.size, batch_size=comm.size)
    losses, table = comm.bcast(expected)
    found = trained(comm, {"dp": comm.size}, micro_batches=comm.size, batch_size=comm.size)
    np.testing.assert_allclose(found[0], losses, rtol=1e-10)
    np.testing.assert_allclose(found[1], table, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["resnet20", "lenet", "dropping", "windows"])
def test_convolutions_are_cut_by_channels(comm: Any, name: str) -> None:
    tp = 2 if comm.size % 2 == 0 else comm.size
    if comm.size == 1 or (name == "resnet20" and 16 % tp):
        pytest.skip("channels are cut over 2 or 4 ranks")
    shape = (3, 8, 8) if name == "resnet20" else (1, 12, 12)
    make: Make = {"lenet": partial(models.lenet, size=12), "resnet20": models.resnet20, "dropping": dropping,
                  "windows": windows}[name]
    inputs = meshes.samples(make(), shape=shape)
    options: dict[str, Any] = {"inputs": inputs, "micro_batches": 2 * comm.size // tp, "rate": 1e-3}
    expected = alone(comm, make, 4, **options)
    close(meshes.losses(comm, make, {"tp": tp}, 4, **options), expected, name)


def test_a_line_search_goes_back_from_a_loss_that_is_not_finite_and_experts_are_counted_once(comm: Any) -> None:
    """On all ranks alike, whichever had the sample; the tally is that of the step's first forward."""
    def searching(storage: Any) -> optim.LBFGS:
        return optim.LBFGS(storage, lr=1e30, line_search_fn="strong_wolfe", history_size=2, max_iter=2, max_eval=6)

    make = partial(meshes.gpt, layers=1, experts=2, dropout=0.0)
    with meshes.job(comm, make, {"dp": comm.size}, optimizer=searching, clip_norm=0.0, micro_batches=comm.size) as run:
        blamed = []
        pipeline_run = run.trainer.pipeline.run
        run.trainer.pipeline.run = lambda *a, **k: [pipeline_run(*a, **k), blamed.extend(run.trainer.pipeline.blamed)][0]
        with np.errstate(all="ignore"):
            steps = [run.trainer.train_step(run.trainer.loader.load(step)) for step in range(2)]
        assert comm.allreduce(len(blamed)) > 0                    # there was such a place
    assert [step.tally[1] for step in steps] == [meshes.BATCH * meshes.LENGTH] * 2
    assert all(math.isfinite(step.loss) for step in steps)


@contextmanager
def first_ranks(comm: Any, count: int) -> Iterator[Any]:
    """A communicator of the first `count` ranks on these, None on the others."""
    from mpi4py import MPI
    meshes.come_together(comm)
    ranks = comm.Split(0 if comm.rank < count else MPI.UNDEFINED, comm.rank)
    yield ranks if comm.rank < count else None
    if comm.rank < count:
        ranks.Free()


def test_a_checkpoint_of_one_mesh_goes_on_on_every_other(comm: Any, mpi_tmp_path: Path) -> None:
    """The next losses are those of a run that was not interrupted; parameters on disk are whole, and tied ones there once.

    Also on fewer or more ranks. The cover: layers cut, stages, and one rank.
    """
    if comm.size == 1:
        pytest.skip("there is one mesh")
    n, first, more = comm.size, 3, 3
    make = partial(meshes.gpt, **eight(n), layers=max(2, n - 3))
    table = [{"tp": n}, {"pp": n}, {"dp": 1}]
    if EVERY:                                                     # of more than four ranks: of the same number, three, and one
        table = [mesh for count in ((1, 2, 3, 4) if n <= 4 else (1, 3)) if count < n for mesh in meshes.factorisations(count)]
        table += meshes.factorisations(n)
    expected, hashes = alone(comm, make, first + more), [""] * len(table)
    for number, mesh in enumerate(table):
        with first_ranks(comm, math.prod(mesh.values())) as ranks:
            if ranks is not None:
                with meshes.job(ranks, make, mesh, micro_batches=n) as run:
                    close(meshes.step_losses(run, first), expected[:first], mesh)
                    store.save(mpi_tmp_path / str(number), first, run.state.pieces(), {}, run.channel)
                    hashes[number] = run.state.hashes()["parameters_sha256"]
    meshes.come_together(comm)
    hashes = comm.bcast(hashes)
    for mesh in table:
        with first_ranks(comm, math.prod(mesh.values())) as ranks:
            if ranks is not None:
                with meshes.job(ranks, make, mesh, micro_batches=n) as run:
                    for number, before in enumerate(table):
                        run.resume(store.latest(mpi_tmp_path / str(number), run.channel))
                        assert run.state.hashes()["parameters_sha256"] == hashes[number], (before, mesh)
                        close(meshes.step_losses(run, more, first), expected[first:], (before, mesh))


@pytest.mark.skipif(not EVERY, reason="every mesh of 16 blocks takes minutes; a cover is in pipeline_mpi.py")
def test_layout_mode_has_one_hash_on_every_mesh_of_pipelines_and_replicas(comm: Any) -> None:
    """24 heads, 16 blocks, on stages of unequal length: parameters after some steps, and every loss, to the bit."""
    make = partial(meshes.gpt, layers=16, heads=24, width=48)
    told = {"reproducible": "layout", "micro_batches": 24, "batch_size": 24}

    def trained(ranks: Any, mesh: dict[str, int], **options: Any) -> tuple[str, list[float]]:
        with meshes.job(ranks, make, mesh, **told, **options) as run:
            found = meshes.step_losses(run, 3)
            return run.state.hashes()["parameters_sha256"], found

    wanted = None
    with first_ranks(comm, 1) as one:
        if one is not None:
            wanted = trained(one, {})
    meshes.come_together(comm)
    wanted = comm.bcast(wanted)
    for mesh in meshes.factorisations(comm.size):
        for name, chunks in schedules(mesh["pp"]) if mesh["tp"] == 1 else ():
            assert trained(comm, mesh, schedule=name, chunks=chunks) == wanted, (mesh, name)


@pytest.fixture(params=["shared memory", "messages", "messages from a device"])
def group(request: Any, comm: Any) -> Iterator[tuple[Group, Callable[[Any], Any], Callable[[Any], Any]]]:
    """(group of all ranks, how an array comes to where it computes, and back)."""
    mesh = Mesh(comm, tp=comm.size)
    channel = mesh.channel("tp", "test")
    on_device = request.param.endswith("device")
    yield (Group(mesh.share_memory(channel) if request.param == "shared memory" else channel), put if on_device else np.array,
           asnumpy if on_device else np.asarray)
    mesh.close()


@pytest.mark.parametrize(("smoothing", "ignore"), [(0.0, None), (0.2, 3), (1.0, None)])
def test_cross_entropy_of_cut_logits_is_that_of_the_whole(group: Any, smoothing: float, ignore: int | None) -> None:
    """Loss, gradient and the class of the largest, which is the first of equal ones; far logits neither overflow nor vanish."""
    ranks, here, back = group
    rng, classes = np.random.default_rng(7), 3 * ranks.size + 1
    logits = rng.standard_normal((5, 4, classes)) * np.array([1, 1, 5, 50, 800])[:, None, None]
    logits[0, 0] = logits[0, 1, 0] = 2.0
    labels = rng.integers(0, classes, (5, 4))
    whole = Tensor(logits, requires_grad=True)
    expected = ops.cross_entropy(whole, labels, label_smoothing=smoothing, ignore_index=ignore)
    expected.backward(np.asarray(0.3))
    first, stop = (place * classes // ranks.size for place in (ranks.rank, ranks.rank + 1))
    x = Tensor(here(logits[..., first:stop]), requires_grad=True)
    loss = CutLoss(nn.LOSSES["cross_entropy"](smoothing, ignore), ranks, first, classes, "head")
    found = loss(x, here(labels))
    found.backward(here(0.3))
    np.testing.assert_allclose(back(found.array), expected.array, rtol=1e-13)
    np.testing.assert_allclose(back(x.grad), whole.grad[..., first:stop], rtol=1e-11, atol=1e-15)
    np.testing.assert_array_equal(back(largest(x.array, ranks, first)), logits.argmax(axis=-1))
    labels[2, 1] = classes
    if here is put:
        assert np.isnan(back(loss(x, here(labels)).array)), "a device is not waited for"
        return
    with pytest.raises(DataError, match=rf"label {classes} is not in 0 ... {classes - 1}") as caught:
        loss(x, here(labels))
    assert caught.value.row == 2


def test_each_function_and_its_conjugate_put_arrays_together_as_they_say(group: Any) -> None:
    """Against sums of what each rank knows the others to have."""
    ranks, here, back = group
    rng, n, me = np.random.default_rng(3), ranks.size, ranks.rank
    wholes = rng.standard_normal((n, 2, 3 * n, 5))                # rank r's addend, of the same shape on all
    parts = rng.standard_normal((n, 2, 3, 5))                     # rank r's part along dim 1
    total, joined = wholes.sum(axis=0), np.concatenate(parts, axis=1)
    mine = np.s_[:, 3 * me:3 * me + 3]

    def both(function: Any, x: Any, grad: Any, **more: Any) -> tuple[Any, Any]:
        given = Tensor(here(x), requires_grad=True)
        out = function(given, group=ranks, name="test", **more)
        out.backward(here(grad))
        return back(out.array), back(given.grad)

    for _ in range(3):                                            # rooms are used again
        for function, x, forward, grad, backward, more in (
                (Enter.apply, joined, joined, wholes[me], total, {}), (Leave.apply, wholes[me], total, joined, joined, {}),
                (Gather.apply, parts[me], joined, wholes[me], total[mine], {"dim": 1}),
                (Scatter.apply, wholes[me], total[mine], parts[me], joined, {"dim": -2}),
                (Collect.apply, parts[me], joined, joined, joined[mine], {"dim": 1})):
            found = both(function, x, grad, **more)
            np.testing.assert_allclose(found[0], forward, rtol=1e-12, atol=1e-14)
            np.testing.assert_allclose(found[1], backward, rtol=1e-12, atol=1e-14)
    if n > 1:
        with pytest.raises(ShapeError, match=rf"mesh.tp = {n} ranks cannot share dim 1 of shape \(2, {n + 1}\)"):
            ranks.scatter(np.zeros((2, n + 1)), 1, "odd")


def test_ranks_that_hold_the_same_start_alike_where_initial_values_do_not(comm: Any) -> None:
    """Values that differ from process to process: all have the first rank's, of a cut parameter those of their place."""
    def make() -> Sequential:
        model = meshes.mlp()
        model["head"].bias.init = model["linear0"].weight.init = nn.init.constant(float(comm.rank))
        return model

    tp = 2 if comm.size % 2 == 0 else 1
    with meshes.job(comm, make, {"tp": tp}) as run:
        values = {name: array for name, array in run.state.arrays().items() if name.startswith("parameters/")}
        assert (values["parameters/head.bias"] == 0).all()
        assert (values["parameters/linear0.weight"] == comm.rank % tp).all()
