"""Class weights in a run: equal ones of any size change nothing, and the sum of unequal ones has the same bits on any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import lines, record, refused, write
from standing import train


def run(tmp_path: Path, n: int, out: str, weight: Any, *more: str) -> list[dict[str, Any]]:
    result = train(n, write(tmp_path), f"run.out={out}", f"train.weight={weight}", "train.steps=3", "train.eval_every=3", *more)
    assert result.rc == 0, result.err
    return lines(tmp_path / out)


def test_equal_weights_of_any_size_give_the_losses_and_the_accuracy_of_none(tmp_path: Path) -> None:
    small, ones = (run(tmp_path, 1, f"w{w}", [w] * 10) for w in (0.001, 1.0))
    for a, b in zip(small, ones, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4) and a.get("accuracy") == b.get("accuracy")


def test_unequal_weights_give_one_set_of_bits_on_any_ranks(tmp_path: Path) -> None:
    weight = [0.1, 0.7, 1.3, 0.01, 2.2, 0.3, 0.9, 1.7, 0.6, 3.1]
    found = [run(tmp_path, n, f"n{n}", weight, "train.reproducible=layout", "train.micro_batches=6") for n in (1, 2)]
    assert [line["loss"] for line in found[0]] == [line["loss"] for line in found[1]]
    assert len({record(tmp_path / f"n{n}")["parameters_sha256"] for n in (1, 2)}) == 1
    assert 0 <= found[0][-1]["accuracy"] <= 1


def test_weights_that_are_no_numbers_of_0_or_more_are_refused(tmp_path: Path) -> None:
    for weight in ([-1.0] * 10, '"ab"'):
        refused(train(1, write(tmp_path), "run.out=x", f"train.weight={weight}"), 78, "E_CONFIG", "weight")
