"""Expert parallelism: each rank along axis ep has some experts of every mixture, and rows travel to them and back.

    rank 0   its rows, at places of experts 0 1 2 3   --\\    all-to-all    /--   experts 0 1: places of rank 0, places of rank 1
    rank 1   its rows, at places of experts 0 1 2 3   --/                  \\--   experts 2 3: places of rank 0, places of rank 1

A rank settles which experts its rows choose, and which rows find a place, before they travel, as if it had all experts. So only
rounding depends on the number of ranks. An expert has as many places for each rank as the rank with most rows needs; the others
send zeros. Lepikhin et al.: "GShard", 2020.
"""

from __future__ import annotations

import numpy as np

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array, array_module
from mpitrain.comm.messages.channel import Channel
from mpitrain.nn.across import Across, Experts
from mpitrain.schedules.collectives import ALL_TO_ALL


class Dispatcher(Across):
    """The all-to-all of the ranks that share one mixture's experts. Collective: all of them call it alike, in the same order."""

    absent = "an expert of another rank (mesh.ep)"

    def __init__(self, channel: Channel, path: str):
        self.channel, self.path, self.rank, self.size = channel, path, channel.rank, channel.size
        self._places = np.zeros(self.size, np.int64)
        self._add = channel.prepare(self._places, f"places of {path}")

    def alone(self) -> Across:
        return LoneDispatcher(self.rank, self.size)

    def exchange(self, there: Tensor, experts: Experts) -> Tensor:
        """The outputs of all ranks' experts for the rows at their places, both (E, C, D)."""
        own = there.shape[1]
        most = self.most(own)
        return Return.apply(experts(Send.apply(there, ranks=self, most=most)), ranks=self, own=own)

    def most(self, places: int) -> int:
        """The largest of the ranks' numbers of places."""
        self._places[:] = 0
        self._places[self.rank] = places
        self._add.run()
        return int(self._places.max())

    def send(self, array: Array, most: int, what: str) -> Array:
        """(E, C, D) of this rank's rows to (experts here, ranks * most, D) of all ranks'."""
        xp, (experts, own, width) = array_module(array), array.shape
        parts = xp.empty((self.size, experts // self.size, most, width), array.dtype)
        parts[:, :, :own] = array.reshape(self.size, -1, own, width)
        parts[:, :, own:] = 0
        self._exchange(parts, what)
        return xp.ascontiguousarray(parts.swapaxes(0, 1)).reshape(-1, self.size * most, width)

    def bring_back(self, array: Array, own: int, what: str) -> Array:
        """The inverse: (experts here, ranks * most, D) to (E, `own`, D)."""
        xp, here, width = array_module(array), len(array), array.shape[2]
        parts = xp.ascontiguousarray(array.reshape(here, self.size, -1, width).swapaxes(0, 1))
        self._exchange(parts, what)
        return xp.ascontiguousarray(parts[:, :, :own]).reshape(-1, own, width)

    def _exchange(self, parts: Array, what: str) -> None:
        self.channel.all_to_all(parts.reshape(-1), ALL_TO_ALL["direct"], name=f"{what} {self.path}")


class LoneDispatcher(Dispatcher):
    """A dispatcher whose other ranks send zeros."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def most(self, places: int) -> int:
        return places

    def _exchange(self, parts: Array, what: str) -> None:
        parts[:self.rank] = 0
        parts[self.rank + 1:] = 0


class Send(Function):
    """Rows to the ranks that have their experts; the gradients come back the same way."""

    @staticmethod
    def forward(ctx: Context, x: Array, *, ranks: Dispatcher, most: int) -> Array:
        ctx.ranks, ctx.own = ranks, x.shape[1]
        return ranks.send(x, most, "rows to")

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        return ctx.ranks.bring_back(grad, ctx.own, "gradients of rows to")


class Return(Function):
    """Rows back to the ranks that they belong to; their gradients go to the experts."""

    @staticmethod
    def forward(ctx: Context, x: Array, *, ranks: Dispatcher, own: int) -> Array:
        ctx.ranks, ctx.most = ranks, x.shape[1] // ranks.size
        return ranks.bring_back(x, own, "rows from")

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        return ctx.ranks.send(grad, ctx.most, "gradients of rows from")
