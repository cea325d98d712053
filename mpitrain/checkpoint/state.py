"""Everything a resumed run needs, as named arrays: what goes into a checkpoint and comes back out of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module, asnumpy
from mpitrain.checkpoint.hashes import array_line, total_sha256
from mpitrain.checkpoint.manifest import Checkpoint
from mpitrain.checkpoint.store import Piece
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.messages.channel import Channel
from mpitrain.data import Transforms
from mpitrain.errors import NumericsError
from mpitrain.nn import Module
from mpitrain.nn.parameter import Described
from mpitrain.optim import Optimizer
from mpitrain.parallel.gradients.norm import is_first
from mpitrain.parallel.pipeline.nonfinite import is_finite
from mpitrain.parallel.policies.sharded import Sharding
from mpitrain.schedules.grid import COPIES

STEPS = "optimizer/steps"


class State:
    """Views of the model's parameters and buffers, the optimizer's state and the data's statistics, by name.

    Names are ``parameters/<name>``, ``buffers/<name>``, ``optimizer/<kind>/<name>`` and ``data/<transform>``: nothing in
    them depends on ranks, so a checkpoint of one layout is read by any other. `model` is what this rank holds of `whole`
    (default: all of it); `mesh` says what others hold, and `control` connects all ranks. With `sharding`, this rank has slices of
    some arrays only.
    """

    def __init__(self, model: Module, optimizer: Optimizer | None = None, transforms: Transforms | None = None, *,
                 whole: Module | None = None, mesh: Mesh | None = None, control: Channel | None = None,
                 sharding: Sharding | None = None):
        self.model, self.optimizer, self.transforms = model, optimizer, transforms
        self.mesh, self.control, self.sharding = mesh, control, sharding
        self._shapes = whole_shapes(whole or model)

    @property
    def _has_slices(self) -> bool:
        """Whether this rank has slices of the parameters alone."""
        return self.sharding is not None and self.sharding.cuts_parameters

    @property
    def is_cut(self) -> bool:
        """Whether this rank has a part of the model only."""
        return self.mesh is not None and (self.mesh.cuts_model or self._has_slices)

    def own_sha256(self) -> str:
        """The hash of the parameters and buffers of this rank, equal on ranks that have the same part; "" of slices, which no
        other rank has."""
        leaves = (*self.model.named_parameters(), *self.model.named_buffers())
        return "" if self._has_slices else total_sha256(array_line(name, asnumpy(leaf.array)) for name, leaf in leaves)

    def arrays(self) -> dict[str, Array]:
        """The training state proper, in place: what is written here is what the next step uses.

        Without what ranks have slices of.
        """
        found: dict[str, Array] = {f"buffers/{name}": b.array for name, b in self.model.named_buffers()}
        if not self._has_slices:
            found |= {f"parameters/{name}": p.array for name, p in self.model.named_parameters()}
        if self.optimizer is not None and self.sharding is None:
            found |= {f"optimizer/{name}": array for name, array in self.optimizer.state_dict().items()}
        return found

    def pieces(self) -> list[Piece]:
        """What this rank writes, on the host: of what several ranks have, the first one's."""
        found = []
        for stored, leaf, array, first in self._leaves():
            without = ("pp",) if first is None else ("pp", *COPIES)
            if self.mesh is None or is_first(leaf, self.mesh, without=without):
                found += [Piece(stored, view, leaf.global_shape, start) for view, start in boxes(leaf, asnumpy(array), first)]
        if self.mesh is None or self.mesh.rank == 0:
            whole = {f"data/{name}": np.asarray(a) for name, a in self.transforms.state_dict().items()} if self.transforms else {}
            if self.optimizer is not None:
                whole[STEPS] = np.array(self.optimizer.steps)
            found += [Piece.whole(name, array) for name, array in whole.items()]
        return found

    def _leaves(self, *, state: bool = True) -> Iterator[tuple[str, Described, Array, int | None]]:
        """(name in a checkpoint, leaf whose place it has, array, None) of all that is cut as the model is; twins repeat a name.

        Of what ranks have slices of, the array is flat, and begins with the leaf's element of that number.
        """
        for name, buffer in self.model.named_buffers():
            yield f"buffers/{name}", buffer, buffer.array, None
        yield from self._parameters()
        if self.optimizer is not None and state:
            storage: Any = self.optimizer.storage
            for kind, flat in self.optimizer.state.items():
                for segment, view in zip(storage.segments, storage.views(flat)):
                    parameter = segment.parameter
                    yield f"optimizer/{kind}/{parameter.key}", parameter, view, None if self.sharding is None else segment.first

    def _parameters(self) -> Iterator[tuple[str, Described, Array, int | None]]:
        if self.sharding is not None and self._has_slices:
            shards = self.sharding.shards
            for part, view in zip(shards.segments, shards.views(shards.values)):
                yield f"parameters/{part.parameter.key}", part.parameter, view, part.first
        else:
            for parameter in self.model.parameters():
                yield f"parameters/{parameter.key}", parameter, parameter.array, None

    def refuse_nonfinite(self, step: int) -> None:
        """Raises NumericsError where a parameter is NaN or Inf: a run cannot go on from such a checkpoint."""
        for _, leaf, array, _ in self._parameters():
            if not is_finite(array):
                raise NumericsError(f'the parameter "{leaf.name}" is not finite, so no checkpoint was written and the last one '
                                    "stands; resume from it with a smaller optimizer.lr, or optimizer.clip_norm", step=step)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Copies a checkpoint's values in. Raises CheckpointError, before anything is touched, where names or shapes differ."""
        self._check(checkpoint, ("parameters/", "buffers/") + (("optimizer/",) if self.optimizer is not None else ()))
        if self.transforms is not None:
            stored = [name for name in checkpoint.names if name.startswith("data/")]
            self.transforms.load_state_dict({name.removeprefix("data/"): checkpoint.read(name) for name in stored})
        if self.optimizer is not None:
            self.optimizer.steps = int(checkpoint.read(STEPS))
        self._read(checkpoint, state=True)

    def load_parameters(self, checkpoint: Checkpoint) -> None:
        """The values of the parameters and buffers alone, to start another run from."""
        self._check(checkpoint, ("parameters/", "buffers/"))
        self._read(checkpoint, state=False)

    def _check(self, checkpoint: Checkpoint, prefixes: Sequence[str]) -> None:
        """Names, shapes and dtypes of the whole model against the checkpoint's."""
        storage: Any = self.model.storage
        expected = {name: (shape, storage.dtype) for name, shape in self._shapes.items()}
        if self.optimizer is not None:
            expected |= {name.replace("parameters/", f"optimizer/{kind}/", 1): (shape, flat.dtype) for name, shape in
                         self._shapes.items() if name.startswith("parameters/") for kind, flat in self.optimizer.state.items()}
            expected[STEPS] = (), np.dtype(np.int64)
        for prefix in prefixes:
            checkpoint.check_names({name: (shape, np.dtype(str(dtype))) for name, (shape, dtype) in expected.items()
                                    if name.startswith(prefix)}, prefix)

    def _read(self, checkpoint: Checkpoint, *, state: bool) -> None:
        for name, leaf, array, first in self._leaves(state=state):
            for part, start in boxes(leaf, array, first):
                part[...] = array_module(array).asarray(checkpoint.read(name, start, part.shape))
        if self.sharding is not None:
            self.sharding.forget()
        for leaf in (*self.model.parameters(), *(b for _, b in self.model.named_buffers())):
            leaf.mark_changed()

    def hashes(self) -> dict[str, str]:
        """``parameters_sha256`` and ``buffers_sha256``, as run.json has them: of this rank's copy, and only where no rank has a
        whole one it communicates. Arrays that are cut themselves are put together one at a time.
        """
        buffers = ((f"buffers/{name}", buffer, buffer.array, None) for name, buffer in self.model.named_buffers())
        return {"parameters_sha256": self._sha256(self._parameters(), "parameters/"),
                "buffers_sha256": self._sha256(buffers, "buffers/")}

    def _sha256(self, leaves: Iterable[tuple[str, Described, Array, int | None]], prefix: str) -> str:
        held = {name.removeprefix(prefix): (leaf, array, first) for name, leaf, array, first in leaves
                if not getattr(leaf, "twin_of", "")}
        mesh, control = self.mesh, self.control
        if mesh is None or control is None or not self.is_cut:
            return total_sha256(array_line(name, asnumpy(array)) for name, (_, array, _) in held.items())
        own = {name: found for name, found in held.items()
               if is_first(found[0], mesh, without=("pp",) if found[2] is None else ("pp", *COPIES))}
        is_whole = {name: first is None and leaf.shape == leaf.global_shape for name, (leaf, _, first) in own.items()}
        lines = [array_line(name, asnumpy(own[name][1])) for name in own if is_whole[name]]
        everyone = control.gather_objects([lines, sorted(name for name in own if not is_whole[name])])
        lines = [line for lines, _ in everyone for line in lines]
        lines += [array_line(name, self._put_together(name, own.get(name), prefix, control))
                  for name in sorted({name for _, names in everyone for name in names})]
        return total_sha256(lines)

    def _put_together(self, name: str, own: tuple[Described, Array, int | None] | None, prefix: str,
                      control: Channel) -> np.ndarray[Any, Any]:
        """A cut array as a whole, on every rank: bytes are added where all others have zeros."""
        storage: Any = self.model.storage
        whole = np.zeros(self._shapes[prefix + name], storage.dtype)
        if own is not None:
            leaf, array, first = own
            for part, start in boxes(leaf, asnumpy(array), first):
                whole[tuple(slice(a, a + n) for a, n in zip(start, part.shape))] = part
        control.allreduce(whole.reshape(-1).view(np.int32), name=f"the bytes of {name}")
        return whole


def boxes(leaf: Described, array: Array, first: int | None) -> Iterable[tuple[Array, tuple[int, ...]]]:
    """(view, where it begins in the whole) of each box that a leaf's array, or a flat part of it from `first` on, consists of."""
    return [(array[own], start) for own, start in leaf.boxes()] if first is None else leaf.pieces(array, first)


def whole_shapes(model: Module) -> dict[str, tuple[int, ...]]:
    """The arrays that a model has in a checkpoint, with their shapes before they are cut."""
    shapes = {f"parameters/{leaf.twin_of or name}": leaf.global_shape for name, leaf in model.named_parameters()}
    return shapes | {f"buffers/{name}": leaf.global_shape for name, leaf in model.named_buffers()}
