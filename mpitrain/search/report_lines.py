"""The report of a study as lines of plain text: what `mpitrain inspect runs/study` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpitrain.search.front import Objective
from mpitrain.search.report import Report, Span, shown, told, value_text, values_text
from mpitrain.search.table import FAILED, Trial
from mpitrain.train.observers.log import duration

WIDTH, HEIGHT = 60, 12                    # letters of a timeline or a plot
SHADES = " .:-=+*#"                       # how much of a piece of time a group was at work: none to all
LONGEST = 200                             # trials in the table; the others are counted


def report_lines(report: Report, longest: int = LONGEST) -> Iterator[str]:
    yield from heading(report)
    if not report.table.trials:
        yield "no trial has started"
        return
    yield from trial_table(report, longest)
    yield from front_lines(report)
    yield from rung_lines(report)
    yield from use_lines(report)


def heading(report: Report) -> Iterator[str]:
    how, table = report.header["search"], report.table
    states: dict[str, int] = {}
    for trial in table.trials:
        states[trial.state] = states.get(trial.state, 0) + 1
    objective = ", ".join(one.text for one in report.objectives)
    yield (f"study {report.name}: sampler {how['sampler']}, pruner {how['pruner']}, rungs of "
           f"{', '.join(map(str, table.epochs))} {table.unit}, objective {objective}")
    codes = ", ".join(f"{code} {number}" for code, number in report.failures().most_common())
    yield (f"{len(table.trials)} of {table.planned} trials have started"
           + "".join(f", {number} {state}" + f" ({codes})" * (state == FAILED) for state, number in sorted(states.items())))
    if report.said:
        yield report.said
    yield from report.privacy


def trial_table(report: Report, longest: int) -> Iterator[str]:
    """The trials, the best first: those that went furthest before those that did not, and of these by their scores."""
    keys, objectives = report.keys, report.objectives
    trials = ranked(report)
    rows = [["trial", "state", report.table.unit, *(one.text for one in objectives), *keys]]
    rows += [[str(trial.id), trial.state if not trial.code else f"{trial.state} {trial.code}", epochs_of(report, trial),
              *(shown(report.value(trial, one)) for one in objectives), *(value_text(trial.values.get(key)) for key in keys)]
             for trial in trials[:longest]]
    yield from aligned(rows)
    if len(trials) > longest:
        yield f"... and {len(trials) - longest} more (study.json and report.html have all)"


def ranked(report: Report) -> list[Trial]:
    def place(trial: Trial) -> tuple[int, tuple[float, ...], int]:
        score = tuple(-number for number in trial.score) if trial.score is not None else (float("inf"),)
        return -trial.reached, score, trial.id
    return sorted(report.table.trials, key=place)


def epochs_of(report: Report, trial: Trial) -> str:
    return str(report.table.epochs[trial.reached]) if trial.results else "0"


def front_lines(report: Report) -> Iterator[str]:
    front, objectives = report.front(), report.objectives
    if not front:
        yield "no trial has a result yet"
        return
    best = front[0]
    after = f"after {epochs_of(report, best)} {report.table.unit}"
    if len(objectives) == 1:
        yield f"best {after}: trial {best.id}, {told(report.value(best, objectives[0]), objectives[0])}"
        yield f"  {values_text(best)}"
        return
    which = "one trial that no other one beats" if len(front) == 1 else f"{len(front)} trials that no other one beats"
    yield f"front {after}, {which} in all of {', '.join(one.text for one in objectives)}:"
    yield from (f"  {line}" for line in aligned([
        [f"trial {trial.id}", *(told(report.value(trial, one), one) for one in objectives), values_text(trial)]
        for trial in front]))
    yield from scatter(report, objectives[0], objectives[1], front)


def scatter(report: Report, vertical: Objective, horizontal: Objective, front: Sequence[Trial]) -> Iterator[str]:
    """Trials that reached as far as the front's, dots; those of the front, rings."""
    rung = front[0].reached
    on_front = {trial.id for trial in front}
    points = report.points(horizontal, vertical, rung)
    xs, ys = [x for x, _, _ in points], [y for _, y, _ in points]
    if len(set(xs)) < 2 or len(set(ys)) < 2:
        return
    cells = [[" "] * WIDTH for _ in range(HEIGHT)]
    for x, y, trial in sorted(points, key=lambda point: point[2] in on_front):
        column = round((x - min(xs)) / (max(xs) - min(xs)) * (WIDTH - 1))
        row = round((max(ys) - y) / (max(ys) - min(ys)) * (HEIGHT - 1))
        cells[row][column] = "o" if trial in on_front else "."
    yield f"  {vertical.name} {shown(max(ys))}"
    yield from (f"  |{''.join(row).rstrip()}" for row in cells)
    yield f"  {shown(min(ys))}{'':-<{WIDTH - 20}} {horizontal.name} {shown(min(xs))} to {shown(max(xs))}"


def rung_lines(report: Report) -> Iterator[str]:
    first = report.objectives[0]
    rows = [[report.table.unit, "trials", "went on", f"best {first.name}", "median"]]
    rows += [[str(epochs), str(trials), str(on) if number < report.table.last else "", shown(best), shown(median)]
             for number, (epochs, trials, on, best, median) in enumerate(report.rungs())]
    yield from aligned(rows)


def use_lines(report: Report) -> Iterator[str]:
    """How much of their time the groups were at work, and a timeline of each."""
    used, total = report.utilisation(), report.seconds()
    if used is None:
        return
    jobs, spans = report.jobs(), report.spans()
    running = sum(state == "running" for state in report.table.open.values())
    yield (f"{duration(total)} in {len(jobs)} job{'s' * (len(jobs) > 1)}, the last one of {jobs[-1]['ranks']} ranks in "
           f"{jobs[-1]['groups']} groups; they were at work {used:.1%} of the time"
           + (f" ({running} trials running are not counted)" if running else ""))
    for group in sorted({span.group for span in spans}):
        mine = [span for span in spans if span.group == group]
        yield f"  group {group}  |{timeline(mine, total)}| {sum(span.stop - span.start for span in mine) / total:.1%}"


def timeline(spans: Sequence[Span], total: float) -> str:
    """One letter for each piece of the time, the darker the more of it is work."""
    letters = ""
    for piece in range(WIDTH):
        low, high = total * piece / WIDTH, total * (piece + 1) / WIDTH
        worked = sum(max(0.0, min(high, span.stop) - max(low, span.start)) for span in spans)
        letters += SHADES[min(len(SHADES) - 1, round(worked / (high - low) * (len(SHADES) - 1)))]
    return letters


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    yield from ("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
