"""Kinds of state: named arrays of a run, where they lie on this rank, and what a checkpoint has of them.

    Kept      arrays that lie as the model's parameters or buffers do: cut, in slices, or whole
    Values    small arrays that are equal on all ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.backend import Array, array_module, asnumpy
from mpitrain.checkpoint.manifest import Checkpoint
from mpitrain.checkpoint.parts import Piece
from mpitrain.comm.mesh import Mesh
from mpitrain.nn.parameter import Described, Parameter
from mpitrain.optim.layout import StateShape
from mpitrain.parallel.gradients.norm import is_first
from mpitrain.schedules.grid import COPIES

Shapes = Mapping[str, tuple[int, ...]]                        # the whole model's arrays, by their names in a checkpoint
Expected = dict[str, tuple[tuple[int, ...], Any]]             # name in a checkpoint -> (shape, dtype)


class Placed(NamedTuple):
    """An array placed as a leaf: as the leaf's local part or, flat, as that part's elements from `first` on."""

    leaf: Described
    array: Array
    first: int | None = None

    def boxes(self, array: Array) -> Iterable[tuple[Array, tuple[int, ...]]]:
        """(view, its start in the whole) of each box that `array`, this one or a copy, consists of."""
        if self.first is None:
            return [(array[(*own, ...)], start) for own, start in self.leaf.boxes()]    # `...`: a view of a number, too
        return self.leaf.pieces(array, self.first)

    def is_ours(self, mesh: Mesh | None) -> bool:
        """Whether this rank, of all that have the same data, is the one that writes it."""
        without = ("pp",) if self.first is None else ("pp", *COPIES)
        return mesh is None or is_first(self.leaf, mesh, without=without)

    @property
    def is_whole(self) -> bool:
        return self.first is None and self.leaf.shape == self.leaf.global_shape


class Kept:
    """A kind of state, ``<prefix>/<leaf>`` in a checkpoint: arrays that lie as the model's parameters do, or (`of`) its buffers.

    `placed()` gives this rank's arrays, and is asked anew each time. Values written into them are used by the next step.
    """

    exact = True                                              # a checkpoint with other names under the prefix is refused
    steady = True                                             # whether it has the same arrays after each step

    def __init__(self, prefix: str, placed: Callable[[], Iterable[Placed]], dtype: Any, *, of: str = "parameters",
                 among: Callable[[str], bool] | None = None, shape: StateShape | None = None,
                 others: Mapping[str, Any] | None = None):
        self.prefix, self.placed, self.dtype, self.of, self.among = prefix, placed, np.dtype(str(dtype)), f"{of}/", among
        self.shape: StateShape = shape or (lambda whole: whole)
        self.others = others or {}                            # dtypes of leaves, by name, that have others than `dtype`

    def expected(self, shapes: Shapes) -> Expected:
        """The names, shapes and dtypes that a checkpoint must have of this kind."""
        own = {name.removeprefix(self.of): shape for name, shape in shapes.items() if name.startswith(self.of)}
        return {f"{self.prefix}/{name}": (self.shape(shape), self.dtype_of(name)) for name, shape in own.items()
                if self.among is None or self.among(name)}

    def dtype_of(self, name: str) -> np.dtype[Any]:
        """The dtype of a leaf's array."""
        found: np.dtype[Any] = np.dtype(self.others.get(name, self.dtype))
        return found

    def name(self, leaf: Described) -> str:
        return f"{self.prefix}/{leaf.key}"

    def pieces(self, mesh: Mesh | None) -> Iterator[Piece]:
        """The pieces that this rank writes."""
        for one in self.placed():
            if one.is_ours(mesh):
                yield from self.boxes(one)

    def boxes(self, one: Placed) -> Iterator[Piece]:
        """The pieces of one of its arrays."""
        for view, start in one.boxes(asnumpy(one.array)):
            yield Piece(self.name(one.leaf), view, one.leaf.global_shape, start)

    def read(self, checkpoint: Checkpoint) -> None:
        for one in self.placed():
            for part, start in one.boxes(one.array):
                part[...] = array_module(one.array).asarray(checkpoint.read(self.name(one.leaf), start, part.shape))


class Values:
    """A kind of state that is equal on all ranks: `get()` gives small arrays by name, `put` takes the stored ones.

    Unless it is `exact`, a checkpoint may have other names than `get` gives. `said` are lines for the run to tell, about what the
    last one that was read did not have.
    """

    steady = True
    said: Sequence[str] = ()

    def __init__(self, prefix: str, get: Callable[[], dict[str, Any]], put: Callable[[dict[str, Any]], None], *,
                 exact: bool = True):
        self.prefix, self.get, self.put, self.exact = prefix, get, put, exact

    def expected(self, shapes: Shapes) -> Expected:
        return {f"{self.prefix}/{name}": (np.shape(value), np.asarray(value).dtype) for name, value in self.get().items()}

    def placed(self) -> Sequence[Placed]:
        """No array of this kind is placed as a leaf."""
        return ()

    def pieces(self, mesh: Mesh | None) -> Iterator[Piece]:
        if mesh is None or mesh.rank == 0:
            yield from (Piece.whole(f"{self.prefix}/{name}", np.asarray(value)) for name, value in self.get().items())

    def read(self, checkpoint: Checkpoint) -> None:
        start = f"{self.prefix}/"
        names = self.expected({}) if self.exact else [name for name in checkpoint.arrays if name.startswith(start)]
        self.put({name.removeprefix(start): checkpoint.read(name) for name in names})


def in_flat(prefix: str, storage: Any, flat: Array, sliced: bool, among: Callable[[str], bool] | None = None,
            shape: StateShape | None = None) -> Kept:
    """The kind for `flat`, an array in the layout of `storage` with each parameter's part; `sliced`: slices of parts. `shape`:
    parts of other shapes than the parameters', which are whole."""
    def leaf(parameter: Any) -> Any:
        if shape is None:
            return parameter
        stand_in = Parameter(shape(parameter.shape), parameter.init)
        stand_in.name, stand_in.twin_of = parameter.name, parameter.twin_of
        return stand_in
    return Kept(prefix, lambda: (Placed(leaf(s.parameter), view, s.first if sliced else None)
                                 for s, view in zip(storage.segments, storage.views(flat))), flat.dtype, among=among, shape=shape)
