"""What sections of a configuration add to a run beyond model, data, optimizer and mesh: parts that `assemble` tells
of each of its stages. `extensions.py` says which parts a run has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpitrain.checkpoint.manifest import Checkpoint
from mpitrain.checkpoint.state import State
from mpitrain.comm.job import guard
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.messages.channel import Channel
from mpitrain.config import Config
from mpitrain.errors import CheckpointError
from mpitrain.nn import Module
from mpitrain.optim import Optimizer
from mpitrain.parallel.policies.policy import Policy
from mpitrain.train.trainer import Trainer


class Assembled(NamedTuple):
    """A run whose parts have met: `model` is the whole one."""

    config: Config
    trainer: Trainer
    state: State
    policy: Policy
    control: Channel
    model: Module


class Extension:
    """A further part of a run. Its methods are called once each, on all ranks, in the order in which they stand here; those of
    this class add nothing."""

    def configured(self, config: Config) -> Config:
        """The configuration for all that is made after this."""
        return config

    def drawn(self, rows: Any) -> Any:
        """What the run draws its batches from: rows, or a sampler of its own."""
        return rows

    def validated(self, valid: Any) -> None:
        """Takes the `validate.Validated`: what the run has been found to be, as far as can be told without MPI."""

    def described(self, steps: int) -> Sequence[str]:
        """The lines of `inspect` about a run of so many steps, which calls nothing that follows here."""
        return ()

    def optimizer(self, made: Optimizer, policy: Policy, control: Channel, steps: int) -> Optimizer:
        """The policy's optimizer of a run of so many steps, in the place of `made`. It communicates."""
        return made

    def kinds(self) -> Sequence[Any]:
        """Kinds of state for checkpoints (`checkpoint.kinds`)."""
        return ()

    def open(self, policy: Policy, mesh: Mesh, control: Channel, seats: range, steps: int) -> None:
        """Before the policy opens; `seats` are the numbers of this rank's micro-batches. It communicates."""

    def loader(self, kind: Any) -> Any:
        """The class, or a function, that makes the loader, in the place of `kind`."""
        return kind

    def pipeline(self, kind: Any) -> Any:
        """The same of the pipeline."""
        return kind

    def join(self, run: Assembled) -> None:
        """Adds observers, notes, kinds of state. It communicates."""

    def restore(self, state: State, found: Checkpoint) -> bool:
        """Reads a checkpoint's state in its own way; False: it has none. It communicates."""
        return False

    def restored(self, found: Checkpoint, *, resumed: bool) -> None:
        """After a checkpoint has been read, to resume a run or to go back to it. It communicates."""


def take(what: str, restore: Callable[[Any], None], kept: Any, found: Checkpoint) -> None:
    """Hands `restore` what a checkpoint's record has of a thing. CheckpointError, on all ranks, where it is damaged."""
    try:
        restore(kept)
    except (KeyError, TypeError, ValueError, AttributeError):
        with guard.symmetric():
            raise CheckpointError(f"{what} is damaged: {str(kept)[:100]}; use another checkpoint", file=found.folder) from None
