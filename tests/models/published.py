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
    "resnet101": Published({}, IMAGE, 44_549_160, 7.801),
    "resnet152": Published({}, IMAGE, 60_192_808, 11.514),
    "wide_resnet50": Published({}, IMAGE, 68_883_240, 11.398),
    "resnext50": Published({}, IMAGE, 25_028_904, 4.23),
    "alexnet": Published({}, IMAGE, 61_100_840, 0.714),
    "vgg11": Published({}, IMAGE, 132_863_336, 7.609),
    "vgg11: batch norm": Published({"norm": "batch"}, IMAGE, 132_868_840, 7.609),
    "vgg16": Published({}, IMAGE, 138_357_544, 15.470),
    "vgg16: batch norm": Published({"norm": "batch"}, IMAGE, 138_365_992, 15.470),
    "densenet121": Published({}, IMAGE, 7_978_856, 2.834),
    "squeezenet": Published({}, IMAGE, 1_235_496, 0.349),
    "squeezenet: 1.0": Published({"version": "1.0"}, IMAGE, 1_248_424, 0.819),
    "googlenet": Published({}, IMAGE, 6_624_904, 1.498),
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
    "vit_ti_16": Published({}, IMAGE, 5_717_416, source="DeiT (Touvron et al. 2021), its code"),
    "vit_s_16": Published({}, IMAGE, 22_050_664, source="DeiT (Touvron et al. 2021), its code"),
    "vit_b_16": Published({}, IMAGE, 86_567_656, 17.564),
    "swin_t": Published({}, IMAGE, 28_288_354, 4.491),
    "convnext_tiny": Published({}, IMAGE, 28_589_128, 4.456),
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
