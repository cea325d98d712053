"""Models by name: sequences of named blocks that pass tensors; no rank, no stage."""

from mpitrain.models.convolutional import lenet, resnet18, resnet20, resnet32, resnet56
from mpitrain.models.mlp import mlp
from mpitrain.models.registry import MODELS
from mpitrain.models.transformer import gpt

__all__ = ["MODELS", "gpt", "lenet", "mlp", "resnet18", "resnet20", "resnet32", "resnet56"]
