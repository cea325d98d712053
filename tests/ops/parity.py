"""One call compares an op with PyTorch: values, gradients, dtypes, memory layouts, and backward in two calls.

    check(ops.relu, "relu", (3, 4))
    check(ops.linear, "nn.functional.linear", (5, 3), (4, 3), (4,))
    check(lambda x: ops.sum(x, dim=1), lambda x: x.sum(1), (2, 0, 3))
    check(ops.log, "log", positive(3, 4))

Inputs are shapes (filled with standard normal numbers), float arrays, or anything else (handed over as it is; integer
and boolean arrays become torch tensors). Floating-point inputs get gradients. `theirs` is a function of torch tensors or
a name under `torch`. Both return one result or a tuple.

The reference is always PyTorch in float64, on inputs rounded to the precision under test. A result may be wrong by
`TOLERANCE` of the largest reference value. Further runs must agree as well: strided inputs, and backward in two calls,
where inputs 1, 2, ... are parameters whose gradients are wanted in a given buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from mpitrain.autograd import Backward, Tensor, gradcheck

try:
    import torch
except ImportError:
    torch = None

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}


class Trained(Tensor):
    """A leaf of the kind that a split backward leaves for its second call."""

    __slots__ = ()
    is_parameter = True


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).standard_normal(shape))


def positive(*shape: int, seed: int = 0) -> np.ndarray:
    """Between 0.1 and 2."""
    return np.asarray(np.random.default_rng(seed).uniform(0.1, 2.0, shape))


def apart(*shape: int, seed: int = 0) -> np.ndarray:
    """Distinct numbers at least 0.1 apart and from zero, in random order: no ties and no kinks within reach."""
    size = int(np.prod(shape))
    steps = np.random.default_rng(seed).permutation(size) - size // 2
    return np.asarray(0.1 * steps + 0.05).reshape(shape)


def strided(x: np.ndarray) -> np.ndarray:
    """The same values in memory with gaps and another order of dims."""
    if x.ndim == 0:
        return x
    wide = np.full((*x.shape[::-1][:-1], 2 * x.shape[0]), np.nan, x.dtype)
    view = wide[..., ::2].T
    view[...] = x
    return view


def check(ours: Callable[..., Any], theirs: Callable[..., Any] | str, *inputs: Any,
          dtypes: Sequence[str] = ("float64", "float32"),
          gradients: bool = True, tolerance: dict[str, float] = TOLERANCE, seed: int = 0) -> None:
    """Fails with the name of the run and of the number that differs; skips where PyTorch is missing."""
    if torch is None:
        pytest.skip("PyTorch is not installed")
    if isinstance(theirs, str):
        theirs = _lookup(theirs)
    inputs = _filled(inputs, seed)
    for name in dtypes:
        rounded = [x.astype(name) if _is_float(x) else x for x in inputs]
        expected, cotangents, expected_grads = _reference(theirs, rounded, gradients, seed)
        runs = {"": (rounded, False), ", strided": ([strided(x) if _is_float(x) else x for x in rounded], False)}
        if gradients:
            runs[", backward in two calls"] = (rounded, True)
        for label, (values, split) in runs.items():
            results, grads = _ours(ours, values, cotangents, name, gradients, split)
            assert len(results) == len(expected), f"{name}{label}: {len(results)} results instead of {len(expected)}"
            for i, (a, b) in enumerate(zip(results, expected)):
                _close(f"{name}{label}: result {i}", a, b, name, tolerance[name])
            for i, (a, b) in enumerate(zip(grads, expected_grads)):
                _close(f"{name}{label}: gradient of input {i}", a, b, name, tolerance[name])


def check_gradient(ours: Callable[..., Any], *inputs: Any, tolerance: float = 1e-6) -> None:
    """The random-direction check in float64, contiguous and strided; needs no PyTorch."""
    inputs = _filled(inputs, 0)
    gradcheck(ours, *inputs, tolerance=tolerance)
    gradcheck(ours, *(strided(x) if _is_float(x) else x for x in inputs), tolerance=tolerance)


def _filled(inputs: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
    inputs = tuple(normal(*x, seed=seed + i) if _is_shape(x) else x for i, x in enumerate(inputs))
    return tuple(np.asarray(x) if isinstance(x, np.generic) else x for x in inputs)    # NumPy makes scalars of 0-d arrays


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple) and all(isinstance(n, int) for n in x)


def _is_float(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.kind == "f"


def _lookup(path: str) -> Callable[..., Any]:
    found: Any = torch
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _reference(theirs: Callable[..., Any], inputs: list[Any], gradients: bool,
               seed: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Results, random cotangents, and gradients (None for what has none)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tensors = [torch.tensor(x.astype(np.float64), requires_grad=gradients) if _is_float(x)
                   else torch.tensor(x) if isinstance(x, np.ndarray) else x for x in inputs]
        results = theirs(*tensors)
        results = list(results) if isinstance(results, tuple | list) else [results]
        rng = np.random.default_rng(seed + 1000)
        cotangents = [rng.standard_normal(tuple(r.shape)) if r.dtype == torch.float64 else None for r in results]
        grads: list[Any] = []
        if gradients:
            moving = [(r, torch.tensor(c)) for r, c in zip(results, cotangents) if c is not None]
            leaves = [t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad]
            found = iter(torch.autograd.grad([r for r, _ in moving], leaves, [c for _, c in moving], allow_unused=True,
                                             materialize_grads=True))
            grads = [next(found).numpy() if isinstance(t, torch.Tensor) and t.requires_grad else None for t in tensors]
        return [r.detach().numpy() for r in results], cotangents, grads
    finally:
        torch.set_num_threads(threads)


def _ours(ours: Callable[..., Any], inputs: list[Any], cotangents: list[Any], name: str, gradients: bool,
          split: bool) -> tuple[list[Any], list[Any]]:
    tensors = []
    for i, x in enumerate(inputs):
        if not _is_float(x):
            tensors.append(x)
        elif split and i > 0:
            tensors.append(Trained(x, requires_grad=True))
            tensors[-1].grad_buffer = np.full(x.shape, np.nan, x.dtype)
        else:
            tensors.append(Tensor(x, requires_grad=gradients))
    before = [x.copy() if _is_float(x) else x for x in inputs]
    results = ours(*tensors)
    results = list(results) if isinstance(results, tuple | list) else [results]
    if gradients:
        walk = Backward(None, split)
        walk.run([(r, c.astype(name)) for r, c in zip(results, cotangents) if c is not None])
        if split:
            walk.run_deferred()
    for i, (x, old) in enumerate(zip(inputs, before)):
        assert not _is_float(x) or np.array_equal(x, old), f"{name}: input {i} was changed"
    grads = [(t.grad if t.grad is not None else np.zeros_like(t.array)) if isinstance(t, Tensor) else None for t in tensors]
    return [r.array for r in results], grads if gradients else []


def _close(what: str, found: np.ndarray | None, wanted: np.ndarray | None, name: str, tolerance: float) -> None:
    if wanted is None or found is None:
        assert found is wanted, f"{what}: one of the two is missing"
        return
    assert found.shape == wanted.shape, f"{what}: shape {found.shape} instead of {wanted.shape}"
    if wanted.dtype.kind != "f":
        assert found.dtype == wanted.dtype and np.array_equal(found, wanted), f"{what}: {found} instead of {wanted}"
        return
    assert found.dtype == name, f"{what}: dtype {found.dtype} instead of {name}"
    if wanted.size == 0:
        return
    scale = float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0)) or 1.0
    with np.errstate(invalid="ignore"):
        error = np.where(found == wanted, 0.0, np.abs(found - wanted))
    worst = float(error.max())
    assert worst <= tolerance * scale, (f"{what}: off by {worst / scale:.2e} of the largest value {scale:.3g}, "
                                        f"allowed {tolerance:g}")
