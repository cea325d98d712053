"""Watts of this host idle and at work, and joules of a unit of work: what a plan, an estimate or a machine file needs.

    idle         all ranks sleep                            one core     rank 0 multiplies and adds, the others sleep
    all cores    each rank multiplies and adds              product      each rank multiplies matrices as training does
    memory       each rank copies arrays beyond its caches  messages     pairs of ranks send each other arrays

Each is measured in `repeats` windows of some seconds. A number is the mean over windows, give or take its standard error. Joules
of a unit are those above idle: what the work costs a host that is on in any case.
"""

from __future__ import annotations

import datetime
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain.bench.peak import matrix_product, multiply_adds
from mpitrain.bench.report import Report, machine
from mpitrain.comm.job import guard
from mpitrain.comm.job.start import World
from mpitrain.comm.job.together import on_first
from mpitrain.comm.messages.channel import Channel
from mpitrain.energy.zones import Energy
from mpitrain.errors import MissingError, UsageError
from mpitrain.kernels.product import product
from mpitrain.machines.machine import MachineFile, load_machine, to_toml

SIDE = 768                        # of matrices: three of them are 7 MB
COPIED = 64 << 20                 # bytes of an array: beyond the last cache of most processors
SENT = 4 << 20                    # bytes of a message
ROUNDS = 10_000                   # thousands of rounds of multiply-adds in a call: some milliseconds


class Work(NamedTuple):
    """What ranks do in a window: `call` is this rank's part, None where it sleeps; `amount` of all ranks' calls, in `unit`."""

    name: str
    call: Callable[[], object] | None
    amount: float = 0.0
    unit: str = ""


class Window(NamedTuple):
    joules: float
    seconds: float


class Figure(NamedTuple):
    """A mean and its standard error."""

    mean: float
    error: float

    def shown(self, digits: int = 2) -> str:
        return f"{self.mean:,.{digits}f} +- {self.error:.{digits}f}"


class Found(NamedTuple):
    """Watts in all and above idle, units a second, and joules of a unit above idle (None without a unit)."""

    watts: Figure
    above: Figure
    rate: float
    joules: Figure | None


def figure(values: Sequence[float]) -> Figure:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Figure(statistics.fmean(values), error)


def found_of(windows: Sequence[Window], idle: Figure, amount: float) -> Found:
    """The figures of windows in each of which an `amount` of work was done; the error of idle counts in all above it."""
    watts = figure([window.joules / window.seconds for window in windows])
    above = Figure(watts.mean - idle.mean, math.hypot(watts.error, idle.error))
    if not amount:
        return Found(watts, above, 0.0, None)
    seconds = statistics.fmean(window.seconds for window in windows)
    a_unit = figure([(window.joules - idle.mean * window.seconds) / amount for window in windows])
    return Found(watts, above, amount / seconds, Figure(a_unit.mean, math.hypot(a_unit.error, idle.error * seconds / amount)))


class Bench:
    """All ranks of `world` make one and call it alike; `energy` counts on rank 0, whose host is measured."""

    def __init__(self, channel: Channel, world: World, energy: Energy | None, seconds: float, repeats: int, *,
                 clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep):
        self.channel, self.world, self.energy, self.seconds, self.repeats = channel, world, energy, seconds, repeats
        self._clock, self._sleep = clock, sleep

    def windows(self, work: Work) -> tuple[list[Window], int]:
        """The windows, on rank 0 (empty elsewhere), and the calls in each. MissingError, on all ranks, where the counter dies."""
        calls = self._calls(work)
        found = [self._window(work, calls) for _ in range(self.repeats)]
        on_first(self.channel, lambda: self._refuse_lost(found))
        return [Window(joules, seconds) for joules, seconds in found if joules is not None], calls

    def _calls(self, work: Work) -> int:
        """How often `call` fits into a window, on all ranks alike: the slowest rank's time says it."""
        began = self._clock()
        if work.call is not None:
            work.call()
            began = self._clock()
            work.call()
        took = max(self.channel.gather_objects(self._clock() - began if work.call is not None else 0.0))
        return max(1, round(self.seconds / took)) if took > 0 else 1

    def _window(self, work: Work, calls: int) -> tuple[float | None, float]:
        self.world.comm.Barrier()
        if self.energy is not None:
            self.energy.joules()
        began = self._clock()
        if work.call is None:
            self._sleep(self.seconds)
        else:
            for _ in range(calls):
                work.call()
        self.world.comm.Barrier()
        seconds = self._clock() - began
        return None if self.energy is None else self.energy.joules(), seconds

    def _refuse_lost(self, found: Sequence[tuple[float | None, float]]) -> None:
        if self.energy is not None and not all(joules for joules, _ in found):
            raise MissingError(f"energy unknown: {self.energy.why or 'the counter of this host does not move'}")


def works(world: World) -> list[Work]:
    """What is measured beside idle."""
    n, rank = world.size, world.rank
    adds = multiply_adds("float32") or matrix_product("float32")
    rng = np.random.default_rng(rank)
    x, y = (rng.standard_normal((SIDE, SIDE)).astype(np.float32) for _ in range(2))
    out, source, target = np.empty_like(x), np.ones(COPIED, np.uint8), np.zeros(COPIED, np.uint8)
    found = [Work("one core", partial(adds, ROUNDS) if rank == 0 else None), Work("all ranks", partial(adds, ROUNDS)),
             Work("product", partial(product, x, y, None, out), 2e-9 * SIDE ** 3 * n, "GFLOP"),
             Work("memory", partial(np.copyto, target, source), 2e-9 * COPIED * n, "GB")]
    if n > 1:
        pairs, own, other = n // 2, np.ones(SENT, np.uint8), np.zeros(SENT, np.uint8)
        send = partial(world.comm.Sendrecv, own, rank ^ 1, 0, other, rank ^ 1, 0) if rank < 2 * pairs else None
        found.append(Work("messages", send, 2e-9 * SENT * pairs, "GB"))
    return found


def bench_energy(channel: Channel, world: World, report: Report, *, seconds: float, repeats: int, root: Path,
                 out: Path | None) -> None:
    """One record; `out` is a machine file whose watts are written anew. Collective."""
    before = on_first(channel, lambda: None if out is None else to_toml(load_machine(out))) is not None
    about = machine(channel)
    with guard.symmetric():
        if about["hosts"] > 1:
            raise UsageError(f"bench energy measures one host, found ranks on {about['hosts']}; start all of them on one")
    energy = Energy(root) if world.rank == 0 else None
    why = channel.broadcast_object("" if energy is None else energy.why)
    if why:
        with guard.symmetric():
            if before:
                raise MissingError(f"energy unknown: {why}; {out} is left as it is", file=root)
        report.line(f"energy unknown: {why}")
        report.record({"bench": "energy", "ranks": world.size, "why": why, "idle_watts": None, "busy_watts": None, "works": {},
                       "machine": about})
        return
    found = measure(Bench(channel, world, energy, seconds, repeats), works(world), report)
    if world.rank == 0:
        idle, busy = found["idle"].watts, found["all ranks"].watts
        report.record({"bench": "energy", "ranks": world.size, "why": "", "seconds": seconds, "repeats": repeats,
                       "idle_watts": idle._asdict(), "busy_watts": busy._asdict(), "works": as_json(found), "machine": about})
        if out is not None:
            out.write_text(to_toml(with_watts(load_machine(out), idle.mean, busy.mean, world.size, about["cpu"])))
            report.line(f"{out}: idle_watts and busy_watts of a rank are those of the host over {world.size}")


def measure(bench: Bench, asked: Sequence[Work], report: Report) -> dict[str, Found]:
    """The figures of idle and of each work, by name; empty on other ranks than the first. Collective."""
    first, n = bench.world.rank == 0, bench.world.size
    report.line(f"the processor packages of this host, {n} rank{'s' * (n > 1)}, {bench.repeats} windows of {bench.seconds:g} s\n"
                f"{'':<12}{'watts':>18}{'above idle':>18}{'units a second':>20}{'J a unit above idle':>24}")
    found: dict[str, Found] = {}
    idle = Figure(0.0, 0.0)
    for work in (Work("idle", None), *asked):
        windows, calls = bench.windows(work)
        if not first:
            continue
        idle = figure([window.joules / window.seconds for window in windows]) if work.name == "idle" else idle
        one = found[work.name] = found_of(windows, idle, work.amount * calls)
        above = "" if work.name == "idle" else one.above.shown()
        units = "" if one.joules is None else f"{one.rate:,.2f} {work.unit}/s"
        each = "" if one.joules is None else f"{one.joules.shown(3)} J/{work.unit}"
        report.line(f"{work.name:<12}{one.watts.shown():>18}{above:>18}{units:>20}{each:>24}".rstrip())
    return found


def as_json(found: Mapping[str, Found]) -> dict[str, Any]:
    return {name: {"watts": one.watts._asdict(), "above_idle": one.above._asdict(), "units_a_second": one.rate,
                   "joules_a_unit": None if one.joules is None else one.joules._asdict()} for name, one in found.items()}


def with_watts(kept: MachineFile, idle: float, busy: float, ranks: int, cpu: str) -> MachineFile:
    """The machine with the watts of a rank: those of the host, idle and with all ranks at work, shared out."""
    source = f"mpitrain bench energy, {datetime.date.today()}, {ranks} rank{'s' * (ranks > 1)} of {cpu}"
    watts = {"idle_watts": round(idle / ranks, 3), "busy_watts": round(busy / ranks, 3)}
    return replace(kept, **watts, sources={**kept.sources, **dict.fromkeys(watts, source)},  # type: ignore[arg-type]
                   assumed=tuple(key for key in kept.assumed if key not in watts))
