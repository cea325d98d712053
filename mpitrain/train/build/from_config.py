"""From a configuration to a trainer: what each section says becomes an argument of `assemble`."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain import models, nn, optim
from mpitrain.comm.mesh import Mesh
from mpitrain.config import Config, changed
from mpitrain.errors import ConfigError, name_and_text, nearest, place, text_of
from mpitrain.train.build.assembly import Job, assemble
from mpitrain.train.build.inputs import Inputs
from mpitrain.train.observers.observer import Observer, own_observers
from mpitrain.train.observers.tensorboard import TensorBoard


def build(config: Config, inputs: Inputs, mesh: Mesh, *, stages: Any = None, quiet: bool = False) -> Job:
    """The job that `config` describes; all ranks call it, and it communicates. Nothing is written.

    `stages` replaces mesh.stages where a run that goes on has chosen its cut already.
    """
    described = describe(config, inputs.tokens)
    return assemble(described.model, inputs, mesh, loss=described.loss, optimizer=described.optimizer, rate=described.rate,
                    config=changed(config, mesh={"stages": stages}) if stages else config, quiet=quiet)


class Described(NamedTuple):
    """What a configuration names, found and made; the model has no memory yet."""

    model: nn.Module
    loss: Any
    optimizer: Callable[[Any], optim.Optimizer]
    rate: Callable[[int], Callable[[int], float]]


def describe(config: Config, tokens: bool) -> Described:
    """Model, loss, optimizer and learning rate of a configuration whose data are tokens, or not."""
    return Described(make_model(config), make_loss(config, tokens), partial(make_optimizer, config), partial(make_rate, config))


def make_model(config: Config) -> nn.Module:
    """The model that [model] describes; nothing is allocated."""
    found: Any = models.MODELS.resolve(config.model.name, config.folder)
    model = call_with(found, config.model.arguments, f'model "{config.model.name}"', "model")
    if not isinstance(model, nn.Module):
        raise ConfigError(f'model "{config.model.name}" must return an mpitrain.nn.Module, found a {type(model).__name__}')
    if config.train.recompute:
        keep_inputs_only(model, config.train.recompute)
    return model


def call_with(function: Callable[..., Any], arguments: dict[str, Any], what: str, section: str) -> Any:
    """``function(**arguments)``, with a ConfigError that names the key it does not take, or the line where it fails."""
    parameters = inspect.signature(function).parameters
    named = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key in arguments:
        if key not in named and not takes_any:
            raise ConfigError(f"{what} has no {section}.{key}{nearest(key, named)}")
    missing = [n for n, p in named.items() if p.default is p.empty and n not in arguments]
    if missing:
        raise ConfigError(f"{what} needs {', '.join(f'{section}.{n}' for n in missing)}")
    try:
        return function(**arguments)
    except (TypeError, ValueError) as error:
        refused = error.__traceback__ is None or error.__traceback__.tb_next is None       # by the call itself: nothing ran
        how = f"does not accept {arguments}: {text_of(error)}" if refused else \
            f"failed with {arguments}: {name_and_text(error, place(error))}"
        raise ConfigError(f"{what} {how}") from error


def keep_inputs_only(model: nn.Module, which: bool | int | Sequence[str]) -> None:
    """Recompute blocks during backward instead of keeping their activations: all, the first ones, or those that patterns name."""
    if not isinstance(model, nn.Sequential):
        raise ConfigError("train.recompute needs a model that is a Sequential of blocks")
    if isinstance(which, int):
        model.recompute = which
        return
    for pattern in which:
        if not fnmatch.filter(model.blocks, pattern):
            raise ConfigError(f'train.recompute names "{pattern}", and no block is called so{nearest(pattern, model.blocks)}')
    model.recompute = frozenset(name for pattern in which for name in fnmatch.filter(model.blocks, pattern))


def observers_of(config: Config) -> list[Observer]:
    """Those that [log] asks for. Raises ConfigError, alike on all ranks, where one cannot be had."""
    board: list[Observer] = [TensorBoard()] if config.log.tensorboard else []
    return board + own_observers(config.log.observers, config.folder)


def make_loss(config: Config, tokens: bool) -> Any:
    """The loss by name; language models skip the padding of the last validation window."""
    arguments: dict[str, Any] = {}
    if config.train.loss == "cross_entropy":
        arguments = {"label_smoothing": config.train.label_smoothing} | ({"ignore_index": -1} if tokens else {})
    elif config.train.label_smoothing:
        raise ConfigError(f'train.label_smoothing is for train.loss = "cross_entropy", not "{config.train.loss}"')
    loss: Any = nn.LOSSES.resolve(config.train.loss, config.folder)
    return loss(**arguments)


def make_optimizer(config: Config, storage: nn.FlatStorage) -> optim.Optimizer:
    """The optimizer by name, with those keys of [optimizer] that it takes."""
    kind: Any = optim.OPTIMIZERS.resolve(config.optimizer.name, config.folder)
    o = config.optimizer
    made: optim.Optimizer = kind(storage, **accepted(kind, {
        "lr": o.lr, "momentum": o.momentum, "nesterov": o.nesterov, "betas": tuple(o.betas), "eps": o.eps,
        "weight_decay": o.weight_decay, "decay": o.decay}))
    return made


def make_rate(config: Config, steps: int) -> Callable[[int], float]:
    """The learning rate as a function of the step."""
    o = config.optimizer
    shape = optim.SCHEDULES.resolve(o.schedule, config.folder)
    options = accepted(shape, {"milestones": list(o.milestones) or None, "gamma": o.gamma})
    return optim.schedule(shape, lr=o.lr, min_lr=o.min_lr, warmup_steps=o.warmup_steps, total_steps=steps, **options)


def accepted(function: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    """Those of the offered arguments that `function` takes: not every optimizer has a momentum."""
    taken = inspect.signature(function).parameters
    return {name: value for name, value in offered.items() if name in taken}


def checkpoint_folder(path: Path) -> Path:
    """The folder that holds ``step-*``: of a run folder, its ``checkpoints``."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path
