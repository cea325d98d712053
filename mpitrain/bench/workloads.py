"""The models whose training step is measured, each with made-up data of its usual shape and its arithmetic by formula.

Floating-point operations of a step, for one rank's batch; a multiply-add is two. A layer that multiplies by W weights at P places
takes 2 P W forward and as much for each of its two gradients; the gradient of the network's input is not needed.

    mlp, lenet, resnet20    B (6 (P1 W1 + P2 W2 + ...) - 2 P1 W1): linear layers have P = 1, a convolution one place a pixel
    transformers            6 N B L + 12 layers L width B L: N weights in matrices (positions are looked up, not multiplied; the
                            tied embedding counts once, for the logits), then scores and weighted values, a row of L for each
                            token as if nothing were masked (Chowdhery et al., "PaLM", 2022, appendix B)

Norms, activations, the loss and the optimizer are left out, so a step can get close to the peak and never reach it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpitrain import models, nn
from mpitrain.registry import Registry


@dataclass(frozen=True)
class Workload:
    """A model and one rank's batch: `batch` samples of `shape`, tokens (then targets have that shape too) or numbers."""

    make: Callable[[], nn.Module]
    batch: int
    shape: tuple[int, ...]
    classes: int
    flops_a_sample: int
    tokens: bool = False

    @property
    def flops(self) -> int:
        """The floating-point operations of one step of one rank."""
        return self.batch * self.flops_a_sample

    def samples(self, count: int, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """(inputs, targets), drawn at random: there is nothing to learn but the samples themselves."""
        rng = np.random.default_rng(seed)
        if self.tokens:
            return tuple(rng.integers(0, self.classes, (2, count, *self.shape)))
        return rng.standard_normal((count, *self.shape), dtype=np.float32), rng.integers(0, self.classes, count)


def of_layers(products: Sequence[int]) -> int:
    """Operations of a sample, from the multiply-adds of each layer's forward pass, in order."""
    return 6 * sum(products) - 2 * products[0]


def of_transformer(layers: int, width: int, length: int, vocabulary: int) -> int:
    """Operations of a sample of `length` tokens; 12 width^2 weights a layer: 3 + 1 in attention, 4 + 4 in the MLP."""
    weights = 12 * layers * width ** 2 + vocabulary * width
    return 6 * weights * length + 12 * layers * length * width * length


def residual(size: int, inputs: int, outputs: int, blocks: int) -> list[int]:
    """Multiply-adds of the 3 x 3 convolutions of a stage whose results are `size` x `size`."""
    place = 9 * outputs * size ** 2
    return [place * inputs] + [place * outputs] * (2 * blocks - 1)


def transformer(layers: int, heads: int, width: int, length: int, vocabulary: int, batch: int, block: int = 0,
                bias: bool = False) -> Workload:
    """A GPT; `block` is its longest sequence, where that is more than the `length` it trains on."""
    return Workload(lambda: models.gpt(layers, heads, width, block or length, vocabulary, bias=bias), batch, (length,),
                    vocabulary, of_transformer(layers, width, length, vocabulary), tokens=True)


WORKLOADS: Registry[Workload] = Registry("workload")
"""By the names that `mpitrain bench train --models` takes."""
WORKLOADS.register("mlp")(Workload(lambda: models.mlp(784, [1024, 1024], 10), 128, (784,), 10,
                                   of_layers([784 * 1024, 1024 * 1024, 1024 * 10])))
WORKLOADS.register("lenet")(Workload(models.lenet, 128, (1, 28, 28), 10, of_layers(
    [28 * 28 * 25 * 6, 10 * 10 * 25 * 6 * 16, 400 * 120, 120 * 84, 84 * 10])))
WORKLOADS.register("resnet20")(Workload(models.resnet20, 128, (3, 32, 32), 10, of_layers(
    [32 * 32 * 27 * 16, *residual(32, 16, 16, 3), *residual(16, 16, 32, 3), *residual(8, 32, 64, 3), 64 * 10])))
WORKLOADS.register("gpt-nano")(transformer(4, 4, 128, 64, 65, batch=12))             # nanoGPT's settings for a CPU
WORKLOADS.register("gpt-baby")(transformer(6, 6, 384, 256, 65, batch=8))             # its train_shakespeare_char, smaller batch
WORKLOADS.register("gpt2")(transformer(12, 12, 768, 64, 50257, batch=4, block=1024, bias=True))
