"""A step of a model is the same on 1 rank, recomputed, on pp = 2, on dp = 2 and, where it has a plan, on tp = 2: see `zoo`.

A start of mpirun costs as much as a model or two: the fast test has one job for a model of each kind, in layout mode, which
compares bits; the slow ones have the others, and all of them in both modes.
"""

from __future__ import annotations

import pytest
from test_efficient import LIKE
from test_images_and_fields import FNO, SWIN, UNET, VIT
from test_language import BERT, DISTILBERT, LLAMA, T5
from zoo import Tiny, same_on_ranks

# A cut product rounds otherwise. Norms of the 4 numbers that a micro-batch leaves of 32 x 32 images make 1e-7 in 50 layers 2e-5.
WIDE = {"precision": "float64"}
TEXT = {"x": (12,), "target": (12,), "kind": "tokens", "classes": 30, "tokens": 30, "batch": 4, "lr": 0.001, "tp": True}
FIELD = {"x": (1, 8, 8), "target": (1, 8, 8), "kind": "regression"}
CODED = {"size": 8, "widths": [4], "code": 3}

# One line and more of each kind: what blocks pass on, what is drawn, and what ranks share differ between them.
CONVOLUTIONAL = (
    Tiny("densenet121", {"classes": 4, "growth": 4, "layers": [1, 1, 1, 1]}, (3, 32, 32), tp=True),
    Tiny("convnext_tiny", {"classes": 4, "widths": (8, 8, 8, 8), "blocks": (1, 1, 1, 1), "halvings": 3, "scale": 0.1}, (3, 8, 8),
         tp=True))
IMAGES = (
    Tiny("swin", SWIN | {"drop_path": 0.3}, (3, 16, 16), tp=True),
    Tiny("unet", UNET, loss="relative_l2", tp=True, **FIELD))
LANGUAGE = (
    Tiny("bert", BERT | {"padding": 0, "separator": 3, "dropout": 0.1}, **TEXT), Tiny("llama", LLAMA, **TEXT),
    Tiny("t5", T5 | {"source": 8, "dropout": 0.1, "padding": 0}, **TEXT | {"x": (20,)}))
SERIES = (
    Tiny("lstm", {"inputs": 3, "hidden": 6, "outputs": 4, "layers": 2, "dropout": 0.1}, (5, 3)),
    Tiny("inception_time", {"inputs": 1, "outputs": 4, "filters": 2, "bottleneck": 2, "kernel": 8, "depth": 3}, (16, 1),
         tp=True))
TABLES = (
    Tiny("deepfm", {"categories": [5, 5, 5], "width": 4, "hidden": [8, 6], "dropout": 0.1}, (3,), tokens=5, target=(1,),
         kind="values", loss="mse", lr=0.1, tp=True),
    Tiny("ft_transformer", {"numeric": 3, "outputs": 4, "width": 12, "heads": 2, "layers": 2}, (3,), tp=True),
    Tiny("graphsage", {"inputs": 3, "outputs": 4, "samples": [3, 2], "hidden": [6, 4], "dropout": 0.1}, (10, 3), tp=True))
ONE_OF_EACH = (*CONVOLUTIONAL, *IMAGES, *LANGUAGE, *SERIES, *TABLES)

OTHERS = {
    "convolutional": (
        Tiny("lenet", {"size": 12, "classes": 4}, (1, 12, 12), tp=True),
        Tiny("resnet20", {"classes": 4}, (3, 8, 8), tp=True, settings=WIDE),
        Tiny("resnet18", {"classes": 4, "width": 4}, (3, 32, 32)),
        Tiny("resnet50", {"classes": 4, "width": 4}, (3, 32, 32), lr=0.001, tp=True, settings=WIDE),
        Tiny("resnext50", {"classes": 4, "width": 4, "groups": 2, "group_width": 2}, (3, 32, 32), lr=0.001, tp=True,
             settings=WIDE),
        Tiny("wide_resnet50", {"classes": 4, "width": 4}, (3, 32, 32), lr=0.001),
        Tiny("vgg11", {"classes": 4, "width": 2, "hidden": 8}, (3, 32, 32), tp=True),
        Tiny("vgg16", {"classes": 4, "width": 2, "hidden": 8, "norm": "batch", "dropout": 0.0}, (3, 32, 32), tp=True,
             settings=WIDE),
        Tiny("squeezenet", {"classes": 4, "width": 4}, (3, 33, 33), tp=True),
        Tiny("alexnet", {"classes": 4, "widths": [2, 4, 4, 4, 4], "hidden": 8}, (3, 63, 63), tp=True),
        Tiny("googlenet", {"classes": 4, "width": 16}, (3, 32, 32), tp=True, settings=WIDE)),
    "images and fields": (
        Tiny("vit", VIT, (3, 16, 16), tp=True), Tiny("fno", FNO, loss="relative_l2", tp=True, **FIELD),
        Tiny("autoencoder", CODED, loss="mse", tp=True, **FIELD), Tiny("vae", CODED, loss="elbo", tp=True, **FIELD)),
    "language": (
        Tiny("distilbert", DISTILBERT | {"padding": 0}, **TEXT),
        Tiny("llama", LLAMA | {"key_heads": 4, "tied": True}, **TEXT),
        Tiny("t5", T5 | {"source": 40, "tied": False}, **TEXT | {"x": (52,)})),
    "series": (
        Tiny("gru", {"inputs": 3, "hidden": 6, "outputs": 2, "bidirectional": True}, (5, 3), target=(2,), kind="values",
             loss="mse"),
        Tiny("tcn", {"inputs": 2, "channels": [4, 4], "outputs": 4, "dropout": 0.1}, (9, 2), lr=1.0),
        Tiny("tcn", {"inputs": 2, "channels": [4, 4], "outputs": 4, "dropout": 0.1, "weight_norm": False}, (9, 2), lr=1.0,
             tp=True),
        Tiny("fcn", {"inputs": 1, "outputs": 4, "channels": [4, 6, 4]}, (12, 1), tp=True),
        Tiny("inception_time", {"inputs": 1, "outputs": 4, "filters": 2, "bottleneck": 2, "kernel": 8}, (16, 1)))}


def test_one_model_of_each_kind_is_the_same_on_ranks() -> None:
    same_on_ranks(CONVOLUTIONAL[0], IMAGES[1], LANGUAGE[0], SERIES[0], TABLES[2], modes=("layout",))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_models_of_each_kind_are_the_same_on_ranks_in_both_modes() -> None:
    same_on_ranks(*ONE_OF_EACH, timeout=500)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", OTHERS)
def test_the_others_are_the_same_on_ranks(kind: str) -> None:
    same_on_ranks(*OTHERS[kind], timeout=500)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LIKE)
def test_the_efficient_ones_are_the_same_on_ranks(name: str) -> None:
    arguments = {"classes": 4, "width": 0.5 if name == "shufflenet_v2" else 0.1, "halvings": 3}
    same_on_ranks(Tiny(name, arguments, (3, 16, 16), tp=True, settings=WIDE), timeout=400)
