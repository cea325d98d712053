"""The one table of operators and methods of Tensor: attached when `mpitrain.ops` is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpitrain.autograd import Tensor
from mpitrain.ops import elementwise, index, linalg, reduce, shape
from mpitrain.ops.activation import tanh


def _swapped(op: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    def reflected(self: Any, other: Any) -> Tensor:
        return op(other, self)
    return reflected


METHODS: dict[str, Any] = {
    "__add__": elementwise.add, "__radd__": _swapped(elementwise.add),
    "__sub__": elementwise.subtract, "__rsub__": _swapped(elementwise.subtract),
    "__mul__": elementwise.multiply, "__rmul__": _swapped(elementwise.multiply),
    "__truediv__": elementwise.divide, "__rtruediv__": _swapped(elementwise.divide),
    "__pow__": elementwise.power, "__neg__": elementwise.negative,
    "__matmul__": linalg.matmul, "__rmatmul__": _swapped(linalg.matmul),
    "__lt__": elementwise.less, "__le__": elementwise.less_equal,
    "__gt__": elementwise.greater, "__ge__": elementwise.greater_equal,
    "__getitem__": index.getitem,
    "__iter__": lambda self: (index.getitem(self, i) for i in range(len(self))),
    "sum": reduce.sum, "mean": reduce.mean, "reshape": shape.reshape, "transpose": shape.transpose,
    "exp": elementwise.exp, "log": elementwise.log, "sqrt": elementwise.sqrt, "tanh": tanh,
    "T": property(lambda self: shape.transpose(self)),
    "__array_ufunc__": None,                      # so that array + tensor asks the tensor, not each of its elements
}


def attach() -> None:
    for name, method in METHODS.items():
        setattr(Tensor, name, method)
