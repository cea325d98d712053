"""One layer for another, wherever a model uses it."""

from __future__ import annotations

from mpitrain import nn


def exchange(model: nn.Module, layer: nn.Module, by: nn.Module) -> None:
    """Uses `by` wherever modules of the model use `layer`."""
    for parent in list(model.modules()):
        parent.replace(layer, by)
