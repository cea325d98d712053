"""The examples at full length reach their figures. Minutes each: `make test-slow`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import accuracy  # noqa: E402
from real_data import real  # noqa: E402

pytestmark = pytest.mark.slow


def test_digits_are_learned_with_most_seeds(tmp_path):
    assert accuracy.digits(tmp_path)["accuracy"] >= 0.975


def test_mnist_images_are_learned(tmp_path):
    assert accuracy.mnist(tmp_path, real("t10k-images-idx3-ubyte.gz"))["accuracy"] >= 0.975


def test_shakespeare_has_the_same_losses_on_one_to_four_ranks(tmp_path):
    assert accuracy.curves(tmp_path, real("tinyshakespeare.txt")) <= 1e-5


def test_shakespeare_reaches_the_loss_of_the_published_settings(tmp_path):
    assert accuracy.shakespeare(tmp_path, real("tinyshakespeare.txt"))["loss"] <= 1.92
