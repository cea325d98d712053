"""`mpitrain bench published`: published figures, what the step model predicts for them, and the error. It needs no MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from mpitrain.bench import arguments
from mpitrain.bench.published.comparison import Comparison
from mpitrain.bench.report import Report

SETS = ("horovod", "ec2", "dgx1", "megatron")
WIDTH = 44


def run(names: str | None, json: Path | None) -> int:
    """Prints the sets of these names, or all, and writes an object for each. UsageError for a name that there is not."""
    chosen = arguments.names(names, SETS, "--sets") if names is not None else list(SETS)
    report = Report(0, json)
    for name in chosen:
        for comparison in made(name):
            show(comparison, report)
    return 0


def made(name: str) -> list[Comparison]:
    """The comparisons of a set."""
    from mpitrain.bench.published import megatron, vision
    if name == "megatron":
        return megatron.tables()
    single: dict[str, Callable[[], Comparison]] = {"horovod": vision.horovod, "ec2": vision.ec2, "dgx1": vision.dgx1}
    return [single[name]()]


def show(found: Comparison, report: Report) -> None:
    machine = found.machine
    report.line(f"{found.title}\nmachine {machine.name}; without a source in it: {', '.join(machine.assumed) or 'nothing'}\n"
                f"{'':<{WIDTH}}{'unit':>10}{'published':>11}{'predicted':>11}{'error':>9}{'bar':>7}")
    for point in found.points:
        digits = 2 if point.unit == "share" else 0 if point.published >= 100 else 1
        bar = "" if not point.bar else f"{point.bar:.2f}" if point.unit == "share" else f"{point.bar:.0%}"
        error = f"{point.error:+.3f}" if point.unit == "share" else f"{point.error:+.1%}"
        report.line(f"{point.what:<{WIDTH}}{point.unit:>10}{point.published:>11.{digits}f}{point.predicted:>11.{digits}f}"
                    f"{error:>9}{bar:>7}{'' if point.within else '  outside'}")
    report.line(f"mean error {found.mean_error:.1%}{f' (bar {found.mean_bar:.0%})' if found.mean_bar else ''}")
    for claim in found.claims:
        report.line(f"{'as published' if claim.holds else 'NOT as published'}: {claim.text}\n    {claim.shown}")
    report.line("")
    report.record(record(found))


def record(found: Comparison) -> dict[str, object]:
    points: Sequence[dict[str, object]] = [
        {"what": point.what, "unit": point.unit, "published": point.published, "predicted": point.predicted, "error": point.error,
         "bar": point.bar or None} for point in found.points]
    return {"bench": "published", "title": found.title, "source": found.source, "machine": found.machine.name,
            "assumed": list(found.machine.assumed), "points": points, "mean_error": found.mean_error,
            "claims": [{"text": claim.text, "holds": claim.holds, "shown": claim.shown} for claim in found.claims]}
