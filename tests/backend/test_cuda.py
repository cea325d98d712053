"""What CuPy is handed at a launch."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Launches of a module in CuPy's place, as (grid, block, arguments, bytes of shared memory)."""
    made: list[tuple[Any, ...]] = []

    def kernel(grid: Any, block: Any, arguments: Any, *, shared_mem: int) -> None:
        made.append((grid, block, list(arguments), shared_mem))
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    vars(cupy)["cuda"], vars(cuda)["compiler"] = cuda, None
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.delitem(sys.modules, "mpitrain.backend.cuda", raising=False)
    runtime = import_module("mpitrain.backend.cuda").Cuda()
    monkeypatch.delitem(sys.modules, "mpitrain.backend.cuda")
    monkeypatch.setattr(runtime, "_module", lambda source: SimpleNamespace(get_function=lambda name: kernel))
    runtime.function("sums", "any")((2, 3), 64, ["array", None, 5, 0.5], 16)
    return made


def test_an_array_that_is_not_there_is_a_pointer_of_eight_bytes_and_never_none(launches: list[tuple[Any, ...]]) -> None:
    """CuPy makes of a None an argument at address 0, which the driver reads; of an int one of 64 bits."""
    assert launches == [((2, 3), (64,), ["array", 0, 5, 0.5], 16)]
