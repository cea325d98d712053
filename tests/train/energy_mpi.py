"""Joules of hosts that are acted: ranks of even numbers are on one, those of odd numbers on another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.messages.progress import Progress
from mpitrain.comm.shared.node import Node
from mpitrain.config.energy import EnergyConfig
from mpitrain.energy.phases import FIRST, PHASES, PLACE
from mpitrain.energy.sources import Asked, Opened
from mpitrain.energy.zones import Lost
from mpitrain.errors import MissingError
from mpitrain.parallel.gradients.timeline import Timeline
from mpitrain.train.intervals import Plan, Step
from mpitrain.train.observers.energy import EnergyUse
from mpitrain.train.observers.observer import Watched

STEPS, BATCH = 6, 8


class Counted:
    """Joules that are set by hand; None: the counter is lost."""

    kind, measured, lag_s = "powercap", True, 0.0

    def __init__(self) -> None:
        self.now: float | None = 3.0

    def joules(self) -> float:
        if self.now is None:
            raise Lost("the counter is gone")
        return self.now

    def parts(self) -> dict[str, float]:
        return {"package-0": self.now or 0.0}

    def close(self) -> None:
        pass


class Acted:
    """An observer on acted hosts, what it tells, and the counter of this rank's host, if it has opened one."""

    def __init__(self, comm: Any, hosts: int, missing: Sequence[int] = (), source: str = "auto", *, free: int = 1 << 30,
                 on_gpus: bool = True, **keys: Any):
        self.channel = Channel(comm.Dup(), "energy")
        self.host = comm.rank % hosts
        self.node = Node(self.channel.comm, Progress(), color=self.host, free=lambda: free)  # type: ignore[arg-type]
        self.counter, self.told, self.more, self.notes = Counted(), list[str](), dict[str, Any](), list[str]()
        self.opened: list[Sequence[str]] = []

        def opens(asked: Asked, gpus: Sequence[str]) -> Opened:
            self.opened.append(gpus)
            if self.host in missing:
                return Opened(None, MissingError("expected a counter, found none", file="/sys"))
            return Opened(self.counter, None)
        self.observer = EnergyUse(EnergyConfig(source=source, period_ms=10_000.0, **keys), self.channel, self.node, Timeline(),
                                  notes=self.notes, opens=opens, host=f"node{self.host}", gpu=f"gpu{comm.rank}" * on_gpus)
        plan = Plan(STEPS, STEPS, BATCH, 0, 0, False, 2)
        self.observer.begin(Watched(comm.rank, comm.size, 0, plan, None, self.told.append, self.more))

    def steps(self, numbers: range, joules: Callable[[int], float | None]) -> list[dict[str, Any]]:
        """The fields of the lines of these steps; before each the counters show `joules(step)`."""
        found = []
        for step in numbers:
            self.counter.now = joules(step)
            self.more.clear()
            self.observer.after_step(step, Step(0.0, 0.0, None, 0.0), 0.0)
            found += [dict(self.more)] if self.more else []
        return found

    def end(self) -> dict[str, Any]:
        found = dict(self.observer.finish(STEPS) or {})
        self.observer.close()
        self.node.close()
        self.channel.close()
        return found


def test_one_rank_of_each_host_reads_and_the_joules_of_hosts_are_added_up(comm: Any) -> None:
    hosts = min(2, comm.size)
    acted = Acted(comm, hosts)
    gpus = [[f"gpu{rank}" for rank in range(host, comm.size, hosts)] for host in range(hosts)]
    assert acted.opened == ([gpus[acted.host]] if comm.rank < hosts else [])
    lines = acted.steps(range(1, STEPS + 1), lambda step: 3.0 + step * (1 + acted.host))
    each = sum(1 + host for host in range(hosts))             # joules of a step on all hosts
    assert [line["joules"] for line in lines] == pytest.approx([2 * each] * 3)
    assert all(line["joules_per_sample"] == pytest.approx(each / BATCH) and line["watts"] > 0 for line in lines)
    assert {line["energy_source"] for line in lines} == {"measured (powercap)"}
    record = acted.end()
    assert (record == {}) == (comm.rank > 0)
    if comm.rank == 0:
        energy = record["energy"]
        assert energy["joules"] == pytest.approx(STEPS * each) and not energy["at_least"] and energy["without"] == []
        assert [host["host"] for host in energy["by_host"]] == [f"node{host}" for host in range(hosts)]
        assert [host["ranks"] for host in energy["by_host"]] == [len(found) for found in gpus]
        assert [host["joules"] for host in energy["by_host"]] == pytest.approx([STEPS * (1 + host) for host in range(hosts)])


def test_a_host_without_a_counter_makes_the_sum_at_least_and_is_named(comm: Any) -> None:
    """Watts for an estimate are given: it is not mixed with what was measured."""
    if comm.size == 1:
        pytest.skip("one rank is one host")
    acted = Acted(comm, 2, missing=[1], idle_watts=50.0, busy_watts=100.0)
    assert acted.notes == ["energy unknown on node1: expected a counter, found none (/sys)",
                           "energy is measured (powercap), read every 10000 ms"]
    lines = acted.steps(range(1, STEPS + 1), lambda step: 3.0 + step)
    assert [line["joules"] for line in lines] == pytest.approx([2.0] * 3)
    assert {line["energy_source"] for line in lines} == {"at least, measured (powercap), without node1"}
    record = acted.end()
    if comm.rank == 0:
        energy = record["energy"]
        assert energy["joules"] == pytest.approx(STEPS) and energy["at_least"] and energy["without"] == ["node1"]
        assert energy["by_host"][1]["joules"] is None and energy["by_host"][1]["why"] == "expected a counter, found none (/sys)"
        assert acted.told[-1].startswith("energy: at least 6 J (measured (powercap), without node1)")


def test_a_counter_that_dies_is_unknown_from_there_on_and_told_once(comm: Any) -> None:
    hosts = min(2, comm.size)
    acted = Acted(comm, hosts)
    lines = acted.steps(range(1, STEPS + 1), lambda step: None if step > 2 and acted.host == hosts - 1 else 3.0 + step)
    left = hosts - 1                                          # hosts whose counters go on
    assert lines[0]["joules"] == pytest.approx(2.0 * hosts)
    for line in lines[1:]:
        assert line["joules"] == pytest.approx(2.0 * left) if left else np.isnan(line["joules"]) and np.isnan(line["watts"])
        assert line["energy_source"] == ("at least, measured (powercap), without node1" if left else "unknown")
    where = " on node1" if left else ""
    assert acted.told == [f"step 4  energy unknown from here on{where}: the counter is gone"]
    record = acted.end()
    if comm.rank == 0:
        lost = record["energy"]["by_host"][-1]
        assert lost["joules"] is None and lost["source"] == "unknown" and lost["known"]["joules"] == pytest.approx(2.0)
        assert record["energy"]["joules"] == (pytest.approx(STEPS) if left else None)


def test_lines_of_a_counter_that_has_not_moved_are_unknown_and_none_says_zero(comm: Any) -> None:
    acted = Acted(comm, min(2, comm.size))
    lines = acted.steps(range(1, STEPS + 1), lambda step: 3.0 if step < 5 else 5.0)
    for line in lines[:2]:
        assert np.isnan([line["joules"], line["joules_per_sample"], line["watts"]]).all()
        assert line["energy_source"] == "unknown: no counter has moved yet"
    assert lines[2]["joules"] == pytest.approx(2.0 * min(2, comm.size)) and lines[2]["energy_source"] == "measured (powercap)"
    samples = lines[2]["joules"] / lines[2]["joules_per_sample"]
    assert samples == pytest.approx(STEPS * BATCH), "those of all steps whose joules it has"
    assert acted.told == []
    acted.end()


def test_a_source_that_is_named_and_on_no_host_is_refused_on_all_ranks(comm: Any) -> None:
    with pytest.raises(MissingError, match='energy: expected a counter, found none; set energy.source = "auto"'):
        Acted(comm, 1, missing=[0], source="powercap")


def test_phases_of_all_ranks_of_a_host_are_counted_where_they_share_memory(comm: Any) -> None:
    acted = Acted(comm, 1, on_gpus=False)
    with acted.observer.timeline.span("evaluation", "evaluation at step 1"):
        comm.Barrier()
        seen, seconds = [int(words[PLACE]) - FIRST for words in acted.observer.words], acted.observer._phases()
        comm.Barrier()
    assert seen == [PHASES.index("evaluation")] * comm.size
    assert seconds is not None and seconds[PHASES.index("evaluation")] > 0
    acted.end()


def test_where_ranks_of_a_host_cannot_share_memory_there_are_joules_and_no_phases(comm: Any) -> None:
    acted = Acted(comm, 1, free=0, on_gpus=False)
    lines = acted.steps(range(1, STEPS + 1), lambda step: 3.0 + step)
    assert [line["joules"] for line in lines] == pytest.approx([2.0] * 3)
    record = acted.end()
    if comm.rank == 0 and comm.size > 1:
        host, = record["energy"]["by_host"]
        assert host["phases"] is None and "ranks of a host cannot see each other's phases: " in host["no_phases"]
        assert "MiB free" in host["no_phases"] and record["energy"]["joules"] == pytest.approx(STEPS)
