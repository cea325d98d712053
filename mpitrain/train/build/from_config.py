"""From a configuration to a trainer: each section becomes arguments of `assemble`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import isfunction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpitrain import nn, optim
from mpitrain.arguments import accepted, call, parameters_of
from mpitrain.comm.mesh import Mesh
from mpitrain.config import Config, changed
from mpitrain.config.messages import toml
from mpitrain.config.sections import OptimizerConfig, keys_of
from mpitrain.config.values import LAYOUT
from mpitrain.errors import ConfigError, nearest
from mpitrain.registry import named
from mpitrain.train.build.assembly import Job, assemble
from mpitrain.train.build.inputs import BALANCED, Inputs, balanced_weights
from mpitrain.train.build.model import make_model
from mpitrain.train.observers.observer import Observer, own_observer

if TYPE_CHECKING:
    from mpitrain.machines.machine import MachineFile
    from mpitrain.metrics import Metric

KINDS = ("classes", "binary", "distribution", "values", "rows")                                      # of losses
GIVEN = {"self", "model", "storage", "allocate", "lr", "min_lr", "warmup_steps", "total_steps"}       # not among further keys
OF_OPTIMIZERS = ("momentum", "nesterov", "betas", "eps", "weight_decay", "decay")      # keys that not each one takes


def build(config: Config, inputs: Inputs, mesh: Mesh, *, stages: Any = None, quiet: bool = False) -> Job:
    """The job that `config` describes; all ranks call it, and it communicates. Nothing is written.

    `stages` replaces mesh.stages if a resumed run has chosen its cut already.
    """
    described = describe(config, inputs.tokens, inputs)
    job = assemble(described.model, inputs, mesh, loss=described.loss, optimizer=described.optimizer, rate=described.rate,
                   config=changed(config, mesh={"stages": stages}) if stages else config, quiet=quiet, metrics=described.metrics)
    steps = job.plan.steps
    job.trainer.notes += [*unproved(config), *too_many(config, described.model, steps), *never_thawed(config, steps)]
    return job


def too_many(config: Config, model: nn.Module, steps: int) -> list[str]:
    """A line for each number that is larger than what it is a number of."""
    warmup, again, told = config.optimizer.warmup_steps, config.train.recompute, list[str]()
    if warmup >= steps:
        told.append("the run ends while its learning rate still rises: "
                    f"optimizer.warmup_steps = {warmup}, and the run has {steps} steps")
    if isinstance(again, int) and isinstance(model, nn.Sequential) and again > (blocks := len(model.blocks)):
        told.append(f"train.recompute = {again} is a number of blocks, and the model has {blocks}: all of them run again")
    return told


def never_thawed(config: Config, steps: int) -> list[str]:
    """A line for each group of parameters that would be trained only after the last step of the run."""
    return [f"{group} is not trained: freeze_until = {group.start:.0f}, and the run has {steps} steps"
            for group in (groups_of(config) if has_groups(config) else ()) if steps <= group.start < math.inf]


def unproved(config: Config) -> list[str]:
    """A line about parts of the user's own that nobody can know to give the same bits on any ranks, where that is promised."""
    named = {"optimizer.name": config.optimizer.name, "train.loss": config.train.loss, "comm.sharding": config.comm.sharding}
    own = [f'{key} = "{name}"' for key, name in named.items() if ":" in name]
    if not own or config.train.reproducible != "layout":
        return []
    return [f'{LAYOUT} cannot know whether code of your own gives the same bits on any ranks: {", ".join(own)}; compare '
            "parameters_sha256 of runs on one rank and on several"]


class Described(NamedTuple):
    """The objects that a configuration names, found and made; the model has no memory yet."""

    model: nn.Module
    loss: Any
    optimizer: Callable[[Any], optim.Optimizer]
    rate: Callable[[int], Callable[[int], float]]
    metrics: Sequence[Metric]


def describe(config: Config, tokens: bool, inputs: Inputs | None = None) -> Described:
    """Model, loss, optimizer, learning rate and metrics of a configuration; `tokens` says whether its data, perhaps `inputs`, are
    tokens."""
    model = make_model(config)
    if has_groups(config):
        from mpitrain.optim.groups import apply
        apply(groups_of(config), list(model.named_parameters()))
    return Described(model, make_loss(config, tokens, inputs), partial(make_optimizer, config), partial(make_rate, config),
                     make_metrics(config))


def make_metrics(config: Config) -> Sequence[Metric]:
    """The metrics that train.metrics names."""
    if not config.train.metrics:
        return ()
    from mpitrain.metrics import find_metrics
    return find_metrics(config.train.metrics, config.folder)


def observers_of(config: Config) -> list[Observer]:
    """The observers that [log] asks for. Raises ConfigError, alike on all ranks, if one cannot be had."""
    found = [own_observer(name, config.folder) for name in config.log.observers]
    if config.log.tensorboard:
        from mpitrain.train.observers.tensorboard import TensorBoard
        found.append(TensorBoard())
    return found


def machine_of(config: Config, ranks: int) -> MachineFile | None:
    """The machine that log.machine names, a file's from the folder of the configuration; None where it names none. Raises
    ConfigError and MissingError for one that cannot be had, or does not hold so many ranks."""
    name = config.log.machine
    if not name:
        return None
    from mpitrain.machines.machine import check_ranks, load_machine  # few runs are compared with a plan
    machine = load_machine(config.folder / name if name.endswith(".toml") else name)
    check_ranks(machine, ranks)
    return machine


def make_loss(config: Config, tokens: bool, inputs: Inputs | None = None) -> Any:
    """The loss by name, with the keys of [train] that it takes; language models skip the padding of the last window. Class
    weights that are "balanced" are those of the training rows of `inputs`; without any, all are equal."""
    t = config.train
    loss: Any = nn.LOSSES.resolve(t.loss, config.folder)
    if t.label_smoothing and "label_smoothing" not in parameters_of(loss):
        raise ConfigError(f'train.label_smoothing is for train.loss = "cross_entropy", not "{t.loss}"')
    refuse_keys(config, "train", loss)
    offered = {"label_smoothing": t.label_smoothing, **t.arguments, **({"ignore_index": -1} if tokens else {})}
    if offered.get("weight") == BALANCED and ":" not in t.loss:
        offered["weight"] = None if inputs is None else balanced_weights(inputs, offered.get("ignore_index"))
    what = f'train.loss = "{t.loss}"'
    if isfunction(loss) and len(parameters_of(loss).keys() - offered.keys()) == 2 == len(parameters_of(loss)):
        raise ConfigError(f"{what} is a function of {' and '.join(parameters_of(loss))}, expected a class such as nn.Loss, "
                          "or a function that makes an object of one: its __call__(output, target) is the loss")
    try:
        made = call(loss, what, accepted(loss, offered), section="train")
    except ConfigError as error:
        raise error if error.message.startswith(what) else ConfigError(f"{what}: {error.message}") from None
    if not (callable(made) and hasattr(made, "kind") and hasattr(made, "count")):
        raise ConfigError(f"{what} must give an mpitrain.nn.Loss, found {named(made)}")
    if made.kind not in KINDS:
        raise ConfigError(f'{what}: its kind says what a target is, found "{made.kind}"{nearest(str(made.kind), KINDS)}')
    if isinstance(made, nn.Loss) and type(made).__call__ is nn.Loss.__call__ and type(made).total is nn.Loss.total:
        raise ConfigError(f"{what} must define total or __call__, and {named(made)} has neither")
    return made


def make_optimizer(config: Config, storage: nn.FlatStorage) -> optim.Optimizer:
    """The optimizer by name, with the keys of [optimizer] that it takes; with groups, one for each group and the others."""
    o = config.optimizer
    kind: Any = optim.OPTIMIZERS.resolve(o.name, config.folder)
    what, common = f'optimizer.name = "{o.name}"', {key: getattr(o, key) for key in OF_OPTIMIZERS}
    taken = parameters_of(kind)
    for key, value in common.items():
        if key not in taken and value != getattr(OptimizerConfig, key):
            given = config.given_in(f"optimizer.{key}")
            raise config.wrong(f"{what} does not take optimizer.{key} = {toml(value)}{given}; leave it at "
                               f"{toml(getattr(OptimizerConfig, key))}, the default; it takes "
                               f"{', '.join(name for name in taken if name == 'lr' or name not in GIVEN)}",
                               (f"optimizer.{key}", "optimizer.name"))
    offered = {"lr": o.lr, **common, **o.arguments}

    def make(storage: Any, more: Mapping[str, Any]) -> optim.Optimizer:
        made = call(kind, what, accepted(kind, {**offered, **more}), storage, section="optimizer")
        if not isinstance(made, optim.Optimizer):
            raise ConfigError(f"{what} must give an mpitrain.optim.Optimizer, found {named(made)}")
        own, base = type(made), optim.Optimizer
        if own.change is base.change and not made.needs_closure and (made.kernel is None or own.scalars is base.scalars):
            raise ConfigError(f"{what} must define change, or kernel and scalars, and {named(made)} does not")
        return made
    if has_groups(config):
        from mpitrain.optim.groups import Grouped
        return Grouped(make, storage, groups_of(config), o.lr)
    return make(storage, {})


def has_groups(config: Config) -> bool:
    return bool(config.optimizer.groups or config.lora.rank)


def groups_of(config: Config) -> list[Any]:
    """The groups of parameters that [optimizer] describes; with [lora], then adapters, and all others frozen."""
    from mpitrain.optim.groups import read_group
    o = config.optimizer
    kind: Any = optim.OPTIMIZERS.resolve(o.name, config.folder)
    found = [read_group(entry, kind, o.lr) for entry in o.groups]
    if config.lora.rank:
        from mpitrain.train.build.adapters import groups
        found += groups(config)
    return found


def make_rate(config: Config, steps: int) -> Callable[[int], float]:
    """The learning rate as a function of the step, from a schedule with the keys of [optimizer] that it takes."""
    o = config.optimizer
    shape = optim.SCHEDULES.resolve(o.schedule, config.folder)
    refuse_keys(config, "optimizer", optim.OPTIMIZERS.resolve(o.name, config.folder), shape)
    options = accepted(shape, {"milestones": list(o.milestones) or None, "gamma": o.gamma, **o.arguments})
    if ":" not in o.schedule and "schedules" in options:
        options["schedules"] = own_schedules(options["schedules"], config.folder)
    what = f'optimizer.schedule = "{o.schedule}"'
    rate: Callable[[int], float] = call(optim.schedule, what, {
        "lr": o.lr, "min_lr": o.min_lr, "warmup_steps": o.warmup_steps, "total_steps": steps, **options}, shape,
        section="optimizer")
    for step in sorted({0, steps // 2, max(steps - 1, 0)}):
        found = call(rate, f"{what}, asked for step {step},", {}, step)
        if not (hasattr(found, "__float__") and np.ndim(found) == 0 and math.isfinite(found)):
            raise ConfigError(f"{what} must give a finite number for each step, found {named(found)} for step {step}")
        if found < 0:
            raise ConfigError(f"{what} must give a rate of 0 or more for each step, found {named(found)} for step {step}")
    return rate


def own_schedules(entries: Any, folder: Path) -> Any:
    """Tables of schedules, and those in them, where names of the user's own code are the functions that they name."""
    if not isinstance(entries, list):
        return entries
    found = []
    for entry in entries:
        if isinstance(entry, Mapping):
            entry = {key: own_schedules(value, folder) if key == "schedules" else value for key, value in entry.items()}
            if isinstance(name := entry.get("name"), str) and ":" in name:
                entry["name"] = optim.SCHEDULES.resolve(name, folder)
        found.append(entry)
    return found


def refuse_keys(config: Config, section: str, *things: Callable[..., Any]) -> None:
    """ConfigError for a key that neither the section knows nor any of `things`, which its keys name, takes."""
    taken = {name for thing in things for name in parameters_of(thing)} - GIVEN
    for key in getattr(config, section).arguments:
        if key not in taken:
            raise config.wrong(f"unknown key {section}.{key}{nearest(key, {*taken, *keys_of(section)})}", (f"{section}.{key}",))


def checkpoint_folder(path: Path) -> Path:
    """The folder that holds ``step-*``: the ``checkpoints`` of a run folder."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path
