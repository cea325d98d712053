"""The level of a run with several sites: made, put into its policy, and its states into checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from mpitrain.checkpoint.kinds import Kept, Placed, Values
from mpitrain.checkpoint.manifest import Checkpoint
from mpitrain.checkpoint.sites import OfSite, OwnedBySites, Sometimes, is_apart, refuse_apart, sites_of
from mpitrain.checkpoint.state import State
from mpitrain.comm.face import Objects
from mpitrain.comm.job import guard
from mpitrain.errors import CheckpointError
from mpitrain.nn import Module, running_layers
from mpitrain.parallel.levels.fragments import fragments_of
from mpitrain.parallel.levels.gradients import SiteGradients
from mpitrain.parallel.levels.level import Level, Parts
from mpitrain.parallel.levels.outer import Outer
from mpitrain.parallel.levels.plan import Planned, describe, trained
from mpitrain.parallel.policies.policy import Policy
from mpitrain.train.build.extension import Assembled, Extension
from mpitrain.train.build.validate import Validated
from mpitrain.train.intervals import Step
from mpitrain.train.observers.observer import Observer, Watched


class Meetings(Observer):
    """Ends a run with the mean of its sites, and has a level ready for checkpoints. The first observer: the others see that."""

    def __init__(self, level: Level, control: Objects):
        self.level, self.control = level, control

    def begin(self, run: Watched) -> None:
        self._more, self._begun = run.more, run.step

    def after_step(self, step: int, fields: Step, seconds: float) -> None:
        self._more.update(self.level.fields)

    def before_checkpoint(self, step: int) -> None:
        self.level.wait()

    def finish(self, step: int) -> Mapping[str, Any]:
        self.level.finish()
        steps, level = max(1, step - self._begun), self.level
        sent, dense = zip(*self.control.gather_objects([level.sent_bytes, level.posted(level.size)]))
        return {"sites": {"number": level.n_sites, "wire_bytes": max(sent) / steps, "dense_bytes": max(dense)}}


class Sites(Extension):
    """Sites that train apart, and meet by a level."""

    def validated(self, valid: Validated) -> None:
        self.planned: Planned = valid.level

    def join(self, run: Assembled) -> None:
        """Gives the policy, which is open, its level, and the trainer and the state what follows from it. It communicates."""
        _, trainer, state, policy, control, model = run
        self.policy, self.level = policy, make_level(self.planned, policy, model)
        policy.level = level = self.level
        trainer.weights = level.in_use
        if trainer.evaluator is not None:
            trainer.evaluator.weights = level.in_use
        trainer.observers.insert(0, Meetings(level, control))
        told = f"{describe(self.planned, level.n_sites)}; {level.nbytes / 2**20:.1f} MiB of a rank"
        trainer.notes += [told, *level.notes]
        add_kinds(state, policy, level, model)

    def restore(self, state: State, found: Checkpoint) -> bool:
        """CheckpointError, on all ranks, where its sites are not those of this run. It communicates."""
        restore(self.level, state, found)
        self.policy.context.start_alike(state.arrays(), apart=True)
        return True


def make_level(planned: Planned, policy: Policy, model: Module) -> Level:
    """The level that was planned."""
    if planned.graph is not None:
        from mpitrain.parallel.levels.neighbours import Neighbours
        return Neighbours(policy, planned.graph, every=planned.rounds.every, after=planned.rounds.after)
    if planned.rule is None:
        return SiteGradients(policy, planned.rounds.delay)
    code = None
    if planned.table.compress:
        from mpitrain.parallel.compress.compressor import make_compressor
        from mpitrain.parallel.levels.coded import Coded
        code = partial(Coded, make=make_compressor(planned.table.compress, policy.setup.config.folder))
    return Outer(policy, planned.rounds, planned.rule, fragments_of(trained(model), planned.rounds.fragments),
                 planned.table.alpha, code)


def add_kinds(state: State, policy: Policy, level: Level, model: Module) -> None:
    """The states of a level, and what sites have of their own, as kinds of a checkpoint."""
    mesh, dtype, sliced = policy.mesh, policy.storage.dtype, policy.shards is not None
    names = {name for name, _ in trained(model)}

    def placed(parts: Parts) -> Iterable[Placed]:
        for s, flat in parts:
            whole = not sliced and s.first == 0 and flat.size == s.parameter.size
            yield Placed(s.parameter, flat.reshape(s.parameter.shape) if whole else flat, None if whole else s.first)

    def passing(name: str) -> Iterable[Placed]:
        return placed(level.states().get(name, []))

    def has(name: str, parameter: str) -> bool:
        return parameter in there[name] if name in there else False

    there = level.there
    kept: list[Any] = [Kept(f"outer/{name}", partial(lambda name: placed(level.states()[name]), name), dtype)
                       for name in level.states()]
    kept += [Sometimes(f"outer/{name}", partial(passing, name), dtype, among=partial(has, name)) for name in level.passing()]
    kept += [OfSite(name, partial(lambda name: placed(level.own_states()[name]), name), dtype, mesh, shared=True,
                       among=names.__contains__) for name in level.own_states()]
    kept += [OwnedBySites(f"outer/{name}", partial(lambda name: placed(level.owned_states()[name]), name), dtype, mesh,
                          among=names.__contains__) for name in level.owned_states()]
    if level.numbers():
        kept.append(Values("sites", level.numbers, level.take_numbers))
    if level.trains_apart:
        kept += [OfSite(kind.prefix, kind.placed, kind.dtype, mesh, first=1, among=kind.among, shape=kind.shape)
                 for kind in state.kept if isinstance(kind, Kept) and kind.prefix.startswith("optimizer/")]
        state.apart = kinds_apart(policy, level, model, placed)
    state.kept[:0] = kept                                     # Read last: what a site has of its own is read over the others'.


def kinds_apart(policy: Policy, level: Level, model: Module, placed: Callable[[Parts], Iterable[Placed]]) -> list[Kept]:
    """What sites have of their own instead of the run's parameters and buffers, while they are apart."""
    def own() -> Iterable[Placed]:
        return placed(level.parts(level.other)) if level.other is not None else ()

    mesh, found = policy.mesh, list[Kept]()
    found.append(OfSite("parameters", own, policy.storage.dtype, mesh, there=lambda: level.apart))
    running = {b.name for layer in running_layers(model) for b in layer.buffers}
    if running:
        found.append(OfSite("buffers", lambda: _running(level), "float64", mesh, of="buffers", among=running.__contains__,
                               there=lambda: level.apart))
    return found


def _running(level: Level) -> Iterable[Placed]:
    start = 0
    for b in level.running if level.other_running is not None else ():
        assert level.other_running is not None
        yield Placed(b, level.other_running[start:start + b.size].reshape(b.shape))
        start += b.size


def restore(level: Level, state: State, found: Checkpoint) -> None:
    """Reads a checkpoint's state. CheckpointError, on all ranks, where its sites are not those of this run. It communicates."""
    sites, apart = sites_of(found), is_apart(found)
    level.there.clear()
    for name in level.passing():
        start = f"outer/{name}/"
        if parameters := {stored.removeprefix(start) for stored in found.arrays if stored.startswith(start)}:
            level.there[name] = parameters
    refused = level.resume(found.step, apart, level.there)
    with guard.symmetric():
        refuse_apart(found, level.n_sites)
        if refused:
            raise CheckpointError(f"this checkpoint, of step {found.step}, cannot be gone on from: {refused}", file=found.folder)
    for kind in (*state.kept, *state.apart):
        if isinstance(kind, OfSite | OwnedBySites):
            kind.sites = sites
    state.restore(found)
    if apart:                                                 # The mean of the sites has been read; each had others of its own.
        level.take_mean()                                     # Makes room: what is in it is read over.
        for kind in state.apart:
            kind.read(found)
        level.exchange()
