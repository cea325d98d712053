"""A list of the operations that run: what capture of graphs, export and quantization read.

    with record() as operations:
        model(x)

Each use of a Function is an Operation, in the order of the program: also under `no_grad`, in the first run of a block that is
recomputed, and of a user's own Functions. Who has the list computes the same for other inputs with `Function.forward` alone. What
changes an array in place, and what NumPy computes outside of Functions, is not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np

from mpitrain.autograd.mode import mode, recorders
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, is_array

PLAIN = (type(None), bool, int, float, str, bytes, slice, EllipsisType, np.dtype, np.generic)


class Value:
    """An array that goes from operation to operation, or into the first ones.

    `array` is what no operation computed: a parameter or a buffer, which have a `name`, an input or a constant; None of results.
    """

    __slots__ = ("array", "dtype", "name", "number", "shape")

    def __init__(self, number: int, array: Array, name: str = "", *, computed: bool = False):
        self.number, self.name = number, name
        self.shape, self.dtype = tuple(array.shape), array.dtype
        self.array = None if computed else array

    def __repr__(self) -> str:
        return f"{self.name or f'%{self.number}'}: {self.dtype}{list(self.shape)}"


class Operation(NamedTuple):
    """One use of `function`."""

    function: type[Any]
    inputs: tuple[Any, ...]               # a Value for each array; numbers and None as they are
    outputs: tuple[Value, ...]
    attributes: dict[str, Any]            # keyword arguments that are plain values, or tuples and dataclasses of them
    links: dict[str, Any]                 # the other keyword arguments: reductions over ranks, callbacks
    path: str                             # the name of the module it ran in; "" outside of all of them

    @property
    def name(self) -> str:
        return self.function.__name__


class _Recorder:
    """Keeps the arrays alive while it records: an array is known by its identity."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.outer = mode.recorder
        self._values: dict[int, tuple[Value, Array]] = {}
        self._count = 0

    def __call__(self, function: type[Any], inputs: tuple[Any, ...], params: dict[str, Any], outputs: tuple[Tensor, ...]) -> None:
        if function.recorded and not mode.recomputing:
            given = tuple([self._value(x) for x in inputs])
            attributes = {key: value for key, value in params.items() if is_plain(value)}
            links = {key: value for key, value in params.items() if key not in attributes}
            made = tuple([self._new(tensor.array, computed=True) for tensor in outputs])
            self.operations.append(Operation(function, given, made, attributes, links, mode.path))
        if self.outer is not None:
            self.outer(function, inputs, params, outputs)

    def _value(self, x: Any) -> Any:
        array = x.array if isinstance(x, Tensor) else x
        if not is_array(array):
            return array
        name = getattr(x, "name", "")
        value = self._values[id(array)][0] if id(array) in self._values else self._new(array)
        value.name = value.name or name
        return value

    def _new(self, array: Array, *, computed: bool = False) -> Value:
        value = Value(self._count, array, computed=computed)
        self._count += 1
        self._values[id(array)] = value, array
        return value


@contextmanager
def record() -> Iterator[list[Operation]]:
    """While it is entered, the operations of this thread are added to the list that it gives; recorders may be nested."""
    before, mode.recorder = mode.recorder, (recorder := _Recorder())
    recorders.append(recorder)
    try:
        yield recorder.operations
    finally:
        mode.recorder = before
        recorders.remove(recorder)


def within(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, whose operations are those of the module `path`."""
    def named(*inputs: Any, **more: Any) -> Any:
        before, mode.path = mode.path, path
        try:
            return forward(*inputs, **more)
        finally:
            mode.path = before
    return named


def is_plain(value: Any) -> bool:
    """Whether a value means the same in another program: numbers, words, and tuples and dataclasses of them."""
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    return all(map(is_plain, value)) if isinstance(value, (tuple, list)) else isinstance(value, PLAIN)
