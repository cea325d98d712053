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
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpitrain import nn
from mpitrain.autograd import Tensor, run_backward
from mpitrain.backend import random
from mpitrain.bench.pairs import quartiles
from mpitrain.comm.job.start import World

WINDOW = 0.3                      # seconds of one measurement: a hundred times the scheduler's slice
AT_ONCE = 0.001                   # seconds of calls that are timed together
ASLEEP = 0.002                    # seconds between looks whether the others are done
SHAPES = ((128, 784, 1024), (768, 128, 512), (768, 512, 128), (64, 64, 64), (512, 512, 512))      # (rows, inputs, outputs)
STREAM = 16 << 20                 # bytes of each of three arrays: beyond the caches
BLOCK = (6, 64, 128, 4)           # batch, length, width, heads of the transformer's block
SMALL = 8                         # elements of an operation that is all interpreter


def when_busy(world: World, working: bool, run: Callable[[], Any], window: float = WINDOW) -> float:
    """Processor seconds of a call of `run`, the lower quartile, on the slowest of the ranks that are `working`, all at once.
    Collective."""
    seconds = np.zeros(1)
    if working:
        run()
    together(world)
    if working:
        seconds[0] = seconds_of_call(run, window)
    together(world)
    everyone = np.zeros(world.size)
    world.comm.Allgather(seconds, everyone)
    return float(everyone.max())


def seconds_of_call(run: Callable[[], Any], window: float) -> float:
    """The lower quartile, over a window, of a call's processor seconds; short calls are timed together."""
    began, spent = time.perf_counter(), time.thread_time()
    run()
    calls, times = max(1, round(AT_ONCE / max(time.thread_time() - spent, 1e-7))), list[float]()
    while time.perf_counter() - began < window or not times:
        spent = time.thread_time()
        for _ in range(calls):
            run()
        times.append((time.thread_time() - spent) / calls)
    return quartiles(times)[0]


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
    forward, backward = halves()
    return lambda: backward(forward())


def halves(progress: Callable[[], None] | None = None) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """The forward of that block, and the backward of what it gives; `progress` is called between the operations of backward,
    where training moves its messages."""
    batch, length, width, heads = BLOCK
    model = nn.Sequential(("norm", nn.LayerNorm(width)), ("attention", nn.MultiHeadAttention(width, heads, causal=True)),
                          ("wide", nn.Linear(width, 4 * width, activation="gelu")), ("narrow", nn.Linear(4 * width, width)))
    model.initialize(0, "float32").attach_gradients()
    x = np.random.default_rng(0).standard_normal((batch, length, width), dtype=np.float32)
    rows = np.arange(batch, dtype=np.uint64)

    def forward() -> Any:
        for parameter in model.parameters():
            parameter.grad = None
        with random.use(random.Scope(0, 0, rows)):
            return model(Tensor(x))
    return forward, lambda y: run_backward(y, x, progress=progress)


def operation() -> Callable[[], Any]:
    """An operation on a few numbers, which takes the interpreter's time and no other."""
    x, y = (Tensor(np.ones(SMALL, np.float32)) for _ in range(2))
    return lambda: x + y


def contention(world: World, nodes: Sequence[Sequence[int]], window: float = WINDOW) -> dict[str, Any]:
    """For 1, 2, ... ranks of each node at work, how many times the processor time of one rank alone a product, a pass over memory
    and training code take, turns apart; and the bytes a second of a pass. Collective."""
    place = next(ranks.index(world.rank) for ranks in nodes if world.rank in ranks)
    counts = list(range(1, len(nodes[0]) + 1))
    found: dict[str, Any] = {"ranks": counts}
    for name, run in {"products": product(SHAPES[1]), "memory": stream(), "training": block()}.items():
        alone = when_busy(world, world.rank == 0, run, window)
        seconds = [alone if len(nodes) == 1 and busy == 1 else when_busy(world, place < busy, run, window) for busy in counts]
        found[name] = [one / alone for one in seconds]
        if name == "memory":
            found["memory_bytes_s"] = 3 * STREAM / alone
    return found


def rates(world: World, window: float = WINDOW) -> list[dict[str, Any]]:
    """FLOP/s of products of float32 at several shapes, with one rank at work and with all. Collective."""
    rows = []
    for shape in SHAPES:
        run, flops = product(shape), 2.0 * shape[0] * shape[1] * shape[2]
        alone, everyone = (flops / when_busy(world, working, run, window / 2) for working in (world.rank == 0, True))
        rows.append({"shape": list(shape), "alone": alone, "all": everyone})
    return rows


def operation_seconds(world: World) -> float:
    """Seconds of the interpreter for one operation of a model."""
    return when_busy(world, world.rank == 0, operation(), WINDOW / 3)


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
