"""How much a channel matters: `Importance`s, functions of a group that give a number for each of its channels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from mpitrain import nn
from mpitrain.backend import Array
from mpitrain.comm.face import Objects
from mpitrain.errors import NumericsError, UsageError
from mpitrain.shrink.graph import Graph, Group

Importance: TypeAlias = Callable[[Group], Array]


def norms(model: nn.Module) -> Importance:
    """The L2 norm over all the parameters that go with a channel (Li et al. 2017; Fang et al. 2023)."""
    squares = {name: np.square(np.asarray(leaf.numpy(), np.float64)) for name, leaf in model.named_parameters()}
    if wrong := next((name for name, values in squares.items() if not np.isfinite(values).all()), ""):
        raise NumericsError(f'the parameter "{wrong}" has NaN or infinite values, which have no norm; take another checkpoint '
                            "(--step)")
    return lambda group: np.sqrt(by_channel(group, squares))


def by_channel(group: Group, values: Mapping[str, Array]) -> Array:
    """The sums of `values`, arrays of the parameters' shapes, over what goes with each channel; others are no part of them."""
    total = np.zeros(group.size)
    for (name, dim), places in group.members.items():
        if name in values:
            array = np.moveaxis(values[name], dim, 0)
            total += array.reshape(len(array), -1).sum(axis=1)[places].sum(axis=1)
    return total


def taylor(model: nn.Module, graph: Graph, loss: Callable[[int], Any], n_chunks: int, channel: Objects) -> Importance:
    """The sum of |w g| over all the parameters w that go with a channel, g the gradient of a chunk of rows: what the loss would
    change without them, to the first order (Molchanov et al. 2019).

    `loss(c)` is that of chunk c of `n_chunks`, a Tensor. Every rank has the whole model, computes the chunks c with c mod
    channel.size = channel.rank, and gets the same bits: each chunk's sums are one rank's, and they are added up in their order.
    Raises, on all ranks alike, UsageError without chunks, and NumericsError, which names a group, where one is not finite.
    """
    if not n_chunks:
        raise UsageError("there are no training rows to compute gradients of")
    mine = {chunk: _sensitivities(model, graph, loss(chunk)) for chunk in range(channel.rank, n_chunks, channel.size)}
    sent = {str(chunk): [[value.hex() for value in values.tolist()] for values in found] for chunk, found in mine.items()}
    everyone = {int(chunk): found for part in channel.gather_objects(sent) for chunk, found in part.items()}
    totals = [np.zeros(group.size) for group in graph.groups]
    for chunk in range(n_chunks):
        for total, values in zip(totals, everyone[chunk], strict=True):
            total += [float.fromhex(value) for value in values]
    for group, total in zip(graph.groups, totals, strict=True):
        if not np.isfinite(total).all():
            raise NumericsError(f'the gradients of "{group.name}" are not finite on the calibration rows; look at the data and '
                                "at train.loss, or take --importance l2")
    of = {id(group): total for group, total in zip(graph.groups, totals, strict=True)}
    return lambda group: of[id(group)]


def _sensitivities(model: nn.Module, graph: Graph, loss: Any) -> Sequence[Array]:
    model.zero_grad()
    loss.backward()
    found = {name: np.abs(np.asarray(p.numpy(), np.float64) * np.asarray(p.grad, np.float64))
             for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return [by_channel(group, found) for group in graph.groups]
