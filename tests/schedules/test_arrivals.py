"""Turns at their own pace: bounds on staleness, orders of clocks and tapes, and rounds that always come to an end."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.schedules.arrivals import AsTheyCome, Clock, Pace, Player, Round, Tape
from mpitrain.schedules.steps import ScheduleError


def play(round_, order, start=lambda turn: None, take=lambda arrival, new: None):
    player = Player(round_, order, start, take)
    assert player.advance()
    return player.arrivals


class Any:
    """Whoever a generator says, among those that may come."""

    def __init__(self, seed):
        self.random, self.most = random.Random(seed), 0

    def started(self, turn):
        pass

    def next(self, expected, landed):
        self.most = max(self.most, len(expected))
        return self.random.choice(list(expected))


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 4), st.integers(0, 5), st.integers(0, 9))
def test_every_turn_arrives_once_and_none_is_staler_than_it_may_be(turns, in_flight, buffer, staleness, seed):
    started, taken, versions = [], [], 0

    def take(arrival, new):
        nonlocal versions
        taken.append(arrival.turn)
        versions += new
    found = play(round_ := Round(turns, Pace(in_flight, buffer, staleness, 1.0)), Any(seed), started.append, take)
    assert started == [*range(turns)] and sorted(taken) == started
    assert all(arrival.staleness <= staleness and arrival.factor == 1 / (1 + arrival.staleness) for arrival in found)
    assert versions == round_.version == -(-turns // buffer)
    for k, arrival in enumerate(found):
        assert k // buffer - arrival.version == arrival.staleness      # versions made before it, less the one it began with


def test_without_a_bound_that_matters_all_in_flight_may_overtake_each_other():
    order = Any(1)
    play(Round(40, Pace(4, 1, 1000, 0.0)), order)
    assert order.most == 4


def test_a_bound_of_zero_with_a_buffer_of_all_is_a_synchronous_round():
    found = play(Round(6, Pace(3, 3, 0, 1.0)), Any(2))
    assert [arrival.staleness for arrival in found] == [0] * 6
    assert [sorted(a.turn for a in found[:3]), sorted(a.turn for a in found[3:])] == [[0, 1, 2], [3, 4, 5]]


def test_a_bound_of_zero_with_a_buffer_of_one_trains_one_after_the_other():
    found = play(Round(4, Pace(3, 1, 0, 1.0)), Any(2))
    assert [arrival.turn for arrival in found] == [0, 1, 2, 3] and {arrival.staleness for arrival in found} == {0}


def test_the_clock_lets_the_fast_overtake_the_slow_until_it_is_too_stale():
    def order_of(staleness):
        return [a.turn for a in play(Round(5, Pace(2, 1, staleness, 0.0)), Clock([10.0, 1.0, 1.0, 1.0, 1.0]))]
    assert order_of(9) == [1, 2, 3, 4, 0]
    assert order_of(2) == [1, 2, 0, 3, 4]


def test_a_tape_gives_the_same_round_again_and_another_ones_is_refused():
    pace = Pace(3, 2, 4, 0.5)
    first = play(Round(9, pace), Any(5))
    again = play(Round(9, pace), Tape([arrival.turn for arrival in first]))
    assert again == first
    with pytest.raises(ScheduleError, match=r"turn 8 in the recorded order where one of the turns \[0, 1, 2\] must arrive"):
        play(Round(9, pace), Tape([8]))
    with pytest.raises(ScheduleError, match="nothing in the recorded order"):
        play(Round(9, pace), Tape([0]))


def test_a_turn_that_may_not_come_is_refused():
    made = Round(3, Pace(2, 1, 1, 0.0))
    made.start()
    made.start()
    with pytest.raises(ScheduleError, match="turn 2 cannot arrive now: it is not under way"):
        made.arrive(2)
    made.arrive(1)
    made.start()
    with pytest.raises(ScheduleError, match="others would be more than 1 versions old"):
        made.arrive(2)


def test_results_are_taken_as_they_come_and_a_clock_waits_for_its_own():
    for order, first in ((AsTheyCome(), 2), (Clock([1.0, 2.0, 3.0]), None)):
        there = {2}
        player = Player(Round(3, Pace(3, 1, 9, 0.0)), order, lambda turn: None, lambda arrival, new: None)
        assert not player.advance(there.__contains__)
        assert [a.turn for a in player.arrivals] == ([2] if first == 2 else [])
        there |= {0, 1}
        assert player.advance(there.__contains__)
        assert [a.turn for a in player.arrivals] == ([2, 0, 1] if first == 2 else [0, 1, 2])
