"""Fourier neural operators (Li et al. 2021): maps between functions on a grid, by products in the space of their frequencies.

Letters: `N` batch, `C` channels, `H` and `W` points of the grid, `M` frequencies that are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpitrain import nn, ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ShapeError
from mpitrain.models.registry import require_list_of_sizes, require_sizes
from mpitrain.nn import init
from mpitrain.nn.basic import Check

__all__ = ["fno"]


class SpectralConv2d(nn.Module):
    """(N, C, H, W) to (N, O, H, W): each low frequency of the channels times a complex matrix (O, C) of its own; others are 0.

    The low ones are `modes[0]` from 0 up and as many below 0 along H, and `modes[1]` from 0 up along W, where the others follow.
    The weight (2 modes[0], modes[1], C, O, 2) has real and imaginary parts in its last dim, uniform in 0 ... 1 / (C O) at first.
    """

    channel_dims = 3, 2

    def __init__(self, inputs: int, outputs: int, modes: Sequence[int]):
        self.inputs, self.outputs, self.modes = inputs, outputs, tuple(modes)
        scale = 1.0 / (inputs * outputs)
        half = init.uniform(scale / 2)
        self.weight = nn.Parameter((2 * modes[0], modes[1], inputs, outputs, 2),
                                   lambda *place: half(*place) + scale / 2)

    def forward(self, x: Any) -> Tensor:
        n, _, height, width = x.shape
        first, second = self.modes
        if 2 * first > height or second > width // 2 + 1:
            raise ShapeError(f"fno: a grid of {height} x {width} points has no {first} x {second} frequencies; set model.modes "
                             f"to [{height // 2}, {width // 2 + 1}] at most")
        spectrum = ops.rfft2(x)[:, :, :, :second]
        low = ops.concatenate([spectrum[:, :, :first], spectrum[:, :, height - first:]], 2)
        by_mode = ops.transpose(low, 2, 3, 0, 1)                                        # (2 M, M, N, C)
        mixed = ops.transpose(by_mode @ ops.view_as_complex(self.weight), 2, 3, 0, 1)   # (N, O, 2 M, M)
        between = [(0, 0), (0, 0), (0, height - 2 * first), (0, 0)]
        whole = ops.concatenate([ops.pad(mixed[:, :, :first], between), mixed[:, :, first:]], 2)
        out: Tensor = ops.irfft2(whole, s=(height, width))
        return out


class Lift(nn.Module):
    """(N, C, H, W), with the two coordinates of each point as further channels, to (N, D, H, W)."""

    def __init__(self, channels: int, width: int):
        self.conv = nn.Conv2d(channels + 2, width, 1)

    def forward(self, x: Any) -> Tensor:
        n, _, height, wide = x.shape
        xp, dtype = self.conv.weight.xp, x.dtype
        down = xp.broadcast_to(xp.linspace(0, 1, height, dtype=dtype)[:, None], (n, 1, height, wide))
        right = xp.broadcast_to(xp.linspace(0, 1, wide, dtype=dtype), (n, 1, height, wide))
        out: Tensor = self.conv(ops.concatenate([x, down, right], 1))
        return out


class FourierLayer(nn.Module):
    """gelu(spectral(x) + conv(x)), the convolution of single points; without GELU in the last layer."""

    paths = ("spectral",), ("conv",)

    def __init__(self, width: int, modes: Sequence[int], last: bool):
        self.spectral = SpectralConv2d(width, width, modes)
        self.conv = nn.Conv2d(width, width, 1)
        self.last = last

    def forward(self, x: Any) -> Tensor:
        y: Tensor = self.spectral(x) + self.conv(x)
        return y if self.last else ops.gelu(y)


class Crop(nn.Module):
    """(N, C, H + padding, W + padding) to (N, C, H, W): what was padded before the layers is left out."""

    def __init__(self, padding: int):
        self.padding = padding

    def forward(self, x: Any) -> Tensor:
        out: Tensor = x[:, :, :-self.padding, :-self.padding]
        return out


def fno(outputs: int = 1, channels: int = 1, width: int = 32, modes: Sequence[int] = (12, 12), layers: int = 4,
        hidden: int = 128, padding: int = 0) -> nn.Sequential:
    """Functions on a grid, (N, channels, H, W), to others, (N, outputs, H, W); a trained model takes finer grids, too.

    `modes` frequencies are kept along each dim, `width` channels go through `layers` Fourier layers, and `hidden` ones lie before
    the output. Frequencies take a function as periodic; for one that is not, `padding` zeros are put after the last points of
    each dim before the layers, and taken away after them. `layers` x (2 x 4 modes[0] modes[1] width^2 / 2 + width^2 + width)
    parameters and those of the maps at both ends.
    """
    require_sizes(outputs=outputs, channels=channels, width=width, layers=layers, hidden=hidden)
    require_list_of_sizes("modes", modes, 2)
    require_sizes(0, padding=padding)
    model = nn.Sequential(
        ("input", Check("fno", (None, channels, None, None), "set model.channels")),
        ("lift", Lift(channels, width)),
        *([("pad", nn.ZeroPad2d((0, padding, 0, padding)))] if padding else []),
        *((f"layer{i}", FourierLayer(width, modes, i == layers - 1)) for i in range(layers)),
        *([("crop", Crop(padding))] if padding else []),
        ("wide", nn.Conv2d(width, hidden, 1)), ("gelu", nn.GELU()), ("narrow", nn.Conv2d(hidden, outputs, 1)))
    model.plan = {"wide": "column", "narrow": "row"} | {
        f"layer{i}.{part}": "row" if i % 2 else "column" for i in range(layers // 2 * 2) for part in ("spectral", "conv")}
    return model
