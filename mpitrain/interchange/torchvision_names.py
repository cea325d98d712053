"""torchvision's names for its ResNets and their kin, VGG's nets, AlexNet, DenseNet, SqueezeNet and GoogLeNet."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpitrain.errors import ConfigError
from mpitrain.interchange.name_tables import _ResNet
from mpitrain.interchange.names import COUNTER, Shapes
from mpitrain.interchange.tensors import TensorFile
from mpitrain.nn import Module, Sequential

Rules = Sequence[tuple[str, str]]
RESNET: Rules = (
    (r"conv\.", "conv1."), (r"norm\.", "bn1."), (r"stage(\d)_block(\d+)\.conv", r"layer\1.\2.conv"),
    (r"stage(\d)_block(\d+)\.norm", r"layer\1.\2.bn"), (r"stage(\d)_block(\d+)\.shortcut\.conv\.", r"layer\1.\2.downsample.0."),
    (r"stage(\d)_block(\d+)\.shortcut\.norm\.", r"layer\1.\2.downsample.1."), (r"head\.", "fc."))
DENSENET: Rules = (
    (r"conv\.", "features.conv0."), (r"norm\.", "features.norm0."), (r"last_norm\.", "features.norm5."),
    (r"block(\d)_layer(\d+)\.", r"features.denseblock\1.denselayer\2."), (r"transition(\d)\.", r"features.transition\1."),
    (r"head\.", "classifier."))
ALEXNET: Rules = (
    *((rf"conv{i}\.", f"features.{at}.") for i, at in enumerate((0, 3, 6, 8, 10), 1)),
    (r"linear1\.", "classifier.1."), (r"linear2\.", "classifier.4."), (r"head\.", "classifier.6."))
GOOGLENET: Rules = (
    (r"(conv\d|inception\d\w\.branch1)\.norm\.", r"\1.bn."), (r"(inception\d\w\.branch\d\.\d)\.norm\.", r"\1.bn."),
    (r"(?=conv\d|inception)", ""), (r"head\.", "fc."))


class TorchVision(_ResNet):
    """The rules are those of the net that the model's blocks show."""

    passed_over = (f"*{COUNTER}", "aux?.*")               # GoogLeNet's auxiliary heads, which only training has a use for
    rules = RESNET
    models = {((2, 2, 2, 2), 2): "resnet18", ((3, 4, 6, 3), 2): "resnet34", ((3, 4, 6, 3), 3): "resnet50",
              ((3, 4, 23, 3), 3): "resnet101", ((3, 8, 36, 3), 3): "resnet152"}
    head = "fc"

    def name_of(self, ours: str, model: Module) -> str:
        for pattern, theirs in _rules_of(model):
            if match := re.match(pattern, ours):
                return match.expand(theirs) + ours[match.end():]
        return super().name_of(ours, model)

    def keys(self, shapes: Shapes, file: TensorFile, given: Mapping[str, str]) -> dict[str, Any]:
        sign = next((sign for sign in SIGNS if sign in shapes), "")
        try:
            return SIGNS[sign](shapes) if sign else self._resnet(shapes, file, given)
        except (KeyError, IndexError) as error:                   # a tensor that is not there, or has fewer dims
            what = f"lacks {error.args[0]}" if isinstance(error, KeyError) else "has another shape there"
            raise ConfigError(f"the file has {sign or 'layer1.0.conv1.weight'}, as a net of torchvision's, and {what}; give "
                              "--names of another table, or model.name and its keys with --names own") from error

    def _resnet(self, shapes: Shapes, file: TensorFile, given: Mapping[str, str]) -> dict[str, Any]:
        found = super().keys(shapes, file, given)
        width = shapes["conv1.weight"][0]
        if "layer1.0.conv3.weight" in shapes:
            found |= _inside(found["name"], width, shapes["layer1.0.conv2.weight"])
        return found | ({"width": width} if width != 64 else {})


def _rules_of(model: Module) -> Rules:
    blocks = list(model.blocks) if isinstance(model, Sequential) else []
    if "conv1_1" in blocks:
        return _vgg_rules(blocks)
    if "fire2" in blocks:
        first = blocks.index("pool1")                     # Their third; all behind it, fire modules and pools, follow in order.
        return ((r"conv\.", "features.0."), (r"head\.", "classifier.1."),
                *((rf"{name}\.{ours}\.", f"features.{blocks.index(name) - first + 2}.{theirs}.")
                  for name in blocks if name.startswith("fire")
                  for ours, theirs in (("squeeze", "squeeze"), ("expand1", "expand1x1"), ("expand3", "expand3x3"))))
    for sign, rules in (("block1_layer1", DENSENET), ("inception3a", GOOGLENET), ("conv5", ALEXNET)):
        if sign in blocks:
            return rules
    return RESNET


def _vgg_rules(blocks: Sequence[str]) -> Rules:
    """Layers in their order: a convolution, a norm where there is one, ReLU; and a pool behind each stage."""
    convolutions = [name.removeprefix("conv") for name in blocks if name.startswith("conv")]
    each = 3 if "norm1_1" in blocks else 2
    found = [(r"linear1\.", "classifier.0."), (r"linear2\.", "classifier.3."), (r"head\.", "classifier.6.")]
    for place, name in enumerate(convolutions):
        at = each * place + int(name.partition("_")[0]) - 1
        found += [(rf"conv{name}\.", f"features.{at}."), (rf"norm{name}\.", f"features.{at + 1}.")]
    return found


def _inside(name: str, width: int, middle: Sequence[int]) -> dict[str, Any]:
    """The keys of blocks of three convolutions, from the weight of the first block's middle one."""
    inner, group_width = middle[0], middle[1]
    if group_width < inner and name == "resnet50":
        return {"name": "resnext50", "groups": inner // group_width, "group_width": group_width}
    if inner != width and name == "resnet50" and inner % width == 0:
        return {"name": "wide_resnet50", "widening": inner // width}
    if inner != width or group_width < inner:
        raise ConfigError(f"the file's {name} has {inner} channels in groups of {group_width} inside of its first block; the "
                          f"table has {width} in one group, and others of resnet50 only")
    return {}


def _vgg(shapes: Shapes) -> dict[str, Any]:
    first = shapes["features.0.weight"]
    if first[-1] == 11:
        widths = [shapes[f"features.{at}.weight"][0] for at in (0, 3, 6, 8, 10)]
        return {"name": "alexnet", "classes": shapes["classifier.6.weight"][0], "channels": first[1], "widths": widths,
                "hidden": shapes["classifier.4.weight"][0]}
    count = sum(name.startswith("features.") and len(shape) == 4 for name, shape in shapes.items())
    names = {8: "vgg11", 13: "vgg16"}
    if count not in names:
        raise ConfigError(f"the file has {count} convolutions and three linear layers; the table has 8 (vgg11) and 13 (vgg16)")
    return {"name": names[count], "classes": shapes["classifier.6.weight"][0], "channels": first[1], "width": first[0],
            "hidden": shapes["classifier.0.weight"][0], "norm": "batch" if "features.1.running_mean" in shapes else "none"}


def _densenet(shapes: Shapes) -> dict[str, Any]:
    layers = [sum(name.startswith(f"features.denseblock{b}.") and name.endswith(".conv1.weight") for name in shapes)
              for b in range(1, 5)]
    return {"name": "densenet121", "classes": shapes["classifier.weight"][0], "channels": shapes["features.conv0.weight"][1],
            "growth": shapes["features.denseblock1.denselayer1.conv2.weight"][0], "layers": layers}


def _squeezenet(shapes: Shapes) -> dict[str, Any]:
    first = shapes["features.0.weight"]
    return {"name": "squeezenet", "classes": shapes["classifier.1.weight"][0], "channels": first[1],
            "version": "1.0" if first[-1] == 7 else "1.1", "width": shapes["features.3.squeeze.weight"][0]}


def _googlenet(shapes: Shapes) -> dict[str, Any]:
    width, channels = shapes["conv1.conv.weight"][:2]
    return {"name": "googlenet", "classes": shapes["fc.weight"][0], "channels": channels, "width": width}


SIGNS: dict[str, Callable[[Shapes], dict[str, Any]]] = {
    "features.denseblock1.denselayer1.conv2.weight": _densenet, "features.3.squeeze.weight": _squeezenet,
    "inception3a.branch1.conv.weight": _googlenet, "classifier.6.weight": _vgg}
"""A tensor that one kind of net alone has -> the keys of [model] by its shapes."""
