"""The report of a study as one HTML file with its drawings: nothing is loaded from anywhere, so it can be kept and sent.

The front (or, with one objective, the best so far), curves by rung, what the groups were at work on, keys against the objective,
parallel coordinates, and all trials. The pointer on a mark tells what it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from mpitrain.files.disk import replace_file
from mpitrain.search.drawing import LINE, WORST, Plot, Scale, colour, scale_of
from mpitrain.search.front import Objective
from mpitrain.search.report import Report, shown, told, value_text, values_text
from mpitrain.search.report_lines import epochs_of, heading, ranked, rung_lines
from mpitrain.search.table import Trial

STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #202124; background: #fff; max-width: 1000px; margin: 2em auto;
  padding: 0 1em }
h1 { font-size: 20px } h2 { font-size: 16px; margin-top: 2em } svg { max-width: 100%; height: auto; color: #202124 }
svg text { font: 11px system-ui, sans-serif; fill: currentColor } pre { overflow-x: auto } .few { display: flex; flex-wrap: wrap }
table { border-collapse: collapse; font-size: 13px } td, th { padding: 2px 10px 2px 0; text-align: left; white-space: nowrap }
th { border-bottom: 1px solid #9aa0a6 } .wide { overflow-x: auto }
@media (prefers-color-scheme: dark) { body, svg { color: #e8eaed; background: #1f1f1f } }
"""
WIDE, HIGH, LEFT, TOP, BELOW = 960, 300, 70, 24, 44
SMALL = 310                               # the width of one of several plots
ROOM = 0.04                               # between the axes and the marks next to them


def write_html(report: Report, path: Path) -> None:
    """Writes the report, whole or not at all. StorageError, AccessError or OutputError of the file."""
    replace_file(path, html_of(report))


def html_of(report: Report) -> str:
    title = f"Study {report.name}"
    parts = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(line)}</p>" for line in heading(report))]
    if report.front():
        for name, drawn in sections(report):
            parts += [f"<h2>{escape(name)}</h2>", drawn]
    else:
        parts.append("<p>No trial has a result yet.</p>")
    return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
            f'</head>\n<body>\n{chr(10).join(parts)}\n</body></html>\n')


def sections(report: Report) -> Iterator[tuple[str, str]]:
    first, *others = report.objectives
    for other in others:
        yield f"Front: {first.text} and {other.text}", front_plot(report, first, other)
    if report.best_so_far():
        yield f"Best {first.name} so far", so_far_plot(report, first)
        yield "What the groups were at work on", work_plot(report)
    yield f"{first.name} by rung", curves_plot(report, first) + f"<pre>{escape(chr(10).join(rung_lines(report)))}</pre>"
    yield f"Keys against {first.name}", '<div class="few">' + "".join(key_plots(report, first)) + "</div>"
    yield "All keys at once", parallel_plot(report, first)
    yield "Trials", f'<div class="wide">{trials_table(report)}</div>'


def words(report: Report, trial: Trial) -> str:
    """What the pointer tells of a trial."""
    results = ", ".join(told(report.value(trial, one), one) for one in report.objectives)
    return f"trial {trial.id}, {epochs_of(report, trial)} {report.table.unit}: {results}\n{values_text(trial)}"


def shade(report: Report, rung: int) -> str:
    return colour(0.1 + 0.8 * rung / max(1, report.table.last))


def front_plot(report: Report, vertical: Objective, horizontal: Objective) -> str:
    """Trials as far as the front's; those of the front have a ring, and a line through them."""
    front = report.front()
    rung, on_front = front[0].reached, {trial.id for trial in front}
    points = report.points(horizontal, vertical, rung)
    plot = Plot(WIDE, HIGH, f"{vertical.name} against {horizontal.name}")
    x = scale_of([p[0] for p in points], LEFT, WIDE - 20, room=ROOM)
    y = scale_of([p[1] for p in points], HIGH - BELOW, TOP, log=False, room=ROOM)
    plot.line([(x.at(a), y.at(b)) for a, b, number in sorted(points) if number in on_front], LINE)
    for a, b, number in points:
        plot.circle(x.at(a), y.at(b), shade(report, rung), words(report, report.table.trials[number]), ring=number in on_front)
    plot.horizontal(x, HIGH - BELOW, horizontal.name)
    plot.vertical(y, LEFT, vertical.name)
    return plot.text()


def so_far_plot(report: Report, first: Objective) -> str:
    spans, best = sorted(report.spans(), key=lambda span: span.stop), report.best_so_far()
    found = [(span, value) for span in spans
             if (value := report.value(report.table.trials[span.trial], first, span.rung)) is not None]
    plot = Plot(WIDE, HIGH, f"best {first.name} so far")
    x = scale_of([0.0, report.seconds()], LEFT, WIDE - 20, log=False)
    y = scale_of([value for _, value in found], HIGH - BELOW, TOP, log=False, room=ROOM)
    for span, value in found:
        plot.circle(x.at(span.stop), y.at(value), shade(report, span.rung), words(report, report.table.trials[span.trial]),
                    radius=3)
    corners = [(x.at(best[0][0]), y.at(best[0][1]))]
    for (_, was), (seconds, value) in zip(best, best[1:]):
        corners += [(x.at(seconds), y.at(was)), (x.at(seconds), y.at(value))]
    plot.line([*corners, (x.last, corners[-1][1])], LINE, width=2)
    plot.horizontal(x, HIGH - BELOW, "seconds")
    plot.vertical(y, LEFT, first.name)
    return plot.text()


def curves_plot(report: Report, first: Objective) -> str:
    """A line for each trial through its rungs, coloured by the one that it has reached."""
    epochs = report.table.epochs
    curves = [(trial, [(epochs[rung], value) for rung in sorted(trial.results)
                       if (value := report.value(trial, first, rung)) is not None]) for trial in report.table.trials]
    plot = Plot(WIDE, HIGH, f"{first.name} by rung")
    x = scale_of(list(epochs), LEFT, WIDE - 20, log=len(epochs) > 2, room=ROOM, marks=epochs)
    y = scale_of([value for _, curve in curves for _, value in curve], HIGH - BELOW, TOP, log=False, room=ROOM)
    for trial, curve in sorted(curves, key=lambda one: one[0].reached):
        points = [(x.at(a), y.at(b)) for a, b in curve]
        if len(points) > 1:
            plot.line(points, shade(report, trial.reached), words(report, trial), width=1.6)
        for place in points:
            plot.circle(*place, shade(report, trial.reached), words(report, trial), radius=2.5)
    plot.horizontal(x, HIGH - BELOW, report.table.unit)
    plot.vertical(y, LEFT, first.name)
    return plot.text()


def work_plot(report: Report) -> str:
    """A row for each group, a bar for each piece of work; failed ones are red."""
    spans, used = report.spans(), report.utilisation()
    groups = 1 + max((span.group for span in spans), default=0)
    plot = Plot(WIDE, TOP + 18 * groups + BELOW, "what the groups were at work on")
    x = scale_of([0.0, report.seconds()], LEFT, WIDE - 20, log=False)
    for group in range(groups):
        plot.word(LEFT - 8, TOP + 18 * group + 13, f"group {group}", "end")
    for span in spans:
        trial = report.table.trials[span.trial]
        plot.bar(x.at(span.start), TOP + 18 * span.group + 2, x.at(span.stop) - x.at(span.start), 14,
                 WORST if span.failed else shade(report, span.rung),
                 f"group {span.group}, to {report.table.unit[:-1]} {report.table.epochs[span.rung]}, "
                 f"{span.stop - span.start:.3g} s" + (f", {trial.code}" if span.failed else "") + f"\n{words(report, trial)}")
    plot.horizontal(x, TOP + 18 * groups + 2, "seconds" + (f", at work {used:.1%} of the time" if used is not None else ""))
    return plot.text()


def key_plots(report: Report, first: Objective) -> Iterator[str]:
    trials = [trial for trial in report.table.trials if report.value(trial, first) is not None]
    y = scale_of([report.value(trial, first) for trial in trials], 200 - BELOW, TOP, log=False, room=ROOM)
    for key in report.keys:
        values = [plotted(trial.values.get(key)) for trial in trials]
        plot = Plot(SMALL, 200, f"{first.name} against {key}")
        x = scale_of(values, 60, SMALL - 20, room=ROOM)
        for trial, value in zip(trials, values):
            plot.circle(x.at(value), y.at(report.value(trial, first)), shade(report, trial.reached), words(report, trial),
                        radius=3)
        plot.horizontal(x, 200 - BELOW, key)
        plot.vertical(y, 60, first.name)
        yield plot.text()


def parallel_plot(report: Report, first: Objective) -> str:
    """A line for each trial through its values; the last axis, and the colour, are the objective. The best are drawn last."""
    trials = [trial for trial in ranked(report)[::-1] if report.value(trial, first) is not None]
    results = [report.value(trial, first) for trial in trials]
    plot = Plot(WIDE, HIGH + 20, "all keys at once")
    gap = (WIDE - LEFT - 60) / max(1, len(report.keys))
    axes: list[tuple[float, Scale, str]] = [
        (LEFT + gap * number, scale_of([plotted(trial.values.get(key)) for trial in trials], HIGH - 30, TOP + 10), key)
        for number, key in enumerate(report.keys)]
    goal = scale_of(results, HIGH - 30, TOP + 10, log=False)
    for trial, result in zip(trials, results):
        share = (goal.at(result) - goal.first) / (goal.last - goal.first)
        places = [(round(x, 1), scale.at(plotted(trial.values.get(key)))) for x, scale, key in axes]
        plot.line([*places, (WIDE - 60, goal.at(result))], colour(share if first.higher else 1 - share), words(report, trial),
                  opacity=0.75)
    for number, (x, scale, key) in enumerate([*axes, (WIDE - 60, goal, first.name)]):
        plot.vertical(scale, round(x, 1), key, above=number % 2 == 0)
    return plot.text()


def plotted(value: object) -> object:
    """A value as it stands on an axis: a number, or its text."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else value_text(value)


def trials_table(report: Report) -> str:
    head = ["trial", "state", report.table.unit, *(one.text for one in report.objectives), *report.keys]
    rows = [[str(trial.id), f"{trial.state} {trial.code}".strip(), epochs_of(report, trial),
             *(shown(report.value(trial, one)) for one in report.objectives),
             *(value_text(trial.values.get(key)) for key in report.keys)] for trial in ranked(report)]
    cells = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f"<table><tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>\n{cells}</table>"
