"""Simulated times are those of the closed formulas where there are any, and of counting by hand where there are none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.errors import ConfigError
from mpitrain.schedules import simulate as simulation
from mpitrain.schedules.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE_SCATTER, ring
from mpitrain.schedules.fit import Sample, fit
from mpitrain.schedules.hierarchical import hierarchical
from mpitrain.schedules.ring import segmented_ring
from mpitrain.schedules.simulate import Machine, finish_times, simulate
from mpitrain.schedules.steps import Algorithm, Copy, Receive, Reduce, Round, ScheduleError, Send, data, inbox

MACHINE = Machine(alpha=3e-6, beta=2e-10, gamma=0.7e-10)
ROOT_2 = partial(BROADCAST["binomial"], root=2)
Formula = Callable[[int, float, Machine], float]              # ranks, bytes, machine -> seconds


def alphas_and_bytes(messages: Callable[[int], float], sent: Callable[[int], float], added: Callable[[int], float]) -> Formula:
    """Counts as functions of n; bytes as shares of the array."""
    return lambda n, size, m: messages(n) * m.alpha + sent(n) * size * m.beta + added(n) * size * m.gamma


def share(n: int) -> float:
    return (n - 1) / n


FORMULAS: list[tuple[str, Algorithm, Formula, bool]] = [      # name, algorithm, formula, for powers of two only
    ("ring", ring, alphas_and_bytes(lambda n: 2 * (n - 1), lambda n: 2 * share(n), share), False),
    ("direct", ALL_REDUCE["direct"], alphas_and_bytes(lambda n: 2 * (n - 1), lambda n: 2 * share(n), share), False),
    ("recursive_doubling", ALL_REDUCE["recursive_doubling"], alphas_and_bytes(math.log2, math.log2, math.log2), True),
    ("halving_doubling", ALL_REDUCE["halving_doubling"],
     alphas_and_bytes(lambda n: 2 * math.log2(n), lambda n: 2 * share(n), share), True),
    ("ring reduce-scatter", REDUCE_SCATTER["ring"], alphas_and_bytes(lambda n: n - 1, share, share), False),
    ("direct reduce-scatter", REDUCE_SCATTER["direct"], alphas_and_bytes(lambda n: n - 1, share, share), False),
    ("ring all-gather", ALL_GATHER["ring"], alphas_and_bytes(lambda n: n - 1, share, lambda n: 0), False),
    ("direct all-gather", ALL_GATHER["direct"], alphas_and_bytes(lambda n: n - 1, share, lambda n: 0), False),
    ("binomial broadcast", BROADCAST["binomial"], alphas_and_bytes(math.log2, math.log2, lambda n: 0), True),
    ("direct all-to-all", ALL_TO_ALL["direct"], alphas_and_bytes(lambda n: n - 1, share, share), False),
]
IDS = [name for name, *_ in FORMULAS]


@pytest.mark.parametrize(("algorithm", "formula", "powers"), [row[1:] for row in FORMULAS], ids=IDS)
@settings(max_examples=25)
@given(n=st.integers(2, 16), block=st.integers(1, 10**7), itemsize=st.sampled_from([2, 4, 8]),
       costs=st.tuples(*[st.floats(1e-8, 1e-4), st.floats(1e-12, 1e-8), st.floats(1e-12, 1e-8)]))
def test_the_simulated_time_is_that_of_the_formula(algorithm: Algorithm, formula: Formula, powers: bool, n: int, block: int,
                                                   itemsize: int, costs: tuple[float, float, float]) -> None:
    n = 1 << n.bit_length() - 1 if powers else n
    machine = Machine(*costs)
    expected = formula(n, n * block * itemsize, machine)
    assert simulate(algorithm, n, n * block, itemsize, machine) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("algorithm", [row[1] for row in FORMULAS], ids=IDS)
@pytest.mark.parametrize("n", [2, 4, 8])
def test_all_ranks_of_a_rotating_algorithm_take_the_time_of_one(algorithm: Algorithm, n: int,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    once = finish_times(algorithm, n, 12 * n, 4, MACHINE)
    monkeypatch.setattr(simulation, "ROTATING", set())
    each = finish_times(algorithm, n, 12 * n, 4, MACHINE)
    assert len(once) == len(each) == n
    assert [clock.seconds for clock in once] == pytest.approx([clock.seconds for clock in each], rel=1e-12)


@pytest.mark.slow
def test_four_thousand_ranks_are_timed_and_the_length_rounded_up() -> None:
    n, formulas = 4096, {name: formula for name, _, formula, _ in FORMULAS}
    for name in ("ring", "direct", "recursive_doubling"):
        assert simulate(ALL_REDUCE[name], n, 256 * n, 4, MACHINE) == pytest.approx(formulas[name](n, 1024 * n, MACHINE), rel=1e-9)
    assert simulate(ring, n, 256 * n - 1, 4, MACHINE) == simulate(ring, n, 256 * n, 4, MACHINE)


def test_a_length_that_does_not_divide_costs_no_more_than_the_next_that_does() -> None:
    low, found, high = (simulate(ring, 7, length, 4, MACHINE) for length in (7000, 7003, 7007))
    assert low < found <= high * (1 + 1e-12)


@pytest.mark.parametrize("name", list(ALL_REDUCE))
def test_one_rank_and_no_elements_take_no_time(name: str) -> None:
    assert simulate(ALL_REDUCE[name], 1, 1000, 4, MACHINE) == simulate(ALL_REDUCE[name], 5, 0, 4, MACHINE) == 0


def test_a_segmented_ring_pays_for_the_messages_and_sums_of_all_its_pieces() -> None:
    n, segment, pieces = 4, 1000, 10
    machine = Machine(alpha=1e-6, beta=3e-10, gamma=2e-10)
    size = 4 * n * segment * pieces
    found = simulate(partial(segmented_ring, segment=segment), n, n * segment * pieces, 4, machine)
    messages = 2 * (n - 1) * (pieces * machine.alpha + size / n * machine.beta)
    assert found == pytest.approx(messages + (n - 1) * size / n * machine.gamma)


def incast(rank: int, n: int, length: int) -> Iterator[Round]:
    """Everyone sends to rank 0 at once."""
    if rank == 0:
        yield [Receive(peer, inbox(peer * length, (peer + 1) * length)) for peer in range(1, n)]
    else:
        yield [Send(0, data(0, length))]


def test_messages_to_one_rank_arrive_one_after_the_other() -> None:
    message = MACHINE.alpha + 400 * MACHINE.beta
    assert [clock.seconds for clock in finish_times(incast, 4, 100, 4, MACHINE)] == pytest.approx(
        [3 * message, message, 2 * message, 3 * message])


def both_ways(rank: int, n: int, length: int) -> Iterator[Round]:
    yield [Receive(1 - rank, inbox(0, length)), Send(1 - rank, data(0, length))]


def test_both_directions_of_a_link_work_at_once() -> None:
    assert simulate(both_ways, 2, 100, 4, MACHINE) == pytest.approx(MACHINE.alpha + 400 * MACHINE.beta)


def late(rank: int, n: int, length: int) -> Iterator[Round]:
    """Rank 1 computes before it receives, and rank 0 serves rank 2 first, though it wrote rank 1 first."""
    if rank == 0:
        yield [Send(1, data(0, length)), Send(2, data(0, length))]
    elif rank == 1:
        yield [Copy(data(0, length), inbox(0, length))]
        yield [Receive(0, inbox(0, length))]
    else:
        yield [Receive(0, inbox(0, length))]


def test_a_message_waits_for_its_receive_and_the_next_one_does_not_wait_for_it() -> None:
    machine = Machine(alpha=0.0, beta=1.0, gamma=0.5)
    assert [clock.seconds for clock in finish_times(late, 3, 10, 1, machine)] == [20.0, 20.0, 10.0]
    slow = machine._replace(gamma=3.0)
    assert [clock.seconds for clock in finish_times(late, 3, 10, 1, slow)] == [40.0, 40.0, 10.0]


def two_sums(rank: int, n: int, length: int) -> Iterator[Round]:
    yield [Reduce(half, half, half) for half in (data(0, length // 2), data(length // 2, length))]


def test_a_rank_computes_one_thing_at_a_time() -> None:
    assert simulate(two_sums, 1, 100, 4, MACHINE) == pytest.approx(400 * MACHINE.gamma)


def test_the_longest_way_is_counted() -> None:
    last = max(finish_times(ring, 4, 4000, 4, MACHINE))
    assert last[1:] == (6, 6 * 4000, 3 * 4000)
    assert last.seconds == pytest.approx(6 * MACHINE.alpha + 24000 * MACHINE.beta + 12000 * MACHINE.gamma)


def test_between_nodes_messages_cost_what_is_said_and_the_hierarchical_algorithm_pays_off() -> None:
    nodes = [0, 0, 0, 0, 1, 1, 1, 1]
    machine = MACHINE._replace(nodes=nodes, alpha_between=1e-4, beta_between=1e-8)
    flat, layered = simulate(ring, 8, 8000, 4, machine), simulate(hierarchical(nodes), 8, 8000, 4, machine)
    assert flat == pytest.approx(14 * (1e-4 + 4000 * 1e-8) + 7 * 4000 * MACHINE.gamma)
    inside = 2 * 3 * (MACHINE.alpha + 8000 * MACHINE.beta) + 3 * 8000 * MACHINE.gamma
    assert layered == pytest.approx(inside + 2 * (1e-4 + 4000 * 1e-8) + 4000 * MACHINE.gamma)
    assert simulate(ROOT_2, 8, 10, 4, machine) > simulate(ROOT_2, 8, 10, 4, MACHINE)


def both_send_first(rank: int, n: int, length: int) -> Iterator[Round]:
    yield [Send(1 - rank, data(0, length))]
    yield [Receive(1 - rank, inbox(0, length))]


def uneven(rank: int, n: int, length: int) -> Iterator[Round]:
    yield [Send(1, data(0, length))] if rank == 0 else [Receive(0, inbox(0, length - 1))]


@pytest.mark.parametrize(("call", "message"), [
    (lambda: simulate(both_send_first, 2, 4, 4, MACHINE),
     "^rank 0 of 2 waits for ever in round 0; the checks of mpitrain.schedules.check say for whom$"),
    (lambda: simulate(uneven, 2, 4, 4, MACHINE),
     "^rank 0, round 0 sends 4 elements to rank 1, which receives 3 in round 0$"),
    (lambda: simulate(ring, 0, 4, 4, MACHINE),
     "^cannot simulate 0 ranks with 4 elements of 4 bytes; give at least 1 rank, 0 elements and 1 byte$"),
    (lambda: simulate(ring, 2, 4, 4, MACHINE._replace(beta=-1.0)),
     "^beta of the machine is -1.0; it should be a number of seconds, 0 or more$"),
    (lambda: simulate(ring, 2, 4, 4, MACHINE._replace(gamma=math.nan)),
     "^gamma of the machine is nan; it should be a number of seconds, 0 or more$"),
    (lambda: simulate(ring, 2, 4, 4, MACHINE._replace(nodes=[0])),
     "^the machine has nodes for 1 ranks, and 2 are simulated; give the node of each rank$"),
    (lambda: fit([Sample(ring, 2, 4, 0.0)]),
     "^a sample of 2 ranks and 4 bytes took 0.0 seconds; measured times are above 0$"),
    (lambda: fit([Sample(ring, n, size, 1e-5) for n in (2, 4) for size in (4, 1 << 20)]),
     r"^4 samples do not tell alpha, beta and gamma apart \(rank 2 of 3\); measure at least two all-reduce algorithms, "
     r"each on small and on large arrays$"),
])
def test_what_cannot_be_is_said_in_one_line(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
    assert issubclass(ScheduleError, ConfigError)


def samples(machine: Machine, names: tuple[str, ...] = ("ring", "recursive_doubling", "segmented_ring"),
            noise: Callable[[int], float] = lambda i: 1.0) -> list[Sample]:
    cases = [(ALL_REDUCE[name], n, size) for name in names for n in (2, 3, 4) for size in (64, 4096, 1 << 16, 1 << 20, 1 << 24)]
    return [Sample(algorithm, n, size, noise(i) * simulate(algorithm, n, size // 4, 4, machine))
            for i, (algorithm, n, size) in enumerate(cases)]


@settings(max_examples=8)
@given(costs=st.tuples(st.floats(1e-7, 1e-4), st.floats(1e-11, 1e-8), st.floats(1e-11, 1e-8)))
def test_a_fit_finds_the_machine_that_took_the_times(costs: tuple[float, float, float]) -> None:
    assert fit(samples(Machine(*costs)))[:3] == pytest.approx(costs, rel=1e-6)


def test_a_fit_to_noisy_times_is_near_and_no_constant_is_negative() -> None:
    found = fit(samples(MACHINE, noise=lambda i: 1 + 0.05 * (-1) ** i))
    assert found[:3] == pytest.approx(MACHINE[:3], rel=0.15)
    free = fit(samples(MACHINE._replace(gamma=0.0), noise=lambda i: 1 + 0.02 * math.sin(7 * i)))
    assert free.gamma >= 0 and free[:2] == pytest.approx(MACHINE[:2], rel=0.05)
