"""What compressed exchange keeps from step to step, in checkpoints: by the worker's number, not by the rank's.

    workers/<k>/error/<parameter>     what worker k's messages have left out, as long as the parameter
    compress/error/<parameter>        the same of the sums, as those who round them for everyone have left it out
    compress/q/<parameter>            PowerSGD's last Q, equal on all workers; of a cut parameter with the place of the part
    compress/workers                  how many workers there were

All of it is owed to the sum over workers. So another number of workers gets equal shares of the sum of the old residuals, and
whatever ranks there are, nothing is lost but rounding.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mpitrain.backend import Array
from mpitrain.checkpoint.kinds import Expected, Shapes, Values
from mpitrain.checkpoint.manifest import Checkpoint
from mpitrain.checkpoint.parts import Piece
from mpitrain.comm.face import Objects
from mpitrain.comm.mesh import Mesh
from mpitrain.errors import CheckpointError, MpitrainError
from mpitrain.nn import Module, Parameter
from mpitrain.parallel.compress.channel import CompressedSum, Held
from mpitrain.schedules.grid import COPIES

COUNT, TWIN = "compress/workers", "/twin"


class Residuals(Values):
    """The state of a `CompressedSum` as a kind of state, of a part of the model `whole`. `control` connects all ranks of the run;
    `said` tells, after a checkpoint was read, what it did not have."""

    def __init__(self, compressed: CompressedSum, whole: Module, control: Objects):
        super().__init__("workers", dict, lambda found: None, exact=False)
        self.compressed, self.control = compressed, control
        self._twins = {parameter.twin_of for parameter in whole.parameters() if parameter.twin_of}

    def expected(self, shapes: Shapes) -> Expected:
        return {}                                             # a checkpoint may be of other workers, or of none

    def pieces(self, mesh: Mesh | None) -> Iterator[Piece]:
        for prefix, held in self._flat():
            if is_ours(held.leaf, mesh):
                for view, start in held.leaf.pieces(held.array, held.first):
                    yield Piece(f"{prefix}/{name_of(held.leaf)}", view, held.leaf.global_shape, start)
        first = self.compressed.worker == 0 or mesh is None
        for name, array, leaf in self._common():
            if first and is_ours(leaf, mesh):
                yield Piece.whole(name, array)
        if mesh is None or mesh.rank == 0:
            yield Piece.whole(COUNT, np.array(self.compressed.workers))

    def read(self, checkpoint: Checkpoint) -> None:
        """Takes a checkpoint's residuals. CheckpointError, on all ranks, where they cannot be this model's."""
        self.said = ()
        before, wrong = self._workers(checkpoint), ""
        try:
            lacking = self._read(checkpoint, before)
        except MpitrainError as error:                        # damage that this rank alone may have met
            lacking, wrong = False, error.message
        refused, lack = zip(*self.control.gather_objects([wrong, lacking]))
        if any(refused):
            raise CheckpointError(f"{next(filter(None, refused))}; use another checkpoint, or begin a run from its parameters "
                                  "(model.init_from)", file=checkpoint.folder)
        if any(lack):
            self.said = ["the checkpoint has no residuals of compressed gradients, or not all: they begin with zeros"]

    def _read(self, checkpoint: Checkpoint, before: int) -> bool:
        """Reads all that this rank has; whether some of it is not there. CheckpointError where it is none of this run's."""
        lacking = False
        for prefix, held in self._flat():
            names, shares = self._names(checkpoint, prefix, held.leaf, before)
            if not names:
                held.array[...] = 0
                lacking = True
                continue
            for view, start in held.leaf.pieces(held.array, held.first):
                view[...] = sum(checkpoint.read(name, start, view.shape).astype(np.float64) for name in names) / shares
            if not np.isfinite(held.array).all():
                raise CheckpointError(f"{names[0]} has values that are not finite, which no residual of this program has")
        for name, array, _ in self._common():
            if name not in checkpoint.arrays:
                lacking = True
            elif checkpoint.arrays[name].shape != array.shape:
                raise CheckpointError(f"{name} is {checkpoint.arrays[name].shape}, and {array.shape} in this run")
            else:
                array[...] = checkpoint.read(name)
        return lacking

    def _names(self, checkpoint: Checkpoint, prefix: str, leaf: Parameter, before: int) -> tuple[list[str], int]:
        """The arrays whose sum is to be read, and among how many it is to be shared; no names where no worker has any."""
        names, shares = [f"{prefix}/{name_of(leaf)}"], 1
        if prefix.startswith("workers/"):
            kind = prefix.split("/")[2]
            everyone = [f"workers/{k}/{kind}/{name_of(leaf)}" for k in range(before)]
            there = [name for name in everyone if name in checkpoint.arrays]
            if there and len(there) < before:
                raise CheckpointError(f"lacks {next(name for name in everyone if name not in there)}, and has {there[0]}")
            if before != self.compressed.workers:
                names, shares = everyone, self.compressed.workers
        names = [name for name in names if name in checkpoint.arrays]
        if leaf.key not in self._twins:                       # there was a twin, and here is none
            names += [twin for name in names if (twin := name + TWIN) in checkpoint.arrays]
        for name in names:
            stored = checkpoint.arrays[name]
            if (stored.shape, stored.dtype) != (leaf.global_shape, np.dtype(np.float32)):
                raise CheckpointError(f"{name} is {stored.shape} {stored.dtype}, and the parameter {leaf.global_shape}; a "
                                      "residual is as long as its parameter, in float32")
        return names, shares

    def _workers(self, checkpoint: Checkpoint) -> int:
        """How many workers the checkpoint is of; 0 where it has no residuals."""
        kinds, words = {"error", *self.compressed.owners}, [name.split("/") for name in checkpoint.arrays]
        numbers = sorted({number for first, number, kind, *_ in filter(lambda found: len(found) > 3, words)
                          if first == "workers" and kind in kinds and number.isdecimal()}, key=int)
        if COUNT not in checkpoint.arrays:
            if numbers:
                raise CheckpointError(f"has residuals of worker {numbers[-1]}, and does not say how many workers there were; use "
                                      "another checkpoint", file=checkpoint.folder)
            return 0
        count = int(checkpoint.read(COUNT))
        if numbers and int(numbers[-1]) >= count:
            raise CheckpointError(f"has a residual of worker {numbers[-1]}, and says that there were {count} workers, 0 to "
                                  f"{count - 1}; use another checkpoint", file=checkpoint.folder)
        return count

    def _flat(self) -> Iterator[tuple[str, Held]]:
        """(prefix of the name, part of an array) of each state that has a place for each element."""
        compressed = self.compressed
        for name, of in compressed.owners.items():
            prefix = f"workers/{compressed.worker}/{name}" if of == "worker" else f"compress/{name.removeprefix('sum_')}"
            for held in compressed.held(name, owned=of == "owner"):
                yield prefix, held

    def _common(self) -> Iterator[tuple[str, Array, Parameter]]:
        """(name, array, parameter) of each state that all workers have alike."""
        leaves = {segment.name: segment.parameter for segment in self.compressed.layout.segments}
        for state in self.compressed.common.values():
            for name, array in state.items():
                kind, _, parameter = name.partition("/")
                leaf = leaves[parameter]
                part = "" if leaf.shape == leaf.global_shape else f"/{','.join(map(str, leaf.offset))}"
                yield f"compress/{kind}/{name_of(leaf)}{part}", array, leaf


def name_of(leaf: Parameter) -> str:
    """The name of a parameter; twins that two stages have of one parameter compress a gradient each."""
    return leaf.key + TWIN if leaf.twin_of else leaf.key


def is_ours(leaf: Parameter, mesh: Mesh | None) -> bool:
    """Whether this rank, of those with the same part of the parameter along other axes than data, writes it."""
    return mesh is None or all(axis in leaf.placement or axis in ("pp", *COPIES) or mesh.coordinate(axis) == 0
                               for axis in mesh.axes)
