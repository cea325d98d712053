"""What [distil] means for a run: a saved run's outputs, or its predictions in a file, which the loss compares with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.autograd import Tensor, no_grad
from mpitrain.config import Config
from mpitrain.data import Dataset, MicroBatch, Transforms
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.parallel.pipeline.feed import Feed
from mpitrain.placement.place import Placement
from mpitrain.shrink.distil import Teacher
from mpitrain.train.build.assembly import Job
from mpitrain.train.build.inputs import Inputs
from mpitrain.train.build.saved import load

Logits = Callable[[MicroBatch], Tensor]
ROWS, APART = 256, 0.1              # rows that both transforms are tried on, and the share of their size that they may differ by


def give_teacher(job: Job, config: Config, inputs: Inputs) -> None:
    """Lets the job's loss follow the teacher too. ConfigError for one that does not fit the run."""
    pipeline, d = job.trainer.pipeline, config.distil
    logits = find(config, inputs, job.context.placement, pipeline.feed, job.trainer.loader.reader.n_classes)
    if pipeline.stage.is_last:
        pipeline.teach = Teacher(logits, d.temperature, d.weight, getattr(pipeline.loss, "ignore_index", None))


def find(config: Config, inputs: Inputs, placement: Placement, feed: Feed, classes: int | None) -> Logits:
    """The teacher's outputs for a micro-batch of a run with so many classes. ConfigError for a teacher that does not fit it."""
    if placement.head is not None:
        raise ConfigError(f"[distil] compares whole outputs, and mesh.tp = {config.mesh.tp} leaves those of the last layer, "
                          f'"{placement.head.path}", cut; set mesh.tp = 1')
    return of_predictions(config, inputs, feed, classes) if config.distil.predictions else of_run(config, inputs, feed, classes)


def of_run(config: Config, inputs: Inputs, feed: Feed, classes: int | None) -> Logits:
    """The outputs of the model of a run, which is whole in this process."""
    path = config.folder / config.distil.teacher
    saved = load(path)
    if saved.config.data.transform != config.data.transform:
        raise ConfigError(f"distil.teacher was trained with data.transform = {list(saved.config.data.transform)}, found "
                          f"{list(config.data.transform)}; set data.transform to the teacher's, or take its predictions "
                          "(distil.predictions)", file=path)
    if (apart := _apart(saved.transforms, inputs)) > APART:
        raise ConfigError(f"distil.teacher has learned other statistics of its data: after its data.transform rows of this run "
                          f"differ by {apart:.0%} of their size from those that the model gets; take the teacher's predictions "
                          "(distil.predictions)", file=path)
    dtype = saved.state().parameters.dtype
    if dtype != feed.dtype:
        raise ConfigError(f"distil.teacher has parameters in {dtype}, and this run in {feed.dtype}; set train.precision to the "
                          "teacher's, or take its predictions (distil.predictions)", file=path)
    model: Any = saved.model.eval()
    x, _ = inputs.try_some(1)
    try:
        with no_grad():
            found = int(model(feed.tensors(x)).shape[-1])
    except ShapeError as error:
        raise ConfigError(f"distil.teacher cannot take this run's samples: {error.message}", file=path) from error
    if found != classes:
        raise ConfigError(f"distil.teacher tells {found} classes apart, and the model {classes}; use a teacher of the same "
                          "classes", file=path)

    def logits(micro: MicroBatch) -> Tensor:
        with no_grad():
            outputs: Tensor = model(feed.tensors(micro.x))
        return outputs
    return logits


def _apart(transforms: Transforms, inputs: Inputs) -> float:
    """How much the first rows differ after the teacher's transforms and after this run's, whose output the teacher gets: the root
    mean square over that of the rows. Another split of one data set moves statistics by little."""
    if not transforms.names:
        return 0.0
    x, _ = inputs.training.read(np.asarray(inputs.train_rows[:ROWS], np.int64))
    theirs, ours = (np.asarray(one(x), np.float64) for one in (transforms, inputs.transforms))
    return float(np.sqrt(np.mean((theirs - ours) ** 2) / (np.mean(ours ** 2) or 1.0)))


def of_predictions(config: Config, inputs: Inputs, feed: Feed, classes: int | None) -> Logits:
    """The rows of a file of predictions, by the numbers of the samples."""
    found, source = inputs.predictions, inputs.training
    assert found is not None and isinstance(source, Dataset) and source.y is not None
    if config.data.augment:
        raise ConfigError("distil.predictions are of rows as they are in the file, and data.augment changes them; set "
                          "distil.teacher to the run, in place of distil.predictions, or leave out data.augment", file=found.path)
    if found.shape != (wanted := (*source.y.shape, classes)):
        raise ConfigError(f"distil.predictions have rows of shape {found.shape}, and the model's outputs have {wanted}; use "
                          "predictions of the same classes", file=found.path)

    def logits(micro: MicroBatch) -> Tensor:
        return Tensor(feed.device.put(found.read(micro.samples).astype(feed.dtype)))
    return logits
