"""What a saved model does on the training rows of its run, worked out by all ranks of a session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpitrain.autograd import Tensor
from mpitrain.backend import CPU
from mpitrain.comm.job import guard
from mpitrain.config import Config
from mpitrain.parallel.pipeline.feed import Feed
from mpitrain.run.session import Session
from mpitrain.shrink.calibrate import ranges
from mpitrain.shrink.graph import Graph
from mpitrain.shrink.importance import Importance, taylor
from mpitrain.train.build.from_config import make_loss
from mpitrain.train.build.saved import SavedModel

CHUNK = 32                        # rows; fixed, so that scales do not depend on the number of ranks


def calibrate(session: Session, saved: SavedModel, layers: Sequence[str], rows: int) -> dict[str, float]:
    """The scales of the inputs of these layers over the first `rows` training rows, or all where there are fewer. It
    communicates."""
    read, n_chunks = _chunks(session, saved, rows)
    return ranges(saved.model, layers, lambda chunk: read(chunk)[0], n_chunks, session.control)


def sensitivities(config: Config, session: Session, saved: SavedModel, graph: Graph, rows: int) -> Importance:
    """How much the loss of these rows depends on each channel of a saved model. It communicates."""
    model, (read, n_chunks) = saved.model, _chunks(session, saved, rows)
    with guard.symmetric():
        loss = make_loss(config, session.inputs.tokens, session.inputs)

    def of(chunk: int) -> Tensor:
        x, y = read(chunk)
        total: Tensor = loss(model(x), y)
        return total
    model.requires_grad_(True)
    try:
        return taylor(model, graph, of, n_chunks, session.control)
    finally:
        model.requires_grad_(False)


def _chunks(session: Session, saved: SavedModel, rows: int) -> tuple[Callable[[int], tuple[Any, Any]], int]:
    """What reads chunk c of the first training rows, (tensors of x, y), and how many there are: by the model's own transforms, as
    it is evaluated, whatever those of other rows would be."""
    inputs = session.inputs
    assert saved.model.storage is not None
    feed = Feed(CPU, saved.model.storage.dtype, tokens=inputs.tokens)
    reader, count = inputs.reader(saved.transforms), min(rows, len(inputs.train_rows))

    def read(chunk: int) -> tuple[Any, Any]:
        which = inputs.train_rows[chunk * CHUNK:min((chunk + 1) * CHUNK, count)]
        x, y = reader.read(np.asarray(which, np.int64))
        return feed.tensors(x), y
    return read, -(-count // CHUNK)
