"""The classical convolutional nets beside torchvision's, and on other ranks."""

from __future__ import annotations

from zoo import Tiny, images, like_torch, same_on_ranks, torchvision

from mpitrain.models import MODELS


def test_resnet18_is_torchvision_s() -> None:
    theirs = torchvision().models.resnet18(num_classes=4)
    like_torch(MODELS["resnet18"](classes=4), theirs, images(4, 3, 48, 48), dtype="float64")


def test_they_are_the_same_on_ranks() -> None:
    same_on_ranks(Tiny("resnet20", {"classes": 4}, (3, 8, 8)), Tiny("lenet", {"size": 12, "classes": 4}, (1, 12, 12)))
