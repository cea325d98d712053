"""Comparisons element by element, with broadcasting: arrays of booleans, without gradients."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError

__all__ = ["equal", "greater", "greater_equal", "less", "less_equal", "not_equal"]


class Compare(Function):
    """A boolean array: no gradient flows through it. Complex numbers have no order, and only these two tests."""

    complex_inputs = "own"

    @staticmethod
    def forward(ctx: Context, x: Any, y: Any, *, test: str) -> Array:
        if test not in ("eq", "ne") and any(getattr(getattr(a, "dtype", None), "kind", "") == "c" for a in (x, y)):
            raise ShapeError("an input is complex, and complex numbers have no order; compare their .real or abs")
        return getattr(operator, test)(x, y)


def _comparison(name: str, test: str) -> Callable[[Any, Any], Tensor]:
    def op(x: Any, y: Any) -> Tensor:
        return Compare.apply(x.array if isinstance(x, Tensor) else x, y.array if isinstance(y, Tensor) else y, test=test)
    op.__name__ = op.__qualname__ = name
    return op


greater, greater_equal = _comparison("greater", "gt"), _comparison("greater_equal", "ge")
less, less_equal = _comparison("less", "lt"), _comparison("less_equal", "le")
equal, not_equal = _comparison("equal", "eq"), _comparison("not_equal", "ne")
