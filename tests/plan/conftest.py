"""Tests of forecasts: the pool that counts arrays, as the commands have it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mpitrain.backend import keep_freed_memory
from mpitrain.backend import memory as pools


@pytest.fixture(scope="module")
def counted() -> Iterator[None]:
    """The arrays of this process are counted while the module's tests run."""
    was = list(pools._used)
    keep_freed_memory()
    yield
    pools._used[:] = was
