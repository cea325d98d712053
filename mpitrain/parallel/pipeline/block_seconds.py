"""Block timing: the seconds of each block, so that unequal blocks are cut into stages that take equally long."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from mpitrain.autograd import Tensor, run_backward
from mpitrain.backend import Array, Device, is_float, random
from mpitrain.errors import ShapeError
from mpitrain.nn import Module, Sequential, collect_statistics, mixtures
from mpitrain.nn.by_name import ByName
from mpitrain.parallel.pipeline.feed import Feed

TIMES = 4                                    # Each block runs so often; the fastest run but the first counts.


def block_seconds(model: Sequential, x: Any, *, seed: int, precision: str, device: Device, tokens: bool) -> list[float]:
    """Times forward and backward of one micro-batch `x` (host rows) through each block of a `model` without memory.

    One block at a time has memory, and none has afterwards. ShapeError where a block cannot take the output of the one before, or
    gives no single tensor.
    """
    found: list[float] = []
    given: Any = None
    rows = np.arange(len(x), dtype=np.uint64)
    for place, name in enumerate(model.blocks):
        part = model.slice(place, place + 1)
        part.recompute = model.recomputes(place, name)
        storage = part.initialize(seed, precision, device)
        if given is None:
            given = Feed(device, storage.dtype, tokens=tokens, compute=storage.compute_dtype).tensors(x)
        seconds = []
        for _ in range(TIMES):
            with random.use(random.Scope(seed, 0, rows)):
                taken, output = _timed(part, name, given, device)
            seconds.append(taken)
        found.append(min(seconds[1:]))
        given = Tensor(output, requires_grad=is_float(output.dtype))
        forget(part)
    return found


def forget(part: Module) -> None:
    """Frees the memory of a model, and drops the statistics of its forward passes."""
    collect_statistics(part)
    for _, layer in mixtures(part):
        layer.take_tally()
    for _, leaf in (*part.named_parameters(), *part.named_buffers()):
        leaf.grad = None
        del leaf.array
    del part.storage


def _timed(part: Sequential, name: str, x: Any, device: Device) -> tuple[float, Array]:
    """Returns (seconds, output) of one forward and backward of what the block is given."""
    x.grad = None
    for parameter in part.parameters():
        parameter.grad = None
    device.synchronize()
    began = time.perf_counter()
    try:
        output = part(x)
    except ShapeError as error:
        what = "the inputs" if isinstance(x, ByName) else f"{tuple(x.shape)} ({x.dtype})"
        raise ShapeError(f'the block "{name}" cannot take {what}: {error.message}') from error
    if not isinstance(output, Tensor):
        raise ShapeError(f'mesh.stages = "time" measures blocks that pass one tensor on, and "{name}" gives a '
                         f"{type(output).__name__}; give the numbers of blocks instead, such as mesh.stages = [3, 4]")
    if output.requires_grad:
        run_backward(output, output.xp.ones(output.shape, output.dtype))
    device.synchronize()
    return time.perf_counter() - began, output.array
