"""PyTorch's modules without recurrence and losses as our layers: our constructors want some arguments by name."""

from __future__ import annotations

from typing import Any

from mpitrain import nn


def elu(alpha: float = 1.0, inplace: bool = False) -> nn.Module:
    return nn.ELU(alpha)


MAP: dict[str, Any] = {
    **{f"nn.{name}": getattr(nn, name) for name in (
        "CELU", "ELU", "GELU", "GLU", "Hardshrink", "Hardswish", "Hardtanh", "LeakyReLU", "Linear", "LogSigmoid", "LogSoftmax",
        "Mish", "PReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softmax", "Softmax2d", "Softmin", "Softplus",
        "Softshrink", "Softsign", "Tanh", "Tanhshrink", "Threshold")},
}
del MAP["nn.ELU"]
MAP["nn.ELU"] = elu
