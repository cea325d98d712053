"""Memory of ranks, predicted beside measured, for well-known models in the ways that so many ranks can train them.

    each model, with recompute and without, in each way: forget what was before | predict | put together, some steps | ask the
    rank's arrays, and their pool
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mpitrain import nn
from mpitrain.backend.memory import forget_peak, pool_in_use
from mpitrain.bench.report import Report, machine
from mpitrain.bench.train import BATCHES, Training, adam, made
from mpitrain.bench.workloads import WORKLOADS
from mpitrain.comm.job import guard
from mpitrain.comm.job.start import World
from mpitrain.comm.job.together import on_first
from mpitrain.comm.messages.channel import Channel
from mpitrain.config.sections import POLICIES
from mpitrain.errors import MpitrainError
from mpitrain.placement.bytes import Use
from mpitrain.placement.place import place
from mpitrain.plan.memory import forecast
from mpitrain.schedules.grid import Grid
from mpitrain.train.build.validate import find_schedule
from mpitrain.train.observers.memory import Memory

STEPS = 2 * BATCHES
MICRO = 4                         # A pipeline or an accumulation has so many micro-batches.
BAR = 0.15                        # |predicted - measured| / measured may be so large.
SMALLEST = 1 << 18                # Fewer bytes are not compared: rows that are read and messages are a large part of them.
SMALLEST_POOL = 16 << 20          # Smaller pools are not compared: free memory between a few large arrays is a large part.


def ways(ranks: int, planned: bool) -> Iterator[tuple[str, Grid, dict[str, Any]]]:
    """(name, mesh, sections) of what so many ranks can do with one model, of which layers can be cut where that is `planned`."""
    if ranks == 1:
        yield "one rank", Grid({}), {}
        yield f"{MICRO} micro-batches", Grid({}), {"train": {"micro_batches": MICRO}}
        return
    if ranks % 2 == 0:
        for schedule in ("gpipe", "1f1b", "zb_h1"):
            yield f"pp=2 {schedule}", Grid({"pp": 2, "dp": ranks // 2}), {
                "train": {"micro_batches": MICRO * ranks // 2}, "mesh": {"schedule": schedule}}
        if planned:
            yield "tp=2", Grid({"dp": ranks // 2, "tp": 2}), {}
    for kind in POLICIES:
        yield f"dp={ranks} sharding {kind}", Grid({"dp": ranks}), {"comm": {"sharding": kind}}


def bench_memory(channel: Channel, world: World, report: Report, *, models: Sequence[str]) -> None:
    """A record for each stage of each way and model, of the rank that has most. Collective."""
    report.line(f"memory in MiB, predicted / measured, {world.size} rank{'s' if world.size > 1 else ''}")
    about, worst = machine(channel), 0.0
    for name in models:
        model = WORKLOADS[name].make()
        for recompute in (False, True)[:1 + isinstance(model, nn.Sequential)]:
            for way, grid, sections in ways(world.size, bool(model.plan)):
                for stage, found, use in one_way(name, grid, recompute, sections, world):
                    ratios = {key: ratio(key, getattr(found, key), getattr(use, key)) for key in Use._fields}
                    worst = max([worst, *(abs(r - 1) for r in ratios.values() if r is not None)])
                    report.record({"bench": "memory", "model": name, "recompute": recompute, "way": way, "stage": stage,
                                   "ranks": world.size, "predicted": found._asdict(), "measured": use._asdict(),
                                   "ratios": ratios, "machine": about})
                    report.line(f"{name:<9}{'recompute ' if recompute else '':<10}{way:<26}{stage:>2}  " + "  ".join(
                        f"{key} {mib(getattr(found, key))} / {mib(getattr(use, key))}" + (f" = {r:.3f}" if r is not None else "")
                        for key, r in ratios.items() if key != "offloaded"))
    report.line(f"furthest apart: {worst:.1%} (bar {BAR:.0%}), of what is {SMALLEST >> 10} KiB or more, and of pools of "
                f"{SMALLEST_POOL >> 20} MiB or more")


def one_way(name: str, grid: Grid, recompute: bool, sections: dict[str, Any], world: World) -> Iterator[tuple[int, Use, Use]]:
    """(stage, predicted, measured) of a few steps."""
    forget_peak()
    workload, pool = WORKLOADS[name], pool_in_use()
    before = pool.usage().system if pool else 0               # Earlier runs have left some bytes, mostly in caches.
    with guard.symmetric():
        training = Training(workload, world.comm, pp=grid.size("pp"), tp=grid.size("tp"), recompute=recompute, sections=sections)
    job = training.job
    measured = Memory(job)

    def predict() -> Any:
        config = training.config
        placement = place(made(workload, recompute), grid, config.mesh, config.train, config.comm)
        found = forecast(placement, training.sample, tokens=workload.tokens, loss=nn.LOSSES["cross_entropy"](), optimizer=adam,
                         schedule=find_schedule(config))
        if found.why:
            raise MpitrainError(f"bench memory {name}: activations cannot be predicted: {found.why}")
        return list(map(list, found.stages))

    found = [Use(*use) for use in on_first(job.channel, predict)]
    for _ in range(STEPS):
        measured.swing.begin(job.trainer.pipeline.sent_bytes)
        training.step()
        measured.swing.end(job.trainer.pipeline.sent_bytes)
    use = measured.measured()
    use = use._replace(pool=None if use.pool is None else use.pool - before)
    everyone = [(int(stage), Use(*had)) for stage, had in job.channel.gather_objects([job.context.stage.index, list(use)])]
    training.close()
    for stage, predicted in enumerate(found):
        yield stage, predicted, max((had for where, had in everyone if where == stage), key=lambda had: sum(n or 0 for n in had))


def ratio(key: str, predicted: int | None, measured: int | None) -> float | None:
    """Predicted over measured; None where that is too little to compare."""
    least = SMALLEST_POOL if key == "pool" else SMALLEST
    return predicted / measured if predicted is not None and measured is not None and measured >= least else None


def mib(n: int | None) -> str:
    return "-" if n is None else f"{n / 2**20:.2f}"
