"""A sample or a few through the model before training starts: do data, model and loss fit?"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpitrain.arguments import call
from mpitrain.autograd import Tensor
from mpitrain.backend import array_module, asnumpy
from mpitrain.comm.face import Objects
from mpitrain.comm.job.guard import symmetric
from mpitrain.comm.job.together import everywhere, on_first
from mpitrain.comm.messages.link import Abandoned
from mpitrain.data import Dataset, scan_labels, scan_targets
from mpitrain.data.columns import Columns
from mpitrain.errors import ConfigError, DesyncError, GraphError, MpitrainError, ShapeError, with_place
from mpitrain.nn.loss import terms
from mpitrain.nn.module import Module
from mpitrain.parallel.pipeline.inference import Inference, given_to
from mpitrain.placement.place import Placement
from mpitrain.registry import is_own, named
from mpitrain.schedules.grid import Grid
from mpitrain.train.build.inputs import BALANCED, Balanced, Inputs
from mpitrain.train.build.names import refuse_names

ROWS = 4                     # samples on which a user's loss is tried, as a whole and in two unequal parts
CLOSE = 1e-4                 # the sum over float32 samples in another order is nearer than this part of it
APART = 1e-2                 # outputs of one sample, of one model on two processors, in bfloat16 perhaps, are nearer than this
ELEMENTS = 1 << 16           # of an output are compared, about
AGAIN = 1e-5                 # and those of two passes on one processor, which may sum in another order each time


class Trial(NamedTuple):
    """The number of classes (size of the output's last dim) if the targets are labels, the label that the loss leaves out, and
    what is worth a line."""

    n_classes: int | None
    ignore: int | None
    notes: Sequence[str]
    shape: tuple[int, ...]                   # of the output for these samples


def try_samples(inference: Inference, loss: Any, inputs: Inputs, placement: Placement,
                output_shape: Callable[[Any], tuple[int, ...]], control: Objects | None = None) -> Trial:
    """Runs a sample through augmentations and the model, so that what does not fit, or fails, is found before training starts.

    `output_shape` makes the shape of the model's output from that of this rank's part. To train, ranks are connected by
    `control`, and labels, all of them, and the loss are tried as well; a user's loss gets a few samples. It communicates.
    """
    x, y = inputs.try_some(ROWS if control is not None and is_own(loss) else 1)
    file = inputs.training.where(0)[0]
    refuse_names(inference.stage.whole, x)
    placement.refuse_samples(x, y)
    if control is not None and isinstance(x, Columns):
        from mpitrain.train.build.extremes import try_extremes  # few models have inputs by name
        try_extremes(inference, inputs, control)
    outputs = outputs_of(inference, x, y, file) if control is None else agreed_outputs(control, inference, x, y, file)
    found = outputs[0].shape if outputs else None
    shape, host_y, y = output_shape(found), y, inference.feed.part(y)
    classes = loss.kind == "classes"
    if classes and y.dtype.kind not in "iu":
        raise ShapeError(f"the loss wants integer labels, the targets are {y.dtype}; store integers, or change train.loss",
                         file=file)
    fits = shape[:-1] == y.shape if classes else loss.kind == "rows" or without_ones(shape[1:]) == without_ones(y.shape[1:])
    if not fits:
        wanted = f"{y.shape[1:]} and a last dim of classes" if classes else f"{y.shape[1:]}"
        if classes and y.shape[1:] == (1,) and len(shape) == 2:
            wanted += ", or to be stored as one label a row"
        elif not classes and y.dtype.kind in "iu" and shape[:-1] == y.shape:
            wanted += ', unless they are labels of classes, as train.loss = "cross_entropy" takes them'
        own = f', or set kind = "rows" in {named(loss)} if it takes such targets' if is_own(loss) else ""
        raise ShapeError(f"the model's output for one sample is {shape[1:]}, the targets are {y.shape[1:]} ({y.dtype}) "
                         f"and want {wanted}; change the model's outputs or train.loss{own}", file=file)
    n_classes, ignore, told = int(shape[-1]) if classes else None, getattr(loss, "ignore_index", None), list[str]()
    if control is not None:
        for source in (inputs.training, inputs.validation if inputs.validation is not inputs.training else None):
            if isinstance(source, Dataset):
                scan = partial(scan_labels, source, n_classes, ignore) if classes else partial(scan_targets, source, loss)
                on_first(control, scan)
        told = everywhere(control, lambda: try_loss(loss, outputs, inference.feed.targets(host_y), y))
    return Trial(n_classes, ignore, list(dict.fromkeys(filter(None, told))), shape)


def agreed_outputs(control: Objects, inference: Inference, x: Any, y: Any, file: str) -> list[Tensor]:
    """`outputs_of`, whose error is raised on the ranks of all stages alike, though one stage met it: nobody waits for it."""
    if inference.stage.n_stages == 1:
        return outputs_of(inference, x, y, file)
    outputs, own = list[Tensor](), list[MpitrainError]()

    def run() -> None:
        try:
            with suppress(Abandoned):
                outputs.extend(outputs_of(inference, x, y, file, agreeing=True))
        except MpitrainError as error:
            own.append(error)
            raise
    try:
        everywhere(control, run)
    except MpitrainError as error:
        raise error from (own[0] if own else None)
    return outputs


def outputs_of(inference: Inference, x: Any, y: Any, file: str, *, agreeing: bool = False) -> list[Tensor]:
    """The model's output for some samples of `file`, as a list of one, on ranks that have it; ShapeError where it cannot take
    them."""
    outputs: list[Tensor] = []
    try:
        call(lambda: outputs.extend(output for output, _ in inference.run([(x, y)], agreeing=agreeing)),
             "the model, run on one sample,", {})
    except ShapeError as error:
        made_float = not inference.feed.tokens and not isinstance(x, Columns) and x.dtype.kind in "biu"
        cast = f", cast to {inference.feed.dtype}" if made_float else ""
        what = "what the stage before gives" if inference.stage.index else f"samples of shape {x.shape[1:]} ({x.dtype}{cast})"
        advice = "" if ";" in error.message else "; change the model's sizes or the data"       # it may have some of its own
        raise ShapeError(f"the model cannot take {what}: {with_place(error.message, layer_of(error))}{advice}",
                         file=file) from error
    for output in outputs:
        if not isinstance(output, Tensor):
            raise ConfigError(f"the model must return a Tensor, found {named(output)}: training needs its graph, so compute it "
                              "with mpitrain.ops, or methods of Tensor, on Tensors all the way, and return it")
    return outputs


def layer_of(error: ShapeError) -> str:
    """``in the layer "head" (Linear)``: the innermost that was running when the error came; "" where none has a name."""
    running = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = [module for module in running if isinstance(module, Module) and module.path]
    return f'in the layer "{inside[-1].path}" ({type(inside[-1]).__name__})' if inside else ""


def try_replicas(model: Module, inference: Inference, inputs: Inputs, mesh: Grid, control: Objects) -> list[str]:
    """Whether a user's model, given one sample twice, gives the same on all ranks that should; it communicates.

    DesyncError, on all ranks, where one rank's replica is another function, apart from its parameters: their comparison during
    training never sees that. A line about a model that gives something else at each pass.
    """
    if not any(is_own(module) for _, module in model.named_modules()):
        return []
    sample = inputs.sample()
    passes = [[digest(output) for output, _ in inference.run([sample])] for _ in range(2)]
    where = [mesh.coordinate(axis) for axis in ("pp", "cp", "tp")]            # ranks that differ along dp and ep have all rows
    everyone = control.gather_objects([where, *passes])
    if any(not alike(first, second, AGAIN) for _, first, second in everyone):
        return [f"{named(model)} gives another output for one sample at each pass: with random numbers that run.seed does not "
                "set, no run gives the same bits twice, and ranks train on different noise"]
    places: dict[str, list[int]] = {}
    for rank, (place, *_) in enumerate(everyone):
        places.setdefault(str(place), []).append(rank)
    for ranks in places.values():
        most = max(ranks, key=lambda rank: sum(alike(everyone[rank][1], everyone[other][1]) for other in ranks))
        refuse_other(model, [(rank, everyone[rank][1]) for rank in (most, *ranks)])
    return []


def refuse_other(model: Module, found: Sequence[tuple[int, list[list[float]]]]) -> None:
    """DesyncError, for all ranks, unless what each has found is like the first's."""
    most, wanted = found[0]
    for rank, own in found:
        if not alike(own, wanted):
            with symmetric():
                raise DesyncError(f"{named(model)} gives another output for one sample and equal parameters on rank {rank} (mean "
                                  f"size {own[0][0]:.6g}) than on rank {most} ({wanted[0][0]:.6g}): something in it differs by "
                                  "rank, such as a random number drawn when it is made, the rank's number or a file; make it the "
                                  "same on all ranks, as a buffer if it is an array")


def digest(output: Tensor) -> list[float]:
    """Two numbers for elements spread over an output: their mean size, and their mean with weights that differ by place."""
    array = output.array.reshape(-1)
    values = asnumpy(array[::max(array.size // ELEMENTS, 1)]).astype(np.float64)
    n = max(values.size, 1)
    return [float(np.abs(values).sum()) / n, float(values @ np.cos(np.arange(values.size))) / n]


def alike(some: Sequence[Sequence[float]], others: Sequence[Sequence[float]], near: float = APART) -> bool:
    """Whether digests are as near, as a part of the mean size, as those of one function; what is not finite is alike."""
    return all(not math.isfinite(a[0] + b[0]) or max(abs(a[0] - b[0]), abs(a[1] - b[1])) <= near * max(a[0], b[0])
               for a, b in zip(some, others))


def try_loss(loss: Any, outputs: Sequence[Any], target: Any, counted: Any) -> str:
    """ConfigError where the loss fails on an output, or gives no sum; `counted` is the target on the host. A line about a loss
    that is neither a sum nor a mean."""
    what, note = f'train.loss, "{named(loss)}",', ""
    if getattr(loss, "reduction", "sum") != "sum":
        raise ConfigError(f'{what} has reduction = "{loss.reduction}", and the run divides by the number of terms over all ranks '
                          'itself; set reduction = "sum"')
    refuse_weight(what, getattr(loss, "counted_weight", None))
    for output in outputs:
        refuse_balanced(loss, output)
        try:
            with given_to(loss, output) as given:
                found = call(loss, what, {}, given, target)
        except (GraphError, ShapeError) as error:
            raise ConfigError(f"{what} failed: {error.message}") from error
        if not isinstance(found, Tensor) or found.shape:
            of_shape = f" of shape {found.shape}" if isinstance(found, Tensor) else ""
            raise ConfigError(f"{what} must return the sum of its terms, a Tensor without dims, found {named(found)}{of_shape}")
        call(terms, f"the count of {what}", {}, loss, counted)
        if is_own(loss) and len(target) > 1:
            note = try_constant(loss, what, output, target) or try_sum(loss, what, output, target, counted)
    return note


def refuse_weight(what: str, weight: Any) -> None:
    """ConfigError unless `weight` is None, or a number for each class, 0 or more: the run divides by a sum of them."""
    if weight is None:
        return
    try:
        given = asnumpy(weight.array if isinstance(weight, Tensor) else weight)
    except ValueError:                                        # lists of unequal lengths
        given = np.zeros(0)
    if given.ndim != 1 or given.dtype.kind not in "fiu" or not (given >= 0).all() or not given.any():
        raise ConfigError(f"{what} has weights whose sum over labels the run divides by: weight has a number for each class, 0 "
                          f"or more, and not all 0, found {str(weight)[:60]}")


def refuse_balanced(loss: Any, output: Tensor) -> None:
    """ConfigError where weights that balance the labels found are not as many as the model's outputs."""
    kept = getattr(loss, "__dict__", {})
    options = kept.get("options", {})
    weights = next((value for value in (*kept.values(), *options.values()) if isinstance(value, Balanced)), None)
    outputs = output.shape[options.get("dim", -1)]
    if weights is not None and len(weights) != outputs:
        raise ConfigError(f'train.weight = "{BALANCED}": the training rows have labels 0 to {len(weights) - 1}, and the model '
                          f"has {outputs} outputs; set its outputs to {len(weights)}, or give a list of {outputs} numbers")


def try_constant(loss: Any, what: str, output: Tensor, target: Any) -> str:
    """ConfigError for a loss that has one value, not 0, for outputs that are nothing alike; a line where that is 0, since all of
    these samples may be such as do not count."""
    array, values = output.array, list[float]()
    ramp = array_module(array).arange(array.size, dtype=array.dtype).reshape(array.shape) % 7      # a model may begin with zeros
    others = (array, -array, array[::-1] * array, array + ramp)
    with suppress(Exception):                                 # it may not like the values that we make up
        for other in others:
            values.append(alone(loss, Tensor(other), target))
    value = values[0] if values else math.nan
    if len(values) < len(others) or len(set(values)) != 1 or not math.isfinite(value):
        return ""
    found = f"{what} is {value:.6g} for {len(target)} samples, whatever the model gives for them"
    if value:
        raise ConfigError(f"{found}, so training would change nothing: compute it from the model's output")
    return f"{found}; if that is so for all samples, training changes nothing"


def alone(loss: Any, output: Tensor, target: Any) -> float:
    """The value of a loss."""
    with given_to(loss, output) as given:
        return float(asnumpy(loss(given, target).array))


def try_sum(loss: Any, what: str, output: Tensor, target: Any, counted: Any) -> str:
    """Whether the loss of some samples is the sum of the losses of the first and the others.

    ConfigError for a mean, whose sum over micro-batches and ranks, divided by the number of terms, is too small; a line for
    what is neither, such as a loss of pairs of samples.
    """
    bounds = [(0, len(target)), (0, 1), (1, len(target))]
    whole, *parts = (alone(loss, Tensor(output.array[a:b]), target[a:b]) for a, b in bounds)
    near = CLOSE * (abs(whole) + sum(map(abs, parts)))
    if not math.isfinite(near) or abs(whole - sum(parts)) <= near:
        return ""
    found = (f"{whole:.6g} for {len(target)} samples, {parts[0]:.6g} for the first of them and {parts[1]:.6g} for the others")
    for n, *sizes in ([b - a for a, b in bounds], [float(loss.count(counted[a:b])) for a, b in bounds]):
        if abs(n * whole - sum(size * part for size, part in zip(sizes, parts))) <= max(n, 1) * near:
            raise ConfigError(f"{what} gives the mean over its samples ({found}), and the run divides by the number of terms, "
                              "count(target), once more, over all ranks: return the sum over rows")
    return (f"{what} is not a sum over its samples ({found}), so results depend on the number of ranks and micro-batches; keep "
            "train.micro_batches the same")


def without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A target (B,) fits an output (B, 1): losses of numbers ignore dims of size 1."""
    return tuple(n for n in shape if n != 1)
