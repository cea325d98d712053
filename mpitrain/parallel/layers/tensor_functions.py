"""Functions that communicate between tensor-parallel ranks, in conjugate pairs: the backward of one is the forward of the other.

    function   forward          backward                      takes                     gives
    enter      nothing          all-reduce                    the same on all ranks     it, for use by a part of a layer on each
    leave      all-reduce       nothing                       an addend on each rank    the same on all ranks
    gather     all-gather       reduce-scatter                a part on each rank       it, for use by a part of a layer on each
    scatter    reduce-scatter   all-gather                    an addend on each rank    a part on each rank
    collect    all-gather       nothing: takes its own part   a part on each rank       the same on all ranks

Shoeybi et al.: "Megatron-LM", 2019 (enter and leave, there f and g); Korthikanti et al.: "Reducing activation recomputation in
large transformer models", 2022 (gather and scatter, which cut what lies between along the sequence).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from mpitrain.autograd import Context, Function
from mpitrain.backend import Array, array_module
from mpitrain.comm.face import AnyChannel
from mpitrain.comm.work import Collective
from mpitrain.errors import ShapeError
from mpitrain.schedules.collectives import ALL_GATHER, REDUCE_SCATTER

LEAST = 1 << 16                    # A room has this many bytes or more.
BARRIER = 64                       # The barrier is a sum of this many bytes.


class Group:
    """The ranks that hold one layer together. Collective: all of them call the same methods in the same order.

    Results are new arrays, of the same bits on all ranks where they are the same; what is passed in is only read. With a channel
    that shares memory between all of them, arrays on the host go through that, else by messages.
    """

    def __init__(self, channel: AnyChannel):
        self.channel, self.rank, self.size = channel, channel.rank, channel.size
        self._tables = Tables(channel) if channel.shared else None

    def sum(self, array: Array, name: str) -> Array:
        """The sum over the ranks, in their order where memory is shared."""
        if shown := self._show(array, name):
            return _total(shown)
        copy: Array = array_module(array).empty(array.shape, array.dtype)
        copy[...] = array
        self.channel.allreduce(copy.reshape(-1), name=name)
        return copy

    def gather(self, array: Array, dim: int, name: str) -> Array:
        """The ranks' arrays, of one shape, behind each other along `dim`."""
        xp, dim = array_module(array), dim % array.ndim
        if shown := self._show(array, name):
            return np.concatenate(shown, axis=dim)
        parts = xp.empty((self.size, *array.shape), array.dtype)
        parts[self.rank] = array
        self.channel.messages.all_gather(parts.reshape(-1), ALL_GATHER["ring"], name=name)
        return xp.concatenate(list(parts), axis=dim)

    def scatter(self, array: Array, dim: int, name: str) -> Array:
        """This rank's part, along `dim`, of the sum over the ranks."""
        xp, dim, mine = array_module(array), dim % array.ndim, self.part(array, dim)
        if shown := self._show(array, name):
            return _total([self.part(other, dim) for other in shown])
        parts = xp.stack(xp.split(array, self.size, axis=dim)).reshape(-1)
        found: Array = self.channel.messages.reduce_scatter(parts, REDUCE_SCATTER["ring"], name=name)
        return found.reshape(mine.shape).copy()               # A view would keep the other parts alive.

    def part(self, array: Array, dim: int) -> Array:
        """This rank's part along `dim` of an array that all ranks have, as a view."""
        dim %= array.ndim
        length, rest = divmod(array.shape[dim], self.size)
        if rest:
            raise ShapeError(f"mesh.tp = {self.size} ranks cannot share dim {dim} of shape {tuple(array.shape)}: "
                             f"{array.shape[dim]} is no multiple of {self.size}; change the length of the samples (model.block), "
                             "or set mesh.sequence = false")
        return array[(slice(None),) * dim + (slice(self.rank * length, (self.rank + 1) * length),)]

    def _show(self, array: Array, name: str) -> list[Array]:
        """The arrays of all ranks, where they share memory; nothing where messages are to carry them."""
        return self._tables.show(array, name) if self._tables is not None and type(array) is np.ndarray else []


def _total(parts: Sequence[Array]) -> Array:
    total: Array = np.add(parts[0], parts[1])
    for part in parts[2:]:
        np.add(total, part, out=total)
    return total


class LoneGroup(Group):
    """A group whose other ranks are elsewhere: sums take zeros for theirs, and gathers repeat what is here."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def sum(self, array: Array, name: str) -> Array:
        return array.copy()

    def gather(self, array: Array, dim: int, name: str) -> Array:
        return array_module(array).concatenate([array] * self.size, axis=dim)

    def scatter(self, array: Array, dim: int, name: str) -> Array:
        return self.part(array, dim).copy()


class Tables:
    """Memory in which each rank shows the others an array. Two rooms take turns: a rank that writes to one has passed the
    barrier that all ranks came to after they had read it the last time."""

    def __init__(self, channel: AnyChannel):
        self.channel = channel
        self._rooms: list[list[Array]] = [[], []]             # A room holds every rank's part.
        self._shown: dict[tuple[Any, ...], tuple[list[Array], Collective]] = {}     # The key says what is shown, and where.
        self._turn, self._usable = 0, True
        self._barrier = channel.allocate(BARRIER).view(np.float32)     # Its values are zeros, and so is their sum.

    def show(self, array: Array, name: str) -> list[Array]:
        """Every rank's array, of this one's shape, until the next call but one; nothing where it cannot be had."""
        nbytes, own = array.nbytes, self.channel.rank
        room = self._rooms[self._turn]
        if self._usable and (not room or room[own].nbytes < nbytes):
            mine = self.channel.allocate(1 << max(nbytes - 1, LEAST).bit_length())
            room = self._rooms[self._turn] = self.channel.everywhere(mine)
            self._usable = bool(room)
            self._shown.clear()
        if not self._usable:
            return []
        key = self._turn, name, array.shape, array.dtype
        if key not in self._shown:
            views = [part[:nbytes].view(array.dtype).reshape(array.shape) for part in room]
            self._shown[key] = views, self.channel.prepare(self._barrier, f"{name}, {nbytes} bytes")
        self._turn = 1 - self._turn
        shown, barrier = self._shown[key]
        np.copyto(shown[own], array)
        barrier.run()
        return shown


Exchange: TypeAlias = Callable[[Group, Array, int, str], Array]      # (ranks, array, the dim that is cut, the layer's name)


class Between(Function):
    """A function of the table above: forward is `there`, and backward is `back`."""

    there: Exchange
    back: Exchange

    @staticmethod
    def forward(ctx: Context, x: Array, *, group: Group, name: str, dim: int = 0) -> Array:
        ctx.group, ctx.dim, ctx.name = group, dim, name
        return ctx.function.there(group, x, dim, name)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        return ctx.function.back(ctx.group, grad, ctx.dim, ctx.name)


class Enter(Between):
    """x, which all ranks have, for use by a part on each; its gradient is the sum of what the parts give. A view."""

    views = True
    there = staticmethod(lambda group, x, dim, name: x)
    back = staticmethod(lambda group, grad, dim, name: group.sum(grad, f"gradient into {name}"))


class Leave(Between):
    """The sum of the ranks' x, on all of them."""

    there = staticmethod(lambda group, x, dim, name: group.sum(x, f"output of {name}"))
    back = staticmethod(lambda group, grad, dim, name: grad)


class Gather(Between):
    """The ranks' x behind each other along `dim`, for use by a part on each."""

    there = staticmethod(lambda group, x, dim, name: group.gather(x, dim, f"input of {name}"))
    back = staticmethod(lambda group, grad, dim, name: group.scatter(grad, dim, f"gradient into {name}"))


class Scatter(Between):
    """This rank's part along `dim` of the sum of the ranks' x."""

    there = staticmethod(lambda group, x, dim, name: group.scatter(x, dim, f"output of {name}"))
    back = staticmethod(lambda group, grad, dim, name: group.gather(grad, dim, f"gradient out of {name}"))


class Collect(Between):
    """The ranks' x behind each other along `dim`, for use that is the same on all ranks."""

    there = staticmethod(lambda group, x, dim, name: group.gather(x, dim, f"output of {name}"))
    back = staticmethod(lambda group, grad, dim, name: group.part(grad, dim))
