"""U-Nets: images to images, through coarser grids and back, with a way around each (Ronneberger, Fischer and Brox 2015).

    level 1   conv -------------------------------> join, conv -> head          x has C_1 channels on H x W
    level 2      pool, conv -----------> join, conv, up                         x has C_2 channels on H/2 x W/2
    level 3         pool, conv, up ......                                       ...

Blocks pass x on and what is on its way around, the nearest level's first: a tuple. Where a pipeline cuts, it travels as one
tensor, as further channels of x: (N, C, H, W) has the numbers of (N, 4 C, H/2, W/2): a change of shape, and one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def join(state: tuple[Tensor, ...]) -> Tensor:
    """What blocks pass on, as one tensor (N, ..., H, W), of H and W of x."""
    n, _, height, width = state[0].shape
    return ops.concatenate([state[0], *(ops.reshape(y, n, -1, height, width) for y in state[1:])], 1)


class Level(nn.Module):
    """Two convolutions, each with a norm and ReLU; what both ways through a level have in common.

    x comes with `given` channels, and with what is on its way around, of `around` channels, where each has twice the sides of the
    one before.
    """

    def __init__(self, given: int, around: Sequence[int], inputs: int, outputs: int, norm: str):
        make = NORMS.resolve(norm)
        self.given, self.around, self.outputs = given, tuple(around), outputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False, weight_init=HE)
        self.norm1 = make(outputs, activation="relu")
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False, weight_init=HE)
        self.norm2 = make(outputs, activation="relu")

    def through(self, x: Any) -> Any:
        return self.norm2(self.conv2(self.norm1(self.conv1(x))))

    def parted(self, state: Any) -> tuple[Any, ...]:
        """The tuple that the block before gave, or `join` has made one tensor of."""
        if isinstance(state, tuple) or not self.around:
            return state if isinstance(state, tuple) else (state,)
        n, _, height, width = state.shape
        times = [2 ** (m + 1) for m in range(len(self.around))]
        x, *parts = ops.split(state, [self.given, *(c * k * k for c, k in zip(self.around, times))], 1)
        return (x, *(ops.reshape(part, n, c, k * height, k * width) for part, c, k in zip(parts, self.around, times)))


class First(Level):
    """The first level: images (N, inputs, H, W) to (N, outputs, H, W)."""

    chains = INSIDE

    def forward(self, x: Any) -> Any:
        return self.through(x)


class Down(Level):
    """One level down: x is pooled, and goes its way around as well."""

    chains = INSIDE

    def __init__(self, given: int, around: Sequence[int], outputs: int, norm: str):
        super().__init__(given, around, given, outputs, norm)
        self.pool = nn.MaxPool2d(2)

    def forward(self, state: Any) -> tuple[Tensor, ...]:
        state = self.parted(state)
        return self.through(self.pool(state[0])), *state


class Up(Level):
    """One level up: x is enlarged, and joined with what the way down had there."""

    chains = INSIDE

    def __init__(self, given: int, around: Sequence[int], norm: str, up: str):
        super().__init__(given, around, 2 * around[0], around[0], norm)
        if up == "transposed":
            self.up: nn.Module = nn.ConvTranspose2d(given, around[0], 2, stride=2)
        else:                                     # the convolution of single pixels may come first, where they are fewer
            self.up = nn.Sequential(("conv", nn.Conv2d(given, around[0], 1)),
                                    ("larger", nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)))

    def forward(self, state: Any) -> Any:
        x, beside, *others = self.parted(state)
        y = self.through(ops.concatenate([beside, self.up(x)], 1))
        return (y, *others) if others else y


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
    before = [widths[:k][::-1] for k in range(levels)]        # by level: the channels of those above it, the nearest first
    down = [(f"down{k + 1}", Down(widths[k - 1], before[k - 1], widths[k], norm)) for k in range(1, levels)]
    back = [(f"up{k + 1}", Up(widths[k + 1], before[k + 1], norm, up)) for k in reversed(range(levels - 1))]
    model = nn.Sequential(("input", Images(channels, levels)), ("down1", First(channels, [], channels, width, norm)), *down,
                          *back, ("head", nn.Conv2d(width, classes, 1)))
    model.plan, model.join = PLAN, join
    return model
