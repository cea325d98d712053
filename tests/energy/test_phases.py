"""Joules of phases: a recorded minute with known powers, least squares beside SciPy's, the clock of a rank, the reader."""

from __future__ import annotations

import math
import threading
from heapq import merge
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trees import set_joules, zone

from mpitrain.energy.estimate import Model, words
from mpitrain.energy.phases import FIRST, PHASES, WORDS, PhaseClock, PowerFit, non_negative, seconds_of, seconds_of_all
from mpitrain.energy.reader import Reader, Several
from mpitrain.energy.report import phases_of
from mpitrain.energy.zones import Lost, Powercap

TRACE = Path(__file__).with_name("trace.npz")     # made by record_trace.py: two ranks, a transformer, November 2026
WATTS = {"forward": 42.0, "backward": 47.0, "wait_for_gradients": 24.0, "update": 36.0, "data": 20.0, "evaluation": 39.0,
         "checkpoint": 14.0, "idle": 11.0, "other": 18.0}            # of one rank, the idle watts of the host shared out
PERIOD, TICK, UNIT = 0.05, 1e-3, 61e-6           # seconds between readings and between moves of the counter; joules of a move
BEGAN = 1000.0                                   # of the clock


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Recorded:
    """A rank of the trace: when it turned to which phase, and the watts until then, which vary from span to span by a share."""

    def __init__(self, rank: int, noise: float):
        with np.load(TRACE) as kept:
            self.phases, microseconds = kept[f"phases_{rank}"], kept[f"microseconds_{rank}"]
        self.times = np.cumsum(microseconds.astype(float)) / 1e6
        spans = np.diff(self.times, prepend=0.0)
        before = np.concatenate([[PHASES.index("other")], self.phases[:-1]])
        watts = np.array([WATTS[phase] for phase in PHASES])[before]
        watts = watts * np.random.default_rng(rank).normal(1.0, noise, len(watts))
        self.seconds = np.bincount(before, spans, len(PHASES))
        self.joules = np.bincount(before, spans * watts, len(PHASES))
        self._at, self._sum = np.concatenate([[0.0], self.times]), np.concatenate([[0.0], np.cumsum(spans * watts)])

    def used(self, now: float) -> float:
        return float(np.interp(now, self._at, self._sum))


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_a_recorded_minute_gives_each_phase_its_joules_within_two_percent(noise: float, tmp_path: Path) -> None:
    """And within four of the errors that are told, also where powers vary so much that two percent cannot be had. The real
    counter, reader and phase clocks, on a clock that only moves when told to; the counter moves once a millisecond, and readings
    come up to 5 ms late."""
    ranks, clock = [Recorded(rank, noise) for rank in range(2)], Clock(BEGAN)
    tree = zone(tmp_path, "intel-rapl:0", "package-0", 0.0, 65_532_610_987)
    phases = [PhaseClock(clock=clock) for _ in ranks]
    for one in phases:
        one.start()
    reader = Reader(Powercap(tmp_path, clock), PERIOD, lambda lag: seconds_of_all([one.words for one in phases], clock, lag),
                    len(PHASES), clock)
    end = min(rank.times[-1] for rank in ranks)
    late = np.random.default_rng(9).uniform(0, 0.1 * PERIOD, int(end / PERIOD))
    turns = [zip(of.times, repeat(rank), of.phases.tolist()) for rank, of in enumerate(ranks)]
    for now, rank, phase in merge(*turns, ((PERIOD * i + late[i], -1, 0) for i in range(len(late)))):
        clock.now = BEGAN + now
        if rank >= 0:
            phases[rank].turn(FIRST + phase)
        else:
            shown = math.floor(now / TICK) * TICK
            set_joules(tree, round(sum(of.used(shown) for of in ranks) / UNIT) * UNIT)
            reader.sample()
    seconds = sum(of.seconds for of in ranks)
    found, residual, why = phases_of(reader.fit, seconds)
    assert found is not None and why == "" and reader.samples == len(late) > 1100
    truth = dict(zip(PHASES, sum(of.joules for of in ranks)))
    large = [phase for phase, share in zip(PHASES, seconds / seconds.sum()) if share > 0.05]
    assert len(large) >= 6
    for phase in large:
        assert noise > 0.02 or found[phase]["joules"] == pytest.approx(truth[phase], rel=0.02), phase
    for phase in PHASES:
        assert abs(found[phase]["joules"] - truth[phase]) < 4 * found[phase]["error"], phase
    assert 0.0 < residual < max(noise, 0.03)
    assert sum(part["joules"] for part in found.values()) == pytest.approx(sum(truth.values()), rel=1e-3)


def test_non_negative_least_squares_are_scipys() -> None:
    optimize = pytest.importorskip("scipy.optimize", reason="SciPy is not installed: its nnls is what ours is compared with")
    rng, pinned = np.random.default_rng(1), 0
    for _ in range(200):
        n = int(rng.integers(1, 10))
        a = rng.uniform(0, 1, (40, n)) * 10.0 ** rng.integers(-3, 1, n)
        b = a @ (rng.normal(1, 2, n)) + rng.normal(0, 0.1, 40)
        ours, theirs = non_negative(a.T @ a, a.T @ b), optimize.nnls(a, b)[0]
        assert np.linalg.norm(a @ ours - b) == pytest.approx(np.linalg.norm(a @ theirs - b), rel=1e-9)
        pinned += int((theirs == 0).sum())
    assert pinned > 100, "no power was held at zero"
    assert non_negative(np.zeros((3, 3)), np.zeros(3)).tolist() == [0, 0, 0]


def test_phases_that_readings_do_not_tell_apart_get_the_mean_and_an_error_as_large() -> None:
    """All intervals are alike, as in steps of a millisecond: nothing says that one phase took it all, and another nothing."""
    fit = PowerFit(2)
    for i in range(100):
        fit.add([0.02, 0.03], 5.0 + 0.01 * (-1) ** i)
    solved = fit.solve()
    assert solved.watts == pytest.approx([100.0, 100.0], rel=1e-2) and (solved.errors > 30).all()
    apart = PowerFit(2)
    for i in range(100):
        apart.add([0.05 * (i % 2), 0.05 - 0.05 * (i % 2)], 2.0 + 6.0 * (i % 2) + 0.01 * (-1) ** (i // 2))
    solved = apart.solve()
    assert solved.watts == pytest.approx([160.0, 40.0], rel=1e-4) and (solved.errors < 0.1).all()
    assert phases_of(PowerFit(len(PHASES)), [1.0] * len(PHASES))[2] == "0 readings are too few to tell 9 phases apart"


def test_a_rank_counts_each_second_once_and_reads_the_clock_twice_a_span() -> None:
    clock, looks = Clock(10.0), 0

    def look() -> float:
        nonlocal looks
        looks += 1
        return clock.now
    phases = PhaseClock(clock=look)
    assert seconds_of(phases.words, 11.0) == [0.0] * len(PHASES), "not started yet"
    phases.start()
    before = looks
    with phases.span("step", "step 1"):
        clock.now += 1
        with phases.span("compute", "forward 0"):
            clock.now += 2
        with phases.span("compute", "backward 0"):
            clock.now += 4
            with phases.span("wait", "wait for F0"):
                clock.now += 8
        with phases.span("compute", "gradients and update"):
            clock.now += 16
            phases.landed()
            clock.now += 32
        phases.landed()                           # outside of an update it is nothing
        with phases.span("reader 0", "read step 2"):
            clock.now += 64                       # another thread's
    assert looks - before == 2 * 5 + 1
    found = dict(zip(PHASES, seconds_of(phases.words, clock.now + 3.0) or []))
    assert found == {"forward": 2, "backward": 4, "wait_for_gradients": 16, "update": 32, "data": 0, "evaluation": 0,
                     "checkpoint": 0, "idle": 8, "other": 1 + 64 + 3}
    phases.words[FIRST] += 1.0                    # as half of a turn would leave it
    assert seconds_of(phases.words, clock.now) is None and seconds_of_all([phases.words], clock) is None
    phases.detach()
    assert len(phases.words) == WORDS and phases.words[FIRST] == 0


def test_seconds_of_a_moment_ago_are_taken_from_the_present_phase_and_then_from_the_one_before() -> None:
    clock = Clock(1.0)
    phases = PhaseClock(clock=clock)
    phases.start()
    clock.now = 2.0
    with phases.span("compute", "forward 0"):
        clock.now = 2.25

        def known(lag: float) -> tuple[float, float]:
            found = dict(zip(PHASES, seconds_of(phases.words, clock.now, lag) or []))
            return found["other"], found["forward"]
        assert [known(lag) for lag in (0.0, 0.125, 0.25, 0.5)] == [(1.0, 0.25), (1.0, 0.125), (1.0, 0.0), (0.75, 0.0)]


class Counted:
    """A counter whose number is set by hand; None: it is lost."""

    kind, measured, lag_s = "made up", True, 0.0

    def __init__(self) -> None:
        self.now: float | None = 0.0
        self.closed = 0

    def joules(self) -> float:
        if self.now is None:
            raise Lost("it is gone")
        return self.now

    def parts(self) -> dict[str, float]:
        return {"all": self.now or 0.0}

    def close(self) -> None:
        self.closed += 1


def test_a_counter_that_dies_is_unknown_from_there_on() -> None:
    counter, clock = Counted(), Clock()
    reader = Reader(counter, 1.0, lambda lag: [clock.now], 1, clock)
    counter.now = 5.0
    assert reader.joules() == 5.0
    for clock.now in (1.0, 2.0, 3.0):
        counter.now += 10.0
        reader.sample()
    assert (reader.known, reader.seconds, reader.samples, reader.why) == (35.0, 3.0, 3, "")
    counter.now = None
    reader.sample()
    counter.now = 100.0                           # it is there again; what it missed is not
    clock.now = 4.0
    reader.sample()
    assert reader.joules() is None and reader.why == "it is gone" and (reader.known, reader.seconds) == (35.0, 3.0)
    assert reader.fit.solve().watts == pytest.approx([10.0])
    both = Several([Counted(), counter])
    assert both.joules() == 100.0 and both.kind == "made up, made up" and both.measured
    both.close()
    assert counter.closed == 1


def test_the_thread_samples_until_it_is_stopped_and_counts_from_its_start() -> None:
    counter, sampled = Counted(), threading.Semaphore(0)

    def phases(lag: float) -> list[float]:
        sampled.release()
        return [1.0]
    counter.now = 7.0
    reader = Reader(counter, 0.001, phases, 1)
    reader.start()
    assert all(sampled.acquire(timeout=30) for _ in range(3))
    assert reader.joules() == 0.0
    counter.now = 9.0
    assert reader.joules() == 2.0
    reader.stop()
    reader.stop()
    assert not any(thread.name == "energy" for thread in threading.enumerate())


def test_an_error_that_nobody_expected_ends_the_run_at_its_next_look() -> None:
    failed = threading.Event()

    def phases(lag: float) -> Any:
        failed.set()
        raise ZeroDivisionError("a bug")
    reader = Reader(Counted(), 0.001, phases, 1)
    reader.start()
    assert failed.wait(30)
    assert reader._thread is not None
    reader._thread.join(30)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        reader.joules()
    reader.stop()


def test_an_estimate_follows_the_cpu_time_of_the_ranks_of_a_host() -> None:
    clock, cpu = Clock(), {1: 3.0, 2: 5.0}
    model = Model(60.0, 180.0, [1, 2], cores=4, clock=clock, cpu_seconds=cpu.__getitem__)
    clock.now, cpu[1], cpu[2] = 10.0, 13.0, 15.0
    assert model.joules() == pytest.approx(10 * (60 + 120 * 20 / 40)), "half of the cores at work"
    cpu[1] += 1000.0
    assert model.joules() == pytest.approx(10 * 180), "more than all cores cannot be at work"
    assert model.parts() == {"estimated from 60 W idle, 180 W busy": pytest.approx(1800.0)} and not model.measured
    assert words(0.5, 70.0) == "estimated from 0.5 W idle, 70 W busy"

    def gone(_: int) -> float:
        raise ProcessLookupError(3, "No such process")
    model._cpu_seconds = gone
    with pytest.raises(Lost, match="the CPU time of a process of this host cannot be read: No such process"):
        model.joules()
