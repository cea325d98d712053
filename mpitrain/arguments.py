"""Arguments that a configuration or a user gives by name, against the signature of what is called with them."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping
from numbers import Integral, Real
from typing import Any

from mpitrain.errors import (
    ConfigError,
    GraphError,
    MpitrainError,
    ShapeError,
    name_and_text,
    nearest,
    place,
    say_own_place,
    text_of,
)


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of `function`, or a class, by name; none for what has no signature, which its call will show."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p for name, p in _signature(function).parameters.items() if p.kind in kinds}


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        lasts = inspect.isfunction(function) or inspect.isclass(function)
        return _known(function) if lasts else inspect.signature(function)
    except (TypeError, ValueError):
        return inspect.Signature()


@functools.lru_cache(512)                         # the same functions are asked about for each run of a study
def _known(function: Any) -> inspect.Signature:
    return inspect.signature(function)


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
    and of MPI pass, a ShapeError or GraphError with its line in a user's file. `section` is the arguments' in a configuration.
    """
    if wrong := misfit(function, arguments, f"{what}: {section}{'.' if section else ''}"):
        raise ConfigError(wrong)
    try:
        return function(*given, **arguments)
    except (GraphError, ShapeError) as error:
        say_own_place(error)
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
