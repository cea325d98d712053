"""Calls an algorithm that somebody else wrote, and looks at what it yields before anything is done with it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from numbers import Integral
from typing import Any

from mpitrain.registry import OWN_FILE
from mpitrain.schedules.steps import Copy, Receive, Reduce, Round, ScheduleError, Send, Slice, slices_of

STEPS = (Send, Receive, Reduce, Copy)
MOST_ROUNDS = 1 << 20          # A rank's program has fewer rounds; one with more is a loop without an end.
SHOWN = 60                     # An error message shows so many characters of a value.


def called(algorithm: Callable[[int, int, int], Any], rank: int, n: int, length: int) -> Iterator[Round]:
    """The rounds of one rank. ScheduleError for what cannot be called so, and, on the way, for what are no rounds."""
    found = answer(algorithm, "rank, n, length", rank, n, length)
    if not hasattr(found, "__iter__") or isinstance(found, (str, bytes)):
        raise ScheduleError(f"it must be a generator of rounds, lists of Send, Receive, Reduce and Copy, found {shown(found)} "
                            f"instead; write yield [...]")
    return _looked_at(found, rank)


def answer(function: Callable[..., Any], names: str, *arguments: int, **keywords: int) -> Any:
    """What the call returns. ScheduleError where it takes other arguments than `names`; what it raises itself passes."""
    try:
        return function(*arguments, **keywords)
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is None:  # The call raised it, not the function's body.
            raise ScheduleError(f"it is called with ({names}), and it does not take them: {error}") from error
        raise


def _looked_at(found: Any, rank: int) -> Iterator[Round]:
    """The rounds of `rank`, one at a time, each of them looked at. ScheduleError."""
    for index, round_ in enumerate(found):
        if index == MOST_ROUNDS:
            raise ScheduleError(f"rank {rank} yields more than {MOST_ROUNDS} rounds; it must come to an end")
        if not isinstance(round_, (list, tuple)) or isinstance(round_, STEPS):
            raise ScheduleError(f"rank {rank}, round {index}: a round is a list of Send, Receive, Reduce and Copy, found "
                                f"{shown(round_)}")
        for step in round_:
            check_step(step, rank, index)
        yield list(round_)


def check_step(step: Any, rank: int, index: int) -> None:
    """ScheduleError for a step that is none, or whose peers and slices are none."""
    if not isinstance(step, STEPS):
        raise ScheduleError(f"rank {rank}, round {index}: a step is a Send, Receive, Reduce or Copy, found {shown(step)}")
    if isinstance(step, (Send, Receive)) and not is_whole(step.peer):
        raise ScheduleError(f"rank {rank}, round {index}: the peer of a {type(step).__name__} is the number of a rank, found "
                            f"{shown(step.peer)}")
    for part in slices_of(step):
        if not (isinstance(part, Slice) and part.buffer in ("data", "inbox")
                and is_whole(part.start) and is_whole(part.stop)):
            raise ScheduleError(f"rank {rank}, round {index}: a {type(step).__name__} is of data(start, stop) or inbox(start, "
                                f"stop) with whole numbers, found {shown(part)}")


def is_whole(value: Any) -> bool:
    return type(value) is int or isinstance(value, Integral)  # Integers are the rule, and this test is ten times as fast.


def shown(value: Any) -> str:
    """A value and its type, in few words that are the same in every process: without addresses."""
    text = re.sub(rf"{OWN_FILE}[0-9a-f]+\.| at 0x[0-9a-f]+", "", " ".join(repr(value).split()))
    text = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
    return text if value is None else f"{text} ({type(value).__name__})"
