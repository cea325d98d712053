"""What a model's blocks take on a described machine: seconds of one micro-batch forward and backward, and of the update.

    products         2 x multiply-adds / rate of products            rate: measured, or peak x efficiency of the machine file
    other operations bytes that they read and write / bandwidth      only where the file was measured: an efficiency of the
    calls            operations x seconds of a call                  whole step has them in it already
    update           bytes of parameters, gradients, state / bandwidth

Backward computes two gradients of each product's size (Chowdhery et al., "PaLM", 2022, appendix B), and takes twice as long.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np

from mpitrain.backend import CPU
from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.nn import Module
from mpitrain.parallel.pipeline.feed import Feed
from mpitrain.plan.flops import BlockWork, count_blocks
from mpitrain.train.build.inputs import Inputs
from mpitrain.train.build.model import make_model

ITEM = 4                      # bytes of a parameter, its gradient and each number of optimizer state
PASSES = 3                    # times that an elementwise operation's elements cross memory: two read, one written
UPDATE_PASSES = 7             # reads of parameter, gradient and two moments, writes of three (Adam)
BACKWARD = 2                  # times forward


class Blocks(NamedTuple):
    """Seconds of one micro-batch on one rank through each block of the model, in order, by what they rest on.

    `update` is each block's share of the optimizer's step with all of its parameters on the rank (divide by the replicas where
    they are cut), and `step` what a step takes besides, whatever its size.
    """

    forward: list[float]
    backward: list[float]
    update: list[float]
    step: float
    origin: str


class BlockCosts:
    """The seconds of one model's blocks on one machine, for any number of rows and any mesh. The transforms of `inputs` have been
    fitted; `model`, where it is given, has no memory and is not cut. ConfigError where the machine has
    no speed for the run's precision."""

    def __init__(self, config: Config, inputs: Inputs, machine: Any, model: Module | None = None):
        self.machine, self.precision = machine, config.train.precision
        feed = Feed(CPU, np.dtype("float32"), tokens=inputs.tokens)
        given = feed.tensors(inputs.sample()[0])
        self.work = count_blocks(make_model(config) if model is None else model, getattr(given, "array", given))
        self._rate = rate(machine, self.precision)

    def of(self, rows: int, lengths: Mapping[str, int]) -> Blocks:
        """`rows` of a micro-batch of a data-parallel rank; `lengths` are those of the mesh, of which tp, cp and ep share a
        block's work."""
        sharing = prod(lengths.get(axis, 1) for axis in ("tp", "cp"))
        forward = [self._forward(work, rows / sharing) for work in self.work]
        cut = lengths.get("tp", 1)
        update = [UPDATE_PASSES * ITEM * work.parameters / cut / self.machine.memory_bandwidth for work in self.work]
        return Blocks(forward, [BACKWARD * seconds for seconds in forward], update, 0.0, self.origin)

    @property
    def origin(self) -> str:
        return f"the rates in the machine file {self.machine.name}" if self.machine.measured else \
            f"{self.machine.efficiency:.0%} of the peak of {self.machine.name}"

    def _forward(self, work: BlockWork, rows: float) -> float:
        seconds = 2 * work.multiply_adds * rows / self._rate
        if not self.machine.measured:
            return seconds
        moved = PASSES * ITEM * work.elements * rows / self.machine.memory_bandwidth
        return seconds + moved + work.operations * float(self.machine.measured.get("operation_s", 0.0))


def rate(machine: Any, precision: str) -> float:
    """Operations a second that a rank's products reach. ConfigError for a precision that the machine file has no speed of."""
    if precision not in machine.flops:
        raise ConfigError(f'the machine {machine.name} has no flops of {precision}, the run\'s train.precision; it has '
                          f"{', '.join(machine.flops) or 'none'}: add [machine.flops] {precision} = ... to its file")
    return float(machine.flops[precision]) * float(machine.efficiency)
