"""A saved model whose parameters are the mean that its run has kept, outside of a run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpitrain import nn
from mpitrain.autograd import no_grad
from mpitrain.backend import CPU
from mpitrain.checkpoint import choosing
from mpitrain.checkpoint.kinds import Kept, Placed
from mpitrain.config.sections import AverageConfig
from mpitrain.errors import UsageError
from mpitrain.nn.statistics import apply_statistics, collect_statistics, defer_statistics, running_layers
from mpitrain.parallel.pipeline.feed import Feed
from mpitrain.train.build.inputs import Inputs
from mpitrain.train.build.saved import SavedModel
from mpitrain.train.observers.averaging import KIND


def averaged(saved: SavedModel, inputs: Callable[[], Inputs], rows: int | None = None) -> SavedModel:
    """The model with the mean of its weights, and with batch-norm statistics of the first `rows` (None: all) training rows
    of `inputs()`, its run's data.

    `saved` is changed. UsageError where its run has kept no mean.
    """
    found = choosing.chosen(saved.sources[0] / "checkpoints", saved.step)
    if saved.config.average.kind == "none" or not int(found.read(f"{KIND}d/models")):
        why = "was trained without [average]" if saved.config.average.kind == "none" else \
            f"had averaged nothing at step {saved.step}: average.start = {saved.config.average.start}"
        raise UsageError(f"{saved.sources[0]} {why}; train it with average.kind = \"ema\" or \"swa\", and choose a later step")
    parameters = saved.model.parameters()
    storage = saved.model.storage
    assert storage is not None
    Kept(KIND, lambda: (Placed(p, p.master) for p in parameters), storage.dtype).read(found)
    for parameter in parameters:
        parameter.mark_changed()
    if running_layers(saved.model):
        learn_statistics(saved, inputs(), rows)
    return saved.made_into(saved.model, average=vars(AverageConfig()))


def learn_statistics(saved: SavedModel, inputs: Inputs, rows: int | None) -> None:
    """Sets running statistics to the mean of those of batches of the first `rows` training rows, in their order, without
    augmentation and dropout."""
    model, size = saved.model, saved.config.train.batch_size
    layers, reader = running_layers(model), inputs.reader(saved.transforms)
    n = min(len(inputs.train_rows), rows or len(inputs.train_rows))
    for _, module in model.named_modules():
        own = any(value in layers for value in vars(module).values() if isinstance(value, nn.statistics.Running))
        module.training = own
    defer_statistics(layers)
    feed = Feed(CPU, next(iter(model.parameters())).master.dtype, tokens=inputs.tokens)
    with no_grad():
        for start in range(0, max(n - n % size, size), size):             # A last part of a batch would count as much as a whole.
            x, _ = reader.read(np.asarray(inputs.train_rows[start:min(start + size, n)], np.int64))
            model(feed.tensors(x))
    kept = [(layer, layer.momentum, layer.steps) for layer in layers]
    for layer in layers:
        layer.momentum, layer.steps = 1.0, None
    apply_statistics(layers, collect_statistics(layers))
    for layer, momentum, steps in kept:
        layer.momentum, layer.steps = momentum, steps
    defer_statistics(layers, False)
    model.eval()
