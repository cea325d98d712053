"""Pruning while training, [shrink] of a run: masks are chosen after the updates that its schedule names, and others obey them.

    step           begin                                   end
    update           | masked | masked | free | masked ...  | masked until the run is over
    masks          chosen               chosen again       chosen last, then perhaps the weights go back to those of step `rewind`

The update before a choice is free of masks, so pruned weights may come back until `end`. All ranks choose the same masks,
whatever they have of the model: see `shrink.select`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpitrain.arguments import accepted, call
from mpitrain.checkpoint.hashes import array_line, total_sha256
from mpitrain.checkpoint.kinds import Expected, Kept, Placed, Shapes, Values
from mpitrain.checkpoint.manifest import Checkpoint
from mpitrain.checkpoint.parts import Piece
from mpitrain.checkpoint.state import State
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.messages.channel import Channel
from mpitrain.config import Config
from mpitrain.config.shrink_sections import PRUNERS, ShrinkConfig
from mpitrain.errors import ConfigError
from mpitrain.nn import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.parallel.policies.policy import Policy
from mpitrain.placement.stages import Stage
from mpitrain.registry import named
from mpitrain.shrink.masks import Layer, Masks, prunable
from mpitrain.shrink.rules import Rule
from mpitrain.shrink.schedule import Schedule
from mpitrain.shrink.sparse import fix_blocks
from mpitrain.train.intervals import Step
from mpitrain.train.observers.observer import Observer, Watched


def rule_of(config: Config) -> Rule:
    """The pruning rule that [shrink] names, ours or a user's own."""
    s = config.shrink
    kind: Any = PRUNERS[s.prune] if s.prune in PRUNERS else PRUNERS.resolve(s.prune, config.folder)      # "n:m" has a colon
    what = f'shrink.prune = "{s.prune}"'
    made = call(kind, what, accepted(kind, {"pattern": s.pattern, "scope": s.scope}), section="shrink")
    if not isinstance(made, Rule):
        raise ConfigError(f"{what} must give an mpitrain.shrink.rules.Rule, found {named(made)}")
    return made


def refuse_pruning(config: Config, model: Module, steps: int) -> None:
    """ConfigError for a [shrink] that does not fit the model, not cut yet, or the length of the run."""
    s = config.shrink
    if s.end > steps:
        raise config.wrong(f"shrink.end = {s.end} lies beyond the {steps} steps of the run; set it to {steps} at most",
                           ("shrink.end", "train.steps", "train.epochs"))
    rule, shapes = rule_of(config), prunable(model, s.skip)
    if not any(rule.fits(shape) for shape in shapes.values()):
        raise ConfigError(f'shrink.prune = "{s.prune}": no weight of the model can be pruned{because(rule, shapes)}')


def because(rule: Rule, shapes: Mapping[str, Any]) -> str:
    return f": {rule.why} in {', '.join(shapes)}" if shapes and rule.why else ""


def refuse_cut(config: Config, stage: Stage) -> None:
    """MeshError where the mesh cuts a weight in a way that the rule cannot prune."""
    rule, shapes = rule_of(config), prunable(stage.whole, config.shrink.skip)
    for name, p in stage.whole.named_parameters():
        if name in shapes and rule.fits(p.global_shape):
            rule.refuse(name, p)


def refuse_masks(rule: Rule, layers: Sequence[Layer]) -> None:
    """ConfigError where a rule has written something else than zeros and ones."""
    for part in (part for layer in layers for part in layer.parts):
        kept: Any = part.kept
        marks = isinstance(kept, np.ndarray) and kept.shape == part.values.shape and kept.dtype.kind in "biu"
        if not marks or (kept > 1).any() or (kept < 0).any():
            found = named(kept) + (f" of {kept.dtype}, shape {kept.shape}" if isinstance(kept, np.ndarray) else "")
            raise ConfigError(f'the pruning rule {type(rule).__name__} must leave part.kept of "{part.leaf.name}" as '
                              f"{part.values.size:,} zeros and ones (part.kept[...] = ...), found {found}")


class Bits(Values):
    """The kind of state that masks are: ``mask/NAME`` of each pruned weight, a bit for each element in C order, padded to whole
    bytes. Each is written by one rank."""

    def __init__(self, masks: Masks):
        super().__init__("mask", lambda: masks.bits, masks.put)
        self.masks = masks

    def expected(self, shapes: Shapes) -> Expected:
        return {f"mask/{name}": ((-(-math.prod(shape) // 8),), np.dtype(np.uint8)) for name, shape in self.masks.shapes.items()}

    def pieces(self, mesh: Mesh | None) -> Iterator[Piece]:
        for name, bits in (self.masks.bits if mesh is None else self.masks.written_here()).items():
            yield Piece.whole(f"mask/{name}", bits)

    def read(self, checkpoint: Checkpoint) -> None:
        self.masks.put({name: checkpoint.read(f"mask/{name}") for name in self.masks.bits})


class Pruning(Observer):
    """The masks of a run, as `config` asks for them. To be the first observer: others see what it leaves.

    `whole` is the model of which the ranks have parts; lines of the start go to `notes`. Adds the kinds ``mask/NAME`` and, where
    weights go back, ``rewind/NAME`` to the run's state.
    """

    def __init__(self, config: Config, whole: Module, policy: Policy, state: State, control: Channel,
                 notes: list[str]):
        s: ShrinkConfig = config.shrink
        self.rewind, self.end = -1 if isinstance(s.rewind, str) else s.rewind, s.end
        self.policy, self.state, self.control, self.products = policy, state, control, s.products
        self.schedule = Schedule(s.sparsity, s.begin, s.end, s.every)
        self.rule, shapes = rule_of(config), prunable(whole, s.skip)
        self.sliced = policy.shards is not None
        fitting = {name: shape for name, shape in shapes.items() if self.rule.fits(shape)}
        left = [name for name in shapes if name not in fitting]
        notes += [f"not pruned: {', '.join(left)}: {self.rule.why}"] if left else []
        self.tell = notes.append                              # until the run has begun
        self.masks = Masks(policy.storage, fitting, self._counts)
        self.kind = Bits(self.masks)
        state.kept.append(self.kind)
        if self.rewind >= 0:
            self.first = policy.storage.new_flat()
            self.copied_bytes = self.first.nbytes
            state.kept.append(Kept("rewind", self._placed_values, policy.storage.dtype))

    def begin(self, run: Watched) -> None:
        if run.step == 0:
            if self.rewind == 0:
                self._remember()
            if self.schedule.due(0):
                self._choose(0)
        elif run.step >= self.schedule.begin:
            self.policy.masks = self.masks
            self._count_from(run.step)
            if run.step >= self.end:
                self._fix_blocks()
        self.tell = run.tell

    def before_step(self, step: int) -> None:
        if self.schedule.due(step):
            self.policy.masks = None

    def after_step(self, step: int, fields: Step, seconds: float) -> None:
        if step == self.rewind:
            self._remember()
        if self.schedule.due(step):
            self._choose(step)

    def finish(self, step: int) -> Mapping[str, Any]:
        pruned, all_of_them = self._zeros()
        return {"pruned": {"zeros": pruned, "of": all_of_them, "masks_sha256": self._sha256()}}

    def _choose(self, step: int) -> None:
        """Masks of the weights as they are, and zeros there on all ranks."""
        policy, layers = self.policy, self.masks.layers()
        self.rule.choose(layers, self.schedule.at(step), self._add)
        refuse_masks(self.rule, layers)
        self.masks.take(layers, self._add)
        policy.settle()                                       # Nobody writes before all have read.
        if step == self.end and self.rewind >= 0:
            self._go_back()
        self.masks.apply(policy.own())
        self.masks.clear(policy.optimizer.averaged_weights(policy.own()))
        policy.publish()
        policy.masks = self.masks
        if step == self.end:
            zeros, n = self._zeros()
            back = f"; all weights are those of step {self.rewind} again" if self.rewind >= 0 else ""
            self.tell(f"pruned {zeros:,} of {n:,} weights, {zeros / n:.1%}, in {len(self.masks.shapes)} layers; these zeros "
                      f"stay{back}")
            self._fix_blocks()

    def _fix_blocks(self) -> None:
        """Masks stay from now on: linear layers whose blocks pay compute with these alone."""
        if self.products == "sparse" and self.policy.storage.device.name == "cpu":
            names = fix_blocks(self.policy.stage.model, self.masks)
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                self.tell(f"products by what is left of {', '.join(names[:3])}{more}, in blocks; pruned weights have no gradient "
                          "there")

    def _go_back(self) -> None:
        policy = self.policy
        for s in policy.own():
            policy.storage.values[s.start:s.stop][...] = self.first[s.start:s.stop]
        policy.optimizer.restart()
        if policy.loss_scale is not None:
            policy.loss_scale.restart()
        self._count_from(self.end)

    def _count_from(self, step: int) -> None:
        """After the way back, the rate goes on from step `rewind`, and the optimizer from its first."""
        if self.rewind >= 0 and step >= self.end:
            self.policy.behind, self.policy.began = self.end - self.rewind, self.end

    def _remember(self) -> None:
        for s in self.policy.storage.segments:
            self.first[s.start:s.stop] = self.policy.storage.values[s.start:s.stop]

    def _zeros(self) -> tuple[int, int]:
        """(pruned weights of the whole model, all of those that masks are of). It communicates."""
        count = np.array([sum(self.masks.zeros().values())], np.int64)
        self._add(count)
        return int(count[0]), sum(int(np.prod(shape)) for shape in self.masks.shapes.values())

    def _add(self, counts: np.ndarray[Any, Any]) -> None:
        self.control.allreduce(counts, name="masks")

    def _counts(self, parameter: Parameter) -> bool:
        return Placed(parameter, np.zeros(0), 0 if self.sliced else None).is_ours(self.state.mesh)

    def _sha256(self) -> str:
        """The hash of all masks, over the whole model. It communicates."""
        own = [array_line(name, bits) for name, bits in self.masks.written_here().items()]
        return total_sha256(line for lines in self.control.gather_objects(own) for line in lines)

    def _placed_values(self) -> Iterable[Placed]:
        storage = self.policy.storage
        return (Placed(s.parameter, view, s.first if self.sliced else None)
                for s, view in zip(storage.segments, storage.views(self.first)))
