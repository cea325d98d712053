"""The front of accuracy against the time of a training step, as a chart and as rows of a table; benchmarks/front.py measures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from shapes import WIDTH, Theme, box, line, picture, text

Record = dict[str, Any]
Place = tuple[float, float]
Box = tuple[float, float, float, float]           # left, top, right, bottom

MARKS = ("lenet", "resnet20")                     # nets to compare with, which are not of the efficient ones
LEFT, RIGHT, TOP, BOTTOM = 64, WIDTH - 24, 92, 420
RADIUS = 5
ROUNDS = 50                                       # of labels that look for a better place
HEADS = ("model", "accuracy", "parameters", "million multiply-adds", "ms a step", "ms a sample", "J a step", "command", "date")


def on_front(record: Record, records: list[Record]) -> bool:
    """Nothing else is better in time or accuracy and in the other no worse."""
    mine = record["step_s"], -record["accuracy"]
    others = [(o["step_s"], -o["accuracy"]) for o in records]
    return not any(o != mine and o[0] <= mine[0] and o[1] <= mine[1] for o in others)


def rows(records: list[Record]) -> list[str]:
    """Lines of a table in Markdown; those of the front are bold."""
    made = ["| " + " | ".join(HEADS) + " |", "|" + "---|" * len(HEADS)]
    for r in records:
        name = f"**{r['what']}**" if on_front(r, records) else r["what"]
        joules = "" if r["step_j"] is None else f"{r['step_j']:.2f}"
        made.append(f"| {name} | {r['accuracy']:.4f} | {r['parameters']:,} | {r['multiply_adds'] / 1e6:.2f} | "
                    f"{1e3 * r['step_s']:.1f} | {1e3 * r['sample_s']:.3f} | {joules} | `{r['command']}` | {r['date']} |")
    return made


def page(records: list[Record]) -> str:
    """The picture and the table, as docs/performance.md has them; "" of no records."""
    if not records:
        return ""
    first = records[0]
    return "\n".join([
        "<picture>", '  <source media="(prefers-color-scheme: dark)" srcset="figures/front-dark.svg">',
        f'  <img src="figures/front-light.svg" width="{WIDTH}" alt="Chart: accuracy on Fashion-MNIST against time">',
        "</picture>", "", f"Trained for {first['length']}, seed {first['seed']}, ranks: {first['ranks']}; steps are those of one "
        f"thread of: {first['cpu']}.", "", *rows(records)]) + "\n"


def drawn(c: Theme, records: list[Record]) -> str:
    """An SVG; the axis of time is logarithmic, and a line joins what is on the front. "" of no records."""
    if not records:
        return ""
    times, reached = [1e3 * r["step_s"] for r in records], [r["accuracy"] for r in records]
    low, high = math.log10(min(times)) - 0.12, math.log10(max(times)) + 0.12
    least, most = min(reached) - 0.004, max(reached) + 0.004

    def x_of(ms: float) -> float:
        return round(LEFT + (math.log10(ms) - low) / (high - low) * (RIGHT - LEFT), 1)

    def y_of(accuracy: float) -> float:
        return round(BOTTOM - (accuracy - least) / (most - least) * (BOTTOM - TOP), 1)
    shapes = [text(16, 26, "Fashion-MNIST: accuracy against the time of a training step", c.text, 15, weight="bold"),
              text(16, 48, f"64 images on one thread; trained for {records[0]['length']}. Up and to the left is better.",
                   c.faint, 12)]
    shapes += legend(c)
    for ms in time_ticks(10 ** low, 10 ** high):
        shapes += [line([(x_of(ms), TOP), (x_of(ms), BOTTOM)], c.line, 0.7, "2 3"),
                   text(x_of(ms), BOTTOM + 18, f"{ms:g} ms", c.faint, 12, "middle")]
    for accuracy in accuracy_ticks(least, most):
        shapes += [line([(LEFT, y_of(accuracy)), (RIGHT, y_of(accuracy))], c.line, 0.7, "2 3"),
                   text(LEFT - 8, y_of(accuracy) + 4, f"{accuracy:.3f}".rstrip("0"), c.faint, 12, "end")]
    points = [(x_of(ms), y_of(accuracy)) for ms, accuracy in zip(times, reached)]
    front = sorted(point for point, r in zip(points, records) if on_front(r, records))
    shapes.append(line(front, c.accent, 1.5, "6 4"))
    labels = [(r["what"], f"{r['accuracy']:.3f}, {ms:.3g} ms") for r, ms in zip(records, times)]
    for (x, y), r in zip(points, records):
        colour = c.series[2] if r["what"] in MARKS else c.series[0]
        shapes.append(box(x - RADIUS, y - RADIUS, 2 * RADIUS, 2 * RADIUS, colour if on_front(r, records) else c.fill, colour,
                          RADIUS))
    for (name, figures), (left, top, *_) in zip(labels, placed(points, front, labels)):
        shapes += [text(left, top + 11, name, c.text, 12), text(left, top + 24, figures, c.faint, 11)]
    said = "; ".join(f"{name} {figures}" for name, figures in labels)
    return picture(BOTTOM + 32, f"Accuracy on Fashion-MNIST, the time of a step: {said}", shapes)


def legend(c: Theme) -> list[str]:
    y = 70
    return [box(16, y - 9, 10, 10, c.series[0], c.series[0], RADIUS), text(32, y, "efficient nets", c.text, 12),
            box(132, y - 9, 10, 10, c.series[2], c.series[2], RADIUS), text(148, y, "marks", c.text, 12),
            line([(204, y - 4), (232, y - 4)], c.accent, 1.5, "6 4"),
            text(240, y, "the front: nothing else is faster and as accurate; hollow points are behind it", c.text, 12)]


def time_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between two numbers of milliseconds."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [times * 10.0 ** power for power in powers for times in (1, 2, 5) if low <= times * 10.0 ** power <= high]


def accuracy_ticks(least: float, most: float) -> list[float]:
    step = next(step for step in (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2) if (most - least) / step <= 7)
    return [n * step for n in range(math.ceil(least / step), math.floor(most / step) + 1)]


def placed(points: list[Place], front: list[Place], labels: list[tuple[str, str]]) -> list[Box]:
    """For each label a place beside its point where it covers no point, no other label and, if it can, not the line.

    Each label in turn takes the best place while the others stay where they are, until none has a better one.
    """
    dots: list[Box] = [(x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS) for x, y in points]
    along = [(x0 + (x1 - x0) * k / 50, y0 + (y1 - y0) * k / 50)
             for (x0, y0), (x1, y1) in zip(front, front[1:]) for k in range(51)]
    rooms = []
    for point, words in zip(points, labels):
        room = list(candidates(point, 6.6 * max(map(len, words)), 28))
        rooms.append([b for b in room if b[0] >= LEFT and b[2] <= WIDTH - 4 and b[1] >= TOP - 14 and b[3] <= BOTTOM] or room)
    made = [room[0] for room in rooms]

    def cost(b: Box, others: list[Box]) -> int:
        return 100 * sum(overlap(b, other) for other in others) + sum(b[0] <= x <= b[2] and b[1] <= y <= b[3] for x, y in along)
    for _ in range(ROUNDS):
        before = list(made)
        for i, room in enumerate(rooms):
            others = [*dots, *made[:i], *made[i + 1:]]
            made[i] = min(room, key=lambda b: cost(b, others))
        if made == before:
            break
    return made


def candidates(point: Place, width: float, height: float) -> Iterator[Box]:
    """Beside, above and below a point, then in its corners."""
    (x, y), away = point, RADIUS + 5
    sides = {"right": x + away, "middle": x - width / 2, "left": x - away - width}
    levels = {"middle": y - height / 2, "above": y - away - height, "below": y + away}
    for side, level in (("right", "middle"), ("left", "middle"), ("middle", "above"), ("middle", "below"), ("right", "below"),
                        ("right", "above"), ("left", "above"), ("left", "below")):
        yield round(sides[side], 1), round(levels[level], 1), round(sides[side] + width, 1), round(levels[level] + height, 1)


def overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
