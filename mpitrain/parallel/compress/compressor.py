"""What a compressor is: arithmetic between one flat float32 array and the bytes that travel for it.

    make = make_compressor("topk:0.01")            comm.compress; "file.py:Mine" for a class of your own
    compressor = make(pieces, n, seed=0, feedback=True)          for one array: a bucket, or a slice of it
    state = compressor.new_state()                 residuals, and what else it keeps from step to step

The engine owns messages, their order and the counting of bytes. A compressor is a function of its arguments and of (seed, step,
parameter's name), sends nothing itself, and keeps nothing but `state`. There are three kinds, told apart by what the network has
to do: `Packed`, `Linear`, `Gathered`. All replace the array by the sum over n workers; gradients are scaled before.

Error feedback (Seide et al. 2014; Karimireddy et al. 2019, "Error feedback fixes SignSGD"): a worker sends c for a = gradient +
residual, and keeps a - c as the next step's residual. What is not a number always comes through: a block with NaN or infinity
arrives with NaN, and leaves the residual as it was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, prod
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mpitrain.config.topology import COMPRESSORS
from mpitrain.errors import ConfigError, ShapeError, nearest
from mpitrain.registry import named

Host: TypeAlias = NDArray[np.float32]
Message: TypeAlias = NDArray[np.uint8]
State: TypeAlias = dict[str, Host]
OWNER = -1                                        # the "worker" that rounds a sum for everyone
STAGES = (4, 2)                                   # of a warm-up (Lin et al. 2018): so many times as much travels, in equal parts
WORD = 8                                          # bytes: lengths of messages are multiples of it, so that parts stay aligned


class CompressError(ConfigError):
    """A compressor that does not do what it must."""
    code = "E_COMPRESS"


class Piece(NamedTuple):
    """A part of a parameter in an array: elements start .. stop of the array are elements first .. of the parameter."""

    name: str
    start: int
    stop: int
    first: int
    shape: tuple[int, ...]                        # of the whole parameter


class Kept(NamedTuple):
    """An array of a compressor's state: float32 of `shape`, and whose it is.

    worker   each worker has its own, in a checkpoint by the worker's number
    owner    each element has one, kept by the rank that sums it, as slices of optimizer state are
    all      equal on all ranks
    """

    shape: tuple[int, ...]
    of: Literal["worker", "owner", "all"]


class Compressor(ABC):
    """Made for the `pieces` of one array, which follow each other from 0 on, and `n` workers; ShapeError for other pieces, or
    ones that begin or end inside of a block of their parameter."""

    kind: ClassVar[Literal["packed", "linear", "gathered"]]
    exact = False                                 # what is sent and the residual add up to gradient + old residual, to the bit
    block: int | None = None                      # elements: a parameter may be cut at multiples of it; None: nowhere

    def __init__(self, pieces: Sequence[Piece], n: int, *, seed: int = 0, feedback: bool = True):
        self.pieces, self.n, self.seed, self.feedback = tuple(pieces), n, seed, feedback
        self.length = self.pieces[-1].stop if self.pieces else 0       # elements
        self.notes: list[str] = []                # what a user should be told once, at the start of the run
        _follow(self.pieces, self.block)

    @classmethod
    def options(cls, argument: str | None) -> dict[str, Any]:
        """The keyword arguments that ``name:argument`` stands for; ConfigError for an argument that makes no sense."""
        if argument is not None:
            raise ConfigError(f"it takes no option, found :{argument}")
        return {}

    @classmethod
    def wider(cls, options: Mapping[str, Any], times: int) -> dict[str, Any] | None:
        """The keyword arguments with which so many times as much travels, of the same states; None: it has none."""
        return None

    def states(self) -> dict[str, Kept]:
        """The arrays that it keeps between steps, by name; `begin` says as what they start."""
        return {"error": Kept((self.length,), "worker")} if self.feedback else {}

    def begin(self, state: State) -> None:
        """Fills a state as a new run has it."""
        for array in state.values():
            array[...] = 0

    def new_state(self) -> State:
        """All of the state as a new run has it; of owners: for all elements."""
        state = {name: np.empty(kept.shape, np.float32) for name, kept in self.states().items()}
        self.begin(state)
        return state


class Packed(Compressor):
    """Blocks of few bits with a scale each. Carried by a reduce-scatter and an all-gather, both `direct`: the owner of blocks
    first .. stop adds up all contributions in float32 in the workers' order, rounds the sum once for everyone, and decodes what
    it sends, as all do. Two roundings at any n, where a ring would round at each hop (ZeRO++'s qgZ; Wang et al. 2023).

    `bounds` (int64, blocks + 1) are positions in the array where blocks begin; the arrays that it is given are of blocks first ..
    stop alone, float32, contiguous, and so is the message of `nbytes` bytes, which can be sent as it is.
    """

    kind = "packed"

    def __init__(self, pieces: Sequence[Piece], n: int, *, seed: int = 0, feedback: bool = True):
        super().__init__(pieces, n, seed=seed, feedback=feedback)
        self.bounds = block_bounds(self.pieces, self.block)

    @property
    def blocks(self) -> int:
        return len(self.bounds) - 1

    def states(self) -> dict[str, Kept]:
        """`sum_error` is what the owners' rounding has left; the engine keeps it for the blocks that it owns."""
        return {**super().states(), "sum_error": Kept((self.length,), "owner")} if self.feedback else {}

    @abstractmethod
    def nbytes(self, first: int, stop: int) -> int:
        """Bytes of the message of blocks first .. stop: a multiple of WORD, the same on all ranks."""

    @abstractmethod
    def encode(self, step: int, worker: int, values: Host, error: Host | None, first: int, stop: int, message: Message) -> None:
        """Writes the message of values + error, and what is left into `error`. `worker` is OWNER for a sum: with the step it is
        for random numbers alone."""

    @abstractmethod
    def decode(self, message: Message, first: int, stop: int, total: Host, add: bool) -> None:
        """Writes what a message holds to `total`, or adds it."""


class Linear(Compressor):
    """Short float32 arrays that are summed by any all-reduce, in `phases` one after the other: whatever commutes with a sum."""

    kind = "linear"
    phases: ClassVar[int] = 1

    @abstractmethod
    def words(self, phase: int) -> int:
        """float32 numbers in the message of a phase, the same on all ranks; 0: there is none."""

    @abstractmethod
    def encode(self, phase: int, step: int, values: Host, state: State, message: Host) -> None:
        """Writes the message of a phase. `values` stays as it was; the residual is right after the last phase."""

    @abstractmethod
    def decode(self, phase: int, step: int, arrived: Host, state: State, values: Host) -> None:
        """Takes the sum of all workers' messages of a phase; after the last one `values` is the sum over workers."""


class Gathered(Compressor):
    """Messages of equal length that all ranks gather: each sends n - 1 times what it has to say."""

    kind = "gathered"

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of a worker's message: a multiple of WORD, the same on all ranks."""

    @abstractmethod
    def encode(self, step: int, values: Host, state: State, message: Message) -> None:
        """Writes the message of values + residual, and keeps what is left; `values` stays as it was."""

    @abstractmethod
    def decode(self, step: int, messages: NDArray[np.uint8], values: Host) -> None:
        """`messages` (n, nbytes) in the workers' order; writes their sum, added in that order, to `values`."""


@dataclass(frozen=True)
class Make:
    """A compressor as comm.compress names it; called with pieces it makes the one of an array."""

    text: str
    cls: Any
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, pieces: Sequence[Piece], n: int, *, seed: int = 0, feedback: bool = True) -> Compressor:
        made: Compressor = self.cls(pieces, n, seed=seed, feedback=feedback, **self.options)
        return made

    @property
    def kind(self) -> Literal["packed", "linear", "gathered"]:
        kind: Literal["packed", "linear", "gathered"] = self.cls.kind
        return kind

    @property
    def block(self) -> int | None:
        """Where buckets and slices may cut a parameter: at multiples of so many of its elements; None: nowhere."""
        return self((), 1).block

    def wider(self, times: int) -> Make | None:
        """The same with so many times as much in a message; None where that makes no sense, or it is a user's."""
        options = None if self.own else self.cls.wider(self.options, times)
        return None if options is None else Make(self.text, self.cls, options)

    @property
    def own(self) -> bool:
        """Whether it is a user's, which `check.check_compressor` is to prove before the first message."""
        return not str(self.cls.__module__).startswith("mpitrain.")


def make_compressor(text: str, folder: Path | None = None) -> Make:
    """The compressor that a text such as "int8", "topk:0.01" or "file.py:Mine" names, files relative to `folder`. ConfigError for
    an unknown name, an option that makes no sense, or a class that is no compressor."""
    name, colon, argument = text.partition(":")
    if name in COMPRESSORS:
        found = COMPRESSORS[name]
        try:
            return Make(text, found, found.options(argument if colon else None))
        except ConfigError as error:
            raise ConfigError(f'comm.compress = "{text}": {error.message}') from None
    if not colon or not argument.isidentifier():
        raise ConfigError(f'comm.compress = "{text}": unknown compressor "{name}"{nearest(name, COMPRESSORS)}; your own is '
                          f'"package.module:name" or "file.py:name"')
    found = COMPRESSORS.resolve(text, folder)
    if not (isinstance(found, type) and issubclass(found, Compressor)):
        raise ConfigError(f'comm.compress = "{text}": expected a subclass of Packed, Linear or Gathered of '
                          f"mpitrain.parallel.compress.compressor, found {named(found)}")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing or getattr(found, "kind", None) not in ("packed", "linear", "gathered"):
        lacks = f"it lacks {', '.join(missing)}" if missing else "it is of no kind"
        raise ConfigError(f'comm.compress = "{text}": {lacks}; derive it from Packed, Linear or Gathered, and define those')
    return Make(text, found)


def share(argument: str | None, example: str) -> float:
    """The share of elements that an option names: above 0, at most 1. ConfigError otherwise."""
    try:
        found = float(argument or "")
    except ValueError:
        found = float("nan")
    if not (isfinite(found) and 0 < found <= 1):
        raise ConfigError(f"expected the share of elements that travel, above 0 and at most 1, as in {example}, found "
                          f"{argument or 'nothing'}")
    return found


def block_bounds(pieces: Sequence[Piece], block: int | None) -> NDArray[np.int64]:
    """int64 (blocks + 1): positions in the array where blocks begin, and its end. Blocks begin at each multiple of `block`
    elements of a parameter, so that they are the same however parameters are put into buckets; None: a parameter is one."""
    starts = [np.arange(piece.start, piece.stop, block or max(piece.stop - piece.start, 1), dtype=np.int64) for piece in pieces]
    end = pieces[-1].stop if pieces else 0
    return np.concatenate([*starts, np.array([end], np.int64)])


def whole(length: int) -> int:
    """Bytes, rounded up to a multiple of WORD."""
    return -(-length // WORD) * WORD


def _follow(pieces: Sequence[Piece], block: int | None) -> None:
    at = 0
    for piece in pieces:
        size, stop = prod(piece.shape), piece.first + piece.stop - piece.start
        if piece.start != at or piece.stop < at or piece.first < 0 or stop > size:
            raise ShapeError(f"a piece of {piece.name} {piece.shape} says elements {piece.start} .. {piece.stop} of an array, "
                             f"from element {piece.first} of the parameter on, after {at} elements")
        if (piece.first % block or (stop % block and stop != size)) if block else (piece.first or stop != size):
            raise ShapeError(f"a piece of {piece.name} {piece.shape} is elements {piece.first} .. {stop}; it may be cut "
                             + (f"at multiples of {block}" if block else "nowhere"))
        at = piece.stop
