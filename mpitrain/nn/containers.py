"""Modules and parameters in lists and under names. A plain list or tuple that is an attribute of a module works as well."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mpitrain.errors import ShapeError
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter

__all__ = ["Identity", "ModuleDict", "ModuleList", "ParameterDict", "ParameterList"]


class Identity(Module):
    """Passes its input on; arguments of what it stands for are ignored."""

    by_position = by_element = True

    def __init__(self, *arguments: Any, **named: Any):
        pass

    def forward(self, x: Any) -> Any:
        return x


class _Held(Module):
    """Parts by name, in the order they came in; `kind` is what a part must be."""

    by_position = True                            # its parts say whether they are
    kind: type[Any] = Module
    parts: dict[str, Any]

    def _members(self) -> Iterator[tuple[str, Any]]:
        yield from self.parts.items()

    def _put(self, name: str, part: Any) -> None:
        if not isinstance(part, self.kind):
            raise ShapeError(f"{type(self).__name__}: a part is {type(part).__name__}, expected {self.kind.__name__}")
        self.parts[name] = part

    def __len__(self) -> int:
        return len(self.parts)


class ModuleList(_Held):
    """Modules called "0", "1", ...; a list's `append`, `extend`, `insert`, indices and slices."""

    def __init__(self, modules: Iterable[Any] = ()):
        self.parts = {}
        self.extend(modules)

    def append(self, module: Any) -> ModuleList:
        self._put(str(len(self.parts)), module)
        return self

    def extend(self, modules: Iterable[Any]) -> ModuleList:
        for module in modules:
            self.append(module)
        return self

    def insert(self, index: int, module: Any) -> None:
        parts = list(self)
        parts.insert(index, module)
        self.parts = {}
        self.extend(parts)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.parts.values())

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return type(self)(list(self)[index])
        return self.parts[self._key(index)]

    def __setitem__(self, index: int, module: Any) -> None:
        self._put(self._key(index), module)

    def _key(self, index: int) -> str:
        if not -len(self) <= index < len(self):
            raise ShapeError(f"{type(self).__name__}: no part {index} among {len(self)}")
        return str(index % len(self))


class ModuleDict(_Held):
    """Modules by name; a dict's methods."""

    def __init__(self, modules: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()):
        self.parts = {}
        self.update(modules)

    def update(self, modules: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        for name, module in (modules.items() if isinstance(modules, Mapping) else modules):
            self[name] = module

    def keys(self) -> Iterable[str]:
        return self.parts.keys()

    def values(self) -> Iterable[Any]:
        return self.parts.values()

    def items(self) -> Iterable[tuple[str, Any]]:
        return self.parts.items()

    def pop(self, name: str) -> Any:
        part = self[name]
        del self.parts[name]
        return part

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __contains__(self, name: str) -> bool:
        return name in self.parts

    def __getitem__(self, name: str) -> Any:
        if name not in self.parts:
            raise ShapeError(f'{type(self).__name__}: no part "{name}", only {", ".join(self.parts) or "none at all"}')
        return self.parts[name]

    def __setitem__(self, name: str, module: Any) -> None:
        if not name or "." in name:
            raise ShapeError(f'{type(self).__name__}: a part is called "{name}", expected a name without dots')
        self._put(name, module)

    def __delitem__(self, name: str) -> None:
        self.pop(name)


class ParameterList(ModuleList):
    """Parameters called "0", "1", ..."""

    kind = Parameter


class ParameterDict(ModuleDict):
    """Parameters by name."""

    kind = Parameter
