"""A run is one TOML file; ``section.key=value`` on the command line overrides it; both are checked before anything starts.

A section is a frozen dataclass: its fields are the keys there are, their types what may stand there. The `[model]`
section is the exception: its keys beside `name` and `init_from` are the arguments of the model, and are checked against it.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import tomllib
import types
import typing
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mpitrain.errors import AccessError, ConfigError, MissingError, nearest


@dataclass(frozen=True)
class RunConfig:
    name: str = ""                           # default: the name of the file
    out: str = ""                            # default: runs/<name>
    seed: int = 0
    folder: str = ""                         # where data and user code are found; default: the folder of the file


@dataclass(frozen=True)
class ModelConfig:
    name: str = ""
    init_from: str = ""                      # a run folder or checkpoint whose parameters to start from
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataConfig:
    path: str = ""                           # an HDF5 file, a folder of shards, or a built-in name ("digits")
    x: str = ""                              # dataset inside a plain HDF5 file; default: the manifest's
    y: str = ""
    validation: float | str = 0.2            # a share, "tail:0.2", or a path; 0 for none
    transform: tuple[str, ...] = ()
    augment: tuple[str, ...] = ()
    stride: int = 1
    drop_last: bool = True
    workers: int = 1


@dataclass(frozen=True)
class OptimizerConfig:
    name: str = "adamw"
    lr: float = 1e-3
    min_lr: float = 0.0
    momentum: float = 0.9
    nesterov: bool = False
    betas: tuple[float, ...] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay: str = "all"                       # or "matrices"
    clip_norm: float = 0.0                   # 0: no clipping
    schedule: str = "constant"
    warmup_steps: int = 0
    milestones: tuple[int, ...] = ()         # schedule "step": at these steps ...
    gamma: float = 0.1                       # ... the rate is multiplied by this
    offload: str = "none"                    # where its state lies: "host" of a GPU, or "file"
    offload_folder: str = ""                 # for those files; default: run.out


@dataclass(frozen=True)
class TrainConfig:
    epochs: int = 0                          # epochs or steps, not both
    steps: int = 0
    batch_size: int = 64                     # global: over all ranks
    micro_batches: int = 0                   # of the global batch; 0: one per data-parallel rank
    loss: str = "cross_entropy"
    label_smoothing: float = 0.0
    device: str = "cpu"
    precision: str = "float32"               # or "float64"; "bfloat16": of the operands of matrix products
    reproducible: str = "run"                # or "layout": the same bits on any number of ranks
    threads: int = 0                         # per rank; 0: the cores bound to it, shared out
    eval_every: int = 0                      # steps; 0: after each epoch
    recompute: bool | int | tuple[str, ...] = False     # keep block inputs, not activations: of all, the first ones, these
    cached_mb: float = 0.0                   # freed memory kept for the next arrays; 0: all of it


@dataclass(frozen=True)
class MeshConfig:
    pp: int = 1
    dp: int = 0                              # 0: whatever is left
    ep: int = 1                              # ranks that share out the experts of the model
    cp: int = 1                              # ranks that share each sample: positions are cut
    tp: int = 1
    schedule: str = "1f1b"                   # of the stages of a pipeline; or "file.py:function"
    chunks: int = 1                          # of the model on each stage (schedule "interleaved")
    stages: str | tuple[int, ...] = "blocks"     # as many on each stage, "time": as long; or how many
    plan: dict[str, str] = field(default_factory=dict)       # how layers are cut along tp; default: the model's own
    sequence: bool = False                   # activations between those layers are cut along the sequence


@dataclass(frozen=True)
class CommConfig:
    algorithm: str = "auto"                  # shared memory on a node; a name: by messages
    bucket_mb: float | str = 4.0             # or "auto": cut where measured ready times say
    progress: str = "poll"
    wire_dtype: str = "float32"              # of messages
    node_shared: bool = False                # one copy of parameters and optimizer state per node
    sharding: str = "none"                   # "optimizer", "gradients", "parameters": what is cut over dp, each with those before


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 0                           # steps; 0: at the end only
    keep: int = 2
    best: bool = True                        # also keep the one with the lowest validation loss


@dataclass(frozen=True)
class LogConfig:
    every: int = 10                          # steps
    tensorboard: bool = False
    observers: tuple[str, ...] = ()          # of your own: "file.py:name"


@dataclass(frozen=True)
class Config:
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    mesh: MeshConfig = MeshConfig()
    comm: CommConfig = CommConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @property
    def folder(self) -> Path:
        """Data paths and user code are found from here."""
        return Path(self.run.folder)


SECTIONS: dict[str, Any] = {f.name: f.default for f in fields(Config)}
LARGEST_BUCKET_MB = 1 << 20              # a TiB: more than any model, and a number of bytes that is finite
BUILT_IN = Path(__file__).parent / "digits.toml"


def load_config(path: Path | None, overrides: list[str]) -> Config:
    """The configuration in `path` (the built-in digits run for None) with ``section.key=value`` overrides on top.

    Raises ConfigError naming the file and the key, MissingError where there is no such file.
    """
    source = path if path is not None else BUILT_IN
    tables = _read(source)
    for name, table in tables.items():
        _section(name, table, source)        # the file by itself first: a message names the file or the command line, not both
    overridden = {override.partition("=")[0] for override in overrides}
    for override in overrides:
        _apply(tables, override, overridden)
    config = Config(**{name: _section(name, table, None) for name, table in tables.items()})
    name = config.run.name or source.stem
    folder = config.run.folder or str(source.resolve().parent if path is not None else Path.cwd())
    run = dataclasses.replace(config.run, name=name, folder=folder, out=config.run.out or f"runs/{name}")
    config = dataclasses.replace(config, run=run)
    _check(config, source, overridden)
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise MissingError("no such configuration file", file=path) from None
    except PermissionError:
        raise AccessError("the configuration file cannot be read: permission denied", file=path) from None
    except IsADirectoryError:
        raise ConfigError("expected a TOML file, found a folder", file=path) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not valid TOML: {error}", file=path) from None


def _apply(tables: dict[str, Any], override: str, all_keys: set[str]) -> None:
    key, equals, text = override.partition("=")
    section, dot, name = key.partition(".")
    if not (equals and dot and section and name):
        raise ConfigError(f'an override is section.key=value, for instance train.steps=100; found "{override}"')
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text                         # a bare word is a string
    _section(section, {name: value}, None)
    tables.setdefault(section, {})[name] = value
    for one, other in (("steps", "epochs"), ("epochs", "steps")):      # the length of the run, said anew
        if key == f"train.{one}" and f"train.{other}" not in all_keys:
            tables["train"].pop(other, None)


def _wrong(source: Path | None, message: str) -> ConfigError:
    """A mistake in the file `source`, or (None) on the command line."""
    return ConfigError(message, file=source) if source else ConfigError(f"on the command line: {message}")


def _section(name: str, table: Any, source: Path | None) -> Any:
    if name not in SECTIONS:
        raise _wrong(source, f'unknown section [{name}]{nearest(name, SECTIONS)}')
    kind = type(SECTIONS[name])
    if not isinstance(table, dict):
        raise _wrong(source, f"[{name}] must be a table of keys, found {_show(table)}")
    hints = typing.get_type_hints(kind)
    if kind is ModelConfig:
        known = {key: table[key] for key in ("name", "init_from") if key in table}
        known["arguments"] = {key: value for key, value in table.items() if key not in known}
        if "arguments" in table:
            raise _wrong(source, 'unknown key model.arguments: a model\'s arguments are keys of [model] themselves')
        table = known
    values = {}
    for key, value in table.items():
        if key not in hints:
            raise _wrong(source, f"unknown key {name}.{key}{nearest(key, hints)}")
        values[key] = _convert(f"{name}.{key}", value, hints[key], source)
    return kind(**values)


def _convert(key: str, value: Any, hint: Any, source: Path | None) -> Any:
    """`value` as the type the key wants: an int serves as a float, a single string as a list of one."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        base = typing.get_origin(option) or option
        if base is tuple:
            item = typing.get_args(option)[0]
            items = value if isinstance(value, list) else [value]
            if all(_is(x, item) for x in items):
                return tuple(item(x) for x in items)
        elif _is(value, base):
            return base(value)
    raise _wrong(source, f"{key} must be {' or '.join(_name(o) for o in options)}, found {_show(value)}")


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _name(hint: Any) -> str:
    if typing.get_origin(hint) is tuple:
        return f"a list of {_name(typing.get_args(hint)[0]).removeprefix('a ').removeprefix('an ')}s"
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false", dict: "a table", list: "a list",
             datetime.datetime: "a date and time", datetime.date: "a date", datetime.time: "a time"}         # all that TOML has
    return names[typing.get_origin(hint) or hint]


def _show(value: Any) -> str:
    return f"{json.dumps(value, default=str)} ({_name(type(value))})"


def _is_finite(value: Any) -> bool:
    """Whether no number in a value, or in the lists and tables of it, is NaN or infinite: checkpoints could not hold that."""
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _written(value: float | str) -> str:
    """A value as somebody wrote it: 0 for the 0.0 that it became."""
    return _toml(value).removesuffix(".0")


def _check(config: Config, source: Path, overridden: set[str]) -> None:
    """What one key alone, or two together, may not say. Keys in `overridden` were given on the command line."""
    def refuse(message: str, *keys: str) -> None:
        """`keys` are those the message is about: where one of them was overridden, the file is not to blame."""
        raise _wrong(None if overridden.intersection(keys) else source, message)

    t, o = config.train, config.optimizer
    if not config.model.name:
        refuse('model.name is missing: for instance "mlp", "lenet", "gpt", or your own "file.py:function"', "model.name")
    if not config.data.path:
        refuse("data.path is missing: an HDF5 file, a folder of shards, or a built-in name (digits)", "data.path")
    if bool(t.epochs) == bool(t.steps):
        refuse("give train.epochs or train.steps, " + ("not both" if t.epochs else "one of them"), "train.epochs", "train.steps")
    for key, value, least in (("train.epochs", t.epochs, 0), ("train.steps", t.steps, 0), ("train.batch_size", t.batch_size, 1),
                              ("train.micro_batches", t.micro_batches, 0), ("train.threads", t.threads, 0),
                              ("train.eval_every", t.eval_every, 0), ("data.stride", config.data.stride, 1),
                              ("data.workers", config.data.workers, 0), ("mesh.pp", config.mesh.pp, 1),
                              ("mesh.dp", config.mesh.dp, 0), ("mesh.ep", config.mesh.ep, 1), ("mesh.cp", config.mesh.cp, 1),
                              ("mesh.tp", config.mesh.tp, 1),
                              ("mesh.chunks", config.mesh.chunks, 1), ("log.every", config.log.every, 1),
                              ("checkpoint.every", config.checkpoint.every, 0), ("checkpoint.keep", config.checkpoint.keep, 1),
                              ("optimizer.warmup_steps", o.warmup_steps, 0), ("run.seed", config.run.seed, 0)):
        if value < least:
            refuse(f"{key} must be at least {least}, found {value}", key)
    for key, number in (("optimizer.lr", o.lr), ("optimizer.clip_norm", o.clip_norm), ("optimizer.weight_decay", o.weight_decay),
                        ("optimizer.min_lr", o.min_lr), ("train.cached_mb", t.cached_mb)):
        if not 0 <= number < float("inf"):
            refuse(f"{key} must be a finite number, 0 or more, found {_written(number)}", key)
    size = config.comm.bucket_mb
    if not (size == "auto" if isinstance(size, str) else 0 < size <= LARGEST_BUCKET_MB):
        refuse(f'comm.bucket_mb must be more than 0, at most {LARGEST_BUCKET_MB}, or "auto", found {_written(size)}; '
               f"set it to {CommConfig.bucket_mb} if in doubt", "comm.bucket_mb")
    if any(step < 0 for step in o.milestones):
        refuse(f"optimizer.milestones must be steps, at least 0 each, found {list(o.milestones)}", "optimizer.milestones")
    if len(o.betas) != 2 or not all(0 <= b < 1 for b in o.betas):
        refuse(f"optimizer.betas must be two numbers in [0, 1), found {list(o.betas)}", "optimizer.betas")
    if isinstance(t.recompute, int) and t.recompute < 0:
        refuse(f"train.recompute must be true, false, a number of blocks, 0 or more, or names of blocks, found {t.recompute}",
               "train.recompute")
    if t.micro_batches > t.batch_size:
        refuse(f"train.micro_batches = {t.micro_batches} is more than the {t.batch_size} samples of train.batch_size",
               "train.micro_batches", "train.batch_size")
    for key, text, known in (("train.device", t.device, ("cpu", "gpu", "auto")),
                             ("optimizer.decay", o.decay, ("all", "matrices")),
                             ("optimizer.offload", o.offload, ("none", "host", "file")),
                             ("train.reproducible", t.reproducible, ("run", "layout")),
                             ("comm.progress", config.comm.progress, ("poll", "thread", "auto")),
                             ("comm.sharding", config.comm.sharding, ("none", "optimizer", "gradients", "parameters")),
                             ("comm.wire_dtype", config.comm.wire_dtype, ("float32", "bfloat16", "float16")),
                             ("train.precision", t.precision, ("float32", "float64", "bfloat16"))):
        if text not in known:
            refuse(f'{key} = "{text}" is not there{nearest(text, known)}', key)
    if t.reproducible == "layout" and t.threads > 1:
        refuse(f'train.reproducible = "layout" needs one BLAS thread a rank, found train.threads = {t.threads}; set it to 0 or 1',
               "train.reproducible", "train.threads")
    if t.precision == "bfloat16" and t.threads > 1:
        refuse(f'train.precision = "bfloat16" computes on one thread a rank, found train.threads = {t.threads}; set it to 0 or 1 '
               "and start a rank per core", "train.precision", "train.threads")
    for section in SECTIONS:
        values = dataclasses.asdict(getattr(config, section))
        for key, value in (values | values.pop("arguments", {})).items():
            if not _is_finite(value):
                refuse(f"{section}.{key} must be finite, found {_toml(value)}", f"{section}.{key}")
    if isinstance(config.mesh.stages, str) and config.mesh.stages not in ("blocks", "time"):
        refuse(f'mesh.stages = "{config.mesh.stages}" is not there{nearest(config.mesh.stages, ("blocks", "time"))}; or give the '
               "number of blocks of each stage", "mesh.stages")


def to_toml(config: Config) -> str:
    """The whole configuration as TOML that `load_config` reads back to the same values."""
    lines = []
    for section in SECTIONS:
        values = dataclasses.asdict(getattr(config, section))
        values |= values.pop("arguments", {})
        lines.append(f"[{section}]")
        lines += [f"{key} = {_toml(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, str):               # a TOML basic string is a JSON string but for two escapes JSON lacks
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)
