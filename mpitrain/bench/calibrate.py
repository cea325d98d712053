"""`bench fit --out FILE`: this machine as a file that `plan` reads, measured in a minute or less by all ranks of the job.

    compute     peak of a core, products at several shapes, memory, training code: with one rank at work, two, ... all
    exchange    alpha and beta for 2, 3, ... ranks of a node by shared memory and by messages, between nodes by messages
    Python      seconds of an operation, of a collective, of a message between stages, of a step that computes nothing
    reading     bytes a second of random rows from a file that is in memory
    watts       of a rank's share of the processor packages, asleep and at work, where the kernel lets us read counters
    spread      of the same work between ranks

Start as many ranks as plans are to be made for: what three or four ranks on two cores cost cannot be told from two.
"""

from __future__ import annotations

import datetime
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.bench.allreduce import MESSAGES
from mpitrain.bench.calibrate_busy import contention, operation_seconds, rates, spread, stream, together, when_busy
from mpitrain.bench.calibrate_levels import (
    SHARED,
    Costs,
    all_reduces,
    at_once,
    empty_step,
    hidden_share,
    messages,
    nodes_of,
    on_some,
)
from mpitrain.bench.calibrate_shared import by_shared_memory, layer_sums
from mpitrain.bench.peak import peak_flops
from mpitrain.bench.report import Report, cpu_name, in_time
from mpitrain.bench.train import Memory
from mpitrain.comm.job.start import World
from mpitrain.comm.messages.channel import Channel
from mpitrain.data.loader import SampleReader
from mpitrain.energy.zones import Energy
from mpitrain.machines.machine import MachineFile, to_toml
from mpitrain.machines.measured import beside_others, crowded, fingerprint
from mpitrain.schedules.level_times import Level

ROW, ROWS, READ = 3072, 20_000, 256                           # bytes of a row, rows of the file, rows that are read at once
WATCHED = 0.5                                                 # seconds of a look at the counters of energy
MEASURED = ("flops", "efficiency", "memory_bandwidth", "levels", "collective_s", "message_s", "reader_bytes_s", "spread")
NODE, NETWORK = "node", "network"


def calibrate(channel: Channel, world: World, report: Report, out: Path, name: str) -> MachineFile:
    """Measures, prints and, on rank 0, writes `out`. Collective; every rank gets the same machine."""
    nodes = nodes_of(channel)
    node, cores = nodes[0], len(os.sched_getaffinity(0))
    peaks = on_some(channel, world, [0], lambda _: {kind: peak_flops(kind) for kind in ("float32", "float64")})
    report.line(f"peak of a core: {peaks['float32'] / 1e9:.1f} GFLOP/s in float32")
    products = rates(world)
    for row in products:
        report.line(f"product {'x'.join(map(str, row['shape'])):<14}{row['alone'] / 1e9:>8.1f} GFLOP/s alone,"
                    f"{row['all'] / 1e9:>7.1f} with all ranks at work")
    busy = contention(world, nodes)
    for kind in ("products", "memory", "training"):
        report.line(f"{kind} with 1 to {len(node)} ranks of a node at work: times as long as alone: " +
                    ", ".join(f"{factor:.2f}" for factor in busy[kind]))
    by_ranks = {str(n): on_some(channel, world, node[:n], exchange_of) for n in range(1, len(node) + 1)}
    for n, found in by_ranks.items():
        report.line(exchange_line(n, found))
        if note := crowded(int(n), found["turns"], cores):
            report.line(f"warning: {note}")
    between = on_some(channel, world, [ranks[0] for ranks in nodes], between_nodes) if len(nodes) > 1 else None
    if between is not None:
        report.line(f"between {len(nodes)} nodes: alpha {in_time(between['alpha'])}, beta {between['beta'] * 1e9:.3f} ns/B; "
                    f"{between['overlap']:.0%} of an exchange hides behind work; of several at once a byte takes "
                    f"{between['at_once'] * 1e9:.3f} ns")
    machine = MachineFile(
        name=name, levels=levels_of(by_ranks, between, len(node), len(nodes)), flops=peaks,
        efficiency=min(1.0, statistics.median(row["alone"] for row in products) / peaks["float32"]),
        memory_bandwidth=busy["memory_bytes_s"], memory_bytes=memory_of_host() / len(node),
        collective_s=by_ranks[str(len(node))].get("collective_s", 0.0), message_s=by_ranks[str(len(node))].get("message_s", 0.0),
        reader_bytes_s=on_some(channel, world, [0], lambda _: read_rate()), cores=cores,
        overlap=between["overlap"] if between is not None else 0.0,
        spread=on_some(channel, world, node, lambda part: spread(part, min(len(node), cores))),
        measured={"fingerprint": fingerprint(), "ranks": world.size, "nodes": len(nodes), "cores": cores,
                  "operation_s": operation_seconds(world), "products": products, "contention": busy, "by_ranks": by_ranks,
                  **({} if between is None else {"between": between})},
        sources=dict.fromkeys(MEASURED, f"measured by bench fit on {cpu_name()}, {world.size} ranks, {datetime.date.today()}"))
    idle, at_work = watts(channel, world, node)
    noted = {"measured.by_ranks": note} if (note := beside_others(machine)) else {}
    machine = replace(machine, idle_watts=idle, busy_watts=at_work, sources={**machine.sources, **noted})
    report.line(f"reading {machine.reader_bytes_s / 1e9:.2f} GB/s, spread of ranks {machine.spread:.3f}, watts of a rank "
                + (f"{machine.idle_watts:.1f} asleep, {machine.busy_watts:.1f} at work" if machine.busy_watts else
                   "unknown: " + Energy().why))
    if world.rank == 0:
        out.write_text(to_toml(machine))
        report.line(f"written to {out}")
    return machine


def exchange_of(world: World) -> dict[str, Any]:
    """What exchange costs between these ranks of a node. Collective."""
    found: dict[str, Any] = {"step_s": empty_step(world), "turns": 1.0}
    if world.size == 1:
        return found
    shared = all_reduces(world, SHARED)
    found[MESSAGES] = costs_of(all_reduces(world, MESSAGES))
    found[SHARED] = costs_of(shared) if shared is not None else found[MESSAGES]
    found["collective_s"], found["turns"] = by_shared_memory(world)
    found["layers"] = layer_sums(world)
    if world.size == 2:
        found["stage_messages"] = messages(world)
    return found


def between_nodes(world: World) -> dict[str, Any]:
    """What exchange costs between one rank of each node. Collective."""
    return {**costs_of(all_reduces(world, MESSAGES, link=True)), "overlap": hidden_share(world), "at_once": at_once(world),
            "step_s": empty_step(world)}


def costs_of(costs: Costs | None) -> dict[str, Any]:
    assert costs is not None, "messages can always be had"
    return {"alpha": costs.alpha, "beta": costs.beta, "gamma": costs.gamma, "points": costs.points}


def exchange_line(n: str, found: dict[str, Any]) -> str:
    alone = f"{n} rank{'s' * (n != '1')}: a step of nothing takes {in_time(found['step_s'])}"
    return alone if n == "1" else f"{alone}; equal work {found['turns']:.2f} times its processor time" + "".join(
        f"; {way}: alpha {in_time(found[way]['alpha'])}, beta {found[way]['beta'] * 1e9:.3f} ns/B" for way in (SHARED, MESSAGES))


def levels_of(by_ranks: dict[str, Any], between: dict[str, Any] | None, in_node: int, nodes: int) -> tuple[Level, ...]:
    """The levels as most ranks that were measured have them."""
    found = []
    if in_node > 1 or nodes > 1:
        inside = by_ranks[str(in_node)].get(SHARED, {"alpha": 0.0, "beta": 0.0, "gamma": 0.0})
        found.append(Level(NODE, in_node if nodes > 1 else 0, inside["alpha"], inside["beta"], inside["gamma"]))
    if between is not None:
        found.append(Level(NETWORK, 0, between["alpha"], between["beta"], between["gamma"], in_node))
    return tuple(found)


def memory_of_host() -> float:
    """Bytes of memory of this host."""
    import psutil
    return float(psutil.virtual_memory().total)


def read_rate() -> float:
    """Bytes a second of random rows from a file that the system has in memory, checked as in training."""
    with tempfile.TemporaryDirectory() as folder:
        path, rng = Path(folder) / "rows.npy", np.random.default_rng(0)
        np.save(path, np.zeros((ROWS, ROW // 4), np.float32))
        x = np.load(path, mmap_mode="r")
        reader = SampleReader(Memory(x, np.zeros(ROWS, np.int64)), dtype=np.float32)
        times = []
        for _ in range(20):
            rows = np.sort(rng.integers(0, ROWS, READ))
            began = time.perf_counter()
            reader.read(rows)
            times.append(time.perf_counter() - began)
        return READ * ROW / statistics.median(times)


def watts(channel: Channel, world: World, node: list[int]) -> tuple[float, float]:
    """Watts of a rank's share of the packages of the first node, asleep and at work; nothing where nobody counts. Collective."""
    energy, found = Energy() if world.rank == 0 else None, [0.0, 0.0]
    for place, working in enumerate((False, world.rank in node)):
        if energy is not None:
            energy.joules()
        began = time.perf_counter()
        if place:
            when_busy(world, working, stream(), WATCHED)
        else:
            time.sleep(WATCHED)
            together(world)
        joules = None if energy is None else energy.joules()
        found[place] = (joules or 0.0) / (time.perf_counter() - began) / len(node)
    idle, at_work = channel.broadcast_object(found)
    return float(idle), float(at_work)
