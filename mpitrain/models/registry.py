"""The table of models: each is a function of the config's [model] keys that gives a Module."""

from __future__ import annotations

from collections.abc import Callable

from mpitrain.nn import Module
from mpitrain.registry import Registry

MODELS: Registry[Callable[..., Module]] = Registry("model")
