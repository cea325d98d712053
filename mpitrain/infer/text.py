"""Text as token numbers and back: the characters or bytes that the run's data were made with, or GPT-2's pairs of bytes."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from mpitrain.config import Config
from mpitrain.data.manifest import MANIFEST, read_manifest
from mpitrain.errors import ConfigError, MissingError, UsageError
from mpitrain.infer.utf8 import utf8

NAMED = re.compile(r"\\x([0-9a-f]{2})")           # how an import names a byte that is no printable character


class Encoding(Protocol):
    """A table of tokens; `count` of them, numbered from 0, none of which spells more than `longest` bytes."""

    count: int
    longest: int

    def encode(self, text: str, what: str = "the prompt") -> list[int]:
        """UsageError where the table lacks what the text has; `what` names it."""

    def spelled(self, token: int) -> bytes:
        """A token's UTF-8 bytes, which may be part of a character."""


class Characters:
    """A token for each character of a vocabulary."""

    def __init__(self, vocabulary: Sequence[str]):
        self.count = len(vocabulary)
        self._texts = [word.encode() for word in vocabulary]
        self.longest = max(map(len, self._texts))
        self._numbers = {word: number for number, word in enumerate(vocabulary)}

    def encode(self, text: str, what: str = "the prompt") -> list[int]:
        for place, character in enumerate(text):
            if character not in self._numbers:
                raise UsageError(f"character {place + 1} of {what} is {character!r}, which is not among the {self.count} "
                                 "characters of the run's data; leave it out or write it otherwise")
        return [self._numbers[character] for character in text]

    def spelled(self, token: int) -> bytes:
        return self._texts[token]


class Bytes:
    """A token for each byte of UTF-8."""

    count, longest = 256, 1

    def encode(self, text: str, what: str = "the prompt") -> list[int]:
        return list(utf8(text, what))

    def spelled(self, token: int) -> bytes:
        return bytes([token])


class Decoder:
    """Tokens as they come to text as it is complete: a character of several bytes appears with its last one."""

    def __init__(self, encoding: Encoding):
        self._encoding, self._decoder = encoding, codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self._decoder.decode(self._encoding.spelled(token))

    def end(self) -> str:
        """What was left incomplete, as the character that stands for it."""
        return self._decoder.decode(b"", True)


def decode(encoding: Encoding, tokens: Iterable[int]) -> str:
    decoder = Decoder(encoding)
    return "".join([*map(decoder.add, tokens), decoder.end()])


def encoding_of(vocabulary: Sequence[str]) -> Encoding:
    """The table of a vocabulary as `data import text` writes it: characters, or the names of 256 bytes."""
    if len(vocabulary) == 256 and all(_byte_of(word) == number for number, word in enumerate(vocabulary)):
        return Bytes()
    return Characters(vocabulary)


def _byte_of(word: str) -> int:
    found = NAMED.fullmatch(word)
    return int(found[1], 16) if found else ord(word) if len(word) == 1 else -1


def find_encoding(config: Config, folder: Path | None) -> Encoding:
    """The table of `folder` (vocab.json and merges.txt, or a data folder), by default of the run's data.

    MissingError, ConfigError and DataError where there is none, or one of more tokens than the model has.
    """
    where = folder if folder is not None else config.folder / config.data.path
    if (where / "vocab.json").is_file():
        from mpitrain.infer.byte_pairs import read_byte_pairs
        found: Encoding = read_byte_pairs(where)
    elif not (where / MANIFEST).is_file():
        raise MissingError(f"there is no table of tokens here, neither {MANIFEST} nor vocab.json; name the folder of one with "
                           "--vocabulary FOLDER", file=where)
    else:
        vocabulary = read_manifest(where / MANIFEST).get("vocabulary")
        if not vocabulary:
            raise MissingError("this manifest has no vocabulary, so tokens have no text; name the folder of a table with "
                               "--vocabulary FOLDER", file=where / MANIFEST)
        found = encoding_of(vocabulary)
    size = config.model.arguments.get("vocabulary")
    if not isinstance(size, int) or found.count > size:
        raise ConfigError(f"the table has {found.count:,} tokens, and the model knows {size}; give the table that it was trained "
                          "with: --vocabulary FOLDER", file=where)
    return found
