# mypy: disable-error-code="no-any-return"
# (Function.apply gives one tensor, or a tuple of them.)
"""Comparisons of each element, which give arrays of booleans."""

from __future__ import annotations

import operator
from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array

__all__ = ["equal", "greater", "greater_equal", "less", "less_equal", "not_equal"]


class Compare(Function):
    """A boolean array: no gradient flows through it."""

    @staticmethod
    def forward(ctx: Context, x: Any, y: Any, *, test: str) -> Array:
        return getattr(operator, test)(x, y)


def greater(x: Any, y: Any) -> Tensor:
    return _compare("gt", x, y)


def greater_equal(x: Any, y: Any) -> Tensor:
    return _compare("ge", x, y)


def less(x: Any, y: Any) -> Tensor:
    return _compare("lt", x, y)


def less_equal(x: Any, y: Any) -> Tensor:
    return _compare("le", x, y)


def equal(x: Any, y: Any) -> Tensor:
    return _compare("eq", x, y)


def not_equal(x: Any, y: Any) -> Tensor:
    return _compare("ne", x, y)


def _compare(test: str, x: Any, y: Any) -> Tensor:
    return Compare.apply(x.array if isinstance(x, Tensor) else x, y.array if isinstance(y, Tensor) else y, test=test)
