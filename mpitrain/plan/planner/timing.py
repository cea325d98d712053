"""Times a model's own blocks in this process: forward and backward of a micro-batch each, the update, and its reading.

    x -> [block 0] -> Tensor -> [block 1] -> Tensor -> ... -> [last block, loss]        forward, a clock at each border
    . <- [block 0] <-   grad <- [block 1] <-   grad <- ... <- [last block, loss]        backward, from a border's gradient

All blocks have their memory at once and follow each other as in a step, so caches are as full as there. A part of a model that is
cut along tp runs by itself (`parallel.layers.join.alone`): its sums over ranks cost nothing here. Seconds are the processor's, so
other processes on this host, which a plan is not about, do not count; with several threads they are those of the clock.
`mesh.stages = "time"` makes the same measurement with one block at a time, which needs less memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpitrain.autograd import Tensor, in_single, run_backward
from mpitrain.backend import CPU, is_float, random
from mpitrain.nn import Module, Sequential, collect_statistics
from mpitrain.parallel.pipeline.block_seconds import forget
from mpitrain.parallel.pipeline.feed import Feed
from mpitrain.train.build.inputs import Inputs

ENOUGH = 0.4                  # seconds of passes after which no more are made
PASSES = 5, 25                # at least and at most, after one that touches memory for the first time


Clock: TypeAlias = "Callable[[], float]"


class Timed(NamedTuple):
    """Medians in seconds: of a micro-batch through each block, of the update of all parameters, of the sum of two micro-batches'
    gradients, of the gradient's norm, and of reading a micro-batch."""

    forward: list[float]
    backward: list[float]
    update: float
    fold: float
    norm: float
    read: float = 0.0


def time_blocks(model: Module, x: Any, y: Any, *, loss: Any, optimizer: Callable[[Any], Any], seed: int, precision: str,
                feed: Callable[[Any], Feed], threads: int = 1) -> Timed:
    """Times `model`, which has no memory and has none afterwards, on host rows `x` and `y`; `feed(storage)` brings them to it.
    `threads` are those that products have."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    parts = parts_of(model)
    storage: Any = model.initialize(seed, precision, CPU)
    storage.attach_gradients()
    model.train()
    try:
        fed = feed(storage)
        given, target, rows = fed.tensors(x), fed.targets(y), np.arange(len(x), dtype=np.uint64)
        passes: list[list[float]] = []
        began = clock()
        while len(passes) <= PASSES[0] or (len(passes) <= PASSES[1] and clock() - began < ENOUGH):
            for parameter in model.parameters():
                parameter.grad = None
            with random.use(random.Scope(seed, 0, rows)):
                passes.append(one_pass(parts, given, target, loss, clock))
            collect_statistics(model)
        medians = [statistics.median(of_part) for of_part in zip(*passes[1:])]
        update, fold, norm = flat_passes(storage, optimizer, clock)
    finally:
        forget(model)
    return Timed(medians[:len(parts)], medians[:len(parts) - 1:-1], update, fold, norm)


def parts_of(model: Module) -> Sequence[Module]:
    """The blocks of a model, each as a model that recomputes where the whole one does."""
    if not isinstance(model, Sequential):
        return [model]
    found = []
    for place, name in enumerate(model.blocks):
        part = model.slice(place, place + 1)
        part.recompute, part.goes_on = model.recomputes(place, name), False
        found.append(part)
    return found


def one_pass(parts: Sequence[Module], given: Any, target: Any, loss: Any, clock: Clock) -> list[float]:
    """Seconds of each part's forward in order, then of each part's backward, the last part first."""
    times: list[float] = []
    ends: list[tuple[Any, Any]] = []
    for place, part in enumerate(parts):
        began = clock()
        output = part(given)
        if place == len(parts) - 1:
            output = loss(output if getattr(loss, "takes_half", False) else in_single(output), target)
        times.append(clock() - began)
        ends.append((given, output))
        given = detached(output)
    grad: Any = np.ones((), output.dtype)
    while ends:
        given, output = ends.pop()
        began = clock()
        backward(output, grad)
        times.append(clock() - began)
        grad = gradients(given)
    return times


def detached(output: Any) -> Any:
    """What the next part is given: the same arrays, where a new graph begins."""
    if isinstance(output, tuple):
        return tuple(map(detached, output))
    return Tensor(output.array, requires_grad=is_float(output.dtype))


def gradients(given: Any) -> Any:
    return tuple(map(gradients, given)) if isinstance(given, tuple) else getattr(given, "grad", None)


def backward(output: Any, grad: Any) -> None:
    if isinstance(output, tuple):
        for one, its in zip(output, grad):
            backward(one, its)
    elif grad is not None and output.requires_grad:
        run_backward(output, grad)


def flat_passes(storage: Any, make: Callable[[Any], Any], clock: Clock) -> tuple[float, float, float]:
    """Seconds of the optimizer's update of a storage, of the sum of two gradients, and of a gradient's norm."""
    optimizer, gradient = make(storage), np.full(storage.size, 1e-3, storage.dtype)
    other = gradient.copy()
    step = iter(range(1, 1 << 20))
    if optimizer.needs_closure:
        return 0.0, 0.0, 0.0
    return (median_time(lambda: optimizer.update(gradient, lr=0.0, step=next(step)), clock),
            median_time(lambda: np.add(gradient, other, out=other), clock),
            median_time(lambda: np.dot(gradient, gradient), clock))


def median_time(run: Callable[[], Any], clock: Clock) -> float:
    """Median seconds of a call, after one that does not count."""
    times: list[float] = []
    began = clock()
    while len(times) <= PASSES[0] or (len(times) <= PASSES[1] and clock() - began < ENOUGH / 4):
        start = clock()
        run()
        times.append(clock() - start)
    return statistics.median(times[1:])


def reading(inputs: Inputs, rows: int) -> float:
    """Seconds of reading the first `rows` training rows, with their checks and transforms."""
    return median_time(lambda: inputs.sample(rows), time.thread_time)
