"""The proof of a user's compressor: ours pass, and each way to be wrong is refused with its own line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_compressors import MODEL, NAMES

from mpitrain.parallel.compress.blocks import Int8, OneBit
from mpitrain.parallel.compress.check import check_compressor
from mpitrain.parallel.compress.compressor import CompressError, Compressor, Kept, Make, make_compressor
from mpitrain.parallel.compress.lowrank import PowerSGD
from mpitrain.parallel.compress.sparse import RandomK, TopK


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n,feedback", [(1, True), (2, False), (5, True)])
def test_our_own_pass(name: str, n: int, feedback: bool) -> None:
    check_compressor(make_compressor(name), n, MODEL, seed=3, feedback=feedback)
    check_compressor(make_compressor(name), n, [], seed=3, feedback=feedback)


def test_signs_pass() -> None:
    check_compressor(Make("signs", OneBit), 3, MODEL)


def test_the_one_of_the_documentation_passes(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "compression.md").read_text()
    (tmp_path / "mine.py").write_text(text.partition("```python\n")[2].partition("```")[0])
    for n, feedback in ((1, True), (3, True), (3, False)):
        check_compressor(make_compressor("mine.py:Half", tmp_path), n, MODEL, feedback=feedback)


class OddLength(Int8):
    def nbytes(self, first: int, stop: int) -> int:
        return super().nbytes(first, stop) + 1


class NoLength(Int8):
    def nbytes(self, first: int, stop: int) -> Any:
        return None


class FewerWords(TopK):
    def encode(self, step: Any, values: Any, state: Any, message: Any) -> None:
        short = np.zeros(self.nbytes(), np.uint8)
        super().encode(step, values, state, short)
        message[:-16] = short[:-16]


class Beyond(TopK):
    def encode(self, step: Any, values: Any, state: Any, message: Any) -> None:
        super().encode(step, values, state, message)
        whole = message
        while whole.base is not None:
            whole = whole.base
        whole[-1] = 7


class ChangesGradient(Int8):
    def encode(self, step: int, worker: int, values: Any, *rest: Any) -> None:
        super().encode(step, worker, values, *rest)
        values[:1] = 0


class ClipsAll(RandomK):
    def encode(self, phase: Any, step: Any, values: Any, state: Any, message: Any) -> None:
        super().encode(phase, step, values, state, message)
        np.clip(values, -1, 1, out=values)


class Chance(RandomK):
    def drawn(self, step: int) -> Any:
        return self.bounds[:-1] + np.random.default_rng().integers(np.diff(self.bounds))


class Remembers(TopK):
    last: Any = None

    def encode(self, step: Any, values: Any, state: Any, message: Any) -> None:
        before, self.last = self.last, values.copy()
        super().encode(step, values if before is None else values + before, state, message)


class OtherOnEachRank(TopK):
    made = 0

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        OtherOnEachRank.made += 1
        self.number = OtherOnEachRank.made % 2

    def decode(self, step: Any, messages: Any, values: Any) -> None:
        super().decode(step, messages[::-1] if self.number else messages, values)
        values *= np.float32(1 + self.number * 1e-6)


class LosesWhatIsLeft(Int8):
    def encode(self, step: int, worker: int, values: Any, error: Any, first: int, stop: int, message: Any) -> None:
        super().encode(step, worker, values, error, first, stop, message)
        if error is not None:
            error *= np.float32(0.5)


class NotQuite(OneBit):
    exact = True


class Offset(Int8):
    def decode(self, message: Any, first: int, stop: int, total: Any, add: bool) -> None:
        super().decode(message, first, stop, total, add)
        total += np.float32(2 ** -30)


class DropsNan(TopK):
    def encode(self, step: Any, values: Any, state: Any, message: Any) -> None:
        super().encode(step, np.nan_to_num(values, nan=0, posinf=1, neginf=-1), state, message)


class KeepsNan(PowerSGD):
    def encode(self, phase: Any, step: Any, values: Any, state: Any, message: Any) -> None:
        super().encode(phase, step, values, state, message)
        if phase == 1 and "error" in state:
            state["error"][...] = np.where(np.isfinite(values), state["error"], values)


class ByBucket(Int8):
    def encode(self, step: int, worker: int, values: Any, error: Any, first: int, stop: int, message: Any) -> None:
        super().encode(step, worker, values * np.float32(2 if self.blocks > 30 else 1), error, first, stop, message)


class Raises(TopK):
    def decode(self, step: Any, messages: Any, values: Any) -> None:
        raise KeyError("nothing")


class OwnsLess(Int8):
    def states(self) -> dict[str, Kept]:
        return {**super().states(), "sum_error": Kept((1,), "owner")}


class NoBlock(Int8):
    block = None


class PartedState(PowerSGD):
    def decode(self, phase: Any, step: Any, arrived: Any, state: Any, values: Any) -> None:
        super().decode(phase, step, arrived, state, values)
        if phase:
            state["q/p0"][0, 0] = id(self) % 1000


@pytest.mark.parametrize("wrong,line", [
    (OddLength, r"nbytes gives \d+, expected a whole number, a multiple of 8"),
    (NoLength, "nbytes gives None, expected a whole number, a multiple of 8"),
    (FewerWords, "encode does not write all of its message, or is not the same twice: two runs sent other bytes"),
    (Beyond, "encode writes beyond its message"),
    (ChangesGradient, "encode changes the gradient that it is given; it may write to the message and the state"),
    (ClipsAll, "encode changes the gradient that it is given; it may write to the message and the state"),
    (Chance, "encode does not write all of its message, or is not the same twice: two runs sent other bytes"),
    (Remembers, "what is sent and the residual do not add up in step 1: element 0 of p0 was .*; exact = True promises every bit"),
    (OtherOnEachRank, "decode gives rank 1 other bits than rank 0 in step 0"),
    (LosesWhatIsLeft, "what is sent and the residual do not add up in step 0: element 0 of p0 was .*, sent .*, kept .*"),
    (NotQuite, "what is sent and the residual do not add up in step 0: .*; exact = True promises every bit"),
    (Offset, "what is sent and the residual do not add up in step 0: .*"),
    (DropsNan, "nan in the gradient of p0 on a rank does not arrive: the sum there is finite, and training would go on"),
    (KeepsNan, 'nan in a gradient stays in state "error"; leave it as it was where a number is not finite'),
    (Raises, r"raised KeyError at test_check_compressor.py:\d+ in decode: 'nothing'"),
    (OwnsLess, 'state "sum_error" is .*; expected of "worker", "all", or "owner" with the array\'s own shape'),
    (NoBlock, "a packed compressor has blocks; block = None, expected a number of elements"),
    (PartedState, 'decode leaves state "q/p0", which is of all, with other bits on another rank')])
def test_each_wrong_compressor_is_refused_with_its_own_line(wrong: type[Compressor], line: str) -> None:
    with pytest.raises(CompressError, match=f'^compressor "own.py:Wrong" with n=2:? {line}$') as found:
        check_compressor(Make("own.py:Wrong", wrong), 2, MODEL)
    assert (found.value.code, found.value.exit_code) == ("E_COMPRESS", 78) and "\n" not in found.value.message


def test_without_feedback_what_is_remembered_is_found_by_a_restart() -> None:
    with pytest.raises(CompressError, match="after a restart from its state it sends something else: it keeps something outside"):
        check_compressor(Make("own.py:Wrong", Remembers), 2, MODEL, feedback=False)


def test_a_sum_that_depends_on_the_bucket_is_found() -> None:
    with pytest.raises(CompressError, match="n=2: the sum of p0 depends on what else is in its bucket, or where that is cut$"):
        check_compressor(Make("own.py:Wrong", ByBucket), 2, MODEL, feedback=False)


def test_a_compressor_that_says_something_of_zeros_is_refused() -> None:
    with pytest.raises(CompressError, match=r"a gradient of zeros arrives with \d+ elements that are none"):
        check_compressor(Make("own.py:Wrong", Offset), 2, MODEL, feedback=False)


def test_decode_that_leaves_elements_as_they_were_is_found() -> None:
    class Sparse(TopK):
        def decode(self, step: Any, messages: Any, values: Any) -> None:
            kept = values.copy()
            super().decode(step, messages, values)
            np.copyto(values, kept, where=values == 0)
    with pytest.raises(CompressError, match="decode does not write all of the array, or is not the same twice|other bits than"):
        check_compressor(Make("own.py:Wrong", Sparse), 2, MODEL, feedback=False)
