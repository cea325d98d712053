"""PyTorch's side of benchmarks/gpu.py: the same models from the same values, bfloat16 by autocast. Imports nothing of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch_side
from torch import nn
from torch.nn import functional as F


class Block(torch_side.Block):
    """With GPT-2's tanh form of GELU."""

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(c, dim=2))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(torch_side.GPT):
    def __init__(self, layers: int, heads: int, width: int, block: int = 1024, vocabulary: int = 50304):
        super().__init__(layers, heads, width, block, vocabulary, bias=True)
        self.blocks = nn.ModuleList(Block(heads, width, True) for _ in range(layers))


def model(name: str, tiny: bool = False) -> nn.Module:
    kind = name.split()[0]
    if kind in ("gpt2", "gpt"):
        return GPT(1, 2, 16, 8, 32) if tiny else GPT(12, 12, 768) if kind == "gpt2" else GPT(48, 25, 1600)
    if kind == "resnet20":
        return torch_side.resnet20()
    import torchvision
    return getattr(torchvision.models, kind)()


def side(made: nn.Module, batches: Sequence[tuple[Any, Any]], values: Sequence[np.ndarray] | None, *, compiled: bool, lr: float,
         decay: float, channels_last: bool = False, device: str = "cuda") -> torch_side.TorchSide:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    return torch_side.TorchSide(made, batches, values, lr=lr, decay=decay, compiled=compiled, channels_last=channels_last,
                                precision="autocast", device=device)


def first_losses(made: torch_side.TorchSide) -> float:
    """The mean loss on the batches, each before a step on it: the first of them for each."""
    return sum(float(made.step()) for _ in made.batches) / len(made.batches)
