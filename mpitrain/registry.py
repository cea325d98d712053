"""Names in a config file -> objects: our own by name, a user's own as ``package.module:name`` or ``file.py:name``."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from importlib.machinery import SourceFileLoader
from numbers import Real
from pathlib import Path
from typing import Any, Generic, TypeVar

from mpitrain.errors import ConfigError, name_and_text, nearest

T = TypeVar("T")
OWN_FILE = "mpitrain_user_"                       # modules of users' files are called so, and the hash of their path


class Registry(Generic[T]):
    """A table of named objects of one kind; `kind` is the word used in messages ("optimizer", "model", ...)."""

    def __init__(self, kind: str):
        self.kind = kind
        self._table: dict[str, T] = {}
        self._places: dict[str, str] = {}         # of objects that are still to be imported

    def register(self, name: str) -> Callable[[T], T]:
        def add(value: T) -> T:
            assert name not in self._table, f"{self.kind} {name!r} registered twice"
            self._table[name] = value
            return value
        return add

    def register_later(self, name: str, where: str) -> None:
        """`where` is the object's place, "package.module:name", which is imported when somebody asks for it."""
        self._places[name] = where

    def __iter__(self) -> Iterator[str]:
        return iter((*self._table, *self._places))

    def __contains__(self, name: str) -> bool:
        return name in self._table or name in self._places

    def __getitem__(self, name: str) -> T:
        if name in self._places:
            module, _, attribute = self._places.pop(name).partition(":")
            self._table[name] = getattr(importlib.import_module(module), attribute)
        return self._table[name]

    def resolve(self, name: str, folder: Path | None = None) -> T:
        """The object called `name`; a name with a colon is imported, files relative to `folder` (the config's)."""
        if ":" in name:
            found: T = import_object(name, self.kind, folder)
            return found
        if name not in self:
            raise ConfigError(f'unknown {self.kind} "{name}"{nearest(name, self)}; '
                              f'your own is "package.module:name" or "file.py:name"')
        return self[name]


class Later:
    """Names of a package's files that are imported when one is asked for; `files` has the `__all__` of each, in one text."""

    def __init__(self, package: str, files: Mapping[str, str]):
        self.package, self.files = package, files
        self._file_of = functools.cache(lambda: {name: file for file, names in files.items() for name in names.split()})

    def __contains__(self, name: str) -> bool:
        return name in self._file_of()

    def __getitem__(self, name: str) -> Any:
        """The object of this name, whose file is imported, and no other. KeyError where none has it."""
        return getattr(importlib.import_module(f"{self.package}.{self._file_of()[name]}"), name)

    def names(self) -> list[str]:
        return list(self._file_of())


def import_object(name: str, kind: str, folder: Path | None = None) -> Any:
    """The object that ``package.module:name`` or ``path/file.py:name`` names; `folder` is searched first."""
    source, _, attribute = name.rpartition(":")
    folder = folder or Path.cwd()
    beside = str((folder / source).resolve().parent if source.endswith(".py") else folder)      # what lies there can be imported
    if beside not in sys.path:
        sys.path.append(beside)                   # last: a user's folder never shadows an installed package
    try:
        module = _load_file(folder / source) if source.endswith(".py") else _load_module(source, folder)
    except MissingSource as error:
        raise ConfigError(f'{kind} "{name}": {error}') from None
    except Exception as error:
        raise ConfigError(f'{kind} "{name}": importing it failed: {name_and_text(error)}') from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(f'{kind} "{name}": {source} has no "{attribute}"{nearest(attribute, offered(module))}') from None


def source_of(name: str, folder: Path) -> Path | None:
    """The file of ``package.module:name`` or ``path/file.py:name``, seen from `folder`; None for other texts, and where there is
    no file. Nothing is imported: a module outside of `folder` is found if it has been."""
    source, colon, attribute = name.rpartition(":")
    if not (colon and attribute.isidentifier()):
        return None
    path = folder / (source if source.endswith(".py") else f"{source.replace('.', '/')}.py")
    if not path.is_file() and source in sys.modules:
        path = Path(getattr(sys.modules[source], "__file__", None) or path)
    return path if path.is_file() else None


def offered(module: Any) -> list[str]:
    """The names a user's module offers: its `__all__`, or else the objects defined there, without its imports."""
    listed = getattr(module, "__all__", None)
    if isinstance(listed, list | tuple):
        return [name for name in listed if isinstance(name, str) and hasattr(module, name)]
    return [name for name, value in vars(module).items() if not name.startswith("_") and callable(value)
            # an object without a name (a `partial`, say) does not tell its origin
            and (not hasattr(value, "__name__") or getattr(value, "__module__", None) == module.__name__)]


class MissingSource(Exception):
    """The file or module is not there; the text says where it was looked for."""


def _load_file(path: Path) -> Any:
    path = path.resolve()
    if not path.is_file():
        raise MissingSource(f"no file {path}")
    key, source = f"{OWN_FILE}{sha256(str(path).encode()).hexdigest()[:16]}", path.read_bytes()         # caches keep the key
    if key not in sys.modules or vars(sys.modules[key])["_source"] != source:      # somebody may edit it between two runs
        spec = importlib.util.spec_from_file_location(key, path, loader=FromSource(key, str(path)))
        assert spec is not None and spec.loader is not None
        module = sys.modules[key] = importlib.util.module_from_spec(spec)       # dataclasses and pickles look it up at once
        vars(module)["_source"] = source
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[key]
            raise
    return sys.modules[key]


class FromSource(SourceFileLoader):
    """Leaves bytecode on the disk alone, which knows an edit by its second and size."""

    def path_stats(self, path: Any) -> Any:
        raise OSError("no bytecode")


def _load_module(source: str, folder: Path) -> Any:
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name and (source == error.name or source.startswith(error.name + ".")):
            raise MissingSource(f"no module {source} (looked on sys.path and in {folder})") from None
        raise


def is_own(thing: Any) -> bool:
    """Whether an object is of a user's class, and none of this package's."""
    return not type(thing).__module__.startswith("mpitrain.")


def named(value: Any) -> str:
    """``file.py:Name`` of a user's class or function, or of the class of an object; ``package.module:Name`` of others, and a
    plain value itself."""
    if value is None or isinstance(value, (str, Real)):
        return repr(value)
    thing = value if hasattr(value, "__qualname__") else type(value)
    module = sys.modules.get(thing.__module__)
    source = Path(str(module.__file__)).name if thing.__module__.startswith(OWN_FILE) and module else thing.__module__
    return str(thing.__qualname__) if source == "builtins" else f"{source}:{thing.__qualname__}"
