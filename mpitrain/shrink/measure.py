"""What few bits do to the outputs of a model's layers, and to their times, on inputs that the layers get. Letters: `M` rows, `N`
outputs, `K` inputs of a layer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np

from mpitrain import nn
from mpitrain.autograd import Tensor, no_grad
from mpitrain.backend import Array, asnumpy
from mpitrain.kernels.product import one_thread_inside
from mpitrain.nn.lowbit import LowBitLinear
from mpitrain.shrink.quantize import arrays_of, find, of_shape

MOST_ROWS = 512               # of a layer's inputs that are kept
ROUNDS, SECONDS = 5, 1e-3     # of a measurement: floats and few bits in turn, so long each


@dataclass(frozen=True)
class Effect:
    """Of a layer in few bits: the root mean square of its outputs' error over that of the outputs, without bias; and the time of
    floats over its own, where it was taken. None where the layer had no inputs."""

    error: float | None = None
    gain: float | None = None


def inputs_of(model: nn.Module, layers: Sequence[str], x: Any) -> dict[str, Array]:
    """What these layers (paths) get first while the model runs on `x`: (M, K), or M indices of a table."""
    found: dict[str, Array] = {}
    modules = dict(model.named_modules())

    def keeping(path: str) -> Callable[[nn.Module, Any], None]:
        def keep(module: nn.Module, inputs: Any) -> None:
            if path not in found:
                given = asnumpy(inputs[0].array if isinstance(inputs[0], Tensor) else np.asarray(inputs[0]))
                rows = given.reshape(-1) if isinstance(module, nn.Embedding) else given.reshape(-1, given.shape[-1])
                found[path] = np.array(rows[:MOST_ROWS])
        return keep
    leave = [modules[path].before_forward(keeping(path)) for path in layers]
    try:
        with no_grad(), np.errstate(all="ignore"):
            model(x)
    finally:
        for done in leave:
            done()
    return found


def effects(model: nn.Module, formats: Mapping[str, str], inputs: Mapping[str, Array], folder: Path | None = None,
            input_scales: Mapping[str, float] | None = None, rows: int = 0) -> dict[str, Effect]:
    """What each format of `formats` (by path) would do to its layer of a model of floats, which stays as it is. With `rows`,
    linear layers are timed on so many rows at a time, about 10 ms each. Errors are those of `quantize`."""
    layers, scales, found = dict(model.named_modules()), input_scales or {}, {}
    for path, name in formats.items():
        layer, format, x = layers[path], find(name, folder), inputs.get(path)
        if x is None or not len(x):
            found[path] = Effect()
            continue
        weight = np.asarray(vars(layer)["weight"].array, np.float32)
        arrays = arrays_of(path, name, format, weight, scales)
        of_shape(path, name, "dequantize", format.dequantize(arrays, weight.shape[1]), weight.shape)
        if isinstance(layer, nn.Embedding):
            own = {key: array[x] for key, array in arrays.items()}
            found[path] = Effect(_share(format.dequantize(own, weight.shape[1]), weight[x]))
            continue
        x = x.astype(np.float32, copy=False)
        floats = x @ weight.T
        error = _share(of_shape(path, name, "product", format.product(x, arrays, None), floats.shape), floats)
        few = LowBitLinear.of(cast(nn.Linear, layer), format)
        for key, array in arrays.items():
            vars(few)[key].array = array
        found[path] = Effect(error, gain(layer, few, np.resize(x, (rows, x.shape[1]))) if rows else None)
    return found


def _share(few: Array, floats: Array) -> float:
    whole = float(np.sqrt(np.mean(np.square(floats, dtype=np.float64))))
    return float(np.sqrt(np.mean((few.astype(np.float64) - floats) ** 2))) / (whole or 1.0)


def gain(layer: nn.Module, few: nn.Module, x: Array) -> float:
    """The time of `layer` over that of `few` on one thread, the median of pairs."""
    ratios, given = [], Tensor(x)
    with no_grad(), one_thread_inside():
        counts = [_count(one, given) for one in (layer, few)]
        for _ in range(ROUNDS):
            floats, other = (_seconds(one, given, count) / count for one, count in zip((layer, few), counts))
            ratios.append(floats / other)
    return median(ratios)


def _count(layer: nn.Module, x: Tensor) -> int:
    """How often it runs in SECONDS."""
    layer(x)
    return max(1, int(SECONDS / _seconds(layer, x, 1)))


def _seconds(layer: nn.Module, x: Tensor, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        layer(x)
    return time.perf_counter() - began
