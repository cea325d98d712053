"""What tests of meshes share: small models on made-up samples, trained by `assemble` on any mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import product
from typing import Any

import numpy as np
from configs import flat

from mpitrain import data, models, nn, optim
from mpitrain.bench.train import Memory
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.shared.node import Node
from mpitrain.train.build.assembly import Job, assemble
from mpitrain.train.build.inputs import Inputs

BATCH = 16
LENGTH = 12
ROWS = 96


@contextmanager
def on_node(number: int) -> Iterator[None]:
    """This rank as if on the node of this number."""
    defaults: Any = Node.__init__.__kwdefaults__
    before, defaults["color"] = defaults["color"], number
    try:
        yield
    finally:
        defaults["color"] = before


def nodes(comm: Any, count: int) -> AbstractContextManager[None]:
    """The ranks as if on so many nodes, neighbours together."""
    return on_node(comm.rank * count // comm.size)


def factorisations(n: int) -> list[dict[str, int]]:
    """Every mesh of n ranks."""
    return [{"pp": pp, "dp": dp, "tp": tp} for pp, dp, tp in product(range(1, n + 1), repeat=3) if pp * dp * tp == n]


def gpt(dropout: float = 0.1, **changed: Any) -> nn.Sequential:
    """12 heads, 12 positions and 26 tokens: shared by 2, 3, 4 and 6 ranks, the tokens unevenly."""
    sizes = {"layers": 2, "heads": 12, "width": 24, "block": LENGTH, "vocabulary": 26, "bias": True, **changed}
    return models.gpt(dropout=dropout, **sizes)


def mlp(layers: int = 3, **changed: Any) -> nn.Sequential:
    return models.mlp(20, [48, *[24] * (layers - 1)], 10, **changed)


def samples(model: nn.Sequential, *, shape: tuple[int, ...] = (20,), classes: int = 10) -> Inputs:
    """Rows to train on, and some to evaluate with; labels follow from the inputs, so that there is something to learn."""
    rng = np.random.default_rng(5)
    if "embed" in model.blocks:
        tokens = np.cumsum(rng.integers(1, 4, (ROWS, model["embed"].block + 1)), axis=1) % 26
        source = Memory(tokens[:, :-1].copy(), tokens[:, 1:].copy(), "tokens")
    else:
        x = rng.standard_normal((ROWS, *shape)).astype(np.float32)
        source = Memory(x, x.reshape(ROWS, -1)[:, :classes].argmax(axis=1), "classes")
    return Inputs(source, range(64), source, range(64, ROWS), data.Transforms())


@contextmanager
def job(comm: Any, make: Callable[[], nn.Sequential], mesh: Mapping[str, int], *, inputs: Inputs | None = None,
        loss: Any = None, rate: float = 3e-3, optimizer: Callable[[Any], Any] | None = None, **options: Any) -> Any:
    """A run on a mesh of the ranks of `comm`."""
    model = make()
    made = Mesh(comm, **mesh)
    told = {"steps": 20, "batch_size": BATCH, "micro_batches": 4, "clip_norm": 0.5, "eval_every": 1000, **options}
    run = assemble(model, inputs or samples(model), made, loss=loss or nn.LOSSES["cross_entropy"](),
                   optimizer=optimizer or (lambda storage: optim.AdamW(storage, lr=rate, weight_decay=0.01)), config=flat(**told),
                   quiet=True)
    try:
        yield run
    finally:
        run.trainer.pipeline.reducer.close()
        made.close()


def step_losses(run: Job, steps: int, first: int = 0) -> list[float]:
    """The losses of some steps."""
    run.trainer.update.want_norm = True
    return [run.trainer.train_step(run.trainer.loader.load(step)).loss for step in range(first, first + steps)]


def losses(comm: Any, make: Callable[[], nn.Sequential], mesh: Mapping[str, int], steps: int = 20, **options: Any) -> list[float]:
    with job(comm, make, mesh, **options) as run:
        return step_losses(run, steps)
