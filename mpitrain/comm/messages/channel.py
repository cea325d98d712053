"""A private channel between some ranks: collectives on arrays and small objects, each checked to be the same on all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.comm.job.start import tag_upper_bound
from mpitrain.comm.messages import algorithms
from mpitrain.comm.messages.algorithms import LIBRARY
from mpitrain.comm.messages.buffers import Host, PackedByDevice, Pools, Staged, Values, Widened, assert_usable, own_memory
from mpitrain.comm.messages.interpreter import PAIR_BYTES, LibraryWork, Start, StepsWork
from mpitrain.comm.messages.pair import KINDS, Entry, PairWork, fast_pair
from mpitrain.comm.messages.prepare import ALONE, Plan, Prepared, Recipe, dtype_name, formats, make_plan, memory_of
from mpitrain.comm.messages.program import MESSAGE_BYTES
from mpitrain.comm.messages.progress import Progress
from mpitrain.comm.messages.signature import Signature, data_tag
from mpitrain.errors import DesyncError, ShapeError, numbered
from mpitrain.kernels.wire import Format, wire_format
from mpitrain.schedules.collectives import binomial_broadcast, choose, part
from mpitrain.schedules.steps import Algorithm

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpitrain.comm.work import Work

LONGEST_OBJECT = 1 << 30       # bytes of JSON; descriptions of data with millions of chunks have a fifth of it
THE_CHANNELS = "the channel's"                                # the key of its own algorithm, among those that callers bring
PIECE_BYTES = 4 << 20          # the library's all-reduce gets pieces of this; Open MPI 5.0.11's falls off above 8 MB


class Channel:
    """Collectives over one communicator, which it owns: nobody else may send on it, so tags cannot collide.

    `algorithm` is the name of an all-reduce (`algorithms.names`, or "package.module:name"), or a user's own function, which is
    proved right before its first message at each length, by each rank for itself (ScheduleError). Where it depends on nodes,
    `nodes` may name each rank's, instead of its host. With `wire` "bfloat16" or "float16", messages of `allreduce` and
    `reduce_scatter` of float32 arrays hold 16-bit numbers; sums are float32 all the same, and a result that all ranks hold is
    rounded on all of them. Arrays of 16-bit numbers are summed in float32 too.
    All methods below must be called by all ranks of the channel in the same order; DesyncError if they are not. An error of MPI
    itself is raised as PeerError. `comm.face.AnyChannel` is the face that it has in common with a `SharedChannel`.
    """

    device_buffers = False                                    # MPI is handed memory of devices, which `gpu_probe` has tried out.
    shared = shares_all = False
    node = cross = None

    def __init__(self, comm: MPI.Comm, name: str, *, algorithm: str | Algorithm = "auto", progress: Progress | None = None,
                 wire: str | None = None, nodes: Sequence[Hashable] | None = None,
                 message_bytes: int = MESSAGE_BYTES, piece_bytes: int = PIECE_BYTES):
        from mpi4py import MPI
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.comm, self.name, self.algorithm = comm, name, algorithm
        self.rank, self.size = comm.rank, comm.size
        self.progress = progress if progress is not None else Progress()
        self.pools = Pools()
        self._packing, self._message_bytes, self._piece_bytes = wire_format(wire), message_bytes, piece_bytes
        self.wire = wire
        self.notes: list[str] = []
        self._formats = partial(formats, wire=self._packing, keeps_wide=wire == "float32")
        self._tag_bound = tag_upper_bound()
        self._sequence = 0
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._recipes: dict[tuple[Any, ...], Recipe] = {}     # the key is all that arrays of one kind have in common
        self._pairs = self.size == 2 and algorithm in ("auto", "recursive_doubling")
        self._fast_pair = fast_pair(comm, name) if self._pairs else None
        self._pair_sums: dict[tuple[str, Any, int], tuple[Signature, Entry | None]] = {}
        if self._fast_pair is not None:
            self.progress.watch(self._fast_pair.in_flight)
        algorithms.refuse(algorithm, None if self._packing is None else self._packing.name, self.size)
        self.steps = algorithms.on_these_ranks(algorithm, comm, nodes)
        self._own = algorithms.name_of(algorithm) if algorithms.is_own(algorithm) else None

    @property
    def messages(self) -> Channel:
        return self

    def allocate(self, nbytes: int) -> Host:
        """`nbytes` bytes of this rank, zero at first, on a cache line: nothing is shared here."""
        return own_memory(nbytes)

    def everywhere(self, own: Host) -> list[Host]:
        """An empty list: no other rank's memory can be reached from here."""
        return []

    def prepare(self, array: Array, name: str, *, dtype: str | None = None) -> Prepared:
        """The all-reduce of this very array, in place, with the same bits on every rank: start or run it as often as wanted.

        `dtype="bfloat16"` says that a uint16 array holds bfloat16 numbers.
        """
        small = self._pairs and array.nbytes <= PAIR_BYTES and not self._hands_over(array)
        if small and self._formats(array, dtype, name)[:2] == (None, None):
            return self._prepare_pair(array, name)
        if self.algorithm == LIBRARY:
            assert_usable(array)
            widened, _, kind = self._formats(array, dtype, name)
            return Prepared(partial(self._start_library, array, widened, kind, name)) if self.size > 1 else ALONE
        return self._prepare("allreduce", name, array, self.steps, key=THE_CHANNELS, dtype=dtype, sums=True,
                             results=((0, array.size),), on_all_ranks=True)

    def allreduce(self, array: Array, *, name: str, dtype: str | None = None) -> None:
        """Replace `array` by its sum over the ranks, in place. To do so often with one array, `prepare` it."""
        self.prepare(array, name, dtype=dtype).run()

    def start_allreduce(self, array: Array, name: str, *, dtype: str | None = None) -> Work:
        """Begin `allreduce` and return; `array` belongs to the Work until that is done. Any number may be in flight."""
        return self.prepare(array, name, dtype=dtype).start()

    def reduce_scatter(self, array: Array, algorithm: Algorithm, *, name: str, dtype: str | None = None) -> Array:
        """The sum over the ranks of part `rank` of `array` (flattened; `schedules.collectives.part`), in place and returned.

        The other parts of `array` are undefined afterwards.
        """
        mine = part(self.rank, self.size, array.size)
        self.prepare_slice(array, name, (mine.start, mine.stop), algorithm, dtype=dtype).run()
        return array.reshape(-1)[mine.start:mine.stop]

    def prepare_slice(self, array: Array, name: str, own: tuple[int, int], steps: Algorithm, *,
                      dtype: str | None = None) -> Prepared:
        """A reduce-scatter by `steps`, whose parts may have any lengths; this rank keeps elements `own` of the sum."""
        return self._prepare("reduce_scatter", name, array, steps, dtype=dtype, sums=True, results=(own,))

    def all_gather(self, array: Array, algorithm: Algorithm, *, name: str) -> None:
        """Replace each part i of `array` by rank i's, in place: bits travel as they are."""
        self.start_all_gather(array, algorithm, name).wait()

    def start_all_gather(self, array: Array, algorithm: Algorithm, name: str) -> Work:
        """Begin `all_gather` and return."""
        return self._prepare("all_gather", name, array, algorithm).start()

    def all_to_all(self, array: Array, algorithm: Algorithm, *, name: str) -> None:
        """Replace each part i of `array` by the part `rank` of rank i's, in place. ShapeError unless parts are of one length."""
        if array.size % self.size:
            raise ShapeError(f'all_to_all "{name}" needs a multiple of {self.size} elements, one part for each rank, and its '
                             f"array has {array.size}; pad it to {array.size + -array.size % self.size}")
        self._prepare("all_to_all", name, array, algorithm).run()

    def prepare_steps(self, array: Array, name: str, steps: Algorithm) -> Prepared:
        """An all-reduce by the caller's own `steps`, for arrays that hold several addends; pass the same object each time."""
        return self._prepare("allreduce", name, array, steps)

    def start_of(self, signature: Signature) -> tuple[Start, int]:
        """The start of the channel's next collective, whose messages the caller sends itself, with the tag that it gets."""
        start = self._next(signature, lambda: None)
        return start, data_tag(start.sequence, signature, self._tag_bound)

    def broadcast(self, array: Array, root: int = 0, *, name: str = "array") -> None:
        """Replace `array` by rank `root`'s, in place: bits travel as they are."""
        self._prepare(f"broadcast from {root}", name, array, partial(binomial_broadcast, root=root), key=root).run()

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Rank `root`'s `value`, on every rank, by way of JSON (so tuples arrive as lists). For start-up, not for the loop."""
        text = np.frombuffer(json.dumps(value).encode() if self.rank == root else b"", np.uint8).copy()
        length = np.array([text.size])
        self.broadcast(length, root, name="length of object")
        if self.rank != root:
            text = np.empty(self._length(length[0]), np.uint8)
        self.broadcast(text, root, name="object")
        return json.loads(text.tobytes())

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value` in rank order, on every rank, by way of JSON. For start-up, not for the loop."""
        text = json.dumps(value).encode()
        lengths = np.zeros(self.size, np.int64)
        lengths[self.rank] = len(text)
        self.allreduce(lengths, name="lengths of objects")
        ends = np.cumsum([self._length(length) for length in lengths])
        joined = np.zeros(int(ends[-1]), np.uint8)            # zero where the others write, so the sum joins the texts
        joined[ends[self.rank] - len(text):ends[self.rank]] = np.frombuffer(text, np.uint8)
        self.allreduce(joined, name="objects")
        return [json.loads(joined[end - length:end].tobytes()) for end, length in zip(ends, lengths)]

    def _length(self, told: Any) -> int:
        """The length of an object's text as another rank told it; DesyncError beyond what any has."""
        if not 0 <= told <= LONGEST_OBJECT:
            raise DesyncError(f'channel "{self.name}": a rank tells of an object of {told} bytes, and the longest have '
                              f"{LONGEST_OBJECT}; ranks run different programs, or a message was damaged")
        return int(told)

    def agree(self, value: Any, what: str) -> None:
        """DesyncError, naming the ranks and both values, unless all ranks pass equal values; `what` names the value."""
        values = self.gather_objects(value)
        different = [rank for rank, other in enumerate(values) if other != values[0]]
        if different:
            has = "has" if len(different) == 1 else "have"
            raise DesyncError(f"ranks disagree about {what}: rank 0 has {json.dumps(values[0])}, "
                              f"{numbered('rank', different)} {has} {json.dumps(values[different[0]])}")

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.allreduce(np.zeros(1, np.int8), name="barrier")

    def close(self) -> None:
        """Free the communicator; collective, like its creation. Nothing may be in flight."""
        self.comm.Free()

    def _prepare(self, operation: str, name: str, array: Array, algorithm: str | Algorithm, *, key: Any = None,
                 dtype: str | None = None, sums: bool = False, results: tuple[tuple[int, int], ...] = (),
                 on_all_ranks: bool = False) -> Prepared:
        known = (operation, name, type(array), array.dtype, array.size, dtype, algorithm if key is None else key)
        recipe = self._recipes.get(known)
        if recipe is None:
            widened, packing, kind = self._formats(array, dtype, name) if sums else (None, None, dtype_name(array.dtype))
            steps, itemsize = choose(algorithm, self.size, array.nbytes), array.itemsize if widened is None else 4
            by_device = widened is None and self._device_packs(array, packing)
            plan = self._plan((operation, known[-1], array.size, itemsize, packing, by_device), steps,
                              results if packing else None, on_all_ranks)
            signature = Signature.of(operation, name, kind, array.size)
            recipe = self._recipes[known] = Recipe(plan, signature, packing, widened)
        if self.size == 1:
            assert_usable(array)
            return ALONE
        return Prepared(partial(self._start, recipe, array))

    def _start(self, recipe: Recipe, array: Array) -> Work:
        plan, signature, packing, widened = recipe
        if widened is None and self._hands_over(array):
            return self._start_there(plan, signature, packing, array)
        staged: Values
        if plan.crossing is not None and packing is not None:
            staged = PackedByDevice(array, self.pools, packing, plan.crossing)
        else:
            staged = Staged(array, self.pools) if widened is None else Widened(array, self.pools, widened)
        memory, lent = memory_of(plan, staged, self.pools.host)

        def finish() -> None:
            staged.close()
            for buffer in lent:
                self.pools.host.give(buffer)

        start = self._next(signature, finish)
        tag = data_tag(start.sequence, signature, self._tag_bound)
        return self.progress.added(StepsWork(start, plan.rounds, memory, tag, packing, staged))

    def _device_packs(self, array: Array, packing: Format | None) -> bool:
        if packing is None or self.device_buffers or array_module(array) is np:
            return False
        from mpitrain.comm.messages.bus import device_packs
        return device_packs(array, packing)

    def _hands_over(self, array: Array) -> bool:
        return self.device_buffers and array_module(array) is not np

    def _start_there(self, plan: Plan, signature: Signature, packing: Format | None, array: Array) -> Work:
        from mpitrain.comm.messages.on_device import DeviceWork
        assert_usable(array)
        start = self._next(signature, lambda: None)
        tag, stream = data_tag(start.sequence, signature, self._tag_bound), self.pools.staging(array_module(array)).stream
        return self.progress.added(DeviceWork(start, plan, array, tag, packing, stream))

    def _start_library(self, array: Array, widened: Format | None, kind: str, name: str) -> Work:
        staged = Staged(array, self.pools) if widened is None else Widened(array, self.pools, widened)
        staged.wait()
        start = self._next(Signature.of("allreduce by MPI", name, kind, array.size), staged.close)
        return self.progress.added(LibraryWork(start, staged.host, self._piece_bytes))

    def _prepare_pair(self, array: Array, name: str) -> Prepared:
        fast, known = self._fast_pair, (name, array.dtype, array.size)
        if known not in self._pair_sums:
            signature = Signature.of("allreduce", name, dtype_name(array.dtype), array.size)
            in_c = fast is not None and array.dtype.name in KINDS and array.dtype.isnative
            self._pair_sums[known] = signature, fast.entry(array, signature) if fast is not None and in_c else None
        signature, entry = self._pair_sums[known]
        start = partial(self._start_pair, signature, array)
        if fast is None or entry is None:
            return Prepared(start)

        def run() -> None:
            if self.progress or not fast.run(entry, array, self._sequence + 1):
                start().wait()
            else:
                self._sequence += 1
        return Prepared(start, run)

    def _start_pair(self, signature: Signature, array: Array) -> Work:
        staged = Staged(array, self.pools)
        staged.wait()
        return self.progress.added(PairWork(self._next(signature, staged.close), staged.host))

    def _plan(self, key: tuple[Any, ...], algorithm: Algorithm, results: tuple[tuple[int, int], ...] | None,
              on_all_ranks: bool) -> Plan:
        """This rank's plan for arrays of one size, made once and kept under `key`."""
        if key not in self._plans:
            _, of, length, itemsize, packing, by_device = key
            if of == THE_CHANNELS and self._own is not None:
                algorithms.prove(algorithm, self._own, self.size, length, None if packing is None else packing.name)
            self._plans[key] = make_plan(algorithm, self.rank, self.size, length, itemsize, self._message_bytes, results,
                                         on_all_ranks, by_device)
        return self._plans[key]

    def _next(self, signature: Signature, finish: Callable[[], None]) -> Start:
        """The start of the channel's next collective."""
        self._sequence += 1
        return Start(self.comm, self.name, self._sequence, signature, self.progress, finish)
