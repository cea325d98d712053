"""States cut over ranks: the losses of the whole run, its bits where sums are made in the same order, and the bytes promised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from configs import flat

from mpitrain import data, models, nn, ops, optim
from mpitrain.bench.train import Memory
from mpitrain.checkpoint import store
from mpitrain.comm.mesh import Mesh
from mpitrain.config.sections import STATES
from mpitrain.errors import GraphError, NumericsError
from mpitrain.parallel.policies.sharded_reducer import IN_FLIGHT
from mpitrain.placement.bytes import predicted
from mpitrain.train.build.assembly import Job, assemble
from mpitrain.train.build.inputs import Inputs
from mpitrain.train.intervals import Step
from mpitrain.train.observers import Observer

CUT = STATES[1:]
STEPS = 5
Make = Callable[[Any], optim.Optimizer]


class Losses(Observer):
    """Keeps every step's loss and gradient norm, and every evaluation."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def after_step(self, step: int, fields: Step, seconds: float) -> None:
        self.seen += [fields.loss, fields.grad_norm or 0.0]

    def after_evaluation(self, step: int, metrics: Any, seconds: float) -> None:
        self.seen += metrics.values()


def tokens() -> Inputs:
    windows = np.lib.stride_tricks.sliding_window_view(np.random.default_rng(5).integers(0, 30, 157), 17)
    source = Memory(windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64), "tokens")
    return Inputs(source, range(107), source, range(107, 131), data.Transforms())


def numbers() -> Inputs:
    rng = np.random.default_rng(3)
    source = Memory(rng.standard_normal((131, 96)).astype(np.float32), rng.integers(0, 10, 131))
    return Inputs(source, range(107), source, range(107, 131), data.Transforms(["standardise"]))


def gpt(recompute: bool = False) -> nn.Module:
    model = models.gpt(layers=2, heads=2, width=48, block=16, vocabulary=30, dropout=0.1)
    model.recompute = recompute
    return model


def gpt_of(width: int) -> nn.Module:
    return models.gpt(layers=2, heads=2, width=width, block=16, vocabulary=64)


def mlp() -> nn.Module:
    return models.mlp(96, [112, 80], 10)


class Poisoned(nn.Module):
    """Its loss is a number, and the gradient of one parameter is not: the root has none at zero."""

    def __init__(self) -> None:
        self.linear = nn.Linear(96, 10)

    def forward(self, x: Any) -> Any:
        return self.linear(x) + ops.sqrt((self.linear.weight * 0.0).sum())


@pytest.fixture(autouse=True)
def several(comm: Any) -> None:
    if comm.size == 1:
        pytest.skip("one rank has nobody to share with")


@pytest.fixture
def shared_folder(comm: Any) -> Iterator[Path]:
    """A folder that all ranks see."""
    with TemporaryDirectory() as mine:
        yield Path(comm.bcast(mine))
        comm.Barrier()


def adam(storage: Any) -> optim.Optimizer:
    return optim.AdamW(storage, lr=3e-3, weight_decay=0.1)


def job_of(mesh: Mesh, kind: str, model: nn.Module, inputs: Inputs, optimizer: Make = adam, **options: Any) -> Job:
    given = {"steps": STEPS, "batch_size": 24, "seed": 7, "eval_every": 10, "log_every": 1, "bucket_bytes": 30_000,
             "clip_norm": 0.5, **options}
    job = assemble(model, inputs, mesh, loss=nn.LOSSES["cross_entropy"](), optimizer=optimizer,
                   config=flat(sharding=kind, **given), quiet=True)
    job.trainer.observers.append(Losses())
    return job


def train(comm: Any, kind: str, model: nn.Module, inputs: Inputs, optimizer: Make = adam, pp: int = 1,
          **options: Any) -> tuple[list[float], dict[str, str]]:
    """(losses, norms and metrics, hashes) of a run."""
    mesh = Mesh(comm, pp=pp)
    job = job_of(mesh, kind, model, inputs, optimizer, **options)
    job.fit()
    found = job.trainer.observers[-1].seen, job.state.hashes()                   # type: ignore[attr-defined]
    job.channel.agree(found[1], "the final parameters")
    mesh.close()
    return found


def agree(comm: Any, kind: str, found: Any, whole: Any) -> None:
    """Losses equal to rounding; and everything to the bit where there are two addends, which have one order."""
    np.testing.assert_allclose(found[0], whole[0], rtol=1e-6)
    assert found[1] == whole[1] or comm.size > 2, kind


@pytest.mark.parametrize(("recompute", "steps"), [(False, 20), (True, 4)])
def test_every_kind_trains_a_transformer_as_the_whole_run_does(comm: Any, recompute: bool, steps: int) -> None:
    whole = train(comm, "none", gpt(recompute), tokens(), steps=steps)
    for kind in CUT:
        agree(comm, kind, train(comm, kind, gpt(recompute), tokens(), steps=steps), whole)


@pytest.mark.parametrize("kind", CUT)
def test_more_micro_batches_than_ranks_are_added_up_alike_each_time(comm: Any, kind: str) -> None:
    several = {"micro_batches": 2 * comm.size + (kind != "parameters"), "batch_size": 36, "steps": 3}
    losses, _ = train(comm, "none", gpt(), tokens(), **several)
    once, again = (train(comm, kind, gpt(), tokens(), **several) for _ in range(2))
    np.testing.assert_allclose(once[0], losses, rtol=1e-6)
    assert once == again


@pytest.mark.parametrize("optimizer", ["sgd", "lamb"])
def test_optimizers_get_what_they_need(comm: Any, optimizer: str) -> None:
    def make(storage: Any) -> optim.Optimizer:
        return optim.LAMB(storage, lr=0.01) if optimizer == "lamb" else optim.SGD(storage, lr=0.01, momentum=0.9)

    whole = train(comm, "none", mlp(), numbers(), make)
    for kind in CUT:
        agree(comm, kind, train(comm, kind, mlp(), numbers(), make), whole)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_stages_with_tied_embeddings_are_cut_alike(comm: Any, schedule: str) -> None:
    if comm.size % 2:
        pytest.skip("an odd number of ranks")
    options = {"pp": 2, "micro_batches": 2 * comm.size, "schedule": schedule, "chunks": 2 if schedule == "interleaved" else 1}
    losses, _ = train(comm, "none", gpt(), tokens(), **options)
    for kind in CUT:
        found, _ = train(comm, kind, gpt(), tokens(), **options)
        np.testing.assert_allclose(found, losses, rtol=1e-6)


def test_layout_mode_has_its_bits_with_optimizer_state_cut(comm: Any) -> None:
    options: dict[str, Any] = {"reproducible": "layout", "micro_batches": 4 if comm.size <= 4 else 8}
    assert train(comm, "optimizer", gpt(), tokens(), **options) == train(comm, "none", gpt(), tokens(), **options)


@pytest.mark.parametrize("kind", ["gradients", "parameters"])
def test_a_checkpoint_of_slices_goes_on_whole_and_in_other_slices(comm: Any, kind: str, shared_folder: Path) -> None:
    """Saved by all ranks; gone on with as it was, to the bit, and by fewer ranks: whole, and cut in each way."""
    several: dict[str, Any] = {"micro_batches": comm.size, "steps": 6}
    mesh = Mesh(comm)
    first = job_of(mesh, kind, gpt(), tokens(), **{**several, "steps": 3})
    first.fit()
    saved = first.state.hashes()
    store.save(shared_folder, 3, first.state.pieces(), {"choices": {}}, first.channel)
    first.channel.barrier()
    mesh.close()
    whole, _ = train(comm, kind, gpt(), tokens(), **several)
    count = max(n for n in range(1, comm.size) if comm.size % n == 0)
    fewer = comm.Split(comm.rank < count, comm.rank)
    for other, where in ((kind, comm), *((other, fewer) for other in (STATES if comm.rank < count else ()))):
        mesh = Mesh(where)
        job = job_of(mesh, other, gpt(), tokens(), **several)
        job.resume(store.load(shared_folder / "step-00000003"))
        assert job.state.hashes() == saved
        job.fit()
        rest = job.trainer.observers[-1].seen                                    # type: ignore[attr-defined]
        np.testing.assert_allclose(rest, whole[-len(rest):], rtol=1e-5)
        assert where is not comm or rest == whole[-len(rest):]
        mesh.close()
    fewer.Free()


def test_a_rank_keeps_what_the_formula_says(comm: Any) -> None:
    for kind in CUT:
        mesh = Mesh(comm)
        job = job_of(mesh, kind, model := gpt_of(192), tokens(), steps=1)
        found = job.trainer.update.measured()
        np.testing.assert_allclose(found, predicted(model.count_parameters(), kind, comm.size), rtol=0.02)
        said = [note for note in job.trainer.notes if note.startswith(f'comm.sharding = "{kind}": a rank keeps parameters ')]
        assert len(said) == 1
        mesh.close()


@pytest.mark.parametrize("kind", CUT)
def test_a_gradient_that_is_not_finite_changes_nothing(comm: Any, kind: str) -> None:
    mesh = Mesh(comm)
    job = job_of(mesh, kind, Poisoned(), numbers(), steps=1)
    before = job.state.hashes()
    with np.errstate(all="ignore"), pytest.raises(NumericsError, match='"linear.weight" is not finite; no parameter was changed'):
        job.fit()
    assert job.state.hashes() == before
    mesh.close()


def test_a_parameter_is_not_there_outside_its_block(comm: Any) -> None:
    mesh = Mesh(comm)
    job = job_of(mesh, "parameters", mlp(), numbers(), steps=1)
    job.trainer.update.values_written()
    with pytest.raises(GraphError, match='parameter "linear0.weight" is not in memory here: .* inside that block'):
        _ = job.state.model.parameters()[0].array
    mesh.close()


def test_memory_for_blocks_and_buckets_does_not_grow(comm: Any) -> None:
    mesh = Mesh(comm)
    job = job_of(mesh, "parameters", gpt(recompute=True), tokens(), steps=6)
    sizes = []
    step = job.trainer.one_step

    def one_step(number: int, micro: Any) -> None:
        step(number, micro)
        sizes.append((job.trainer.update.unsharding.pool.nbytes, job.trainer.update.reducer.pool.nbytes))    # type: ignore
    job.trainer.one_step = one_step                                         # type: ignore[method-assign]
    job.fit()
    assert sizes[-1][0] == sizes[2][0]                                # buckets on their way: a matter of time
    assert sizes[-1][0] <= 3 * 4 * 29_000 and sizes[-1][1] <= (IN_FLIGHT + 2) * 4 * 9_300    # a block has 28,272 numbers
    mesh.close()
