"""The level of a run with several sites: made, put into its policy, and its states into checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from mpitrain.checkpoint.kinds import Kept, Placed, Values
from mpitrain.checkpoint.manifest import Checkpoint
from mpitrain.checkpoint.state import State
from mpitrain.checkpoint.workers import OfWorkers, Sometimes, sites_of
from mpitrain.comm.job import guard
from mpitrain.config import Config
from mpitrain.errors import CheckpointError
from mpitrain.nn import Module, running_layers
from mpitrain.parallel.levels.fragments import fragments_of
from mpitrain.parallel.levels.gradients import SiteGradients
from mpitrain.parallel.levels.level import Level
from mpitrain.parallel.levels.outer import Outer
from mpitrain.parallel.levels.plan import Planned, plan, trained
from mpitrain.parallel.policies.policy import Policy
from mpitrain.train.intervals import Step
from mpitrain.train.observers.observer import Observer, Watched
from mpitrain.train.trainer import Trainer


class Meetings(Observer):
    """Ends a run with the mean of its sites, and has a level ready for checkpoints. The first observer: the others see that."""

    def __init__(self, level: Level):
        self.level = level

    def begin(self, run: Watched) -> None:
        self._more = run.more

    def after_step(self, step: int, fields: Step, seconds: float) -> None:
        self._more.update(self.level.fields)

    def before_checkpoint(self, step: int) -> None:
        self.level.wait()

    def finish(self, step: int) -> Mapping[str, Any]:
        self.level.finish()
        return {}


def add_level(config: Config, trainer: Trainer, state: State, policy: Policy, model: Module) -> None:
    """Gives an open policy its level, and the trainer and the state what follows from it. It communicates."""
    planned = plan(config, policy.mesh, model, trainer.plan.steps, trainer.plan.steps_per_epoch)
    assert planned is not None
    policy.level = level = make_level(planned, policy, model)
    trainer.weights = level.in_use
    if trainer.evaluator is not None:
        trainer.evaluator.weights = level.in_use
    trainer.observers.insert(0, Meetings(level))
    trainer.notes += [said(planned, level), *level.notes]
    add_kinds(state, policy, level, model)


def make_level(planned: Planned, policy: Policy, model: Module) -> Level:
    """The level that was planned."""
    if planned.graph is not None:
        from mpitrain.parallel.levels.neighbours import Neighbours
        return Neighbours(policy, planned.graph, every=planned.rounds.every, after=planned.rounds.after)
    if planned.rule is None:
        return SiteGradients(policy, planned.rounds.delay)
    return Outer(policy, planned.rounds, planned.rule, fragments_of(trained(model), planned.rounds.fragments),
                 planned.table.alpha)


def said(planned: Planned, level: Level) -> str:
    """What travels between sites, and what memory that takes, in one line."""
    table, rounds, mb = planned.table, planned.rounds, level.nbytes / 2**20
    if planned.graph is not None:
        after = f", after {rounds.after} steps that add up gradients" if rounds.after else ""
        often = "in each step" if rounds.every == 1 else f"every {rounds.every} steps"
        return (f"{level.n_sites} sites meet their neighbours {often}{after}, by {planned.graph.method}; {planned.graph}; {mb:.1f} "
                "MiB a rank for what is under way")
    if planned.rule is None:
        late = f", {rounds.delay} steps late" if rounds.delay else ""
        return f"{level.n_sites} sites add up their gradients in each step{late}; {mb:.1f} MiB a rank for what is under way"
    first = f"gradients in each of the first {rounds.after} steps, then " if rounds.after else ""
    parts = "" if rounds.fragments == 1 else f" in {rounds.fragments} fragments"
    late = f", which take effect {rounds.delay} steps later" if rounds.delay else ""
    return (f"{level.n_sites} sites exchange {first}parameters every {rounds.every} steps{parts}{late}; outer rule {table.outer}; "
            f"{mb:.1f} MiB a rank for start values and its states")


def add_kinds(state: State, policy: Policy, level: Level, model: Module) -> None:
    """The states of a level, and what sites have of their own, as kinds of a checkpoint."""
    storage, mesh, sliced = policy.storage, policy.mesh, policy.shards is not None

    def placed(flat: Any) -> Iterable[Placed]:
        if flat is None:
            return ()
        return (Placed(s.parameter, view, s.first if sliced else None) for s, view in zip(storage.segments, storage.views(flat)))

    def some_placed(name: str) -> Iterable[Placed]:
        return (one for one in placed(level.states().get(name)) if level.has(name, one.leaf.key))

    kept: list[Any] = []
    for name in level.states():
        kept.append(Kept(f"outer/{name}", partial(lambda name: placed(level.states()[name]), name), storage.dtype))
    for name in level.passing():
        kept.append(Sometimes(f"outer/{name}", partial(some_placed, name), storage.dtype,
                              among=partial(lambda name, parameter: name in level.states() and level.has(name, parameter), name)))
    for name in level.own_states():
        kept.append(OfWorkers(name, partial(lambda name: placed(level.own_states()[name]), name), storage.dtype, mesh))
    if level.trains_apart:
        kept += [OfWorkers(kind.prefix, kind.placed, kind.dtype, mesh, first=1, among=kind.among, shape=kind.shape)
                 for kind in state.kept if isinstance(kind, Kept) and kind.prefix.startswith("optimizer/")]
        level.apart_kinds = [OfWorkers("parameters", lambda: placed(level.other), storage.dtype, mesh, there=lambda: level.apart)]
        running = {b.name for layer in running_layers(model) for b in layer.buffers}
        if running:
            level.apart_kinds.append(OfWorkers("buffers", lambda: _running(level), np.float64, mesh, of="buffers",
                                               among=running.__contains__, there=lambda: level.apart))
    if level.numbers():
        kept.append(Values("sites", level.numbers, level.take_numbers))
    state.kept[:0] = kept                                     # Read last: what a site has of its own is read over the others'.
    state.apart = level.apart_kinds


def _running(level: Level) -> Iterable[Placed]:
    start = 0
    for b in level.running if level.other_running is not None else ():
        assert level.other_running is not None
        yield Placed(b, level.other_running[start:start + b.size].reshape(b.shape))
        start += b.size


def restore(level: Level, state: State, found: Checkpoint) -> None:
    """Reads a checkpoint's state. CheckpointError, on all ranks, where its sites are not those of this run. It communicates."""
    sites = sites_of(found)
    level.resume(found.step)
    if sites != level.n_sites and level.apart:
        with guard.symmetric():
            raise CheckpointError(f"after step {found.step} the {sites} sites of this run had parameters of their own, and there are "
                                  f"{level.n_sites} now; set mesh.site = {sites}, or go on from the end of a round", file=found.folder)
    for kind in (*state.kept, *state.apart):
        if isinstance(kind, OfWorkers):
            kind.sites = sites
    state.restore(found)
    if level.apart:                                           # The mean of the sites has been read; each had others of its own.
        level.take_mean()                                     # Makes room: what is in it is read over.
        for kind in state.apart:
            kind.read(found)
        level.exchange()
    level.restored()
