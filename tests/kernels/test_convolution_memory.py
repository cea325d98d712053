"""The working memory of convolutions: kept between calls, for each thread, and had from elsewhere where it is too small."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from mpitrain.kernels import convolution
from mpitrain.kernels.convolution import Window, convolve, convolve_adjoint, kernel_gradient
from mpitrain.kernels.kernel import kind

# channels, outputs, stride, groups
CASES = [(8, 6, 1, 1), (32, 32, 1, 1), (8, 12, 2, 1), (16, 16, 1, 16), (16, 16, 2, 16)]


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    if kind() != "c":
        pytest.skip("no compiled version in C")
    scratch = convolution.Scratch()
    monkeypatch.setattr(convolution, "_scratch", scratch)
    convolution._geometry.cache_clear()
    yield scratch
    convolution._geometry.cache_clear()


def results(case: tuple[int, ...], images: int = 3) -> list[bytes]:
    channels, outputs, stride, groups = case
    rng = np.random.default_rng(0)
    x = rng.standard_normal((images, channels, 20, 20), dtype=np.float32)
    weight = rng.standard_normal((outputs, channels // groups, 3, 3), dtype=np.float32)
    window = Window((3, 3), (stride, stride), (1, 1))
    y = convolve(x, weight, None, window, groups)
    gradients = kernel_gradient(x, y, window, groups, None, "y")
    return [a.tobytes() for a in (y, convolve_adjoint(y, weight, None, window, groups, (20, 20)), *gradients)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_first_call_says_what_it_wants_and_the_next_ones_use_it(case: tuple[int, ...], memory: Any) -> None:
    first = results(case)
    assert results(case) == first, "bits differ between memory of malloc's and ours"
    kept = memory.room(0)
    assert len(kept) > 0 and results(case) == first and memory.room(0) is kept


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_the_memory_had_before_changes_no_bit(case: tuple[int, ...], memory: Any) -> None:
    first = results(case)
    results(case)
    memory.room(0).view(np.uint8)[:] = 0xFF                      # NaN, as floats
    assert results(case) == first


def test_no_more_is_kept_than_the_limit(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "MOST_KEPT", 10_000)
    first = results(CASES[1])
    assert results(CASES[1]) == first and len(memory.room(0)) <= 10_000


def test_threads_do_not_share_their_memory() -> None:
    wanted, found = results(CASES[1], 20), []

    def work() -> None:
        found.extend(results(CASES[1], 20) for _ in range(5))
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 15 and all(result == wanted for result in found)
