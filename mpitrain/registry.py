"""Names in a config file -> objects: our own by name, a user's own as ``package.module:name`` or ``file.py:name``."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from hashlib import sha256
from importlib.machinery import SourceFileLoader
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Generic, TypeVar

from mpitrain.errors import ConfigError, MpitrainError, ShapeError, name_and_text, nearest, own_place, place, text_of, with_place

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


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of `function`, or a class, by name; none for what has no signature, which its call will show."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p for name, p in _signature(function).parameters.items() if p.kind in kinds}


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return inspect.Signature()


def accepted(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """The offered arguments that `function` names: not every optimizer has a momentum."""
    named = parameters_of(function)
    return {name: value for name, value in offered.items() if name in named}


def call_with(function: Callable[..., Any], arguments: Mapping[str, Any], what: str, section: str) -> Any:
    """``function(**arguments)``, with a ConfigError that names an unknown key, or the line where the call fails."""
    named, takes_any = parameters_of(function), any(p.kind is p.VAR_KEYWORD for p in _signature(function).parameters.values())
    for key in arguments:
        if key not in named and not takes_any:
            raise ConfigError(f"{what} has no {section}.{key}{nearest(key, named)}")
    missing = [n for n, p in named.items() if p.default is p.empty and n not in arguments]
    if missing:
        raise ConfigError(f"{what} needs {', '.join(f'{section}.{n}' for n in missing)}")
    return call(function, what, arguments, section=section)


def bound(function: Callable[..., Any], arguments: Mapping[str, Any], what: str, section: str) -> Callable[..., Any]:
    """`function` with those arguments bound. ConfigError for an argument that it does not take."""
    named = parameters_of(function) if arguments else {}
    for key in arguments:
        if key not in named:
            raise ConfigError(f"{what} has no {section}.{key}{nearest(key, named)}")
    return functools.partial(function, **arguments) if arguments else function


def call(function: Callable[..., Any], what: str, arguments: Mapping[str, Any], *given: Any, section: str = "") -> Any:
    """``function(*given, **arguments)``, with a ConfigError that says where `what` refuses the arguments or fails with them.

    Arguments of other types than the signature asks for are refused before the call. Errors of our own, of the operating system
    and of MPI pass, a ShapeError with its line in a user's file. `section` is that of the arguments in a configuration.
    """
    if wrong := misfit(function, arguments, f"{what}: {section}{'.' if section else ''}"):
        raise ConfigError(wrong)
    try:
        return function(*given, **arguments)
    except ShapeError as error:
        if (where := own_place(error, "_source")) and where not in error.message:
            error.args = (with_place(error.message, where),)
        raise
    except (MpitrainError, OSError, MemoryError):
        raise
    except Exception as error:
        if type(error).__module__.startswith("mpi4py"):
            raise
        refused = error.__traceback__ is None or error.__traceback__.tb_next is None       # the call itself refused: nothing ran
        those = f" {dict(arguments)}" if arguments else " its arguments" if refused else ""
        how = f"does not accept{those}: {text_of(error)}" if refused else \
            f"failed{' with' if those else ''}{those}: {name_and_text(error, place(error))}"
        raise ConfigError(f"{what} {how}") from error


KINDS: dict[str, tuple[Any, tuple[str, str]]] = {             # of a hint: the type, and the words for one and for several
    "float": (Real, ("a number", "numbers")), "int": (Integral, ("an integer", "integers")),
    "str": (str, ("a string", "strings")), "bool": (bool, ("true or false", "true or false")), "None": (type(None), ("", ""))}
LISTS = ("Sequence", "Iterable", "list", "tuple")
TABLES = ("Mapping", "dict")


def misfit(function: Callable[..., Any], arguments: Mapping[str, Any], start: str) -> str:
    """``<start>trust must be a number, found "a"`` for the first argument that is not of the type that the signature asks for;
    "" if there is none. Types that TOML has not, and hints that are not plain, take anything."""
    for name, parameter in parameters_of(function).items() if arguments else ():
        hint = parameter.annotation if isinstance(parameter.annotation, str) else inspect.formatannotation(parameter.annotation)
        if name in arguments and not any(_fits(arguments[name], option) for option in _options(hint)):
            wanted = " or ".join(words for words in map(_words, _options(hint)) if words)
            return f"{start}{name} must be {wanted}, found {json.dumps(arguments[name], default=str)}"
    return ""


def _options(hint: str) -> list[str]:
    """The parts of a union: those of ``Sequence[int | None] | None`` are two."""
    found, depth = [""], 0
    for letter in hint.replace(" ", ""):
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if letter == "|" and not depth:
            found.append("")
        else:
            found[-1] += letter
    return found


def _parts(option: str) -> tuple[str, str]:
    """``collections.abc.Sequence[int]``: its plain name, and what stands in brackets; of a tuple with dots, the kind."""
    base, _, inner = option.partition("[")
    return base.rpartition(".")[2], inner.removesuffix("]").removesuffix(",...")


def _fits(value: Any, option: str) -> bool:
    base, inner = _parts(option)
    if base in KINDS:
        return isinstance(value, KINDS[base][0]) and (base == "bool" or not isinstance(value, bool))
    if base in LISTS:
        several = "," in re.sub(r"\[.*\]", "", inner)
        listed = isinstance(value, Collection) and not isinstance(value, str | Mapping)
        return listed and (not inner or several or all(any(_fits(x, kind) for kind in _options(inner)) for x in value))
    return isinstance(value, Mapping) if base in TABLES else True


def _words(option: str, *, many: bool = False) -> str:
    base, inner = _parts(option)
    if base in KINDS:
        return KINDS[base][1][many]
    if base in LISTS:
        kinds = [_words(kind, many=True) for kind in _options(inner) if inner and "," not in re.sub(r"\[.*\]", "", inner)]
        return f"{'lists' if many else 'a list'}{' of ' + ' or '.join(kinds) if all(kinds) and kinds else ''}"
    return ("tables" if many else "a table") if base in TABLES else ""


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
