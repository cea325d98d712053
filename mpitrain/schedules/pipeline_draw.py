"""A pipeline schedule as text, as in the papers' figures: a line for each stage, a column for each unit of time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mpitrain.schedules.pipeline import SCHEDULES, Schedule
from mpitrain.schedules.pipeline_check import find_schedule, peak_of
from mpitrain.schedules.pipeline_simulate import Cost, Timeline, bubble, simulate_pipeline

MOST_LINES = 48                # A drawing of 4 stages and 100 micro-batches has fewer lines.


def describe(name: str, n_stages: int, n_micro: int, chunks: int = 1, *, folder: Path | None = None,
             width: int = 80) -> Iterator[str]:
    """What there is to know of the schedule called `name` before a run: idle shares, activations, the drawing.

    Times are those of equal F, B and W and free messages. ConfigError and ScheduleError as from `find_schedule`.
    """
    schedule = find_schedule(name, folder, n_stages=n_stages, n_micro=n_micro, chunks=chunks)
    timeline = simulate_pipeline(schedule, n_stages, n_micro, drawn(chunks), chunks)
    formula = f"{bubble(name, n_stages, n_micro, chunks=chunks):.1%} by formula, " if name in SCHEDULES else ""
    of_chunks = f" of {chunks} chunks" if chunks > 1 else ""
    yield f"schedule {name}: {n_stages} stage{'s' * (n_stages != 1)}{of_chunks}, {n_micro} micro-batch{'es' * (n_micro != 1)}"
    yield f"  idle {formula}{timeline.idle_fraction():.1%} simulated (a forward as long as an input or a weight gradient)"
    peaks = " ".join(str(peak_of([span.action for span in stage])) for stage in timeline.spans)
    yield f"  live activations at most, in {'chunks of ' if chunks > 1 else ''}micro-batches by stage: {peaks}"
    yield from (f"  {line}" for line in draw_timeline(timeline, width=width - 2, most=MOST_LINES))


def draw(schedule: Schedule, n_stages: int, n_micro: int, chunks: int = 1, *, width: int = 80,
         training: bool = True) -> Iterator[str]:
    """The whole schedule in lines of `width`; F, B and W of a chunk take a unit of time each, a B without W two."""
    timeline = simulate_pipeline(schedule, n_stages, n_micro, drawn(chunks), chunks, training=training)
    yield from draw_timeline(timeline, width=width)


def drawn(chunks: int) -> Cost:
    """The costs by which each action of a chunk takes a whole number of units."""
    return Cost(float(chunks), float(chunks), float(chunks))


def draw_timeline(timeline: Timeline, *, width: int = 80, most: int | None = None) -> Iterator[str]:
    """Lines of a timeline whose times are whole numbers, in blocks of `width` characters below each other, not more than
    `most` lines if it can be.

        time     0     2     4     6
        stage 0  F0 F1 .  .  B0--- B1---
        stage 1  .  F0 B0--- F1 B1---  .
    """
    units = round(timeline.total)
    cell = max((len(str(span.action)) for stage in timeline.spans for span in stage), default=1) + 1
    heads = ["time", *(f"stage {stage}" for stage in range(len(timeline.spans)))]
    margin = max(map(len, heads)) + 2
    columns = max(1, (width - margin) // cell)
    rows = [ruler(units, cell), *(row(timeline, stage, units, cell) for stage in range(len(timeline.spans)))]
    blocks = -(-units // columns)
    shown = blocks if most is None else min(blocks, max(1, most // len(rows)))
    for block in range(shown):
        first, stop = block * columns * cell, (block + 1) * columns * cell
        yield from (f"{head.ljust(margin)}{text[first:stop]}".rstrip() for head, text in zip(heads, rows))
    if shown < blocks:
        yield f"... until time {units}"


def row(timeline: Timeline, stage: int, units: int, cell: int) -> str:
    """A stage's line: the name of each action, drawn out as long as it takes, and a dot for each unit without one."""
    text, now = "", 0
    for action, start, stop in timeline.spans[stage]:
        text += ".".ljust(cell) * (round(start) - now)
        text += str(action).ljust((round(stop) - round(start)) * cell - 1, "-" if stop - start > 1 else " ") + " "
        now = round(stop)
    return text + ".".ljust(cell) * (units - now)


def ruler(units: int, cell: int) -> str:
    """The number of every unit of time for which there is room."""
    step = -(-(len(str(units)) + 1) // cell)
    return "".join(str(unit).ljust(cell * step) for unit in range(0, units, step))
