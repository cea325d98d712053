"""The efficient convolutional nets beside torchvision's, and on small images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from zoo import images, like_torch, torchvision

from mpitrain import nn
from mpitrain.errors import ConfigError
from mpitrain.models import MODELS

LIKE: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "mobilenet_v2": ({"width": 0.35}, "mobilenet_v2", {"width_mult": 0.35}),
    "mobilenet_v3_small": ({"width": 0.5}, "mobilenet_v3_small", {"width_mult": 0.5}),
    "mobilenet_v3_large": ({"width": 0.25}, "mobilenet_v3_large", {"width_mult": 0.25}),
    "shufflenet_v2": ({"width": 0.5}, "shufflenet_v2_x0_5", {}),
    "mnasnet": ({"width": 0.5}, "mnasnet0_5", {}),
    "efficientnet_b0": ({}, "efficientnet_b0", {}),
}


FAST = "mobilenet_v2"


@pytest.mark.parametrize("name", [name if name == FAST else pytest.param(name, marks=pytest.mark.slow) for name in LIKE])
def test_they_are_torchvision_s(name: str) -> None:
    ours, peer, more = LIKE[name]
    theirs = getattr(torchvision().models, peer)(num_classes=4, **more)
    for module in theirs.modules():
        if hasattr(module, "momentum"):
            module.momentum = 0.1                       # ours, which suits shorter runs than some of theirs
    like_torch(MODELS[name](classes=4, **ours), theirs,
               images(4, 3, 32, 32), dtype="float64", change={r".*\.squeeze\.\w+\.weight": lambda w: w.reshape(w.shape[:2])})


def test_convnext_is_torchvision_s() -> None:
    from_torchvision = torchvision().models.convnext
    block = from_torchvision.CNBlockConfig
    theirs = from_torchvision.ConvNeXt([block(8, 12, 1), block(12, 16, 2), block(16, 20, 1), block(20, None, 1)], num_classes=4)
    like_torch(MODELS["convnext_tiny"](4, widths=(8, 12, 16, 20), blocks=(1, 2, 1, 1), scale=0.5), theirs, images(2, 3, 32, 32),
               dtype="float64")


@pytest.mark.parametrize("name", [*LIKE, "convnext_tiny"])
def test_images_are_halved_as_often_as_asked_for(name: str) -> None:
    """What comes to the global pooling, for images of 16 x 16."""
    for halvings in (3, 4):
        model = MODELS[name](halvings=halvings, **({"width": 0.5} if name != "convnext_tiny" else {"widths": (8, 8, 8, 8)}))
        model.initialize()
        blocks = list(model.blocks)
        before = model.slice(0, blocks.index("pool")).eval()
        assert before(images(1, 3, 16, 16)).shape[2:] == (16 >> halvings,) * 2


@pytest.mark.parametrize(("name", "arguments", "message"), [
    ("mobilenet_v2", {"halvings": 6}, "model.halvings must be at most 5, found 6; change model.halvings"),
    ("convnext_tiny", {"halvings": 2}, "model.halvings must be 3 to 5, found 2; change model.halvings"),
    ("shufflenet_v2", {"width": 0.7}, "model.width must be one of 0.5, 1.0, 1.5, 2.0, found 0.7; change model.width"),
    ("mnasnet", {"width": 0}, "model.width must be a finite number above 0, found 0; change model.width"),
    ("efficientnet_b0", {"depth": "2"}, 'model.depth must be a finite number above 0, found "2"; change model.depth')])
def test_what_does_not_fit_is_named(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MODELS[name](**arguments)
    assert caught.value.message == message


def test_stochastic_depth_leaves_more_out_the_deeper_it_gets() -> None:
    model = MODELS["efficientnet_b0"](drop_path=0.2)
    found = [module.p for module in model.modules() if isinstance(module, nn.DropPath)]
    assert found == sorted(found) and found[0] == pytest.approx(0.2 * 2 / 16) and found[-1] == pytest.approx(0.2 * 14 / 16)
    rates = [module.p for module in MODELS["convnext_tiny"]().modules() if isinstance(module, nn.DropPath)]
    np.testing.assert_allclose(rates, np.linspace(0, 0.1, 18))
