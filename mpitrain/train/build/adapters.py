"""What [lora] means for a run: adapters in its model, all else frozen, and a first state without them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mpitrain import nn
from mpitrain.config import Config
from mpitrain.optim.groups import Group


def attach_to(model: nn.Module, config: Config) -> None:
    from mpitrain.shrink.lora import attach
    attach(model, config.lora.rank, config.lora.alpha, config.lora.layers)


def groups(config: Config) -> list[Group]:
    """The group of the adapters, which are trained, and that of all others, which are not."""
    from mpitrain.shrink.lora import PARTS
    return [Group(tuple(f"{pattern}.{part}" for pattern in config.lora.layers for part in PARTS)), Group(("*",), start=math.inf)]


def is_new(config: Config) -> Callable[[str], bool]:
    """Whether a parameter, by its name, need not be in a checkpoint to start from."""
    from mpitrain.shrink.lora import is_part
    return partial(is_part, config.lora.layers)


def without(config: Config) -> Mapping[str, Mapping[str, Any]]:
    """The sections of a run whose model has its adapters added to the weights."""
    return {"lora": vars(type(config.lora)()), "model": {"init_from": ""}}
