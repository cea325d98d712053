"""Everything a resumed run needs, as named arrays: what goes into a checkpoint and comes back out of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module, asnumpy
from mpitrain.data import Transforms
from mpitrain.errors import NumericsError
from mpitrain.nn import Module
from mpitrain.optim import Optimizer
from mpitrain.parallel.diagnose import is_finite
from mpitrain.train.checkpoint import Piece
from mpitrain.train.hashes import parameters_sha256
from mpitrain.train.manifest import Checkpoint


class State:
    """Views of the model's parameters and buffers, the optimizer's state and the data's statistics, by name.

    Names are ``parameters/<name>``, ``buffers/<name>``, ``optimizer/<kind>/<name>`` and ``data/<transform>``: nothing in
    them depends on ranks, so a checkpoint of one layout is read by any other.
    """

    def __init__(self, model: Module, optimizer: Optimizer | None = None, transforms: Transforms | None = None):
        self.model, self.optimizer, self.transforms = model, optimizer, transforms

    def arrays(self) -> dict[str, Array]:
        """The training state proper, in place: what is written here is what the next step uses."""
        found: dict[str, Array] = {f"parameters/{name}": p.array for name, p in self.model.named_parameters()}
        found |= {f"buffers/{name}": b.array for name, b in self.model.named_buffers()}
        if self.optimizer is not None:
            found |= {f"optimizer/{name}": array for name, array in self.optimizer.state_dict().items()}
        return found

    def pieces(self) -> list[Piece]:
        """All of it as whole arrays on the host, for the one rank that writes."""
        found = {name: asnumpy(array) for name, array in self.arrays().items()}
        if self.transforms is not None:
            found |= {f"data/{name}": np.asarray(array) for name, array in self.transforms.state_dict().items()}
        return [Piece.whole(name, array) for name, array in found.items()]

    def refuse_nonfinite(self, step: int) -> None:
        """Raises NumericsError where a parameter is NaN or Inf: a run cannot go on from such a checkpoint."""
        for name, parameter in self.model.named_parameters():
            if not is_finite(parameter.array):
                raise NumericsError(f'the parameter "{name}" is not finite, so no checkpoint was written and the last one '
                                    "stands; resume from it with a smaller optimizer.lr, or optimizer.clip_norm", step=step)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Copies a checkpoint's values in. Raises CheckpointError, before anything is touched, where names or shapes differ."""
        own = self.arrays()
        for prefix in ("parameters/", "buffers/") + (("optimizer/",) if self.optimizer is not None else ()):
            checkpoint.check_names({name: (a.shape, np.dtype(str(a.dtype))) for name, a in own.items()
                                    if name.startswith(prefix)}, prefix)
        if self.transforms is not None:
            stored = [name for name in checkpoint.names if name.startswith("data/")]
            self.transforms.load_state_dict({name.removeprefix("data/"): checkpoint.read(name) for name in stored})
        if self.optimizer is not None:
            self.optimizer.load_state_dict({name: checkpoint.read(f"optimizer/{name}") for name in self.optimizer.state_dict()})
        self._write({name: a for name, a in own.items() if not name.startswith("optimizer/")}, checkpoint)

    def load_parameters(self, checkpoint: Checkpoint) -> None:
        """The values of the parameters and buffers alone, to start another run from."""
        own = {name: a for name, a in self.arrays().items() if not name.startswith("optimizer/")}
        for prefix in ("parameters/", "buffers/"):
            checkpoint.check_names({name: (a.shape, np.dtype(str(a.dtype))) for name, a in own.items()
                                    if name.startswith(prefix)}, prefix)
        self._write(own, checkpoint)

    def _write(self, own: Mapping[str, Array], checkpoint: Checkpoint) -> None:
        for name, array in own.items():
            array[...] = array_module(array).asarray(checkpoint.read(name))
        for leaf in (*self.model.parameters(), *(b for _, b in self.model.named_buffers())):
            leaf.mark_changed()

    def hashes(self) -> dict[str, str]:
        """``parameters_sha256`` and ``buffers_sha256``, as run.json has them."""
        def named(leaves: Any) -> dict[str, Any]:
            return {name: asnumpy(leaf.array) for name, leaf in leaves}
        return {"parameters_sha256": parameters_sha256(named(self.model.named_parameters())),
                "buffers_sha256": parameters_sha256(named(self.model.named_buffers()))}
