"""Bytes of a rank's arrays, by formula."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from mpitrain.config.sections import STATES
from mpitrain.schedules.microtree import Counter, joins, nodes_of, share, width


class Bytes(NamedTuple):
    """Bytes of the arrays of one rank."""

    parameters: int
    gradients: int
    optimizer: int


class Use(NamedTuple):
    """Bytes of one rank by use; None where unknown. `copies` are of the weights, which [average] and shrink.rewind keep;
    `residuals` are what compressed gradients leave out, `levels` what sites keep to meet others ([[sync]])."""

    parameters: int
    gradients: int
    optimizer: int
    offloaded: int
    activations: int | None
    pool: int | None
    copies: int = 0
    residuals: int = 0
    levels: int = 0


class Forecast(NamedTuple):
    """The bytes of a rank of each stage, and `why` some are unknown; what a row of a micro-batch keeps for backward."""

    stages: list[Use]
    why: str = ""
    kept_for_a_row: int | None = None


def sums_at_once(n_micro: int, n_places: int, *, tree: bool) -> int:
    """How many sums of micro-batches' gradients a rank keeps at most: see `parallel.gradients.reducer`."""
    found = 1
    for place_of_dp in range(n_places):
        first, stop = share(place_of_dp, n_places, n_micro)
        sums = Counter(partial(joins, n_micro=n_micro)) if tree else Counter()
        for leaf in range(first, stop):
            found = max(found, len(sums.nodes) + 1)
            sums.push(leaf, lambda lower: None)
        if tree:
            found = max(found, len(nodes_of(n_micro, n_places)[place_of_dp]))
    joined = width(n_micro, n_places) if tree and n_places > 1 else 1
    return found + (joined if joined > 1 else 0)


def predicted(size: int, kind: str, n: int, *, itemsize: int = 4, state: int | None = None, per_node: int = 1,
              copy: int = 0) -> Bytes:
    """The formula: bytes of a rank for `size` elements on `n` ranks, and `state` elements of optimizer state (default: Adam's).

    Where `per_node` ranks share one copy, that is a rank's share of it. `copy` is the bytes of an element of a copy of whole
    parameters that operations read: 2 of one in 16 bits.
    """
    cut = STATES.index(kind)
    gradients, optimizer, parameters = (n if cut >= least else 1 for least in (2, 1, 3))
    parts = (max(parameters, per_node), gradients, max(optimizer, per_node))
    sizes = (size, size, 2 * size if state is None else state)
    found = Bytes(*(-(-length * itemsize // part) for length, part in zip(sizes, parts)))
    return found if kind == "parameters" else found._replace(parameters=found.parameters + copy * size)


def memory_text(everyone: Sequence[Sequence[int]], kind: str, *, per_node: bool = False) -> str:
    """One line: parameters, gradients and optimizer state of the rank that keeps most; with one copy `per_node`, its
    share of that."""
    largest = max(everyone, key=sum)
    parts = ", ".join(f"{name} {n / 2**20:,.2f} MiB" for name, n in zip(("parameters", "gradients", "optimizer"), largest))
    return f'comm.sharding = "{kind}"{", one copy per node" if per_node else ""}: a rank keeps {parts}'
