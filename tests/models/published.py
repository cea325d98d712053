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
    "lstm": Published({"inputs": 3, "hidden": 12, "outputs": 1}, (5, 3), 4 * 12 * (3 + 12 + 2) + 13, (5 * 720 + 12) / 1e9,
                      source="the formula; James et al. 2023, section 10.9.6, has this net"),
    "fcn": Published({"inputs": 1, "outputs": 2}, (150, 1), 264_962, (150 * 263_168 + 256) / 1e9, source="PyTorch's layers"),
    "inception_time": Published({"inputs": 1, "outputs": 2}, (150, 1), 420_450, (150 * 418_144 + 256) / 1e9,
                                source="PyTorch's layers"),
}

# Autoencoder, VAE, DeepFM, FT-Transformer, GraphSAGE.
OTHERS: dict[str, Published] = {
    "deepfm": Published({"categories": [1000, 50, 7]}, (3,), 1057 * 11 + 1 + 31 * 400 + 2 * 401 * 400 + 400, 332_400 / 1e9,
                        source="the formula"),
    "ft_transformer": Published({"numeric": 57, "outputs": 2}, (57,), 913_922, source="rtdl_revisiting_models 0.0.2"),
    "graphsage": Published({"inputs": 50, "outputs": 4}, (276, 50), 100 * 128 + 128 + 256 * 128 + 128 + 129 * 4,
                           (26 * 100 * 128 + 256 * 128 + 512) / 1e9, source="the formula"),
}

PUBLISHED = {**CONVOLUTIONAL, **EFFICIENT, **VISION, **LANGUAGE, **SERIES, **OTHERS}
"""By the model's name, or for a variant of it "name: what", such as "vgg16: bn"."""
