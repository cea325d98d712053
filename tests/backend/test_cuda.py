"""What CuPy is handed at a launch, and what its module has."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import cupy_signatures
import fakecuda
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


def test_the_stand_in_has_no_name_that_the_module_of_cupy_lacks() -> None:
    """But NCCL, which CuPy imports when it is asked to, and what tests alone use."""
    names = json.loads(cupy_signatures.FILE.read_text())["cuda"]
    own = {name: value for name, value in vars(fakecuda).items() if getattr(value, "__module__", "") == "fakecuda"
           and not name.startswith("_")}
    assert set(own) - set(names[""]) == {"nccl", "lagging", "copy_later", "default_pool", "pinned", "pool_here"}
    for title in set(own) & set(names):
        asked = {name for name in dir(own[title]) if not name.startswith("_")}
        assert asked - set(names[title]) <= {"hold", "peak", "taken", "there", "used"}, title
