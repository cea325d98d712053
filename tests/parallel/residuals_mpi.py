"""Residuals of compressed gradients in checkpoints: a run goes on with its own bits, and on other ranks with all that is owed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from meshes import gpt, job, mlp
from node_cut_mpi import nodes

from mpitrain.checkpoint import store
from mpitrain.checkpoint.manifest import Checkpoint
from mpitrain.checkpoint.parts import Piece
from mpitrain.errors import CheckpointError, NumericsError

TEXTS = ["int8", "int4", "onebit", "topk:0.05", "randomk:0.1", "powersgd:2"]
ONE_OF_A_KIND = ("onebit", "topk:0.05", "powersgd:2")        # on two ranks, whose tests run most often
SMALL = {"bucket_bytes": 3000, "clip_norm": 0.0, "micro_batches": 4}


@pytest.fixture(autouse=True)
def several(comm: Any) -> None:
    if comm.size == 1:
        pytest.skip("one rank has nobody to exchange with")


@pytest.fixture
def folder(comm: Any) -> Iterator[Path]:
    """A folder that all ranks see."""
    with TemporaryDirectory() as mine:
        yield Path(comm.bcast(mine))
        comm.Barrier()


def seldom(comm: Any, text: str) -> None:
    if comm.size == 2 and text not in ONE_OF_A_KIND:
        pytest.skip("seen on more ranks")


def options(text: str, force: bool = True, **more: Any) -> dict[str, Any]:
    return {**SMALL, "compress": text, "compress_force": force, **more}


def go(found: Any, first: int, count: int) -> None:
    for step in range(first, first + count):
        found.trainer.update.want_norm = True
        found.trainer.train_step(found.trainer.loader.load(step))


def save(found: Any, folder: Path, step: int) -> Checkpoint:
    store.save(folder, step, found.state.pieces(), {}, found.channel)
    return store.latest(folder, found.channel)


def hash_of(found: Any) -> str:
    return str(found.state.hashes()["parameters_sha256"])


def in_two(comm: Any, folder: Path, count: int, make: Any, mesh: dict[str, int], given: dict[str, Any], *,
           drop: str = "") -> tuple[str, str, list[str]]:
    """The hashes of an undisturbed run and of one that was saved and resumed half-way, and what the latter said. Names that begin
    with `drop` are left out of the checkpoint."""
    around = nodes(comm, count) if count > 1 else nullcontext()
    with around:
        with job(comm, make, mesh, **given) as found:
            go(found, 0, 4)
            whole = hash_of(found)
        with job(comm, make, mesh, **given) as found:
            go(found, 0, 2)
            pieces = [piece for piece in found.state.pieces() if not (drop and piece.name.startswith(drop))]
            store.save(folder, 2, pieces, {}, found.channel)
        with job(comm, make, mesh, **given) as found:
            found.resume(store.latest(folder, found.channel))
            kind = next(kind for kind in found.state.kept if kind.prefix == "workers")
            go(found, 2, 2)
            return whole, hash_of(found), list(kind.said)


@pytest.mark.parametrize("text", TEXTS)
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(comm: Any, folder: Path, text: str) -> None:
    seldom(comm, text)
    more = {"compress_warmup": 3} if text.startswith("topk") else {}           # steps 0, 1 | 2: a larger share | 3
    whole, resumed, said = in_two(comm, folder, 1, mlp, {}, options(text, **more))
    assert whole == resumed and not said


@pytest.mark.parametrize("text", TEXTS)
def test_so_it_has_between_nodes(comm: Any, folder: Path, text: str) -> None:
    if comm.size != 4:
        pytest.skip("two nodes of two ranks")
    whole, resumed, said = in_two(comm, folder, 2, mlp, {}, options(text, force=False))
    assert whole == resumed and not said


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"tp": 2}, {"cp": 2}], ids=["pp", "tp", "cp"])
@pytest.mark.parametrize("text", ["int8", "powersgd:2"])
def test_so_it_has_where_the_model_is_cut(comm: Any, folder: Path, text: str, mesh: dict[str, int]) -> None:
    if comm.size != 4:
        pytest.skip("two ranks for each part of a model cut in two")
    whole, resumed, said = in_two(comm, folder, 1, gpt, mesh, options(text))
    assert whole == resumed and not said


@pytest.mark.parametrize(("text", "drop"), [("int8", "workers/"), ("int8", "compress/error"), ("topk:0.05", "workers/"),
                                            ("powersgd:2", "compress/q"), ("onebit", "compress/error")])
def test_without_residuals_it_has_other_bits_and_says_so(comm: Any, folder: Path, text: str, drop: str) -> None:
    whole, resumed, said = in_two(comm, folder, 1, mlp, {}, options(text), drop=drop)
    assert whole != resumed
    assert said == ["the checkpoint has no residuals of compressed gradients, or not all: they begin with zeros"]


def owed(comm: Any, found: Any) -> np.ndarray[Any, Any]:
    """The sum over workers of their residuals, with that of the sums, in the layout of the gradients."""
    compressed = found.policy.compressed
    total = np.zeros(found.policy.layout.size, np.float64)
    starts = {segment.parameter.name: segment.start for segment in found.policy.layout.segments}
    for name, of in compressed.owners.items():
        for held in compressed.held(name, owned=of == "owner"):
            start = starts[held.leaf.name] + held.first
            total[start:start + held.array.size] += held.array
    comm.Allreduce(total.copy(), total)
    return total


@pytest.mark.parametrize("text", ["int8", "topk:0.05"])
@pytest.mark.parametrize("left", [2, 3])
def test_on_other_ranks_all_that_was_owed_is_owed_still(comm: Any, folder: Path, text: str, left: int) -> None:
    """Saved by all ranks, gone on with by `left` of them, and by those again on all."""
    if comm.size <= left:
        pytest.skip("more ranks than go on")
    with job(comm, mlp, {}, **options(text)) as found:
        go(found, 0, 3)
        save(found, folder / "all", 3)
        before = owed(comm, found)
    part = comm.Split(int(comm.rank >= left), comm.rank)
    if comm.rank < left:
        with job(part, mlp, {}, **options(text)) as found:
            found.resume(store.latest(folder / "all", found.channel))
            np.testing.assert_allclose(owed(part, found), before, rtol=1e-6, atol=1e-7 * np.abs(before).max())
            assert all(np.abs(held.array).max() > 0 for held in found.policy.compressed.held("error") if held.array.size > 100)
            save(found, folder / "few", 3)
    part.Free()
    comm.Barrier()
    with job(comm, mlp, {}, **options(text)) as found:
        found.resume(store.latest(folder / "few", found.channel))
        np.testing.assert_allclose(owed(comm, found), before, rtol=1e-6, atol=1e-7 * np.abs(before).max())


def test_between_nodes_and_back_all_that_was_owed_is_owed_still(comm: Any, folder: Path) -> None:
    if comm.size != 4:
        pytest.skip("two nodes of two ranks")
    with nodes(comm, 2), job(comm, mlp, {}, **options("int8", force=False)) as found:
        go(found, 0, 3)
        assert found.policy.compressed.workers == 2 and found.policy.compressed.shared is not None
        save(found, folder, 3)
        before = owed(comm, found)
    with job(comm, mlp, {}, **options("int8")) as found:
        found.resume(store.latest(folder, found.channel))
        assert found.policy.compressed.workers == 4
        np.testing.assert_allclose(owed(comm, found), before, rtol=1e-6, atol=1e-7 * np.abs(before).max())


NAME = "workers/1/error/linear1.weight"


def damage(pieces: list[Piece], how: str, n: int) -> Iterator[Piece]:
    """The pieces of a checkpoint in which one worker's residual is not what it must be."""
    for piece in pieces:
        if piece.name == NAME and how != "missing":
            array = np.full_like(piece.array, np.nan) if how == "nan" else \
                piece.array[:, :-1].copy() if how == "shape" else piece.array
            yield Piece.whole(piece.name.replace("/1/", f"/{n + 5}/") if how == "number" else piece.name, array)
        elif piece.name == "compress/workers" and how in ("count", "more"):
            yield from [Piece.whole(piece.name, np.array(n + 1))] if how == "more" else []
        elif piece.name != NAME:
            yield piece


@pytest.mark.parametrize(("how", "says"), [
    ("nan", NAME + " has values that are not finite"), ("shape", NAME + ".*a residual is as long as its parameter"),
    ("number", r"has a residual of worker \d, and says that there were \d workers, 0 to \d"), ("missing", f"lacks {NAME}"),
    ("count", r"has residuals of worker \d, and does not say how many workers there were"),
    ("more", r"lacks workers/\d/error/\S+, and has workers/0/error")])
def test_what_no_run_has_written_is_refused_on_all_ranks(comm: Any, folder: Path, how: str, says: str) -> None:
    with job(comm, mlp, {}, **options("int8")) as found:
        go(found, 0, 1)
        pieces = found.state.pieces()
        assert comm.rank != 1 or NAME in [piece.name for piece in pieces]
        store.save(folder, 1, list(damage(pieces, how, comm.size)), {}, found.channel)
    with job(comm, mlp, {}, **options("int8")) as found:
        with pytest.raises(CheckpointError, match=says):
            found.resume(store.latest(folder, found.channel))
        found.channel.barrier()


@pytest.mark.parametrize("text", TEXTS)
def test_a_gradient_that_is_not_finite_on_one_rank_stops_all_before_the_update(comm: Any, folder: Path, text: str) -> None:
    seldom(comm, text)
    with job(comm, mlp, {}, **options(text)) as found:
        go(found, 0, 2)
        save(found, folder, 2)
        before, kept = hash_of(found), {name: flat.copy() for name, flat in found.policy.compressed.flat.items()}
        batches = found.trainer.loader.load(2)
        if comm.rank == comm.size - 1:
            hook = found.policy.layout.segments[0].parameter.grad_hooks

            def spoil(parameter: Any) -> None:
                parameter.grad.reshape(-1)[0] = np.nan
            hook.insert(0, spoil)
        with pytest.raises(NumericsError, match="no parameter was changed"):
            found.trainer.update.want_norm = True
            found.trainer.train_step(batches)
        assert hash_of(found) == before
        assert all(np.isfinite(flat).all() for flat in found.policy.compressed.flat.values())
        assert store.latest(folder, found.channel).step == 2 and kept
    with job(comm, mlp, {}, **options(text)) as found:
        found.resume(store.latest(folder, found.channel))
        for name, flat in found.policy.compressed.flat.items():
            if found.policy.compressed.owners[name] == "worker":
                assert flat.tobytes() == kept[name].tobytes()
    shutil.rmtree(folder, ignore_errors=True)
