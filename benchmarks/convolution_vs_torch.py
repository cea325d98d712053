"""The three products of convolutions of ResNet-20, LeNet and others beside PyTorch's, NCHW and channels_last, one thread each.

    python benchmarks/convolution_vs_torch.py [--shapes stage1,lenet1] [--products forward,weight] [--pairs 15] [--json FILE]

For each shape: the forward pass, the gradient of the input and that of the weight, each alone, float32. Some calls of one side
follow some of the others, in turn; a ratio is the median over rounds of PyTorch's time over ours, with quartiles. GFLOP/s count
a multiply-add as two, those with padding included; the peak is that of a loop of nothing but
multiply-adds on this core, measured in the same run. Results of all sides are compared before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pinned  # noqa: F401  (first: it sets what NumPy and PyTorch read)

# isort: split
import beside_torch
import numpy as np
import torch
from torch.nn import functional as F

from mpitrain.bench.pairs import Pairs, in_turn, timed
from mpitrain.bench.peak import peak_flops
from mpitrain.bench.report import Report, cpu_name, in_time, ratio_of
from mpitrain.comm.job.guard import Process, symmetric
from mpitrain.errors import NumericsError
from mpitrain.kernels.convolution import Window, convolve, convolve_adjoint, kernel_gradient

TOLERANCE = 2e-5                                  # of the largest number of a result
AT_ONCE = 0.02                                    # seconds of a turn: several calls of a short product
PRODUCTS = ("forward", "input", "weight")
PEERS = ("torch", "channels_last")

Run = Callable[[], Any]


@dataclass(frozen=True)
class Shape:
    """A convolution of `batch` images of `size` x `size`."""

    inputs: int
    outputs: int
    size: int
    kernel: int = 3
    stride: int = 1
    padding: int = 1
    batch: int = 128
    groups: int = 1

    @property
    def window(self) -> Window:
        return Window((self.kernel,) * 2, (self.stride,) * 2, (self.padding,) * 2)

    @property
    def flops(self) -> int:
        side = self.window.outputs(self.size, self.size)[0]
        return 2 * self.batch * self.outputs * self.inputs // self.groups * self.kernel ** 2 * side ** 2


SHAPES = {"stem": Shape(3, 16, 32), "stage1": Shape(16, 16, 32), "down2": Shape(16, 32, 32, stride=2),
          "stage2": Shape(32, 32, 16), "down3": Shape(32, 64, 16, stride=2), "stage3": Shape(64, 64, 8),
          "lenet1": Shape(1, 6, 28, kernel=5, padding=2),
          "lenet2": Shape(6, 16, 14, kernel=5, padding=0), "point": Shape(64, 64, 16, kernel=1, padding=0),
          "depthwise": Shape(64, 64, 16, groups=64), "grouped": Shape(64, 64, 16, groups=4),
          "depthwise2": Shape(64, 64, 32, stride=2, groups=64), "depthwise3": Shape(256, 256, 8, groups=256)}


class Case:
    """The same arrays on all sides; `runs` gives what is timed, ours first and then PEERS."""

    def __init__(self, shape: Shape):
        rng = np.random.default_rng(0)
        side = shape.window.outputs(shape.size, shape.size)[0]
        self._shape = shape
        sizes = ((shape.batch, shape.inputs, shape.size, shape.size),
                 (shape.outputs, shape.inputs // shape.groups, shape.kernel, shape.kernel),
                 (shape.batch, shape.outputs, side, side))
        self._x, self._weight, self._y = (rng.standard_normal(size, dtype=np.float32) for size in sizes)

    def runs(self, product: str) -> list[Run]:
        return [self._ours(product), self._torch(product, torch.contiguous_format), self._torch(product, torch.channels_last)]

    def _ours(self, product: str) -> Run:
        x, weight, y, shape = self._x, self._weight, self._y, self._shape
        if product == "forward":
            return lambda: convolve(x, weight, None, shape.window, shape.groups)
        if product == "input":
            return lambda: convolve_adjoint(y, weight, None, shape.window, shape.groups, x.shape[2:])
        return lambda: kernel_gradient(x, y, shape.window, shape.groups)[0]

    def _torch(self, product: str, layout: torch.memory_format) -> Run:
        x, weight, y = (torch.from_numpy(a.copy()).contiguous(memory_format=layout) for a in (self._x, self._weight, self._y))
        shape, which = self._shape, [product == "input", product == "weight", False]
        if product == "forward":
            return lambda: F.conv2d(x, weight, None, shape.stride, shape.padding, 1, shape.groups)
        backward, (stride, padding) = torch.ops.aten.convolution_backward, ([shape.stride] * 2, [shape.padding] * 2)
        found = which.index(True)
        return lambda: backward(y, x, weight, None, stride, padding, [1, 1], False, [0, 0], shape.groups, which)[found]


def difference(ours: Any, theirs: torch.Tensor, what: str) -> float:
    """Relative to the largest number; NumericsError beyond TOLERANCE."""
    wanted = theirs.detach().contiguous().numpy()
    found = float(np.abs(ours - wanted).max() / np.abs(wanted).max())
    if not (ours.shape == wanted.shape and found <= TOLERANCE):
        raise NumericsError(f"{what} differs from PyTorch's by {found:.1e} of its largest number; times of a wrong result must "
                            f"not be compared")
    return found


def measure(runs: list[Run], rounds: int) -> dict[str, dict[str, float]]:
    """By peer, what `Pairs.summary` says."""
    calls = [max(1, round(AT_ONCE / min(timed(run, 1)(0) for _ in range(3)))) for run in runs]
    ours, *theirs = in_turn([timed(run, count) for run, count in zip(runs, calls, strict=True)], rounds)
    return {peer: Pairs(ours, seconds).summary("torch") for peer, seconds in zip(PEERS, theirs, strict=True)}


def main() -> int:
    options = beside_torch.settle(__doc__, {"shapes": SHAPES, "products": PRODUCTS}, {"pairs": 15, "batch": 128})
    peak, report = peak_flops(), Report(0, options.json)
    report.line(f"convolutions beside PyTorch {torch.__version__}, batch {options.batch}, float32, one thread of "
                f"{peak / 1e9:.0f} GFLOP/s; medians of {options.pairs} rounds\n"
                f"{'shape':<11}{'':<9}{'ours':>11}{'GFLOP/s':>9}{'of peak':>9}"
                f"   times faster than NCHW (quartiles), channels_last")
    for name in options.shapes:
        shape = Shape(**{**vars(SHAPES[name]), "batch": options.batch})
        case = Case(shape)
        for product in options.products:
            if (name, product) in (("stem", "input"), ("lenet1", "input")):
                continue                                      # the first layer's: nobody asks for it
            runs = case.runs(product)
            with symmetric():
                worst = max(difference(runs[0](), theirs(), f"{name}, {product}") for theirs in runs[1:])
            found = measure(runs, options.pairs)
            seconds = found["torch"]["seconds"]
            for peer, result in found.items():
                report.record({"bench": "convolution_vs_torch", "shape": name, "what": product, "peer": peer, "dtype": "float32",
                               "threads": 1, **vars(shape), **result, "flops": shape.flops, "difference": worst,
                               "peak_fraction": shape.flops / seconds / peak, "torch": torch.__version__, "cpu": cpu_name()})
            report.line(f"{name:<11}{product:<9}{in_time(seconds):>11}{shape.flops / seconds / 1e9:>9.0f}"
                        f"{shape.flops / seconds / peak:>9.0%}   {ratio_of(found['torch'])}, {ratio_of(found['channels_last'])}")
    return 0


if __name__ == "__main__":
    Process().run(main)
