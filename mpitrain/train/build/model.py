"""The model of a configuration: what [model] names, with what other sections do to its layers."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from typing import Any

from mpitrain import models, nn
from mpitrain.arguments import call_with, parameters_of
from mpitrain.config import Config
from mpitrain.errors import ArgumentError, ConfigError, ShapeError, nearest
from mpitrain.kernels.kernel import kind


def make_model(config: Config) -> nn.Module:
    """The model that [model] describes; no memory is allocated."""
    found: Any = models.MODELS.resolve(config.model.name, config.folder)
    try:
        model = call_with(found, config.model.arguments, f'model "{config.model.name}"', "model")
    except ArgumentError:
        raise                                                 # a line of code is wrong, whatever the sizes
    except ShapeError as error:
        raise sizes_that_do_not_fit(config, found, error.message) from None
    if not isinstance(model, nn.Module):
        raise ConfigError(f'model "{config.model.name}" must return an mpitrain.nn.Module, found a {type(model).__name__}')
    if config.model.shapes:
        from mpitrain.shrink.shapes import give_shapes
        give_shapes(model, config.model.shapes)
    if config.model.ranks:
        from mpitrain.shrink import factor
        factor.attach(model, config.model.ranks)
    if config.model.formats:
        from mpitrain.shrink.quantize import in_formats
        in_formats(model, config.model.formats, config.folder)
    if config.shrink.quantize:
        from mpitrain.shrink.quantize import rounded_anew
        rounded_anew(model, config.shrink.quantize, config.shrink.skip, config.folder, config.shrink.least)
    if config.lora.rank:
        from mpitrain.train.build.adapters import attach_to
        attach_to(model, config)
    if config.train.recompute:
        keep_inputs_only(model, config.train.recompute)
    return model


def sizes_that_do_not_fit(config: Config, make: Any, message: str) -> ConfigError:
    """What layers say of each other while a model is built, as a mistake of [model]: no data has been seen yet."""
    keys = tuple(f"model.{key}" for key in parameters_of(make) if re.search(rf"\b{key}\b", message))
    said = f'model "{config.model.name}": {message}'
    if not any(key in message for key in keys):
        said += f"{',' if ';' in message else ';'} change {' or '.join(keys) or 'a size in [model]'}"
    return config.wrong(said, keys)


def leaves_out_zeros(config: Config) -> bool:
    """Whether a saved model of the run is to compute with what pruning has left: in C, where that was measured to be faster."""
    return bool(config.shrink.prune) and config.shrink.products == "sparse" and kind() == "c"


def keep_inputs_only(model: nn.Module, which: bool | int | Sequence[str]) -> None:
    """Recompute blocks in backward instead of keeping their activations: all, the first ones, or those that patterns name."""
    if not isinstance(model, nn.Sequential):
        raise ConfigError("train.recompute needs a model that is a Sequential of blocks")
    if isinstance(which, int):
        model.recompute = which
        return
    for pattern in which:
        if not fnmatch.filter(model.blocks, pattern):
            raise ConfigError(f'train.recompute names "{pattern}", and no block is called so{nearest(pattern, model.blocks)}')
    model.recompute = frozenset(name for pattern in which for name in fnmatch.filter(model.blocks, pattern))
