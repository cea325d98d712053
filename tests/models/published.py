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
}

# ConvNeXt, ViT, Swin, U-Net.
VISION: dict[str, Published] = {
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
