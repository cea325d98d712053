"""Models by name: sequences of named blocks that pass tensors; no rank, no stage. All but the smallest are loaded late."""

from typing import Any

from mpitrain.models.files import FILES
from mpitrain.models.mlp import mlp
from mpitrain.models.registry import MODELS
from mpitrain.models.transformer import gpt

_PLACES = {name: f"mpitrain.models.{file}:{name}" for file, names in FILES.items() for name in names.split()}

__all__ = ["MODELS", "gpt", "mlp", *_PLACES]

for _name, _place in _PLACES.items():
    MODELS.register_later(_name, _place)


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return MODELS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
