"""Training with fixed block masks against the same training with dense products: one rank, one thread, pairs in turn.

    python benchmarks/sparse_training.py [--rounds 11] [--json FILE]

Both sides start from the same weights, pruned in blocks of 16 outputs and an input, and make whole steps: forward, backward,
AdamW and the masks. The one computes with the blocks that are left (`nn.sparse.BlockLinear`), the other with all of the weight. A
ratio is the median over rounds of the dense step's time over the sparse one's, with its quartiles. After as many steps both must
have the same weights to the bit.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pinned  # noqa: F401  (first: it sets what NumPy reads)

# isort: split
import numpy as np

from mpitrain import Tensor, nn, ops, optim
from mpitrain.bench.pairs import alternate, timed
from mpitrain.bench.report import Report, cpu_name, in_time, ratio_of
from mpitrain.errors import NumericsError
from mpitrain.models.mlp import mlp
from mpitrain.models.transformer import Block
from mpitrain.shrink.masks import Masks, prunable
from mpitrain.shrink.rules import Block as Blocks
from mpitrain.shrink.sparse import fix_blocks


def mlp_step(rng: np.random.Generator) -> tuple[nn.Module, Any]:
    """An MLP of 784-2048-2048-10 on 256 rows."""
    x, labels = rng.standard_normal((256, 784), np.float32), rng.integers(0, 10, 256)
    model = mlp(inputs=784, hidden=[2048, 2048], outputs=10)
    return model, lambda: ops.cross_entropy(model(Tensor(x)), labels)


def block_step(rng: np.random.Generator) -> tuple[nn.Module, Any]:
    """A block of GPT-2's width on 2 texts of 128 tokens."""
    x = rng.standard_normal((2, 128, 768), np.float32)
    model = nn.Sequential(("block", Block(768, 12, 12, 0.0, True, {})))
    return model, lambda: (model(Tensor(x)) ** 2).mean()


STEPS = {"mlp": mlp_step, "gpt block": block_step}


class Side:
    """A model in training with masks that stay."""

    def __init__(self, name: str, zeros: float, *, sparse: bool):
        self.model, self.loss = STEPS[name](np.random.default_rng(0))
        storage = self.model.initialize(1)
        self.optimizer = optim.AdamW(storage, lr=1e-4)
        self.masks = Masks(storage, {name: shape for name, shape in prunable(self.model).items() if shape[0] % 16 == 0},
                           lambda parameter: True)
        layers = self.masks.layers()
        Blocks("16x1").choose(layers, zeros, lambda table: None)
        self.masks.take(layers, lambda table: None)
        self.masks.apply()
        self.replaced = fix_blocks(self.model, self.masks) if sparse else []

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()
        self.masks.apply()


def measure(name: str, zeros: float, rounds: int) -> dict[str, Any]:
    """Medians and quartiles of a model at one share of zeros."""
    ours, dense = Side(name, zeros, sparse=True), Side(name, zeros, sparse=False)
    pairs = alternate(timed(ours.step, 2), timed(dense.step, 2), rounds)
    while ours.optimizer.steps < dense.optimizer.steps:
        ours.step()
    while dense.optimizer.steps < ours.optimizer.steps:
        dense.step()
    found, wanted = ours.model.state_dict(), dense.model.state_dict()
    if not ours.replaced or not all(np.array_equal(found[leaf], wanted[leaf]) for leaf in wanted):
        raise NumericsError(f"{name} at {zeros}: the weights are not those of dense products")
    return {"model": name, "zeros": zeros, "layers": ours.replaced, "steps": ours.optimizer.steps, **pairs.summary("dense")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = Report(0, options.json)
    report.line(f"{cpu_name()}: whole steps with blocks 16 x 1 that stay, float32, one thread")
    report.line(f"{'model':11}{'zeros':>7}{'sparse':>12}{'dense':>12}  ratio (quartiles)")
    for name in STEPS:
        for zeros in (0.5, 0.8, 0.9):
            found = measure(name, zeros, options.rounds)
            report.line(f"{name:11}{zeros:7.0%}{in_time(found['seconds']):>12}{in_time(found['dense_seconds']):>12}  "
                        f"{ratio_of(found)}")
            report.record(found)


if __name__ == "__main__":
    main()
