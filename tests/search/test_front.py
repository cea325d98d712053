"""Fronts and crowding, against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.search.front import Objective, Ranking, best_of, crowding, fronts, score_of

Score = tuple[float, ...]


def dominates(a: Score, b: Score) -> bool:
    return all(x >= y for x, y in zip(a, b)) and a != b


def by_definition(scores: list[Score]) -> list[list[int]]:
    """Fronts by leaving out what nobody dominates, again and again."""
    left, found = list(range(len(scores))), []
    while left:
        found.append([i for i in left if not any(dominates(scores[j], scores[i]) for j in left)])
        left = [i for i in left if i not in found[-1]]
    return found


@given(st.integers(2, 3).flatmap(lambda k: st.lists(st.tuples(*[st.integers(0, 5).map(float)] * k), min_size=1, max_size=40)))
def test_fronts_are_those_of_the_definition(scores: list[Score]) -> None:
    assert fronts(scores) == by_definition(scores)


def test_crowding_is_that_of_nsga_ii() -> None:
    """Worked out by hand: the sides of the box between the neighbours, over the front's extent."""
    found = crowding(np.array([[0.0, 4.0], [1.0, 3.0], [2.0, 1.0], [4.0, 0.0]]))
    assert found.tolist() == [math.inf, 2 / 4 + 3 / 4, 3 / 4 + 3 / 4, math.inf]


def test_the_best_are_whole_fronts_and_the_least_crowded_of_the_next() -> None:
    ranking = Ranking(2)
    for score in [(0.0, 0.0), (5.0, 5.0), (0.0, 4.0), (1.0, 3.0), (1.1, 2.9), (4.0, 0.0)]:
        ranking.add(score)
    assert ranking.best(1) == [1] and set(ranking.best(3)) == {1, 2, 5} and set(ranking.best(4)) == {1, 2, 4, 5}
    assert best_of([(1.0,), (3.0,), (3.0,)]) == 1 and best_of([(0.0, 0.0), (5.0, 5.0)]) == 1


@pytest.mark.parametrize(("values", "score"), [
    ({"accuracy": 0.5, "ms": 2}, (0.5, -2.0)), ({"accuracy": 0.5}, None), ({"accuracy": math.nan, "ms": 2}, None),
    ({"accuracy": None, "ms": 2}, None)])
def test_costs_count_down_and_what_is_no_number_is_no_score(values: dict[str, float], score: Score | None) -> None:
    assert score_of(values, [Objective("accuracy", higher=True), Objective("ms", higher=False)]) == score
