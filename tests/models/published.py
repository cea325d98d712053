"""Published sizes of models: parameters, which must be equal, and multiply-adds of a sample in 1e9, within 0.5 % (or None).

Most are torchvision's own, of the tables beside its weights (`num_params`, `_ops`); others say where they are from.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Published(NamedTuple):
    arguments: dict[str, Any]
    shape: tuple[int, ...]                          # of a sample
    parameters: int
    gigaflops: float | None = None
    tokens: bool = False                            # the sample is of token numbers
    source: str = "torchvision"


IMAGE = (3, 224, 224)

# Classical convolutional nets.
CONVOLUTIONAL: dict[str, Published] = {
    "resnet18": Published({}, IMAGE, 11_689_512, 1.814),
    "resnet34": Published({}, IMAGE, 21_797_672, 3.664),
    "resnet50": Published({}, IMAGE, 25_557_032, 4.089),
}

# Efficient convolutional nets: MobileNet, ShuffleNet, MNASNet, EfficientNet.
EFFICIENT: dict[str, Published] = {
    "mobilenet_v2": Published({}, IMAGE, 3_504_872, 0.301),
    "mobilenet_v3_small": Published({}, IMAGE, 2_542_856, 0.057),
    "mobilenet_v3_large": Published({}, IMAGE, 5_483_032, 0.217),
    "shufflenet_v2": Published({}, IMAGE, 2_278_604, 0.145),
    "shufflenet_v2: x0.5": Published({"width": 0.5}, IMAGE, 1_366_792, 0.04),
    "mnasnet": Published({}, IMAGE, 4_383_312, 0.314),
    "mnasnet: x0.5": Published({"width": 0.5}, IMAGE, 2_218_512, 0.104),
    "efficientnet_b0": Published({}, IMAGE, 5_288_548, 0.386),
    "efficientnet_b0: B2": Published({"width": 1.1, "depth": 1.2}, IMAGE, 9_109_994, None),
}

# ConvNeXt, ViT, Swin, U-Net.
VISION: dict[str, Published] = {
    "convnext_tiny": Published({}, IMAGE, 28_589_128, 4.456),
}

# GPT-2, BERT, DistilBERT, T5, Llama.
LANGUAGE: dict[str, Published] = {
}

# LSTM, TCN, InceptionTime, FNO.
SERIES: dict[str, Published] = {
}

# Autoencoder, VAE, DeepFM, FT-Transformer, GraphSAGE.
OTHERS: dict[str, Published] = {
}

PUBLISHED = {**CONVOLUTIONAL, **EFFICIENT, **VISION, **LANGUAGE, **SERIES, **OTHERS}
"""By the model's name, or for a variant of it "name: what", such as "vgg16: bn"."""
