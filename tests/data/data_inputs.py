"""Inputs that several data tests make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

CORPUS = Path(__file__).parent / "corpus"


def features(n: int, *row: int, seed: int = 0, dtype: str = "f4") -> np.ndarray[Any, Any]:
    values = np.random.default_rng(seed).standard_normal((n, *row)) * 100
    return values.astype(dtype)
