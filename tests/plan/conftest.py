"""Tests of forecasts: the pool that counts arrays, as the commands have it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import planned
import pytest

from mpitrain.backend import keep_freed_memory
from mpitrain.backend import memory as pools
from mpitrain.config import load_config
from mpitrain.machines.machine import load_machine
from mpitrain.plan.planner.problem import Problem


@pytest.fixture(scope="module")
def counted() -> Iterator[None]:
    """The arrays of this process are counted while the module's tests run."""
    was = list(pools._used)
    keep_freed_memory()
    yield
    pools._used[:] = was


@pytest.fixture(scope="module")
def folder(counted: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gpt.toml with its tokens, and machines."""
    return planned.write(tmp_path_factory.mktemp("plans"))


@pytest.fixture(scope="module")
def gpt(folder: Path) -> Problem:
    return Problem(load_config(folder / "gpt.toml", []), load_machine(folder / "made-up.toml"))
