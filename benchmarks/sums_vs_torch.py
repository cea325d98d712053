r"""Sums, means, variances and gradients of biases beside PyTorch's: their time and their error.

    env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python benchmarks/sums_vs_torch.py

One thread each, float32, numbers between 0 and 1; both sides alternate, and a time is the median over the rounds. "faster" is
PyTorch's time over ours. Errors are the largest difference from float64, relative to the largest result. The gradient of a bias
is that of `x + bias`, forward and backward. The bar: no slower than PyTorch, with at most 4 times its error.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from mpitrain import ops
from mpitrain.autograd import Tensor, run_backward

ROUNDS, SECONDS = 5, 0.01  # of a line of the table; at least that long a side and round
SHAPES = [(1_000_000,), (1_000_000, 1), (1_000_000, 4), (200_000, 16), (10_000, 100), (1000, 1000), (64, 128, 256)]
ROWS = [(1_000_000, 1), (1_000_000, 4), (1_000_000, 16), (100_000, 64), (10_000, 512)]


def seconds(run: Callable[[], Any]) -> float:
    start, count = perf_counter(), 0
    while (passed := perf_counter() - start) < SECONDS or not count:
        run()
        count += 1
    return passed / count


def error(found: Any, exact: np.ndarray) -> float:
    return float(np.abs(np.asarray(found, np.float64) - exact).max() / np.abs(exact).max())


def line(label: str, ours: Callable[[], Any], theirs: Callable[[], Any], exact: np.ndarray) -> float:
    wrong, their_wrong = error(ours(), exact), error(theirs(), exact)
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(ROUNDS)]
    mine, yours = median(a for a, _ in pairs), median(b for _, b in pairs)
    faster = median(b / a for a, b in pairs)
    print(f"{label:34} {1e3 * mine:9.3f} {1e3 * yours:9.3f} {faster:7.2f}   {wrong:.1e} {their_wrong:.1e}", flush=True)
    return faster


def reductions(rng: Any) -> list[float]:
    found = []
    for shape in SHAPES:
        x = rng.random(shape, np.float32)
        mine, yours, wide = Tensor(x), torch.tensor(x), torch.tensor(x, dtype=torch.float64)
        for name in ("sum", "mean", "var"):
            for dim in (None, *(() if len(shape) == 1 else (0, -1))):
                if shape[dim or 0] == 1 and name == "var":
                    continue
                a, b = getattr(ops, name), getattr(torch, name)
                label = f"{name} {shape} over {'all' if dim is None else dim}"
                found.append(line(label, lambda a=a, x=mine, dim=dim: a(x, dim).array,
                                  lambda b=b, x=yours, dim=dim: b(x, dim=dim).numpy(), b(wide, dim=dim).numpy()))
    return found


def biases(rng: Any) -> list[float]:
    found = []
    for shape in ROWS:
        x, weights = (rng.random(shape, np.float32) for _ in range(2))
        mine, yours = Tensor(np.zeros(shape[1], np.float32), requires_grad=True), torch.zeros(shape[1], requires_grad=True)
        rows, their_rows, cotangent = Tensor(x), torch.tensor(x), torch.tensor(weights)

        def step(rows: Any = rows, mine: Any = mine, weights: Any = weights) -> np.ndarray:
            mine.grad = None
            run_backward(rows + mine, weights)
            return mine.grad

        def their_step(rows: Any = their_rows, yours: Any = yours, cotangent: Any = cotangent) -> np.ndarray:
            yours.grad = None
            (rows + yours).backward(cotangent)
            return yours.grad.numpy()

        found.append(line(f"gradient of a bias {shape}", step, their_step, weights.sum(0, dtype=np.float64)))
    return found


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'':34} {'ours, ms':>9} {'PyTorch':>9} {'faster':>7}   error   PyTorch's")
    rng = np.random.default_rng(0)
    for what, found in (("sums, means, variances", reductions(rng)), ("gradients of biases", biases(rng))):
        slower = sum(f < 1 for f in found)
        print(f"{what}: median {median(found):.2f}, lowest {min(found):.2f}; below 1: {slower} of {len(found)}")


if __name__ == "__main__":
    main()
