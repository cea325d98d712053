"""Corrections: what a worker adds to its gradients so that its steps lead less far away from the others'."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy as np

from mpitrain.backend import Array
from mpitrain.comm.face import AnyChannel
from mpitrain.comm.messages.link import Link
from mpitrain.config.topology import CORRECTIONS
from mpitrain.data.rounds import Rounds, Turn
from mpitrain.errors import ConfigError
from mpitrain.parallel.workers.hosts import Hosted
from mpitrain.schedules.microtree import RankTree

KEY = "workers.correct"


class Means(NamedTuple):
    """What a correction with state needs: the parameters' memory, the ranks that add up, and those that send to each other."""

    storage: Any
    rounds: Rounds
    channel: AnyChannel
    tree: RankTree
    link: Link


class Correction:
    """Plain federated averaging, which adds nothing; a user's own overrides what it needs. All arrays are flat.

    `shared` are arrays that all ranks have alike, and `hosted` those of workers, by name: they are kept in checkpoints.
    """

    sums: ClassVar[int] = 1                      # arrays that travel from each worker: its delta, and what goes beside it
    plain_sgd: ClassVar[bool] = False            # Whether it takes a worker's way for a sum of gradients.

    def __init__(self, text: str = ""):
        if text:
            raise ConfigError(f'{KEY}: nothing goes behind the colon, found "{text}"; leave it out')
        self.shared: dict[str, Array] = {}
        self.hosted: dict[str, Hosted] = {}

    def arrays(self, workers: int) -> int:
        """How many arrays of the parameters' size it has on a rank that hosts so many workers."""
        return 0

    def open(self, means: Means) -> None:
        """All ranks are about to start; arrays that they keep are made now."""

    def begin_round(self, round: int) -> None:
        """A round, counted from 0, begins on all ranks."""

    def begin(self, turn: Turn, start: Array) -> None:
        """A worker begins at the parameters `start`."""

    def add(self, gradient: Array, theta: Array) -> None:
        """Changes a local step's gradient in place; the worker stands at `theta`."""

    def end(self, turn: Turn, delta: Array, steps: int, lr: float) -> None:
        """The worker has gone from start to start - delta in so many steps."""

    def settle(self, happened: bool) -> None:
        """The round is over on all ranks; where it was left out, as not finite, nothing of it `happened`."""


class Prox(Correction):
    """FedProx: mu / 2 |theta - theta_start|^2 in the loss, so mu (theta - theta_start) in its gradient (Li et al., 2020)."""

    def __init__(self, text: str = ""):
        super().__init__()
        try:
            self.mu = float(text)
        except ValueError:
            self.mu = -1.0
        if not 0.0 <= self.mu < float("inf"):
            raise ConfigError(f'{KEY} = "prox:{text}" needs a number of 0 or more, the weight mu, found "{text}"; set it to '
                              '"prox:0.1"')

    def begin(self, turn: Turn, start: Array) -> None:
        self.start, self.pull = start, np.empty_like(start)

    def add(self, gradient: Array, theta: Array) -> None:
        np.subtract(theta, self.start, out=self.pull)
        self.pull *= theta.dtype.type(self.mu)
        gradient += self.pull


def make_correction(text: str, folder: Any = None) -> Correction:
    """The correction that `workers.correct` names: ``prox:0.1``. ConfigError for anything else."""
    if not text:
        return Correction()
    name, _, argument = text.partition(":")
    if "." in name:                                           # a file or a module of the user's
        found, argument = CORRECTIONS.resolve(text, folder), ""
    else:
        found = CORRECTIONS.resolve(name, folder)
    if not (isinstance(found, type) and issubclass(found, Correction)):
        raise ConfigError(f'{KEY} = "{text}" must name a subclass of mpitrain.parallel.workers.corrections.Correction')
    made: Correction = found(argument) if argument else found()
    return made
