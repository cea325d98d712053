"""Formats of weights in few bits, by name. Letters: `M` rows, `N` outputs, `K` inputs, `G` groups of inputs.

    int8    a scale for each output, whole numbers -127..127                         8 bits and 32/K
    int4    groups of 32 inputs with a float16 scale each, whole numbers -8..7       4.5 bits
    int8-dynamic, int4-dynamic      the same weights; each row of the layer's input becomes int8, with a scale of its own
    int8-static, int4-static        as those, with one scale for all inputs of the layer, found on calibration rows

A weight is the whole number times the scale: symmetric, so zero stays zero. The group of int4 and the order of its nibbles are
those of ggml's Q4_0: byte i of a group has weight i in its low half and weight i + 16 in its high one, 8 added to each.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.backend import Array
from mpitrain.errors import NumericsError
from mpitrain.kernels import lowbit
from mpitrain.kernels.lowbit import GROUP, unpacked
from mpitrain.nn.lowbit import Arrays, Format
from mpitrain.registry import Registry

FORMATS: Registry[type[Format]] = Registry("format")
"""Each is a class of `nn.lowbit.Format` that is called without arguments."""

STEPS = np.linspace(0.8, 1.1, 13)          # scales that are tried for a group, as shares of the one that reaches its extreme


def refuse_nonfinite(weight: Array) -> None:
    if not np.isfinite(weight).all():
        raise NumericsError("the weight has NaN or infinite values, which have no whole numbers; take another checkpoint "
                            "(--step)")


@FORMATS.register("int8")
class Int8(Format):
    """A scale for each output: its largest weight / 127."""

    def leaves(self, outputs: int, inputs: int) -> dict[str, tuple[tuple[int, ...], str]]:
        return {"weight": ((outputs, inputs), "int8"), "scale": ((outputs,), "float32")}

    def quantize(self, weight: Array) -> dict[str, Array]:
        refuse_nonfinite(weight)
        scale = (np.abs(weight).max(axis=1, initial=0).astype(np.float64) / 127).astype(np.float32)
        return {"weight": nearest(weight, scale[:, None], 127, 127).astype(np.int8), "scale": scale}

    def dequantize(self, arrays: Arrays, inputs: int) -> Array:
        return arrays["weight"].astype(np.float32) * arrays["scale"][:, None]

    def product(self, x: Array, arrays: Arrays, bias: Array | None) -> Array:
        return lowbit.int8(x, arrays["weight"], arrays["scale"], bias)


@FORMATS.register("int4")
class Int4(Format):
    """Groups of 32 inputs; of 13 scales for each group the one with the least sum of squared errors. K is padded with zeros."""

    def leaves(self, outputs: int, inputs: int) -> dict[str, tuple[tuple[int, ...], str]]:
        groups = -(-inputs // GROUP)
        return {"weight": ((outputs, groups, GROUP // 2), "uint8"), "scale": ((outputs, groups), "float16")}

    def quantize(self, weight: Array) -> dict[str, Array]:
        refuse_nonfinite(weight)
        outputs, inputs = weight.shape
        groups = -(-inputs // GROUP)
        w = np.zeros((outputs, groups, GROUP), np.float32)
        w.reshape(outputs, groups * GROUP)[:, :inputs] = weight
        if np.abs(w).max(initial=0) > 8 * float(np.finfo(np.float16).max):
            raise NumericsError("the weight has values above 524,032, whose scale is beyond float16; keep the layer out (--skip)")
        at = np.abs(w).argmax(axis=2)
        extreme = np.take_along_axis(w, at[..., None], 2)[..., 0].astype(np.float64)
        best, scale = np.full((outputs, groups), np.inf), np.zeros((outputs, groups), np.float16)
        whole = np.zeros(w.shape, np.int8)
        for step in STEPS:                        # -8 lies on the side of the extreme
            tried = np.clip(extreme * (step / -8), -65504, 65504).astype(np.float16)
            found = nearest(w, tried[..., None], 8, 7)
            error = ((found * tried[..., None].astype(np.float64) - w) ** 2).sum(axis=2)
            better = error < best
            best[better], scale[better] = error[better], tried[better]
            whole[better] = found[better]
        return {"weight": pack(whole), "scale": scale}

    def dequantize(self, arrays: Arrays, inputs: int) -> Array:
        w = unpacked(arrays["weight"]).astype(np.float32) * arrays["scale"].astype(np.float32)[..., None]
        return w.reshape(len(w), w.shape[1] * GROUP)[:, :inputs]

    def product(self, x: Array, arrays: Arrays, bias: Array | None) -> Array:
        return lowbit.int4(x, arrays["weight"], arrays["scale"], bias)


def nearest(weight: Array, scale: Array, below: int, above: int) -> Array:
    """The whole numbers in [-below, above] nearest to weight / scale, ties to even, as float64; 0 where the scale is."""
    wide = scale.astype(np.float64)
    return np.clip(np.rint(np.divide(weight, wide, out=np.zeros(weight.shape), where=wide != 0)), -below, above)


def pack(whole: Array) -> Array:
    """uint8 (..., 16) of whole numbers -8..7 (..., 32)."""
    nibbles = (whole + 8).astype(np.uint8)
    return nibbles[..., :GROUP // 2] | nibbles[..., GROUP // 2:] << 4


MOST = 1 << 16                   # inputs of a layer whose exact sums of products an int32 holds in any order


class Whole(Format):
    """Formats whose products are of whole numbers: rows of x become int8, too."""

    least = 1 << 17                               # at 256 x 256 rounding the inputs takes what the products gain (Zen 5, 2026-11)
    unit = lowbit.VECTOR                          # numbers of a row of x are padded to whole ones
    integers: Any = lowbit.int8_integers

    def unfit(self, outputs: int, inputs: int) -> str:
        return f"sums of whole numbers have {MOST:,} inputs at most" if inputs > MOST else ""

    def product(self, x: Array, arrays: Arrays, bias: Array | None) -> Array:
        rows = lowbit.rows(x, self.unit, self.scale_of_rows(arrays))
        bias = None if bias is None else bias.astype(np.float32, copy=False)
        y: Array = type(self).integers(*rows, arrays["weight"], arrays["scale"], bias)
        return y.astype(x.dtype, copy=False)

    def scale_of_rows(self, arrays: Arrays) -> float:
        """The scale of all rows; -1: each has its own."""
        return -1.0


@FORMATS.register("int8-dynamic")
class Int8Dynamic(Whole, Int8):
    """int8 weights and, row by row, int8 inputs: the largest size of a row / 127."""


class Whole4(Whole):
    """Such products by int4 weights."""

    unit = lowbit.SPAN
    integers = lowbit.int4_integers


@FORMATS.register("int4-dynamic")
class Int4Dynamic(Whole4, Int4):
    """int4 weights and, row by row, int8 inputs."""


class Static(Whole):
    """Formats whose inputs have one scale: see `calibrate`. Inputs beyond its range become its ends."""

    calibrated, for_tables = True, False

    def leaves(self, outputs: int, inputs: int) -> dict[str, tuple[tuple[int, ...], str]]:
        return {**super().leaves(outputs, inputs), "input_scale": ((), "float32")}

    def scale_of_rows(self, arrays: Arrays) -> float:
        return float(arrays["input_scale"])


@FORMATS.register("int8-static")
class Int8Static(Static, Int8):
    """int8 weights, and int8 inputs with one scale."""


@FORMATS.register("int4-static")
class Int4Static(Static, Whole4, Int4):
    """int4 weights, and int8 inputs with one scale."""
