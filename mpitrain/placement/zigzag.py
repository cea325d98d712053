"""The positions of a sequence on each of n ranks, chosen so that causal attention is equal work for all of them.

    2n chunks; rank r has chunks r and 2n - 1 - r:      n = 3      chunk  0  1  2  3  4  5
                                                                   rank   0  1  2  2  1  0

A query in chunk i looks at chunks 0 ... i, so the chunks of a rank look at 2n + 1 chunks together, whichever rank that is.
(Brandon et al.: "Striped Attention", 2023, deals out positions in turn, for the same reason.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.errors import ConfigError, MeshError
from mpitrain.nn import Module, mixtures
from mpitrain.nn.module import declared
from mpitrain.schedules.grid import Grid

LENGTH = 1                                                    # Samples (B, L, ...) are cut along this dim.


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
    """(chunk of `rank`'s queries, chunk of `source`'s keys, whether both are one chunk of causal attention) wherever some query
    sees some key; chunks are numbered 0 and 1 on their rank."""
    for i, query in enumerate(chunks(rank, n)):
        for j, key in enumerate(chunks(source, n)):
            if not causal or key <= query:
                yield i, j, causal and key == query


def refuse_length(length: int, n: int) -> None:
    """MeshError where samples of `length` positions cannot be cut so; it names the nearest lengths and n that can."""
    if length % (2 * n) == 0 and length:
        return
    below, above = length // (2 * n) * 2 * n, -(-max(length, 1) // (2 * n)) * 2 * n
    fewer = next((m for m in range(n - 1, 1, -1) if length % (2 * m) == 0), 1)
    fitting = f"{below} or {above}" if below else str(above)
    raise MeshError(f"mesh.cp = {n} cuts the positions of samples into {2 * n} chunks, and theirs are {length}, no multiple of "
                    f"{2 * n}; the nearest that fits: {fitting} positions (model.block), or mesh.cp = {fewer}")


def cut_positions(model: Module, grid: Grid, further: Collection[Module] = ()) -> None:
    """Sets the positions of every module; modules of `further` have only a part along tp of this rank's positions.

    ConfigError where a layer may look at several positions at once in another way than attention.
    """
    rank, n = grid.coordinate("cp"), grid.size("cp")
    refuse_model(model, n)

    @cache
    def spread(length: int) -> Array:
        return positions(length, rank, n)

    @cache
    def spread_further(length: int) -> Array:
        return spread(length * grid.size("tp"))[length * grid.coordinate("tp"):][:length]

    for _, module in model.named_modules():
        module.spread = spread_further if any(module is other for other in further) else spread


def refuse_samples(x: Array, y: Array, n: int) -> None:
    """MeshError where samples have no positions that can be cut."""
    if min(x.ndim, y.ndim) <= LENGTH or x.shape[LENGTH] != y.shape[LENGTH]:
        raise MeshError(f"mesh.cp = {n} cuts inputs and targets along their positions (dim 1), and a sample here is "
                        f"{x.shape[1:]} with a target {y.shape[1:]}, not as many positions in both; set mesh.cp = 1")
    refuse_length(x.shape[LENGTH], n)


def refuse_model(model: Module, n: int) -> None:
    """ConfigError naming the first layer that may look at several positions at once in another way than attention."""
    for path, _ in mixtures(model):
        raise ConfigError(f'mesh.cp = {n} cuts samples, and experts ("{path}") choose among whole ones; set mesh.cp = 1')
    for path, module in model.named_modules():
        if not declared(module, "by_position"):
            raise ConfigError(f'mesh.cp = {n} cuts samples along their positions, and "{path or "the model"}" '
                              f"({type(module).__name__}) may look at several of them; set mesh.cp = 1, or, where only "
                              "MultiHeadAttention in it does, by_position = True in its class")
