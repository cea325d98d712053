"""PyTorch's recurrent modules as our layers, where arguments have other names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpitrain import nn


def sized(kind: str) -> Callable[..., nn.Module]:
    def make(input_size: int, hidden_size: int, *args: Any, **kwargs: Any) -> nn.Module:
        module: nn.Module = getattr(nn, kind)(input_size, hidden_size, *args, **kwargs)
        return module
    return make


MAP: dict[str, Any] = {f"nn.{kind}": sized(kind) for kind in ("LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell")}
