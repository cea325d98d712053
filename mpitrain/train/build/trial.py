"""One sample through the model before training starts: do data, model and loss fit?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpitrain.errors import ShapeError
from mpitrain.parallel.pipeline.inference import Inference
from mpitrain.placement.place import Placement
from mpitrain.train.build.inputs import Inputs


def try_one_sample(inference: Inference, loss: Any, inputs: Inputs, placement: Placement,
                   output_shape: Callable[[Any], tuple[int, ...]]) -> int | None:
    """Runs one sample through the model, so that shapes that do not fit are found before training starts.

    `output_shape` makes the shape of the model's output from that of this rank's part. Returns the number of classes (size of
    the output's last dim) if the targets are labels. It communicates if the model is cut.
    """
    x, y = inputs.sample()
    file = inputs.training.where(0)[0]
    placement.refuse_samples(x, y)
    found = None
    try:
        for output, _ in inference.run([(x, y)]):
            found = output.shape
    except ShapeError as error:
        what = f"samples of shape {x.shape[1:]} ({x.dtype})" if inference.stage.index == 0 else "what the stage before gives"
        raise ShapeError(f"the model cannot take {what}: {error.message}; change the model's sizes or the data",
                         file=file) from error
    shape, y = output_shape(found), inference.feed.part(y)
    classes = loss.kind == "classes"
    fits = shape[:-1] == y.shape if classes else without_ones(shape[1:]) == without_ones(y.shape[1:])
    if not fits:
        wanted = f"{y.shape[1:]} and a last dim of classes" if classes else f"{y.shape[1:]}"
        raise ShapeError(f"the model's output for one sample is {shape[1:]}, the targets are {y.shape[1:]} ({y.dtype}) "
                         f"and want {wanted}; change the model's outputs or train.loss", file=file)
    if classes and y.dtype.kind not in "biu":
        raise ShapeError(f"the loss wants integer labels, the targets are {y.dtype}; change train.loss", file=file)
    return int(shape[-1]) if classes else None


def without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A target (B,) fits an output (B, 1): losses of numbers ignore dims of size 1."""
    return tuple(n for n in shape if n != 1)
