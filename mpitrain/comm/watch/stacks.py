"""The stacks of a node's ranks, as Python's fault handler writes them."""

from __future__ import annotations

import os
import time

from mpitrain.comm.watch.ignoring import ignoring
from mpitrain.comm.watch.record import STACK_SIGNAL, STACKS
from mpitrain.comm.watch.seen import ANSWER_S, CONTINUE, STOP, Rank


def stacks_of(ranks: list[Rank], *, ends: bool) -> dict[Rank, str]:
    """Each rank's stacks, where it lives.

    If the job `ends` then, a stopped rank goes on for its stacks, and all others are stopped before: else they would go on with
    it, and Open MPI's mpirun has waited for ever after ranks that ended in the midst of MPI_Finalize.
    """
    stopped = [rank for rank in ranks if rank.stopped]
    found = ask([rank for rank in ranks if rank.state and rank not in stopped])
    if ends:
        for rank in found:
            rank.signal(STOP)
        found |= ask(stopped)
        for rank in stopped:
            rank.signal(STOP)
    return found


def ask(ranks: list[Rank]) -> dict[Rank, str]:
    """The stacks of ranks that can be woken; "" of one that writes none in time.

    A thread of the rank writes them, and a signal handler those of a rank whose interpreter gives that thread no turn.
    """
    before = {rank: rank.stack_bytes() for rank in ranks}
    running = [rank for rank in ranks if not rank.stopped]
    for rank in running:
        rank.say(STACKS)
    wait_for_stacks(running, before)
    silent = [rank for rank in ranks if rank.stack_bytes() == before[rank]]
    for rank in silent:
        rank.interrupt(STACK_SIGNAL)
        rank.signal(CONTINUE)
    wait_for_stacks(silent, before)
    return {rank: rank.stack_from(before[rank]) for rank in ranks}


def wait_for_stacks(ranks: list[Rank], before: dict[Rank, int]) -> None:
    """Return when each has written more bytes than `before`, and is not writing now; at the latest after ANSWER_S."""
    end, sizes, last = time.monotonic() + ANSWER_S, [0], [1]
    while ranks and (sizes != last or any(size == before[rank] for size, rank in zip(sizes, ranks))) and time.monotonic() < end:
        time.sleep(0.01)
        last, sizes = sizes, [rank.stack_bytes() for rank in ranks]


def keep(folder: str, line: str, stacks: dict[Rank, str]) -> str:
    """Writes them to ``errors`` in the run folder, for the owner alone; the end of the line that says so."""
    if not folder:
        return ""
    errors = os.path.join(folder, "errors")
    try:
        with ignoring(FileExistsError):
            os.mkdir(errors)                                  # a run folder that was removed is not made again
        for rank, text in stacks.items():
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            file = os.open(os.path.join(errors, f"rank-{rank.number}.stack.txt"), flags, 0o600)
            os.fchmod(file, 0o600)
            os.write(file, f"{line}\n\nstacks of rank {rank.number}:\n\n{text}".encode("utf-8", "surrogateescape"))
            os.close(file)
    except OSError as error:
        return f"; stacks could not be written to {errors}: {error.strerror}"
    return f"; stacks of all ranks: {errors}/rank-*.stack.txt"
