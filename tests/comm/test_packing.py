"""Packed messages, all ranks in one process: the same bits on every rank."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from algorithms import direct, ring_reduce_scatter, star

from mpitrain.comm.messages.bus import across_the_bus
from mpitrain.comm.messages.packing import compacted, packed
from mpitrain.comm.messages.program import Operation, Stage, needed, plain
from mpitrain.kernels.wire import format_of
from mpitrain.schedules.collectives import ALL_REDUCE, part
from mpitrain.schedules.ring import segmented_ring
from mpitrain.schedules.steps import data

ALGORITHMS = {**{name: ALL_REDUCE.resolve(name) for name in ALL_REDUCE}, "direct": direct, "star": star}
RANKS = [2, 3, 4, 5, 8]


class Simulated:
    """One rank's memory and what is left of its program."""

    def __init__(self, program: Sequence[Stage], data: np.ndarray, packing: str):
        sizes = {buffer: needed(program, buffer) for buffer in ("inbox", "data16", "inbox16")}
        self.memory = {"data": data, "inbox": np.full(sizes["inbox"], np.nan, np.float32),
                       **{name: np.full(sizes[name], 0xFFFF, np.uint16) for name in ("data16", "inbox16")}}
        self.program, self.format = deque(program), format_of(packing)
        self.posted = False

    def compute(self, operations: Sequence[Operation]) -> None:
        for name, parts in operations:
            views = [self.memory[buffer][start:stop] for buffer, start, stop in parts]
            if name == "sum":
                np.add(views[0], views[1], out=views[2])
            elif name == "copy":
                views[1][...] = views[0]
            else:
                getattr(self.format, name)(*views)


def simulate(program: Callable[[int], Sequence[Stage]], values: np.ndarray, packing: str = "bfloat16",
             memories: Sequence[dict[str, np.ndarray]] = ()) -> np.ndarray:
    """What each rank's data (rows) hold in the end. The ranks may bring memory."""
    n = len(values)
    ranks = [Simulated(program(rank), values[rank].copy(), packing) for rank in range(n)]
    for rank, memory in zip(ranks, memories):
        rank.memory.update(memory)
    wires: dict[Any, deque[np.ndarray]] = defaultdict(deque)
    moved = True
    while moved:
        moved = False
        for number, rank in enumerate(ranks):
            stage = rank.program[0] if rank.program else None
            if stage and not rank.posted:
                rank.compute(stage.before)
                for (buffer, start, stop), peer in stage.sends:
                    wires[number, peer].append(rank.memory[buffer][start:stop].copy())
                rank.posted = True
            counts: dict[int, int] = defaultdict(int)
            for _, peer in stage.receives if stage else ():
                counts[peer] += 1
            if stage and all(len(wires[peer, number]) >= count for peer, count in counts.items()):
                for (buffer, start, stop), peer in stage.receives:
                    rank.memory[buffer][start:stop] = wires[peer, number].popleft()
                rank.compute(rank.program.popleft().after)
                rank.posted, moved = False, True
    assert not any(rank.program for rank in ranks) and not any(wires.values())
    return np.stack([rank.memory["data"] for rank in ranks])


def contributions(n: int, length: int) -> np.ndarray:
    return np.random.default_rng([n, length]).standard_normal((n, length)).astype(np.float32)


def rounded(x: np.ndarray, packing: str) -> np.ndarray:
    kept, to = x.copy(), np.empty(x.size, np.uint16)
    format_of(packing).round(kept.reshape(-1), to)
    return kept


def packed_program(name: str, n: int, length: int) -> Callable[[int], list[Stage]]:
    return lambda rank: packed(plain(ALGORITHMS[name](rank, n, length)), [data(0, length)], True)


@pytest.mark.parametrize("packing", ["bfloat16", "float16"])
@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_rank_ends_with_the_same_rounded_sum(name: str, n: int, packing: str) -> None:
    for length in (0, 1, n - 1, 4 * n + 1, 100):
        values = contributions(n, length)
        found = simulate(packed_program(name, n, length), values, packing)
        assert all(row.tobytes() == found[0].tobytes() for row in found)
        assert rounded(found[0], packing).tobytes() == found[0].tobytes(), "not a number of the wire's format"
        exact, scale = values.astype(np.float64).sum(0), np.abs(values).astype(np.float64).sum(0)
        assert (np.abs(found[0] - exact) <= n * {"bfloat16": 2**-8, "float16": 2**-11}[packing] * scale).all()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_sums_that_need_no_rounding_are_exact(name: str) -> None:
    values = np.random.default_rng(1).integers(-8, 8, (5, 100)).astype(np.float32)
    found = simulate(packed_program(name, 5, 100), values)
    assert (found == values.sum(0)).all()


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_packed_values_in_the_least_memory_make_the_same_bits(name: str, n: int) -> None:
    length = 6 * n + 5
    values = contributions(n, length)
    wide = packed_program(name, n, length)
    assert (simulate(lambda rank: compacted(wide(rank)), values) == simulate(wide, values)).all()


def test_a_ring_of_pieces_keeps_the_packed_values_of_one_piece() -> None:
    length, n = 16 * 2 * 128, 2
    program = packed(plain(segmented_ring(0, n, length, segment=128)), [data(0, length)], True)
    assert needed(program, "data16") == length and needed(compacted(program), "data16") == 2 * 128


def test_two_ranks_add_in_float32_and_round_each_value_once() -> None:
    values = contributions(2, 64)
    found = simulate(packed_program("ring", 2, 64), values)
    sent = rounded(values, "bfloat16")
    for owner in range(2):
        own = slice(part(owner, 2, 64).start, part(owner, 2, 64).stop)
        wanted = rounded(sent[1 - owner, own] + values[owner, own], "bfloat16")
        assert (found[:, own] == wanted).all()


def test_the_ring_packs_each_value_in_the_pass_that_makes_it_and_forwards_what_came() -> None:
    names = [[operation.name for operation in (*stage.before, *stage.after)] for stage in packed_program("ring", 3, 9)(0)]
    assert names == [["pack", "add_pack"], ["add_round"], ["unpack"], ["unpack"]]


@pytest.mark.parametrize("n", RANKS)
def test_a_scattered_sum_keeps_its_float32_digits(n: int) -> None:
    length = 4 * n + 1
    def program(rank: int) -> list[Stage]:
        own = part(rank, n, length)
        return packed(plain(ring_reduce_scatter(rank, n, length)), [data(own.start, own.stop)], False)
    values = contributions(n, length)
    found = simulate(program, values)
    total = np.concatenate([found[rank, part(rank, n, length).start:part(rank, n, length).stop] for rank in range(n)])
    assert (np.abs(total - values.astype(np.float64).sum(0)) <= n * 2**-8 * np.abs(values).sum(0)).all()
    assert (rounded(total, "bfloat16") != total).any()


def over_the_bus(name: str, values: np.ndarray, packing: str) -> tuple[np.ndarray, int, int]:
    """What each rank's device holds in the end, and the bytes that all of them have sent down and up. What has not come down is
    NaN on the host."""
    n, length = values.shape
    programs, memories, ups, n_bytes = [], [], [], [0, 0]
    for rank in range(n):
        stages, crossing = across_the_bus(packed_program(name, n, length)(rank), [(0, length)], True)
        memory = {"data": np.full(length, np.nan, np.float32), "data16": np.full(length, 0xFFFF, np.uint16)}
        for start, stop in crossing.packed:
            format_of(packing).pack(values[rank, start:stop].copy(), memory["data16"][start:stop])
        for start, stop in crossing.wide:
            memory["data"][start:stop] = values[rank, start:stop]
        n_bytes[0] += sum((stop - start) * size for bounds, size in ((crossing.packed, 2), (crossing.wide, 4))
                          for start, stop in bounds)
        n_bytes[1] += sum((stop - start) * 2 for start, stop in crossing.up)
        programs.append(stages)
        memories.append(memory)
        ups.append(crossing.up)
    simulate(lambda rank: programs[rank], values, packing, memories)
    found = np.full(values.shape, np.nan, np.float32)
    for rank, up in enumerate(ups):
        for start, stop in up:
            format_of(packing).unpack(memories[rank]["data16"][start:stop], found[rank, start:stop])
    return found, *n_bytes


@pytest.mark.parametrize("packing", ["bfloat16", "float16"])
@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_devices_send_packed_makes_the_bits_of_the_host(name: str, n: int, packing: str) -> None:
    for length in (0, 1, n - 1, 4 * n + 1, 100):
        values = contributions(n, length)
        wanted = simulate(packed_program(name, n, length), values, packing)
        found, down, up = over_the_bus(name, values, packing)
        assert found.tobytes() == wanted.tobytes(), length
        assert up == 2 * values.size and down <= 4 * values.size


@pytest.mark.parametrize(("name", "bytes_each"), [("recursive_doubling", 2), ("direct", 2.5), ("segmented_ring", 3.5)])
def test_values_come_down_packed_unless_others_are_added_to_them_first(name: str, bytes_each: float) -> None:
    _, down, _ = over_the_bus(name, contributions(4, 400), "bfloat16")
    assert down == bytes_each * 1600
