"""The matrix products of training steps: ours, NumPy's BLAS and PyTorch's, one thread each.

    make bench-train      or    python benchmarks/products_vs_torch.py [--models mlp,gpt-nano] [--rounds 15] [--json FILE]

One step of each model says which products there are (rows x columns x terms), what they are for, and how often. Each is then
computed by all three in turn, A B C A B C, on the same numbers in the same layout, into memory that is there; results are
compared with float64. GFLOP/s are those of the median time; what a core's multiply-adds can do at most is measured beside. Inputs
stay the same, so what fits is in the caches.

A ratio is the median over rounds of PyTorch's time over ours. The last line of a model sums the medians, each as often as its
product comes in a step.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pinned  # noqa: F401  (first: it sets what NumPy and PyTorch read)

# isort: split
import beside_torch
import numpy as np
import torch
from mpi4py import MPI

from mpitrain.bench.pairs import in_turn, quartiles, timed
from mpitrain.bench.peak import peak_flops
from mpitrain.bench.report import Report, cpu_name
from mpitrain.bench.train import Training
from mpitrain.bench.workloads import WORKLOADS
from mpitrain.comm.job.guard import Process, symmetric
from mpitrain.errors import NumericsError
from mpitrain.kernels import linear
from mpitrain.kernels.product import product
from mpitrain.ops import linalg

MODELS = ("mlp", "gpt-nano", "gpt-baby", "gpt2")
AT_ONCE = 2e8                                     # operations of a turn: many of a small product
CHECKED = 64                                      # rows compared with float64

Run = Callable[[], Any]


@dataclass(frozen=True)
class Shape:
    """x (m, k) y (k, n); a factor that is `turned` is the transpose of a matrix in memory."""

    m: int
    n: int
    k: int
    x_turned: bool
    y_turned: bool
    bias: bool

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def role(self) -> str:
        """What a product with factors of these layouts is for."""
        return "weight gradient" if self.x_turned else "forward" if self.y_turned else "input gradient"

    def __str__(self) -> str:
        return f"{self.m} x {self.n} x {self.k}"


def products_of(name: str) -> Counter[Shape]:
    """The products of linear layers and of `matmul` in a step of a model, and how often each comes."""
    found: Counter[Shape] = Counter()

    def spy(x: Any, y: Any, bias: Any = None, out: Any = None, operands: str = "") -> Any:
        turned = [not factor.flags.c_contiguous for factor in (x, y)]
        found[Shape(*x.shape[:1], y.shape[1], x.shape[1], *turned, bias is not None)] += 1
        return product(x, y, bias, out, operands)
    training, suits = Training(WORKLOADS[name], MPI.COMM_SELF), linear.suits
    linalg.product, linear.suits = spy, lambda *_: False      # layers make their products one by one
    try:
        training.step()
    finally:
        linalg.product, linear.suits = product, suits
        training.close()
    return found


class Members:
    """One product, by each of the three."""

    def __init__(self, shape: Shape):
        rng = np.random.default_rng(0)

        def matrix(rows: int, columns: int, turned: bool) -> np.ndarray:
            return rng.standard_normal((columns, rows), dtype=np.float32).T if turned else rng.standard_normal((rows, columns),
                                                                                                               dtype=np.float32)
        x, y = matrix(shape.m, shape.k, shape.x_turned), matrix(shape.k, shape.n, shape.y_turned)
        bias = rng.standard_normal(shape.n, dtype=np.float32) if shape.bias else None
        self.x, self.y, self.bias = x, y, bias
        self.outs = {name: np.empty((shape.m, shape.n), np.float32) for name in ("ours", "blas", "torch")}
        tensors = [torch.from_numpy(array) for array in (x, y, self.outs["torch"])]
        self.runs: dict[str, Run] = {"ours": lambda: product(x, y, bias, self.outs["ours"]), "blas": self._blas,
                                     "torch": lambda: torch.mm(*tensors[:2], out=tensors[2])}
        if bias is not None:
            added = torch.from_numpy(bias)
            self.runs["torch"] = lambda: torch.addmm(added, *tensors[:2], out=tensors[2])

    def _blas(self) -> None:
        np.matmul(self.x, self.y, out=self.outs["blas"])
        if self.bias is not None:
            self.outs["blas"] += self.bias

    def difference(self, shape: Shape) -> float:
        """The largest one of ours from float64, relative to what a sum of so many terms may lose; NumericsError beyond 1."""
        self.runs["ours"]()
        rows = np.unique(np.linspace(0, shape.m - 1, CHECKED).astype(int))
        x, y = self.x[rows].astype(np.float64), self.y.astype(np.float64)
        bias = 0.0 if self.bias is None else self.bias.astype(np.float64)
        bound = (shape.k + 2) * np.finfo(np.float32).eps * (np.abs(x) @ np.abs(y) + np.abs(bias))
        worst = float((np.abs(self.outs["ours"][rows] - (x @ y + bias)) / bound).max())
        if not worst <= 1:
            raise NumericsError(f"{shape} ({shape.role}): our product differs from float64 by {worst:.1e} times what rounding "
                                f"allows; times of a wrong result must not be compared")
        return worst


def measure(shape: Shape, rounds: int) -> dict[str, Any]:
    """Medians of seconds, the ratio with its quartiles, the peak before and after (the better one)."""
    members = Members(shape)
    before = peak_flops()
    with symmetric():
        worst = members.difference(shape)
    calls = max(1, round(AT_ONCE / shape.flops))
    times = in_turn([timed(run, calls) for run in members.runs.values()], rounds)
    ratios = [theirs / ours for ours, theirs in zip(times[0], times[2], strict=True)]
    low, high = quartiles(ratios)
    seconds = dict(zip(("seconds", "blas_seconds", "torch_seconds"), map(statistics.median, times), strict=True))
    return {**seconds, "ratio": statistics.median(ratios), "ratio_low": low, "ratio_high": high, "difference": worst,
            "peak_flops": max(before, peak_flops())}


def report_model(name: str, rounds: int, report: Report) -> None:
    total: Counter[str] = Counter()
    for shape, count in products_of(name).items():
        found = measure(shape, rounds)
        report.record({"bench": "products_vs_torch", "model": name, "m": shape.m, "n": shape.n, "k": shape.k, "role": shape.role,
                       "bias": shape.bias, "count": count, "flops": shape.flops, "rounds": rounds, "threads": 1, **found,
                       "torch": torch.__version__, "cpu": cpu_name()})
        speeds = [shape.flops / found[key] / 1e9 for key in ("seconds", "blas_seconds", "torch_seconds")]
        report.line(f"{name:<10}{shape!s:<20}{shape.role:<17}{count:>3}" + "".join(f"{speed:>8.1f}" for speed in speeds)
                    + f"{speeds[0] * 1e9 / found['peak_flops']:>9.0%}   {found['ratio']:.2f} ({found['ratio_low']:.2f} .. "
                    f"{found['ratio_high']:.2f})")
        total.update({key: count * found[key] for key in ("seconds", "blas_seconds", "torch_seconds")},
                     flops=count * shape.flops, at_peak=count * shape.flops / found["peak_flops"])
    speeds = [total["flops"] / total[key] / 1e9 for key in ("seconds", "blas_seconds", "torch_seconds")]
    report.line(f"{name:<10}{'all of a step':<40}" + "".join(f"{speed:>8.1f}" for speed in speeds)
                + f"{total['at_peak'] / total['seconds']:>9.0%}   {total['torch_seconds'] / total['seconds']:.2f}\n")


def main() -> int:
    options = beside_torch.settle(__doc__, {"models": MODELS}, {"rounds": 15})
    report = Report(0, options.json)
    report.line(f"products of training steps, float32, one thread, GFLOP/s; PyTorch {torch.__version__}; medians of "
                f"{options.rounds} rounds\n{'model':<10}{'m x n x k':<20}{'for':<17}{'':>3}{'ours':>8}{'BLAS':>8}{'PyTorch':>8}"
                f"{'of peak':>9}   times PyTorch (quartiles)")
    for name in options.models:
        report_model(name, options.rounds, report)
    return 0


if __name__ == "__main__":
    Process().run(main)
