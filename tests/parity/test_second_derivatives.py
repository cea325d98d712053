"""Second derivatives of every entry of PyTorch's op_db that a map names: equal to PyTorch's, or refused by the name of the op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest

from mpitrain.autograd import Tensor, grad, keep_inputs
from mpitrain.errors import GraphError, MpitrainError

pytestmark = pytest.mark.slow

ENTRIES, SAMPLES = 265, 5                         # that agree, at least; of each
TOLERANCE = 1e-9                                  # of the largest number of the result
UNLIKE = {
    "linalg.eigvalsh": "ours and PyTorch's agree along symmetric directions (tests/ops/test_edges.py); along others, which leave "
                       "what eigvalsh is of, each is as its derivation has it",
    "linalg.norm.subgradients_at_zero": "PyTorch's second derivative at a norm of 0 is NaN, ours 0",
}


@pytest.mark.filterwarnings("ignore")
def test_our_operations_have_pytorchs_second_derivatives_on_its_own_samples() -> None:
    pytest.importorskip("torch")
    import harness

    torch, entries = harness.databases(), harness.op_db()
    torch.set_num_threads(1)
    failures, equal, total, refused = [], [], Counter[str](), set[str]()
    for name, ours in harness.maps().items():
        entry = entries[name]
        if name in UNLIKE or not entry.supports_gradgrad or torch.float64 not in entry.dtypes:
            continue
        counts = Counter[str]()
        torch.manual_seed(0)
        for sample in islice(entry.sample_inputs("cpu", torch.float64, requires_grad=True), SAMPLES):
            outcome, detail = of_sample(harness, torch, entry, ours, sample)
            counts[outcome] += 1
            if outcome == "wrong":
                failures.append(f"{name} {harness.described(sample)}: {detail}")
            if outcome == "refused":
                refused.add(f"{name}: {detail}")
        total.update(counts)
        if counts["equal"] and not counts["wrong"]:
            equal.append(name)
    print(f"{len(equal)} entries with equal second derivatives; samples: {dict(total)}", *sorted(refused), sep="\n")
    assert not failures, "\n".join(failures)
    assert len(equal) >= ENTRIES


def of_sample(harness: Any, torch: Any, entry: Any, ours: Any, sample: Any) -> tuple[str, str]:
    given = [sample.input, *sample.args], dict(sample.kwargs)
    pairs: list[tuple[Any, Tensor]] = []
    try:
        args, kwargs = harness.translated(torch, given, pairs)
        with keep_inputs():
            found = harness.flat(ours(*args, **kwargs))
        theirs = harness.reference(torch, entry, given)
    except Exception:                             # what is absent or refused is the first derivatives' matter
        return "absent", ""
    leaves = [(t, x) for t, x in pairs if t.requires_grad]
    moving = [i for i, (a, b) in enumerate(zip(found, theirs))
              if isinstance(b, torch.Tensor) and b.requires_grad and b.dtype == torch.float64 and a.requires_grad]
    if not leaves or not moving or any(t.dtype != torch.float64 for t, _ in leaves):
        return "constant", ""
    try:
        wanted = twice([theirs[i] for i in moving], [t for t, _ in leaves], torch.autograd.grad, torch.tensor)
    except RuntimeError:
        return "absent", ""                       # PyTorch has none either
    try:
        got = twice([found[i] for i in moving], [x for _, x in leaves], grad, Tensor)
    except MpitrainError as error:
        by_name = isinstance(error, GraphError) or "the gradient wants" in str(error)
        return "refused" if by_name else "wrong", str(error)
    for a, b in zip(got, wanted):
        if a is None and b is None:
            continue
        mine, truth = both(a, b)
        if not np.array_equal(np.isfinite(mine), np.isfinite(truth)):
            return "wrong", f"{mine.ravel()[:4]} instead of {truth.ravel()[:4]}"
        finite = np.isfinite(truth)
        if finite.any() and np.abs(mine[finite] - truth[finite]).max() > TOLERANCE * max(1.0, np.abs(truth[finite]).max()):
            return "wrong", f"off by {np.abs(mine[finite] - truth[finite]).max():.1e} of {np.abs(truth[finite]).max():.1e}"
    return "equal", ""


def both(a: Any, b: Any) -> Iterator[Any]:
    """Two gradients as arrays; None is 0."""
    shape = tuple((b if a is None else a).shape)
    for g in (a, b):
        yield np.zeros(shape) if g is None else g.array if isinstance(g, Tensor) else g.detach().numpy(force=True)


def twice(outputs: list[Any], leaves: list[Any], gradients: Any, tensor: Any) -> list[Any]:
    """The derivatives of the gradient, by one random direction each."""
    rng = np.random.default_rng(1)

    def draw(x: Any) -> Any:
        return tensor(rng.standard_normal(tuple(x.shape)))
    first = gradients(outputs, leaves, [draw(y) for y in outputs], create_graph=True, allow_unused=True)
    weights = [draw(x) for x in leaves]
    pairs = [(g, w) for g, w in zip(first, weights) if g is not None and g.requires_grad]
    if not pairs:
        return [None] * len(leaves)
    return list(gradients([g for g, _ in pairs], leaves, [w for _, w in pairs], allow_unused=True))
