"""A private line between some ranks: collectives on arrays and small objects, each checked to be the same on all ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitrain.backend import Array
from mpitrain.comm.buffers import Pools, Staged
from mpitrain.comm.interpreter import MESSAGE_BYTES, Header, Messages, Work, translate
from mpitrain.comm.progress import Progress
from mpitrain.comm.signature import Signature, data_tag
from mpitrain.comm.start import tag_upper_bound
from mpitrain.errors import DesyncError
from mpitrain.schedules.check import check_all_reduce
from mpitrain.schedules.collectives import binomial_broadcast, choose
from mpitrain.schedules.steps import Algorithm, inbox_length

if TYPE_CHECKING:
    from mpi4py import MPI


class Channel:
    """Collectives over one communicator, which it owns: nobody else may send on it, so tags cannot collide.

    `algorithm` is the name of an all-reduce ("auto", "ring", "recursive_doubling", "package.module:name"), or a user's own
    function, which is checked here before its first message. All methods below must be called by all ranks of the channel in
    the same order; DesyncError if they are not. An error of MPI itself is raised as PeerError.
    """

    def __init__(self, comm: MPI.Comm, name: str, *, algorithm: str | Algorithm = "auto", progress: Progress | None = None,
                 message_bytes: int = MESSAGE_BYTES):
        from mpi4py import MPI
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.comm, self.name, self.algorithm = comm, name, algorithm
        self.rank, self.size = comm.rank, comm.size
        self.progress = progress if progress is not None else Progress()
        self.pools = Pools()
        self._message_bytes = message_bytes
        self._tag_bound = tag_upper_bound()
        self._sequence = 0
        self._signatures: dict[tuple[str, str, Any, int], Signature] = {}
        self._plans: dict[tuple[Algorithm | int, int, int], tuple[list[Messages], int]] = {}
        choose(algorithm, self.size, 0)                       # an unknown name is a ConfigError now, not in the first step
        if not isinstance(algorithm, str) or ":" in algorithm:
            for length in (0, 1, self.size - 1, 4 * self.size + 1):
                check_all_reduce(choose(algorithm, self.size, length), self.size, length)

    def allreduce(self, array: Array, *, name: str) -> None:
        """Replace `array` by its sum over the ranks, in place; the same bits on every rank."""
        self.start_allreduce(array, name).wait()

    def start_allreduce(self, array: Array, name: str) -> Work:
        """Begin `allreduce` and return; `array` belongs to the Work until that is done. Any number may be in flight."""
        algorithm = choose(self.algorithm, self.size, array.nbytes)
        return self._start("allreduce", name, array, self._plan(algorithm, algorithm, array))

    def start_steps(self, array: Array, name: str, steps: Algorithm) -> Work:
        """Begin an all-reduce of the caller's own, for arrays that hold more than one addend; pass the same object each time."""
        return self._start("allreduce", name, array, self._plan(steps, steps, array))

    def broadcast(self, array: Array, root: int = 0, *, name: str = "array") -> None:
        """Replace `array` by that of rank `root`, in place."""
        steps = partial(binomial_broadcast, root=root)
        self._start(f"broadcast from {root}", name, array, self._plan(root, steps, array)).wait()

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """What rank `root` passed, on every rank, by way of JSON (so tuples arrive as lists). For start-up, not for the loop."""
        text = np.frombuffer(json.dumps(value).encode() if self.rank == root else b"", np.uint8).copy()
        length = np.array([text.size])
        self.broadcast(length, root, name="length of object")
        if self.rank != root:
            text = np.empty(int(length[0]), np.uint8)
        self.broadcast(text, root, name="object")
        return json.loads(text.tobytes())

    def gather_objects(self, value: Any) -> list[Any]:
        """What each rank passed, in rank order, on every rank, by way of JSON. For start-up, not for the loop."""
        text = json.dumps(value).encode()
        lengths = np.zeros(self.size, np.int64)
        lengths[self.rank] = len(text)
        self.allreduce(lengths, name="lengths of objects")
        ends = np.cumsum(lengths)
        joined = np.zeros(int(ends[-1]), np.uint8)            # zero where the others write, so the sum joins the texts
        joined[ends[self.rank] - len(text):ends[self.rank]] = np.frombuffer(text, np.uint8)
        self.allreduce(joined, name="objects")
        return [json.loads(joined[end - length:end].tobytes()) for end, length in zip(ends, lengths)]

    def agree(self, value: Any, what: str) -> None:
        """DesyncError, naming the ranks and both values, unless all ranks pass equal values; `what` says of what."""
        values = self.gather_objects(value)
        different = [rank for rank, other in enumerate(values) if other != values[0]]
        if different:
            raise DesyncError(f"ranks disagree about {what}: rank 0 has {json.dumps(values[0])}, "
                              f"{_ranks(different)} {json.dumps(values[different[0]])}")

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.allreduce(np.zeros(1, np.int8), name="barrier")

    def close(self) -> None:
        """Free the communicator; collective, like its creation. Nothing may be in flight."""
        self.comm.Free()

    def _plan(self, key: Algorithm | int, steps: Algorithm, array: Array) -> tuple[list[Messages], int]:
        """This rank's messages for arrays of one size, and the bytes of inbox they need; made once and kept under `key`."""
        length, itemsize = array.size, array.itemsize
        plan = self._plans.get((key, length, itemsize))
        if plan is None:
            rounds = list(steps(self.rank, self.size, length))
            plan = translate(rounds, itemsize, self._message_bytes), inbox_length(rounds) * itemsize
            self._plans[key, length, itemsize] = plan
        return plan

    def _start(self, operation: str, name: str, array: Array, plan: tuple[list[Messages], int]) -> Work:
        messages, inbox_bytes = plan
        signature = self._signature(operation, name, array.dtype, array.size)
        staged = Staged(array, self.pools)
        inbox = self.pools.host.take(inbox_bytes)

        def finish() -> None:
            staged.close()
            self.pools.host.give(inbox)

        self._sequence += 1
        header = partial(Header, self.comm, self.name, self._sequence, signature) if self.size > 1 else None
        work = Work(self.comm, messages, staged.host, inbox[:inbox_bytes].view(staged.host.dtype),
                    label=f'{signature.text} on channel "{self.name}"', header=header, progress=self.progress, finish=finish,
                    tag=data_tag(self._sequence, signature, self._tag_bound))
        self.progress.add(work)
        return work

    def _signature(self, operation: str, name: str, dtype: Any, count: int) -> Signature:
        key = (operation, name, dtype, count)
        if key not in self._signatures:
            self._signatures[key] = Signature.of(operation, name, str(dtype), count)
        return self._signatures[key]


def _ranks(ranks: Iterable[int]) -> str:
    names = [str(rank) for rank in ranks]
    return f"rank {names[0]} has" if len(names) == 1 else f"ranks {', '.join(names)} have"
