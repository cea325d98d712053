"""The ends of buckets that allow states to be cut over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from mpitrain.nn import FlatLayout, FlatStorage, Module, Parameter, Sequential, init, plan_segments
from mpitrain.optim import Optimizer
from mpitrain.placement.shards import finer
from mpitrain.placement.stages import Stage


def where_to_cut(stage: Stage, layout: FlatLayout, *, blocks: bool) -> list[int]:
    """Numbers of parameters that buckets may not join: those of chunks, of `blocks`, and each tied parameter.

    Tied parameters lie in buckets of their own, so that they are cut at the same elements on every stage.
    """
    shared = shared_keys(stage)
    ends = block_ends(stage.chunks) if blocks else []
    for i, segment in enumerate(layout.segments):
        if segment.parameter.key in shared:
            ends += [i, i + 1]
    return finer(stage.sizes, ends)


def shared_keys(stage: Stage) -> set[str]:
    """The keys of tied parameters, on whatever stage."""
    return {p.twin_of for p in stage.whole.parameters() if p.twin_of}


def needs_whole_parameters(optimizer: Callable[[Any], Optimizer]) -> bool:
    """Whether the optimizer cannot update parts of a parameter."""
    return optimizer(probe()).whole_parameters


def probe() -> FlatStorage:
    """A storage of one number, for which an optimizer can be made to ask about its kind."""
    parameter = Parameter((1,), init.zeros)
    parameter.name = "probe"
    return FlatStorage([parameter])


def blocks_of(chunk: Module) -> Iterator[Module]:
    """The blocks of a Sequential, else the module itself."""
    return iter(chunk) if isinstance(chunk, Sequential) else iter([chunk])


def block_ends(chunks: Sequence[Module]) -> list[int]:
    """The number of parameters, in the model's order, up to the end of each block: buckets must end there."""
    seen: set[int] = set()
    ends = []
    for chunk in chunks:
        for block in blocks_of(chunk):
            seen |= {id(p) for p in block.parameters()}
            ends.append(len(seen))
    return ends


def largest_neighbours(stage: Stage) -> int:
    """The elements of the largest two neighbouring blocks of a stage."""
    largest = 0
    for chunk in stage.chunks:
        blocks = [plan_segments(block.parameters())[1] for block in blocks_of(chunk)]
        largest = max([largest, *blocks, *(a + b for a, b in pairwise(blocks))])
    return largest
