"""Real inputs that are not part of the project: tests that want them skip where they are not, and say so."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "shared/data"


def real(name: str) -> Path:
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"the real input {path} is not there")
    return path
