"""200 random nets of layers and operations in both libraries: outputs, first and, where all is smooth, second derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpitrain import nn, ops
from mpitrain.autograd import Tensor, grad, keep_inputs

pytestmark = pytest.mark.slow

NETS, TOLERANCE = 200, 1e-9                       # of the largest number of a result, in float64

# An operation of x (N, C, L), in words that both libraries have: f(library, x); smooth ones have second derivatives.
SMOOTH: dict[str, Callable[[Any, Any], Any]] = {
    "sin": lambda m, x: m.sin(x), "tanh of cumsum": lambda m, x: m.tanh(m.cumsum(x, -1)), "atan": lambda m, x: m.atan(x) * 2,
    "erf": lambda m, x: m.erf(x), "log1p": lambda m, x: m.log1p(x * x), "expm1": lambda m, x: m.expm1(-m.sigmoid(x)),
    "roll": lambda m, x: x * m.roll(x, 1, -1), "flip": lambda m, x: x + m.flip(x, (1,)) * 0.5,
    "einsum": lambda m, x: m.einsum("ncl,ndl->ncd", x, x) @ x / (x.shape[1] * x.shape[2]),
    "outer": lambda m, x: x - m.einsum("ncl,ncm->ncl", x, x) / x.shape[2],
    "norm": lambda m, x: x / (m.sum(x * x, -1, keepdim=True) + 1) ** 0.5,
    "std": lambda m, x: x / (m.std(x, -1, keepdim=True) + 1),
    "logsumexp": lambda m, x: x - m.logsumexp(x, 1, keepdim=True) * 0.3, "rsqrt": lambda m, x: x * m.rsqrt(x * x + 1),
    "tril": lambda m, x: m.tril(x, 2) + x * 0.3, "stack": lambda m, x: m.sum(m.stack([x, m.cos(x), x * x / 4], 0), 0),
    "chunk": lambda m, x: m.cat(m.chunk(x, 2, -1)[::-1], -1), "gather": lambda m, x: x + m.gather(x, -1, places(m, x)),
    "logaddexp": lambda m, x: m.logaddexp(x, m.roll(x, 2, -1)), "atan2": lambda m, x: m.atan2(x, m.cosh(x * 0.5) + 1),
    "matmul": lambda m, x: m.matmul(x, m.swapaxes(x, -1, -2)) @ x / x.shape[1] / x.shape[2],
    "prod": lambda m, x: x + m.prod(m.tanh(x) * 0.5 + 1, -1, keepdim=True),
}
KINKED: dict[str, Callable[[Any, Any], Any]] = {
    "where": lambda m, x: m.where(x > 0.1, x * x, m.sin(x)), "clamp": lambda m, x: m.clamp(x, -0.9, 1.1) + x * 0.1,
    "amax": lambda m, x: x - m.amax(x, -1, keepdim=True) * 0.2, "sort": lambda m, x: m.sort(x, -1)[0] + x * 0.5,
    "topk": lambda m, x: x + m.topk(x, 2, -1)[0][..., :1], "abs": lambda m, x: m.abs(x) - 0.5 * x,
    "maximum": lambda m, x: m.maximum(x, m.roll(x, 1, 1)), "cummax": lambda m, x: m.cummax(x, -1)[0] + x * 0.1,
    "masked_fill": lambda m, x: m.masked_fill(x, x > 1.5, 0.25), "median": lambda m, x: x - m.median(x, -1)[0][..., None] * 0.3,
}

# Layers of (N, C, L): f(rng, C, L) gives what makes one from either library's `nn`, both with the same names of parameters.
LAYERS: dict[str, Callable[[Any, int, int], Callable[[Any], Any]]] = {
    "Conv1d": lambda rng, c, n: lambda m: m.Conv1d(c, c, 3, padding=1),
    "dilated Conv1d": lambda rng, c, n: lambda m: m.Conv1d(c, c, 3, padding=2, dilation=2),
    "ConvTranspose1d": lambda rng, c, n: lambda m: m.ConvTranspose1d(c, c, 3, padding=1),
    "Linear": lambda rng, c, n: lambda m: m.Linear(n, n), "LayerNorm": lambda rng, c, n: lambda m: m.LayerNorm((c, n)),
    "GroupNorm": lambda rng, c, n: lambda m: m.GroupNorm(2, c), "InstanceNorm1d": lambda rng, c, n: lambda m: m.InstanceNorm1d(c),
    "BatchNorm1d": lambda rng, c, n: lambda m: m.BatchNorm1d(c), "RMSNorm": lambda rng, c, n: lambda m: m.RMSNorm((n,), eps=1e-5),
    "GELU": lambda rng, c, n: lambda m: m.GELU(), "SiLU": lambda rng, c, n: lambda m: m.SiLU(),
    "Mish": lambda rng, c, n: lambda m: m.Mish(), "Softplus": lambda rng, c, n: lambda m: m.Softplus(),
    "Softsign": lambda rng, c, n: lambda m: m.Softsign(), "LogSigmoid": lambda rng, c, n: lambda m: m.LogSigmoid(),
    "AvgPool1d": lambda rng, c, n: lambda m: m.AvgPool1d(3, 1, 1), "Softmax": lambda rng, c, n: lambda m: m.Softmax(-1),
}
KINKED_LAYERS: dict[str, Callable[[Any, int, int], Callable[[Any], Any]]] = {
    "MaxPool1d": lambda rng, c, n: lambda m: m.MaxPool1d(3, 1, 1), "ELU": lambda rng, c, n: lambda m: m.ELU(),
    "ReLU": lambda rng, c, n: lambda m: m.ReLU(), "Hardswish": lambda rng, c, n: lambda m: m.Hardswish(),
    "PReLU": lambda rng, c, n: lambda m: m.PReLU(), "Softshrink": lambda rng, c, n: lambda m: m.Softshrink(0.3),
}


def places(m: Any, x: Any) -> Any:
    """Each place's neighbour, in the library of x."""
    return m.arange(x.shape[-1] - 1, -1, -1) + m.zeros(*x.shape[:-1], 1, dtype=m.arange(1).dtype)


def build(torch: Any, seed: int) -> tuple[list[Any], list[Any], bool, np.ndarray, list[str]]:
    """The same steps in PyTorch and here, whether all are smooth, the input, and their names."""
    rng = np.random.default_rng(seed)
    smooth = seed % 2 == 0
    channels, length = 2 * int(rng.integers(1, 4)), 2 * int(rng.integers(2, 6))
    functions, layers = (SMOOTH, LAYERS) if smooth else (SMOOTH | KINKED, LAYERS | KINKED_LAYERS)
    theirs: list[Any] = []
    ours: list[Any] = []
    names: list[str] = []
    for number in range(int(rng.integers(3, 8))):
        pool: dict[str, Any] = functions if rng.random() < 0.6 else layers
        name = sorted(pool)[int(rng.integers(len(pool)))]
        names.append(name)
        if pool is functions:
            theirs.append(lambda x, f=pool[name]: f(torch, x))
            ours.append(lambda x, f=pool[name]: f(ops, x))
            continue
        make = pool[name](rng, channels, length)
        torch.manual_seed(seed * 10 + number)
        a, b = make(torch.nn).double(), make(nn)
        b.initialize(dtype="float64")
        own = {**dict(b.named_parameters()), **dict(b.named_buffers())}
        b.load_state_dict({key: value.numpy() for key, value in a.state_dict().items() if key in own})
        theirs.append(a)
        ours.append(b)
    return theirs, ours, smooth, rng.standard_normal((3, channels, length)), names


def through(steps: list[Any], x: Any) -> Any:
    for step in steps:
        x = step(x)
    return x


def of_net(torch: Any, seed: int) -> str:
    theirs, ours, smooth, values, names = build(torch, seed)
    rng = np.random.default_rng(seed + 1000)
    weight = rng.standard_normal(values.shape)
    t, x = torch.tensor(values, requires_grad=True), Tensor(values, requires_grad=True)
    y = through(theirs, t)
    with keep_inputs():
        z = through(ours, x)
    sources = [t, *(p for step in theirs if isinstance(step, torch.nn.Module) for p in step.parameters())]
    leaves = [x, *(p for step in ours if isinstance(step, nn.Module) for p in step.parameters())]
    wanted = torch.autograd.grad((y * torch.tensor(weight)).sum(), sources, create_graph=smooth)
    found = grad((z * weight).sum(), leaves, create_graph=smooth)
    pairs = [("output", z, y), *((f"gradient {i}", a, b) for i, (a, b) in enumerate(zip(found, wanted)))]
    if smooth and wanted[0].requires_grad:
        again = rng.standard_normal(values.shape)
        twice, = grad((found[0] * again).sum(), x, allow_unused=True)
        truth, = torch.autograd.grad((wanted[0] * torch.tensor(again)).sum(), t, allow_unused=True, materialize_grads=True)
        pairs.append(("second derivative", Tensor(np.zeros(values.shape)) if twice is None else twice, truth))
    for what, a, b in pairs:
        truth = b.detach().numpy()
        gap = float(np.abs(a.array - truth).max())
        if a.array.shape != truth.shape or not gap <= TOLERANCE * max(1.0, float(np.abs(truth).max())):
            return f"seed {seed}, {what}: off by {gap:.1e} of {np.abs(truth).max():.1e}; {', '.join(names)}"
    return ""


def test_random_nets_compute_what_pytorchs_compute() -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    failures = [line for seed in range(NETS) if (line := of_net(torch, seed))]
    assert not failures, "\n".join(failures)
