"""Plain stacks of convolutions: LeNet-5, AlexNet and VGG's nets. Their input is (B, C, H, W)."""

from __future__ import annotations

from collections.abc import Sequence

from mpitrain.errors import ShapeError
from mpitrain.models.registry import require_list_of_sizes, require_sizes
from mpitrain.nn import AdaptiveAvgPool2d, Conv2d, Dropout, Flatten, Linear, MaxPool2d, Module, ReLU, Sequential, init
from mpitrain.nn.basic import Check
from mpitrain.nn.norm import NORMS

LENET = (6, 16, 120, 84)
ALEXNET = (64, 192, 384, 256, 256)
HE = init.kaiming_normal(fan="out")


def lenet(classes: int = 10, channels: int = 1, size: int = 28, widths: Sequence[int] = LENET) -> Sequential:
    """LeNet-5 (LeCun et al. 1998) with ReLU and max-pooling, for images of `size` x `size`.

    The first convolution pads by 2, so that 28 x 28 images give the paper's 16 maps of 5 x 5. `widths` are
    the outputs of its layers but the last.
    """
    require_sizes(classes=classes, channels=channels, size=size)
    require_list_of_sizes("widths", widths, len(LENET))
    first, second, third, fourth = widths
    side = (size // 2 - 4) // 2
    if side < 1:
        raise ShapeError(f"lenet needs images of at least 12x12, not {size}x{size}")
    model = Sequential(
        ("input", Check("lenet", (None, channels, size, size), "set model.channels and model.size")),
        ("conv1", Conv2d(channels, first, 5, padding=2)), ("pool1", MaxPool2d(2, activation="relu")),
        ("conv2", Conv2d(first, second, 5)), ("pool2", MaxPool2d(2, activation="relu")),
        ("flatten", Flatten()),
        ("linear1", Linear(second * side * side, third, activation="relu")),
        ("linear2", Linear(third, fourth, activation="relu")),
        ("head", Linear(fourth, classes)))
    model.plan = {"conv1": "column", "conv2": "row", "linear1": "column", "linear2": "row"}
    model.size_keys = {"widths": ("conv1", "conv2", "linear1", "linear2")}
    return model


def alexnet(classes: int = 1000, channels: int = 3, dropout: float = 0.5, widths: Sequence[int] = ALEXNET,
            hidden: int = 4096) -> Sequential:
    """AlexNet in one column (Krizhevsky 2014: "One weird trick"), for images of about 224 x 224, as torchvision has it.

    `widths` are the outputs of its five convolutions, `hidden` those of its two wide linear layers.
    """
    require_sizes(classes=classes, channels=channels, hidden=hidden)
    require_list_of_sizes("widths", widths, len(ALEXNET))
    a, b, c, d, e = widths
    model = Sequential(
        ("input", Check("alexnet", (None, channels, None, None), "set model.channels")),
        ("conv1", Conv2d(channels, a, 11, stride=4, padding=2)), ("pool1", MaxPool2d(3, 2, activation="relu")),
        ("conv2", Conv2d(a, b, 5, padding=2)), ("pool2", MaxPool2d(3, 2, activation="relu")),
        ("conv3", Conv2d(b, c, 3, padding=1)), ("relu3", ReLU()),
        ("conv4", Conv2d(c, d, 3, padding=1)), ("relu4", ReLU()),
        ("conv5", Conv2d(d, e, 3, padding=1)), ("pool5", MaxPool2d(3, 2, activation="relu")),
        ("pool", AdaptiveAvgPool2d(6)), ("flatten", Flatten()), ("dropout1", Dropout(dropout)),
        ("linear1", Linear(36 * e, hidden, activation="relu")), ("dropout2", Dropout(dropout)),
        ("linear2", Linear(hidden, hidden, activation="relu")), ("head", Linear(hidden, classes)))
    model.plan = {"conv1": "column", "conv2": "row", "conv3": "column", "conv4": "row",
                  "linear1": "column", "dropout2": "channels", "linear2": "row"}
    return model


def _vgg(name: str, stages: tuple[int, ...], classes: int, channels: int, norm: str, dropout: float, width: int,
         hidden: int) -> Sequential:
    """So many 3 x 3 convolutions of each width, a pool behind each stage, three linear layers (Simonyan and Zisserman 2015)."""
    require_sizes(classes=classes, channels=channels, width=width, hidden=hidden)
    make = NORMS.resolve(norm) if norm != "none" else None
    blocks: list[tuple[str, Module]] = [("input", Check(name, (None, channels, None, None), "set model.channels"))]
    inputs, convolutions = channels, []
    for s, count in enumerate(stages):
        outputs = width << min(s, 3)
        for i in range(count):
            at = f"{s + 1}_{i + 1}"
            blocks.append((f"conv{at}", Conv2d(inputs, outputs, 3, padding=1, weight_init=HE, bias_init=init.zeros)))
            convolutions.append(at)
            if make is not None:
                blocks.append((f"norm{at}", make(outputs, activation="relu")))
            elif i + 1 < count:
                blocks.append((f"relu{at}", ReLU()))                  # The last one of a stage is in the pool.
            inputs = outputs
        blocks.append((f"pool{s + 1}", MaxPool2d(2, activation=None if make else "relu")))
    narrow = init.normal(0.01)
    model = Sequential(
        *blocks, ("pool", AdaptiveAvgPool2d(7)), ("flatten", Flatten()),
        ("linear1", Linear(49 * inputs, hidden, activation="relu", weight_init=narrow, bias_init=init.zeros)),
        ("dropout1", Dropout(dropout)),
        ("linear2", Linear(hidden, hidden, activation="relu", weight_init=narrow, bias_init=init.zeros)),
        ("dropout2", Dropout(dropout)), ("head", Linear(hidden, classes, weight_init=narrow, bias_init=init.zeros)))
    model.plan = _pairs(convolutions, normed=make is not None)
    return model


def _pairs(convolutions: Sequence[str], normed: bool) -> dict[str, str]:
    """Each two convolutions that follow each other are cut by outputs and by inputs; a last one stays whole."""
    plan = {"linear1": "column", "dropout1": "channels", "linear2": "row"}
    for first, second in zip(convolutions[::2], convolutions[1::2]):
        plan |= {f"conv{first}": "column", f"conv{second}": "row"} | ({f"norm{first}": "channels"} if normed else {})
    return plan


def vgg11(classes: int = 1000, channels: int = 3, norm: str = "none", dropout: float = 0.5, width: int = 64,
          hidden: int = 4096) -> Sequential:
    """VGG's net A of 11 layers, for images of about 224 x 224; torchvision's of that name, or vgg11_bn with norm = "batch".

    `width` are the channels of the first stage, doubled up to 8 times as many, `hidden` the outputs of the wide linear layers.
    """
    return _vgg("vgg11", (1, 1, 2, 2, 2), classes, channels, norm, dropout, width, hidden)


def vgg16(classes: int = 1000, channels: int = 3, norm: str = "none", dropout: float = 0.5, width: int = 64,
          hidden: int = 4096) -> Sequential:
    """VGG's net D of 16 layers; see `vgg11`."""
    return _vgg("vgg16", (2, 2, 3, 3, 3), classes, channels, norm, dropout, width, hidden)
