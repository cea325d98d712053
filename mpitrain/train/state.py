"""Everything a resumed run needs, as named arrays: what goes into a checkpoint and comes back out of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module, asnumpy
from mpitrain.comm.channel import Channel
from mpitrain.comm.mesh import Mesh
from mpitrain.data import Transforms
from mpitrain.errors import NumericsError
from mpitrain.nn import Module
from mpitrain.nn.parameter import Described
from mpitrain.optim import Optimizer
from mpitrain.parallel.diagnose import is_finite
from mpitrain.parallel.norm import is_first
from mpitrain.train.checkpoint import Piece
from mpitrain.train.hashes import array_line, total_sha256
from mpitrain.train.manifest import Checkpoint

STEPS = "optimizer/steps"


class State:
    """Views of the model's parameters and buffers, the optimizer's state and the data's statistics, by name.

    Names are ``parameters/<name>``, ``buffers/<name>``, ``optimizer/<kind>/<name>`` and ``data/<transform>``: nothing in
    them depends on ranks, so a checkpoint of one layout is read by any other. `model` is what this rank holds of `whole`
    (default: all of it); `mesh` says what others hold, and `control` connects all ranks.
    """

    def __init__(self, model: Module, optimizer: Optimizer | None = None, transforms: Transforms | None = None, *,
                 whole: Module | None = None, mesh: Mesh | None = None, control: Channel | None = None):
        self.model, self.optimizer, self.transforms = model, optimizer, transforms
        self.mesh, self.control = mesh, control
        self._shapes = whole_shapes(whole or model)

    def arrays(self) -> dict[str, Array]:
        """The training state proper, in place: what is written here is what the next step uses."""
        found: dict[str, Array] = {f"parameters/{name}": p.array for name, p in self.model.named_parameters()}
        found |= {f"buffers/{name}": b.array for name, b in self.model.named_buffers()}
        if self.optimizer is not None:
            found |= {f"optimizer/{name}": array for name, array in self.optimizer.state_dict().items()}
        return found

    def pieces(self) -> list[Piece]:
        """What this rank writes, on the host: of what several ranks have, the first one's."""
        found = []
        for stored, leaf, array in self._leaves():
            if self.mesh is None or is_first(leaf, self.mesh):
                host = asnumpy(array)
                found += [Piece(stored, host[own], leaf.global_shape, start) for own, start in leaf.boxes()]
        if self.mesh is None or self.mesh.rank == 0:
            whole = {f"data/{name}": np.asarray(a) for name, a in self.transforms.state_dict().items()} if self.transforms else {}
            if self.optimizer is not None:
                whole[STEPS] = np.array(self.optimizer.steps)
            found += [Piece.whole(name, array) for name, array in whole.items()]
        return found

    def _leaves(self, *, state: bool = True) -> Iterator[tuple[str, Described, Array]]:
        """(name in a checkpoint, leaf whose place it has, array) of all that is cut as the model is; twins repeat a name."""
        leaves = dict(self.model.named_parameters())
        for parameter in leaves.values():
            yield f"parameters/{parameter.key}", parameter, parameter.array
        for name, buffer in self.model.named_buffers():
            yield f"buffers/{name}", buffer, buffer.array
        if self.optimizer is not None and state:
            storage: Any = self.optimizer.storage
            for kind, flat in self.optimizer.state.items():
                for segment, view in zip(storage.segments, storage.views(flat)):
                    yield f"optimizer/{kind}/{segment.parameter.key}", segment.parameter, view

    def refuse_nonfinite(self, step: int) -> None:
        """Raises NumericsError where a parameter is NaN or Inf: a run cannot go on from such a checkpoint."""
        for name, parameter in self.model.named_parameters():
            if not is_finite(parameter.array):
                raise NumericsError(f'the parameter "{name}" is not finite, so no checkpoint was written and the last one '
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
        for name, leaf, array in self._leaves(state=state):
            for own, start in leaf.boxes():
                part = array[own]
                part[...] = array_module(array).asarray(checkpoint.read(name, start, part.shape))
        for leaf in (*self.model.parameters(), *(b for _, b in self.model.named_buffers())):
            leaf.mark_changed()

    def hashes(self) -> dict[str, str]:
        """``parameters_sha256`` and ``buffers_sha256``, as run.json has them. Of a model cut over ranks it communicates.

        Arrays that are cut themselves are put together one at a time.
        """
        return {"parameters_sha256": self._sha256(self.model.named_parameters(), "parameters/"),
                "buffers_sha256": self._sha256(self.model.named_buffers(), "buffers/")}

    def _sha256(self, leaves: Any, prefix: str) -> str:
        held: dict[str, Described] = {leaf.key: leaf for _, leaf in leaves if not getattr(leaf, "twin_of", "")}
        mesh, control = self.mesh, self.control
        if mesh is None or control is None:
            return total_sha256(array_line(name, asnumpy(leaf.array)) for name, leaf in held.items())
        own = {name: leaf for name, leaf in held.items() if is_first(leaf, mesh)}
        whole = [array_line(name, asnumpy(leaf.array)) for name, leaf in own.items() if leaf.shape == leaf.global_shape]
        everyone = control.gather_objects([whole, sorted(name for name, leaf in own.items() if leaf.shape != leaf.global_shape)])
        lines = [line for lines, _ in everyone for line in lines]
        lines += [array_line(name, self._put_together(name, own.get(name), prefix, control))
                  for name in sorted({name for _, names in everyone for name in names})]
        return total_sha256(lines)

    def _put_together(self, name: str, leaf: Described | None, prefix: str, control: Channel) -> np.ndarray[Any, Any]:
        """A cut array as a whole, on every rank: bytes are added where all others have zeros."""
        storage: Any = self.model.storage
        whole = np.zeros(self._shapes[prefix + name], storage.dtype)
        if leaf is not None:
            host = asnumpy(leaf.array)
            for own, start in leaf.boxes():
                part = host[own]
                whole[tuple(slice(a, a + n) for a, n in zip(start, part.shape))] = part
        control.allreduce(whole.reshape(-1).view(np.int32), name=f"the bytes of {name}")
        return whole


def whole_shapes(model: Module) -> dict[str, tuple[int, ...]]:
    """The arrays that a model has in a checkpoint, with their shapes before they are cut."""
    shapes = {f"parameters/{leaf.twin_of or name}": leaf.global_shape for name, leaf in model.named_parameters()}
    return shapes | {f"buffers/{name}": leaf.global_shape for name, leaf in model.named_buffers()}
