"""Which extensions and observers the sections of a configuration ask for.

    [workers]               federation.Federation       comm.compress   observers.compression, observers.gathers
    [privacy]               privacy.Privacy             [average]       observers.averaging
    mesh.site, [[sync]]     levels.Sites                [shrink]        observers.pruning
    a 1-bit optimizer       one_bit.OneBit              [energy]        observers.energy
    a supernet              supernet.Supernet

A run without such sections imports none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpitrain.config import Config
from mpitrain.nn import Module
from mpitrain.optim import Optimizer
from mpitrain.placement.shard_cuts import probe
from mpitrain.schedules.grid import Grid
from mpitrain.train.build.extension import Assembled, Extension
from mpitrain.train.build.inputs import Inputs


def extensions_of(config: Config, grid: Grid, inputs: Inputs, model: Module, loss: Any,
                  optimizer: Callable[[Any], Optimizer]) -> list[Extension]:
    """The parts that the configuration asks for, in the order in which they are composed. ConfigError for one that there cannot
    be, without MPI and alike on all ranks."""
    found: list[Any] = []
    if config.workers.count:
        from mpitrain.train.build.workers import federation_of
        found.append(federation_of(config, inputs))
        config = found[0].as_rounds
    if config.privacy.unit != "none":
        from mpitrain.train.build.privacy import Privacy
        found.append(Privacy(config, inputs.train_rows, found[0].rounds if found else None, model, loss))
    if optimizer(probe()).sends:
        from mpitrain.train.build.one_bit import OneBit
        found.append(OneBit())
    if model.elastic is not None:
        from mpitrain.train.build.supernet import Supernet
        found.append(Supernet(config, grid, inputs, model, optimizer(probe())))
    if grid.n_sites > 1:
        from mpitrain.train.build.levels import Sites
        found.append(Sites())
    return found


def observe(run: Assembled) -> None:
    """Adds the observers that sections ask for. Each is put before those that are there, which see what it does."""
    config, trainer, state, policy, control, model = run
    if policy.packed is not None:
        from mpitrain.train.observers.gathers import Gathers
        trainer.observers.insert(0, Gathers(policy, control))
    if policy.compressed is not None:
        from mpitrain.train.observers.compression import Compression
        trainer.observers.insert(0, Compression(policy, state, control))
    if config.average.kind != "none":
        from mpitrain.train.observers.averaging import Averaging
        averaging = Averaging(config.average, policy, state)
        trainer.observers.insert(0, averaging)
        if trainer.evaluator is not None:
            trainer.evaluator.weights = averaging.in_use
    if config.energy.source != "off":
        from mpitrain.train.observers.energy import EnergyUse
        node = state.mesh.node(control) if state.mesh is not None and control.size > 1 else None
        trainer.observers.insert(0, EnergyUse(config.energy, control, node, policy.reducer.timeline, notes=trainer.notes,
                                              gpu=policy.layout.device.address))
    if config.shrink.prune:
        from mpitrain.train.observers.pruning import Pruning
        trainer.observers.insert(0, Pruning(config, model, policy, state, control, trainer.notes))
