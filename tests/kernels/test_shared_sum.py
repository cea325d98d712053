"""The sum of several ranks' arrays in the memory of one GPU, against NumPy's in the order of the tree, to the bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from device_on_host import compiler
from fakegpu import DEVICES, open_device

from mpitrain.backend.runtime import address
from mpitrain.errors import ShapeError
from mpitrain.kernels.device.shared_sum import sum_of_ranks
from mpitrain.schedules.steps import tree_split

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
DTYPES = [np.dtype("float32"), np.dtype("float64"), np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)]


def tree_sum(parts: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    if len(parts) == 1:
        return parts[0]
    split = tree_split(len(parts))
    return tree_sum(parts[:split]) + tree_sum(parts[split:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 6, 7, 8])
@pytest.mark.parametrize(("start", "size"), [(8, 4099), (3, 1021), (0, 1)])
def test_every_array_becomes_the_sum_in_the_order_of_the_tree_and_nothing_beside_it_changes(
        ranks: int, dtype: np.dtype[Any], start: int, size: int, device: str) -> None:
    _, move, _ = open_device(device)
    rng = np.random.default_rng(ranks)
    ours = [(100 * rng.standard_normal(5000)).astype(dtype) for _ in range(ranks)]
    arrays = [move(x) for x in ours]
    parts = [x[start:start + size] for x in arrays]
    for rank in {0, ranks - 1}:
        sum_of_ranks(parts[rank], rank, [address(part) for part in parts])
        computed = dtype if dtype.itemsize > 2 else np.dtype("float32")
        expected = tree_sum([x[start:start + size].astype(computed) for x in ours]).astype(dtype)
        for x, given in zip(arrays, ours):
            given[start:start + size] = expected
            np.testing.assert_array_equal(x.get(), given)


def test_more_ranks_than_the_kernel_adds_up_and_an_array_of_another_rank_are_refused() -> None:
    _, move, _ = open_device("stand-in")
    x = move(np.ones(3, np.float32))
    for rank, addresses in ((0, [address(x)] * 9), (2, [address(x)] * 2), (0, [address(x) + 4, address(x)])):
        with pytest.raises(ShapeError, match="8 at most"):
            sum_of_ranks(x, rank, addresses)
