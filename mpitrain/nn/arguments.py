"""Constructors that say which arguments there are, where they are called with others."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any, TypeVar

Self = TypeVar("Self", bound="Checked")


class _Signature:
    """That of a class is that of its `__init__`, wherever somebody asks for it; `Checked.__new__` has none of its own."""

    def __get__(self, instance: Any, kind: type[Any]) -> inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")
        return inspect.Signature() if kind.__init__ is object.__init__ else _without_self(kind.__init__)


@lru_cache(512)                           # a model of many layers has few kinds of them
def _without_self(init: Any) -> inspect.Signature:
    whole = inspect.signature(init)
    return whole.replace(parameters=list(whole.parameters.values())[1:])


class Checked:
    """A class whose constructor raises ArgumentError, which names those that there are, where it does not take the arguments."""

    __slots__ = ()
    __signature__ = _Signature()

    def __new__(cls: type[Self], *arguments: Any, **named: Any) -> Self:
        if arguments or named:                    # copies give none
            whole = inspect.signature(cls)
            try:
                free = any(p.kind is p.VAR_KEYWORD for p in whole.parameters.values())
                if unknown := [] if free else [name for name in named if name not in whole.parameters]:
                    raise TypeError(f"got an unexpected keyword argument '{unknown[0]}'")
                whole.bind(*arguments, **named)
            except TypeError as error:
                from mpitrain.ops.mistakes import misfit  # few calls are wrong
                raise misfit(cls.__name__, cls, error) from None
        return super().__new__(cls)
