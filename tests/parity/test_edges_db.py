"""PyTorch's reference inputs, error inputs, and inputs of NaN and infinities, of every entry that a map names; see edges.py."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

REFERENCES, LARGEST, SPECIALS = 40, 20_000, 6


def loaded() -> tuple[Any, Any, Any]:
    pytest.importorskip("torch")
    import edges
    import harness

    torch = harness.databases()
    torch.set_num_threads(1)
    return torch, harness, edges


def settled(results: list[Any], least: dict[str, int]) -> None:
    total = Counter[str]()
    for result in results:
        total.update(result.counts)
    print(dict(total))
    failures = [f"{result.name}: {line}" for result in results for line in result.details if line.startswith(("wrong", "raw"))]
    assert not failures, "\n".join(failures)
    assert all(total[kind] >= count for kind, count in least.items()), total


def test_our_operations_give_pytorchs_results_on_its_reference_inputs() -> None:
    torch, harness, edges = loaded()
    entries = harness.op_db()
    settled([edges.references(torch, name, ours, REFERENCES, LARGEST) for name, ours in harness.maps().items()
             if entries[name].reference_inputs_func is not None], {"equal": 3000})


def test_our_operations_give_pytorchs_results_at_nan_and_infinity() -> None:
    torch, harness, edges = loaded()
    entries = harness.op_db()
    settled([edges.specials(torch, name, ours, SPECIALS) for name, ours in harness.maps().items()
             if edges.by_element(entries[name]) and torch.float64 in entries[name].dtypes], {"equal": 500})


def test_our_operations_refuse_what_pytorch_refuses_in_one_line() -> None:
    torch, harness, edges = loaded()
    settled([edges.errors(torch, name, ours) for name, ours in harness.maps().items()], {"refused": 350})


def test_our_layers_refuse_what_pytorch_refuses_in_one_line() -> None:
    torch, harness, edges = loaded()
    import module_harness

    entries = module_harness.module_db()
    results = [edges.module_errors(torch, entries[name], make) for name, make in harness.maps("modules_*.py").items()]
    settled(results, {"refused": 10})
    assert {result.name for result in results if result.counts["accepted"]} == edges.ACCEPTED_LAYERS.keys()
