"""A model's forward as a list of calls, without tensors, contexts and modules: of an operation its arithmetic is left.

    forward = Recorded(model)
    output = forward(Tensor(x))                          # one list for each shape of x

The list is that of `autograd.record`, which runs the model once for each shape, and batch norm is folded into the layers before
it. A row's bits are those that it has alone, and in any other batch (`rows_alone`). What a record may miss is found out first:
the model is run on other values too, the two records must be alike but for what depends on the input, and the list must give the
model's own bits. Models of which that is not so, those with classes of the user's own, and those whose operations ask other ranks
run as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np

from mpitrain.autograd import Context, Operation, Tensor, Value, no_grad, record, row_by_row
from mpitrain.backend import Array
from mpitrain.infer.prepared import Packed, prepared
from mpitrain.kernels.pointwise import relu
from mpitrain.kernels.product import work_bytes
from mpitrain.nn import Module
from mpitrain.nn.by_name import ByName
from mpitrain.ops.activation import Relu
from mpitrain.ops.conv import Conv2d
from mpitrain.ops.elementwise import Add
from mpitrain.ops.linalg import Linear
from mpitrain.registry import is_own
from mpitrain.shrink.fold import folded

MOST_KEPT = 32                            # lists: of the shapes that came last
FRESH = (Add, Conv2d, Linear)             # what they give is memory of its own, in which ReLU may be computed
NEAR = 1e-3                               # norms that are folded change less than this part of the largest output


def rows_alone(x: Any) -> AbstractContextManager[None]:
    """While it is entered, a row's bits do not depend on the rows beside it; but on a GPU, and without a C compiler, where this
    would take long."""
    return row_by_row() if type(x) is np.ndarray and work_bytes() else nullcontext()


class Plain(Context):
    """What an operation's forward gets in place of a node of the graph: it keeps nothing for a backward."""

    def save(self, *arrays: Any) -> None:
        pass


class Recorded:
    """`model`, in eval mode, as a function of a batch."""

    def __init__(self, model: Module):
        self.model = model
        self.may_record = not any(is_own(module) for _, module in model.named_modules())
        self._lists: dict[tuple[Any, ...], Callable[[Array], Array]] = {}
        self._packed: Packed = {}
        self._known: Record | None = None                     # of a shape whose list was found to be the model
        leaves = [*model.named_parameters(), *model.named_buffers()]
        self._versions = [leaf.shared_version() for _, leaf in leaves]
        self._counts = [version.count for version in self._versions]

    def __call__(self, given: Any) -> Tensor:
        return ByRows(self.model)(given) if isinstance(given, ByName) else Tensor(self.of(given.array))

    def of(self, x: Array) -> Array:
        """The output for an array."""
        counts = [version.count for version in self._versions]
        if counts != self._counts:                # other values, as of `load_state_dict`: lists have old ones, packed and folded
            self._lists, self._packed, self._known, self._counts = {}, {}, None, counts
        with rows_alone(x):
            forward = self._lists.get((x.shape, x.dtype.char))
            return (forward or self._new(x))(x)

    def _new(self, x: Array) -> Callable[[Array], Array]:
        while len(self._lists) >= MOST_KEPT:
            del self._lists[next(iter(self._lists))]
        found = recorded(self.model, x, self._packed, self._known) if self.may_record and type(x) is np.ndarray else None
        if found is not None and self._known is None:
            self._known = found[1]
        forward = self._lists[x.shape, x.dtype.char] = self._as_it_is if found is None else found[0]
        return forward

    def _as_it_is(self, x: Array) -> Array:
        with no_grad():
            return self.model(Tensor(x)).array


class ByRows:
    """A model that cannot be recorded, as it is; rows have bits of their own where its layers allow it."""

    def __init__(self, model: Module):
        self.model = model

    def __call__(self, given: Any) -> Tensor:
        first = next(iter(given.values())) if isinstance(given, ByName) else given
        with no_grad(), rows_alone(first.array):
            output: Tensor = self.model(given)
        return output


def recorded(model: Module, x: Array, packed: Packed, known: Record | None = None
             ) -> tuple[Callable[[Array], Array], Record] | None:
    """The list of calls for inputs of x's shape and dtype, and what it was made of; None where it would not be the model. The
    values of x play no part. Where the program is that of a list that is `known` to be the model, constants are known not to
    depend on the input, and folded norms to be near."""
    first, other = _examples(x)
    one = _record(model, first)
    if one is None:
        return None
    again = known is not None and _alike(one, known, of_one_shape=False)
    another = one if again else _record(model, other)
    if another is None or not again and not _alike(one, another):
        return None
    operations, given, result, output = one
    forward = Calls(operations, given, result, packed)
    if not np.array_equal(forward(first if again else other), another[3], equal_nan=True):
        return None
    fewer = folded(operations, result)
    if len(fewer) == len(operations):
        return forward, one
    quicker = Calls(fewer, given, result, packed)
    near = again or np.abs(quicker(first) - output).max() <= NEAR * np.abs(output).max()
    return (quicker if near else forward), one


def _examples(x: Array) -> tuple[Array, Array]:
    """Two inputs of x's shape with other values each; of tokens those that every vocabulary has."""
    ramp = np.arange(x.size).reshape(x.shape)
    if x.dtype.kind != "f":
        return (ramp % 2).astype(x.dtype), ((ramp // 2 + 1) % 2).astype(x.dtype)
    return np.sin(ramp).astype(x.dtype), np.cos(1.7 * ramp).astype(x.dtype)


Record = tuple[list[Operation], Value, Value, Array]


def _record(model: Module, x: Array) -> Record | None:
    """(operations, the input, the output, its array); None where a list of their forwards would not do."""
    with no_grad(), record() as operations:
        output = model(Tensor(x))
    made = {value.number: value for one in operations for value in one.outputs}
    given = [value for one in operations for value in one.inputs if isinstance(value, Value) and value.array is x]
    result = operations[-1].outputs[0] if operations else None
    plain = all(not one.links and _takes_its_inputs(one) for one in operations)
    if not given or result is None or not isinstance(output, Tensor) or not plain or result.number not in made:
        return None
    return operations, given[0], result, output.array


def _takes_its_inputs(operation: Operation) -> bool:
    """Whether `Function.apply` gives forward the arrays as they are; of integers it may make floats."""
    function, arrays = operation.function, [value for value in operation.inputs if isinstance(value, Value)]
    changes = function.makes_floats or function.is_arithmetic
    return bool(arrays) and not (changes and any(value.dtype.kind not in "fc" for value in arrays))


def _alike(one: Record, another: Record, *, of_one_shape: bool = True) -> bool:
    """Whether two records are of one program; constants must be equal, or they would depend on the input. For inputs of other
    shapes operations are told other numbers."""
    if len(one[0]) != len(another[0]) or one[1].number != another[1].number or one[2].number != another[2].number:
        return False
    return all(a.function is b.function and (not of_one_shape or a.attributes == b.attributes) and len(a.inputs) == len(b.inputs)
               and all(_same(x, y, one[1].number) for x, y in zip(a.inputs, b.inputs))
               and [value.number for value in a.outputs] == [value.number for value in b.outputs]
               for a, b in zip(one[0], another[0]))


def _same(x: Any, y: Any, given: int) -> bool:
    if not (isinstance(x, Value) and isinstance(y, Value)):
        return type(x) is type(y) and bool(x == y)
    if x.number != y.number or x.array is None or y.array is None:
        return x.number == y.number and x.array is y.array
    return x.number == given or x.array is y.array or np.array_equal(x.array, y.array)


class Calls:
    """Calls of functions on numbered places, of which the first has the input; an array is let go after its last use."""

    def __init__(self, operations: Sequence[Operation], given: Value, result: Value, packed: Packed):
        self._places, self._start = {given.number: 0}, list[Any]([None])
        users = Counter(value.number for one in operations for value in one.inputs if isinstance(value, Value))
        last = {value.number: i for i, one in enumerate(operations) for value in one.inputs if isinstance(value, Value)}
        makers = {value.number: one.function for one in operations for value in one.outputs}
        self._steps: list[tuple[Callable[..., Any], Callable[[Any], Any], Any, tuple[int, ...]]] = []
        for i, one in enumerate(operations):
            function: Callable[..., Any] | None = prepared(one, packed)
            given_to = one.inputs if function is None else one.inputs[:1]
            function = function or partial(one.function.forward, Plain(one.function, np, (False,) * len(one.inputs)),
                                           **one.attributes)
            x = one.inputs[0]
            if (one.function is Relu and isinstance(x, Value) and makers.get(x.number) in FRESH
                    and users[x.number] == 1):
                function = _relu_inside
            inputs, outputs = [self._place(value) for value in given_to], [self._place(value) for value in one.outputs]
            gone = tuple(self._places[n] for n, at in last.items() if at == i and n in makers and n != result.number)
            taken = itemgetter(*inputs) if len(inputs) > 1 else itemgetter(slice(inputs[0], inputs[0] + 1))
            self._steps.append((function, taken, outputs[0] if len(outputs) == 1 else outputs, gone))
        self._result = self._places[result.number]

    def _place(self, value: Any) -> int:
        """That of a value, which has one of its own the first time; plain numbers and None always have."""
        number = value.number if isinstance(value, Value) else None
        if number in self._places:
            return self._places[number]
        self._start.append(value.array if isinstance(value, Value) else value)
        if number is not None:
            self._places[number] = len(self._start) - 1
        return len(self._start) - 1

    def __call__(self, x: Array) -> Array:
        values = self._start.copy()
        values[0] = x
        for function, inputs, outputs, gone in self._steps:
            found = function(*inputs(values))
            if type(outputs) is int:
                values[outputs] = found
            else:
                for place, one in zip(outputs, found):
                    values[place] = one
            for place in gone:
                values[place] = None
        output: Array = values[self._result]
        return output


def _relu_inside(x: Array) -> Array:
    """In C where there is some: NumPy's maximum with a number takes 8 times as long (2026-11)."""
    if x.dtype.char in "fd" and x.flags.c_contiguous:
        made: Array = relu(x, x)
        return made
    return np.maximum(x, x.dtype.type(0), out=x)
