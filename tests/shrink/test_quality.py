"""What few bits cost in quality, on real inputs: shorter runs of benchmarks/lowbit_quality.py, with its bars."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import lowbit_quality  # noqa: E402
from real_data import real  # noqa: E402

pytestmark = pytest.mark.slow


def test_a_language_model_in_few_bits_loses_no_more_than_its_bars(tmp_path: Path) -> None:
    found = lowbit_quality.text(tmp_path, real("tinyshakespeare.txt"), steps=250, aware=25, formats=("int8", "int4"))
    assert 1.5 < found["float32"] < 2.6
    lost = lowbit_quality.changes(found)
    assert set(lost) == {"int8", "int4", "int4 trained for"}
    assert all(change <= lowbit_quality.LOSSES[name] for name, change in lost.items()), lost
    assert all(found[f"{name} bytes"] <= bar for name, bar in lowbit_quality.SHARES.items()), found


def test_lenet_in_few_bits_loses_no_more_points_than_its_bars(tmp_path: Path) -> None:
    found = lowbit_quality.images(tmp_path, real("t10k-images-idx3-ubyte.gz"), seeds=3, epochs=2)
    assert min(found["float32"]) > 94
    lost = lowbit_quality.points(found)
    assert all(lost[name] >= bar for name, bar in lowbit_quality.POINTS.items()), lost
