"""Metrics of many classes take little more memory than the outputs, and have the bits that they have of all rows at once."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from mpitrain import metrics
from mpitrain.metrics import Seen, find_metrics


def outputs() -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    z = rng.normal(size=(4000, 1000)).astype(np.float32)
    z[5], z[17, 3] = 2.0, np.nan                              # ties, and no number
    return z, rng.integers(0, 1000, 4000)


@pytest.mark.parametrize("name", ["log_loss", "perplexity", "top_k", "accuracy"])
def test_a_metric_of_tokens_takes_a_part_of_the_memory_of_its_outputs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    z, y = outputs()
    metric, = find_metrics([name])

    def part(block: int) -> tuple[Any, int]:
        monkeypatch.setattr(metrics, "BLOCK", block)
        tracemalloc.start()
        found = metric.part(Seen(z, y, "classes"))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found, peak
    few, most = part(1 << 17)
    whole, _ = part(z.size)
    assert np.array_equal(few, whole, equal_nan=True)
    assert most < z.nbytes / 2


def test_the_log_loss_is_that_of_float64() -> None:
    z, y = outputs()
    z[17, 3] = 0.0
    metric, = find_metrics(["log_loss"])
    wide = z.astype(np.longdouble)
    logs = wide - wide.max(axis=1, keepdims=True)
    logs -= np.log(np.exp(logs).sum(axis=1, keepdims=True))
    total = metric.part(Seen(z, y, "classes"))
    assert metric.value(total[None]) == pytest.approx(float(-logs[np.arange(len(y)), y].mean()), rel=1e-13)
