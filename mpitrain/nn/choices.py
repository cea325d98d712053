"""The choices of a supernet, and paths through them: a number for each choice, which together are one of its networks.

    stage1.depth = 2, stage1_block0.width = 16, stage1_block0.kernel = 3, ...
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from mpitrain.backend import random
from mpitrain.errors import ConfigError, nearest

Path = Mapping[str, int]
LARGEST, SMALLEST = "largest", "smallest"


class Choice:
    """One number of `options`, which rise. `value` is the one in use, at first the largest.

    `depth` and `place` say where the choice counts: in a block that is number `place` of those that the choice `depth` counts.
    """

    def __init__(self, options: Sequence[int], depth: Choice | None = None, place: int = 0):
        self.options, self.depth, self.place = tuple(options), depth, place
        self.value = self.options[-1]

    @property
    def largest(self) -> int:
        return self.options[-1]


Size = int | Choice


def value_of(size: Size) -> int:
    return size.value if isinstance(size, Choice) else size


def largest_of(size: Size) -> int:
    return size.largest if isinstance(size, Choice) else size


class Elastic:
    """The choices of a model by name, and the path through it that is in use: at first the largest.

    `rule` says how a run draws paths: "uniform", or "sandwich" (see `draw`).
    """

    def __init__(self, choices: Mapping[str, Choice], rule: str):
        self.choices, self.rule = dict(choices), rule

    @property
    def options(self) -> dict[str, tuple[int, ...]]:
        """What each choice can be."""
        return {name: choice.options for name, choice in self.choices.items()}

    @property
    def largest(self) -> dict[str, int]:
        return {name: choice.options[-1] for name, choice in self.choices.items()}

    @property
    def smallest(self) -> dict[str, int]:
        return {name: choice.options[0] for name, choice in self.choices.items()}

    @property
    def path(self) -> dict[str, int]:
        """The one in use."""
        return {name: choice.value for name, choice in self.choices.items()}

    def take(self, path: Path) -> None:
        """From the next forward on, this path is used."""
        for name, choice in self.choices.items():
            choice.value = path[name]

    @contextmanager
    def taken(self, path: Path) -> Iterator[None]:
        """Uses a path meanwhile."""
        before = self.path
        self.take(path)
        try:
            yield
        finally:
            self.take(before)

    def draw(self, *key: int | str) -> dict[str, int]:
        """A path, each choice by itself and each of its options as likely as the others: a function of the key alone."""
        words = random.words(random.stream_key("path", *key), np.zeros(1, np.uint64), len(self.choices), np)[0]
        return {name: choice.options[int(word) * len(choice.options) >> 32]
                for (name, choice), word in zip(self.choices.items(), words)}

    def plain(self, path: Path) -> dict[str, int]:
        """The path by the choices that count in it: equal for two paths that are one network."""
        depths = {choice: path[name] for name, choice in self.choices.items()}
        return {name: path[name] for name, choice in self.choices.items()
                if choice.depth is None or choice.place < depths[choice.depth]}

    def write(self, path: Path) -> str:
        """The path as text that `read` takes: its choices that count."""
        return ", ".join(f"{name}={value}" for name, value in self.plain(path).items())

    def read(self, text: str) -> dict[str, int]:
        """The path of ``"largest"``, ``"smallest"``, or ``"stage1.depth=2, stage1.block1.width=16"``, in which a choice that is
        left out is the largest. ConfigError, with the names or the options that there are."""
        if text.strip() in (LARGEST, SMALLEST):
            return self.largest if text.strip() == LARGEST else self.smallest
        path = self.largest
        for entry in filter(None, (entry.strip() for entry in text.split(","))):
            name, equals, value = (word.strip() for word in entry.partition("="))
            if not equals:
                raise ConfigError(f'a path is "largest", "smallest", or choices such as "{next(iter(path))}='
                                  f'{path[next(iter(path))]}", found "{entry}"')
            if name not in self.choices:
                raise ConfigError(f"this model has no choice {name}{nearest(name, self.choices)}; it has "
                                  f"{', '.join(self.choices)}")
            options = self.choices[name].options
            if value not in map(str, options):
                raise ConfigError(f"the choice {name} is one of {', '.join(map(str, options))}, found {value}")
            path[name] = int(value)
        return path

    @property
    def count(self) -> int:
        """How many networks there are, those that are equal counted once."""
        counted = {id(choice): choice for choice in self.choices.values()}
        inside: dict[int, list[Choice]] = {}
        for choice in counted.values():
            if choice.depth is not None:
                inside.setdefault(id(choice.depth), []).append(choice)
        total = math.prod(len(choice.options) for choice in counted.values()
                          if choice.depth is None and id(choice) not in inside)
        for key, choices in inside.items():
            total *= sum(math.prod(len(c.options) for c in choices if c.place < depth) for depth in counted[key].options)
        return total

    def every(self) -> Iterator[dict[str, int]]:
        """All paths, with those that are one network."""
        for values in itertools.product(*self.options.values()):
            yield dict(zip(self.choices, values))
