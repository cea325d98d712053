"""Models by name: sequences of named blocks that pass tensors; no rank, no stage. Nets of convolutions are loaded late."""

from typing import Any

from mpitrain.models.mlp import mlp
from mpitrain.models.registry import MODELS
from mpitrain.models.transformer import gpt

_LATER = ("lenet", "resnet18", "resnet20", "resnet32", "resnet34", "resnet50", "resnet56")

__all__ = ["MODELS", "gpt", "lenet", "mlp", "resnet18", "resnet20", "resnet32", "resnet34", "resnet50", "resnet56"]  # noqa: F822

for _name in _LATER:
    MODELS.register_later(_name, f"mpitrain.models.convolutional:{_name}")


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return MODELS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
