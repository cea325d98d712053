"""The step of a GPT in three dimensions (Narayanan et al., 2104.04473): its work from its sizes, for the step model.

    B samples, b in a micro-batch, s tokens each; l layers of width h, vocabulary V; t tensor, p pipeline, d data-parallel ranks

A layer multiplies 24 b s h^2 + 4 b s^2 h FLOPs forward, twice as many back, and forward once more where activations are
recomputed (the paper's appendix). Two all-reduces of b s h numbers cross the tensor group in each of these passes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpitrain.machines import MachineFile
from mpitrain.schedules.grid import REPLICAS
from mpitrain.schedules.step_simulate import Bucket, Collective, Stage, StepTime, Work, simulate_step

HALF, SINGLE = 2, 4                # bytes of activations and parameters on the way, and of gradients that are added up
ADAM_BYTES = 30                    # read and written a parameter: gradient, master copy and two moments in 4 bytes, all but the
                                   # gradient written back, and the copy in 2 bytes
TENSOR = ("tp",)
# Bytes that a layer reads and writes beside its products, forward; backward twice as many. A number is 2 bytes, a mask 1.
SCORES = 9                         # a score: masked softmax (2 read, 2 written), dropout (2 read, 2 and a mask written)
CUT = 16                           # h of a token, cut by tensor parallelism: bias and GeLU of 4 h numbers (2 read, 2 written)
WHOLE = 22                         # h of a token, on every tensor rank: 2 norms (4 each), 2 bias, dropout and sum (7 each)


@dataclass(frozen=True)
class Gpt:
    """The sizes of a model; V and s are those of all models of the paper."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 51_200
    length: int = 2_048

    @property
    def parameters(self) -> float:
        """Equation (2): 12 l h^2 (1 + 13 / 12 h + (V + s) / 12 l h)."""
        layers, width = self.layers, self.width
        return 12 * layers * width**2 * (1 + 13 / (12 * width) + (self.vocabulary + self.length) / (12 * layers * width))

    def flops(self, batch: int) -> float:
        """Equation (3), FLOPs of a step with recomputation: 96 B s l h^2 (1 + s / 6 h + V / 16 l h)."""
        width = self.width
        return (96 * batch * self.length * self.layers * width**2
                * (1 + self.length / (6 * width) + self.vocabulary / (16 * self.layers * width)))


@dataclass(frozen=True)
class Layout:
    """How a model is cut: tensor and pipeline sizes, chunks of a stage, ranks, global batch, samples of a micro-batch."""

    tensor: int
    pipeline: int
    ranks: int
    batch: int
    micro: int = 1
    chunks: int = 1
    recompute: bool = True
    scatter: bool = True           # each tensor rank sends its part of an activation, which is gathered inside the node

    @property
    def replicas(self) -> int:
        return self.ranks // (self.tensor * self.pipeline)

    @property
    def n_micro(self) -> int:
        """Micro-batches of a replica; the last one may be smaller."""
        return max(1, -(-self.batch // (self.replicas * self.micro)))


def step_of(gpt: Gpt, layout: Layout, machine: MachineFile) -> StepTime:
    """Seconds of a step. Gradients leave when all are there: nothing hides their exchange in that system."""
    mesh = {"pp": layout.pipeline, "dp": layout.replicas, "tp": layout.tensor}
    schedule = "interleaved" if layout.chunks > 1 else "1f1b"
    return simulate_step(work_of(gpt, layout, machine), mesh, schedule, layout.n_micro, machine)


def work_of(gpt: Gpt, layout: Layout, machine: MachineFile) -> Work:
    """Equal numbers of layers on all virtual stages, and the product with the vocabulary on the last one."""
    rate = machine.flops["float16"] * machine.efficiency * layout.tensor
    tokens, n_virtual = layout.micro * gpt.length, layout.pipeline * layout.chunks
    depth = gpt.layers / n_virtual
    layer = (24 * tokens * gpt.width**2 + 4 * tokens * gpt.length * gpt.width) / rate
    moved = (SCORES * gpt.heads * gpt.length + CUT * gpt.width) / layout.tensor + WHOLE * gpt.width
    layer += tokens * moved / machine.memory_bandwidth
    head = 2 * tokens * gpt.width * gpt.vocabulary / rate
    activation = tokens * gpt.width * HALF
    sums = Collective("all_reduce", TENSOR, activation, 2 * depth)
    again = (sums,) if layout.recompute else ()
    share = activation / layout.tensor if layout.scatter else activation
    gathered = (Collective("all_gather", TENSOR, activation),) if layout.scatter and n_virtual > 1 else ()
    gradients = gpt.parameters / (layout.pipeline * layout.tensor)

    def stage(number: int) -> Stage:
        last, forward = number == n_virtual - 1, depth * layer
        bucket = Bucket(gradients * SINGLE / layout.chunks, 1.0)
        return Stage(forward + head * last, (1 + layout.recompute) * forward + head * last, forward + head * last, share,
                     in_forward=(sums, *gathered[:number]), in_backward=(sums, *again, *gathered[:n_virtual - 1 - number]),
                     buckets=(bucket,))
    return Work(tuple(map(stage, range(n_virtual))), update=gradients * ADAM_BYTES / machine.memory_bandwidth)


def zero3_step_of(gpt: Gpt, layout: Layout, machine: MachineFile) -> StepTime:
    """Seconds of a step of ZeRO-3 alone (Rajbhandari et al., 1910.02054): all ranks share out the parameters, and gather them in
    2 bytes three times (forward, forward again for the backward, backward) and add gradients up to their owners, behind compute.

    One flat ring goes through one card of each node: parameters are gathered one after the other.
    """
    work = work_of(gpt, replace(layout, tensor=1, pipeline=1, chunks=1), machine)
    whole = gpt.parameters * HALF
    gather, add = Collective("all_gather", REPLICAS, whole), Collective("reduce_scatter", REPLICAS, whole)
    stage = replace(work.stages[0], fetched_forward=(gather,), fetched_backward=(gather, gather, add), buckets=())
    return simulate_step(Work((stage,), work.update / layout.ranks), {"dp": layout.ranks}, "1f1b", layout.n_micro, machine,
                         algorithm="ring")
