"""The models of `mpitrain bench train` in PyTorch, and their training step at PyTorch's best settings. Imports nothing of ours.

Parameters stand in the order of ours, so a list of arrays sets them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, heads: int, width: int, bias: bool):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, bias=bias)
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.proj = nn.Linear(width, width, bias=bias)
        self.norm2 = nn.LayerNorm(width, bias=bias)
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.proj(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Pre-norm, learned positions, output tied to the token embedding."""

    def __init__(self, layers: int, heads: int, width: int, block: int, vocabulary: int, bias: bool = False):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(block, width)
        self.blocks = nn.ModuleList(Block(heads, width, bias) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=bias)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens):
        x = self.token(tokens) + self.position.weight[:tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.token.weight.T


def mlp(*sizes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def lenet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(),
                         nn.MaxPool2d(2), nn.Flatten(), mlp(400, 120, 84, 10))


class Residual(nn.Module):
    """Where the shape changes, the shortcut takes every second pixel and zeros for the new channels (He et al.'s option A)."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.stride, self.before = stride, (outputs - inputs) // 2

    def forward(self, x):
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)), inplace=True)))
        if self.stride != 1:
            x = F.pad(x[:, :, ::self.stride, ::self.stride], (0, 0, 0, 0, self.before, self.before))
        return F.relu(x + y, inplace=True)


def resnet20() -> nn.Module:
    blocks = [Residual(inputs, outputs, stride) for inputs, outputs, stride in
              [(16, 16, 1)] * 3 + [(16, 32, 2)] + [(32, 32, 1)] * 2 + [(32, 64, 2)] + [(64, 64, 1)] * 2]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True), *blocks,
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


MODELS = {"mlp": lambda: mlp(784, 1024, 1024, 10), "lenet": lenet, "resnet20": resnet20,
          "gpt-nano": lambda: GPT(4, 4, 128, 64, 65), "gpt-baby": lambda: GPT(6, 6, 384, 256, 65),
          "gpt2": lambda: GPT(12, 12, 768, 1024, 50257, bias=True)}
IMAGES = ("lenet", "resnet20")                    # whose tensors may be laid out channels last


def set_parameters(model: nn.Module, values: Sequence[np.ndarray]) -> None:
    for (name, parameter), array in zip(model.named_parameters(), values, strict=True):
        if tuple(parameter.shape) != array.shape:
            raise SystemExit(f"{name} {tuple(parameter.shape)} is not {array.shape}: the two models are not the same")
        parameter.data = torch.tensor(np.array(array))


class TorchSide:
    """A training step on fixed batches used in turn; `values` are the initial parameters, PyTorch's own without them.

    `wrap` may put something around the model (DistributedDataParallel). `precision`: "float32"; "autocast", bfloat16 as
    torch.autocast chooses; "medium", products in bfloat16 (torch.set_float32_matmul_precision). On `device` "cuda" a step's loss
    is a tensor that nobody has waited for.
    """

    def __init__(self, model: nn.Module, batches: Sequence[tuple[Any, Any]], values: Sequence[np.ndarray] | None = None, *,
                 lr: float, decay: float, compiled: bool = False, channels_last: bool = False, precision: str = "float32",
                 wrap: Any = None, device: str = "cpu"):
        torch.set_num_threads(1)
        if values is not None:
            set_parameters(model, values)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        model = model.to(device=device, memory_format=layout)
        self.model = model if wrap is None else wrap(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=decay, fused=True)
        self.batches = [(to_tensor(x, layout).to(device), torch.from_numpy(np.array(y)).to(device)) for x, y in batches]
        self.loss = torch.compile(self._loss) if compiled else self._loss
        self.precision, self.steps, self.device = precision, 0, device

    def _loss(self, x, y):
        outputs = self.model(x)
        return F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), y.reshape(-1))

    def step(self) -> Any:
        """The loss before the update."""
        x, y = self.batches[self.steps % len(self.batches)]
        self.steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        with products_in_bfloat16() if self.precision == "medium" else nullcontext():
            with torch.autocast(self.device, torch.bfloat16) if self.precision == "autocast" else nullcontext():
                loss = self.loss(x, y)
            loss.backward()                                   # outside autocast, as its documentation recommends
        self.optimizer.step()
        return float(loss.detach()) if self.device == "cpu" else loss.detach()


@contextmanager
def products_in_bfloat16():
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


def to_tensor(x: np.ndarray, layout: Any) -> torch.Tensor:
    tensor = torch.from_numpy(np.array(x))
    return tensor.contiguous(memory_format=layout) if tensor.dim() == 4 else tensor
