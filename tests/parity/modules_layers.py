"""PyTorch's modules without recurrence and losses as our layers, where arguments have other names."""

from __future__ import annotations

from typing import Any

from harness import Absent

from mpitrain import nn

SAME = """
    BatchNorm1d BatchNorm2d BatchNorm3d Bilinear CELU ELU GELU GLU Hardshrink Hardswish Hardtanh InstanceNorm1d InstanceNorm2d
    InstanceNorm3d LeakyReLU Linear LocalResponseNorm LogSigmoid LogSoftmax Mish PReLU ReLU ReLU6 SELU SiLU Sigmoid Softmax
    Softmax2d Softmin Softplus Softshrink Softsign Tanh Tanhshrink Threshold"""
CONVOLUTIONS = "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d"


def group_norm(groups: int, channels: int, eps: float = 1e-5, affine: bool = True, bias: bool = True) -> nn.Module:
    return nn.GroupNorm(groups, channels, eps, affine, bias=bias)


def layer_norm(shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, bias: bool = True) -> nn.Module:
    return nn.LayerNorm(shape, eps, bias, elementwise_affine=elementwise_affine)


def rms_norm(shape: Any, eps: float | None = None, elementwise_affine: bool = True) -> nn.Module:
    return nn.RMSNorm(shape, eps, elementwise_affine=elementwise_affine)


def embedding(num_embeddings: int, embedding_dim: int) -> nn.Module:
    return nn.Embedding(num_embeddings, embedding_dim)


def pool(kind: str) -> Any:
    def make(*args: Any, kernel_size: Any = None, **kwargs: Any) -> nn.Module:
        if not hasattr(nn, kind):
            raise Absent(kind)
        return getattr(nn, kind)(*(args if kernel_size is None else (kernel_size, *args)), **kwargs)
    return make


MAP: dict[str, Any] = {
    **{f"nn.{name}": getattr(nn, name) for name in (SAME + " " + CONVOLUTIONS).split()},
    **{f"nn.{name}": pool(name) for name in ("AdaptiveAvgPool2d", "AdaptiveMaxPool2d", "AvgPool2d", "MaxPool2d")},
    "nn.GroupNorm": group_norm, "nn.LayerNorm": layer_norm, "nn.RMSNorm": rms_norm, "nn.Embedding": embedding,
}
