"""The ranks of a run as a grid of named axes, and where one rank is in it; pure arithmetic, without MPI."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mpitrain.errors import MeshError

AXES = ("site", "pp", "dp", "ep", "cp", "tp")
ALWAYS_NAMED = ("pp", "dp", "tp")          # A mesh names these axes also where they have one place.
DATA = ("site", "dp", "ep")                # Ranks along these axes have different samples.
REPLICAS = ("dp", "ep", "cp")              # Ranks along these axes replicate a part of the model (but for experts, along ep).
                                           # They add up gradients in each step; sites, with models of their own, meet seldom.
COPIES = ("dp", "cp")                      # Ranks along these axes replicate experts too.


class Grid:
    """The lengths of the axes (1 where nothing is said) and the coordinates of one rank (by default the first one's).

    Sites are outermost, each of consecutive ranks, then pipeline (pp), data (dp), experts (ep), context (cp), and tensor (tp)
    innermost: tp neighbours have neighbouring ranks, hence share a node.

        pp=2 x dp=2 x tp=2      dp  tp 0  1          ranks 1 and 3 differ along dp only,
                        pp=0    0      0  1          ranks 0 to 3 along dp and tp
                                1      2  3
                        pp=1    0      4  5
                                1      6  7
    """

    axes = AXES

    def __init__(self, lengths: Mapping[str, int], coordinates: Mapping[str, int] | None = None):
        self.lengths = {axis: lengths.get(axis, 1) for axis in AXES}
        self.coordinates = {axis: (coordinates or {}).get(axis, 0) for axis in AXES}

    def __str__(self) -> str:
        return describe(self.lengths)

    def coordinate(self, axis: str) -> int:
        """This rank's place along an axis."""
        return self.coordinates[axis]

    def size(self, axis: str) -> int:
        """How many places an axis has."""
        return self.lengths[axis]

    def count(self, axes: Sequence[str]) -> int:
        """How many ranks differ from this one along `axes` only, this one included."""
        return math.prod(self.lengths[axis] for axis in axes)

    def number(self, axes: Sequence[str]) -> int:
        """This rank's number among those."""
        number = 0
        for axis in axes:
            number = number * self.lengths[axis] + self.coordinates[axis]
        return number

    @property
    def rank(self) -> int:
        """This rank's number among all."""
        return self.number(AXES)

    @property
    def cuts_model(self) -> bool:
        """Whether a rank has a part of the model only."""
        return self.count(("pp", "ep", "tp")) > 1

    @property
    def shares_layers(self) -> bool:
        """Whether a layer, its positions or its experts lie on several ranks."""
        return self.count(("ep", "cp", "tp")) > 1

    @property
    def n_sites(self) -> int:
        """How many copies of the whole model train apart between their meetings."""
        return self.lengths["site"]

    @property
    def n_places(self) -> int:
        """How many ranks, or groups of ranks that hold one model together, have samples of their own."""
        return self.count(DATA)

    @property
    def place(self) -> int:
        """This rank's number among those."""
        return self.number(DATA)


def fit(n: int, **lengths: int) -> dict[str, int]:
    """The length of every axis, 1 where nothing is said, with dp=0 (the default) filled in, for `n` ranks; MeshError when they
    do not fit."""
    assert set(lengths) <= set(AXES), f"axes of the mesh are {AXES}, not {(*lengths,)}"
    found = {axis: lengths.get(axis, 0 if axis == "dp" else 1) for axis in AXES}
    for axis, value in found.items():
        if value < (axis != "dp"):
            zero = " (0: what the others leave)" if axis == "dp" else ""
            raise MeshError(f"mesh.{axis}={value} must be at least {int(axis != 'dp')}{zero}")
    others = math.prod(value for axis, value in found.items() if axis != "dp")
    if found["dp"] == 0:
        if n % others:
            cut = [f"mesh.{axis}" for axis in AXES if axis != "dp" and (axis in ALWAYS_NAMED or found[axis] > 1)]
            raise MeshError(f"mesh {describe(found, 'dp')} needs a multiple of {others} ranks, found {n}; "
                            f"run with -n {n - n % others + others}, or change {' or '.join(cut)}")
        found["dp"] = n // others
    if found["dp"] * others != n:
        other = f"set mesh.dp={n // others} or " if n % others == 0 else ""
        raise MeshError(f"mesh {describe(found)} needs {found['dp'] * others} ranks, found {n}; "
                        f"{other}run with -n {found['dp'] * others}")
    return found


def describe(lengths: Mapping[str, int], but: str = "") -> str:
    """``pp=2 x dp=2 x tp=1``: axes that are seldom used only where they have more than one place, and `but` nowhere."""
    return " x ".join(f"{axis}={n}" for axis, n in lengths.items() if (axis in ALWAYS_NAMED or n > 1) and axis != but)
