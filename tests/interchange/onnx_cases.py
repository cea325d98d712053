"""The models that go to ONNX, tiny, and those that are refused; see test_onnx.py."""

from __future__ import annotations

from typing import Any

GPT = {"layers": 2, "heads": 4, "width": 32, "block": 12, "vocabulary": 19}
LLAMA = {**GPT, "hidden": 24}
T5 = {**GPT, "head_width": 4, "width": 8, "hidden": 8, "source": 5}

CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...], bool]] = {
    "mlp": ("mlp", {"inputs": 12, "hidden": [8, 8], "outputs": 3, "activation": "gelu"}, (12,), False),
    "elastic_mlp": ("elastic_mlp", {"inputs": 12, "width": 8, "hidden": [4, 8], "outputs": 3}, (12,), False),
    "elastic_resnet": ("elastic_resnet", {"channels": 1, "widths": [4, 8], "depths": [1, 2], "kernels": [3, 5]}, (1, 16, 16),
                       True),
    "elastic_gpt": ("elastic_gpt", {"depths": [1, 2], "heads": [1, 2], "hidden": [8, 16], "width": 8,
                                    "block": GPT["block"], "vocabulary": GPT["vocabulary"]}, (), False),
    "mlp of images": ("mlp", {"inputs": 12, "hidden": [8], "outputs": 3, "activation": "tanh"}, (2, 6), True),
    "lenet": ("lenet", {}, (1, 28, 28), False), "resnet20": ("resnet20", {"channels": 1}, (1, 32, 32), True),
    "resnet32": ("resnet32", {}, (3, 16, 24), True), "resnet56": ("resnet56", {"norm": "sync"}, (3, 16, 24), True),
    **{name: (name, {"classes": 5, "width": 4}, (3, 32, 33), True) for name in (
        "resnet18", "resnet34", "resnet50", "wide_resnet50", "resnet101", "resnet152", "googlenet")},
    "resnext50": ("resnext50", {"classes": 5, "width": 4, "groups": 2, "group_width": 2}, (3, 32, 32), True),
    "alexnet": ("alexnet", {"classes": 5, "widths": [4, 4, 4, 4, 4], "hidden": 8}, (3, 224, 224), True),
    "vgg11": ("vgg11", {"classes": 5, "width": 2, "hidden": 8}, (3, 224, 224), True),
    "vgg16": ("vgg16", {"classes": 5, "width": 2, "hidden": 8, "norm": "batch"}, (3, 224, 224), True),
    "densenet121": ("densenet121", {"classes": 5, "growth": 2, "layers": [1, 2, 1, 1]}, (3, 32, 64), True),
    "squeezenet": ("squeezenet", {"classes": 5, "width": 2}, (3, 48, 48), True),
    "squeezenet 1.0": ("squeezenet", {"classes": 5, "width": 2, "version": "1.0"}, (3, 48, 50), True),
    **{name: (name, {"classes": 5, "width": 0.1}, (3, 64, 64), True) for name in (
        "mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large", "mnasnet", "efficientnet_b0")},
    "shufflenet_v2": ("shufflenet_v2", {"classes": 5, "width": 0.5}, (3, 64, 64), True),
    "convnext_tiny": ("convnext_tiny", {"widths": [8, 8, 8, 8], "blocks": [1, 1, 1, 1], "scale": 0.5}, (3, 64, 64), True),
    "vit": ("vit", {"classes": 5, "size": 8, "patch": 4, "width": 8, "layers": 2, "heads": 2}, (3, 8, 8), False),
    "swin": ("swin", {"classes": 5, "patch": 2, "width": 8, "depths": [2, 2], "heads": [2, 4], "window": 3}, (3, 14, 20), True),
    **{f"unet {up}": ("unet", {"width": 4, "levels": 3, "up": up}, (1, 8, 12), True) for up in ("transposed", "bilinear")},
    **{name: (name, {"size": 8, "widths": [3, 4], "code": 2}, (1, 8, 8), False) for name in ("autoencoder", "vae")},
    **{name: (name, {"inputs": 2, "hidden": 3, "outputs": 2}, (5, 2), True) for name in ("lstm", "gru")},
    **{f"deep {name}": (name, {"inputs": 2, "hidden": 3, "outputs": 2, "layers": 2, "bidirectional": True}, (5, 2), True)
       for name in ("lstm", "gru")},
    "tcn": ("tcn", {"inputs": 2, "channels": [3, 4, 4], "outputs": 1}, (9, 2), True),
    "fcn": ("fcn", {"inputs": 2, "outputs": 2, "channels": [3, 3, 3]}, (9, 2), True),
    "inception_time": ("inception_time", {"inputs": 2, "outputs": 2, "filters": 2, "kernel": 8}, (9, 2), True),
    "deepfm": ("deepfm", {"categories": [3, 4], "width": 2, "hidden": [5, 3]}, (2,), False),
    "ft_transformer": ("ft_transformer", {"numeric": 2, "outputs": 2, "width": 8, "layers": 2}, (2,), False),
    "ft_transformer of both": ("ft_transformer", {"numeric": 2, "categories": [3, 4], "outputs": 2, "width": 8}, (4,), False),
    "graphsage": ("graphsage", {"inputs": 2, "outputs": 2, "samples": [3, 2], "hidden": [3, 4]}, (10, 2), False),
    "gpt": ("gpt", GPT, (), False), "cut gpt": ("gpt", {**GPT, "heads": [2, 3], "head_width": 8, "hidden": [40, 24]}, (), False),
    "gpt2": ("gpt", {**GPT, "bias": True, "activation": "gelu_tanh"}, (), False),
    "untied gpt": ("gpt", {**GPT, "bias": True, "activation": "relu", "tied": False}, (), False),
    "llama": ("llama", LLAMA, (), False), "llama of few keys": ("llama", {**LLAMA, "key_heads": 2, "tied": True}, (), False),
    **{f"{name} {head}": (name, {**GPT, "hidden": 24, "head": head, **({"classes": 3} if head == "classes" else {})}, (), False)
       for name in ("bert", "distilbert") for head in ("masked", "pooled", "classes", "none")},
    "padded bert": ("bert", {**GPT, "hidden": 24, "padding": 0, "separator": 3, "head": "pooled"}, (), False),
    "t5": ("t5", T5, (12,), True), "padded t5": ("t5", {**T5, "padding": 0, "tied": False}, (12,), True)}
SLOW = ("resnet56", "resnet34", "resnet101", "resnet152", "vgg16", "mobilenet_v2", "mobilenet_v3_large", "mnasnet",
        "efficientnet_b0")
TOKENS = ("gpt", "elastic_gpt", "llama", "bert", "distilbert", "t5")
PRESETS = {"gpt2": "gpt", "gpt2_medium": "gpt", "gpt2_large": "gpt", "gpt2_xl": "gpt", "vit_ti_16": "vit", "vit_s_16": "vit",
           "vit_b_16": "vit", "swin_t": "swin"}
"""Models that are another one with certain numbers, and have no smaller ones: its cases are theirs."""

REFUSED: dict[str, tuple[dict[str, Any], tuple[int, ...], str]] = {
    "fno": ({"width": 4, "modes": [2, 2], "layers": 1, "hidden": 4}, (1, 8, 8),
            'the operation HalfTransform, in "layer0.spectral", has no rule'),
    "t5": ({**GPT, "source": 4}, (), 'in "decoder0.attention" has a size of .*, or give the one length .*--input LENGTH')}
