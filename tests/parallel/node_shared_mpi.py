"""One copy of parameters and optimizer state per node: the bits of the plain update, with the sums in the same order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from optimizer_state import state_of

from mpitrain import nn, ops, optim
from mpitrain.autograd import Tensor, recompute, run_backward
from mpitrain.backend import CPU
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.shared.node import Node
from mpitrain.config import CommConfig, Config, OptimizerConfig, RunConfig
from mpitrain.errors import GraphError, NumericsError, StorageError
from mpitrain.parallel.connect import connect
from mpitrain.parallel.policies.choose import choose
from mpitrain.parallel.policies.node_shared import NodeShared
from mpitrain.parallel.policies.policy import Setup
from mpitrain.placement.place import place

OPTIMIZERS = {"sgd": {"momentum": 0.9, "nesterov": True}, "adam": {"weight_decay": 0.1}, "adamw": {}, "rmsprop": {}, "lars": {},
              "lamb": {}}


class Job:
    """A small model in a job of its own; parameters of 9,216 and 10,752 elements are cut inside."""

    def __init__(self, comm: Any, *, shared: bool, optimizer: str, clip_norm: float, colors: int, bucket_bytes: int = 30_000,
                 model: nn.Module | None = None):
        self.free = 1 << 40                                  # bytes of shared memory to be had
        defaults: Any = Node.__init__.__kwdefaults__
        before = dict(defaults)
        defaults.update(color=comm.rank * colors // comm.size if colors else None, free=lambda: self.free)
        self.mesh = Mesh(comm)
        self.control = self.mesh.channel("dp", "control")
        self.model = model or nn.Sequential(nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 112), nn.Tanh(), nn.Linear(112, 3))
        config = Config(run=RunConfig(seed=1), optimizer=OptimizerConfig(clip_norm=clip_norm),
                        comm=CommConfig(node_shared=shared, bucket_mb=bucket_bytes / 2**20))
        placement = place(self.model, self.mesh, config.mesh, config.train, config.comm)
        self.update = choose(Setup(config, connect(placement, self.mesh, self.control), CPU))
        defaults.update(before)
        self.channel: Any = self.update.channel
        self.shared = isinstance(self.update, NodeShared)
        self.update.initialise()
        self.optimizer = optim.OPTIMIZERS.resolve(optimizer)(self.update.storage, 0.01, **OPTIMIZERS[optimizer])
        self.control.barrier()                               # nobody writes initial values any more
        self.update.open(self.optimizer, lambda step: 0.01 / (step + 1))
        self.reducer = self.update.reducer

    def step(self, number: int, *, want_norm: bool, scale: float = 1.0) -> float | None:
        self.update.want_norm = want_norm
        x = np.random.default_rng([number, self.control.rank]).standard_normal((4, 96)).astype(np.float32)
        self.update.begin()
        for micro in range(2):
            output = self.model(Tensor(x[2 * micro:2 * micro + 2]))
            self.reducer.begin_micro_batch(last=micro == 1)
            run_backward(output, np.full(output.shape, scale, np.float32), progress=self.reducer.progress)
        return self.update.finish()["grad_norm"]

    def state(self) -> dict[str, bytes]:
        found = {name: p.array.tobytes() for name, p in self.model.named_parameters()}
        return found | {name: array.tobytes() for name, array in state_of(self.optimizer).items()}

    def close(self) -> None:
        self.reducer.close()
        self.mesh.close()


@pytest.fixture
def job(comm: Any) -> Iterator[Any]:
    made: list[Job] = []

    def make(**options: Any) -> Job:
        made.append(Job(comm, **options))
        return made[-1]
    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_copy_per_node_has_the_bits_of_a_copy_per_rank(job: Any, comm: Any, optimizer: str, clip_norm: float) -> None:
    plain, shared = (job(shared=s, optimizer=optimizer, clip_norm=clip_norm, colors=0) for s in (False, True))
    assert shared.shared == (comm.size > 1)
    for number in range(4):
        norms = [one.step(number, want_norm=number % 2 == 0) for one in (plain, shared)]
        assert norms[0] == norms[1] and (norms[0] is None) == (number % 2 == 1 and not clip_norm)
    assert plain.state() == shared.state()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "rmsprop"])
def test_rules_that_treat_each_element_alone_run_inside_the_sum(job: Any, comm: Any, optimizer: str) -> None:
    one = job(shared=True, optimizer=optimizer, clip_norm=0.0, colors=0)
    if not (one.shared and one.channel.fuses):
        pytest.skip("one rank, or no compiler")
    def fail(parts: Any) -> None:
        raise AssertionError("updated after the sum, by another pass over memory")
    one.update._update_slice = fail
    before = one.state()
    one.step(0, want_norm=False)
    after = one.state()
    assert all(before[name] != after[name] for name in before)


class Halved(optim.SGD):
    """A user's rule on top of one of ours."""

    def change(self, run: Any, gradients: Any, lr: float, step: int, scale: float) -> None:
        super().change(run, gradients, lr / 2, step, scale)


def test_a_rule_that_a_user_changed_is_the_one_that_runs(job: Any, comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "halved", {})
    monkeypatch.setattr(optim.OPTIMIZERS, "resolve", lambda name: Halved)
    plain, shared = (job(shared=s, optimizer="halved", clip_norm=0.0, colors=0) for s in (False, True))
    for number in range(2):
        for one in (plain, shared):
            one.step(number, want_norm=False)
    assert plain.state() == shared.state()


class ReadsWithoutGradient(nn.Module):
    """`tied` is complete when `after` has been passed, but what its values were is asked for once more."""

    def __init__(self, again: bool) -> None:
        self.before, self.tied, self.after, self.again = nn.Linear(96, 96), nn.Linear(96, 96), nn.Linear(96, 3), again

    def forward(self, x: Tensor) -> Tensor:
        def block(t: Tensor) -> Tensor:
            return ops.tanh(t @ self.tied.weight.detach())
        h = self.before(x)
        return self.after(self.tied(recompute(block, h) if self.again else block(h)))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])      # inside the sum, and by a pass after it
def test_a_weight_that_backward_reads_without_a_gradient_is_an_error_and_not_a_wrong_number(job: Any, comm: Any, optimizer: str,
                                                                                            again: bool) -> None:
    plain, shared = (job(shared=s, optimizer=optimizer, clip_norm=0.0, colors=0, bucket_bytes=1000,
                         model=ReadsWithoutGradient(again)) for s in (False, True))
    if not shared.shared:
        pytest.skip("one rank shares with nobody")
    for one in (plain, shared):
        one.step(0, want_norm=True)                                       # the update waits for the norm: nothing is early
    assert plain.state() == shared.state()
    plain.step(1, want_norm=False)
    read = "Recompute: a parameter that the block reads again in backward" if again else "Mat.*: an array it saved for backward"
    with pytest.raises(GraphError, match=f"^{read} was changed in place .[12] changes since.; comm.node_shared = true "
                                         r"updates .* read a copy, Tensor\(weight.numpy.*, or set comm.node_shared = false$"):
        shared.step(1, want_norm=False)
    shared.reducer.finish()                                               # what began ends


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_nodes_sum_their_slices_by_messages(job: Any, comm: Any, optimizer: str) -> None:
    if comm.size not in (4, 8):
        pytest.skip("nodes of two ranks and more, equally many each")
    plain, shared = (job(shared=s, optimizer=optimizer, clip_norm=0.5, colors=2) for s in (False, True))
    assert shared.shared and shared.channel.node.size == comm.size // 2
    for number in range(3):
        norms = [one.step(number, want_norm=True) for one in (plain, shared)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    mine, other = plain.state(), shared.state()
    for name in mine:
        a, b = (np.frombuffer(x, np.int64 if name == "steps" else np.float32) for x in (mine[name], other[name]))
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)           # slices are cut otherwise, so sums differ in order
    digest = hashlib.sha256(b"".join(other[name] for name in sorted(other))).hexdigest()
    assert len(set(comm.allgather(digest))) == 1                          # the same bits on every node


def test_the_copy_is_one_and_its_gradients_are_each_rank_s_own(job: Any, comm: Any) -> None:
    one = job(shared=True, optimizer="adamw", clip_norm=0.0, colors=0)
    if not one.shared:
        pytest.skip("one rank shares with nobody")
    values = one.optimizer.storage.values
    one.control.barrier()
    if comm.rank == 0:
        values[0] = 123.0
    one.control.barrier()
    assert values[0] == 123.0                                             # another rank's store


def test_a_gradient_that_is_not_finite_changes_no_parameter_and_is_named_on_every_rank(job: Any, comm: Any) -> None:
    one = job(shared=True, optimizer="adamw", clip_norm=1.0, colors=0)
    before = one.state()
    message = 'gradient of "[024][.](weight|bias)" is not finite; no parameter was changed'
    with np.errstate(all="ignore"), pytest.raises(NumericsError, match=message):
        one.step(0, want_norm=True, scale=3e38)
    one.control.barrier()
    assert one.state() == before


def test_memory_that_runs_out_is_an_error_with_a_remedy_and_not_memory_of_this_rank_alone(job: Any, comm: Any) -> None:
    """For the gradients, which take n times what the parameters take, and for the norm's few bytes after them."""
    one = job(shared=True, optimizer="adamw", clip_norm=1.0, colors=0)
    if not one.shared:
        pytest.skip("one rank shares with nobody")
    one.free = 1 << 20
    for name, make in (("gradients", lambda: one.update.make_reducer().reserve()),
                       ("the gradient norm", lambda: one.update.norm_of(one.update.own()))):
        with pytest.raises(StorageError, match=f"comm.node_shared = true: no shared memory for {name}: /dev/shm has 1 MiB free "
                                              "where .* are needed; .* enlarge it: .*; or set comm.node_shared = false"):
            make()


def test_a_parameter_that_is_frozen_between_steps_stays_as_it_is(job: Any, comm: Any) -> None:
    plain, shared = (job(shared=s, optimizer="adam", clip_norm=0.0, colors=0) for s in (False, True))
    for step in range(5):
        for one in (plain, shared):
            frozen = one.model[2].weight
            frozen.requires_grad = step not in (2, 3)
            was = frozen.array.tobytes()
            comm.Barrier()                                    # others write their slices of it
            one.step(step, want_norm=False)
            assert (frozen.array.tobytes() == was) == (step in (2, 3)), step
    assert plain.state() == shared.state()
