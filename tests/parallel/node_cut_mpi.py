"""One copy per node together with cut models and cut states: what the plain run on the same mesh computes, and its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import meshes
import numpy as np
import pytest
from meshes import gpt, mlp, nodes, on_node

from mpitrain import nn, ops
from mpitrain.checkpoint import store
from mpitrain.comm.shared.node import Node
from mpitrain.config.sections import STATES
from mpitrain.errors import ConfigError, NumericsError, StorageError
from mpitrain.parallel.gradients.replicas import checksum
from mpitrain.parallel.policies.node_shared import NodeShared
from mpitrain.placement.bytes import predicted
from mpitrain.train.build.assembly import Job

CUT = STATES[1:]
SMALL = {"bucket_bytes": 6000}
Make = Callable[[], nn.Sequential]


def steps(job: Job, count: int, first: int = 0, *, norms: bool = True) -> list[float]:
    """Losses, and norms where they are asked for: without, parameters may be updated while backward runs."""
    found = []
    for step in range(first, first + count):
        job.trainer.update.want_norm = norms
        result = job.trainer.train_step(job.trainer.loader.load(step))
        found += [result.loss, result.grad_norm or 0.0]
    return found


def run(comm: Any, make: Make, mesh: dict[str, int], count: int = 2, *, norms: bool = True,
        **options: Any) -> tuple[list[float], dict[str, str]]:
    """What a run computes: losses, norms, and the hashes of the model after it."""
    with meshes.job(comm, make, mesh, **{**SMALL, **options}) as job:
        found = steps(job, count, norms=norms)
        assert not [note for note in job.trainer.notes if note.startswith("comm.node_shared")]
        if options.get("node_shared") and options.get("sharding", "none") == "none":
            assert isinstance(job.trainer.update, NodeShared)
        return found, job.state.hashes()


def pairs(comm: Any) -> None:
    if comm.size < 4 or comm.size % 4:
        pytest.skip("two ranks for each part of a model cut in two")


@pytest.mark.parametrize(("make", "options"), [
    (mlp, {"mesh": {"pp": 2}, "clip_norm": 0.0, "norms": False}),
    (mlp, {"mesh": {"pp": 2}, "clip_norm": 0.0, "norms": False, "schedule": "zb_h1"}),
    (lambda: mlp(6), {"mesh": {"pp": 2}, "clip_norm": 0.0, "norms": False, "schedule": "interleaved", "chunks": 2,
                      "micro_batches": 8}),
    (gpt, {"mesh": {"pp": 2}, "clip_norm": 0.0, "norms": False}),
    (gpt, {"mesh": {"pp": 2}, "schedule": "zb_h1"}),
    (gpt, {"mesh": {"tp": 2}}),
    (lambda: gpt(0.0), {"mesh": {"tp": 2}, "clip_norm": 0.0, "norms": False, "sequence": True}),
    (gpt, {"mesh": {"pp": 2}, "reproducible": "layout", "clip_norm": 0.0, "norms": False})],
    ids=["1f1b", "zb_h1", "interleaved", "twins", "norm", "tensor", "sequence", "layout"])
def test_the_copies_of_each_part_of_a_model_have_the_bits_of_plain_ones(comm: Any, make: Make, options: dict[str, Any]) -> None:
    pairs(comm)
    assert run(comm, make, node_shared=True, **options) == run(comm, make, **options)


@pytest.fixture(autouse=True)
def several(comm: Any) -> None:
    if comm.size == 1:
        pytest.skip("one rank has nobody to share with")


def one_copy(comm: Any, kind: str, *arguments: Any, **options: Any) -> tuple[list[float], dict[str, str]]:
    return run(comm, *arguments, node_shared=True, sharding=kind, **options)


def test_one_copy_in_slices_trains_as_the_whole_run_does(comm: Any) -> None:
    """To the bit with a micro-batch for each rank, for memory is summed in one order; and the same bits each time."""
    each = {"micro_batches": comm.size, "batch_size": 4 * comm.size}
    whole = run(comm, gpt, {}, 2, **each)
    for kind in CUT:
        assert one_copy(comm, kind, gpt, {}, 2, **each) == whole, kind
    more: dict[str, Any] = {"micro_batches": 2 * comm.size, "batch_size": 8 * comm.size}
    whole = run(comm, gpt, {}, 2, **more)
    assert one_copy(comm, "optimizer", gpt, {}, 2, **more) == whole
    once, again = (one_copy(comm, "gradients", gpt, {}, 2, **more) for _ in range(2))
    np.testing.assert_allclose(once[0], whole[0], rtol=1e-6)
    assert once == again


class Backwards(nn.Module):
    """Describes its layers in another order than it uses them in, so that gradients come in another order than buckets leave."""

    def __init__(self, count: int):
        self.layers = [nn.Linear(20, 20) for _ in range(count)]
        self.last = nn.Linear(20, 10)

    def forward(self, x: Any) -> Any:
        for layer in self.layers[::-1]:
            x = ops.tanh(layer(x))
        return self.last(x)


def test_gradients_may_come_in_any_order(comm: Any) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(("all", Backwards(12)))
    options = {"micro_batches": comm.size, "batch_size": 4 * comm.size, "bucket_bytes": 1000}
    assert one_copy(comm, "gradients", make, {}, **options) == run(comm, make, {}, **options)


@pytest.mark.parametrize("options", [{"pp": 2, "schedule": "interleaved", "chunks": 2}, {"pp": 2, "schedule": "zb_h1"},
                                     {"tp": 2}], ids=["interleaved", "zb_h1", "tensor"])
def test_cut_models_and_cut_states_and_one_copy_together(comm: Any, options: dict[str, Any]) -> None:
    pairs(comm)
    mesh = {axis: n for axis, n in options.items() if axis in ("pp", "tp")}
    rest: dict[str, Any] = {"count": 2, **{name: value for name, value in options.items() if name not in mesh}}
    whole = run(comm, gpt, mesh, **rest)
    for kind in CUT[:2] if rest.get("schedule") == "zb_h1" else CUT:                      # refused with the third
        np.testing.assert_allclose(one_copy(comm, kind, gpt, mesh, **rest)[0], whole[0], rtol=1e-6)


def test_nodes_give_each_other_new_values_of_their_slices(comm: Any) -> None:
    """The same twice, and what one node computes to rounding; in layout mode to the bit."""
    if comm.size not in (4, 8):
        pytest.skip("nodes of two ranks and more, equally many each")
    whole, tree = run(comm, gpt, {}, 20, micro_batches=8), run(comm, gpt, {}, 2, reproducible="layout")
    with nodes(comm, 2):
        assert one_copy(comm, "optimizer", gpt, {}, 2, reproducible="layout") == tree
        for kind in STATES:
            once, again = (run_on_nodes(comm, kind, count, micro_batches=8) for count in (20 if kind == "gradients" else 3, 2))
            np.testing.assert_allclose(once, whole[0][:len(once)], rtol=1e-6)
            assert once[:4] == again


def run_on_nodes(comm: Any, kind: str, count: int, **options: Any) -> list[float]:
    with meshes.job(comm, gpt, {}, **SMALL, node_shared=True, sharding=kind, **options) as job:
        said = [note for note in job.trainer.notes if note.startswith("comm.node_shared")]
        assert len(said) == (kind == "parameters")            # has no copies to have one of
        found = steps(job, count)
        job.channel.agree(checksum(job.state.arrays()), "the copies of the nodes")
        return found


def test_a_rank_alone_on_its_node_has_its_slices_as_without_one_copy(comm: Any) -> None:
    if comm.size != 2:
        pytest.skip("seen on two")
    with nodes(comm, 2), meshes.job(comm, mlp, {}, node_shared=True, sharding="gradients") as job:
        assert "comm.node_shared: every rank keeps a copy of its own" in job.trainer.notes
        found = steps(job, 2)
    assert found == run(comm, mlp, {}, sharding="gradients")[0]


def of_width_192() -> nn.Sequential:
    return meshes.gpt(layers=1, heads=2, width=192, vocabulary=64)


def test_a_rank_keeps_what_the_formula_says(comm: Any) -> None:
    """Its share of the node's copy, and by asking the arrays; over two nodes, half as many ranks share one."""
    if comm.size == 3:
        pytest.skip("seen on two and four")
    for count in (1, 2) if comm.size == 4 else (1,):
        with nodes(comm, count):
            for kind in CUT:
                with meshes.job(comm, of_width_192, {}, node_shared=True, sharding=kind, micro_batches=comm.size) as job:
                    found = job.trainer.update.measured()
                    size = sum(p.size for p in job.state.model.parameters())
                    wanted = predicted(size, kind, comm.size, per_node=comm.size // count)
                    np.testing.assert_allclose(found, wanted, rtol=0.02, err_msg=f"{kind} on {count} nodes")
                    said = [note for note in job.trainer.notes if note.startswith(f'comm.sharding = "{kind}"')]
                    assert len(said) == 1 and (", one copy per node: " in said[0]) == (count == 1 or kind != "parameters")


@pytest.fixture
def shared_folder(comm: Any) -> Iterator[Path]:
    """A folder that all ranks see."""
    with TemporaryDirectory() as mine:
        yield Path(comm.bcast(mine))
        comm.Barrier()


def test_a_checkpoint_goes_on_with_and_without_one_copy_and_on_another_mesh(comm: Any, shared_folder: Path) -> None:
    """Saved by ranks with one copy of a cut model, in slices; gone on with as it was to the bit, and otherwise."""
    if comm.size == 3:
        pytest.skip("seen on two and four")
    cut = {"pp": 2} if comm.size == 4 else {}
    same: dict[str, Any] = {**SMALL, "micro_batches": 12, "batch_size": 24}
    with meshes.job(comm, gpt, cut, node_shared=True, sharding="gradients", **same) as job:
        steps(job, 2)
        saved = job.state.hashes()
        store.save(shared_folder, 2, job.state.pieces(), {"choices": {}}, job.channel)
        job.channel.barrier()
        rest = steps(job, 2, 2)
    ways = [(cut, {"node_shared": True, "sharding": "gradients"}), ({}, {"node_shared": True}), (cut, {}),
            ({}, {"node_shared": True, "sharding": "parameters"})]
    for mesh, options in ways:
        with meshes.job(comm, gpt, mesh, **options, **same) as job:
            job.resume(store.load(shared_folder / "step-00000002"))
            assert job.state.hashes() == saved
            found = steps(job, 2, 2)
        np.testing.assert_allclose(found, rest, rtol=1e-5)
        assert found == rest or (mesh, options) != ways[0]


class Poisoned(nn.Module):
    """Its output is a number, and the gradient of one parameter is not: the root has none at zero."""

    def __init__(self) -> None:
        self.linear = nn.Linear(20, 20)

    def forward(self, x: Any) -> Any:
        return self.linear(x) + ops.sqrt((self.linear.weight * 0.0).sum())


def test_a_gradient_that_is_not_finite_changes_nothing_on_any_part(comm: Any) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(("first", Poisoned()), ("middle", nn.Linear(20, 20)), ("last", nn.Linear(20, 10)))
    for kind in STATES:
        with meshes.job(comm, make, {"pp": 2} if comm.size == 4 else {}, node_shared=True, sharding=kind,
                        micro_batches=comm.size) as job:
            before = job.state.hashes()
            with np.errstate(all="ignore"), pytest.raises(NumericsError, match='"first.linear.weight" is not finite; no param'):
                steps(job, 1)
            job.channel.barrier()
            assert job.state.hashes() == before


def test_memory_that_runs_out_is_an_error_with_a_remedy(comm: Any) -> None:
    """Of the parameters, or of the buckets that gradients pass through."""
    defaults: Any = Node.__init__.__kwdefaults__
    before, left = defaults["free"], list[int]()
    for name, blocks in (("parameters", 2), ("gradients", 3)):    # after two that ranks coordinate by
        left[:] = [1 << 40] * blocks + [0] * 9
        defaults["free"] = lambda: left.pop(0)
        message = f"comm.node_shared = true: no shared memory for {name}: .*; or set comm.node_shared = false"
        try:
            with pytest.raises(StorageError, match=message), \
                    meshes.job(comm, gpt, {}, node_shared=True, sharding="gradients", micro_batches=comm.size):
                pass
        finally:
            defaults["free"] = before


def test_parts_of_the_model_that_lie_on_nodes_otherwise_are_refused(comm: Any) -> None:
    """Ranks 0 and 1 have a part, and are on one node; ranks 2 and 3 have the other, and are on two."""
    if comm.size != 4:
        pytest.skip("four ranks")
    with pytest.raises(ConfigError, match="parts of the model on nodes alike: rank 0 is with ranks on nodes 0-1, rank 2 with "
                                          "ranks on 0 | 1; start another .*, or set comm.node_shared = false"), \
            on_node((0, 0, 0, 1)[comm.rank]), meshes.job(comm, gpt, {"pp": 2}, node_shared=True):
        pass


def test_buckets_are_cut_where_times_say_where_layers_are_cut(comm: Any) -> None:
    """Memory is summed in one order, wherever buckets are cut."""
    pairs(comm)
    found = []
    for tuned in (True, False):
        with meshes.job(comm, gpt, {"tp": 2}, steps=10, bucket_mb="auto" if tuned else 4.0) as job:
            job.fit()
            assert (job.tuning.choices.get("buckets") or {}).get("ranks") == (comm.size // 2 if tuned else None)
            found.append(job.state.hashes())
    assert found[0] == found[1]
