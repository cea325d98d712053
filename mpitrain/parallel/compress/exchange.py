"""The sum over ranks of one array, compressed: prepared once, started in each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from mpitrain.comm.messages.algorithms import is_own, name_of, prove
from mpitrain.comm.messages.buffers import Host, Staged
from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.messages.interpreter import Start, StepsWork, carry_out
from mpitrain.comm.messages.program import Operation
from mpitrain.comm.messages.signature import HEADER_BYTES, Signature
from mpitrain.parallel.compress.compressor import Compressor, State
from mpitrain.parallel.compress.programs import INBOX, SUMS, VALUES, owned, program_of
from mpitrain.schedules.collectives import choose
from mpitrain.schedules.steps import Algorithm

# Messages are cut into pieces that Open MPI's TCP sends at once (its eager limit is 64 KiB): for longer ones it waits for a
# permission, which waits behind the other direction's data. 2^20 elements, two hosts, 100 Mbit/s, int8: 170 ms whole, 99 in
# pieces of 60 KiB, 97 of 32; 1 Gbit/s: 23, 18, 20 (Open MPI 5.0.11, busy machine, 2026-11).
MESSAGE_BYTES = 60 << 10


class Clock:
    """Seconds that this rank has encoded and decoded since the start."""

    seconds = 0.0


class CodedWork(StepsWork):
    """A compressed collective on its way."""

    def __init__(self, start: Start, rounds: Sequence[Any], memory: dict[str, Host], tag: int, staged: Staged, clock: Clock):
        self._clock = clock
        super().__init__(start, rounds, memory, tag, None, staged)

    def _compute(self, operations: Sequence[Any]) -> None:
        with np.errstate(over="ignore", invalid="ignore"):    # users of the sum look for Inf and NaN and say where
            for operation in operations:
                if isinstance(operation, Operation):
                    carry_out((operation,), self._memory, None, np.add)
                    continue
                began = perf_counter()
                operation(self._memory)
                self._clock.seconds += perf_counter() - began


def steps_of(channel: Channel, length: int) -> Algorithm:
    """The steps of the channel's all-reduce for float32 arrays of `length`; a user's are proved (ScheduleError)."""
    found = choose(channel.steps, channel.size, 4 * length)
    if is_own(channel.algorithm):
        prove(found, name_of(channel.algorithm), channel.size, length)
    return found


class Exchange:
    """The compressed sum of arrays of one length over the ranks of `channel`, called `name` in errors.

    `state` has the compressor's arrays for this one, which each step changes; `step()` is the number of the step.
    """

    def __init__(self, channel: Channel, compressor: Compressor, text: str, state: State, name: str, step: Callable[[], int],
                 clock: Clock):
        self.channel, self.compressor, self.state, self.clock = channel, compressor, state, clock
        self._program = program_of(compressor, channel.rank, partial(steps_of, channel), state, step,
                                   MESSAGE_BYTES)
        self._signature = Signature.of(f"sum by {text} of", name, "float32", compressor.length)

    @property
    def sent(self) -> int:
        """Bytes that this rank posts for each sum, with the header."""
        return self._program.sent + HEADER_BYTES

    @property
    def owned(self) -> tuple[int, int]:
        """The elements whose sum this rank rounds for everyone."""
        return owned(self.compressor, self.channel.rank)

    def start(self, values: Host) -> CodedWork:
        """Begin; nobody moves the work but who calls its `test` or `wait`. Elements behind the compressor's last are left."""
        channel, pool = self.channel, self.channel.pools.host
        staged = Staged(values[:self.compressor.length], channel.pools)
        memory, lent = {VALUES: staged.host}, []
        for buffer, nbytes in self._program.nbytes.items():
            lent.append(pool.take(nbytes))
            memory[buffer] = lent[-1][:nbytes].view(np.float32 if buffer in (SUMS, INBOX) else np.uint8)

        def finish() -> None:
            for buffer in lent:
                pool.give(buffer)

        start, tag = channel.start_of(self._signature)
        return CodedWork(start._replace(finish=finish), self._program.rounds, memory, tag, staged, self.clock)
