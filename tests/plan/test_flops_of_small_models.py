"""Multiply-adds of sparse layers are those of the numbers that they keep, of layers in few bits those of the whole weight."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain import nn
from mpitrain.nn.lowbit import LowBitLinear
from mpitrain.nn.sparse import BlockLinear, Blocks, SparseLinear, live_blocks
from mpitrain.plan.flops import count
from mpitrain.shrink.formats import FORMATS

ROWS, N, K = 20, 32, 24


def pruned() -> tuple[nn.Linear, Any]:
    layer = nn.Linear(K, N, activation="relu")
    layer.initialize(0)
    layer.weight.array[:16, ::3] = 0.0
    layer.weight.array[16:, 5:] = 0.0
    layer.weight.mark_changed()
    return layer, np.array(layer.weight.array)


@pytest.mark.parametrize("form", ["csr", "blocks"])
def test_a_sparse_layer_has_the_products_of_what_it_keeps(form: str) -> None:
    layer, weight = pruned()
    kept = np.count_nonzero(weight)
    assert kept == 16 * 16 + 16 * 5
    sparse = nn.Sequential(("sparse", SparseLinear(layer, form)), ("head", nn.Linear(N, 3)))
    assert count(sparse, np.zeros((1, ROWS, K), np.float32)).by_function == {"SparseProduct": ROWS * kept, "Linear": ROWS * N * 3}


def test_a_layer_of_blocks_has_the_products_of_these() -> None:
    layer, weight = pruned()
    layer = BlockLinear.of(layer, Blocks.of(live_blocks(weight)))
    assert count(nn.Sequential(layer), np.zeros((1, ROWS, K), np.float32)).forward == ROWS * (16 * 16 + 16 * 5)


def test_a_layer_in_few_bits_has_all_products() -> None:
    layer = LowBitLinear.of(nn.Linear(64, N), FORMATS["int8"]())
    assert count(nn.Sequential(layer), np.zeros((1, ROWS, 64), np.float32)).forward == ROWS * N * 64
