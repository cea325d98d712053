"""One sample through the model before training starts: do data, model and loss fit?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any

from mpitrain.autograd import Tensor, no_grad
from mpitrain.comm.face import Objects
from mpitrain.comm.job.together import everywhere, on_first
from mpitrain.data import Dataset, scan_labels
from mpitrain.errors import ConfigError, GraphError, ShapeError
from mpitrain.parallel.pipeline.inference import Inference
from mpitrain.placement.place import Placement
from mpitrain.registry import call, named
from mpitrain.train.build.inputs import Inputs


def try_one_sample(inference: Inference, loss: Any, inputs: Inputs, placement: Placement,
                   output_shape: Callable[[Any], tuple[int, ...]], control: Objects | None = None) -> int | None:
    """Runs one sample through augmentations and the model, so that what does not fit, or fails, is found before training starts.

    `output_shape` makes the shape of the model's output from that of this rank's part. To train, ranks are connected by
    `control`, and labels, all of them, and the loss are tried as well. Returns the number of classes (size of the output's last
    dim) if the targets are labels. It communicates.
    """
    x, y = inputs.try_two()
    file = inputs.training.where(0)[0]
    placement.refuse_samples(x, y)
    outputs: list[Tensor] = []
    try:
        call(lambda: outputs.extend(output for output, _ in inference.run([(x, y)])), "the model, run on one sample,", {})
    except ShapeError as error:
        what = f"samples of shape {x.shape[1:]} ({x.dtype})" if inference.stage.index == 0 else "what the stage before gives"
        raise ShapeError(f"the model cannot take {what}: {error.message}; change the model's sizes or the data",
                         file=file) from error
    found = outputs[0].shape if outputs else None
    shape, host_y, y = output_shape(found), y, inference.feed.part(y)
    classes = loss.kind == "classes"
    fits = shape[:-1] == y.shape if classes else without_ones(shape[1:]) == without_ones(y.shape[1:])
    if not fits:
        wanted = f"{y.shape[1:]} and a last dim of classes" if classes else f"{y.shape[1:]}"
        raise ShapeError(f"the model's output for one sample is {shape[1:]}, the targets are {y.shape[1:]} ({y.dtype}) "
                         f"and want {wanted}; change the model's outputs or train.loss", file=file)
    if classes and y.dtype.kind not in "biu":
        raise ShapeError(f"the loss wants integer labels, the targets are {y.dtype}; change train.loss", file=file)
    n_classes = int(shape[-1]) if classes else None
    if control is not None:
        for source in (inputs.training, inputs.validation if inputs.validation is not inputs.training else None):
            if isinstance(source, Dataset) and n_classes is not None:
                on_first(control, partial(scan_labels, source, n_classes))
        everywhere(control, lambda: try_loss(loss, outputs, inference.feed.targets(host_y), y))
    return n_classes


def try_loss(loss: Any, outputs: Sequence[Tensor], target: Any, counted: Any) -> None:
    """ConfigError where the loss fails on an output, or gives no sum; `counted` is the target on the host."""
    what = f'train.loss, "{named(loss)}",'
    for output in outputs:
        try:
            with no_grad():
                found = call(loss, what, {}, output, target)
        except (GraphError, ShapeError) as error:
            raise ConfigError(f"{what} failed: {error.message}") from error
        if not isinstance(found, Tensor) or found.shape:
            of_shape = f" of shape {found.shape}" if isinstance(found, Tensor) else ""
            raise ConfigError(f"{what} must return the sum of its terms, a Tensor without dims, found {named(found)}{of_shape}")
        count = call(loss.count, f"the count of {what}", {}, counted)
        if not isinstance(count, Real):
            raise ConfigError(f"the count of {what} must be the number of its terms, found {named(count)}")


def without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A target (B,) fits an output (B, 1): losses of numbers ignore dims of size 1."""
    return tuple(n for n in shape if n != 1)
