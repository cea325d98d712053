"""Residual nets: ResNets for small images and for large ones, ResNeXt and wide ResNets.

Their input is (B, C, H, W). A net for large images halves it five times, so H and W of 32 leave one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.models.registry import require_list_of_sizes, require_sizes
from mpitrain.nn import AdaptiveAvgPool2d, Conv2d, Flatten, Linear, MaxPool2d, Module, Sequential, init
from mpitrain.nn.basic import Check
from mpitrain.nn.norm import NORMS

HE = init.kaiming_normal(fan="out")
BOTTLENECK_PLAN = {"stage*.conv2": "column", "stage*.norm2": "channels", "stage*.conv3": "row"}
GROUPED_PLAN = {"stage*.conv1": "column", "stage*.norm1": "channels", "stage*.conv2": "channels", "stage*.norm2": "channels",
                "stage*.conv3": "row"}
RESIDUAL_PLAN = {"stage*.conv1": "column", "stage*.norm1": "channels", "stage*.conv2": "row"}


class Residual(Module):
    """relu(x + norm(conv(relu(norm(conv(x)))))), He et al. 2016a; where the shape changes, the shortcut follows.

    `project`: by a 1x1 convolution and a norm (option B); else by every second pixel and zero channels (option A), which
    has no parameters. Between the convolutions are `inner` channels.
    """

    chains = ("conv1", "norm1", "conv2"),

    def __init__(self, inputs: int, outputs: int, inner: int, stride: int, norm: str, project: bool):
        make = NORMS.resolve(norm)
        self.conv1 = Conv2d(inputs, inner, 3, stride=stride, padding=1, bias=False, weight_init=HE)
        self.norm1 = make(inner, activation="relu")
        self.conv2 = Conv2d(inner, outputs, 3, padding=1, bias=False, weight_init=HE)
        self.norm2 = make(outputs, activation="relu")
        self.stride, self.new_channels = stride, outputs - inputs
        self.shortcut: Sequential | None = None
        if project and (stride != 1 or inputs != outputs):
            conv = Conv2d(inputs, outputs, 1, stride=stride, bias=False, weight_init=HE)
            self.shortcut = Sequential(("conv", conv), ("norm", make(outputs)))

    def forward(self, x: Any) -> Tensor:
        out: Tensor = self.norm2(self.conv2(self.norm1(self.conv1(x))), self._around(x))
        return out

    def _around(self, x: Any) -> Any:
        if self.shortcut is not None:
            return self.shortcut(x)
        if self.stride == 1 and not self.new_channels:
            return x
        before = self.new_channels // 2
        return ops.subsample2d(x, self.stride, (before, self.new_channels - before))


class Bottleneck(Module):
    """As `Residual`, of three convolutions: 1 x 1 to `inner` channels, 3 x 3 with the stride, 1 x 1 to `outputs`.

    The stride stands in the middle, as torchvision has it (Goyal et al. 2017), and the shortcut is option B. The middle one may
    have `groups` (ResNeXt: Xie et al. 2017).
    """

    chains = ("conv1", "norm1", "conv2", "norm2", "conv3"),

    def __init__(self, inputs: int, outputs: int, inner: int, stride: int, norm: str, groups: int = 1):
        make = NORMS.resolve(norm)
        self.conv1 = Conv2d(inputs, inner, 1, bias=False, weight_init=HE)
        self.norm1 = make(inner, activation="relu")
        self.conv2 = Conv2d(inner, inner, 3, stride=stride, padding=1, groups=groups, bias=False, weight_init=HE)
        self.norm2 = make(inner, activation="relu")
        self.conv3 = Conv2d(inner, outputs, 1, bias=False, weight_init=HE)
        self.norm3 = make(outputs, activation="relu")
        self.shortcut: Sequential | None = None
        if stride != 1 or inputs != outputs:
            conv = Conv2d(inputs, outputs, 1, stride=stride, bias=False, weight_init=HE)
            self.shortcut = Sequential(("conv", conv), ("norm", make(outputs)))

    def forward(self, x: Any) -> Tensor:
        y = self.norm2(self.conv2(self.norm1(self.conv1(x))))
        out: Tensor = self.norm3(self.conv3(y), x if self.shortcut is None else self.shortcut(x))
        return out


def _stages(blocks: tuple[int, ...], widths: tuple[int, ...], inner: Sequence[int] | None, norm: str, project: bool
            ) -> list[tuple[str, Module]]:
    """So many residual blocks of each width; from the second width on the first block halves the image."""
    if inner is not None:
        require_list_of_sizes("inner", inner, sum(blocks))
    named: list[tuple[str, Module]] = []
    inputs = widths[0]
    for s, width in enumerate(widths):
        for b in range(blocks[s]):
            stride = 2 if s > 0 and b == 0 else 1
            between = width if inner is None else inner[len(named)]
            named.append((f"stage{s + 1}_block{b}", Residual(inputs, width, between, stride, norm, project)))
            inputs = width
    return named


def _cifar_resnet(blocks: int, classes: int, channels: int, norm: str, inner: Sequence[int] | None) -> Sequential:
    """6 blocks + 2 layers for small images (He et al. 2016a, section 4.2), shortcuts without parameters."""
    require_sizes(classes=classes, channels=channels)
    stages = _stages((blocks,) * 3, (16, 32, 64), inner, norm, project=False)
    model = Sequential(
        ("input", Check("resnet", (None, channels, None, None), "set model.channels")),
        ("conv", Conv2d(channels, 16, 3, padding=1, bias=False, weight_init=HE)),
        ("norm", NORMS.resolve(norm)(16, activation="relu")),
        *stages,
        ("pool", AdaptiveAvgPool2d(1)), ("flatten", Flatten()), ("head", Linear(64, classes)))
    model.plan, model.size_keys = RESIDUAL_PLAN, {"inner": [f"{name}.conv1" for name, _ in stages]}
    return model


def resnet20(classes: int = 10, channels: int = 3, norm: str = "batch", inner: Sequence[int] | None = None) -> Sequential:
    """20 layers for small images such as CIFAR's; `norm` is "batch" or "sync" (statistics over all ranks).

    `inner` are the channels inside of each block, one number a block.
    """
    return _cifar_resnet(3, classes, channels, norm, inner)


def resnet32(classes: int = 10, channels: int = 3, norm: str = "batch", inner: Sequence[int] | None = None) -> Sequential:
    """32 layers for small images; see `resnet20`."""
    return _cifar_resnet(5, classes, channels, norm, inner)


def resnet56(classes: int = 10, channels: int = 3, norm: str = "batch", inner: Sequence[int] | None = None) -> Sequential:
    """56 layers for small images; see `resnet20`."""
    return _cifar_resnet(9, classes, channels, norm, inner)


def _imagenet_resnet(name: str, blocks: tuple[int, ...], classes: int, channels: int, norm: str,
                     inner: Sequence[int] | None, width: int) -> Sequential:
    """A stem that makes images four times smaller, and four stages of blocks (He et al. 2016a, table 1)."""
    require_sizes(classes=classes, channels=channels, width=width)
    stages = _stages(blocks, (width, 2 * width, 4 * width, 8 * width), inner, norm, project=True)
    model = _with_stem(name, stages, (channels, width, 8 * width), classes, norm)
    model.plan, model.size_keys = RESIDUAL_PLAN, {"inner": [f"{name}.conv1" for name, _ in stages]}
    return model


def _with_stem(name: str, stages: list[tuple[str, Module]], widths: tuple[int, int, int], classes: int, norm: str) -> Sequential:
    """`widths` are the channels of the images, of the stem's result and of the last stage's."""
    return Sequential(
        ("input", Check(name, (None, widths[0], None, None), "set model.channels")),
        ("conv", Conv2d(widths[0], widths[1], 7, stride=2, padding=3, bias=False, weight_init=HE)),
        ("norm", NORMS.resolve(norm)(widths[1], activation="relu")), ("pool0", MaxPool2d(3, stride=2, padding=1)),
        *stages,
        ("pool", AdaptiveAvgPool2d(1)), ("flatten", Flatten()), ("head", Linear(widths[2], classes)))


def resnet18(classes: int = 1000, channels: int = 3, norm: str = "batch", inner: Sequence[int] | None = None,
             width: int = 64) -> Sequential:
    """18 layers for images of about 224 x 224; torchvision's of that name, which `import --names torchvision` takes over.

    `inner`: see `resnet20`. `width` are the channels of the first stage, which each further one doubles.
    """
    return _imagenet_resnet("resnet18", (2, 2, 2, 2), classes, channels, norm, inner, width)


def resnet34(classes: int = 1000, channels: int = 3, norm: str = "batch", inner: Sequence[int] | None = None,
             width: int = 64) -> Sequential:
    """34 layers; see `resnet18`."""
    return _imagenet_resnet("resnet34", (3, 4, 6, 3), classes, channels, norm, inner, width)


def _bottleneck_net(name: str, blocks: tuple[int, ...], classes: int, channels: int, norm: str, width: int, inner: int,
                    groups: int = 1) -> Sequential:
    """Blocks of three convolutions; `inner` channels inside of the first stage's, which each further stage doubles."""
    require_sizes(classes=classes, channels=channels, width=width)
    stages: list[tuple[str, Module]] = []
    inputs = width
    for s, count in enumerate(blocks):
        for b in range(count):
            block = Bottleneck(inputs, 4 * width << s, inner << s, 2 if s and not b else 1, norm, groups)
            stages.append((f"stage{s + 1}_block{b}", block))
            inputs = 4 * width << s
    model = _with_stem(name, stages, (channels, width, inputs), classes, norm)
    model.plan = BOTTLENECK_PLAN if groups == 1 else GROUPED_PLAN
    return model


def resnet50(classes: int = 1000, channels: int = 3, norm: str = "batch", width: int = 64) -> Sequential:
    """50 layers in blocks of three; see `resnet18`."""
    return _bottleneck_net("resnet50", (3, 4, 6, 3), classes, channels, norm, width, width)


def resnet101(classes: int = 1000, channels: int = 3, norm: str = "batch", width: int = 64) -> Sequential:
    """101 layers in blocks of three; see `resnet18`."""
    return _bottleneck_net("resnet101", (3, 4, 23, 3), classes, channels, norm, width, width)


def resnet152(classes: int = 1000, channels: int = 3, norm: str = "batch", width: int = 64) -> Sequential:
    """152 layers in blocks of three; see `resnet18`."""
    return _bottleneck_net("resnet152", (3, 8, 36, 3), classes, channels, norm, width, width)


def wide_resnet50(classes: int = 1000, channels: int = 3, norm: str = "batch", width: int = 64, widening: int = 2) -> Sequential:
    """ResNet-50 with `widening` times the channels inside of its blocks (Zagoruyko and Komodakis 2016)."""
    require_sizes(width=width, widening=widening)
    return _bottleneck_net("wide_resnet50", (3, 4, 6, 3), classes, channels, norm, width, width * widening)


def resnext50(classes: int = 1000, channels: int = 3, norm: str = "batch", width: int = 64, groups: int = 32,
              group_width: int = 4) -> Sequential:
    """ResNeXt-50, 32 x 4d (Xie et al. 2017): `groups` of `group_width` channels in the first stage's 3 x 3 convolutions."""
    require_sizes(groups=groups, group_width=group_width)
    return _bottleneck_net("resnext50", (3, 4, 6, 3), classes, channels, norm, width, groups * group_width, groups)
