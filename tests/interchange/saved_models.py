"""Models with values that a run might have, without a run."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain import models
from mpitrain.autograd import no_grad
from mpitrain.config import made_config
from mpitrain.data import Transforms
from mpitrain.train.build.saved import SavedModel


def fresh(name: str, precision: str = "float32", **keys: Any) -> SavedModel:
    """A model of the table whose biases and statistics are drawn, too: they would be zeros and ones."""
    config = made_config({"model": {"name": name, **keys}, "train": {"epochs": 1, "precision": precision}}, [], "fresh")
    model = models.MODELS[name](**keys)
    model.initialize(3, precision)
    for leaf_name, leaf in (*model.named_parameters(), *model.named_buffers()):
        if len(leaf.shape) < 2:
            leaf.array[...] += np.abs(np.random.default_rng(len(leaf_name)).standard_normal(leaf.shape)) * 0.1
    return SavedModel(model.eval().requires_grad_(False), config, 7, Transforms(), {"seed": 0})


def outputs(saved: SavedModel, x: np.ndarray) -> np.ndarray:
    with no_grad():
        return saved.model(x).numpy()
