"""Every entry of PyTorch's module_db that a map names agrees with PyTorch; see module_harness.py."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

ENTRIES = 104                                     # that agree, at least


@pytest.mark.filterwarnings("ignore")             # PyTorch's databases warn of much
def test_our_layers_give_pytorchs_results_on_its_own_samples() -> None:
    pytest.importorskip("torch")
    import harness
    import module_harness

    results = module_harness.run()
    print(harness.table(results))
    failures = [f"{result.name}: {line}" for result in results for line in result.details if line.startswith(("wrong", "raw"))]
    assert not failures, "\n".join(failures)
    assert sum(result.equal for result in results) >= ENTRIES
    without = [result.name for result in results if not result.equal]
    assert not without, f"no sample of these entries was answered: {without}"
