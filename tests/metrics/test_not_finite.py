"""Outputs that are NaN are of no class, in every metric: none of them looks better for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import ok, record, train, write

from mpitrain.infer.forms import form
from mpitrain.metrics import Seen, find_metrics
from mpitrain.nn.loss import LOSSES
from mpitrain.parallel.layers.tensor_loss import largest


def measured(name: str, outputs: Any, targets: Any, kind: str = "classes") -> Any:
    metric, = find_metrics([name])
    parts = [np.asarray(metric.part(Seen(outputs[i:i + 7], targets[i:i + 7], kind))) for i in range(0, len(outputs), 7)]
    return metric.value(sum(parts) if metric.adds == "counts" else np.stack(parts).astype(np.float64))


def rows() -> tuple[Any, Any]:
    """Rows whose labels are all found, then as many of class 0 with NaN in one place or all."""
    z = np.eye(3)[np.arange(30) % 3]
    bad = np.zeros((30, 3))
    bad[:15], bad[15:, 2] = np.nan, np.nan
    return np.concatenate([z, bad]), np.concatenate([np.arange(30) % 3, np.zeros(30, np.int64)])


def test_a_label_whose_outputs_are_nan_is_not_found() -> None:
    z, y = rows()
    assert measured("accuracy", z, y) == 0.5
    assert measured("confusion", z, y) == [[10, 0, 0, 30], [0, 10, 0, 0], [0, 0, 10, 0]]
    assert measured("confusion", z[:30], y[:30]) == np.diag([10, 10, 10]).tolist()
    assert measured("recall", z, y) == pytest.approx((0.25 + 1 + 1) / 3)
    assert measured("precision", z, y) == 1.0                # Nothing is taken for a class that it is not.
    assert measured("f1", z, y) == pytest.approx((2 * 10 / 50 + 1 + 1) / 3)
    assert measured("balanced_accuracy", z, y) == pytest.approx((0.25 + 1 + 1) / 3)
    assert measured("accuracy", np.array([[np.nan], [1.0], [-1.0]]), np.array([[0.0], [1.0], [0.0]]), "binary") == 2 / 3


def test_r2_of_targets_that_never_change_is_not_a_number_where_outputs_are_none() -> None:
    assert np.isnan(measured("r2", np.full((14, 1), np.nan), np.ones((14, 1)), "values"))


def test_predicted_classes_of_outputs_that_are_nan_are_minus_one() -> None:
    z, _ = rows()
    found = form("classes", LOSSES["cross_entropy"]()).made(z)
    assert found[:30].tolist() == (np.arange(30) % 3).tolist() and (found[30:] == -1).all()
    assert form("classes", LOSSES["binary_cross_entropy"]()).made(np.array([np.nan, 1.0, -1.0])).tolist() == [-1, 1, 0]


class Pair:
    """One of two ranks; the second gets the sum of both."""

    size = 2

    def __init__(self, rank: int, told: list[Any]):
        self.rank, self.told = rank, told

    def sum(self, table: Any, name: str) -> Any:
        self.told.append(table.copy())
        return np.sum(self.told, axis=0)


def test_ranks_that_have_parts_of_the_outputs_find_no_class_either() -> None:
    z, told = rows()[0], list[Any]()
    z[0, 0] = np.nan                                         # a row's first part, its second, and both
    largest(z[:, :2], Pair(0, told), 0)
    expected = [-1, 1, 2, *(np.arange(3, 30) % 3).tolist(), *[-1] * 30]
    assert largest(z[:, 2:], Pair(1, told), 2).tolist() == expected


NET = """
from mpitrain import nn

class Eval(nn.Module):
    def forward(self, x):
        return x if self.training else x * float("nan")

def make(width=8):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10), Eval())
"""


def test_a_run_whose_outputs_become_nan_finds_no_row_right_on_any_ranks(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    write(tmp_path, """model = {name = "net.py:make"}\ndata = {path = "digits"}\nlog = {progress_s = 0}
                    train = {steps = 2, batch_size = 64, metrics = ["f1", "balanced_accuracy"]}""")
    for ranks in (1, 2):
        out = ok(train(ranks, tmp_path / "run.toml", f"run.out=r{ranks}"))
        assert "the outputs of 360 of 360 validation labels are NaN" in out.err
        assert record(tmp_path / f"r{ranks}")["metrics"] == {"loss": None, "accuracy": 0.0, "f1": 0.0, "balanced_accuracy": 0.0}
