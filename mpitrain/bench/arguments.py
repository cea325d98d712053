"""What the flags of `mpitrain bench` say, as numbers and names; each mistake is one UsageError."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from mpitrain.errors import UsageError, nearest

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
WIRES = ("bfloat16", "float16")
DTYPES = {"float32": 4, "float64": 8}


def words(text: str, flag: str) -> list[str]:
    """The parts of a list with commas, each once, in order."""
    parts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise UsageError(f'{flag} is a list with commas, found "{text}"')
    return parts


def sizes(text: str) -> list[int]:
    """Several numbers of bytes: "8,64K,1MiB,16M"."""
    return [size(word, "--sizes") for word in words(text, "--sizes")]


def size(text: str, flag: str) -> int:
    """A number of bytes; K, M and G are powers of 1,024."""
    match = re.fullmatch(r"(\d+) ?([kmg]?)(i?b)?", text.lower())
    if match is None or int(match[1]) == 0:
        raise UsageError(f'{flag} takes bytes above 0 such as 8, 64K or 16MiB, found "{text}"')
    return int(match[1]) * UNITS[match[2]]


def dtypes(text: str) -> list[str]:
    return names(text, DTYPES, "--dtypes")


def algorithms(text: str, known: Iterable[str], flag: str = "--algorithms") -> list[str]:
    """Names of `known`, or a user's own as "package.module:name" or "file.py:name"."""
    return names(text, known, flag, own=', or your own as "package.module:name" or "file.py:name"')


def names(text: str, known: Iterable[str], flag: str, own: str = "") -> list[str]:
    """Names of `known`; with `own`, the end of the refusal, also those with a colon."""
    known = list(known)
    found = words(text, flag.split()[0])
    for word in found:
        if word not in known and not (own and ":" in word):
            raise UsageError(_unknown(flag, word, known) + own)
    return found


def _unknown(flag: str, word: str, known: Sequence[str]) -> str:
    guess = nearest(word, known)
    return f'{flag} knows no "{word}"{guess if "did you mean" in guess else ""}; choose from {", ".join(known)}'


def whole_elements(nbytes: Iterable[int], names: Iterable[str]) -> None:
    """UsageError where a size is no whole number of elements."""
    for name in names:
        for count in nbytes:
            if count % DTYPES[name]:
                raise UsageError(f"--sizes: {count} bytes are no whole number of {name} elements of {DTYPES[name]} bytes; "
                                 f"take a multiple, or other --dtypes")


def wire(name: str, dtypes: Iterable[str]) -> None:
    """UsageError for a type that messages cannot hold, or arrays that travel as they are."""
    if name not in WIRES:
        raise UsageError(_unknown("--wire", name, list(WIRES)))
    if list(dtypes) != ["float32"]:
        raise UsageError(f'--wire {name} is for arrays of float32, found --dtypes {",".join(dtypes)}; leave one of the two out')


def at_least(number: int, least: int, flag: str) -> int:
    if number < least:
        raise UsageError(f"{flag} must be at least {least}, found {number}")
    return number
