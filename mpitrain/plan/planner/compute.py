"""What a model's blocks take on a described machine: seconds of one micro-batch forward and backward, of the update, of a step.

    measured here        the machine file was made on this very host: the blocks themselves are timed in this process
    rates                it was made elsewhere: products at its measured rate, other operations at its memory's, calls
    share of the peak    it has no measurements: 2 x multiply-adds / (peak x efficiency), which has all else in it

Without timing backward takes twice as long as forward: it computes two gradients of each product's size (Chowdhery et al.,
"PaLM", 2022, appendix B). The update reads parameters, gradients and state and writes parameters and state: bytes / bandwidth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import NamedTuple

import numpy as np

from mpitrain.backend import CPU
from mpitrain.backend.memory import resident
from mpitrain.config import Config
from mpitrain.errors import ConfigError, MpitrainError
from mpitrain.machines.machine import MachineFile
from mpitrain.machines.measured import is_here, slowdown, step_seconds, turns
from mpitrain.nn import Module
from mpitrain.parallel.layers.join import alone
from mpitrain.parallel.layers.tensor_loss import cut_loss
from mpitrain.parallel.pipeline.feed import Feed
from mpitrain.placement.place import place
from mpitrain.plan.block_work import BlockWork, count_blocks
from mpitrain.plan.planner.timing import Timed, reading, time_blocks
from mpitrain.schedules.grid import Grid
from mpitrain.train.build.from_config import describe
from mpitrain.train.build.inputs import Inputs
from mpitrain.train.machine import threads

ITEM = 4                      # bytes of a parameter, its gradient and each number of optimizer state
PASSES = 3                    # times that an elementwise operation's elements cross memory: two read, one written
UPDATE_PASSES = 7             # reads of parameter, gradient and two moments, writes of three (Adam)
BACKWARD = 2                  # times forward
LONGEST = 2.0                 # seconds of a pass beyond which blocks are not timed: rates say as much then
CUTS = ("tp", "cp", "ep")     # axes that cut a block's work


class Blocks(NamedTuple):
    """Seconds of one micro-batch on one rank through each block of the model, in order, with a core of its own, and by what
    they rest on.

    Where ranks share cores they take turns on top (`machines.measured.turns`), as far as they work at the same time. `update` is
    each block's share of the optimizer's step with all of its parameters on the rank (divide by the replicas where they are cut),
    and `step` what a step takes besides, whatever its size; turns are in both.
    """

    forward: list[float]
    backward: list[float]
    update: list[float]
    step: float
    origin: str


class BlockCosts:
    """The seconds of one run's blocks on one machine, for any micro-batch and mesh; each is counted or timed once.

    The transforms of `inputs` have been fitted; `model`, where it is there already, is neither cut nor has it memory. ConfigError where the machine has no speed for the run's precision.
    """

    def __init__(self, config: Config, inputs: Inputs, machine: MachineFile, model: Module | None = None):
        self.config, self.inputs, self.machine = config, inputs, machine
        self._rate = rate(machine, config.train.precision)
        feed = Feed(CPU, np.dtype("float32"), tokens=inputs.tokens)
        given = feed.tensors(inputs.sample()[0])
        self.work = count_blocks(model or describe(config, inputs.tokens, inputs).model, getattr(given, "array", given))
        self._times: dict[tuple[int, ...], Timed | None] = {}

    def of(self, rows: int, lengths: Mapping[str, int], n_micro: int = 1) -> Blocks:
        """`rows` of a micro-batch of a data-parallel rank, of which it has `n_micro` in a step; `lengths` are the mesh's."""
        ranks = prod(lengths.values())
        if self.machine.levels:
            ranks = min(ranks, self.machine.levels[0].ranks or ranks)
        slower, shared = slowdown(self.machine, ranks, "training"), turns(self.machine, ranks)
        timed = self._timed(rows, lengths)
        forward, backward, update, fold, norm, read = self._measured(timed) if timed else self._estimated(rows, lengths)
        again = (n_micro - 1) / n_micro
        backward = [seconds * slower + again * share for seconds, share in zip(backward, self._shares(fold))]
        clipped = norm if self.config.optimizer.clip_norm else 0.0
        of_all = (update + clipped) * slowdown(self.machine, ranks, "memory") * shared
        reads = read * n_micro * shared if ranks >= (self.machine.cores or ranks + 1) else 0.0
        return Blocks([seconds * slower for seconds in forward], backward, self._shares(of_all),
                      step_seconds(self.machine, ranks) + reads, self.origin(timed is not None))

    def origin(self, timed: bool) -> str:
        """What the seconds rest on, in words."""
        if timed:
            return "measured: the blocks, on this host"
        return f"measured: rates, in the machine file {self.machine.name}" if self.machine.measured else \
            f"assumed: {self.machine.efficiency:.0%} of the peak of {self.machine.name}"

    def _shares(self, seconds: float) -> list[float]:
        """Seconds of all parameters, by block."""
        total = sum(work.parameters for work in self.work) or 1
        return [seconds * work.parameters / total for work in self.work]

    def _measured(self, timed: Timed) -> tuple[list[float], list[float], float, float, float, float]:
        return timed.forward, timed.backward, timed.update, timed.fold, timed.norm, timed.read

    def _estimated(self, rows: int, lengths: Mapping[str, int]) -> tuple[list[float], list[float], float, float, float, float]:
        sharing = prod(lengths.get(axis, 1) for axis in CUTS)
        forward = [self._forward(work, rows / sharing) for work in self.work]
        nbytes = ITEM * sum(work.parameters for work in self.work) / lengths.get("tp", 1)
        bandwidth = self.machine.memory_bandwidth
        return (forward, [BACKWARD * seconds for seconds in forward], UPDATE_PASSES * nbytes / bandwidth,
                PASSES * nbytes / bandwidth, nbytes / bandwidth, 0.0)

    def _forward(self, work: BlockWork, rows: float) -> float:
        seconds = 2 * work.multiply_adds * rows / self._rate
        if not self.machine.measured:
            return seconds
        moved = PASSES * ITEM * work.elements * rows / self.machine.memory_bandwidth
        return seconds + moved + work.operations * float(self.machine.measured.get("operation_s", 0.0))

    def _timed(self, rows: int, lengths: Mapping[str, int]) -> Timed | None:
        """The blocks' own times, for these rows and cuts; None where they cannot be had here, or would take long."""
        key = (rows, *(lengths.get(axis, 1) for axis in CUTS))
        if not is_here(self.machine) or self.config.train.device != "cpu":
            return None
        if key not in self._times:
            estimated = sum(self._forward(work, rows) for work in self.work) * (1 + BACKWARD)
            size = ITEM * sum(work.parameters for work in self.work)
            fits = 4 * size + resident() < (self.machine.memory_bytes or float("inf"))
            self._times[key] = self._time(rows, lengths) if estimated < LONGEST and fits else None
        return self._times[key]

    def _time(self, rows: int, lengths: Mapping[str, int]) -> Timed | None:
        config, inputs = self.config, self.inputs
        made = describe(config, inputs.tokens, inputs)
        cuts = {axis: lengths.get(axis, 1) for axis in CUTS}
        try:
            placed = place(made.model, Grid(cuts), replace(config.mesh, chunks=1, stages="blocks"), config.train, config.comm)
            group = alone(placed) if prod(cuts.values()) > 1 else None
            loss = made.loss if group is None else cut_loss(made.loss, placed.head, group)
            count = min(rows, len(inputs.train_rows))
            x, y = (np.resize(part, (rows, *part.shape[1:])) for part in inputs.sample(count))
            timed = time_blocks(
                placed.stage.whole, x, y, loss=loss, optimizer=made.optimizer, seed=config.run.seed,
                precision=config.train.precision, threads=threads.pin(config.train.threads or 1),
                feed=lambda s: Feed(CPU, s.dtype, tokens=inputs.tokens, part=placed.part, compute=s.compute_dtype))
        except MpitrainError:
            return None                                       # What such a model's blocks cannot do, a run says better.
        return timed._replace(read=reading(inputs, count))


def rate(machine: MachineFile, precision: str) -> float:
    """Operations a second that a rank's products reach. ConfigError for a precision that the machine file has no speed of."""
    if precision not in machine.flops:
        raise ConfigError(f'the machine {machine.name} has no flops of {precision}, the run\'s train.precision; it has '
                          f"{', '.join(machine.flops) or 'none'}: add [machine.flops] {precision} = ... to its file")
    return machine.flops[precision] * machine.efficiency
