"""Logits of a vocabulary whose size is odd lie in rows that are aligned on a device: the same numbers, launches and memory."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from device_on_host import compiler
from fakegpu import counted, put, xp
from ops.parity import Trained

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.kernels.device import code

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
VOCABULARY, WIDTH = 1031, 24
LEAST = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}             # relative to the largest number
FORMATS = {"float32": np.dtype("float32"), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype("float16")}


def numbers(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    return put(np.random.default_rng(seed).standard_normal(shape).astype(FORMATS[dtype]))


def trained(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    made = Trained(numbers(shape, dtype, seed), requires_grad=True)
    made.grad_buffer = put(np.full(shape, np.nan, "float32"))
    return made


def loss_and_gradients(dtype: str, biased: bool) -> tuple[Any, ...]:
    """Of an embedding whose table is that of the last layer, too; and how they were launched, and the logits."""
    table, bias = trained((VOCABULARY, WIDTH), dtype, 1), trained((VOCABULARY,), dtype, 2)
    tokens = put(np.random.default_rng(3).integers(0, VOCABULARY, (3, 5)))
    x = Tensor(numbers((3, 5, WIDTH), dtype, 4), requires_grad=True)
    with counted() as counts:
        logits = ops.linear(x + ops.embedding(tokens, table), table, bias if biased else None)
        strides = logits.array.strides
        loss = ops.cross_entropy(logits, tokens, label_smoothing=0.1, ignore_index=7)
        del logits
        loss.backward()
    found = [loss.array, x.grad, table.grad, *([bias.grad] if biased else [])]
    return [each.get() for each in found], dict(counts.launches), strides


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", FORMATS)
def test_rows_that_are_aligned_give_the_numbers_and_the_launches_of_rows_without_gaps(
        dtype: str, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies between rows is NaN on the stand-in, so nobody has read it."""
    found, launches, strides = loss_and_gradients(dtype, biased)
    monkeypatch.setattr(code, "LEAST_ALIGNED", 1 << 40)
    wanted, before, dense = loss_and_gradients(dtype, biased)
    size = FORMATS[dtype].itemsize
    assert strides[-2:] == (1088 * size, size) and dense[-2:] == (VOCABULARY * size, size)
    assert launches == before
    for here, there in zip(found, wanted, strict=True):
        here, there = here.astype("float64"), there.astype("float64")
        assert np.abs(here - there).max() <= LEAST[dtype] * np.abs(there).max()      # NaN is no such number


def test_the_gradient_of_the_logits_is_made_in_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    empty = xp.empty
    monkeypatch.setattr(xp, "empty", lambda shape, *rest: made.append(shape) or empty(shape, *rest))
    loss_and_gradients("bfloat16", False)
    assert made.count((15, 1088)) == 1 and (15, VOCABULARY) not in made


def test_who_still_has_the_logits_finds_them_unchanged() -> None:
    weight, x = trained((VOCABULARY, WIDTH), "float32", 1), Tensor(numbers((4, WIDTH), "float32", 2), requires_grad=True)
    logits = ops.linear(x, weight)
    before = logits.array.get()
    ops.cross_entropy(logits, put(np.arange(4))).backward()
    assert logits.array.get().tobytes() == before.tobytes()


@pytest.mark.parametrize(("columns", "dtype", "wide"), [
    (50257, "bfloat16", 50304), (50257, "float32", 50304), (50304, "float16", 50304), (1001, "bfloat16", 1001),
    (1028, "float32", 1028), (1028, "float16", 1088), (50257, "float64", 50257)])
def test_rows_are_widened_where_they_are_many_numbers_and_begin_anywhere(columns: int, dtype: str, wide: int) -> None:
    rows = code.aligned_rows(xp, 2, columns, FORMATS.get(dtype, np.dtype(dtype)))
    assert rows.shape == (2, columns) and rows.strides[0] == wide * rows.itemsize
