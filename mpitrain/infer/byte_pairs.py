"""GPT-2's byte-pair encoding, read from its vocab.json and merges.txt (Radford et al. 2019; Sennrich et al. 2016).

A text is cut into words, numbers, signs and white space; a piece's bytes are joined pair by pair, the pair that was learnt
first before others, as long as neighbours are one. In the files a byte stands as a printable character.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mpitrain.errors import AccessError, DataError, MissingError, UsageError
from mpitrain.infer.utf8 import utf8

END = "<|endoftext|>"
ENDINGS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")        # pieces of their own
NO_SPACE = "\x1c\x1d\x1e\x1f"                     # Python counts these as white space, and Unicode does not.
CACHED = 1 << 16                                  # pieces whose tokens are kept


@cache
def characters() -> dict[int, str]:
    """The printable character that stands for each byte: itself where it is one, else one from 256 on, in order."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + number) for number, byte in enumerate(hidden)}


class BytePairs:
    """An `Encoding` of a vocabulary (text in the files' characters to number) and the pairs, first learnt first."""

    def __init__(self, vocabulary: Mapping[str, int], pairs: Mapping[tuple[str, str], int]):
        self.count, self.end = len(vocabulary), vocabulary.get(END)
        self._numbers, self._pairs = vocabulary, pairs
        bytes_of = {character: byte for byte, character in characters().items()}
        words = sorted(vocabulary, key=lambda word: vocabulary[word])
        self._spelled = [bytes(bytes_of[character] for character in word) for word in words]
        self.longest = max(map(len, self._spelled))
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str, what: str = "the prompt") -> list[int]:
        utf8(text, what)
        found: list[int] = []
        for number, part in enumerate(text.split(END) if self.end is not None else [text]):
            if number and self.end is not None:
                found.append(self.end)
            for piece in pieces(part):
                found += self._tokens(piece)
        return found

    def spelled(self, token: int) -> bytes:
        return self._spelled[token]

    def _tokens(self, piece: str) -> list[int]:
        if piece not in self._known:
            if len(self._known) >= CACHED:
                self._known.clear()
            shown = [characters()[byte] for byte in piece.encode()]
            joined = self._joined(shown)
            for word in joined:
                if word not in self._numbers:
                    raise UsageError(f"the prompt has {piece!r}, and vocab.json has no token for a part of it ({word!r}); leave "
                                     "it out, or give the complete files")
            self._known[piece] = [self._numbers[word] for word in joined]
        return self._known[piece]

    def _joined(self, words: list[str]) -> list[str]:
        while len(words) > 1:
            ranks = [self._pairs.get(pair, len(self._pairs)) for pair in zip(words, words[1:])]
            first = min(ranks)
            if first == len(self._pairs):
                break
            joined: list[str] = []
            place = 0
            while place < len(words):
                if place < len(ranks) and ranks[place] == first:
                    joined.append(words[place] + words[place + 1])
                    place += 2
                else:
                    joined.append(words[place])
                    place += 1
            words = joined
        return words


def pieces(text: str) -> Iterator[str]:
    """GPT-2's cut of a text: letters, digits, or other signs, each with a space in front where there is one; of white space the
    last before a piece stands with it or apart."""
    start, n = 0, len(text)
    while start < n:
        ending = next((word for word in ENDINGS if text.startswith(word, start)), "")
        if ending:
            yield ending
            start += len(ending)
            continue
        first = start + (text[start] == " " and start + 1 < n and _kind(text[start + 1]) != "Z")
        kind, stop = _kind(text[first]), first + 1
        while stop < n and _kind(text[stop]) == kind:
            stop += 1
        if kind == "Z" and stop < n and stop - start > 1:
            stop -= 1
        yield text[start:stop]
        start = stop


@cache
def _kind(character: str) -> str:
    """L of letters, N of numbers, Z of white space, else nothing."""
    if character.isspace() and character not in NO_SPACE:
        return "Z"
    category = unicodedata.category(character)[0]
    return category if category in "LN" else ""


def read_byte_pairs(folder: Path) -> BytePairs:
    """The encoding of the files in a folder. MissingError, AccessError and DataError name the file and the line."""
    path = folder / "vocab.json"
    try:
        vocabulary: Any = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"the vocabulary is not JSON: {error}", file=path) from None
    known = frozenset(characters().values())
    if not isinstance(vocabulary, dict) or not vocabulary or {*vocabulary.values()} != {*range(len(vocabulary))} or \
            any(type(number) is not int for number in vocabulary.values()):
        raise DataError("a vocabulary is a JSON object that gives each token a number, 0, 1, 2, ... each once", file=path)
    for word in vocabulary:
        if not word or not known.issuperset(word):
            raise DataError(f"the token {word!r} has characters that stand for no byte: the files must be GPT-2's", file=path)
    return BytePairs(vocabulary, _pairs(folder / "merges.txt", vocabulary))


def _pairs(path: Path, vocabulary: Mapping[str, int]) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.rstrip("\r").partition(" ")
        if not left or not right or " " in right or left + right not in vocabulary:
            raise DataError(f"line {number} is {line[:40]!r}, expected two tokens, a space between, that vocab.json has joined",
                            file=path)
        found.setdefault((left, right), len(found))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise MissingError("byte-pair encoding takes vocab.json and merges.txt in one folder, and this one is missing",
                           file=path) from None
    except UnicodeDecodeError as error:
        raise DataError("this file is not UTF-8", file=path, offset=error.start) from None
    except OSError as error:
        raise AccessError(f"this file cannot be read: {error.strerror}", file=path) from None
