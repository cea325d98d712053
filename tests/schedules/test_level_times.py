"""Collectives timed level by level are equal to the simulation of every rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mpitrain.errors import ConfigError
from mpitrain.schedules import level_times, simulate
from mpitrain.schedules.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from mpitrain.schedules.direct import from_owners, to_owners
from mpitrain.schedules.hierarchical import hierarchical
from mpitrain.schedules.level_times import Level, flat_seconds, level_seconds, message_seconds, spread_over, ways
from mpitrain.schedules.parameter_servers import server_seconds
from mpitrain.schedules.ring import ring
from mpitrain.schedules.simulate import Clock, Machine
from mpitrain.schedules.steps import Algorithm, Round, cut, moved

NODE, CLUSTER = Level("node", 8, 2e-6, 4e-12, 1.25e-12), Level("cluster", 0, 3e-6, 4e-11, 1.25e-12)
LEVELS = (NODE, CLUSTER)


def machine(level: Level) -> Machine:
    return Machine(level.alpha, level.beta, level.gamma)


@pytest.mark.parametrize("algorithm", [*ways(), ALL_REDUCE["segmented_ring"]])
def test_the_way_through_a_collective_is_that_of_the_simulation(algorithm: Algorithm) -> None:
    link = Machine(2e-6, 4e-12, 9e-12)
    for n in (2, 3, 4, 5, 6, 7, 8, 12, 16, 33, 64):
        for each in (64, 64 * 1500):                          # halves of halves are whole
            length = n * each
            assert flat_seconds(algorithm, n, 4 * length, link) == pytest.approx(
                simulate.simulate(algorithm, n, length, 4, link), rel=1e-12)


@pytest.mark.parametrize("n", [16, 24, 32, 64])
@pytest.mark.parametrize("length", [1, 48_000])
def test_levels_one_after_the_other_are_equal_to_every_rank_at_once(n: int, length: int) -> None:
    length *= n * 8
    nodes = [rank // 8 for rank in range(n)]
    both = Machine(NODE.alpha, NODE.beta, NODE.gamma, nodes, CLUSTER.alpha, CLUSTER.beta)
    whole = simulate.simulate(hierarchical(nodes), n, length, 4, both)
    assert level_seconds("all_reduce", n, 1, 4 * length, LEVELS, "hierarchical") == pytest.approx(whole, rel=1e-9)
    if length > 1 << 20:                                      # and so is what a run takes, where rings are its choice
        assert level_seconds("all_reduce", n, 1, 4 * length, LEVELS) == pytest.approx(whole, rel=1e-9)


def test_ranks_some_places_apart_share_a_node_as_often_as_they_fit() -> None:
    assert spread_over(16, 1, LEVELS) == [8, 2] and spread_over(16, 4, LEVELS) == [2, 8] and spread_over(4, 8, LEVELS) == [1, 4]
    assert spread_over(6, 1, (Level("node", 4, 0, 0, 0), CLUSTER)) == [2, 3]       # pairs, which no node's end cuts
    assert spread_over(3, 3, LEVELS) == [1, 3]                # two of three in one node, but not of each group
    stride = 4                                                # of 16 ranks every 4th, two in each node
    nodes = [rank * stride // 8 for rank in range(16)]
    both = Machine(NODE.alpha, NODE.beta, NODE.gamma, nodes, CLUSTER.alpha, CLUSTER.beta)
    whole = simulate.simulate(hierarchical(nodes), 16, 16 * 3000, 4, both)
    assert level_seconds("all_reduce", 16, stride, 4 * 16 * 3000, LEVELS, "hierarchical") == pytest.approx(whole, rel=1e-9)


class ThreeLevels(simulate.Simulation):
    """The simulation of every rank, where a message's cost is that of the level at which its ranks meet."""

    def __init__(self, levels: tuple[Level, ...], n: int):
        super().__init__(Machine(0.0, 0.0, levels[0].gamma), n, 4, rotating=False)
        self.levels = levels

    def start_message(self, rank: int, now: Clock) -> None:
        _, _, receiver, _ = self.ready[rank][0]
        met = next(level for level in self.levels if not level.ranks or rank // level.ranks == receiver.rank // level.ranks)
        self.machine = Machine(met.alpha, met.beta, self.machine.gamma)
        super().start_message(rank, now)


def of_three(rank: int, n: int, length: int) -> Iterator[Round]:
    """Sockets of 2, nodes of 4: parts to their owners twice, a ring across nodes, and back."""
    pair, owned = [rank // 2 * 2, rank // 2 * 2 + 1], cut(2, length)
    half = owned[rank % 2]
    peers = [rank // 4 * 4 + rank % 2, rank // 4 * 4 + rank % 2 + 2]
    quarters = cut(2, half.length)
    quarter = quarters[peers.index(rank)]
    across = [other for other in range(n) if other % 4 == rank % 4]
    yield from moved(to_owners(rank % 2, 2, owned), ranks=pair)
    yield from moved(to_owners(peers.index(rank), 2, quarters), ranks=peers, data_by=half.start)
    yield from moved(ring(across.index(rank), len(across), quarter.length), ranks=across, data_by=half.start + quarter.start)
    yield from moved(from_owners(peers.index(rank), 2, quarters), ranks=peers, data_by=half.start)
    yield from moved(from_owners(rank % 2, 2, owned), ranks=pair)


@pytest.mark.parametrize("n", [8, 12, 32])
def test_three_levels_are_equal_to_every_rank_at_once_too(n: int) -> None:
    levels = (Level("socket", 2, 1e-6, 1e-11, 2e-12), Level("node", 4, 2e-6, 5e-11, 2e-12),
              Level("cluster", 0, 9e-6, 1e-9, 2e-12))
    length = n * 4 * 500
    whole = max(ThreeLevels(levels, n).run(of_three, length)).seconds
    assert level_seconds("all_reduce", n, 1, 4 * length, levels, "hierarchical") == pytest.approx(whole, rel=1e-9)


def test_small_parts_double_across_nodes() -> None:
    nbytes = 8 * 1000.0
    inside = 2 * (7 * NODE.alpha + 7 / 8 * nbytes * NODE.beta) + 7 / 8 * nbytes * NODE.gamma
    doubling = 9 * (CLUSTER.alpha + nbytes / 8 * (CLUSTER.beta + CLUSTER.gamma))
    assert level_seconds("all_reduce", 8 * 512, 1, nbytes, LEVELS) == pytest.approx(inside + doubling)
    assert level_seconds("all_reduce", 8 * 512, 1, nbytes, LEVELS, "hierarchical") > 1022 * CLUSTER.alpha


def test_thousands_of_ranks_are_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object) -> float:
        raise AssertionError("a rank was simulated")
    monkeypatch.setattr(level_times, "simulate", never)
    found = {n: level_seconds("all_reduce", n, 1, 1e9, LEVELS) for n in (64, 512, 3072)}
    assert found[64] < found[512] < found[3072] < 2 * (7 / 8 * 1e9 * NODE.beta + 1e9 / 8 * CLUSTER.beta) + 0.01


def test_halves_of_an_all_reduce_take_what_the_whole_does() -> None:
    whole = level_seconds("all_reduce", 64, 1, 1e8, LEVELS, "hierarchical")
    halves = [level_seconds(operation, 64, 1, 1e8, LEVELS) for operation in ("reduce_scatter", "all_gather")]
    assert sum(halves) == pytest.approx(whole, rel=1e-12) and halves[1] < halves[0]
    for operation, table in (("reduce_scatter", REDUCE_SCATTER), ("all_gather", ALL_GATHER)):
        link = machine(CLUSTER)
        assert level_seconds(operation, 8, 8, 8 * 4000, LEVELS) == pytest.approx(
            simulate.simulate(table["ring"], 8, 8 * 1000, 4, link), rel=1e-12)


def test_a_ring_over_nodes_goes_at_the_pace_of_the_links_between_them() -> None:
    nodes = [rank // 8 for rank in range(32)]
    both = Machine(NODE.alpha, NODE.beta, NODE.gamma, nodes, CLUSTER.alpha, CLUSTER.beta)
    whole = simulate.simulate(ring, 32, 32 * 30_000, 4, both)
    assert level_seconds("all_reduce", 32, 1, 32 * 120_000, LEVELS, "ring") == pytest.approx(whole, rel=0.02)


def test_an_all_to_all_sends_each_part_at_its_level() -> None:
    link = machine(NODE)
    assert level_seconds("all_to_all", 8, 1, 8 * 4000, LEVELS) == pytest.approx(
        simulate.simulate(ALL_TO_ALL["direct"], 8, 8 * 1000, 4, link), rel=1e-12)
    for n, most in ((16, 1.6), (64, 1.1)):
        nodes = [rank // 8 for rank in range(n)]
        both = Machine(NODE.alpha, NODE.beta, NODE.gamma, nodes, CLUSTER.alpha, CLUSTER.beta)
        whole = simulate.simulate(ALL_TO_ALL["direct"], n, n * 100_000, 4, both)
        assert 1 < whole / level_seconds("all_to_all", n, 1, n * 400_000, LEVELS) < most


def test_ranks_behind_one_link_share_it() -> None:
    shared = (NODE, Level("cluster", 0, 3e-6, 1e-9, 0.0, sharing=8))
    bytes_a_rank = 1e9 / 8
    inside = 2 * (7 * NODE.alpha + 7 / 8 * 1e9 * NODE.beta) + 7 / 8 * 1e9 * NODE.gamma
    across = 2 * (3 * 3e-6 + 3 / 4 * bytes_a_rank * 8 * 1e-9)
    assert level_seconds("all_reduce", 32, 1, 1e9, shared, "hierarchical") == pytest.approx(inside + across, rel=1e-12)
    assert message_seconds(4, 8, 1e6, shared) == pytest.approx(3e-6 + 8e-9 * 1e6)       # 8 pipelines cross at once
    assert message_seconds(4, 1, 1e6, shared) == pytest.approx(NODE.alpha + NODE.beta * 1e6)
    flat = level_seconds("all_reduce", 32, 1, 1e9, shared, "ring")           # one of the 8 sends across
    assert flat == pytest.approx(2 * (31 * 3e-6 + 31 / 32 * 1e9 * 1e-9), rel=1e-9)


def test_alone_or_without_data_nothing_takes_time_and_too_many_ranks_are_refused() -> None:
    assert level_seconds("all_reduce", 1, 1, 1e6, LEVELS) == level_seconds("all_gather", 8, 1, 0, LEVELS) == 0.0
    assert message_seconds(1, 1, 1e6, LEVELS) == 0.0
    with pytest.raises(ConfigError, match="16 ranks do not fit the machine, whose last level node has 8 ranks"):
        level_seconds("all_reduce", 16, 1, 1e6, (NODE,))


def test_parameter_servers_load_their_links_with_what_all_workers_send() -> None:
    link = Level("ethernet", 0, 0.0, 8e-10, 0.0)
    assert server_seconds(1e8, 8, 8, link) == pytest.approx((7 / 8 * 0.08, 7 / 8 * 0.08))
    assert server_seconds(1e8, 8, 4, link) == pytest.approx((7 / 4 * 0.08, 7 / 4 * 0.08))
    assert server_seconds(1e8, 2, 1, link) == pytest.approx((0.08, 0.08)) and server_seconds(1e8, 1, 1, link) == (0.0, 0.0)
    for servers in (0, 9):
        with pytest.raises(ConfigError, match=f"there are {servers} parameter servers on 8 hosts; give 1 to 8"):
            server_seconds(1e8, 8, servers, link)
