"""What a step does after backward: gradients summed over ranks, AdamW, and the new parameters visible to every rank.

    fill the arena | barrier | buckets start in backward's order, sum, update | slowest rank's time | check every parameter

The same with MPI_Allreduce, bucket by bucket, and the same AdamW kernel is what it is measured against. Both sides get the same
gradients at the same step, and their parameters are compared with one float64 AdamW that knows all ranks' gradients and sends
no message. With AdamW's usual eps a gradient wrong by a factor moves a parameter almost as far as the right one, and where the
ranks' gradients nearly cancel, rounding decides the direction; with an eps of 1 neither is so, at the same cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

import numpy as np

from mpitrain import nn, optim
from mpitrain.backend import CPU, Array
from mpitrain.bench.inputs import BLOCK, Inputs
from mpitrain.bench.pairs import Clock, Unavailable, alternate
from mpitrain.bench.report import Report, in_time, machine, ratio_of
from mpitrain.comm.job.start import World
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.messages.channel import Channel
from mpitrain.config import CommConfig, Config
from mpitrain.errors import ConfigError, MpitrainError, StorageError
from mpitrain.nn.init import zeros
from mpitrain.parallel.connect import connect
from mpitrain.parallel.policies.choose import choose
from mpitrain.parallel.policies.policy import Setup
from mpitrain.parallel.policies.replicated import Replicated
from mpitrain.placement.buckets import plan_buckets
from mpitrain.placement.place import place
from mpitrain.registry import Registry
from mpitrain.schedules.grid import REPLICAS

MATRIX = 1 << 20                  # Elements of a parameter; some buckets hold a single one, with the default size too.
LR, BETAS, EPS, DECAY = 0.1, (0.9, 0.999), 1.0, 0.01
TOLERANCE = 2e-6                  # The error allowed per step for a parameter of size 1; an operation in float32 rounds by 6e-8.
BUCKET_BYTES = 4 << 20


class Weights(nn.Module):
    """Parameters and nothing that computes with them: `count` elements in matrices of MATRIX, the last one shorter."""

    def __init__(self, count: int):
        self.matrices = [nn.Parameter((min(MATRIX, count - start), 1), zeros) for start in range(0, count, MATRIX)]


def adamw(storage: nn.FlatStorage) -> optim.AdamW:
    return optim.AdamW(storage, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)


class OverPolicy:
    """What training does, by one of its ways: messages, memory shared on a node, one copy of the parameters per node.

    All methods are called by all ranks alike. Unavailable, on all ranks, where the nodes have no room for that.
    """

    def __init__(self, world: World, count: int, bucket_bytes: int, *, messages: bool = False, node_shared: bool = False):
        self._mesh = Mesh(world.comm)
        try:
            config = Config(comm=CommConfig(node_shared=node_shared, bucket_mb=bucket_bytes / 2**20))
            placement = place(Weights(count), self._mesh, config.mesh, config.train, config.comm)
            setup = Setup(config, connect(placement, self._mesh, self._mesh.channel("dp", "control")), CPU, optimizer=adamw)
            self._policy = Replicated(setup, self._mesh.channel(REPLICAS, "gradients")) if messages else choose(setup)
            self._policy.initialise()
            self._policy.open(adamw(self._policy.storage), lambda step: LR)
            if self._policy.notes:
                raise Unavailable(self._policy.notes[0])
            self._policy.want_norm = False
        except (ConfigError, StorageError) as error:          # All ranks raise it alike.
            self._mesh.close()
            raise Unavailable(error.message) from error

    @property
    def values(self) -> Array:
        """All parameters, flat, as this rank sees them."""
        return self._policy.values

    def gradients(self) -> Array:
        """Where backward would write this rank's gradients of a new step; filled before `step`."""
        self._policy.begin()
        self._policy.reducer.begin_micro_batch(last=True)
        for segment in self._policy.layout.segments:
            segment.parameter.grad = segment.parameter.grad_buffer
        return self._policy.reducer.gradients

    def step(self) -> None:
        """Sum, update, and return when the parameters are new for this rank."""
        for segment in reversed(self._policy.layout.segments):      # Backward ends in this order: last parameters first.
            for hook in segment.parameter.grad_hooks:
                hook(segment.parameter)
        self._policy.finish()

    def close(self) -> None:
        self._policy.reducer.close()
        self._mesh.close()


class WithNative:
    """MPI_Allreduce of each bucket in place, then the same AdamW on the same layout; the face of an `OverPolicy`."""

    def __init__(self, world: World, count: int, bucket_bytes: int):
        self._comm = world.comm.Dup()
        storage = Weights(count).initialize(seed=0)
        self.values: Array = storage.values
        self._gradients: Array = storage.new_flat()
        self._buckets = plan_buckets(storage.segments, storage.size, max(1, bucket_bytes // 4))
        self._optimizer = adamw(storage)

    def gradients(self) -> Array:
        return self._gradients

    def step(self) -> None:
        for bucket in self._buckets:
            self._comm.Allreduce(None, self._gradients[bucket.start:bucket.stop])      # mpi4py's None here is MPI_IN_PLACE.
        self._optimizer.update(self._gradients, lr=LR, step=self._optimizer.steps + 1)

    def close(self) -> None:
        self._comm.Free()


Policy: TypeAlias = OverPolicy | WithNative
POLICIES: Registry[Callable[[World, int, int], Policy]] = Registry("exchange")
"""What is measured; called with all ranks, the number of parameters, and the bytes of a bucket."""
POLICIES.register("messages")(partial(OverPolicy, messages=True))
POLICIES.register("replicated")(OverPolicy)
POLICIES.register("node_shared")(partial(OverPolicy, node_shared=True))


class Serial:
    """AdamW in float64 by its formula (Loshchilov and Hutter, 2019), on the sum of all ranks' gradients, a block at a time."""

    def __init__(self, inputs: Inputs):
        self._inputs, self.steps = inputs, 0
        self.w, self._m, self._v = (np.zeros(inputs.length) for _ in range(3))

    def step(self) -> None:
        """One more update, with the gradients of turn number `steps`."""
        beta1, beta2 = BETAS
        for block in self._blocks():
            w, m, v = self.w[block], self._m[block], self._v[block]
            g, _ = self._inputs.expected(self.steps, block.start, block.stop)
            w *= 1.0 - LR * DECAY
            m += (1.0 - beta1) * (g - m)
            v += (1.0 - beta2) * (g * g - v)
            unbiased_m, unbiased_v = m / (1.0 - beta1 ** (self.steps + 1)), v / (1.0 - beta2 ** (self.steps + 1))
            w -= LR * unbiased_m / (np.sqrt(unbiased_v) + EPS)
        self.steps += 1

    def check(self, found: Array, label: str) -> None:
        """MpitrainError at the first parameter that is further away than rounding brings it in so many steps."""
        for block in self._blocks():
            expected = self.w[block]
            wrong = ~(np.abs(found[block] - expected) <= TOLERANCE * self.steps * np.maximum(1.0, np.abs(expected)))
            if wrong.any():
                i = int(wrong.argmax())
                raise MpitrainError(f"{label} gave a wrong parameter: element {block.start + i} of {self._inputs.length} is "
                                    f"{float(found[block.start + i])!r} after step {self.steps}, {float(expected[i])!r} in "
                                    f"float64; it must not be used")

    def _blocks(self) -> Iterator[slice]:
        for start in range(0, self._inputs.length, BLOCK):
            yield slice(start, min(start + BLOCK, self._inputs.length))


class Steps:
    """One side of the pairs: fills gradients, times a step, checks the parameters."""

    def __init__(self, policy: Policy, label: str, world: World, inputs: Inputs, serial: Serial):
        self._policy, self._label, self._rank, self._inputs, self._serial = policy, label, world.rank, inputs, serial
        self._clock, self._done = Clock(world), 0

    def take(self, _: int) -> float:
        """Seconds of this side's next step; the serial run is moved on when it is behind."""
        self._inputs.fill(self._policy.gradients()[:self._inputs.length], self._rank, self._done)
        seconds = self._clock.time(self._policy.step)
        self._done += 1
        if self._serial.steps < self._done:
            self._serial.step()
        self._serial.check(self._policy.values, self._label)
        return seconds


def bench_exchange(channel: Channel, world: World, report: Report, *, parameters: int, bucket_bytes: int, pairs: int) -> None:
    """One record for each policy that can be had. Collective; MpitrainError as soon as one parameter is wrong."""
    about = machine(channel)
    report.line(f"gradient sum + AdamW of {parameters:,} parameters on {world.size} ranks beside MPI_Allreduce + the same AdamW; "
                f"medians of {pairs} pairs\n{'policy':<24}{'ours':>11}{'MPI':>11}   times faster")
    for name in POLICIES:
        inputs = Inputs(parameters, "float32", world.size)
        serial = Serial(inputs)
        try:
            policies = POLICIES[name](world, parameters, bucket_bytes), WithNative(world, parameters, bucket_bytes)
        except Unavailable as error:
            report.line(f"{name:<24}left out: {error}")
            continue
        for policy in policies:
            policy.values[...] = 0
        channel.barrier()                                     # The memory of `values` may be shared between ranks.
        ours, native = (Steps(policy, f"exchange {label}", world, inputs, serial)
                        for policy, label in zip(policies, (name, "with MPI_Allreduce")))
        result = alternate(ours.take, native.take, pairs).summary()
        report.record({"bench": "exchange", "algorithm": name, "bytes": 4 * parameters, "dtype": "float32", "ranks": world.size,
                       **result, "parameters": parameters, "bucket_bytes": bucket_bytes, "machine": about})
        report.line(f"{name:<24}{in_time(result['seconds']):>11}{in_time(result['mpi_seconds']):>11}   {ratio_of(result)}")
        for policy in policies:
            policy.close()
