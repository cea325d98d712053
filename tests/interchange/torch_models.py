"""GPT-2 and ResNet in torch.nn, under the names that Hugging Face, nanoGPT and torchvision give their parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


def randomise(model: Any) -> Any:
    """Every parameter and statistic drawn, so that none is passed over unseen."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if value.dtype.is_floating_point:
                value.copy_(torch.rand_like(value) + 0.5 if "running_var" in name else torch.randn_like(value) * 0.2)
    return model


class Transposed(nn.Module):
    """x @ weight + bias, with weight (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(inputs, outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Any) -> Any:
        return x @ self.weight + self.bias


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, linear: Any):
        super().__init__()
        self.heads, self.c_attn, self.c_proj = heads, linear(width, 3 * width), linear(width, width)

    def forward(self, x: Any) -> Any:
        b, length, width = x.shape
        q, k, v = (t.view(b, length, self.heads, -1).transpose(1, 2) for t in self.c_attn(x).split(width, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, length, width))


class MLP(nn.Module):
    def __init__(self, width: int, linear: Any, approximate: str):
        super().__init__()
        self.c_fc, self.c_proj, self.approximate = linear(width, 4 * width), linear(4 * width, width), approximate

    def forward(self, x: Any) -> Any:
        return self.c_proj(F.gelu(self.c_fc(x), approximate=self.approximate))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, linear: Any, bias: bool, approximate: str):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width, bias=bias), Attention(width, heads, linear)
        self.ln_2 = nn.LayerNorm(width, bias=bias)
        self.mlp = MLP(width, linear, approximate)

    def forward(self, x: Any) -> Any:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


def parts(layers: int, heads: int, width: int, block: int, vocabulary: int, linear: Any, bias: bool,
          approximate: str) -> dict[str, Any]:
    return {"wte": nn.Embedding(vocabulary, width), "wpe": nn.Embedding(block, width),
            "h": nn.ModuleList([Block(width, heads, linear, bias, approximate) for _ in range(layers)]),
            "ln_f": nn.LayerNorm(width, bias=bias)}


def run(model: Any, tokens: Any) -> Any:
    x = model["wte"](tokens) + model["wpe"](torch.arange(tokens.shape[1]))
    for block in model["h"]:
        x = block(x)
    return model["ln_f"](x)


class NanoGPT(nn.Module):
    def __init__(self, layers: int, heads: int, width: int, block: int, vocabulary: int, bias: bool):
        super().__init__()
        self.transformer = nn.ModuleDict(parts(layers, heads, width, block, vocabulary, lambda i, o: nn.Linear(i, o, bias=bias),
                                               bias,
                                               "none"))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, tokens: Any) -> Any:
        return self.lm_head(run(self.transformer, tokens))


class HuggingFaceGPT2(nn.Module):
    def __init__(self, layers: int, heads: int, width: int, block: int, vocabulary: int):
        super().__init__()
        for name, part in parts(layers, heads, width, block, vocabulary, Transposed, True, "tanh").items():
            setattr(self, name, part)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Any) -> Any:
        return self.lm_head(run({name: getattr(self, name) for name in ("wte", "wpe", "h", "ln_f")}, tokens))


class Basic(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Any) -> Any:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class Three(nn.Module):
    """torchvision's Bottleneck."""

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.downsample = None
        if stride > 1 or inputs != 4 * width:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: Any) -> Any:
        y = self.bn3(self.conv3(F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self, blocks: list[int], classes: int, block: Any = Basic, times: int = 1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        inputs = 64
        for i, (count, width) in enumerate(zip(blocks, (64, 128, 256, 512))):
            setattr(self, f"layer{i + 1}", nn.Sequential(*(block(inputs if not b else times * width, width,
                                                                 2 if i and not b else 1) for b in range(count))))
            inputs = times * width
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Any) -> Any:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for i in range(4):
            x = getattr(self, f"layer{i + 1}")(x)
        return self.fc(x.mean((2, 3)))
