"""U-Nets: images to images, through coarser grids and back, with a way around each (Ronneberger, Fischer and Brox 2015).

    level 1   conv -------------------------------> join, conv -> head          x has C_1 channels on H x W
    level 2      pool, conv -----------> join, conv, up                         x has C_2 channels on H/2 x W/2
    level 3         pool, conv, up ......                                       ...

Blocks pass one tensor on, since a pipeline may cut between any two: what is on its way around travels beside x as further
channels. (N, C, H, W) has the numbers of (N, 4 C, H/2, W/2), so that is a change of shape, and a copy for each block.
"""

from __future__ import annotations

from typing import Any

from mpitrain import nn, ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.models.registry import require_sizes
from mpitrain.nn import init
from mpitrain.nn.norm import NORMS

__all__ = ["unet"]

HE = init.kaiming_normal(fan="out")
UPS = ("transposed", "bilinear")
INSIDE = ("conv1", "norm1", "conv2"),
PLAN = {"*.conv1": "column", "*.norm1": "channels", "*.conv2": "row"}


class Images(nn.Module):
    """Passes images (N, `channels`, H, W) on, whose sides can be halved so often that there are `levels`."""

    def __init__(self, channels: int, levels: int):
        self.channels, self.multiple = channels, 2 ** (levels - 1)

    def forward(self, x: Any) -> Any:
        shape = tuple(x.shape)
        if len(shape) != 4 or shape[1] != self.channels or shape[2] % self.multiple or shape[3] % self.multiple:
            raise ShapeError(f"unet expects input of shape (any, {self.channels}, multiple of {self.multiple}, multiple of "
                             f"{self.multiple}), got {shape}; set model.channels, or fewer model.levels")
        return x


class Level(nn.Module):
    """Two convolutions, each with a norm and ReLU; what both ways through a level have in common.

    `carried` are the channels beside x of what is on its way around, counted at the size of images on this level.
    """

    def __init__(self, inputs: int, outputs: int, norm: str, carried: int):
        make = NORMS.resolve(norm)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False, weight_init=HE)
        self.norm1 = make(outputs, activation="relu")
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False, weight_init=HE)
        self.norm2 = make(outputs, activation="relu")
        self.carried = carried

    def through(self, x: Any) -> Any:
        return self.norm2(self.conv2(self.norm1(self.conv1(x))))


class First(Level):
    """The first level: images (N, inputs, H, W) to (N, outputs, H, W)."""

    chains = INSIDE

    def forward(self, x: Any) -> Any:
        return self.through(x)


class Down(Level):
    """One level down: x (N, inputs, H, W), with `carried` / 4 channels beside it, is pooled; x itself is then carried, too."""

    chains = INSIDE

    def __init__(self, inputs: int, outputs: int, norm: str, carried: int):
        super().__init__(inputs, outputs, norm, carried)
        self.inputs = inputs
        self.pool = nn.MaxPool2d(2)

    def forward(self, state: Any) -> Tensor:
        n, channels, height, width = state.shape
        y = self.through(self.pool(state[:, :self.inputs]))
        return ops.concatenate([y, ops.reshape(state, n, 4 * channels, height // 2, width // 2)], 1)


class Up(Level):
    """One level up: x is enlarged, and joined with what the way down had there, which lies first in what is carried."""

    chains = INSIDE

    def __init__(self, inputs: int, outputs: int, norm: str, carried: int, up: str):
        super().__init__(2 * outputs, outputs, norm, carried)
        self.inputs, self.outputs = inputs, outputs
        if up == "transposed":
            self.up: nn.Module = nn.ConvTranspose2d(inputs, outputs, 2, stride=2)
        else:                                     # the convolution of single pixels may come first, where they are fewer
            self.up = nn.Sequential(("conv", nn.Conv2d(inputs, outputs, 1)),
                                    ("larger", nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)))

    def forward(self, state: Any) -> Tensor:
        n, channels, height, width = state.shape
        carried = ops.reshape(state[:, self.inputs:], n, (channels - self.inputs) // 4, 2 * height, 2 * width)
        y: Tensor = self.through(ops.concatenate([carried[:, :self.outputs], self.up(state[:, :self.inputs])], 1))
        return ops.concatenate([y, carried[:, self.outputs:]], 1) if self.carried else y


def unet(classes: int = 1, channels: int = 1, width: int = 64, levels: int = 5, norm: str = "batch", up: str = "transposed"
         ) -> nn.Sequential:
    """Images (N, channels, H, W) to (N, classes, H, W); both sides are multiples of 2 to the power of `levels` - 1.

    The first level has `width` channels, each further one twice as many on half as many pixels a side. `up` is "transposed" (a
    transposed convolution) or "bilinear" (interpolation, after a convolution of single pixels). Unlike the paper's, convolutions
    pad their images, so that a result is as large as its image, and have norms after them; see `resnet20` for `norm`.
    """
    require_sizes(classes=classes, channels=channels, width=width, levels=levels)
    if up not in UPS:
        raise ConfigError(f'model.up must be one of {", ".join(UPS)}, found "{up}"; change model.up')
    widths = [width * 2 ** level for level in range(levels)]
    carried = [0]                                 # beside x on each level, in channels of that level's size
    for before in widths[:-1]:
        carried.append(4 * (before + carried[-1]))
    down = [(f"down{k + 1}", Down(widths[k - 1], widths[k], norm, carried[k])) for k in range(1, levels)]
    back = [(f"up{k + 1}", Up(widths[k + 1], widths[k], norm, carried[k], up)) for k in reversed(range(levels - 1))]
    model = nn.Sequential(("input", Images(channels, levels)), ("down1", First(channels, width, norm, 0)), *down, *back,
                          ("head", nn.Conv2d(width, classes, 1)))
    model.plan = PLAN
    return model
