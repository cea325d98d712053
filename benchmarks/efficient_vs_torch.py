"""A training step of efficient convolutional nets beside PyTorch's, channels_last, one thread each, in turn in one run.

    env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE python benchmarks/efficient_vs_torch.py [--models mobilenet_v2] [--pairs 20]
    python benchmarks/efficient_vs_torch.py --profile          what the step of each model spends its time on, by operation

Images are of Fashion-MNIST's size, 1 x 28 x 28, 64 at a time, float32; a step is forward, loss, backward and AdamW (fused in
PyTorch). The peers are torchvision's models with the stride of their stem and the input channels changed as ours are; they start
from our initial values, and the losses of the first steps are compared. Dropout and stochastic depth are off on both sides. A
ratio is the median over rounds of PyTorch's time over ours, with quartiles: above 1 we are faster.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pinned  # noqa: F401  (first: it sets what NumPy and PyTorch read)

# isort: split
import beside_torch
import numpy as np
import torch
from torch_side import TorchSide

from mpitrain import models, nn
from mpitrain.bench.pairs import Pairs, in_turn, timed
from mpitrain.bench.report import Report, cpu_name, in_time, ratio_of
from mpitrain.bench.train import DECAY, LR, Training
from mpitrain.bench.workloads import Workload
from mpitrain.comm.job.guard import Process
from mpitrain.comm.job.start import start
from mpitrain.errors import ConfigError, NumericsError

BATCH, CHECKED = 64, 3                            # samples; steps whose losses are compared
FIRST, TOLERANCE = 1e-5, 5e-3                     # of losses before an update, all of which are near log(10), and after it


@dataclass(frozen=True)
class Case:
    """Our model and its arguments, and the name of torchvision's and its own."""

    model: str
    ours: dict[str, Any]
    peer: str
    theirs: dict[str, Any]

    def workload(self) -> Workload:
        return Workload(self.make, BATCH, (1, 28, 28), 10, 0)

    def make(self) -> nn.Module:
        model = models.MODELS[self.model](classes=10, channels=1, **self.ours)
        for module in model.modules():
            if isinstance(module, nn.Dropout | nn.DropPath):
                module.p = 0.0
        return model

    def torch(self) -> torch.nn.Module:
        model = getattr(torchvision(), self.peer)(num_classes=10, **self.theirs)
        for module in model.modules():
            if type(module).__name__ in ("Dropout", "StochasticDepth"):
                module.p = 0.0
        parent, name, conv = next((parent, name, child) for parent in model.modules() for name, child in parent.named_children()
                                  if isinstance(child, torch.nn.Conv2d))
        stem = torch.nn.Conv2d(1, conv.out_channels, conv.kernel_size, 1, conv.padding, bias=conv.bias is not None)
        setattr(parent, name, stem)
        return model


SMALL = {"halvings": 4}
CASES = {
    "mobilenet_v2": Case("mobilenet_v2", {"width": 0.35, **SMALL}, "mobilenet_v2", {"width_mult": 0.35}),
    "mobilenet_v3": Case("mobilenet_v3_small", {"width": 0.5, **SMALL}, "mobilenet_v3_small", {"width_mult": 0.5}),
    "shufflenet_v2": Case("shufflenet_v2", {"width": 0.5, **SMALL}, "shufflenet_v2_x0_5", {}),
    "mnasnet": Case("mnasnet", {"width": 0.5, **SMALL}, "mnasnet0_5", {}),
    "efficientnet": Case("efficientnet_b0", SMALL, "efficientnet_b0", {}),
}


def torchvision() -> Any:
    """torchvision's models, whose import asks for two operators of its compiled part; ConfigError where it is not installed."""
    try:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in () if hasattr(torchvision, "library") else ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        torchvision.library = library                         # type: ignore[attr-defined]  (operators live as long as it does)
        from torchvision import models as found
    except ImportError as error:
        raise ConfigError("torchvision is not installed; pip install --no-deps torchvision==0.28.0") from error
    return found


def checked(name: str, ours: Any, theirs: Any) -> float:
    """The largest relative difference of the first losses; NumericsError where the two do not train the same model."""
    worst = 0.0
    for step in range(CHECKED):
        a, b = ours.step(), theirs.step()
        worst = max(worst, abs(a - b) / abs(b))
        if not abs(a - b) <= (TOLERANCE if step else FIRST) * abs(b):
            raise NumericsError(f"{name}: our loss is {a:.7g}, PyTorch's {b:.7g}; their times must not be compared",
                                step=step + 1)
    return worst


def profile(training: Training, steps: int) -> None:
    """Prints what a step spends its time on, in ms."""
    watch = cProfile.Profile()
    watch.runcall(training.run, steps)
    rows = [(own / steps, calls / steps, key) for key, (_, calls, own, *_) in pstats.Stats(watch).stats.items()]  # type: ignore
    for seconds, calls, (file, line, what) in sorted(rows, reverse=True)[:30]:
        print(f"{1e3 * seconds:8.3f} ms {calls:7.1f} calls   {Path(file).name}:{line} {what}")


def compare(name: str, world: Any, options: argparse.Namespace, report: Report) -> None:
    case = CASES[name]
    ours = Training(case.workload(), world.comm)
    if options.profile:
        ours.run(4)
        print(f"\n{name}")
        profile(ours, options.pairs)
        ours.close()
        return
    values = [p.array.astype("float32") for _, p in ours.model.named_parameters()]
    shaped: list[Callable[[Any], Any]] = [partial(np.reshape, shape=tuple(p.shape)) for p in case.torch().parameters()]
    torch.manual_seed(0)
    theirs = TorchSide(case.torch(), ours.batches, [reshape(v) for reshape, v in zip(shaped, values, strict=True)], lr=LR,
                       decay=DECAY, channels_last=True)
    worst = checked(name, ours, theirs)
    pairs = Pairs(*in_turn([timed(ours.step, options.steps), timed(theirs.step, options.steps)], options.pairs))
    found = pairs.summary("torch")
    report.record({"bench": "efficient_vs_torch", "what": name, "peer": "channels_last", "batch": BATCH, "threads": 1, **found,
                   "difference": worst, "parameters": ours.model.count_parameters(), "torch": torch.__version__,
                   "cpu": cpu_name()})
    report.line(f"{name:<15}{in_time(found['seconds']):>11}{in_time(found['torch_seconds']):>11}   {ratio_of(found)}   "
                f"losses differ by {worst:.1e}")
    ours.close()


def main() -> int:
    options = beside_torch.settle(__doc__, {"models": CASES}, {"pairs": 20, "steps": 2}, "profile")
    world, report = start(), Report(0, options.json)
    if not options.profile:
        report.line(f"training steps beside PyTorch {torch.__version__}, channels_last, batch {BATCH} of 1 x 28 x 28, float32, "
                    f"one thread; medians of {options.pairs} rounds\n"
                    f"{'model':<15}{'ours':>11}{'PyTorch':>11}   times faster (quartiles)")
    for name in options.models:
        compare(name, world, options, report)
    return 0


if __name__ == "__main__":
    Process().run(main)
