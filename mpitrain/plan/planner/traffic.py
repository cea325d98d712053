"""What a model's blocks send to each other, and to ranks that share them: heard while a few rows run through each block.

Layers that several ranks share run here by themselves, with stand-ins for the other ranks (`parallel.layers.join`). These note
what they are asked to send, so that a plan knows the collectives that a run makes, from its own code. No product is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mpitrain.autograd import Tensor, in_single, run_backward
from mpitrain.backend import CPU, Array, is_float, random
from mpitrain.kernels.idle import idle, zeros
from mpitrain.nn import Module, Sequential, collect_statistics, defer_statistics
from mpitrain.parallel.layers.expert_parallel import LoneDispatcher
from mpitrain.parallel.layers.join import join_layers
from mpitrain.parallel.layers.ring_attention import LoneRing
from mpitrain.parallel.layers.tensor_functions import LoneGroup
from mpitrain.parallel.layers.tensor_loss import cut_loss
from mpitrain.parallel.pipeline.feed import Feed
from mpitrain.placement.place import Placement
from mpitrain.plan.lent import lent_memory
from mpitrain.schedules.step_simulate import Collective
from mpitrain.train.build.inputs import Inputs

ROWS = 2                                     # one alone has no variance for a batch norm
Heard = list[Collective]


class BlockTraffic(NamedTuple):
    """Of one row: bytes of the block's output, collectives that its forward and its backward wait for, and messages on a ring
    that go on while it computes, as the all-gathers that they make up."""

    nbytes: float
    forward: tuple[Collective, ...]
    backward: tuple[Collective, ...]
    ring_forward: tuple[Collective, ...]
    ring_backward: tuple[Collective, ...]


class HeardGroup(LoneGroup):
    def __init__(self, rank: int, size: int, heard: Heard):
        super().__init__(rank, size)
        self.heard = heard

    def sum(self, array: Array, name: str) -> Array:
        self.heard.append(Collective("all_reduce", ("tp",), array.nbytes))
        return super().sum(array, name)

    def gather(self, array: Array, dim: int, name: str) -> Array:
        self.heard.append(Collective("all_gather", ("tp",), array.nbytes * self.size))
        return super().gather(array, dim, name)

    def scatter(self, array: Array, dim: int, name: str) -> Array:
        self.heard.append(Collective("reduce_scatter", ("tp",), array.nbytes))
        return super().scatter(array, dim, name)


class HeardRing(LoneRing):
    """Of n ranks n - 1 messages to the next one are an all-gather of n of them."""

    def __init__(self, rank: int, size: int, heard: Heard):
        super().__init__(rank, size)
        self.heard = heard

    def send(self, array: Array, tag: int, what: str) -> Any:
        self.heard.append(Collective("all_gather", ("cp",), array.nbytes * self.size, 1 / (self.size - 1)))
        return super().send(array, tag, what)


class HeardDispatcher(LoneDispatcher):
    def __init__(self, rank: int, size: int, heard: Heard):
        super().__init__(rank, size)
        self.heard = heard

    def most(self, places: int) -> int:
        self.heard.append(Collective("all_reduce", ("ep",), 8.0 * self.size))
        return super().most(places)

    def _exchange(self, parts: Array, what: str) -> None:
        self.heard.append(Collective("all_to_all", ("ep",), parts.nbytes))
        super()._exchange(parts, what)


def traffic(p: Placement, inputs: Inputs, loss: Any) -> list[BlockTraffic]:
    """The traffic of each block of the model of `p`, the first rank of a mesh without stages; of a model that is no Sequential,
    that of all of it. Equal blocks that are given equal shapes run once."""
    model, heard = p.stage.whole, Heard()
    at, size = p.grid.coordinate, p.grid.size
    group = HeardGroup(at("tp"), size("tp"), heard)
    join_layers(p, group, HeardRing(at("cp"), size("cp"), heard) if size("cp") > 1 else None,
                lambda path: HeardDispatcher(at("ep"), size("ep"), heard))
    x, y = (np.repeat(part, ROWS, axis=0) for part in inputs.sample())
    if p.part is not None:
        x, y = p.part(x), p.part(y)
    blocks = list(model.blocks.values()) if isinstance(model, Sequential) else [model]
    defer_statistics(model)
    with lent_memory([model], p.train.precision), idle(), np.errstate(all="ignore"), random.use(
            random.Scope(0, 0, np.arange(ROWS, dtype=np.uint64))):
        storage: Any = model.storage
        feed = Feed(CPU, storage.dtype, tokens=inputs.tokens, compute=storage.compute_dtype)
        found = list(_blocks(blocks, feed.tensors(x), cut_loss(loss, p.head, group), feed.targets(y), heard))
        collect_statistics(model)
        for parameter in model.parameters():
            parameter.grad = None
    return found


def _blocks(blocks: list[Module], given: Any, loss: Any, target: Any, heard: Heard) -> Iterator[BlockTraffic]:
    known: dict[Any, tuple[BlockTraffic, Any]] = {}
    for index, block in enumerate(blocks):
        is_last = index == len(blocks) - 1
        key = (type(block), repr(block), tuple(parameter.shape for parameter in block.parameters()), _shapes(given), is_last)
        if key not in known:
            heard.clear()
            output = block(_fresh(given))
            of_block = output
            if is_last:
                output = loss(output if getattr(loss, "takes_half", False) else in_single(output), target)
            forward = tuple(map(_of_a_row, heard))
            heard.clear()
            for tensor in output if isinstance(output, tuple) else (output,):
                if tensor.requires_grad:
                    run_backward(tensor, zeros(tensor.shape, tensor.dtype))
            backward = tuple(map(_of_a_row, heard))
            nbytes = sum(tensor.array.nbytes for tensor in (of_block if isinstance(of_block, tuple) else (of_block,))) / ROWS
            known[key] = BlockTraffic(nbytes, *_apart(forward, backward)), _fresh(of_block)
        found, given = known[key]
        yield found


def _apart(forward: tuple[Collective, ...], backward: tuple[Collective, ...]) -> tuple[tuple[Collective, ...], ...]:
    """What compute waits for, and what goes round a ring meanwhile."""
    waits = [tuple(one for one in way if one.axes != ("cp",)) for way in (forward, backward)]
    return (*waits, *(tuple(one for one in way if one.axes == ("cp",)) for way in (forward, backward)))


def _of_a_row(one: Collective) -> Collective:
    return replace(one, nbytes=one.nbytes / ROWS)


def _fresh(x: Any) -> Any:
    """Leaves with these values, which take a gradient where they are floats."""
    if isinstance(x, tuple):
        return tuple(_fresh(part) for part in x)
    return Tensor(x.array, requires_grad=is_float(x.array.dtype)) if isinstance(x, Tensor) else x


def _shapes(x: Any) -> Any:
    return tuple(_shapes(part) for part in x) if isinstance(x, tuple) else tuple(getattr(x, "shape", ()))
