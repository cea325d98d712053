"""Everything a resumed run needs, as kinds of named arrays: the content of a checkpoint, written and read.

    kind        in a checkpoint                     where it lies
    Kept        parameters/<name>                   as the model's parameters do: cut, in slices, or whole
                buffers/<name>                      as its buffers do
                optimizer/<kind>/<name>             as the parameters that the optimizer updates
    Values      optimizer/steps, data/<transform>   equal on all ranks
                loss_scale/scale, good, left_out
    Sometimes   outer/<state>/<name>                as the optimizer's, equal on all sites     (`parallel.levels`)
    OfSite      workers/<k>/<kind>/<name>           of site k, as its own kind does

Names depend on no rank, so a checkpoint of one layout is read by any other. A further kind is one more object in `State.kept`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpitrain.backend import Array, asnumpy
from mpitrain.checkpoint.hashes import array_line, total_sha256
from mpitrain.checkpoint.kinds import Expected, Kept, Placed, Values, in_flat
from mpitrain.checkpoint.manifest import Checkpoint
from mpitrain.checkpoint.parts import Piece
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.messages.channel import Channel
from mpitrain.data import Transforms
from mpitrain.errors import CheckpointError, NumericsError
from mpitrain.nn import Module
from mpitrain.optim.optimizer import Optimizer
from mpitrain.parallel.pipeline.nonfinite import is_finite
from mpitrain.parallel.policies.policy import Policy

LAST_STANDS = ("no checkpoint was written and the last one stands; resume from it with a smaller optimizer.lr, or "
               "optimizer.clip_norm")


class State:
    """The kinds of state of a run, in `kept`, and the operations on all of them.

    `model` is this rank's part of `whole` (default: all of it); `mesh` says what others hold, and `control` connects all
    ranks. `policy` may give this rank only slices of some arrays.
    """

    def __init__(self, model: Module, optimizer: Optimizer | None = None, transforms: Transforms | None = None, *,
                 whole: Module | None = None, mesh: Mesh | None = None, control: Channel | None = None,
                 policy: Policy | None = None):
        self.model, self.optimizer, self.transforms = model, optimizer, transforms
        self.mesh, self.control, self.policy = mesh, control, policy
        self.shards = None if policy is None else policy.shards
        self._shapes, storage = whole_shapes(whole or model), model.storage
        assert storage is not None
        self.parameters = Kept("parameters", self._parameters, storage.dtype)
        self.buffers = Kept("buffers", lambda: [Placed(b, b.array) for _, b in model.named_buffers()], storage.dtype,
                            of="buffers", others={name: b.kind for name, b in (whole or model).named_buffers() if b.kind})
        self.kept: list[Kept | Values] = [self.parameters, self.buffers]
        if optimizer is not None:
            sliced = self.shards is not None
            self.kept += [in_flat(f"{optimizer.prefix}/{one.kind}", one.storage, one.flat, sliced, one.among, one.shape)
                          for one in optimizer.held()]
            self.kept.append(Values(optimizer.prefix, lambda: {"steps": np.array(optimizer.steps), **optimizer.numbers},
                                    partial(_take_numbers, optimizer)))
        if policy is not None and policy.loss_scale is not None and optimizer is not None:
            self.kept.append(Values("loss_scale", policy.loss_scale.record, policy.loss_scale.restore, exact=False))
        self.apart: list[Kept] = []                           # What sites have of their own instead of parameters and buffers.
        if transforms is not None:
            self.kept.append(Values("data", transforms.state_dict, transforms.load_state_dict, exact=False))

    def _parameters(self) -> Iterable[Placed]:
        if self.shards is None or not self._has_slices:
            return (Placed(p, p.master) for p in self.model.parameters())
        return in_flat("", self.shards, self.shards.values, True).placed()

    @property
    def _has_slices(self) -> bool:
        """Whether this rank has only slices of the parameters, of those that checkpoints hold."""
        return self.policy is not None and (self.policy.cuts_parameters or self.policy.masters)

    @property
    def is_cut(self) -> bool:
        """Whether this rank has only a part of the model."""
        return self.mesh is not None and (self.mesh.cuts_model or self._has_slices)

    def arrays(self) -> dict[str, Array]:
        """The arrays of which this rank has whole parts, in place, by names that end with the leaf's own."""
        return {f"{kind.prefix}/{one.leaf.name}": one.array for kind in self.kept for one in kind.placed() if one.first is None}

    def pieces(self) -> list[Piece]:
        """The pieces that this rank writes, on the host: the first rank writes a piece that several have."""
        return [piece for kind in (*self.kept, *self.apart) for piece in kind.pieces(self.mesh)]

    def held(self) -> dict[str, Piece]:
        """All that this rank has, by the pieces' names in part files: also what another rank writes."""
        return {piece.dataset: piece for kind in self.kept for piece in kind.pieces(None)}

    def expected(self) -> dict[str, tuple[int, ...]]:
        """The shape of each array of a complete checkpoint."""
        return {name: tuple(shape) for kind in (*self.kept, *self.apart)
                for name, (shape, _) in kind.expected(self._shapes).items()}

    def refuse_nonfinite(self, step: int, so: str = LAST_STANDS) -> None:
        """Raises NumericsError where a parameter is NaN or Inf. `so` says what follows from that, and what to change."""
        for one in self.parameters.placed():
            if not is_finite(one.array):
                raise NumericsError(f'the parameter "{one.leaf.name}" is not finite, so {so}', step=step)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Copies a checkpoint's values in. Raises CheckpointError, before anything is touched, where names or shapes differ."""
        self.refuse_other(checkpoint, [*self.kept, *self.apart])
        self._read(checkpoint, self.kept)

    def load_parameters(self, checkpoint: Checkpoint, is_new: Callable[[str], bool] | None = None) -> None:
        """The values of the parameters and buffers alone, to start another run from; see `to_start_from`."""
        kept = self.to_start_from(checkpoint, is_new)
        self.refuse_other(checkpoint, kept)
        self._read(checkpoint, kept)

    def to_start_from(self, checkpoint: Checkpoint, is_new: Callable[[str], bool] | None = None) -> list[Kept | Values]:
        """The parameters and buffers that a checkpoint must have for a run to start from it: all, but for parameters whose names
        `is_new` says yes to, where the checkpoint has none of them."""
        names = [name.removeprefix("parameters/") for name in self._shapes]
        new = {name for name in names if is_new is not None and is_new(name)}
        if not new or any(f"parameters/{name}" in checkpoint.arrays for name in new):
            return [self.parameters, self.buffers]
        kept = Kept("parameters", lambda: (one for one in self._parameters() if one.leaf.key not in new), self.parameters.dtype,
                    among=lambda name: name not in new)
        return [kept, self.buffers]

    def refuse_other(self, checkpoint: Checkpoint, kept: Sequence[Kept | Values] = ()) -> None:
        """CheckpointError where names or shapes of `kept` (by default, parameters and buffers) are others in a checkpoint."""
        expected: dict[str, Expected] = {}                    # keys are first words; any other name under one is another model's
        for kind in kept or (self.parameters, self.buffers):
            if kind.exact:
                expected.setdefault(first_word(kind.prefix), {})
                for name, about in kind.expected(self._shapes).items():
                    expected.setdefault(first_word(name), {})[name] = about
        for prefix, names in expected.items():
            checkpoint.check_names(names, prefix)

    def _read(self, checkpoint: Checkpoint, kept: Sequence[Kept | Values]) -> None:
        for kind in reversed(kept):
            kind.read(checkpoint)
        if self.policy is not None:
            self.policy.values_written()
        self.model.round_parameters()
        for leaf in (*self.model.parameters(), *(b for _, b in self.model.named_buffers())):
            leaf.mark_changed()
        self._compare(checkpoint, [kind for kind in kept if isinstance(kind, Kept) and kind.prefix in ("parameters", "buffers")])

    def _compare(self, checkpoint: Checkpoint, kept: Sequence[Kept]) -> None:
        """CheckpointError where the values in memory are not those that the ranks agreed on before they were saved."""
        found = {f"{kind.prefix}_sha256": self.sha256(kind) for kind in kept} if checkpoint.hashes else {}
        for name, saved in checkpoint.hashes.items():
            if found.get(name) != saved:
                raise CheckpointError(f"{name} of the values in memory is {found.get(name, '')[:12]}.., that of the saved ones "
                                      f"{saved[:12]}..: the memory of this node may be faulty; start again on another one",
                                      file=checkpoint.folder)

    def hashes(self) -> dict[str, str]:
        """``parameters_sha256`` and ``buffers_sha256``, as in run.json, for this rank's copy; communicates only if no rank has a
        whole one. Arrays that are cut themselves are put together one at a time.
        """
        return {f"{kind.prefix}_sha256": self.sha256(kind) for kind in (self.parameters, self.buffers)}

    def sha256(self, kind: Kept) -> str:
        """The hash of all arrays of a kind, over the whole model. It communicates where ranks have parts."""
        held = {one.leaf.key: one for one in kind.placed() if not getattr(one.leaf, "twin_of", "")}
        mesh, control = self.mesh, self.control
        sliced = self.shards is not None and kind not in (self.parameters, self.buffers)
        if mesh is None or control is None or not (self.is_cut or sliced):
            return total_sha256(array_line(name, asnumpy(one.array)) for name, one in held.items())
        own = {name: one for name, one in held.items() if one.is_ours(mesh)}
        lines = [array_line(name, asnumpy(one.array)) for name, one in own.items() if one.is_whole]
        everyone = control.gather_objects([lines, sorted(name for name, one in own.items() if not one.is_whole)])
        lines = [line for lines, _ in everyone for line in lines]
        lines += [array_line(name, self._put_together(kind, name, own.get(name), control))
                  for name in sorted({name for _, names in everyone for name in names})]
        return total_sha256(lines)

    def _put_together(self, kind: Kept, name: str, own: Placed | None, control: Channel) -> np.ndarray[Any, Any]:
        """A cut array as a whole, on every rank: bytes are added where all others have zeros."""
        whole = np.zeros(self._shapes[kind.of + name], kind.dtype_of(name))
        for part, start in own.boxes(asnumpy(own.array)) if own is not None else ():
            whole[tuple(slice(a, a + n) for a, n in zip(start, part.shape))] = part
        control.allreduce(whole.reshape(-1).view(np.uint8 if whole.nbytes % 4 else np.int32), name=f"the bytes of {name}")
        return whole


def _take_numbers(optimizer: Optimizer, found: dict[str, Any]) -> None:
    optimizer.steps = int(found["steps"])
    for name, array in optimizer.numbers.items():
        array[...] = found[name]


def first_word(name: str) -> str:
    """``optimizer/`` of ``optimizer/m/head.weight``."""
    return f"{name.partition('/')[0]}/"


def whole_shapes(model: Module) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's arrays in a checkpoint, before they are cut."""
    shapes = {f"parameters/{leaf.twin_of or name}": leaf.global_shape for name, leaf in model.named_parameters()}
    return shapes | {f"buffers/{name}": leaf.global_shape for name, leaf in model.named_buffers()}
