"""The classical convolutional nets beside torchvision's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from zoo import declared, images, like_torch, torchvision

from mpitrain.errors import ConfigError
from mpitrain.models import MODELS


def vgg(stages: tuple[int, ...], norm: bool, width: int, hidden: int, classes: int) -> Any:
    """torchvision's VGG of other widths, whose linear layers it has no argument for."""
    torch, models = declared()[0], torchvision().models.vgg
    layers: list[Any] = []
    for s, count in enumerate(stages):
        layers += [width << min(s, 3)] * count + ["M"]
    features = models.make_layers(layers, batch_norm=norm)
    with torch.device("meta"):                            # its own linear layers have 120 million numbers
        made = models.VGG(features, num_classes=classes, init_weights=False)
    made.classifier[0], made.classifier[3], made.classifier[6] = (torch.nn.Linear(a, b) for a, b in (
        (49 * 8 * width, hidden), (hidden, hidden), (hidden, classes)))
    return made


def of(name: str, **arguments: Any) -> Callable[[], Any]:
    return lambda: getattr(torchvision().models, name)(**arguments)


def densenet() -> Any:
    return torchvision().models.DenseNet(8, (2, 3, 1, 2), 16, num_classes=4)


CASES: dict[str, tuple[dict[str, Any], Callable[[], Any], tuple[int, ...]]] = {
    "densenet121": ({"growth": 8, "layers": [2, 3, 1, 2], "classes": 4}, densenet, (3, 3, 64, 64)),
    "squeezenet": ({"classes": 4}, of("squeezenet1_1", num_classes=4), (2, 3, 49, 49)),
    "squeezenet: 1.0": ({"classes": 4, "version": "1.0"}, of("squeezenet1_0", num_classes=4), (2, 3, 61, 61)),
    "vgg11": ({"width": 4, "hidden": 16, "classes": 5}, lambda: vgg((1, 1, 2, 2, 2), False, 4, 16, 5), (2, 3, 64, 64)),
    "vgg16: batch norm": ({"width": 2, "hidden": 16, "classes": 5, "norm": "batch"},
                          lambda: vgg((2, 2, 3, 3, 3), True, 2, 16, 5), (2, 3, 64, 64)),
}
LARGE = {
    "resnet18": ({"classes": 4}, of("resnet18", num_classes=4), (2, 3, 64, 64)),
    "resnet34": ({"classes": 4}, of("resnet34", num_classes=4), (2, 3, 64, 64)),
    "resnet50": ({"classes": 4}, of("resnet50", num_classes=4), (2, 3, 64, 64)),
    "resnet101": ({"classes": 4}, of("resnet101", num_classes=4), (2, 3, 64, 64)),
    "resnet152": ({"classes": 4}, of("resnet152", num_classes=4), (2, 3, 64, 64)),
    "resnext50": ({"classes": 4}, of("resnext50_32x4d", num_classes=4), (2, 3, 64, 64)),
    "wide_resnet50": ({"classes": 4}, of("wide_resnet50_2", num_classes=4), (2, 3, 64, 64)),
    "alexnet": ({"classes": 4}, of("alexnet", num_classes=4), (2, 3, 96, 96)),
    # Convolutions of full width, and 256 of 4,096 hidden numbers: those are 120 million weights, a minute of each test.
    "vgg11": ({"hidden": 256, "classes": 4}, lambda: vgg((1, 1, 2, 2, 2), False, 64, 256, 4), (2, 3, 64, 64)),
    "vgg16: batch norm": ({"hidden": 256, "classes": 4, "norm": "batch"}, lambda: vgg((2, 2, 3, 3, 3), True, 64, 256, 4),
                          (2, 3, 64, 64)),
    "googlenet": ({"classes": 4}, of("googlenet", num_classes=4, aux_logits=False, init_weights=False), (2, 3, 64, 64)),
    "densenet121": ({"classes": 4}, of("densenet121", num_classes=4), (2, 3, 64, 64)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_net_is_torchvision_s(name: str) -> None:
    arguments, theirs, shape = CASES[name]
    dtype = "float64" if "batch norm" in name else "float32"      # A bias before a norm has a gradient of rounding errors.
    like_torch(MODELS[name.partition(":")[0]](**arguments), theirs(), images(*shape), dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_a_net_of_full_width_is_torchvision_s(name: str) -> None:
    """The output in float32, where a ReLU near 0 that falls to the other side shows in a gradient; all else in float64. Two
    images of 64 pixels leave 2 x 2 before the end, so that each weight of a 3 x 3 kernel counts."""
    arguments, theirs, shape = LARGE[name]
    make = MODELS[name.partition(":")[0]]
    like_torch(make(**arguments), theirs(), images(*shape), modes=("eval",), gradients=None)
    like_torch(make(**arguments), theirs(), images(*shape), dtype="float64")


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ConfigError, match=r'model.version must be "1.0" or "1.1", found "1.2"'):
        MODELS["squeezenet"](version="1.2")
    with pytest.raises(ConfigError, match='unknown norm "layer"'):
        MODELS["vgg16"](norm="layer")
    with pytest.raises(ConfigError, match="model.layers must be a list of 4 integers"):
        MODELS["densenet121"](layers=[1, 2])
