"""Megatron-LM's tables 1 and 2, and what its text says of figures 12 to 17, beside the step model's predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from mpitrain.bench.published.comparison import Claim, Comparison, Point, by_number, table
from mpitrain.bench.published.gpt import Gpt, Layout, step_of, zero3_step_of
from mpitrain.machines import MachineFile, load_machine

UNIT = "TFLOP/s"
MEAN_BAR, LARGEST_BAR, ZERO3_BAR = 0.06, 0.12, 0.25
NODE = 8
CLAIMED_GPUS = 64                                              # of figures 13 to 15
SIZES = (2, 4, 8, 16, 32)                                      # of the group that they vary
FIGURE_13, FIGURE_14 = Gpt(32, 20_480, 128), Gpt(32, 3_840, 32)
FIGURE_12, FIGURE_17 = Gpt(96, 12_288, 96), Gpt(80, 12_288, 96)


def tables() -> list[Comparison]:
    """TFLOP/s a GPU of table 1's ten models, of table 2's in three dimensions and by ZeRO-3, and the claims."""
    data = table("megatron")
    machine = load_machine(data["machine"])
    weak, cut, alone = table_1(data, machine), table_2(data, machine), zero3(data, machine)
    claims = [best_tensor_size(machine), falls_with_pipeline(machine), falls_with_tensor(machine), interleaving(machine),
              recomputation(machine), cut_in_three_beats_zero3(cut, alone)]
    return [Comparison(f"{data['title']}: {what}", data["source"], machine, points, said, bar)
            for what, points, said, bar in (("table 1", weak, (), MEAN_BAR), ("table 2", [*cut, *alone], claims, 0.0))]


def throughput(gpt: Gpt, layout: Layout, seconds: float) -> float:
    """The paper's FLOPs of a step, for each GPU, in TFLOP/s."""
    return gpt.flops(layout.batch) / layout.ranks / seconds / 1e12


def chunks_of(layers: int, pipeline: int) -> int:
    """Two chunks a stage, or the next number that divides its layers."""
    depth = layers // pipeline
    return 1 if pipeline == 1 or depth < 2 else next(chunks for chunks in range(2, depth + 1) if depth % chunks == 0)


def table_1(data: Mapping[str, Any], machine: MachineFile) -> list[Point]:
    points = []
    for numbers in data["rows"]:
        row = dict(zip(data["columns"], numbers))
        gpt = Gpt(row["layers"], row["width"], row["heads"])
        layout = Layout(row["tensor"], row["pipeline"], row["gpus"], row["batch"], chunks=chunks_of(gpt.layers, row["pipeline"]))
        points.append(Point(f"{row['billions']} B, {row['gpus']} GPUs, t {row['tensor']}, p {row['pipeline']}", UNIT,
                            row["tflops"], throughput(gpt, layout, step_of(gpt, layout, machine).total), LARGEST_BAR))
    return points


def table_2(data: Mapping[str, Any], machine: MachineFile) -> list[Point]:
    points = []
    for row in data["ptd"]:
        gpt, pipeline = Gpt(row["layers"], row["width"], row["heads"]), row["model_parallel"] // NODE
        for gpus, published in by_number(row["tflops"]).items():
            layout = Layout(NODE, pipeline, gpus, row["batch"], chunks=chunks_of(gpt.layers, pipeline))
            points.append(Point(f"{row['billions']} B, {gpus} GPUs, t {NODE}, p {pipeline}", UNIT, published,
                                throughput(gpt, layout, step_of(gpt, layout, machine).total)))
    return points


def zero3(data: Mapping[str, Any], machine: MachineFile) -> list[Point]:
    points, machine = [], replace(machine, overlap=data["zero3_overlap"])
    for row in data["zero3"]:
        gpt, batch, micro = Gpt(row["layers"], row["width"], row["heads"]), by_number(row["batch"]), by_number(row["micro"])
        for gpus, published in by_number(row["tflops"]).items():
            layout = Layout(1, 1, gpus, int(batch[gpus]), int(micro[gpus]))
            points.append(Point(f"{row['billions']} B, {gpus} GPUs, ZeRO-3", UNIT, published,
                                throughput(gpt, layout, zero3_step_of(gpt, layout, machine).total), ZERO3_BAR))
    return points


def rates(gpt: Gpt, layouts: Mapping[int, Layout], machine: MachineFile) -> dict[int, float]:
    return {key: throughput(gpt, layout, step_of(gpt, layout, machine).total) for key, layout in layouts.items()}


def shown(by_batch: Mapping[int, Mapping[int, float]], letter: str) -> str:
    """``B 32: t 2 59, t 4 81; B 128: ...``"""
    return "; ".join(f"B {batch}: " + ", ".join(f"{letter} {key} {rate:.0f}" for key, rate in found.items())
                     for batch, found in by_batch.items())


def best_tensor_size(machine: MachineFile) -> Claim:
    by_batch = {batch: rates(FIGURE_13, {t: Layout(t, CLAIMED_GPUS // t, CLAIMED_GPUS, batch) for t in SIZES}, machine)
                for batch in (32, 128)}
    best = [max(found, key=lambda t: found[t]) for found in by_batch.values()]
    return Claim("figure 13: of 64 GPUs, peak performance when the tensor-parallel size is that of a node, 8",
                 best == [NODE] * len(best), shown(by_batch, "t"))


def falls_with_pipeline(machine: MachineFile) -> Claim:
    by_batch = {batch: rates(FIGURE_14, {p: Layout(1, p, CLAIMED_GPUS, batch) for p in SIZES}, machine)
                for batch in (32, 128, 512)}
    return Claim("figure 14: for each batch size, throughput decreases as the pipeline-parallel size increases",
                 all(map(falling, by_batch.values())), shown(by_batch, "p"))


def falls_with_tensor(machine: MachineFile) -> Claim:
    by_batch = {batch: rates(FIGURE_14, {t: Layout(t, 1, CLAIMED_GPUS, batch) for t in SIZES}, machine)
                for batch in (128, 512)}
    crossing = all(steepest(found) >= NODE for found in by_batch.values())
    return Claim("figure 15: with larger batches, throughput decreases as the tensor-parallel size increases, most of all where "
                 "it crosses nodes", all(map(falling, by_batch.values())) and crossing, shown(by_batch, "t"))


def steepest(found: Mapping[int, float]) -> int:
    """The size from which the next larger one loses most."""
    return max(pairwise(found), key=lambda sizes: found[sizes[0]] / found[sizes[1]])[0]


def falling(found: Mapping[int, float]) -> bool:
    return all(later < earlier for earlier, later in pairwise(found.values()))


def interleaving(machine: MachineFile) -> Claim:
    def gain(batch: int) -> float:
        plain, interleaved = (step_of(FIGURE_12, Layout(NODE, 12, 96, batch, chunks=chunks), machine).total for chunks in (1, 2))
        return plain / interleaved - 1
    gains = {batch: gain(batch) for batch in (12, 24, 48, 60)}
    return Claim("figure 12: the interleaved schedule is faster, and the gap closes as the batch grows",
                 falling(gains) and min(gains.values()) > 0,
                 ", ".join(f"B {batch} {value:+.1%}" for batch, value in gains.items()))


def recomputation(machine: MachineFile) -> Claim:
    def loss(batch: int) -> float:
        kept, again = (step_of(FIGURE_17, Layout(NODE, 16, 128, batch, recompute=recompute), machine).total
                       for recompute in (False, True))
        return 1 - kept / again
    losses = {batch: loss(batch) for batch in (1, 2, 4, 8)}
    return Claim("figure 17: for small batches, recomputation leads to up to 33 % lower throughput",
                 all(0.15 <= value <= 0.33 for value in losses.values()),
                 ", ".join(f"B {batch} {value:.1%}" for batch, value in losses.items()))


def cut_in_three_beats_zero3(cut: Sequence[Point], alone: Sequence[Point]) -> Claim:
    """The order of table 2, where both have the same number of GPUs."""
    holds, said = True, []
    for size in ("174.6 B", "529.6 B"):
        of_cut, of_zero3 = ({gpus_of(point): point for point in points if size in point.what} for points in (cut, alone))
        common = [gpus for gpus in of_zero3 if gpus in of_cut]
        holds &= falling({gpus: of_zero3[gpus].predicted for gpus in of_zero3})
        holds &= all(of_cut[gpus].predicted > of_zero3[gpus].predicted for gpus in common)
        said.append(f"{size}: " + ", ".join(f"{gpus} GPUs {of_cut[gpus].predicted:.0f} and {of_zero3[gpus].predicted:.0f}"
                                            for gpus in common))
    return Claim("table 2: ZeRO-3 falls as GPUs are added, and a cut in three dimensions is ahead of it everywhere", holds,
                 "; ".join(said))


def gpus_of(point: Point) -> int:
    return int(point.what.split(" GPUs")[0].split()[-1])
