"""Shapes of parameters and buffers of a model that has lost channels, where its arguments have no sizes: `model.shapes`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitrain import nn
from mpitrain.errors import ConfigError, nearest


def give_shapes(model: nn.Module, shapes: Mapping[str, Any]) -> None:
    """Gives leaves of the model, by name, these shapes before it has memory. ConfigError, by name, where it cannot be."""
    leaves = dict((*model.named_parameters(), *model.named_buffers()))
    for name, shape in shapes.items():
        if name not in leaves:
            raise ConfigError(f'model.shapes: no parameter or buffer is called "{name}"{nearest(name, leaves)}')
        whole = leaves[name].global_shape
        sizes = isinstance(shape, (list, tuple)) and len(shape) == len(whole) and all(type(n) is int for n in shape)
        if not sizes or not all(1 <= n <= most for n, most in zip(shape, whole)):
            raise ConfigError(f'model.shapes: the shape of "{name}" is a list of {len(whole)} integers, each of at least 1 and '
                              f"at most that of {list(whole)}, found {shape!r}")
    for name, shape in shapes.items():
        leaves[name].resize(shape)
    for module in model.modules():
        module.resized()
