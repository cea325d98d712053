"""What a rank and its watcher agree on: the rank's record in shared memory, the words to its pipe, two signals.

    record      words of 8 bytes: count, step, phase, answers, length of the text, over | at byte TEXT: the answer's text
    pipe        takes ASK, to which a thread of the rank answers, STACKS, which has it write them, LEAVE, which ends it, and now
                and then HERE: the watcher is there
    stack       a file in memory that Python's fault handler writes, for that thread or on STACK_SIGNAL
"""

from __future__ import annotations

PHASES = ("start", "load", "forward", "backward", "exchange", "update", "evaluation", "save", "finish", "rest")
REST = PHASES[-1]                         # between two runs of a program, which may take any time
COUNT, STEP, PHASE, ANSWERS, LENGTH, OVER = range(6)
TEXT, RECORD_BYTES = 64, 4096
ASK, STACKS, LEAVE, HERE = b"?", b"#", b"!", b"."
STACK_SIGNAL, LEAVE_SIGNAL = 61, 60       # realtime signals that neither MPI libraries nor the C library use


def step_in(words: list[int] | memoryview[int]) -> int:
    """The step that a rank is in by the words of its record; it waits for the data of the next one before that begins."""
    return words[STEP] + (PHASES[words[PHASE]] == "load")


def silence(seconds: float) -> float:
    """How long a watcher says nothing at most, for stalls of so many seconds; it says HERE twice as often."""
    return min(max(2.0, seconds / 2), 30.0)
