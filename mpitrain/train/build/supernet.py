"""A run of a supernet (`models.elastic`): the paths of each step, what an optimizer may move, and evaluations of a path.

    step 7, uniform     every micro-batch, on every rank, takes path(seed, 7)
    step 7, sandwich    micro-batch 0 the smallest, 1 and 2 paths (seed, 7, 1) and (seed, 7, 2), 3 the largest, 4 the smallest

A path is a function of seed, step and micro-batch alone, so all ranks know all paths of a step, and a resumed run takes those of
one that was not interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpitrain.autograd import Deferred, Tensor
from mpitrain.backend import Array
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.messages.channel import Channel
from mpitrain.config import Config
from mpitrain.data import MicroBatch
from mpitrain.errors import ConfigError, MeshError
from mpitrain.nn import Module
from mpitrain.nn.choices import Elastic
from mpitrain.nn.elastic import in_use
from mpitrain.optim import Optimizer
from mpitrain.optim.sparing import Sparing
from mpitrain.parallel.pipeline.inference import Inference
from mpitrain.parallel.policies.policy import Policy
from mpitrain.schedules.grid import Grid
from mpitrain.train.build.calibration import Calibration, normed
from mpitrain.train.build.extension import Assembled, Extension
from mpitrain.train.build.inputs import Inputs
from mpitrain.train.build.validate import Validated
from mpitrain.train.observers.reached import Reached

SANDWICH = 4                     # micro-batches: the smallest, two drawn, the largest


class Supernet(Extension):
    """ConfigError or MeshError, alike on all ranks and without MPI, for what does not go with the paths of `model`."""

    def __init__(self, config: Config, grid: Grid, inputs: Inputs, model: Module, optimizer: Any):
        self.config, self.inputs, self.model = config, inputs, model
        self.elastic: Elastic = model.elastic
        refuse_supernet(config, grid, optimizer)
        self._of: tuple[int, Mapping[str, Array]] = (-1, {})  # a step, and what it does not use

    def validated(self, valid: Validated) -> None:
        self.n_micro, self.sampler = valid.n_micro, valid.sampler
        if self.elastic.rule == "sandwich" and self.n_micro % SANDWICH:
            raise self.config.wrong(f'model.sampling = "sandwich" takes micro-batches by fours, found {self.n_micro} in a step; '
                                    f"set train.micro_batches to a multiple of {SANDWICH}", ("train.micro_batches",))

    def described(self, steps: int) -> Sequence[str]:
        return [f'a supernet of {self.elastic.count:,} networks, model.sampling = "{self.elastic.rule}"']

    def optimizer(self, made: Optimizer, policy: Policy, control: Channel, steps: int) -> Optimizer:
        self.policy = policy
        return Sparing(made, self.unused)

    def path(self, step: int, micro: int) -> dict[str, int]:
        """That of a micro-batch of the step after `step`."""
        elastic, seed, place = self.elastic, self.config.run.seed, micro % SANDWICH
        if elastic.rule == "uniform":
            return elastic.draw(seed, step)
        if place in (0, SANDWICH - 1):
            return elastic.largest if place else elastic.smallest
        return elastic.draw(seed, step, micro)

    def unused(self) -> Mapping[str, Array]:
        """The elements of each parameter that no micro-batch of this step uses, on whatever rank."""
        step = self.policy.step
        if self._of[0] != step:
            size, n = self.sampler.size(step), self.n_micro
            paths = [self.path(step, i) for i in range(n) if i * size // n < (i + 1) * size // n]
            self._of = step, unused(self.model, self.elastic, paths, self.policy.layout.device.xp)
        return self._of[1]

    def pipeline(self, kind: Any) -> Any:
        supernet = self

        class Paths(kind):                                    # type: ignore[misc]
            """A pipeline whose micro-batches take paths."""

            def forward(self, micro: MicroBatch, x: Tensor, chunk: int = 0) -> Tensor:
                supernet.elastic.take(supernet.path(micro.step, micro.index))
                found: Tensor = super().forward(micro, x, chunk)
                return found

            def differentiate(self, output: Tensor, grad: Array, micro: MicroBatch) -> Deferred | None:
                supernet.elastic.take(supernet.path(micro.step, micro.index))      # for blocks that are computed again
                found: Deferred | None = super().differentiate(output, grad, micro)
                return found
        return Paths

    def open(self, policy: Policy, mesh: Mesh, control: Channel, seats: range, steps: int) -> None:
        self.mesh = mesh

    def join(self, run: Assembled) -> None:
        observers, evaluator = run.trainer.observers, run.trainer.evaluator
        observers[:] = [o for o in observers if not isinstance(o, Reached)]      # A path leaves parameters out, and is meant to.
        if evaluator is None:
            return
        calibration = calibration_of(self.model, evaluator.inference, self.inputs, self.mesh)
        weights = evaluator.weights

        @contextmanager
        def largest() -> Iterator[None]:
            with weights(), self.elastic.taken(self.elastic.largest):
                if calibration is not None:
                    calibration.run()
                yield
        evaluator.weights = largest
        run.trainer.notes.append(f"a supernet of {self.elastic.count:,} networks; evaluations are of the largest path")


def calibration_of(model: Module, inference: Inference, inputs: Inputs, mesh: Mesh) -> Calibration | None:
    """What measures the statistics of the path in use; None for a model that has none. It communicates."""
    return Calibration(inference, inputs.reader(inputs.transforms), inputs.train_rows, mesh) if normed(model) else None


def unused(model: Module, elastic: Elastic, paths: list[dict[str, int]], xp: Any = np) -> dict[str, Array]:
    """The numbers of the elements of each parameter that none of these paths uses, for parameters that have some."""
    used: dict[str, Any] = {}
    for path in paths:
        with elastic.taken(path):
            found = in_use(model)
        for name, parameter in model.named_parameters():
            if name not in found:
                continue
            if (index := found[name]) is None:
                used[name] = None
            elif used.setdefault(name, np.zeros(parameter.global_shape, bool)) is not None:
                used[name][np.ix_(*index)] = True
    rest: dict[str, Array] = {}
    for name, parameter in model.named_parameters():
        mask = used.get(name, np.zeros(parameter.global_shape, bool))
        if mask is not None and not mask.all():
            rest[name] = xp.asarray(np.flatnonzero(~mask.reshape(-1)))
    return rest


def refuse_supernet(config: Config, grid: Grid, optimizer: Any) -> None:
    """ConfigError or MeshError for the first thing that does not go with paths; `optimizer` is made for nothing in particular."""
    c, what = config, f'model.name = "{config.model.name}" is a supernet'
    for axis in ("tp", "cp", "ep", "site"):
        if grid.size(axis) > 1:
            raise MeshError(f"{what}, whose paths use parts of layers, found mesh.{axis} = {grid.size(axis)}, which cuts or "
                            f"doubles them; set mesh.{axis} = 1, and use mesh.dp and mesh.pp")
    for wrong, found, why, instead in (
            (optimizer.whole_parameters or optimizer.condensed or optimizer.needs_closure or optimizer.sends,
             f'optimizer.name = "{c.optimizer.name}"', "and that optimizer looks at whole parameters, not at each element",
             'optimizer.name = "adamw" or "sgd"'),
            (bool(c.comm.compress), f'comm.compress = "{c.comm.compress}"',
             "and what a message leaves out comes in a later step, of another path", 'comm.compress = ""'),
            (bool(c.workers.count), f"workers.count = {c.workers.count}", "and each worker would need paths of its own",
             "workers.count = 0"),
            (c.privacy.unit != "none", f'privacy.unit = "{c.privacy.unit}"', "and gradients of rows are of whole layers",
             'privacy.unit = "none"'),
            (bool(c.lora.rank), f"lora.rank = {c.lora.rank}", "and adapters take the place of whole layers", "lora.rank = 0"),
            (bool(c.shrink.prune), f'shrink.prune = "{c.shrink.prune}"', "and the largest path alone would be pruned",
             'shrink.prune = "", and cut a path out first'),
            (c.optimizer.offload != "none", f'optimizer.offload = "{c.optimizer.offload}"',
             "and state that is away cannot be put back", 'optimizer.offload = "none"')):
        if wrong:
            raise ConfigError(f"{what}, {why}, found {found}; set {instead}")
