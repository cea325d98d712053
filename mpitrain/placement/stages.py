"""Stages: a Sequential cut along pp into groups of blocks, each stage of one chunk or several.

    blocks    embed  block0 | block1  block2 | block3  block4 | norm  head         4 chunks on 2 stages
    stage           0       |        1       |        0       |     1              chunk c of stage s: virtual stage c * 2 + s
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from mpitrain.errors import ConfigError, MeshError
from mpitrain.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d, Module, Sequential, SyncBatchNorm

NORMS = BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm


@dataclass
class Stage:
    """The part of the model `whole` on one rank: `chunks` to run, and `model`, which has the parameters of all of them."""

    whole: Module
    model: Module
    chunks: list[Module]
    index: int
    n_stages: int
    bounds: list[int]                        # Virtual stage v is blocks bounds[v]:bounds[v + 1].

    @property
    def is_last(self) -> bool:
        """Whether the last block of the model is here."""
        return self.index == self.n_stages - 1

    @property
    def n_virtual(self) -> int:
        return self.n_stages * len(self.chunks)

    def virtual(self, chunk: int) -> int:
        return chunk * self.n_stages + self.index

    @property
    def sizes(self) -> list[int]:
        """How many parameters each chunk has."""
        return [len(chunk.parameters()) for chunk in self.chunks]

    @property
    def places(self) -> dict[str, int]:
        """The number of the block that each parameter belongs to, in the whole model."""
        blocks = self.whole.blocks.items() if isinstance(self.whole, Sequential) else [("", self.whole)]
        return {f"{block}.{name}" if block else name: i for i, (block, module) in enumerate(blocks)
                for name, _ in module.named_parameters()}

    def describe(self, virtual: int) -> str:
        """A virtual stage in words, for messages."""
        if not isinstance(self.whole, Sequential):
            return "the model"
        names = list(self.whole.blocks)[self.bounds[virtual]:self.bounds[virtual + 1]]
        chunk = f", chunk {virtual // self.n_stages}" if len(self.chunks) > 1 else ""
        return f"stage {virtual % self.n_stages}{chunk} ({names[0]}{f' .. {names[-1]}' if len(names) > 1 else ''})"


def whole(model: Module) -> Stage:
    """The model of a rank that holds all of it."""
    return Stage(model, model, [model], 0, 1, [0, len(model) if isinstance(model, Sequential) else 1])


def cut(model: Module, index: int, n_stages: int, chunks: int = 1, *, counts: Sequence[int] = ()) -> Stage:
    """Stage `index` of `n_stages`. `counts` are the numbers of blocks of the virtual stages, in order (default: about equal).

    Parameters that stages share must have twins by now. MeshError where the model has too few blocks, ConfigError for counts
    that do not add up.
    """
    if n_stages * chunks == 1:
        return whole(model)
    if not isinstance(model, Sequential):
        raise MeshError(f"mesh.pp={n_stages} cuts a model between its blocks, and this one is a {type(model).__name__}; "
                        "return an nn.Sequential of blocks, or set mesh.pp=1")
    bounds = find_bounds(len(model), n_stages, chunks, counts)
    parts = [model.slice(bounds[v], bounds[v + 1]) for v in range(index, n_stages * chunks, n_stages)]
    joined = parts[0] if chunks == 1 else Sequential(*(item for part in parts for item in part.blocks.items()))
    return Stage(model, joined, list(parts), index, n_stages, bounds)


def find_bounds(n_blocks: int, n_stages: int, chunks: int, counts: Sequence[int]) -> list[int]:
    """The ends of the virtual stages, in blocks."""
    parts = n_stages * chunks
    words = f"mesh.pp={n_stages}" + (f" x mesh.chunks={chunks}" if chunks > 1 else "")
    if parts > n_blocks:
        fits = f"set mesh.pp={n_blocks // chunks}" if n_blocks >= 2 * chunks else f"set mesh.chunks={n_blocks // n_stages or 1}"
        raise MeshError(f"{words} needs {parts} blocks at least, and the model has {n_blocks}; {fits}, or use a deeper model")
    if not counts:
        return [v * n_blocks // parts for v in range(parts + 1)]
    if len(counts) != parts or sum(counts) != n_blocks or min(counts) < 1:
        raise ConfigError(f"mesh.stages = {list(counts)} must be {parts} numbers of blocks, 1 or more each, that add up to the "
                          f"{n_blocks} blocks of the model, for {words}")
    return [0, *accumulate(counts)]


def with_norms(counts: Sequence[int], n_stages: int, chunks: int, model: Sequential) -> list[int]:
    """The numbers of blocks of the virtual stages, changed so that none begins with a batch norm: it is folded into the layer
    before it. One that is alone in its stage stays there."""
    bounds, blocks = find_bounds(len(model), n_stages, chunks, counts), list(model.blocks.values())
    for v in range(1, len(bounds) - 1):
        if isinstance(blocks[bounds[v]], NORMS) and bounds[v] + 1 < bounds[v + 1]:
            bounds[v] += 1
    return [stop - start for start, stop in pairwise(bounds)]


def balanced(costs: Sequence[float], parts: int) -> list[int]:
    """The numbers of neighbouring blocks of `parts` parts, one or more each, so that the dearest part costs least.

    Linear partition by dynamic programming; of equal answers the one with the longest parts first.
    """
    n = len(costs)
    sums = list(accumulate(costs, initial=0.0))
    best = [[float("inf")] * (n + 1) for _ in range(parts + 1)]
    came = [[0] * (n + 1) for _ in range(parts + 1)]
    best[0][0] = 0.0
    for k in range(1, parts + 1):
        for stop in range(k, n + 1):
            for start in range(k - 1, stop):
                dearest = max(best[k - 1][start], sums[stop] - sums[start])
                if dearest <= best[k][stop]:
                    best[k][stop], came[k][stop] = dearest, start
    counts: list[int] = []
    stop = n
    for k in range(parts, 0, -1):
        counts.append(stop - came[k][stop])
        stop = came[k][stop]
    return counts[::-1]
