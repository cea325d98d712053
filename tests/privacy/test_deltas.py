"""What workers of a federation tell: each change clipped, alike whatever rows are behind it, or only the sum of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from mpitrain.data.rounds import Draw, Local, Rounds
from mpitrain.parallel.workers.private import PrivateDeltas, SecureDeltas
from mpitrain.privacy.accountant import RenyiAccountant, Spent
from mpitrain.privacy.fixed_point import FixedPoint
from mpitrain.privacy.mechanism import Mechanism
from mpitrain.privacy.noise import Noise


class Alone:
    """The channel of one rank."""

    rank, size = 0, 1

    def allreduce(self, array: Any, *, name: str) -> None:
        pass


def mechanism_of(sigma: float, spent: Spent | None = None) -> Mechanism:
    return Mechanism(0.5, sigma, 0.5, 4.0, Noise(Alone()), spent)          # type: ignore[arg-type]


def turn(worker: int, index: int, weight: float = 1.0) -> Any:
    return SimpleNamespace(worker=worker, index=index, weight=weight)


def clipped(delta: np.ndarray) -> np.ndarray:
    return delta * min(1.0, 0.5 / np.sqrt((delta.astype(np.float64) ** 2).sum()))


def test_each_change_is_clipped_and_counts_the_same() -> None:
    spent = Spent(RenyiAccountant(), 1e-5)
    deltas, seat = PrivateDeltas(2, mechanism_of(0.0, spent)), np.full(30, np.nan, np.float32)
    changes = [np.random.default_rng(n).normal(0, size, 30).astype(np.float32) for n, size in enumerate((9.0, 1e-3, 0.2))]
    deltas.begin(0)
    for n, change in enumerate(changes):
        deltas.add(turn(n, 0, weight=float(n)), change.copy(), seat, first=n == 0)
    assert not deltas.squares.any()                           # norms of what was not clipped are nobody's
    assert np.allclose(deltas.arrived(seat, 0), sum(map(clipped, changes)) / 4, rtol=1e-5, atol=1e-7)
    assert spent.history == {(0.5, 0.0): 1}


def secure_of(drop: float, told: list[str], spent: Spent | None = None) -> SecureDeltas:
    rounds = Rounds([np.arange(3)] * 6, Draw(6, 6, False, drop, 5), Local(2, 1, 0), 2)
    deltas = SecureDeltas(2, mechanism_of(0.0, spent), channel=Alone(), rounds=rounds, own_seats=range(2),
                          numbers=FixedPoint(0.5, 8), threshold=0.6, tell=told.append)
    deltas.length = 30
    return deltas


def one_round(deltas: SecureDeltas, round: int) -> tuple[np.ndarray, np.ndarray]:
    """What came out of a round, and the sum of what the workers sent."""
    deltas.begin(round)
    arrived = deltas.rounds.draw.arrived(round)
    total, sent = np.zeros(30, np.float32), np.zeros(30)
    for seat, places in enumerate(deltas.rounds.seated(len(arrived))):
        for number, place in enumerate(places):
            change = np.random.default_rng(int(arrived[place])).normal(0, 1, 30).astype(np.float32)
            sent += clipped(change)
            deltas.add(turn(int(arrived[place]), seat), change, total, first=number == 0)
            assert not total.any()                            # nothing of it is in an arena
    return deltas.arrived(total, round), sent


def test_only_the_sum_comes_out_of_a_secure_round() -> None:
    told: list[str] = []
    found, sent = one_round(secure_of(0.0, told), 0)
    assert np.allclose(found, sent / 4, rtol=0, atol=1e-6) and not told


def test_workers_go_at_all_times_and_a_round_of_too_few_is_zero_and_said_and_counted() -> None:
    told: list[str] = []
    spent = Spent(RenyiAccountant(), 1e-5)
    deltas = secure_of(0.4, told, spent)
    outcomes = [one_round(deltas, round) for round in range(4)]
    left_out = [n for n, (found, _) in enumerate(outcomes) if not found.any()]
    assert 0 < len(left_out) < 4 and [line.split(" adds")[0] for line in told] == [f"round {n + 1}" for n in left_out]
    assert all("and privacy.threshold asks for" in line for line in told)
    for n, (found, sent) in enumerate(outcomes):
        assert n in left_out or np.allclose(found, sent / 4, rtol=0, atol=1e-6)
    assert spent.history == {(0.5, 0.0): 4}
