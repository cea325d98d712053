"""Draws the pictures of README.md, and writes the tables of docs/performance.md and the line of layers in README.md.

    python docs/figures/draw.py                       # or: make figures
    python docs/figures/draw.py --add results.json    # first takes over what a benchmark wrote with --json results.json

`results.jsonl` holds one measurement a line, as the benchmarks write them. A measurement that is added takes the place of an
older one of the same thing. Each picture is written twice, for a light page and a dark one. The same measurements give the
same bytes.
"""

from __future__ import annotations

import argparse
import configparser
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import front_chart  # noqa: E402
from shapes import THEMES, WIDTH, Theme, arrow, box, line, picture, text  # noqa: E402

ROOT = HERE.parents[1]
RESULTS, PAGES = HERE / "results.jsonl", [ROOT / "README.md", ROOT / "docs/performance.md"]

Record = dict[str, Any]
# The keys of a record that say what was measured. The other keys say how and where it was measured, and what came out.
SUBJECT = ("bench", "model", "peer", "op", "what", "algorithm", "bytes", "dtype", "wire", "parameters", "precision",
           "node_shared", "ranks", "schedule", "stages", "micro_batches")


# ---- the way of the data ------------------------------------------------------------------------------------------------------

# x, width, what happens, and the folder that does it: on each rank, then once for all ranks
COLUMNS = [(120, 68, "loader", "data"), (204, 68, "model", "models, nn"), (288, 52, "loss", "nn"),
           (356, 80, "backward", "autograd"), (452, 72, "buckets", "parallel"), (640, 84, "optimizer", "optim")]
SHARED = [(16, 80, "HDF5 files", "data"), (552, 64, "sum", "comm"), (744, 80, "checkpoint", "checkpoint")]
LANES, HEIGHT = [(62, "rank 0"), (158, "rank 1")], 40
NOTES = [(16, "Files are examined once, then read", "with mmap: no HDF5 in a rank."),
         (262, "A full bucket is sent while backward", "still computes the others."),
         (516, "Ranks of a node add in shared memory,", "nodes exchange messages by MPI.")]


def way(c: Theme) -> str:
    """Each rank's samples from left to right; the ranks meet in the sum of gradients."""
    top, bottom = LANES[0][0], LANES[1][0] + HEIGHT
    middle = (top + bottom) / 2
    shapes = [text(16, 24, "One training step on two ranks", c.text, 15, weight="bold"),
              text(WIDTH - 16, 24, "below each column: its folder of mpitrain/", c.faint, 12, "end")]
    shapes += [arrow([(682, end), (682, middle), (238, middle), (238, end)], c.accent)     # first: behind the sum
               for end in (top + HEIGHT, bottom - HEIGHT)]
    shapes += [box(290, middle - 11, 190, 22, c.fill, radius=11),
               text(385, middle + 4, "the same new parameters", c.accent, 12, "middle")]
    stops = sorted([*COLUMNS, *SHARED])
    for y, rank in LANES:
        shapes.append(text(154, y - 8, rank, c.faint, 12, "middle"))
        shapes += [arrow([(x + width, y + HEIGHT / 2), (after[0], y + HEIGHT / 2)], c.faint)
                   for (x, width, *_), after in zip(stops, stops[1:])]
    for columns, rows, height in ((COLUMNS, [y for y, _ in LANES], HEIGHT), (SHARED, [top], bottom - top)):
        for x, width, words, folder in columns:
            for y in rows:
                shapes += [box(x, y, width, height, c.fill, c.accent if words == "sum" else c.line),
                           text(x + width / 2, y + height / 2 + 4.5, words, c.text, 13, "middle")]
            shapes.append(text(x + width / 2, 220, folder, c.faint, 12, "middle"))
    shapes += [text(x, y, words, c.faint, 12) for x, *lines in NOTES for y, words in zip((256, 273), lines)]
    return picture(286, "One training step: samples go from HDF5 files through loader, model, loss and backward into buckets of "
                        "gradients; the ranks' buckets are summed; every rank's optimizer makes the same new parameters, which "
                        "are written as one checkpoint.", shapes)


# ---- charts -------------------------------------------------------------------------------------------------------------------

class Bar(NamedTuple):
    series: int                                   # its colour
    name: str
    record: Record


class Group(NamedTuple):
    name: str
    note: str
    bars: list[Bar]


AXIS = "Their time divided by ours: beyond the line at 1x mpitrain is faster. Whiskers are quartiles, where they were recorded."


def chart(c: Theme, title: str, series: list[str], groups: list[Group], longest: float) -> str:
    """Horizontal bars of `ratio` from 0 to `longest`, with the quartiles of the pairs where they were recorded."""
    left, right, step, gap, top = 196, WIDTH - 60, 17, 13, 86
    scale = (right - left) / longest
    heights = [max(step * len(group.bars), 32) for group in groups]
    bottom = top + sum(heights) + gap * (len(groups) - 1) + 8
    shapes = [text(16, 26, title, c.text, 15, weight="bold"), text(16, 48, AXIS, c.faint, 12)]
    for tick in range(int(longest) + 1):
        x = left + scale * tick
        shapes.append(line([(x, top - 8), (x, bottom)], *((c.text, 1.2, "") if tick == 1 else (c.line, 0.7, "2 3"))))
        shapes.append(text(x, bottom + 18, f"{tick}x" if tick else "0", c.faint, 12, "middle"))
    x = left
    for index, name in enumerate(series):
        shapes += [box(x, 61, 11, 11, c.series[index], radius=2), text(x + 17, 71, name, c.text, 12)]
        x += 38 + 7.2 * len(name)
    y = float(top)
    for group, high in zip(groups, heights):
        middle = y + high / 2
        shapes += [text(16, middle - 2, group.name, c.text, 13, weight="bold"), text(16, middle + 14, group.note, c.faint, 12)]
        for index, bar in enumerate(group.bars):
            shapes += draw_bar(c, left, middle + step * (index - len(group.bars) / 2), scale, bar)
        y += high + gap
    spoken = (f"{group.name}: " + ", ".join(f"{bar.name} {number(bar.record['ratio'])}" for bar in group.bars)
              for group in groups)
    return picture(bottom + 30, f"{title}. " + "; ".join(spoken), shapes)


def draw_bar(c: Theme, left: float, y: float, scale: float, bar: Bar) -> list[str]:
    ratio, low, high = (bar.record.get(key) for key in ("ratio", "ratio_low", "ratio_high"))
    shapes = [box(left, y + 1, round(scale * ratio, 1), 13, c.series[bar.series], radius=2)]
    end = ratio
    if low is not None and high is not None:
        end, ends = max(ratio, high), [round(left + scale * value, 1) for value in (low, high)]
        shapes.append(line([(x, y + 7.5) for x in ends], c.text, 1.5))
        shapes += [line([(x, y + 4.5), (x, y + 10.5)], c.text, 1.5) for x in ends]
    return [*shapes, text(round(left + scale * end + 6, 1), y + 12, number(ratio), c.text, 12)]


MODELS = {"mlp": "MLP", "lenet": "LeNet-5", "resnet20": "ResNet-20", "gpt-nano": "GPT, width 128", "gpt-baby": "GPT, width 384"}
PEERS = {"eager": "PyTorch eager", "channels_last": "PyTorch channels_last", "compiled": "torch.compile", "jax": "JAX",
         "ddp": "PyTorch DDP", "ddp_channels_last": "DDP channels_last"}


def number(value: float) -> str:
    return f"{value:.3g}"


def seconds_of(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def only(records: Iterable[Record], **wanted: Any) -> list[Record]:
    return [record for record in records if all(record.get(key) == value for key, value in wanted.items())]


def one_rank(c: Theme, records: list[Record]) -> str:
    peers = ["eager", "channels_last", "compiled", "jax"]
    groups = []
    for model in ("mlp", "lenet", "resnet20", "gpt-nano", "gpt-baby"):
        found = {record["peer"]: record for record in only(records, bench="train_vs_peers", model=model, ranks=1)}
        bars = [Bar(peers.index(peer), PEERS[peer], found[peer]) for peer in peers if peer in found]
        groups.append(Group(MODELS[model], f"{seconds_of(found['eager']['seconds'])} a step", bars))
    return chart(c, "A training step on one thread: how many times faster than PyTorch and JAX",
                 [PEERS[peer] for peer in peers], groups, 7)


def two_ranks(c: Theme, records: list[Record]) -> str:
    series = ["PyTorch DDP (gloo)", "DDP channels_last", "MPI_Allreduce"]
    groups = []
    for model in ("mlp", "gpt-nano", "resnet20"):
        found = {record["peer"]: record for record in only(records, bench="train_vs_peers", model=model, ranks=2)}
        groups.append(Group(MODELS[model], "a training step", [
            Bar(index, series[index], found[peer]) for index, peer in enumerate(("ddp", "ddp_channels_last")) if peer in found]))
    together, = only(records, bench="exchange_vs_ddp", ranks=2)
    groups.append(Group("Gradients to update", "10 million parameters", [Bar(0, series[0], together)]))
    for size, name in ((512, "Sum of 512 B"), (1 << 16, "Sum of 64 KiB"), (1 << 20, "Sum of 1 MiB"), (1 << 24, "Sum of 16 MiB")):
        record, = only(records, bench="allreduce", algorithm="shared", bytes=size, ranks=2)
        groups.append(Group(name, "in shared memory", [Bar(2, series[2], record)]))
    return chart(c, "Two ranks on one node: how many times faster than PyTorch's DDP and MPI_Allreduce",
                 series, groups, 6)


PICTURES: dict[str, Callable[[Theme, list[Record]], str]] = {
    "way": lambda theme, _: way(theme), "one-rank": one_rank, "two-ranks": two_ranks,
    "front": lambda theme, records: front_chart.drawn(theme, only(records, bench="front"))}


# ---- tables -------------------------------------------------------------------------------------------------------------------

def in_bytes(count: int) -> str:
    return next(f"{count // size} {unit}" for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)) if count % size == 0)


TABLES: dict[str, Callable[[Record], str]] = {    # a benchmark, and what one of its records is about
    "train_vs_peers": lambda r: (f"{MODELS.get(r['model'], r['model'])}, {r['ranks']} rank{'s' * (r['ranks'] > 1)}, "
                                 f"beside {PEERS.get(r['peer'], r['peer'])}"),
    "kernels_vs_torch": lambda r: f"{r['op']} ({r['what']})",
    "allreduce": lambda r: f"{r['algorithm']}, {in_bytes(r['bytes'])}, {r['ranks']} ranks, beside MPI_Allreduce",
    "allreduce_vs_gloo": lambda r: f"{r['algorithm']}, {in_bytes(r['bytes'])}, {r['ranks']} ranks, beside gloo",
    "exchange_vs_ddp": lambda r: f"{r['algorithm']}, {r['parameters'] // 10 ** 6} million parameters, {r['ranks']} ranks",
    "pipeline_vs_torch": lambda r: f"{r['model']}, {r['schedule']}, {r['stages']} stages",
    "first_step": lambda r: f"{MODELS.get(r['model'], r['model'].upper())}, beside a PyTorch script",
}


def table(bench: str, records: list[Record]) -> str:
    if bench == "front":
        return front_chart.page(only(records, bench="front"))
    rows = ["| what | times faster | quartiles | our time | command | date |", "|---|---|---|---|---|---|"]
    for r in only(records, bench=bench):
        quartiles = f"{number(r['ratio_low'])} to {number(r['ratio_high'])}" if "ratio_low" in r else ""
        cells = TABLES[bench](r), number(r["ratio"]), quartiles, seconds_of(r["seconds"]) if "seconds" in r else ""
        rows.append(f"| {' | '.join(cells)} | `{r['command']}` | {r['date']} |")
    return "\n".join(rows) + "\n"


def layers() -> str:
    """The import contract of setup.cfg, from the package that may import all others to the one that imports none."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    rows = setup["importlinter:contract:flow"]["layers"].replace("mpitrain.", "").split("\n")
    return textwrap.fill("`" + " > ".join(row.strip() for row in rows if row.strip()) + "`", 160) + "\n"


def fill(page: str, records: list[Record]) -> str:
    """The page with what stands between two marks, ``<!-- BENCH -->`` or ``<!-- layers -->`` and ``<!-- end -->``, made anew."""
    def made(match: re.Match[str]) -> str:
        return match[1] + (layers() if match[2] == "layers" else table(match[2], records)) + match[4]
    return re.sub(r"(<!-- (\w+) -->\n)(.*?)(<!-- end -->)", made, page, flags=re.DOTALL)


# ---- files --------------------------------------------------------------------------------------------------------------------

def load(path: Path) -> list[Record]:
    return [json.loads(row) for row in path.read_text().splitlines() if row]


def subject(record: Record) -> tuple[Any, ...]:
    """What was measured: the same for two measurements of one thing."""
    return tuple(record.get(key) for key in SUBJECT)


def merge(old: list[Record], new: list[Record]) -> list[Record]:
    found = {subject(record): record for record in old}
    found.update((subject(record), record) for record in new)
    return list(found.values())


def drawn(records: list[Record]) -> dict[str, str]:
    """File name -> contents of every picture of which there are measurements."""
    made = {f"{name}-{mode}.svg": draw(theme, records) for name, draw in PICTURES.items() for mode, theme in THEMES.items()}
    return {name: contents for name, contents in made.items() if contents}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--add", type=Path, action="append", default=[], metavar="FILE",
                        help="what a benchmark wrote with --json")
    records = load(RESULTS)
    for path in parser.parse_args().add:
        records = merge(records, load(path))
    RESULTS.write_text("".join(json.dumps(record) + "\n" for record in records))
    for name, contents in drawn(records).items():
        (HERE / name).write_text(contents)
    for page in PAGES:
        page.write_text(fill(page.read_text(), records))


if __name__ == "__main__":
    main()
