"""Rounds: who is drawn, who answers, and on which rows a worker trains, whoever else is there."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain.data.rounds import Draw, Local, Rounds


def draw(count: int = 50, each: float = 8, *, poisson: bool = False, drop: float = 0.0, seed: int = 4) -> Draw:
    return Draw(count, each, poisson, drop, seed)


def rounds(sizes: list[int], made: Draw, local: Local, **options: int | str) -> Rounds:
    bounds = np.cumsum([0, *sizes])
    return Rounds([np.arange(a, b) for a, b in zip(bounds, bounds[1:])], made, local, **options)         # type: ignore[arg-type]


def test_a_round_has_so_many_different_workers_and_each_is_drawn_as_often() -> None:
    found = [draw().drawn(round) for round in range(2000)]
    assert all(len(np.unique(drawn)) == 8 and (np.diff(drawn) > 0).all() for drawn in found)
    counts = np.bincount(np.concatenate(found), minlength=50)
    assert ((counts - 320) ** 2 / (320 * 42 / 50)).sum() < 95                   # chi-square of 49: 85.4 in 0.1 %, and some
    assert not np.array_equal(found[0], draw(seed=5).drawn(0))
    assert draw(each=50).drawn(3).tolist() == list(range(50))


def test_a_poisson_draw_takes_each_worker_by_itself() -> None:
    made = draw(each=0.1, poisson=True)
    sizes = np.array([len(made.drawn(round)) for round in range(4000)])
    assert abs(sizes.mean() - 5) < 4 * np.sqrt(4.5 / 4000) and abs(sizes.var() - 4.5) < 0.5 and made.expected == 5
    assert draw(each=1.0, poisson=True).drawn(0).tolist() == list(range(50))
    more = Draw(60, 0.1, True, 0.0, 4)                                          # whether 7 is drawn is its own affair
    assert all((7 in made.drawn(round)) == (7 in more.drawn(round)) for round in range(100))


def test_a_share_of_the_drawn_does_not_answer_by_round_and_worker() -> None:
    made, all_ = draw(drop=0.3), draw()
    lost = 0
    for round in range(500):
        assert set(made.arrived(round)) <= set(all_.drawn(round)) and np.array_equal(made.drawn(round), all_.drawn(round))
        lost += 8 - len(made.arrived(round))
    assert abs(lost / 4000 - 0.3) < 4 * np.sqrt(0.21 / 4000)


@pytest.mark.parametrize(("rows", "batch", "epochs", "steps", "sizes"), [
    (10, 4, 2, 0, [4, 4, 2, 4, 4, 2]), (1, 20, 3, 0, [1, 1, 1]), (3, 20, 1, 0, [3]), (10, 4, 0, 4, [4, 4, 2, 4]),
    (100, 7, 0, 2, [7, 7])])
def test_local_epochs_see_each_row_once_in_an_order_of_their_own(rows: int, batch: int, epochs: int, steps: int,
                                                                 sizes: list[int]) -> None:
    local = Local(batch, epochs, steps)
    plan = local.batches(rows, base=9)
    assert [len(places) for _, places in plan] == sizes == [len(p) for _, p in local.batches(rows, base=10)]
    assert local.count(rows) == len(plan) and local.seen(rows) == sum(sizes)
    for epoch in range(epochs):
        seen = np.concatenate([places for number, places in plan if number == epoch])
        assert np.array_equal(np.sort(seen), np.arange(rows))
    if rows == 10 and epochs:
        orders = local.orders(rows, 9)
        assert not np.array_equal(orders[0], orders[1]) and not np.array_equal(orders, local.orders(rows, 10))


def test_weights_are_those_of_rows_or_equal_and_add_up_to_one() -> None:
    by_rows, equal = (rounds([10, 30, 60], draw(3, 3), Local(5, 1, 0), seats=2, weights=how) for how in ("rows", "equal"))
    assert by_rows.weights(np.array([0, 2])).tolist() == [10 / 70, 60 / 70]
    assert equal.weights(np.array([0, 2])).tolist() == [0.5, 0.5] and len(equal.weights(np.zeros(0, np.int64))) == 0


def test_seats_share_the_workers_of_a_round_in_order() -> None:
    found = rounds([4] * 9, draw(9, 9), Local(2, 1, 0), seats=4)
    for arrived in range(10):
        seated = found.seated(arrived)
        assert [place for seat in seated for place in seat] == list(range(arrived)) and len(seated) == 4
        assert max(map(len, seated)) - min(map(len, seated)) <= 1


def test_a_round_counts_the_rows_that_its_workers_see() -> None:
    found = rounds([10, 10, 20, 20], draw(4, 2), Local(8, 3, 0), seats=2)
    assert found.batch == round(2 * 3 * 15) and found.steps_per_epoch == 2
    arrived = found.draw.arrived(5)
    assert found.size(5) == len(found.rows(5)) == sum(found.sizes[arrived])
