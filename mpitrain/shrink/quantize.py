"""A model's layers in few bits: which ones, their replacement, and what it costs in error.

    chosen = choose(model, "int8")          # the default rule; says why a layer stays in floats
    quantize(model, chosen.formats)         # in place; the model has its memory anew
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from mpitrain import nn
from mpitrain.arguments import call_with
from mpitrain.errors import ConfigError, NumericsError, ShapeError, nearest
from mpitrain.nn.lowbit import Format, LowBitEmbedding, LowBitLinear, RoundedLinear
from mpitrain.nn.sparse import SparseLinear
from mpitrain.shrink.exchange import exchange
from mpitrain.shrink.formats import FORMATS

METHODS = ("leaves", "quantize", "dequantize")                # that a format has to define
SMALL = "and few bits pay from"


@dataclass(frozen=True)
class Chosen:
    """`formats` by path of the layer; `left`: (path, why it stays in floats) of each other layer with a weight."""

    formats: dict[str, str]
    left: list[tuple[str, str]]


def choose(model: nn.Module, name: str, skip: Sequence[str] = (), folder: Path | None = None, least: int | None = None) -> Chosen:
    """The layers that get the format `name` by the default rule, a function of shapes alone. `skip`: patterns with * of paths.
    Layers with fewer weights than `least` stay in floats; None: than the format's own bound.

    ConfigError where a pattern matches no layer, and where nothing is left to quantize.
    """
    format = find(name, folder)
    layers, bound = dict(weighted(model)), format.least if least is None else least
    for pattern in skip:
        if not any(fnmatchcase(path, pattern) for path in layers):
            raise ConfigError(f'skip: no layer with a weight matches "{pattern}"{nearest(pattern, layers)}')
    formats, left = {}, []
    for path, layer in layers.items():
        if why := "it is to be skipped" if any(fnmatchcase(path, p) for p in skip) else stays(layer, format, bound):
            left.append((path, why))
        else:
            formats[path] = name
    if not formats:
        raise ConfigError(f'nothing to quantize to "{name}": ' + ("; ".join(f"{path}: {why}" for path, why in left[:3])
                          + cure(layers, left) if left else "the model has no layer with a weight"))
    return Chosen(formats, left)


def gaining(chosen: Chosen, gains: Mapping[str, float | None], rows: int) -> Chosen:
    """`chosen` without the layers that are slower in few bits, as `measure.effects` found on so many rows at a time. ConfigError
    where none is left."""
    slower = {path: f"{name} runs at {gains[path]:.2f} times the speed of floats here, {counted(rows)}"
              for path, name in chosen.formats.items() if (gains.get(path) or 1) < 1}
    if len(slower) == len(chosen.formats):
        raise ConfigError("nothing to quantize: " + "; ".join(f"{path}: {why}" for path, why in list(slower.items())[:3])
                          + "; take another format, another --measure, or leave it out")
    return Chosen({path: name for path, name in chosen.formats.items() if path not in slower}, chosen.left + list(slower.items()))


def counted(rows: int) -> str:
    return f"on {rows} rows at a time" if rows > 1 else "row by row"


def cure(layers: Mapping[str, nn.Module], left: Sequence[tuple[str, str]]) -> str:
    """What to do where all these layers stay in floats; "" where nothing helps."""
    if any(isinstance(layer, LowBitLinear | LowBitEmbedding) for layer in layers.values()):
        return "; quantize the run of floats that this one was made of"
    if any("down" in vars(layer) for layer in layers.values()):
        return "; layers in factors (model.ranks) have no form in few bits: quantize the run that was factored"
    return "; --least 0 (in a run, shrink.least = 0) takes small layers too" if any(SMALL in why for _, why in left) else ""


def weighted(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers with a matrix or a kernel of weights."""
    for path, module in model.named_modules():
        weight = vars(module).get("weight")
        if isinstance(module, LowBitLinear | LowBitEmbedding) or isinstance(weight, nn.Parameter) and len(weight.shape) > 1:
            yield path, module


def stays(layer: nn.Module, format: Format, least: int) -> str:
    """Why the default rule leaves a layer in floats; "" where it gets the format."""
    if isinstance(layer, LowBitLinear | LowBitEmbedding):
        return "it is in few bits already"
    if isinstance(layer, nn.Conv2d):
        return "convolutions are faster in floats here"
    if not is_ours(layer):
        return f"a {type(layer).__name__} has no form in few bits"
    if isinstance(layer, nn.Embedding) and not format.for_tables:
        return "the format is for products"
    outputs, inputs = vars(layer)["weight"].global_shape
    return f"{outputs * inputs:,} weights, {SMALL} {least:,} on" if outputs * inputs < least else \
        format.unfit(outputs, inputs)


def is_ours(layer: nn.Module) -> bool:
    """Whether a layer computes what `Linear` or `Embedding` does, and so can be replaced."""
    if isinstance(layer, RoundedLinear | SparseLinear):
        return True
    if isinstance(layer, nn.Embedding):
        return type(layer).forward is nn.Embedding.forward and layer.max_norm is None
    return isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward


def find(name: Any, folder: Path | None = None) -> Format:
    """A format by name. ConfigError where there is none, or it is no `Format`."""
    if not isinstance(name, str):
        raise ConfigError(f"a format is a name, such as \"int8\", found {name!r}")
    kind: Any = FORMATS.resolve(name, folder)
    made = call_with(kind, {}, f'format "{name}", called without arguments,', "format") if callable(kind) else kind
    if not isinstance(made, Format):
        raise ConfigError(f'format "{name}" must give an mpitrain.nn.Format, found a {type(made).__name__}')
    if missing := [method for method in METHODS if getattr(type(made), method) is getattr(Format, method)]:
        raise ConfigError(f'format "{name}": {type(made).__name__} does not define {" and ".join(missing)}')
    return made


def in_formats(model: nn.Module, formats: Mapping[str, Any], folder: Path | None = None) -> None:
    """Replaces layers of a described model, by path, by ones in the formats named; before memory is given."""
    modules = dict(model.named_modules())
    for path, name in formats.items():
        format, layer = find(name, folder), modules.get(path)
        if layer is None:
            raise ConfigError(f'model.formats: no layer is called "{path}"{nearest(path, modules)}')
        if isinstance(layer, LowBitLinear | LowBitEmbedding):
            raise ConfigError(f'model.formats: "{path}" is in few bits already; take a run of floats')
        if not is_ours(layer):
            raise ConfigError(f'model.formats: "{path}" is a {type(layer).__name__}, which has no form in few bits; leave it out')
        made: nn.Module = LowBitEmbedding.of(layer, format) if isinstance(layer, nn.Embedding) else \
            LowBitLinear.of(cast(nn.Linear, layer), format)
        exchange(model, layer, made)


def rounded_anew(model: nn.Module, name: str, skip: Sequence[str], folder: Path | None, least: int) -> None:
    """Has the linear layers that `choose` would choose round their weights at each forward; before memory is given."""
    format, layers = find(name, folder), dict(model.named_modules())
    if format.calibrated:
        weights = name.partition("-")[0]
        raise ConfigError(f'shrink.quantize = "{name}": the range of inputs changes while a run trains; set it to "{weights}", '
                          f"and quantize the trained run to {name}")
    chosen = choose(model, name, skip, folder, least)
    found = [path for path in chosen.formats if isinstance(layers[path], nn.Linear)]
    if not found:
        raise ConfigError(f'shrink.quantize = "{name}": the model has no linear layer for it')
    for path in found:
        layer = cast(nn.Linear, layers[path])
        exchange(model, layer, RoundedLinear.of(layer, format))


def quantize(model: nn.Module, formats: Mapping[str, str], folder: Path | None = None,
             input_scales: Mapping[str, float] | None = None) -> list[Row]:
    """Replaces these layers of a model that has its values, in place, and gives it memory anew; what became of each layer.

    `input_scales`: of the layers by path whose formats are calibrated.

    ConfigError as of `in_formats`; NumericsError, which names the layer, where a weight is not finite.
    """
    assert model.storage is not None
    layers, precision, scales = dict(model.named_modules()), model.storage.precision, input_scales or {}
    weights = {path: np.array(vars(layers[path])["weight"].array, np.float32) for path in formats if path in layers
               and isinstance(vars(layers[path]).get("weight"), nn.Parameter)}
    values = {f"{path}.{name}": np.array(leaf.array) for path, layer in layers.items()       # under each name of a tied weight
              for name, leaf in vars(layer).items() if isinstance(leaf, nn.Parameter)}
    values |= {name: np.array(array) for name, array in model.state_dict().items()}
    in_formats(model, formats, folder)
    rows = []
    for path, layer in model.named_modules():
        if path in weights and isinstance(layer, LowBitLinear | LowBitEmbedding):
            arrays = arrays_of(path, formats[path], layer.format, weights[path], scales)
            values |= {f"{path}.{name}": array for name, array in arrays.items()}
            kept = of_shape(path, formats[path], "dequantize", layer.format.dequantize(arrays, layer.inputs), weights[path].shape)
            rows.append(Row.of(path, formats[path], weights[path], kept,
                               sum(array.nbytes for array in arrays.values())))
    model.initialize(0, precision)
    model.load_state_dict({name: values[name] for name in model.state_dict()})
    return rows


def arrays_of(path: str, name: str, format: Format, weight: Any, input_scales: Mapping[str, float]) -> dict[str, Any]:
    """All arrays of a layer in the format called `name`.

    NumericsError and ShapeError, which name the layer, of `Format.quantize`; ConfigError where a calibrated format has no scale,
    or a user's own gives other arrays than it says.
    """
    try:
        arrays = format.quantize(weight)
    except (ShapeError, NumericsError) as error:
        raise type(error)(f'layer "{path}": {error.message}') from None
    if format.calibrated:
        if path not in input_scales:
            raise ConfigError(f'layer "{path}": the format "{name}" needs the range of its inputs; calibrate it')
        arrays["input_scale"] = np.array(input_scales[path], np.float32)
    described = format.leaves(*weight.shape)
    found = {key: (array.shape, array.dtype.name) for key, array in arrays.items()}
    if found != {key: (tuple(shape), dtype) for key, (shape, dtype) in described.items()}:
        raise ConfigError(f'layer "{path}": the format "{name}" says its arrays are {described}, and quantize gave {found}')
    return arrays


def of_shape(path: str, name: str, method: str, found: Any, shape: tuple[int, ...]) -> Any:
    """`found`, what a method of a format gave. ConfigError where that has another shape."""
    if getattr(found, "shape", None) != shape:
        raise ConfigError(f'layer "{path}": {method} of the format "{name}" must give an array {shape}, found '
                          f"{getattr(found, 'shape', type(found).__name__)}")
    return found


class Row(NamedTuple):
    """A layer in few bits: bytes of its weight then and now, and the root mean square of the weight's error over that of the
    weight; of its outputs' and the gain see `measure.Effect`."""

    path: str
    format: str
    bytes_before: int
    bytes_after: int
    error: float
    output_error: float | None = None
    gain: float | None = None

    @classmethod
    def of(cls, path: str, format: str, weight: Any, kept: Any, nbytes: int) -> Row:
        whole = float(np.sqrt(np.mean(weight.astype(np.float64) ** 2))) or 1.0
        apart = float(np.sqrt(np.mean((weight.astype(np.float64) - kept) ** 2)))
        return cls(path, format, weight.nbytes, nbytes, apart / whole)
