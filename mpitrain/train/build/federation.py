"""A federation out of [workers] and its level of [[sync]]: a run whose step is a round.

    as_rounds(config)     the same run for whoever places it: a micro-batch is a seat, where workers of a round take turns
    rounds_of(...)        who has which rows, who is drawn, how long a worker trains
    Federation            the outer rule, and the loader and the pipeline of workers
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpitrain import nn
from mpitrain.checkpoint.hosted import OfWorkers
from mpitrain.checkpoint.kinds import in_flat
from mpitrain.comm.messages.channel import Channel
from mpitrain.config import Config, changed
from mpitrain.config.levels import Level, levels_of, make_outer
from mpitrain.config.messages import written
from mpitrain.config.topology import PARTITIONS
from mpitrain.data import Dataset
from mpitrain.data.partitions import NO_CLASS, ByColumn, Labels, OfUser, Partition, digest, rows_of_workers
from mpitrain.data.rounds import Draw, Local, RoundLoader, Rounds
from mpitrain.errors import ConfigError
from mpitrain.nn.statistics import running_layers
from mpitrain.optim import Optimizer
from mpitrain.optim.by_rule import ByRule
from mpitrain.optim.outer import OuterRule
from mpitrain.optim.rules import SGD
from mpitrain.parallel.pipeline.runner import Pipeline
from mpitrain.parallel.policies.policy import Policy
from mpitrain.parallel.workers.corrections import Correction, Means, make_correction
from mpitrain.parallel.workers.local import ARRAYS, LocalTraining
from mpitrain.parallel.workers.policy import Federated
from mpitrain.schedules.grid import REPLICAS
from mpitrain.train.build.extension import Assembled, Extension
from mpitrain.train.build.inputs import Inputs, all_labels, has_labels
from mpitrain.train.observers.observer import Observer

OTHERS: dict[str, Any] = {"what": "parameters", "after": 0, "compress": "", "fragments": 1, "delay": 0, "alpha": 1.0, "graph": ""}


def as_rounds(config: Config) -> Config:
    """The configuration whose step is a round of as many micro-batches as the round has seats, of one local batch each; without
    [workers] as it is. ConfigError for a draw that there cannot be."""
    if not config.workers.count:
        return config
    seats = config.train.micro_batches or max(1, round(draw_of(config).expected))
    return changed(config, train={"reproducible": "layout", "micro_batches": seats,
                                  "batch_size": config.train.batch_size * seats})


def draw_of(config: Config) -> Draw:
    """Who is drawn for rounds, and who answers."""
    w = config.workers
    each = float(w.count)
    if isinstance(w.each_round, str):
        name, _, text = w.each_round.partition(":")
        try:
            each = float(text)
        except ValueError:
            each = math.nan
        if name != "poisson" or not 0.0 < each <= 1.0:
            raise config.wrong('workers.each_round must be a number of workers, or "poisson:0.1" with a probability above 0, at '
                               f'most 1, found "{w.each_round}"', ("workers.each_round",))
    elif 0 <= w.each_round <= w.count:
        each = float(w.each_round or w.count)
    else:
        raise config.wrong(f"workers.each_round = {w.each_round} must be 1 to workers.count = {w.count}, or 0 for all of them",
                           ("workers.each_round", "workers.count"))
    if not 0.0 <= w.drop < 1.0:
        raise config.wrong(f"workers.drop = {written(w.drop)} must be 0 or more and below 1, the share of workers that do not "
                           "answer: with 1 no round would change anything", ("workers.drop",))
    return Draw(w.count, each, isinstance(w.each_round, str), w.drop, config.run.seed)


def level_of(config: Config) -> Level:
    """The one level of [[sync]] over workers; without one, an epoch of each worker, and the mean of what they have."""
    found = levels_of(config) or [Level(over="workers", every="1 epochs")]
    keys = ("sync.levels",)
    if len(found) > 1 or found[0].over != "workers":
        raise config.wrong('[workers] has one level of [[sync]], over = "workers", found over = '
                           f"{', '.join(written(level.over) for level in found)}; keep that one alone", keys)
    for key, value in OTHERS.items():
        if (given := getattr(found[0], key)) != value:
            raise config.wrong(f"sync.{key} = {written(given)} is not for [[sync]] over workers of a federation; leave it at "
                               f"{written(value)}, the default", keys)
    return found[0]


def local_of(config: Config) -> Local:
    """How long a worker trains in a round."""
    every = level_of(config).every
    epochs = int(every.partition(" ")[0]) if isinstance(every, str) else 0
    return Local(config.train.batch_size, epochs, 0 if isinstance(every, str) else every)


def rounds_of(config: Config, inputs: Inputs) -> Rounds:
    """The rounds of a federation over the training rows. ConfigError for a partition that there cannot be, on all ranks alike."""
    if config.train.epochs:
        raise config.wrong(f"train.epochs = {config.train.epochs}: a federation's length is its rounds; set train.steps to their "
                           'number, and the local epochs in [[sync]], every = "5 epochs"', ("train.epochs",))
    draw, w = draw_of(config), config.workers
    index = inputs.train_rows
    places = rows_of_workers(partition_of(config, inputs), labels_of(inputs), w.count, config.run.seed)
    dataset_rows = np.arange(index.start, index.stop, index.step) if isinstance(index, range) else np.asarray(index, np.int64)
    seats = as_rounds(config).train.micro_batches
    return Rounds([dataset_rows[own] for own in places], draw, local_of(config), seats, w.weights)


def partition_of(config: Config, inputs: Inputs) -> Partition:
    """The rule that `workers.rows` names."""
    text = config.workers.rows
    name, colon, argument = text.partition(":")
    if colon and "." in name:
        own: Any = PARTITIONS.resolve(text, config.folder)
        return OfUser(own, text)
    made: Partition = PARTITIONS.resolve(name, config.folder)(argument)
    if isinstance(made, ByColumn):
        made.values = column_of(inputs, made.name)
    return made


def column_of(inputs: Inputs, name: str) -> Any:
    """The values of one of the data's inputs by name, for the training rows."""
    source = inputs.training
    fields = getattr(getattr(source, "x", None), "fields", {})
    if not isinstance(source, Dataset) or name not in fields:
        known = f"; they are {', '.join(fields)}" if fields else "; data.x names none"
        raise ConfigError(f'workers.rows = "column:{name}" must be one of the inputs by name{known}')
    values = source.read_field(fields[name], np.asarray(inputs.train_rows, np.int64))
    if values.ndim != 1 or values.dtype.kind not in "biuSU":
        raise ConfigError(f'workers.rows = "column:{name}" needs one whole number for each row, found {values.dtype} of shape '
                          f"{values.shape[1:]}")
    return values


def labels_of(inputs: Inputs) -> Labels:
    """The labels of the training rows; NO_CLASS for all where targets are no classes."""
    source, rows = inputs.training, np.asarray(inputs.train_rows, np.int64)
    if inputs.tokens or not isinstance(source, Dataset) or source.kind != "classification" or not has_labels(source):
        return np.full(len(rows), NO_CLASS, np.int64)
    labels: Labels = all_labels(source)[rows].astype(np.int64)
    return labels


def refuse_model(config: Config, model: nn.Module, tried: Optimizer) -> None:
    """ConfigError for a model or an optimizer that workers cannot have."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.SyncBatchNorm) or running_layers(layer):
            raise ConfigError(f'the layer "{name}" ({type(layer).__name__}) keeps statistics of the rows it has seen, and each '
                              "worker sees other rows: the mean of the workers' statistics would be that of no worker; use group "
                              'norm or layer norm')
    refuse_unfit(config, make_correction(config.workers.correct, config.folder), tried)
    if tried.needs_closure:
        raise ConfigError(f"{tried.title} computes the loss of a step several times, and a worker's step is computed once; set "
                          'optimizer.name = "sgd" or "adamw"')


def refuse_unfit(config: Config, correction: Correction, tried: Optimizer) -> None:
    """ConfigError where the correction does not go with the workers' optimizer, or the run."""
    o, what = config.optimizer, f'workers.correct = "{config.workers.correct}"'
    if correction.plain_sgd and not isinstance(tried, SGD) and o.name == "sgd":
        raise config.wrong(f"{what} takes a worker's way for a sum of its gradients at one rate, found parameters with rules of "
                           "their own (optimizer.groups, lora); leave those out, or set workers.correct to \"prox:0.1\"",
                           ("workers.correct", "optimizer.groups"))
    if correction.plain_sgd and not (isinstance(tried, SGD) and not tried.momentum and not o.clip_norm):
        raise config.wrong(f"{what} takes a worker's way for a sum of its gradients, which it is for plain SGD alone, found "
                           f'optimizer.name = "{o.name}", momentum = {o.momentum:g}, clip_norm = {o.clip_norm:g}; set "sgd", 0 '
                           "and 0", ("workers.correct", "optimizer.name"))
    if correction.plain_sgd and config.train.on_lost != "stop":
        raise config.wrong(f"{what} keeps an array of each worker on one rank, which is lost with that rank, found "
                           f'train.on_lost = "{config.train.on_lost}"; set it to "stop"', ("workers.correct", "train.on_lost"))


def arrays_of(config: Config, ranks: int) -> int:
    """How many arrays of the parameters' size a rank has for workers and the outer rule, once all workers have been drawn."""
    correction = make_correction(config.workers.correct, config.folder)
    return ARRAYS + len(outer_of(config).states) + correction.arrays(-(-config.workers.count // ranks))


def outer_of(config: Config) -> OuterRule:
    """The rule of the level over workers."""
    level = level_of(config)
    rule: OuterRule = make_outer(level.outer, level.lr, dict(level.arguments), config.folder)
    return rule


class Federation(Extension):
    """Its rounds, outer rule, loader and pipeline, in the place of those of other runs. ConfigError, on all ranks alike, for
    workers that there cannot be."""

    def __init__(self, config: Config, inputs: Inputs):
        self.config, self.as_rounds, self.level = config, as_rounds(config), level_of(config)
        self.rounds = rounds_of(config, inputs)
        self.correction = make_correction(config.workers.correct, config.folder)
        self.rule = outer_of(config)

    def configured(self, config: Config) -> Config:
        return self.as_rounds

    def drawn(self, rows: Any) -> Any:
        return self.rounds

    def described(self, steps: int) -> list[str]:
        return self.lines()

    def optimizer(self, made: Optimizer, policy: Policy, control: Channel, steps: int) -> Optimizer:
        """The policy's optimizer, which applies the outer rule; `made` is that of the workers. It communicates."""
        control.agree(digest(self.rounds.rows_of), "the rows of the workers (SHA-256)")
        assert isinstance(policy, Federated)
        policy.correction, self.policy, self.inner = self.correction, policy, made
        tree, mesh = policy.context.placement.tree, policy.mesh
        assert tree is not None
        self.correction.open(Means(policy.storage, self.rounds, policy.channel, tree, mesh.link(REPLICAS, "workers")))
        self.outer = ByRule(policy.storage, self.rule)
        self.outer.lr = made.lr
        return self.outer

    def kinds(self) -> list[Any]:
        """The kinds of state that workers add."""
        layout = self.policy.layout
        return [*(in_flat(f"outer/{name}", self.policy.storage, flat, False) for name, flat in self.correction.shared.items()),
                *(OfWorkers(name, hosted, layout) for name, hosted in self.correction.hosted.items())]

    def loader(self, kind: Any) -> Any:
        return RoundLoader

    def pipeline(self, kind: Any) -> Any:
        return self.turns

    def turns(self, *arguments: Any, **options: Any) -> Pipeline:
        """The turns of this rank's workers."""
        made = LocalTraining(*arguments, rounds=self.rounds, inner=self.inner, policy=self.policy,
                             clip_norm=self.config.optimizer.clip_norm, **options)
        self.outer.of_workers = lambda: made.nbytes
        return made

    def join(self, run: Assembled) -> None:
        run.trainer.notes += self.lines()
        run.trainer.observers += self.observers()

    def observers(self) -> list[Observer]:
        """Observers of the run, on each rank."""
        return []

    def lines(self) -> list[str]:
        """What `inspect` says of the federation, and a run when it starts."""
        draw, sizes = self.rounds.draw, self.rounds.sizes
        drawn = f"each with probability {draw.each:g}" if draw.poisson else f"{int(draw.each)}"
        return [f"{draw.count} workers of {sizes.min()} to {sizes.max()} rows, {drawn} in a round"
                f"{f', of which a share of {draw.drop:g} does not answer' if draw.drop else ''}"]
