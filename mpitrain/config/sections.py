"""The sections of a configuration as frozen dataclasses: the fields are the keys there are, their types what may stand there.

A `Literal` lists the only words that a key may be. The sections of `OPEN` also collect `arguments`: keys that the model, the
optimizer, the schedule or the loss may take, whose signature says so.
"""
# Annotations are read as they are, so that no text has to be evaluated: no `from __future__ import annotations` here.

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

from mpitrain.config.energy import EnergyConfig
from mpitrain.config.shrink_sections import DistilConfig, LoraConfig, ShrinkConfig
from mpitrain.config.topology import PrivacyConfig, SyncConfig, WorkersConfig
from mpitrain.errors import ConfigError
from mpitrain.registry import Registry

POLICIES: Registry[Any] = Registry("policy")
"""Policies by what `comm.sharding` calls them; `comm.node_shared` puts the copies of one on each node together."""
for _name, _policy in (("none", "replicated:Replicated"), ("optimizer", "sharded:ShardedOptimizer"),
                       ("gradients", "sharded:ShardedGradients"), ("parameters", "sharded:ShardedParameters")):
    POLICIES.register_later(_name, f"mpitrain.parallel.policies.{_policy}")
STATES = ("none", "optimizer", "gradients", "parameters")     # what a policy `cuts` over data-parallel ranks, with those before
Offloaded: TypeAlias = Literal["none", "host", "file"]
Progressing: TypeAlias = Literal["poll", "thread", "auto"]
UNTIL_MEASURED = 1 << 20      # bytes: small enough to overlap, large enough that latency does not dominate
Own: TypeAlias = Callable[..., Any]          # a function of the user's, which only Python can give; a file gives its name


@dataclass(frozen=True)
class RunConfig:
    name: str = ""                           # default: the name of the file
    out: str = ""                            # default: runs/<name>
    seed: int = 0
    folder: str = ""                         # where data and user code are found; default: the folder of the file


@dataclass(frozen=True)
class ModelConfig:
    name: str = ""
    init_from: str = ""                      # a run folder or checkpoint that gives the first parameters
    formats: dict[str, Any] = field(default_factory=dict)         # layers that are kept in few bits: path -> FORMATS' name
    shapes: dict[str, Any] = field(default_factory=dict)     # of parameters and buffers that have lost channels, by name
    ranks: dict[str, int] = field(default_factory=dict)      # layers as two factors: their ranks, by name
    arguments: dict[str, Any] = field(default_factory=dict)       # further keys, which the model takes


@dataclass(frozen=True)
class DataConfig:
    path: str = ""                           # an HDF5 file, a folder of shards, or a built-in name ("digits")
    x: str | dict[str, Any] = ""             # dataset of the inputs, or {input = "dataset"}; default: the manifest's
    y: str = ""
    validation: float | str = 0.2            # a share, "tail:0.2", or a path; 0 for none
    transform: tuple[str | dict[str, Any], ...] = ()           # names, or tables of a name and its arguments
    target_transform: tuple[str | dict[str, Any], ...] = ()    # of regression targets; each can be undone
    augment: tuple[str | dict[str, Any], ...] = ()
    stride: int = 1                          # between the starts of windows of tokens or steps
    length: int = 0                          # steps of a window of a series; 0: the data are no series
    horizon: int = 1                         # steps after it that are predicted
    targets: tuple[int, ...] = ()            # columns that are predicted; default: all
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
    decay: Literal["all", "matrices"] = "all"
    clip_norm: float = 0.0                   # 0: no clipping
    schedule: str = "constant"
    warmup_steps: int = 0
    milestones: tuple[int, ...] = ()         # schedule "step": steps at which ...
    gamma: float = 0.1                       # ... the rate is multiplied by this
    groups: tuple[dict[str, Any], ...] = ()  # parameters with rates or keys of their own, or frozen: tables with `params`
    offload: Offloaded = "none"              # place of its state: "host" of a GPU, or "file"
    offload_folder: str = ""                 # folder of those files; default: run.out
    arguments: dict[str, Any] = field(default_factory=dict)       # further keys, which the optimizer or the schedule takes


# Keys of [optimizer] whose default is another one with these optimizers, that of the class. Others have the section's.
DEFAULTS_OF: dict[str, dict[str, Any]] = {
    "adagrad": {"lr": 0.01, "eps": 1e-10}, "adadelta": {"lr": 1.0, "eps": 1e-6}, "adamax": {"lr": 2e-3}, "nadam": {"lr": 2e-3},
    "lion": {"lr": 1e-4, "betas": [0.9, 0.99]}, "asgd": {"lr": 0.01}, "rprop": {"lr": 0.01}, "adafactor": {"lr": 0.01},
    "muon": {"momentum": 0.95, "nesterov": True, "weight_decay": 0.1, "eps": 1e-7}, "lbfgs": {"lr": 1.0}}
DEFAULTS_OF_SCHEDULES: dict[str, dict[str, Any]] = {"cyclic": {"gamma": 1.0}}          # The same, of schedules.


@dataclass(frozen=True)
class TrainConfig:
    epochs: int = 0                          # epochs or steps, not both
    steps: int = 0
    batch_size: int = 64                     # global: over all ranks
    micro_batches: int = 0                   # number in the global batch; 0: one per data-parallel rank
    loss: str = "cross_entropy"
    label_smoothing: float = 0.0
    metrics: tuple[str | dict[str, Any], ...] = ()      # of evaluations: names, or tables of a name and arguments
    device: Literal["cpu", "gpu", "auto"] = "cpu"
    precision: Literal["float32", "float64", "bfloat16", "float16", "tf32"] = "float32"     # of 16 bits: activations, on a GPU
    graph: Literal["auto", "on", "off"] = "auto"        # a micro-batch is one captured graph of the device, where it can be
    reproducible: Literal["run", "layout"] = "run"      # "layout": the same bits on any number of ranks
    # A step whose loss or gradient is not finite ends the run, or is left out, alone or with all steps since the last checkpoint.
    on_nan: Literal["stop", "skip", "rewind"] = "stop"
    on_lost: Literal["stop", "go_on"] = "stop"      # a rank that dies ends the run, or the others go on without it
    copy_every: int = 10                     # steps between copies of the state to go on from, in memory; 0: none
    threads: int = 0                         # per rank; 0: the cores bound to it, shared out
    eval_every: int = 0                      # steps; 0: after each epoch
    compare_every: int | str = "auto"        # steps between comparisons of the ranks' state; 0: at checkpoints and the end only
    stop_before: str = ""                    # a time, by which the run has saved and stopped; default: Slurm's end of the job
    recompute: bool | int | tuple[str, ...] = False     # keep block inputs, not activations: all blocks', the first ones', these
    stall_s: float = 600.0                   # seconds without progress that are a stall; 0: nobody watches
    start_s: float = 600.0                   # the same until training begins, with the start of MPI; 0: it may take any time
    stall: Literal["end", "warn"] = "end"
    cached_mb: float = 0.0                   # freed memory kept for the next arrays; 0: all of it
    arguments: dict[str, Any] = field(default_factory=dict)       # further keys, which the loss takes


@dataclass(frozen=True)
class MeshConfig:
    site: int = 1                            # groups of ranks that each train a model; [[sync]] says when and how they meet
    pp: int = 1
    dp: int = 0                              # 0: all remaining ranks
    ep: int = 1                              # ranks that share out the experts of the model
    cp: int = 1                              # ranks that share each sample: positions are cut
    tp: int = 1
    schedule: str | Own = "1f1b"             # pipeline schedule; or "file.py:function"
    chunks: int = 1                          # parts of the model on each stage (schedule "interleaved")
    stages: str | tuple[int, ...] = "blocks"     # blocks per stage: equal numbers, "time": equal times; or these numbers
    plan: dict[str, str] = field(default_factory=dict)       # cut of layers along tp; default: the model's own
    sequence: bool = False                   # activations between those layers are cut along the sequence


@dataclass(frozen=True)
class CommConfig:
    algorithm: str | Own = "auto"            # shared memory on a node; a name: by messages
    library: Literal["mpi", "nccl", "ipc"] = "mpi"       # what adds up gradients of GPUs; "ipc": ranks that share one
    device_buffers: Literal["off", "auto", "on"] = "off"       # MPI is handed memory of GPUs; "auto": where it takes that
    bucket_mb: float | str = 4.0             # or "auto": cut where measured ready times say
    progress: Progressing = "poll"
    wire_dtype: Literal["float32", "bfloat16", "float16"] = "float32"      # element type of messages
    node_shared: bool = False                # one copy of parameters and optimizer state per node
    sharding: str = "none"                   # one of POLICIES; or the user's own policy, "file.py:name"
    compress: str = ""                       # one of COMPRESSORS, "topk:0.01", for gradients between nodes; or "file.py:name"
    compress_feedback: bool = True           # what a message left out is added to the next one
    compress_after: int = 0                  # steps before the first compressed one
    compress_warmup: int = 0                 # steps behind these in which a share is 4, then 2 times as large
    compress_parameters: str = ""            # the same, of the parameters that ranks with slices of them give each other
    compress_force: bool = False             # compress between all ranks, also those of one node

    @property
    def idle(self) -> list[str]:
        """A line about a key that changes nothing. It is not refused: a study may have `compress` as a choice, "" among them."""
        given = {"comm.compress_after": self.compress_after, "comm.compress_warmup": self.compress_warmup}
        return [f"{key} = {steps} has no effect: comm.compress is empty, so that gradients travel as they are in all steps"
                for key, steps in given.items() if steps and not self.compress]

    @property
    def cuts(self) -> str:
        """The states that the policy cuts, one of STATES; "none" for a user's own."""
        found: str = POLICIES[self.sharding].cuts if self.sharding in POLICIES else "none"
        return found

    @property
    def bucket_bytes(self) -> int:
        """The size of buckets; if they are cut by measurement, the size until then."""
        return UNTIL_MEASURED if isinstance(self.bucket_mb, str) else max(1, int(self.bucket_mb * 2**20))


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 0                           # steps; 0: at the end only
    keep: int = 2
    best: bool = True                        # also keep the one with the lowest validation loss, or ...
    best_metric: str = "loss"                # ... whose metric is the best
    asynchronous: bool = True                # written from a copy, while training goes on
    on_error: Literal["stop", "go_on"] = "stop"      # if one cannot be written; the run's last one always stops


@dataclass(frozen=True)
class StopConfig:
    patience: int = 0                        # evaluations without a better metric that end the run; 0: nothing does
    metric: str = "loss"
    min_delta: float = 0.0                   # a better one is better by more than this
    mode: Literal["auto", "min", "max"] = "auto"      # which values are better; "auto": the metric says so


@dataclass(frozen=True)
class AverageConfig:
    kind: Literal["none", "ema", "swa"] = "none"      # exponential, or equal weights
    decay: float = 0.999                     # of "ema"; smaller in the first updates where `warmup` is true
    warmup: bool = True                      # the t-th decay is at most (1 + t) / (10 + t)
    start: int = 0                           # steps before the first weights that are averaged
    every: int = 1                           # steps between weights that are averaged
    evaluate: bool = True                    # evaluations are of the average, not of the weights that train


@dataclass(frozen=True)
class LogConfig:
    every: int = 10                          # steps
    progress_s: float = 10.0                 # seconds
    tensorboard: bool = False
    observers: tuple[str, ...] = ()          # the user's own: "file.py:name"
    machine: str = ""                        # a machine's file or name: run.json compares the step that it predicts


@dataclass(frozen=True)
class Origin:
    """The place of a configuration's keys: in a file, or (`overridden`) on the command line."""

    file: Path
    overridden: frozenset[str]


@dataclass(frozen=True)
class Config:
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    mesh: MeshConfig = MeshConfig()
    comm: CommConfig = CommConfig()
    shrink: ShrinkConfig = ShrinkConfig()
    lora: LoraConfig = LoraConfig()
    distil: DistilConfig = DistilConfig()
    sync: SyncConfig = SyncConfig()
    workers: WorkersConfig = WorkersConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    stop: StopConfig = StopConfig()
    average: AverageConfig = AverageConfig()
    energy: EnergyConfig = EnergyConfig()
    log: LogConfig = LogConfig()
    origin: Origin | None = field(default=None, compare=False, repr=False)      # None: made in Python

    @property
    def folder(self) -> Path:
        """Data paths and user code are found from here."""
        return Path(self.run.folder)

    def refuse_without_data(self) -> None:
        """ConfigError where there is no data.path."""
        if not self.data.path:
            raise self.wrong("data.path is missing: an HDF5 file, a folder of shards, or a built-in name (digits)",
                             ("data.path",))

    def given_in(self, key: str) -> str:
        """`` of FILE`` where a key was not overridden, for a message about one that was."""
        return f" of {self.origin.file.name}" if self.origin is not None and key not in self.origin.overridden else ""

    def wrong(self, message: str, keys: tuple[str, ...]) -> ConfigError:
        """A mistake about some keys; the file is not to blame for overridden ones."""
        if self.origin is None:
            return ConfigError(message)
        if self.origin.overridden.intersection(keys):
            return ConfigError(f"on the command line: {message}")
        return ConfigError(message, file=self.origin.file)


SECTIONS: dict[str, Any] = {f.name: f.default for f in fields(Config) if f.name != "origin"}
OPEN = ("model", "optimizer", "train")                        # objects named in these sections take further keys


def keys_of(section: str) -> dict[str, Any]:
    """The keys that a section itself knows, with the types of their values."""
    return {f.name: f.type for f in fields(SECTIONS[section]) if f.name != "arguments"}


def changed(config: Config, **sections: Mapping[str, Any]) -> Config:
    """`config` with some keys of sections changed: ``changed(config, train={"steps": 3}, comm={"sharding": "optimizer"})``."""
    return dataclasses.replace(config, **{name: dataclasses.replace(getattr(config, name), **keys)
                                          for name, keys in sections.items()})
