r"""Activation memory of a micro-batch in forward and backward, measured with a few rows and next to no parameters.

    used            ___/\__           forward: each block's output and its saved arrays stay, the rest is freed
    bytes     __/\_/       \/\_       backward: saved arrays are freed, block by block, gradients come and go
            |- forward -|- backward -|
    marks   |   |   |   |  | |  | |  |     the peak since the last mark, for a few rows and for twice as many

Memory that grows with the rows grows on a straight line, so two counts give any number of rows, mark by mark; the
largest is then the peak. Parameters take next to no memory (`plan.lent`), so a model that is larger than a rank can be looked at.
Blocks run as usual, and keep their actual arrays, whoever wrote them; those of a device where the run is to be on one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpitrain.autograd import Deferred, Tensor, run_backward
from mpitrain.autograd.cast import in_single
from mpitrain.backend import CPU, Device, is_float, random
from mpitrain.backend.memory import Pool
from mpitrain.data.columns import Columns
from mpitrain.kernels.idle import idle
from mpitrain.nn import Module, Sequential, collect_statistics, defer_statistics
from mpitrain.parallel.pipeline.feed import Feed
from mpitrain.plan.lent import lent_memory

if TYPE_CHECKING:
    from mpitrain.backend.device_memory import DevicePool

FEW = 2                                      # rows; one alone has no variance for a batch norm
FEW_ON_DEVICE = 16                           # whose blocks of memory are multiples of 512 bytes
SETTLES = 4                                  # passes at most: one that leaves arrays behind has filled a cache


class Phase(NamedTuple):
    """Bytes of one action: the peak while it runs, and the increase that remains after it, both against those before it."""

    peak: int
    kept: int


class Course(NamedTuple):
    """One micro-batch on one virtual stage: `phases` by kind of action ("F", "B", "W"); bytes `taken` from the stage
    before, and `given` to the next one."""

    phases: dict[str, Phase]
    taken: int
    given: int


class Marks:
    """The peak bytes of arrays between marks, counted from those at the beginning of a phase."""

    def __init__(self, pool: Pool | DevicePool):
        self.pool, self.peaks, self.before = pool, list[int](), 0

    def begin(self) -> None:
        self.pool.recent_peak()
        self.peaks, self.before = [], self.pool.usage().used

    def mark(self) -> None:
        self.peaks.append(self.pool.recent_peak() - self.before)

    def end(self) -> list[int]:
        """The peaks, then the bytes used now."""
        self.mark()
        return [*self.peaks, self.pool.usage().used - self.before]


class Passes(NamedTuple):
    """The marks of `n` and of 2 n rows, of each virtual stage; or of the very number of rows that is asked for, alone."""

    n: int
    marks: list[list[dict[str, list[int]]]]

    def courses(self, rows: int) -> list[Course]:
        """The course of a micro-batch of `rows` rows on each virtual stage."""
        courses = [{**course} for course in self.marks[0]] if len(self.marks) == 1 else [
            {kind: _at(rows, self.n, few[kind], twice[kind]) for kind in few} for few, twice in zip(*self.marks)]
        sizes = [0, *(course.pop("sizes")[0] for course in courses)]
        return [Course({kind: Phase(max(0, *marks[:-1]), marks[-1]) for kind, marks in course.items()}, *message)
                for course, message in zip(courses, pairwise([*sizes[:-1], 0]))]


def trace(chunks: Sequence[Module], loss: Any, x: Any, y: Any, rows: int, **further: Any) -> list[Course]:
    """The course of a micro-batch of `rows` rows on each of a model's virtual stages, `chunks`, none of which has memory yet. The
    arguments are those of `run_passes`."""
    return run_passes(chunks, loss, x, y, rows, **further).courses(rows)


def counts(rows: int, device: Device = CPU) -> tuple[int, ...]:
    """The numbers of rows that are run to know what `rows` rows keep."""
    few = FEW if device.xp is np else FEW_ON_DEVICE
    return (rows,) if rows <= 2 * few else (few, 2 * few)


def run_passes(chunks: Sequence[Module], loss: Any, x: Any, y: Any, rows: int, *, pool: Pool | DevicePool, seed: int,
               precision: str, tokens: bool, split: bool, device: Device = CPU) -> Passes:
    """Runs as many rows through `chunks` as `counts` says.

    `x` and `y` are one host row each, `loss` takes the last stage's output; `split`: backward runs as two calls. Messages
    from other stages count as well, host rows do not. `pool` has the arrays of `device`.
    """
    numbers, found = counts(rows, device), []
    for chunk in chunks:
        defer_statistics(chunk)              # as in a run
    with lent_memory(chunks, precision, device), nothing_else_is_freed(), idle(), np.errstate(all="ignore"):
        for n in numbers:
            given, target = np.repeat(x, n, axis=0), np.repeat(y, n, axis=0)
            for _ in range(SETTLES):
                before = pool.usage().used
                with random.use(random.Scope(seed, 0, np.arange(n, dtype=np.uint64))):
                    courses = _once(chunks, loss, given, target, pool=pool, tokens=tokens, split=split, device=device)
                if pool.usage().used == before:
                    break
            found.append(courses)
    pool.trim()                              # a run's later use must not depend on the pool's content
    return Passes(numbers[0], found)


@contextmanager
def nothing_else_is_freed() -> Iterator[None]:
    """Cyclic garbage of earlier code stays uncollected: its memory is none of the model's."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _once(chunks: Sequence[Module], loss: Any, x: Any, y: Any, *, pool: Pool | DevicePool, tokens: bool, split: bool,
          device: Device) -> list[dict[str, list[int]]]:
    """The marks of each virtual stage's actions, which run as `Pipeline` runs them."""
    found = []
    storage: Any = chunks[0].storage
    feed = Feed(device, storage.dtype, tokens=tokens, compute=storage.compute_dtype)
    if device.xp is not np and not isinstance(x, Columns):
        x = device.put(feed.host_inputs(x))                   # Rows are on a device before a step begins.
    for number, chunk in enumerate(chunks):
        is_last = number == len(chunks) - 1
        course, x = _course(chunk, x, feed if number == 0 else None, (loss, feed.targets(y)) if is_last else None, pool, split)
        found.append(course)
        collect_statistics(chunk)
        for parameter in chunk.parameters():
            parameter.grad = None
    return found


def _course(chunk: Module, x: Any, feed: Feed | None, end: tuple[Any, Any] | None, pool: Pool | DevicePool,
            split: bool) -> tuple[dict[str, list[int]], Any]:
    """(the marks, a copy of the output) of one virtual stage: of the first one where there is `feed`, of the last with `end`."""
    marks = Marks(pool)
    if isinstance(chunk, Sequential):
        chunk.between = marks.mark
    marks.begin()
    given = inputs_of(feed, x) if feed else Tensor(x.copy(), requires_grad=is_float(x.dtype))
    output = chunk(given)
    if end is not None:
        output = end[0](output if getattr(end[0], "takes_half", False) else in_single(output), end[1])
    course = {"F": marks.end()}
    passed_on = output.array.copy()
    course["sizes"] = [passed_on.nbytes, 0]
    held = [given, output]
    del given, output
    marks.begin()
    rest = _backward(held, marks, split)
    course["B"] = marks.end()
    if split:
        marks.begin()
        if rest is not None:
            rest.run()
        del rest
        course["W"] = marks.end()
    if isinstance(chunk, Sequential):
        chunk.between = None
    return course, passed_on


def inputs_of(feed: Feed, x: Any) -> Any:
    return feed.tensors(x) if feed.device.xp is np or isinstance(x, Columns) else feed.here(x)


def _backward(held: list[Tensor], marks: Marks, split: bool) -> Deferred | None:
    """Empties `held`, the input and the output, as `Pipeline` does."""
    output, x = held.pop(), held.pop()
    grad = output.xp.ones(output.shape, output.dtype)
    rest = run_backward(output, grad, progress=marks.mark, split=split) if output.requires_grad else None
    del x
    return rest


def _at(rows: int, n_few: int, few: Sequence[int], twice: Sequence[int]) -> list[int]:
    """The number of each mark for `rows` rows, on the line through those for `n_few` and for twice as many."""
    if len(few) != len(twice):
        few, twice = ([max(marks[:-1]), marks[-1]] for marks in (few, twice))     # the model branches on its rows
    return [round(a + (b - a) * (rows - n_few) / n_few) for a, b in zip(few, twice)]


def most(program: Sequence[Any], virtual: Callable[[int], int], courses: Sequence[Course]) -> int:
    """The peak bytes of a stage whose actions are `program` and whose chunk c is virtual stage `virtual(c)`.

    While an action runs, the next one's message arrives, and the message of the last backward is still there.
    """
    live = peak = sent = 0
    for action, following in zip(program, [*program[1:], None]):
        course, coming = courses[virtual(action.chunk)], 0
        if following is not None and following.kind in "FB":
            there = courses[virtual(following.chunk)]
            coming = there.taken if following.kind == "F" else there.given
        phase = course.phases[action.kind]
        peak = max(peak, live + phase.peak + coming + sent)
        live += phase.kept
        if action.kind == "B" and "W" not in course.phases:     # the rest of a split backward holds it anyway
            sent = course.taken
    return peak
