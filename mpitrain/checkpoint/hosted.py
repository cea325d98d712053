"""The kind of state that belongs to workers of a federation: ``workers/<k>/<what>/<parameter>`` in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpitrain.backend import asnumpy
from mpitrain.checkpoint.kinds import Expected, Placed, Shapes
from mpitrain.checkpoint.manifest import Checkpoint
from mpitrain.checkpoint.parts import Piece
from mpitrain.comm.mesh import Mesh
from mpitrain.errors import CheckpointError
from mpitrain.nn import FlatLayout
from mpitrain.parallel.workers.hosts import Hosted

PREFIX = "workers"


class OfWorkers:
    """The flat arrays of `hosted`, in the layout of the model's parameters. A rank writes those of the workers that it hosts, and
    reads those whose home it is; workers that have no array have none in the checkpoint either."""

    exact = False                                             # which workers have an array is seen in the checkpoint
    steady = False                                            # nobody else has them, so nobody compares them
    prefix = PREFIX

    def __init__(self, what: str, hosted: Hosted, layout: FlatLayout):
        self.what, self.hosted, self.layout = what, hosted, layout

    def expected(self, shapes: Shapes) -> Expected:
        return {}

    def placed(self) -> Sequence[Placed]:
        """No rank has a copy of another's array."""
        return ()

    def pieces(self, mesh: Mesh | None) -> Iterator[Piece]:
        for worker, flat in sorted(self.hosted.arrays.items()):
            for segment, view in zip(self.layout.segments, self.layout.views(asnumpy(flat))):
                yield Piece.whole(self._name(worker, segment.name), view)

    def read(self, checkpoint: Checkpoint) -> None:
        """CheckpointError for a worker that there is not, and for arrays that are incomplete, of other shapes or not finite."""
        names = [segment.name for segment in self.layout.segments]
        found: dict[int, set[str]] = {}
        for name in checkpoint.arrays:
            first, _, rest = name.partition("/")
            worker, _, rest = rest.partition("/")
            what, _, parameter = rest.partition("/")
            if first == PREFIX and what == self.what:
                if not worker.isdecimal() or int(worker) >= self.hosted.rounds.draw.count or parameter not in names:
                    raise CheckpointError(f'it has "{name}", and this federation has the workers 0 to '
                                          f"{self.hosted.rounds.draw.count - 1}; use another checkpoint", file=checkpoint.folder)
                found.setdefault(int(worker), set()).add(parameter)
        arrays = {worker: self._read(checkpoint, worker, own) for worker, own in found.items()
                  if self.hosted.home(worker) == self.hosted.link.rank}
        self.hosted.restore(arrays, sorted(found))

    def _read(self, checkpoint: Checkpoint, worker: int, own: set[str]) -> Any:
        flat = self.layout.new_flat()
        for segment, view in zip(self.layout.segments, self.layout.views(flat)):
            if segment.name not in own:
                raise CheckpointError(f"worker {worker} has no {self.what} of {segment.name}; use another checkpoint",
                                      file=checkpoint.folder)
            values = checkpoint.read(self._name(worker, segment.name))
            if values.shape != view.shape or not np.isfinite(values).all():
                wrong = f"has the shape {values.shape}, not {view.shape}" if values.shape != view.shape else "is not finite"
                raise CheckpointError(f"the {self.what} of worker {worker} for {segment.name} {wrong}; use another checkpoint",
                                      file=checkpoint.folder)
            view[...] = values
        return flat

    def _name(self, worker: int, parameter: str) -> str:
        return f"{PREFIX}/{worker}/{self.what}/{parameter}"
