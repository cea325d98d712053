"""Which positions of a sequence each of n ranks has, so that causal attention is as much work for all of them.

    2n chunks; rank r has chunks r and 2n - 1 - r:      n = 3      chunk  0  1  2  3  4  5
                                                                   rank   0  1  2  2  1  0

A query in chunk i looks at chunks 0 ... i, so the chunks of a rank look at 2n + 1 chunks together, whichever rank that is.
(Brandon et al.: "Striped Attention", 2023, deals out positions in turn, for the same reason.)
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.errors import MeshError

LENGTH = 1                                                    # the dim of samples (B, L, ...) that is cut


def chunks(rank: int, n: int) -> tuple[int, int]:
    """The numbers of a rank's two chunks, in the order of their positions."""
    return rank, 2 * n - 1 - rank


def positions(length: int, rank: int, n: int) -> Array:
    """The places in their sample of a rank's `length` positions."""
    size = length // 2
    return np.concatenate([np.arange(chunk * size, (chunk + 1) * size) for chunk in chunks(rank, n)])


def part(x: Array, rank: int, n: int) -> Array:
    """A rank's positions of x (B, L, ...), as a copy."""
    size = x.shape[LENGTH] // (2 * n)
    joined: Array = array_module(x).concatenate([x[:, chunk * size:(chunk + 1) * size] for chunk in chunks(rank, n)], axis=LENGTH)
    return joined


def tiles(rank: int, source: int, n: int, causal: bool) -> Iterator[tuple[int, int, bool]]:
    """(chunk of `rank`'s queries, chunk of `source`'s keys, whether they are the same one and attention is causal), each chunk as
    0 or 1, for every two of which some query sees some key."""
    for i, query in enumerate(chunks(rank, n)):
        for j, key in enumerate(chunks(source, n)):
            if not causal or key <= query:
                yield i, j, causal and key == query


def refuse_length(length: int, n: int) -> None:
    """MeshError where samples of `length` positions cannot be cut so, with the lengths and the n next to these that can."""
    if length % (2 * n) == 0 and length:
        return
    below, above = length // (2 * n) * 2 * n, -(-max(length, 1) // (2 * n)) * 2 * n
    fewer = next((m for m in range(n - 1, 1, -1) if length % (2 * m) == 0), 1)
    fitting = f"{below} or {above}" if below else str(above)
    raise MeshError(f"mesh.cp = {n} cuts the positions of samples into {2 * n} chunks, and theirs are {length}, no multiple of "
                    f"{2 * n}; the nearest that fits: {fitting} positions (model.block), or mesh.cp = {fewer}")
