"""The step model against sums that can be written down, and stragglers against drawn ones."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from math import pi, sqrt

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.machines.measured import MeasuredLevel
from mpitrain.schedules.level_times import Level, level_seconds
from mpitrain.schedules.pipeline_simulate import bubble
from mpitrain.schedules.step_simulate import Bucket, Collective, Stage, Work, group, simulate_step
from mpitrain.schedules.stragglers import straggler_factor


@dataclass(frozen=True)
class Simple:
    """A machine of nodes of 8."""

    levels: tuple[Level, ...] = (Level("node", 8, 1e-6, 1e-10, 1e-11), Level("cluster", 0, 5e-6, 1e-9, 1e-11))
    collective_s: float = 0.0
    message_s: float = 0.0
    spread: float = 0.0
    overlap: float = 1.0
    cores: int = 0


HERE = Simple()
PLAIN = Stage(0.010, 0.020)


def test_compute_alone_is_micro_batches_times_a_stage_and_the_update() -> None:
    found = simulate_step(Work((replace(PLAIN, weight=0.005),), update=0.003), {}, "1f1b", 4, HERE)
    assert astuple(found) == pytest.approx((4 * 0.035 + 0.003, 4 * 0.035, 0.0, 0.0, 0.0, 0.003, 0.0))


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_the_bubble_is_that_of_the_formula(schedule: str, chunks: int) -> None:
    work = Work(tuple(Stage(0.010 / chunks, 0.020 / chunks) for _ in range(4 * chunks)))
    found = simulate_step(work, {"pp": 4}, schedule, 8, HERE)
    share = bubble(schedule, 4, 8, 0.010, 0.020, 0.0, chunks)
    assert found.bubble == pytest.approx(share * found.total, rel=1e-9) and found.compute == pytest.approx(8 * 0.030)


def test_gradients_behind_the_backward_are_hidden_and_those_at_its_end_exposed() -> None:
    lasts = level_seconds("all_reduce", 16, 1, 1e7, HERE.levels)
    assert 0.002 < lasts < 0.010

    def exposed(*ready: float, machine: Simple = HERE, longer: float = 0.0) -> float:
        stage = replace(PLAIN, buckets=tuple(Bucket(1e7, share) for share in ready))
        found = simulate_step(Work((stage,)), {"dp": 16}, "1f1b", 3, machine)
        assert found.compute == pytest.approx(0.090 + longer) and found.tensor == found.bubble == 0.0
        assert found.total == pytest.approx(found.compute + found.exposed)
        return found.exposed
    assert exposed(0.1) == pytest.approx(0.0, abs=1e-12)      # 18 ms of the backward are left
    assert exposed(1.0) == pytest.approx(lasts)
    assert exposed(1.0, 0.9, 0.95) == pytest.approx(3 * lasts - 0.002)       # one link, in the order of getting ready
    assert exposed(0.1, machine=Simple(overlap=0.0)) == pytest.approx(lasts)        # the rank's own core moves the bytes
    assert exposed(0.1, machine=Simple(overlap=0.5), longer=lasts / 2) == 0.0         # it computes at half its speed meanwhile
    assert exposed(1.0, machine=Simple(overlap=0.5)) == pytest.approx(lasts)
    assert exposed(0.1, 0.2, machine=Simple(collective_s=0.001), longer=0.002) == 0.0


def test_buckets_that_travel_together_take_less_than_one_after_the_other_where_that_was_measured() -> None:
    """Alone each takes 5 ms; of several at once the link has one every 3 ms."""
    points = ((1e3, 1e-4), (1e6, 5e-3), (1e7, 4e-2))
    apart, together = (Simple(levels=(MeasuredLevel("net", 0, 1e-4, 3e-9, 0.0, 1, 2, points, each),)) for each in (0.0, 3e-9))

    def exposed(machine: Simple, *ready: float) -> float:
        stage = replace(PLAIN, buckets=tuple(Bucket(1e6, share) for share in ready))
        return simulate_step(Work((stage,)), {"dp": 2}, "1f1b", 1, machine).exposed
    assert exposed(apart, 1.0) == exposed(together, 1.0) == pytest.approx(0.005)
    assert exposed(apart, 1.0, 1.0, 1.0) == pytest.approx(0.015)
    assert exposed(together, 1.0, 1.0, 1.0) == pytest.approx(0.005 + 2 * 0.003)
    assert exposed(together, 0.6, 1.0) == pytest.approx(0.005)               # 8 ms apart: the first is there before


def test_gradients_of_early_stages_are_the_last_to_leave() -> None:
    buckets = (Bucket(1e7, 1.0),)
    lasts = level_seconds("all_reduce", 4, 1, 1e7, HERE.levels)

    def exposed(*which: int) -> float:
        stages = tuple(replace(PLAIN, buckets=buckets if s in which else ()) for s in range(4))
        return simulate_step(Work(stages), {"pp": 4, "dp": 4}, "1f1b", 8, HERE).exposed
    assert exposed(0) == pytest.approx(lasts) and exposed(3) == 0.0          # the last stage is 60 ms ahead
    assert exposed(0, 1, 2, 3) == pytest.approx(lasts)


def test_collectives_of_layers_lengthen_each_micro_batch_and_gathers_hide_behind_it() -> None:
    one = level_seconds("all_reduce", 8, 1, 1e6, HERE.levels)
    sums = Collective("all_reduce", ("tp",), 1e6, count=2)
    found = simulate_step(Work((replace(PLAIN, in_forward=(sums,), in_backward=(sums,)),)), {"tp": 8, "dp": 2}, "1f1b", 5,
                          Simple(collective_s=1e-5))
    assert found.tensor == pytest.approx(5 * 4 * (one + 1e-5)) and found.total == pytest.approx(found.compute + found.tensor)
    gather = Collective("all_gather", ("dp",), 1e9)
    lasts = level_seconds("all_gather", 16, 1, 1e9, HERE.levels)
    fetched = simulate_step(Work((replace(PLAIN, fetched_forward=(gather,)),)), {"dp": 16}, "1f1b", 1, HERE)
    assert lasts > 0.1 and fetched.tensor == pytest.approx(lasts - 0.010)
    small = replace(gather, nbytes=1e6)
    assert simulate_step(Work((replace(PLAIN, fetched_forward=(small,)),)), {"dp": 16}, "1f1b", 1, HERE).tensor == 0.0
    pull = Collective("pull", ("dp",), 1.0, seconds=0.5)
    after = simulate_step(Work((PLAIN,), after=(gather, pull)), {"dp": 16}, "1f1b", 1, HERE)
    assert after.exposed == pytest.approx(lasts + 0.5)


def test_messages_between_stages_take_the_interpreters_seconds_at_both_ends() -> None:
    work = Work((replace(PLAIN, message_bytes=1e6), PLAIN))
    free = simulate_step(work, {"pp": 2}, "1f1b", 1, HERE)
    assert free.total == pytest.approx(2 * 0.030 + 2 * (1e-6 + 1e-4))        # there and back
    paid = simulate_step(work, {"pp": 2}, "1f1b", 1, Simple(message_s=1e-3))
    assert paid.total == pytest.approx(free.total + 4 * 2e-3) and paid.tensor == pytest.approx(4e-3)
    spread_out = simulate_step(work, {"pp": 2, "dp": 8}, "1f1b", 1, HERE)
    assert spread_out.total == pytest.approx(2 * 0.030 + 2 * (5e-6 + 1e-3))  # the next stage is on another node


def test_parts_are_the_whole_and_stragglers_lengthen_compute() -> None:
    stage = replace(PLAIN, message_bytes=1e5, in_forward=(Collective("all_reduce", ("tp",), 1e5),), buckets=(Bucket(1e8, 0.5),))
    mesh = {"pp": 4, "dp": 8, "tp": 2}
    found = simulate_step(Work((stage,) * 8, 0.004), mesh, "interleaved", 8, Simple(spread=0.05))
    assert found.total == pytest.approx(sum(astuple(found)[1:])) and min(astuple(found)) > 0
    assert found.stragglers == pytest.approx((found.compute + found.update) * (straggler_factor(64, 0.05) - 1))


def test_ranks_along_axes_are_as_far_apart_as_the_axes_inside_of_them_are_long() -> None:
    lengths = (1, 2, 4, 3, 5, 7)                              # site, pp, dp, ep, cp, tp
    assert group(lengths, ("tp",)) == (7, 1) and group(lengths, ("cp",)) == (5, 7) and group(lengths, ("pp",)) == (2, 420)
    assert group(lengths, ("dp", "ep", "cp")) == (60, 7)      # neighbours: one row of them
    assert group(lengths, ("dp", "cp")) == (20, 105)          # experts lie between them: as far apart as along dp
    assert group((1, 1, 4, 1, 1, 1), ("tp", "pp")) == (1, 1)


def test_stages_that_do_not_divide_are_refused() -> None:
    for work in (Work(()), Work((PLAIN,) * 3)):
        with pytest.raises(ConfigError, match="virtual stages do not lie evenly on pp = 2; give a multiple of it"):
            simulate_step(work, {"pp": 2}, "1f1b", 4, HERE)


def test_the_slowest_of_drawn_ranks_is_as_slow_as_the_factor_says() -> None:
    drawn = np.random.default_rng(0)
    for n, spread in ((2, 0.05), (8, 0.1), (64, 0.02), (512, 0.1)):
        logs = drawn.normal(0.0, spread, (20_000 if n < 100 else 4_000, n))
        slowest = np.exp(logs).max(axis=1).mean() / np.exp(spread**2 / 2)
        assert straggler_factor(n, spread) == pytest.approx(slowest, rel=2e-3)


def test_the_factor_of_small_spreads_is_the_largest_of_normal_deviates() -> None:
    """Of 2 that is 1 / sqrt(pi), of 10 1.53875 (Teichroew, 1956), and of one rank nothing."""
    assert (straggler_factor(2, 1e-4) - 1) / 1e-4 == pytest.approx(1 / sqrt(pi), rel=1e-4)
    assert (straggler_factor(10, 1e-4) - 1) / 1e-4 == pytest.approx(1.53875, rel=1e-4)
    assert straggler_factor(1, 0.3) == straggler_factor(100, 0.0) == 1.0
    for spread in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="it should be a number, 0 or more"):
            straggler_factor(8, spread)
