"""The parts of the benchmarks that need no ranks: inputs and their check, pairs, arguments, what is printed."""

from __future__ import annotations

import json
import shlex
import statistics
import sys
from datetime import date

import numpy as np
import pytest

from mpitrain.bench import arguments
from mpitrain.bench.inputs import BLOCK, Inputs
from mpitrain.bench.pairs import WARM_UP, Pairs, alternate, quartiles
from mpitrain.bench.report import Report, in_bytes, in_time
from mpitrain.errors import MpitrainError, UsageError
from mpitrain.kernels.wire import format_of


def summed(inputs: Inputs, turn: int, ranks: list[int]) -> np.ndarray:
    """What an all-reduce over `ranks` leaves, added in float32 from left to right."""
    total = np.zeros(inputs.length, inputs.dtype)
    part = np.empty_like(total)
    for rank in ranks:
        inputs.fill(part, rank, turn)
        total += part
    return total


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("length", [1, 1000, 2 * BLOCK + 3])
def test_the_right_sum_passes_in_any_order(dtype: str, length: int) -> None:
    inputs = Inputs(length, dtype, ranks=5)
    for turn, order in enumerate(([0, 1, 2, 3, 4], [4, 2, 0, 3, 1])):
        inputs.check(summed(inputs, turn, order), turn, "a sum")


@pytest.mark.parametrize(("ranks", "turn"), [([0, 1], 7), ([0, 1, 2, 2], 7), ([0, 1, 1], 7), ([0, 1, 2], 6), ([0, 1, 2], 8)])
def test_a_lost_rank_a_rank_counted_twice_and_an_older_or_newer_sum_are_found(ranks: list[int], turn: int) -> None:
    inputs = Inputs(BLOCK + 5, "float32", ranks=3)
    with pytest.raises(MpitrainError, match="x gave a wrong sum: element 0 of"):
        inputs.check(summed(inputs, turn, ranks), 7, "x")


@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 2])
def test_one_wrong_element_is_found_and_named(at: int) -> None:
    inputs = Inputs(2 * BLOCK + 3, "float32", ranks=2)
    for value in (np.nan, np.inf, None):
        found = summed(inputs, 1, [0, 1])
        found[at] = found[at] * np.float32(1 + 1e-5) if value is None else value
        with pytest.raises(MpitrainError, match=rf"wrong sum: element {at} of {2 * BLOCK + 3} is"):
            inputs.check(found, 1, "x")


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_a_sum_of_16_bit_messages_passes_with_their_rounding_and_no_more(wire: str) -> None:
    inputs, label, packing = Inputs(BLOCK + 3, "float32", ranks=3), "x", format_of(wire)
    total, part, packed = (np.zeros(inputs.length, kind) for kind in ("float32", "float32", "uint16"))
    for rank in range(3):                                     # as along a chain of ranks
        inputs.fill(part, rank, 4)
        total += part
        packing.round(total, packed)
    inputs.check(total, 4, label, wire)
    with pytest.raises(MpitrainError, match="x gave a wrong sum"):
        inputs.check(total, 4, label)
    for ranks in ([0, 1], [0, 1, 2, 2]):
        with pytest.raises(MpitrainError, match="x gave a wrong sum: element 0 of"):
            inputs.check(summed(inputs, 4, ranks), 4, label, wire)


def test_parts_that_changed_places_are_found() -> None:
    inputs = Inputs(64, "float32", ranks=2)
    with pytest.raises(MpitrainError, match="wrong sum"):
        inputs.check(np.roll(summed(inputs, 0, [0, 1]), 32), 0, "x")


def test_members_take_turns_and_the_first_pairs_do_not_count() -> None:
    order: list[tuple[str, int]] = []

    def member(name: str, seconds: float):
        def run(turn: int) -> float:
            order.append((name, turn))
            return 100.0 if turn < 2 * WARM_UP else seconds
        return run

    pairs = alternate(member("a", 2.0), member("b", 6.0), 3)
    assert [name for name, _ in order] == ["a", "b"] * (WARM_UP + 3)
    assert [turn for _, turn in order] == list(range(2 * (WARM_UP + 3)))
    assert pairs == Pairs([2.0] * 3, [6.0] * 3)


def test_the_ratio_is_the_median_of_the_pairs_ratios() -> None:
    pairs = Pairs([1.0, 2.0, 10.0], [3.0, 2.0, 40.0])
    summary = pairs.summary()
    assert summary["ratio"] == 3.0 != summary["mpi_seconds"] / summary["seconds"]
    assert (summary["seconds"], summary["mpi_seconds"], summary["pairs"]) == (2.0, 3.0, 3)
    assert (summary["ratio_low"], summary["ratio_high"]) == (1.0, 4.0)
    assert set(pairs.summary("gloo")) >= {"seconds", "gloo_seconds", "gloo_seconds_low"}


@pytest.mark.parametrize("n", [1, 2, 5, 24, 25])
def test_quartiles_enclose_the_median(n: int) -> None:
    values = list(np.random.default_rng(n).standard_normal(n))
    low, high = quartiles(values)
    assert low <= statistics.median(values) <= high


def test_sizes_are_read_with_their_units() -> None:
    assert arguments.sizes("8, 4k,64KiB,1M,16MiB,1G,8") == [8, 4096, 65536, 1 << 20, 16 << 20, 1 << 30]


@pytest.mark.parametrize(("read", "message"), [
    (lambda: arguments.sizes("8,many"), '--sizes takes bytes above 0 such as 8, 64K or 16MiB, found "many"'),
    (lambda: arguments.sizes("0"), 'found "0"'),
    (lambda: arguments.sizes("-8"), 'found "-8"'),
    (lambda: arguments.sizes(" ,"), '--sizes is a list with commas, found " ,"'),
    (lambda: arguments.size("4 apples", "--bucket-bytes"), '--bucket-bytes takes bytes above 0'),
    (lambda: arguments.dtypes("float23"), '--dtypes knows no "float23" (did you mean "float32"?); choose from float32, float64'),
    (lambda: arguments.algorithms("rinf", ["ring", "auto"]), '--algorithms knows no "rinf" (did you mean "ring"?); choose from'),
    (lambda: arguments.whole_elements([8, 12], ["float32", "float64"]), "12 bytes are no whole number of float64 elements of 8"),
    (lambda: arguments.wire("bf16", ["float32"]), '--wire knows no "bf16" (did you mean "bfloat16"?); choose from bfloat16,'),
    (lambda: arguments.wire("float16", ["float64"]), "--wire float16 is for arrays of float32, found --dtypes float64; leave"),
    (lambda: arguments.at_least(0, 1, "--pairs"), "--pairs must be at least 1, found 0"),
])
def test_bad_arguments_say_what_was_expected(read, message: str) -> None:
    with pytest.raises(UsageError) as error:
        read()
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_users_own_algorithm_passes_by_its_colon() -> None:
    assert arguments.algorithms("ring,mine.py:f,ring", ["ring"]) == ["ring", "mine.py:f"]


def test_numbers_are_printed_in_units_that_fit() -> None:
    assert [in_bytes(n) for n in (8, 1024, 1025, 16 << 20, 3 << 30)] == ["8 B", "1 KiB", "1025 B", "16 MiB", "3 GiB"]
    assert [in_time(s) for s in (1.25e-6, 0.0099, 0.25)] == ["1.2 us", "9900.0 us", "250.0 ms"]


def test_only_rank_0_reports_and_each_record_is_complete_at_once(tmp_path, capsys) -> None:
    path = tmp_path / "r.json"
    path.write_text("older\n")
    report, other = Report(0, path), Report(1, path)
    for which in (report, other):
        which.record({"a": 1})
        which.line("hello")
    record = json.loads(path.read_text())
    assert record.pop("command") == shlex.join(["python", *sys.orig_argv[1:]]) and date.fromisoformat(record.pop("date"))
    assert record == {"a": 1}
    assert capsys.readouterr().out == "hello\n"
