"""Small models of every kind, trained for a few steps on any mesh, and what is left of that."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from configs import flat

from mpitrain import data, models, nn, optim
from mpitrain.bench.train import Memory
from mpitrain.comm.mesh import Mesh
from mpitrain.train.build.assembly import assemble
from mpitrain.train.build.inputs import Inputs
from mpitrain.train.machine import threads

VOCABULARY, LENGTH, SIDE, CLASSES = 11, 6, 8, 5


def gpt(dropout: float = 0.0) -> nn.Sequential:
    """8 blocks, of which the first and the last share a matrix."""
    return models.gpt(layers=5, heads=2, width=8, block=LENGTH, vocabulary=VOCABULARY, dropout=dropout)


def mlp() -> nn.Sequential:
    """9 blocks of different widths."""
    return models.mlp(12, [10, 8, 9, 7, 6, 8, 9], CLASSES)


def convolutional() -> nn.Sequential:
    """10 blocks, three of which keep running statistics; one has neither parameters nor a floating-point result of its own."""
    return nn.Sequential(
        ("conv0", nn.Conv2d(1, 3, 3, padding=1, bias=False)), ("norm0", nn.BatchNorm2d(3, activation="relu")),
        ("conv1", nn.Conv2d(3, 4, 3, padding=1, bias=False)), ("norm1", nn.BatchNorm2d(4)), ("relu", nn.ReLU()),
        ("pool", nn.MaxPool2d(2)), ("conv2", nn.Conv2d(4, 4, 3, padding=1, bias=False)), ("norm2", nn.BatchNorm2d(4)),
        ("flatten", nn.Flatten()), ("head", nn.Linear(4 * (SIDE // 2) ** 2, CLASSES)))


def lenet() -> nn.Sequential:
    return models.lenet(classes=CLASSES)


def samples(kind: str, rows: int) -> tuple[Any, Any]:
    """(x, y) for the model of that name, made up."""
    rng = np.random.default_rng(3)
    if kind == "gpt":
        return rng.integers(0, VOCABULARY, (2, rows, LENGTH))
    shape = {"mlp": (12,), "convolutional": (1, SIDE, SIDE), "lenet": (1, 28, 28)}[kind]
    return rng.standard_normal((rows, *shape), dtype=np.float32), rng.integers(0, CLASSES, rows)


class Result(NamedTuple):
    """The losses of all steps, the last gradient's norm, validation metrics, and SHA-256 sums of what was trained."""

    losses: list[float]
    norm: float
    metrics: dict[str, float]
    hashes: dict[str, str]


def train(comm: Any, kind: str, model: nn.Module, *, pp: int = 1, steps: int = 2, batch_size: int = 16, rows: int = 40,
          recompute: bool = False, validate: bool = True, **options: Any) -> Result:
    """Trains `model` on the ranks of `comm`, the last rows of `rows` being the last batch, maybe a short one; collective."""
    threads.pin(1)
    x, y = samples(kind, rows + 10)
    source = Memory(x, y, "tokens" if kind == "gpt" else "classes")
    model.recompute = recompute
    mesh = Mesh(comm, pp=pp)
    inputs = Inputs(source, range(rows), source if validate else None, range(rows, rows + 10), data.Transforms())
    asked = {"micro_batches": 4, "drop_last": False, "clip_norm": 0.5, **options}
    job = assemble(model, inputs, mesh, loss=nn.LOSSES["cross_entropy"](),
                   optimizer=lambda storage: optim.AdamW(storage, lr=0.01), quiet=True,
                   config=flat(steps=steps, batch_size=batch_size, **asked))
    trainer: Any = job.trainer
    done = [trainer.train_step(batch) for _, batch in trainer.loader.iterate(0, steps)]
    metrics = trainer.evaluator.run() if validate else {}
    result = Result([step.loss for step in done], done[-1].grad_norm, metrics, job.state.hashes())
    trainer.loader.close()
    trainer.pipeline.reducer.close()
    mesh.close()
    return result
