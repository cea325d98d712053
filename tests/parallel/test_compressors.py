"""Compressors, without messages: what travels and what is kept is what there was; bits depend on no bucket and no owner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.parallel.compress.compressor import Compressor, Piece, make_compressor
from mpitrain.parallel.compress.lowrank import orthonormal
from mpitrain.parallel.compress.simulate import Workers

NAMES = ("int8", "int8:stochastic", "int4", "levels:3", "levels:11", "onebit", "topk:0.01", "topk:0.3", "randomk:0.1",
         "powersgd:1", "powersgd:4")
EXACT = {"int8", "int4", "levels:3", "levels:11", "topk:0.01", "topk:0.3", "randomk:0.1"}
LENGTHS = (0, 1, 2, 255, 256, 257, 4095, 4096, 4097, 9000)


def pieces_of(*shapes: tuple[int, ...], first: int = 0) -> list[Piece]:
    found, at = [], 0
    for i, shape in enumerate(shapes, first):
        size = int(np.prod(shape))
        found.append(Piece(f"p{i}", at, at + size, 0, shape))
        at += size
    return found


MODEL = pieces_of((40, 30), (40,), (16, 6, 5, 5), (16,), (90, 50), (0,), (1,), (10, 84))
SIZE = MODEL[-1].stop


def normal(step: int, worker: int, size: int = SIZE) -> Any:
    return np.random.default_rng([step, worker, size]).standard_normal(size).astype(np.float32)


def sent_by_one(name: str, pieces: Sequence[Piece], gradient: Any, error: Any) -> tuple[Any, Any, Compressor]:
    """What one worker's message says, and its new residual."""
    compressor: Any = make_compressor(name)(pieces, 1)
    state, found = compressor.new_state(), np.empty_like(gradient)
    state["error"][...] = error
    if compressor.kind == "packed":
        message = np.empty(compressor.nbytes(0, compressor.blocks), np.uint8)
        compressor.encode(0, 0, gradient, state["error"], 0, compressor.blocks, message)
        compressor.decode(message, 0, compressor.blocks, found, False)
        return found, state["error"], compressor
    if compressor.kind == "gathered":
        message = np.empty(compressor.nbytes(), np.uint8)
        compressor.encode(0, gradient, state, message)
        compressor.decode(0, message[None], found)
        return found, state["error"], compressor
    for phase in range(compressor.phases):
        numbers = np.empty(compressor.words(phase), np.float32)
        compressor.encode(phase, 0, gradient, state, numbers)
        compressor.decode(phase, 0, numbers, state, found)
    return found, state["error"], compressor


@st.composite
def values(draw: st.DrawFn) -> tuple[Any, Any]:
    """A gradient and a residual of one length: ordinary, ties, denormal, all equal, zero."""
    size = draw(st.sampled_from(LENGTHS))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    x, e = (rng.standard_normal(size).astype(np.float32) for _ in range(2))
    kind = draw(st.sampled_from(["ordinary", "ties", "denormal", "equal", "zero", "heavy"]))
    if kind == "ties":
        x, e = np.round(2 * x), np.round(e)
    elif kind == "heavy":
        x = x ** 5
    factor = np.float32({"denormal": 1e-39, "zero": 0, "equal": 0}.get(kind, draw(st.sampled_from([1, 1e-20, 1e20]))))
    return x * factor + np.float32(0.7 if kind == "equal" else 0), e * factor


@pytest.mark.parametrize("name", NAMES)
@given(given=values())
@settings(max_examples=25, deadline=None)
def test_what_is_sent_and_what_is_kept_are_what_there_was(name: str, given: tuple[Any, Any]) -> None:
    """To the bit where a compressor says so; elsewhere within a unit in the last place of the larger one."""
    gradient, error = given
    rows = max(int(np.sqrt(len(gradient))), 1)
    whole = len(gradient) // rows * rows
    pieces = pieces_of((rows, whole // rows), (len(gradient) - whole,))
    a = gradient + error
    sent, left, compressor = sent_by_one(name, pieces, gradient, error)
    assert compressor.exact == (name in EXACT)
    off = np.abs(sent.astype(float) + left - a)
    assert (off == 0).all() if compressor.exact else (off <= np.spacing(np.maximum(np.abs(a), np.abs(sent)))).all()
    if not a.any():
        assert not sent.any() and not left.any()


@pytest.mark.parametrize("name", NAMES)
def test_over_200_steps_nothing_is_lost(name: str) -> None:
    """What has arrived and what is still owed are the dense sum."""
    workers = Workers(make_compressor(name), MODEL, 3, seed=5)
    dense, arrived = np.zeros(SIZE), np.zeros(SIZE)
    for step in range(200):
        gradients = [normal(step, worker) for worker in range(3)]
        dense += np.sum(gradients, axis=0, dtype=float)
        arrived += workers.exchange(step, gradients)[0]
    owed = sum(state["error"].astype(float) for state in workers.states) + workers.shared.get("sum_error", np.zeros(SIZE))
    assert np.abs(arrived + owed - dense).max() <= 1e-6 * 200 * np.abs(dense).max()
    assert np.abs(arrived - dense).max() > 1e-3, "something is owed, or the law says nothing"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_all_ranks_get_the_same_bits(name: str, n: int) -> None:
    workers = Workers(make_compressor(name), MODEL, n)
    for step in range(3):
        results = workers.exchange(step, [normal(step, worker) for worker in range(n)])
        assert len({result.tobytes() for result in results}) == 1 and workers.parted is None


@pytest.mark.parametrize("name", NAMES)
def test_bits_depend_on_no_bucket_and_no_cut(name: str) -> None:
    """All parameters in one array, each in its own, and, where they may be cut, cut at a block."""
    make = make_compressor(name)
    cut = 2 * make.block if make.block and 2 * make.block < 4500 else 0
    whole = Workers(make, MODEL, 2)
    parts = []
    for piece in MODEL:
        size = piece.stop - piece.start
        for start, stop in [(0, cut), (cut, size)] if cut and cut < size else [(0, size)]:
            parts.append((piece.start + start, Workers(make, [Piece(piece.name, 0, stop - start, start, piece.shape)], 2)))
    for step in range(4):
        gradients = [normal(step, worker) for worker in range(2)]
        found = np.concatenate([workers.exchange(step, [g[at:at + workers.compressors[0].length].copy() for g in gradients])[0]
                                for at, workers in parts])
        assert found.tobytes() == whole.exchange(step, gradients)[0].tobytes()


@pytest.mark.parametrize("name", [*NAMES, "powersgd:1000"])
@pytest.mark.parametrize("feedback", [True, False])
def test_what_is_not_finite_arrives_from_any_place_and_leaves_no_trace(name: str, feedback: bool) -> None:
    """On every rank, in its own parameter and no other; residuals and all other states stay finite."""
    for turn, value in enumerate((np.nan, np.inf, -np.inf)):
        for piece in (piece for piece in MODEL if piece.stop > piece.start):
            workers = Workers(make_compressor(name), MODEL, 2, feedback=feedback)
            workers.exchange(0, [normal(0, worker) for worker in range(2)])
            gradients = [normal(1, worker) for worker in range(2)]
            places = (piece.start, piece.stop - 1, (piece.start + piece.stop) // 2)
            gradients[turn % 2][places[turn]] = value
            for result in workers.exchange(1, gradients):
                wrong = np.flatnonzero(~np.isfinite(result))
                assert len(wrong) and piece.start <= wrong[0] and wrong[-1] < piece.stop, (value, piece)
            assert all(np.isfinite(array).all() for state in workers.states for array in state.values())


@pytest.mark.parametrize("name", ["randomk:0.1", "powersgd:2"])
def test_linear_compressors_commute_with_the_sum(name: str) -> None:
    """Of several workers arrives what would arrive of one that has their sum, but for rounding."""
    many, one = Workers(make_compressor(name), MODEL, 3), Workers(make_compressor(name), MODEL, 1)
    gradients = [normal(0, worker) for worker in range(3)]
    found, alone = many.exchange(0, gradients)[0], one.exchange(0, [sum(gradients[1:], gradients[0])])[0]
    assert np.abs(found - alone).max() <= 1e-4


def test_random_elements_without_feedback_are_right_on_average() -> None:
    """Within 4 standard errors over 2,000 draws; each element as often as any other."""
    pieces, draws = pieces_of((1, 47)), 2000
    compressor: Any = make_compressor("randomk:0.1")(pieces, 1, feedback=False)
    gradient, message, found = normal(0, 0, 47), np.empty(5, np.float32), np.empty(47, np.float32)
    total, often = np.zeros(47), np.zeros(47)
    for step in range(draws):
        compressor.encode(0, step, gradient, {}, message)
        compressor.decode(0, step, message, {}, found)
        total += found
        often += found != 0
    chance = np.where(np.arange(47) < 40, 1 / 10, 1 / 7)          # the last 7 are neighbours of each other
    error = np.abs(gradient) / chance * np.sqrt(chance * (1 - chance) / draws)
    assert (np.abs(total / draws - gradient) <= 4 * error).all()
    assert (np.abs(often / draws - chance) <= 4 * np.sqrt(chance * (1 - chance) / draws)).all()


def test_stochastic_rounding_is_right_on_average_and_rounds_to_a_neighbour() -> None:
    """Within 4 standard errors over 2,000 steps; other words on each worker, for the sum, and in each step."""
    compressor: Any = make_compressor("int8:stochastic")(pieces_of((3, 100)), 1, seed=1)
    gradient, total, found, steps = normal(0, 0, 300), np.zeros(300), np.empty(300, np.float32), 2000
    message = np.empty(compressor.nbytes(0, 2), np.uint8)
    seen = set()
    scale = np.repeat([np.abs(gradient[:256]).max(), np.abs(gradient[256:]).max()], [256, 44]) / 127
    for step in range(steps):
        compressor.encode(step, 0, gradient, None, 0, 2, message)
        compressor.decode(message, 0, 2, found, False)
        total += found
        seen.add(message.tobytes())
        assert (np.abs(found - gradient) <= scale * 1.0001).all()
    assert (np.abs(total / steps - gradient) <= 4 * scale * 0.5 / np.sqrt(steps) + 1e-6).all() and len(seen) == steps
    for step, worker in ((0, 0), (0, 1), (0, -1)):
        compressor.encode(step, worker, gradient, None, 0, 2, message)
        assert (message.tobytes() in seen) == (worker == 0)


def test_all_workers_draw_the_same_elements_of_a_parameter_wherever_it_lies() -> None:
    a: Any = make_compressor("randomk:0.25")(pieces_of((30,), (40,)), 2, seed=1)
    b: Any = make_compressor("randomk:0.25")(pieces_of((40,), first=1), 2, seed=1)
    other: Any = make_compressor("randomk:0.25")(pieces_of((40,), first=1), 2, seed=2)
    drawn = a.drawn(7)
    assert (drawn[drawn >= 30] - 30 == b.drawn(7)).all() and (b.drawn(7) // 4 == np.arange(10)).all()
    assert (b.drawn(7) != b.drawn(8)).any() and (b.drawn(7) != other.drawn(7)).any()


def test_a_matrix_of_low_rank_arrives_whole_and_others_as_a_projection() -> None:
    """With the rank reached: M itself, after one step. Beyond: P P' M, the best that columns in the span of P can be."""
    rng, pieces = np.random.default_rng(0), pieces_of((50, 40))
    for rank, within in ((3, True), (6, False)):
        matrix = (rng.standard_normal((50, rank)) @ rng.standard_normal((rank, 40))).astype(np.float32)
        sent, _, compressor = sent_by_one("powersgd:3", pieces, matrix.reshape(-1), 0)
        p = compressor._arrived.reshape(3, 50).astype(float)      # type: ignore[attr-defined]
        assert np.abs(p @ p.T - np.eye(3)).max() < 1e-6
        assert np.abs(sent.reshape(50, 40) - p.T @ p @ matrix).max() < 1e-4
        assert (np.abs(sent.reshape(50, 40) - matrix).max() < 1e-4) == within


def test_a_warm_start_finds_the_largest_singular_values() -> None:
    """Of one matrix again and again, without feedback, P Q' becomes its best approximation (subspace iteration)."""
    matrix, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((30, 30)))
    matrix = (matrix * 0.5 ** np.arange(30)).astype(np.float32)
    workers = Workers(make_compressor("powersgd:2"), pieces_of((30, 30)), 1, feedback=False)
    off = [np.linalg.norm(workers.exchange(step, [matrix.reshape(-1)])[0].reshape(30, 30) - matrix) for step in range(12)]
    best = np.sqrt((np.linalg.svd(matrix)[1][2:] ** 2).sum())
    assert off[0] > 1.2 * best and off[-1] < 1.001 * best


def test_columns_that_depend_on_others_become_zeros_and_are_drawn_again() -> None:
    p = np.array([[1, 2, 2], [2, 4, 4], [0, 0, 0], [0, 3, 0]], np.float32)
    orthonormal(p)
    assert np.allclose(p[0], np.array([1, 2, 2]) / 3) and not p[1:3].any() and np.isclose(p[3] @ p[0], 0, atol=1e-7)
    workers = Workers(make_compressor("powersgd:2"), pieces_of((20, 20)), 2)
    for step in range(2):                                     # after a step of zeros it must not stay at zero
        assert not workers.exchange(step, [np.zeros(400, np.float32)] * 2)[0].any()
    assert np.abs(workers.exchange(2, [normal(0, 0, 400)] * 2)[0]).max() > 0.1


def test_small_parameters_travel_dense_and_a_rank_that_saves_nothing_is_said() -> None:
    compressor: Any = make_compressor("powersgd:4")(MODEL, 2)
    assert [piece.name for piece in compressor.dense] == ["p1", "p3", "p5", "p6"] and compressor.notes == []
    assert compressor.words(0) + compressor.words(1) == 57 + 4 * (70 + 166 + 140 + 94)
    compressor = make_compressor("powersgd:100")(MODEL, 2)
    assert compressor.notes == ["powersgd:100 sends as they are, for two matrices of rank 100 would be no smaller: "
                                "p0, p2, p4, p7"]
    assert compressor.words(1) == 0 and compressor.words(0) == SIZE


def test_messages_have_the_bytes_that_are_promised() -> None:
    pieces = pieces_of((1024, 1024))
    rates = {"int8": 0.26, "int4": 0.13, "levels:11": 0.118, "levels:3": 0.055,
             "topk:0.01": 0.0101, "powersgd:2": 0.004, "randomk:0.01": 0.0101}
    for name, rate in rates.items():
        compressor: Any = make_compressor(name)(pieces, 2)
        count = (compressor.nbytes(0, compressor.blocks) if compressor.kind == "packed" else compressor.nbytes()
                 if compressor.kind == "gathered" else 4 * sum(map(compressor.words, range(compressor.phases))))
        assert 0.9 * rate < count / (4 << 20) <= rate, name
