"""The one table of operators and methods of Tensor: attached when `mpitrain.ops` is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from mpitrain.autograd import Tensor
from mpitrain.ops import elementwise, index, linalg, reduce, shape
from mpitrain.ops.activation import tanh


def _swapped(op: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    def reflected(self: Any, other: Any) -> Tensor:
        return op(other, self)
    return reflected


def _later(name: str) -> Callable[..., Any]:
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(sys.modules[__package__], name)(self, *args, **kwargs)
    method.__name__ = method.__qualname__ = name
    return method


METHODS: dict[str, Any] = {
    "__add__": elementwise.add, "__radd__": _swapped(elementwise.add),
    "__sub__": elementwise.subtract, "__rsub__": _swapped(elementwise.subtract),
    "__mul__": elementwise.multiply, "__rmul__": _swapped(elementwise.multiply),
    "__truediv__": elementwise.divide, "__rtruediv__": _swapped(elementwise.divide),
    "__pow__": elementwise.power, "__rpow__": _swapped(elementwise.power), "__neg__": elementwise.negative,
    "__abs__": elementwise.absolute,
    "__floordiv__": _later("floor_divide"), "__rfloordiv__": _swapped(_later("floor_divide")),
    "__mod__": _later("remainder"), "__rmod__": _swapped(_later("remainder")),
    "__and__": _later("bitwise_and"), "__rand__": _swapped(_later("bitwise_and")),
    "__or__": _later("bitwise_or"), "__ror__": _swapped(_later("bitwise_or")),
    "__xor__": _later("bitwise_xor"), "__rxor__": _swapped(_later("bitwise_xor")), "__invert__": _later("bitwise_not"),
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

# Methods by the name of the op they are; the ops of files that are read later, among them.
LATER = """
    acos acosh addcdiv addcmul allclose asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp
    copysign cos cosh cummax cummin cumprod cumsum deg2rad diff exp2 expm1 floor floor_divide fmod frac gather index_add
    index_copy index_fill index_put index_select isclose isfinite isinf isnan lerp log10 log1p log2 logaddexp logcumsumexp
    logical_and logical_not logical_or logical_xor masked_fill masked_scatter masked_select rad2deg reciprocal remainder round
    rsqrt scatter scatter_add scatter_reduce sgn sign sin sinh square take_along_dim tan trunc xlogy"""

# What PyTorch calls an op that has another name here; both names are of one function.
PYTORCH_NAMES: dict[str, str] = {}


def attach() -> None:
    for name, method in METHODS.items():
        setattr(Tensor, name, method)
    for name in LATER.split():
        setattr(Tensor, name, _later(name))
