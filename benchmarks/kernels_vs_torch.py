"""Our ops beside PyTorch's eager ones, one thread each: forward alone, and forward with backward, through each one's autograd.

    make bench-train      or    python benchmarks/kernels_vs_torch.py [--ops gelu,softmax] [--pairs 40] [--json FILE]

    gelu_tanh, gelu_erf, layer_norm, softmax, cross_entropy     768 x 512, float32
    batch_norm      with ReLU, 128 x 16 x 32 x 32, the first stage of ResNet-20
    max_pool        with ReLU, 2 x 2, 128 x 6 x 28 x 28, LeNet's first; avg_pool: the mean of images, 128 x 64 x 8 x 8
    attention       12 sequences x 4 heads x 64 positions x 32, causal (nanoGPT's on a CPU); PyTorch: scaled_dot_product_attention
    lstm, gru       2 layers of 128, 64 sequences of 100 steps
    adamw           an update of 4 million parameters; PyTorch: fused

Some calls of one side follow some of the other, A B A B, on the same inputs; the ratio is the median over pairs of PyTorch's time
over ours, with quartiles. Results and gradients of both are compared in the same run. Inputs stay the same, so what fits is in
the caches, as it would be behind the layer that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pinned  # noqa: F401  (first: it sets what NumPy and PyTorch read)

# isort: split
import beside_torch
import numpy as np
import torch
from torch.nn import functional as F

from mpitrain import ops, optim
from mpitrain.autograd import Tensor, no_grad, run_backward
from mpitrain.bench.exchange import Weights
from mpitrain.bench.pairs import alternate, timed
from mpitrain.bench.report import Report, cpu_name, in_time, ratio_of
from mpitrain.comm.job.guard import Process, symmetric
from mpitrain.errors import NumericsError

ROWS, WIDTH, HEADS, PARAMETERS = 768, 512, (12, 4, 64, 32), 4_000_000
RECURRENT = (100, 64, 128, 2)                     # length, batch, width, layers
NORM, POOL, MEAN = (128, 16, 32, 32), (128, 6, 28, 28), (128, 64, 8, 8)
AT_ONCE = 0.004                                   # seconds of a turn: many calls of a short op
TOLERANCE = 2e-5                                  # of the largest number of a result
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}

Arrays = list[np.ndarray]
Run = Callable[[], Any]


class Op:
    """One op on the same inputs on both sides: `ours` and `theirs` take the inputs and give one result."""

    def __init__(self, ours: Callable[..., Any], theirs: Callable[..., Any], inputs: Sequence[np.ndarray]):
        self._ours, self._theirs = ours, theirs
        self._tensors = [Tensor(x, requires_grad=True) for x in inputs]
        self._torch = [torch.from_numpy(x.copy()).requires_grad_() for x in inputs]
        with no_grad(), torch.no_grad():
            shape = ours(*self._tensors).shape
        cotangent = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        self._cotangent, self._torch_cotangent = cotangent, torch.from_numpy(cotangent.copy())

    def runs(self) -> dict[str, tuple[Run, Run]]:
        """What is timed, by name: (ours, theirs)."""
        return {"forward": (self.forward, self.torch_forward), "forward + backward": (self.both, self.torch_both)}

    def forward(self) -> Any:
        with no_grad():
            return self._ours(*self._tensors)

    def torch_forward(self) -> Any:
        with torch.no_grad():
            return self._theirs(*self._torch)

    def both(self) -> Any:
        for tensor in self._tensors:
            tensor.grad = None
        result = self._ours(*self._tensors)
        run_backward(result, self._cotangent)
        return result

    def torch_both(self) -> Any:
        for tensor in self._torch:
            tensor.grad = None
        result = self._theirs(*self._torch)
        result.backward(self._torch_cotangent)
        return result

    def results(self) -> tuple[Arrays, Arrays]:
        """The result and the gradients of each side."""
        ours, theirs = self.both(), self.torch_both()
        return ([ours.array, *(tensor.grad for tensor in self._tensors)],
                [theirs.detach().numpy(), *(tensor.grad.numpy() for tensor in self._torch)])


class AdamW:
    """The same update of the same parameters with the same gradients, as often as it is run."""

    def __init__(self, parameters: int):
        rng = np.random.default_rng(0)
        self._storage = Weights(parameters).initialize(seed=0)
        self._gradients = self._storage.new_flat()
        values, gradients = rng.standard_normal((2, parameters), dtype=np.float32)
        self._storage.values[:parameters], self._gradients[:parameters] = values, gradients
        self._optimizer, self._steps, self._count = optim.AdamW(self._storage, **ADAMW), 0, parameters
        parts = [segment.stop - segment.start for segment in self._storage.segments]
        self._torch = [torch.nn.Parameter(part.clone()) for part in torch.from_numpy(values).split(parts)]
        for parameter, gradient in zip(self._torch, torch.from_numpy(gradients).split(parts)):
            parameter.grad = gradient.clone()
        self._torch_optimizer = torch.optim.AdamW(self._torch, fused=True, **ADAMW)

    def runs(self) -> dict[str, tuple[Run, Run]]:
        return {"update": (self.update, self._torch_optimizer.step)}

    def update(self) -> None:
        self._steps += 1
        self._optimizer.update(self._gradients, lr=ADAMW["lr"], step=self._steps)

    def results(self) -> tuple[Arrays, Arrays]:
        for _ in range(3):
            self.update()
            self._torch_optimizer.step()
        return ([self._storage.values[:self._count]],
                [np.concatenate([parameter.detach().numpy() for parameter in self._torch])])


def normal(*shapes: tuple[int, ...]) -> Arrays:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def make(name: str) -> Op | AdamW:
    if name == "adamw":
        return AdamW(PARAMETERS)
    if name == "attention":
        return Op(lambda q, k, v: ops.scaled_dot_product_attention(q, k, v, is_causal=True),
                  lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), normal(HEADS, HEADS, HEADS))
    if name == "layer_norm":
        return Op(ops.layer_norm, lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b), normal((ROWS, WIDTH), (WIDTH,), (WIDTH,)))
    if name == "cross_entropy":
        labels = np.random.default_rng(2).integers(0, WIDTH, ROWS)
        torch_labels = torch.from_numpy(labels)
        return Op(lambda x: ops.cross_entropy(x, labels), lambda x: F.cross_entropy(x, torch_labels, reduction="sum"),
                  normal((ROWS, WIDTH)))
    if name == "batch_norm":
        channels = NORM[1:2]
        return Op(lambda x, w, b: ops.batch_norm(x, w, b, relu=True)[0],
                  lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True).relu(), normal(NORM, channels, channels))
    if name == "max_pool":
        return Op(lambda x: ops.max_pool2d(x, 2, relu=True), lambda x: F.max_pool2d(F.relu(x), 2), normal(POOL))
    if name == "avg_pool":
        return Op(lambda x: ops.adaptive_avg_pool2d(x, 1), lambda x: F.adaptive_avg_pool2d(x, 1), normal(MEAN))
    if name in ("lstm", "gru"):
        return recurrent(name)
    ours, theirs = {"gelu_tanh": (lambda x: ops.gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh")),
                    "gelu_erf": (ops.gelu, F.gelu), "softmax": (ops.softmax, lambda x: F.softmax(x, dim=-1))}[name]
    return Op(ours, theirs, normal((ROWS, WIDTH)))


def recurrent(name: str) -> Op:
    """Layers and gradients of everything; weights as large as a layer starts with."""
    length, batch, width, layers = RECURRENT
    gates = {"lstm": 4, "gru": 3}[name] * width
    layer = {"lstm": ops.lstm, "gru": ops.gru}[name]

    def ours(x: Any, *weights: Any) -> Any:
        for i in range(layers):
            x = layer(x, *weights[4 * i:4 * i + 4])[0]
        return x

    def theirs(x: Any, *weights: Any) -> Any:
        state = torch.zeros(layers, batch, width)
        run = {"lstm": torch.lstm, "gru": torch.gru}[name]
        return run(x, (state, state) if name == "lstm" else state, weights, True, layers, 0.0, True, False, False)[0]
    x, *weights = normal((length, batch, width), *[(gates, width), (gates, width), (gates,), (gates,)] * layers)
    return Op(ours, theirs, [x, *(weight * np.float32(0.5 / width**0.5) for weight in weights)])


OPS = ("gelu_tanh", "gelu_erf", "layer_norm", "softmax", "cross_entropy", "batch_norm", "max_pool", "avg_pool", "attention",
       "lstm", "gru", "adamw")


def difference(op: Op | AdamW, name: str) -> float:
    """The largest difference of a result or a gradient, relative to the largest number in it; NumericsError beyond TOLERANCE."""
    worst = 0.0
    for which, (ours, theirs) in enumerate(zip(*op.results(), strict=True)):
        found = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
        if not (ours.shape == theirs.shape and found <= TOLERANCE):
            what = f"gradient {which}" if which else "the result"
            raise NumericsError(f"{name}: {what} differs from PyTorch's by {found:.1e} of its largest number; times of a wrong "
                                f"result must not be compared")
        worst = max(worst, found)
    return worst


def calls_a_turn(run: Run) -> int:
    """How many fill a turn."""
    once = timed(run, 1)
    return max(1, round(AT_ONCE / min(once(turn) for turn in range(5))))


def main() -> int:
    options = beside_torch.settle(__doc__, {"ops": OPS}, {"pairs": 40})
    report = Report(0, options.json)
    report.line(f"ops beside PyTorch {torch.__version__}, float32, one thread; medians of {options.pairs} pairs\n"
                f"{'op':<16}{'':<20}{'ours':>11}{'PyTorch':>11}   times faster (quartiles)")
    for name in options.ops:
        op = make(name)
        with symmetric():
            worst = difference(op, name)
        for what, (ours, theirs) in op.runs().items():
            calls = calls_a_turn(theirs)
            result = alternate(timed(ours, calls), timed(theirs, calls), options.pairs).summary("torch")
            report.record({"bench": "kernels_vs_torch", "op": name, "what": what, "dtype": "float32", "threads": 1, **result,
                           "calls_a_turn": calls, "difference": worst, "torch": torch.__version__, "cpu": cpu_name()})
            report.line(f"{name:<16}{what:<20}{in_time(result['seconds']):>11}{in_time(result['torch_seconds']):>11}   "
                        f"{ratio_of(result)}")
    return 0


if __name__ == "__main__":
    Process().run(main)
