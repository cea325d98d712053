"""What cores cost that ranks share: rates of products, of memory and of training code with one rank at work, with two, with all.

    busy  1    rank 0 [product product ...]    ranks 1 to 3 asleep
          2    ranks 0 and 1 [product ...]     ranks 2 and 3 asleep
          4    all [product ...]               more ranks than cores: they take turns

Each measurement is a window of fixed length, so all that are at work are so together. Who has nothing to do sleeps: a rank that
waited inside MPI would take its core's time. What counts is the processor time of a call, which has in it what ranks at work
cost each other (caches, memory, the clock of the cores), and not whose turn it is: that follows from the number of cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain import nn
from mpitrain.autograd import Tensor, run_backward
from mpitrain.backend import random
from mpitrain.comm.job.start import World

WINDOW = 0.3                      # seconds of one measurement: a hundred times the scheduler's slice
ASLEEP = 0.002                    # seconds between looks whether the others are done
SHAPES = ((128, 784, 1024), (768, 128, 512), (768, 512, 128), (64, 64, 64), (512, 512, 512))      # (rows, inputs, outputs)
STREAM = 16 << 20                 # bytes of each of three arrays: beyond the caches
BLOCK = (6, 64, 128, 4)           # batch, length, width, heads of the transformer's block
SMALL = 8                         # elements of an operation that is all interpreter


def when_busy(world: World, busy: int, run: Callable[[], Any], window: float = WINDOW) -> float:
    """Processor seconds of a call of `run` on the slowest of the first `busy` ranks, while these are at work. Collective."""
    seconds = np.zeros(1)
    if world.rank < busy:
        run()
    together(world)
    if world.rank < busy:
        calls, began, spent = 0, time.perf_counter(), time.thread_time()
        while time.perf_counter() - began < window or not calls:
            run()
            calls += 1
        seconds[0] = (time.thread_time() - spent) / calls
    together(world)
    everyone = np.zeros(world.size)
    world.comm.Allgather(seconds, everyone)
    return float(everyone.max())


def together(world: World) -> None:
    """A barrier in which ranks sleep."""
    request = world.comm.Ibarrier()
    while not request.Test():
        time.sleep(ASLEEP)


def product(shape: tuple[int, int, int]) -> Callable[[], Any]:
    """A product of float32 matrices of (rows, inputs) and (inputs, outputs)."""
    rows, inputs, outputs = shape
    x, w, y = (np.full(size, 0.5, np.float32) for size in ((rows, inputs), (inputs, outputs), (rows, outputs)))
    return lambda: np.matmul(x, w, out=y)


def stream() -> Callable[[], Any]:
    """A sum of arrays that no cache holds: `3 * STREAM` bytes cross memory."""
    a, b, c = (np.full(STREAM // 4, value, np.float32) for value in (1.0, 2.0, 0.0))
    return lambda: np.add(a, b, out=c)


def block() -> Callable[[], Any]:
    """Forward and backward of a transformer's block, as training runs them: products, passes over memory, and Python."""
    batch, length, width, heads = BLOCK
    model = nn.Sequential(("norm", nn.LayerNorm(width)), ("attention", nn.MultiHeadAttention(width, heads, causal=True)),
                          ("wide", nn.Linear(width, 4 * width, activation="gelu")), ("narrow", nn.Linear(4 * width, width)))
    model.initialize(0, "float32").attach_gradients()
    x = np.random.default_rng(0).standard_normal((batch, length, width), dtype=np.float32)
    rows = np.arange(batch, dtype=np.uint64)

    def run() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        with random.use(random.Scope(0, 0, rows)):
            y = model(Tensor(x))
        run_backward(y, x)
    return run


def operation() -> Callable[[], Any]:
    """An operation on a few numbers, which takes the interpreter's time and no other."""
    x, y = (Tensor(np.ones(SMALL, np.float32)) for _ in range(2))
    return lambda: x + y


def contention(world: World, window: float = WINDOW) -> dict[str, Any]:
    """For 1, 2, ... all ranks at work, how many times the processor time alone a product, a pass over memory and training code
    take, turns apart; and the bytes a second of a pass. Collective."""
    counts = list(range(1, world.size + 1))
    found: dict[str, Any] = {"ranks": counts}
    runs = {"products": product(SHAPES[1]), "memory": stream(), "training": block()}
    for name, run in runs.items():
        seconds = [when_busy(world, busy, run, window) for busy in counts]
        found[name] = [one / seconds[0] for one in seconds]
        if name == "memory":
            found["memory_bytes_s"] = [3 * STREAM / one for one in seconds]
    return found


def rates(world: World, window: float = WINDOW) -> list[dict[str, Any]]:
    """FLOP/s of products of float32 at several shapes, with one rank at work and with all. Collective."""
    rows = []
    for shape in SHAPES:
        run, flops = product(shape), 2.0 * shape[0] * shape[1] * shape[2]
        alone, everyone = (flops / when_busy(world, busy, run, window / 2) for busy in (1, world.size))
        rows.append({"shape": list(shape), "alone": alone, "all": everyone})
    return rows


def operation_seconds(world: World) -> float:
    """Seconds of the interpreter for one operation of a model."""
    return when_busy(world, 1, operation(), WINDOW / 3)


def spread(world: World, busy: int, steps: int = 40) -> float:
    """The standard deviation, between the first `busy` ranks, of the log of the processor seconds that the same work takes on
    each. Collective."""
    run, mine = block(), np.zeros(steps)
    together(world)
    if world.rank < busy:
        for i in range(steps):
            began = time.thread_time()
            run()
            mine[i] = time.thread_time() - began
    together(world)
    everyone = np.zeros((world.size, steps))
    world.comm.Allgather(mine, everyone)
    if busy < 2:
        return 0.0
    logs = np.log(everyone[:busy])
    return float(np.median(logs.std(axis=0, ddof=1)))
