"""What each rank has by itself between two exchanges of an optimizer whose ranks drift apart, in checkpoints.

    drift/<k>/<state>/<parameter>     of the k-th of the ranks that have the same part of the model

They are there where a checkpoint was written within a round. Another number of ranks goes on from their means.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitrain.checkpoint.kinds import Expected, Shapes, Values
from mpitrain.checkpoint.manifest import Checkpoint
from mpitrain.checkpoint.parts import Piece
from mpitrain.checkpoint.residuals import is_ours
from mpitrain.comm.mesh import Mesh
from mpitrain.errors import CheckpointError, MpitrainError
from mpitrain.nn.parameter import Parameter

if TYPE_CHECKING:
    from mpitrain.parallel.policies.one_bit import OneBitReplicated


class Drift(Values):
    """A kind of state, which `restore` reads once all others are there."""

    def __init__(self, policy: OneBitReplicated):
        super().__init__("drift", dict, lambda found: None, exact=False)
        self.policy = policy

    def expected(self, shapes: Shapes) -> Expected:
        return {}                                             # at the end of a round there is nothing

    def pieces(self, mesh: Mesh | None) -> Iterator[Piece]:
        if not self.policy.drifts:
            return
        for prefix, leaf, flat in self._held():
            if is_ours(leaf, mesh):
                for view, start in leaf.pieces(flat, 0):
                    yield Piece(f"drift/{self.policy.channel.rank}/{prefix}", view, leaf.global_shape, start)

    def read(self, checkpoint: Checkpoint) -> None:
        """Nothing: what all have alike comes first."""

    def restore(self, checkpoint: Checkpoint) -> None:
        """Takes this rank's own, after a step within a round. CheckpointError, on all ranks, where it is not there. It
        communicates."""
        if not self.policy.drifts:
            return
        ranks = {name.split("/")[1] for name in checkpoint.arrays if name.startswith("drift/")}
        channel, wrong = self.policy.channel, ""
        own = [str(channel.rank)] if len(ranks) == channel.size else sorted(ranks, key=int)
        try:
            for prefix, leaf, flat in self._held():
                for view, start in leaf.pieces(flat, 0):
                    found = [checkpoint.read(f"drift/{k}/{prefix}", start, view.shape) for k in own]
                    view[...] = found[0] if len(found) == 1 else np.mean(found, axis=0, dtype=np.float64)
        except (KeyError, IndexError, MpitrainError) as error:
            wrong = str(error)
        if lacking := next(filter(None, channel.messages.gather_objects(wrong)), ""):
            raise CheckpointError(f"was written between two exchanges of {self.policy.optimizer.title}, and what its ranks had "
                                  f"by themselves cannot be read: {lacking}; use another checkpoint", file=checkpoint.folder)

    def _held(self) -> Iterator[tuple[str, Parameter, Any]]:
        """(state/parameter, its leaf, its part) of each array that ranks have by themselves."""
        layout, state = self.policy.layout, self.policy.optimizer.state
        for name in self.policy.optimizer.own:
            for segment in layout.segments:
                leaf: Parameter = segment.parameter
                yield f"{name}/{leaf.key}", leaf, state[name][segment.start:segment.stop]
