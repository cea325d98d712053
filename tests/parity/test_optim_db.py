"""Every optimizer and argument of PyTorch's optim_db: 30 steps with gradients over five decades, float64 and float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain import ops, optim
from mpitrain.autograd import Tensor
from mpitrain.nn import Module, Parameter, init

STEPS = 30
SHAPES = {"w": (6, 4), "b": (6,), "gain": (), "k": (3, 2, 3, 2), "row": (1, 5), "column": (5, 1), "wide": (3, 8)}
MATRICES = {name: shape for name, shape in SHAPES.items() if len(shape) == 2}
SCALES = 10.0 ** np.arange(-3, 2)                # of the gradients
HOW = ("foreach", "fused", "capturable", "differentiable")      # arguments that change nothing but the way of computing
NOT_OURS = {"SparseAdam": "gradients of embeddings are dense arrays here"}


class Bag(Module):
    def __init__(self, shapes: dict[str, tuple[int, ...]]):
        for name, shape in shapes.items():
            setattr(self, name, Parameter(shape, init.normal(1.0)))


def cases() -> list[tuple[str, str, dict[str, Any]]]:
    import harness
    harness.databases()
    from torch.testing._internal.common_optimizers import optim_db
    given = [(entry.optim_cls.__name__, case.desc, dict(case.kwargs)) for entry in optim_db
             for case in entry.optim_inputs_func(device="cpu")]
    return [case for case in given if case[0] not in NOT_OURS and not any(key in case[2] for key in HOW)]


def arguments(name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """PyTorch's arguments as ours: tensors are numbers; Adafactor's pair has two names."""
    plain = {key: value.item() if hasattr(value, "item") else value for key, value in kwargs.items()}
    if plain.get("adjust_lr_fn", "") is None:
        del plain["adjust_lr_fn"]
    if "eps" in plain and name == "Adafactor":
        plain["eps1"], plain["eps2"] = plain.pop("eps")
    return plain


def gradient(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    return (rng.standard_normal(shape) * rng.choice(SCALES, shape)).astype(dtype)


def trajectories(name: str, kwargs: dict[str, Any], dtype: str, wide: bool) -> tuple[list[Any], list[Any]]:
    """The parameters after 30 steps, ours and PyTorch's; `wide` computes PyTorch's in float64 from the same numbers."""
    import torch
    shapes = MATRICES if name == "Muon" else SHAPES
    model = Bag(shapes)
    model.initialize(seed=5, dtype=dtype)
    kind = torch.float64 if wide else getattr(torch, dtype)
    theirs = [torch.nn.Parameter(torch.tensor(p.numpy()).to(kind)) for p in model.parameters()]
    mine = getattr(optim, name)(model, **arguments(name, kwargs))
    other = getattr(torch.optim, name)(theirs, **kwargs)
    if name == "LBFGS":
        quadratics(model, theirs, mine, other, dtype)
        return [p.numpy() for p in model.parameters()], [p.detach().numpy() for p in theirs]
    rng = np.random.default_rng(7)
    for _ in range(STEPS):
        for p, q in zip(model.parameters(), theirs):
            p.grad = gradient(rng, p.shape, dtype)
            q.grad = torch.tensor(p.grad).to(kind)
        mine.step()
        other.step()
    return [p.numpy() for p in model.parameters()], [q.detach().numpy() for q in theirs]


def quadratics(model: Any, theirs: list[Any], mine: Any, other: Any, dtype: str) -> None:
    """Three steps of L-BFGS on a sum of quartic bowls of different widths, whose moves a line search has to find."""
    import torch
    widths = [np.logspace(0, 1, int(np.prod(p.shape))).reshape(p.shape).astype(dtype) for p in model.parameters()]

    def ours() -> Tensor:
        mine.zero_grad()
        total: Any = 0.0
        for p, width in zip(model.parameters(), widths):
            square = (p - 0.5) * (p - 0.5)
            total = ops.sum(square * width + square * square) + total
        total.backward()
        return total

    def torchs() -> Any:
        other.zero_grad()
        total: Any = 0.0
        for p, width in zip(theirs, widths):
            square = (p - 0.5) * (p - 0.5)
            total = (square * torch.tensor(width).to(p.dtype) + square * square).sum() + total
        total.backward()
        return total
    first = float(ours())
    for _ in range(3):
        assert abs(float(mine.step(ours)) - float(other.step(torchs))) <= (1e-12 if dtype == "float64" else 1e-4) * first


def error(found: list[Any], truth: list[Any]) -> float:
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-3)) for a, b in zip(found, truth))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_our_optimizers_give_pytorchs_trajectories(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    # PyTorch's Muon rounds to bfloat16 before its products, ours computes in the parameters' precision: compare the formula.
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    torch.set_default_dtype(torch.float64)        # of ASGD's rate, NAdam's product and rates given as tensors
    wrong, equal, names = [], 0, set()
    for name, described, kwargs in cases():
        try:
            mine, theirs = trajectories(name, kwargs, "float64", False)
            found = error(mine, theirs)
            if not found <= 1e-10:
                wrong.append(f"{name} {described} {kwargs}: float64 off by {found:.1e}")
            mine, theirs = trajectories(name, kwargs, "float32", False)
            truth = trajectories(name, kwargs, "float32", True)[1]
            found, own = error(mine, truth), error(theirs, truth)
            if not found <= max(1e-5, 4 * own):
                wrong.append(f"{name} {described} {kwargs}: float32 off by {found:.1e}, PyTorch's by {own:.1e}")
        except Exception as problem:
            wrong.append(f"{name} {described} {kwargs}: {problem!r}")
        equal, names = equal + 1, names | {name}
    torch.set_default_dtype(torch.float32)
    print(f"{equal} cases of {len(names)} optimizers: {equal - len({w.partition(': ')[0] for w in wrong})} equal; "
          f"without a counterpart: {NOT_OURS}")
    assert not wrong, "\n".join(wrong)
    assert len(names) == 14
