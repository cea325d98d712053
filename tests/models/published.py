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

# GPT-2, BERT, DistilBERT, T5, Llama. Multiply-adds: torch.utils.flop_counter of those models, on the meta device.
LANGUAGE: dict[str, Published] = {
    "gpt2": Published({}, (1024,), 124_439_808, 145.824, tokens=True, source="transformers, GPT2LMHeadModel"),
    "gpt2_medium": Published({}, (1024,), 354_823_168, tokens=True, source="transformers, GPT2LMHeadModel"),
    "gpt2_large": Published({}, (1024,), 774_030_080, tokens=True, source="transformers, GPT2LMHeadModel"),
    "gpt2_xl": Published({}, (1024,), 1_557_611_200, tokens=True, source="transformers, GPT2LMHeadModel"),
    "bert": Published({}, (512,), 109_514_298, 60.622, tokens=True, source="transformers, BertForMaskedLM"),
    "bert:pooled": Published({"head": "pooled"}, (512,), 109_482_240, tokens=True, source="transformers, BertModel"),
    "distilbert": Published({}, (512,), 66_985_530, 36.463, tokens=True, source="transformers, DistilBertForMaskedLM"),
    "distilbert:none": Published({"head": "none"}, (512,), 66_362_880, tokens=True, source="transformers, DistilBertModel"),
    "t5": Published({}, (626,), 60_506_624, 17.709, tokens=True, source="transformers, T5ForConditionalGeneration, t5-small"),
    "llama": Published({"layers": 32, "heads": 32, "width": 4096, "block": 2048, "vocabulary": 32000}, (2048,), 6_738_415_616,
                       tokens=True, source="LLaMA-7B: 2 V D + layers (4 D^2 + 3 D H + 2 D) + D for D = 4096, H = 11008"),
}

# LSTM, TCN, InceptionTime, FNO.
SERIES: dict[str, Published] = {
}

# Autoencoder, VAE, DeepFM, FT-Transformer, GraphSAGE.
OTHERS: dict[str, Published] = {
}

PUBLISHED = {**CONVOLUTIONAL, **EFFICIENT, **VISION, **LANGUAGE, **SERIES, **OTHERS}
"""By the model's name, or for a variant of it "name: what", such as "vgg16: bn"."""
