"""Calibration of a saved model on the training rows of its run, by all ranks of a session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpitrain import nn
from mpitrain.comm.job import guard
from mpitrain.data.loader import SampleReader
from mpitrain.run.session import Session
from mpitrain.shrink.calibrate import ranges

CHUNK = 32                        # rows; fixed, so that scales do not depend on the number of ranks


def calibrate(session: Session, model: nn.Module, layers: Sequence[str], rows: int) -> dict[str, float]:
    """The scales of the inputs of these layers over the first `rows` training rows, or all where there are fewer. It
    communicates."""
    inputs = session.inputs
    assert model.storage is not None
    tokens, dtype = inputs.tokens, model.storage.dtype
    with guard.symmetric():
        inputs.fit(session.control)
    reader, count = SampleReader(inputs.training, inputs.transforms), min(rows, len(inputs.train_rows))

    def read(chunk: int) -> Any:
        which = inputs.train_rows[chunk * CHUNK:min((chunk + 1) * CHUNK, count)]
        x, _ = reader.read(np.asarray(which, np.int64))
        return x if tokens else np.asarray(x, dtype)
    return ranges(model, layers, read, -(-count // CHUNK), session.control)
