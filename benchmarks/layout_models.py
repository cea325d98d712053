"""Small models and made-up data for comparing layouts: one for each kind of arithmetic that a layout could disturb."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpitrain import data, models, nn, optim
from mpitrain.bench.train import Memory
from mpitrain.train.build.inputs import Inputs
from mpitrain.train.intervals import Step
from mpitrain.train.observers import Observer

ROWS, HELD_OUT = 107, 24                     # 107: the MLP's last batch of an epoch has fewer rows than micro-batches


@dataclass
class Described:
    model: nn.Module
    inputs: Inputs
    optimizer: Callable[[nn.FlatStorage], optim.Optimizer]
    sections: dict[str, dict[str, Any]]               # keys of the configuration
    loss: Any = field(default_factory=nn.LOSSES["cross_entropy"])


class Losses(Observer):
    """Keeps every step's loss and gradient norm, and every evaluation, as exact text."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def after_step(self, step: int, fields: Step, seconds: float) -> None:
        self.seen.append(f"{float(fields.loss).hex()} {float(fields.grad_norm or 0).hex()}")

    def after_evaluation(self, step: int, metrics: Any, seconds: float) -> None:
        self.seen.append(" ".join(float(value).hex() for value in metrics.values()))


def images(channels: int, size: int, rows: int = ROWS, augment: Sequence[str] = ()) -> Inputs:
    rng = np.random.default_rng(channels * size)
    x = rng.standard_normal((rows + HELD_OUT, channels, size, size)).astype(np.float32)
    y = rng.integers(0, 10, rows + HELD_OUT)
    source = Memory(x, y)
    return Inputs(source, range(rows), source, range(rows, rows + HELD_OUT), data.Transforms(["standardise"]),
                  data.augmentations(list(augment)))


def mlp() -> Described:
    """With a last batch of 11 rows for 16 micro-batches: some have none."""
    return Described(models.mlp(64, [256, 256], 10), images(1, 8),
                     lambda s: optim.SGD(s, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4),
                     {"train": {"batch_size": 48, "micro_batches": 16}, "data": {"drop_last": False}})


def lenet() -> Described:
    return Described(models.lenet(size=16), images(1, 16), lambda s: optim.LAMB(s, lr=0.01, weight_decay=0.01),
                     {"train": {"batch_size": 30, "micro_batches": 12}})


def resnet20() -> Described:
    """Batch norm and augmentation."""
    return Described(models.resnet20(), images(3, 8, augment=["flip", "crop"]),
                     lambda s: optim.SGD(s, lr=0.1, momentum=0.9, weight_decay=5e-4),
                     {"train": {"batch_size": 24, "micro_batches": 8}})


def gpt() -> Described:
    """Dropout, tied embeddings, clipping."""
    tokens = np.random.default_rng(5).integers(0, 30, ROWS + HELD_OUT + 17)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, 17)
    source = Memory(windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64), "tokens")
    inputs = Inputs(source, range(ROWS), source, range(ROWS, ROWS + HELD_OUT), data.Transforms())
    return Described(models.gpt(layers=2, heads=2, width=32, block=16, vocabulary=30, dropout=0.1), inputs,
                     lambda s: optim.AdamW(s, lr=3e-3, weight_decay=0.1),
                     {"train": {"batch_size": 22, "micro_batches": 11}, "optimizer": {"clip_norm": 0.5}})


MODELS_BY_NAME = {make.__name__: make for make in (mlp, lenet, resnet20, gpt)}
