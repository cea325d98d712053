"""Forecasts of compressed sums and levels, beside formulas that can be written down for equal links."""

from __future__ import annotations

from math import inf

import pytest

from mpitrain.errors import ConfigError
from mpitrain.schedules.simulate import Machine
from mpitrain.schedules.simulate_levels import Coding, LevelCost, break_even_mbit, simulate_coded, simulate_levels

MIB, SLOW = 1 << 20, Machine(alpha=0.0, beta=8e-6 / 100, gamma=0.0)            # 100 Mbit/s
INT8 = Coding("packed", 0.26, 2.5e-4 / MIB, 2e-5 / MIB)
TOPK = Coding("gathered", 0.02, 8e-4 / MIB, 1e-6 / MIB)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_packed_sum_sends_two_parts_of_each_message_and_codes_twice(n: int) -> None:
    length = n * 8192 * 100
    link = 2 * (n - 1) / n * 0.26 * 4 * length * SLOW.beta
    coding = 4 * length * (INT8.encode * (1 + 1 / n) + 2 * INT8.decode)
    assert simulate_coded(INT8, n, length, SLOW) == pytest.approx(link + coding, rel=1e-3)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_gathered_sum_grows_with_the_ranks(n: int) -> None:
    length = 1 << 20
    expected = (n - 1) * 0.02 * 4 * length * SLOW.beta + 4 * length * (TOPK.encode + n * TOPK.decode)
    assert simulate_coded(TOPK, n, length, SLOW) == pytest.approx(expected, rel=1e-3)


def test_a_linear_sum_is_an_all_reduce_of_each_phase() -> None:
    low_rank = Coding("linear", 0.01, 0.0, 0.0, phases=2)
    assert simulate_coded(low_rank, 2, 1 << 20, SLOW) == pytest.approx(0.01 * 4 * 2**20 * SLOW.beta, rel=1e-2)
    assert simulate_coded(low_rank, 1, 1 << 20, SLOW) == 0.0


def test_the_break_even_is_where_coding_takes_as_long_as_the_bytes_it_saves() -> None:
    """Of two ranks: dense sends S bytes, int8 0.26 S; coding takes S (1.5 encode + 2 decode)."""
    length = 1 << 20
    saved, cost = 0.74 * 4 * length, 4 * length * (1.5 * INT8.encode + 2 * INT8.decode)
    assert break_even_mbit(INT8, 2, length, SLOW) == pytest.approx(8e-6 * saved / cost, rel=1e-2)


def test_a_coding_that_saves_nothing_never_pays_and_one_that_costs_nothing_always_does() -> None:
    assert break_even_mbit(Coding("gathered", 0.6, 0.0, 0.0), 4, 1 << 20, SLOW) == 0.0          # k / N beyond 1 / n
    assert break_even_mbit(Coding("packed", 0.25, 0.0, 0.0), 4, 1 << 20, SLOW) == inf


def test_an_exchange_each_h_steps_costs_a_share_of_it_and_one_that_travels_meanwhile_nothing() -> None:
    plain = simulate_levels([LevelCost(10, 0.5, 1000)], 0.1, 1000)
    assert plain.seconds == pytest.approx(0.1 + 0.05) and plain.exposed == pytest.approx(0.05)
    assert (plain.nbytes, plain.largest) == (100, 1000)
    hidden = simulate_levels([LevelCost(10, 0.125, 250, fragments=4, delay=2)], 0.1, 1000)
    assert hidden.exposed == 0.0 and hidden.largest == 250
    assert hidden.nbytes == pytest.approx(100, rel=0.02)      # the fragments of the first round leave at its end


def test_a_delay_that_is_too_short_is_waited_for() -> None:
    found = simulate_levels([LevelCost(10, 0.5, 1000, delay=3)], 0.1, 1000)
    assert found.exposed == pytest.approx((0.5 - 0.3) / 10, rel=0.02)


def test_a_level_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="delay at most every"):
        simulate_levels([LevelCost(10, 0.5, 1000, delay=11)], 0.1, 100)
