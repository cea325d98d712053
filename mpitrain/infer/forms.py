"""What is kept of a model's output: the output itself, or, where the loss says what it means, probabilities or classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpitrain import ops
from mpitrain.autograd import Tensor, no_grad
from mpitrain.backend import NO_CLASS, Array, asnumpy, class_of_rows
from mpitrain.data import Transforms
from mpitrain.errors import UsageError

OUTPUTS = "outputs"
CLASSES = "classes"
NAMES = (OUTPUTS, CLASSES, "probabilities")


class Words(NamedTuple):
    """What the user calls the two choices."""

    keep: str
    inverse: str


OPTIONS, ARGUMENTS = Words("--as", "--inverse"), Words("keep", "inverse")         # of the verb, and of `TrainedModel.predict`


class Form(NamedTuple):
    """`made` turns outputs (rows, ...) into what is kept of them, on the host; it treats each row by itself."""

    name: str
    made: Callable[[Array], Any]


def form(name: str, loss: Any, undone: Transforms | None = None, said: Words = OPTIONS) -> Form:
    """The form of that name for a model that was trained with `loss`; `undone` are transforms of its targets, undone in outputs.
    UsageError where the loss knows no classes."""
    if name not in NAMES:
        raise UsageError(f'{said.keep} "{name}" is not one of {", ".join(NAMES)}')
    if name == OUTPUTS:
        return Form(name, asnumpy if undone is None else lambda outputs: undone.inverse(asnumpy(outputs)))
    if undone is not None:
        raise UsageError(f'{said.inverse} gives outputs in the units of the targets, and {said.keep} "{name}" asks for '
                         "others; leave out one")
    given = getattr(loss, "outputs_are", "logits")
    made = KINDS.get((loss.kind, given, name))
    if made is None and (loss.kind, given, "classes") in KINDS:
        raise UsageError(f'{said.keep} "{name}" takes logits or probabilities, and the outputs of a model trained with '
                         f'"{type(loss).__name__}" are {given}; take "classes"')
    if made is None:
        raise UsageError(f'{said.keep} "{name}" is for models trained with a loss of classes, and this run\'s is '
                         f'"{type(loss).__name__}" (kind "{loss.kind}"); leave out {said.keep}')
    return Form(name, made)


def undone(transforms: Transforms, said: Words = OPTIONS) -> Transforms:
    """The transforms of the targets. UsageError where there are none."""
    if transforms.targets is None:
        raise UsageError(f"{said.inverse} undoes data.target_transform, and this run was trained without; leave it out")
    return transforms.targets


def largest(outputs: Array) -> Any:
    """The class of the largest output of each row, int64: the first of equal ones, NO_CLASS where one is NaN."""
    return asnumpy(class_of_rows(outputs))


def softmax(outputs: Array) -> Any:
    with no_grad():
        return asnumpy(ops.softmax(Tensor(outputs), -1).array)


def above(limit: float) -> Callable[[Array], Any]:
    """1 where an output is above, NO_CLASS where it is NaN: a logit above 0 and a probability above a half are alike."""
    return lambda outputs: np.where(np.isnan(asnumpy(outputs)), NO_CLASS, asnumpy(outputs > limit).astype(np.int64))


def sigmoid(outputs: Array) -> Any:
    with no_grad():
        return asnumpy(ops.sigmoid(Tensor(outputs)).array)


KINDS = {("classes", "logits", "classes"): largest, ("classes", "logits", "probabilities"): softmax,
         ("classes", "probabilities", "classes"): largest, ("classes", "probabilities", "probabilities"): asnumpy,
         ("classes", "scores", "classes"): largest,
         ("binary", "logits", "classes"): above(0), ("binary", "logits", "probabilities"): sigmoid,
         ("binary", "probabilities", "classes"): above(0.5), ("binary", "probabilities", "probabilities"): asnumpy}
