"""Sums in a stated order: against float64, against the order spelled out, and C against NumPy to the bit."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from mpitrain.comm.shared import fold as folding
from mpitrain.comm.shared.fold import (
    ADD,
    addresses,
    binary_tree,
    check_program,
    fold_numpy,
    kernels,
    left_fold,
    storage,
    type_name,
    widen,
)
from mpitrain.errors import ConfigError, ShapeError

TYPES = list(folding.TYPES)
ORDERS = [left_fold, binary_tree]


def random(n: int, size: int, name: str, seed: int = 0) -> list[Any]:
    values = np.random.default_rng([n, size, seed]).standard_normal((n, size)).astype(np.float32) * 100
    if name == "bfloat16":
        return [row.view(np.uint32).__rshift__(16).astype(np.uint16) for row in values]
    return [row.astype(name) for row in values]


def fold(sources: list[Any], program: list[int], destinations: list[Any], start: int = 0, stop: int | None = None, *,
         dtype: str) -> None:
    """`fold_numpy`, by the C kernel where there is a compiler."""
    stop, library = sources[0].size if stop is None else stop, kernels()
    if library is None:
        fold_numpy(sources, program, destinations, start, stop, dtype)
        return
    numbers, whole, pointer = np.array(program, np.int32), ctypes.c_int64, ctypes.c_void_p
    library.shared_fold.argtypes = [whole, pointer, pointer, whole, pointer, whole, whole, whole]
    library.shared_fold.restype = None
    library.shared_fold(folding.TYPES[dtype], addresses(sources), numbers.ctypes.data, numbers.size, addresses(destinations),
                        len(destinations), start, stop)


def spelled_out(arrays: list[Any], program: list[int]) -> Any:
    """The sum of the widened arrays by recursion from the end of the program."""
    steps = list(program)

    def take() -> Any:
        step = steps.pop()
        if step != ADD:
            return arrays[step]
        right = take()
        return take() + right
    return take()


def test_the_two_orders_are_what_they_say() -> None:
    assert left_fold(1) == binary_tree(1) == [0]
    assert left_fold(4) == [0, 1, ADD, 2, ADD, 3, ADD]
    assert binary_tree(4) == [0, 1, ADD, 2, 3, ADD, ADD]
    assert binary_tree(3) == [0, 1, ADD, 2, ADD]
    assert binary_tree(6) == [0, 1, ADD, 2, 3, ADD, ADD, 4, 5, ADD, ADD]
    for n in range(1, 40):
        check_program(left_fold(n), n)
        check_program(binary_tree(n), n)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("name", TYPES)
def test_c_and_numpy_and_the_order_spelled_out_agree_to_the_bit(name: str, n: int, order: Any) -> None:
    for size in (0, 1, 7, 1000, 40_003):
        arrays, program = random(n, size, name), order(n)
        slow = [np.zeros(size, storage(name)) for _ in range(2)]
        fold_numpy(arrays, program, slow, 0, size, name)
        expected = folding.narrow(spelled_out([widen(a, name) for a in arrays], program), name)
        for start in (0, 5):                                  # 5: begins inside a cache line
            fast = [np.zeros(size + start, storage(name))[start:] for _ in range(2)]
            fold(arrays, program, fast, dtype=name)
            for array in (*slow, *fast):
                assert array.tobytes() == expected.tobytes(), (size, start)
        if size:
            exact = sum(widen(a, name).astype(np.float64) for a in arrays)
            bits = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}[name]
            assert np.abs(widen(slow[0], name) - exact).max() <= n * 500 * 2.0 ** -bits


@pytest.mark.parametrize("name", TYPES)
def test_a_slice_in_place_changes_that_slice_only(name: str) -> None:
    arrays = random(3, 5000, name)
    before = [array.copy() for array in arrays]
    fold(arrays, left_fold(3), arrays, 77, 4099, dtype=name)
    whole = [np.zeros(5000, storage(name))]
    fold_numpy(before, left_fold(3), whole, 0, 5000, name)
    for array, old in zip(arrays, before):
        assert (array[77:4099] == whole[0][77:4099]).all()
        assert (array[:77] == old[:77]).all() and (array[4099:] == old[4099:]).all()


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_16_bit_number_survives_and_every_rounding_is_numpys(name: str) -> None:
    everything = np.arange(1 << 16, dtype=np.uint16).view(storage(name))
    result = [np.zeros_like(everything)]
    fold([everything], [0], result, dtype=name)
    nan = np.isnan(widen(everything, name))
    assert (result[0][~nan].tobytes() == everything[~nan].tobytes()) and np.isnan(widen(result[0], name)[nan]).all()
    # halves of steps are ties: two neighbours, of which the sum lies between representable numbers
    other = np.roll(everything, 12345)
    fast, slow = [np.zeros_like(everything)], [np.zeros_like(everything)]
    fold([everything, other], [0, 1, ADD], fast, dtype=name)
    fold_numpy([everything, other], [0, 1, ADD], slow, 0, 1 << 16, name)
    assert fast[0].tobytes() == slow[0].tobytes()


def test_bfloat16_rounds_as_pytorch_does() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(0).integers(0, 1 << 32, 100_000, np.uint32).view(np.float32)
    ours = folding.narrow(values, "bfloat16")
    theirs = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
    finite = ~np.isnan(values)
    assert (ours[finite] == theirs[finite]).all()


@pytest.mark.parametrize("program", [[], [0], [0, 1], [ADD], [0, ADD, 1], [0, 1, ADD, ADD], [0, 0, ADD], [0, 1, ADD, 2, ADD]])
def test_an_order_that_is_not_a_sum_of_all_is_refused(program: list[int]) -> None:
    with pytest.raises(ConfigError, match="^an order of summation must add up sources 0 to 1, each once, but is "):
        check_program(program, 2)


def test_an_order_that_overflows_the_kernels_stack_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds 40 partial sums at once, more than 32; add the longer side first"):
        check_program([*range(40), *[ADD] * 39], 40)


def test_a_type_without_a_kernel_is_refused_by_name() -> None:
    with pytest.raises(ShapeError, match="exist for float32, float64, bfloat16, float16, not for int64"):
        type_name(np.zeros(3, np.int64), None)
    with pytest.raises(ShapeError, match="bfloat16 is stored as uint16, but the array is float32"):
        type_name(np.zeros(3, np.float32), "bfloat16")
