"""All-reduce in memory that the ranks of a node share: no message, no copy, one pass over the data.

    rank 0's array   [ slice 0 | slice 1 ]        each rank waits until all arrays are ready, sums its slice of all of them
    rank 1's array   [ slice 0 | slice 1 ]        in a fixed order and writes the sum into every array: two phases, 2 S bytes
                         ^ 0       ^ 1            moved a rank, whatever the number of ranks

Small arrays, wherever they lie, are copied into a scratch buffer each instead, and every rank sums all copies for itself: one
phase. With several nodes the slice's sum goes to the ranks of the same number on the other nodes before it is written.
Larger arrays outside shared memory go by messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mpitrain.comm.messages.buffers import Host, own_memory
from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.messages.progress import Progress
from mpitrain.comm.messages.signature import Signature
from mpitrain.comm.shared import engine
from mpitrain.comm.shared.engine import MESSAGE, ONE_SHOT, PARTIAL, SCATTER, SCRATCH_BYTES, TWO_SHOT, Control, Engine, Plan, Turn
from mpitrain.comm.shared.fold import TYPES, check_program, kernels, left_fold, type_name
from mpitrain.comm.shared.node import Node
from mpitrain.comm.shared.queue import Across, Queue, SharedSum, SliceSum
from mpitrain.comm.shared.window import address_of, inside, slice_between_lines
from mpitrain.errors import ShapeError

if TYPE_CHECKING:
    from mpitrain.comm.work import Collective, Work
    from mpitrain.schedules.steps import Algorithm

Order: TypeAlias = Callable[[int], Sequence[int]]             # it maps n to a program of `comm.shared.fold` for n arrays
SPIN = 30_000                         # ns awake before sleeping: a flag crosses cores in 0.1 us, a wake-up takes 5 to 50 us


class SharedChannel:
    """The channel `messages`, with shared memory on the node for arrays in it. Owns that channel, not `node`.

    Made and closed by all ranks of the channel together; they must be the ranks that `node` was made from, in its order. All
    methods are collective in the same order (DesyncError). `order` gives the order in which the ranks of a node are added up, as
    a program of `comm.shared.fold`. `shared` says whether ranks of a node sum in shared memory what lies in it; `cross` is the
    channel to the same-numbered ranks of other nodes, where there are several. Where memory cannot be shared, everything goes by
    messages and `notes` says why, a line each.
    """

    def __init__(self, messages: Channel, node: Node, *, order: Order = left_fold):
        assert (messages.rank, messages.size) == (node.base.rank, node.base.size), "the node is of another communicator"
        self.messages, self.node = messages, node
        self.name, self.size, self.rank = messages.name, messages.size, messages.rank
        self.order = list(order(node.size))
        check_program(self.order, node.size)
        self.cross: Channel | None = None
        self._windows: list[list[Host]] = []                  # every rank's part, for each `allocate`
        self.obstacle = self._obstacle()                      # empty unless these ranks cannot share memory, however much is free
        self.notes = [f"{self.name}: {self.obstacle}, messages instead of shared memory"] if self.obstacle else []
        self.shared = not self.notes and self.size > 1
        if self.shared:
            self._open()

    @property
    def shares_all(self) -> bool:
        """Whether all ranks share memory and all of it could be had, so that no sum of arrays in it needs a message."""
        return self.shared and self.cross is None and not self.notes

    @property
    def algorithm(self) -> str | Algorithm:
        return self.messages.algorithm

    def allocate(self, nbytes: int) -> Host:
        """`nbytes` bytes, zero at first, on a cache line; every rank asks for the same sizes in the same order.

        The memory is shared where possible, else this rank's own, with a line in `notes`. Valid until the node is closed.
        """
        parts = self.node.allocate(nbytes, self.name) if self.shared else None
        if self.shared and self.messages.gather_objects(parts is None).count(True):
            self.notes += [note for note in self.node.notes if note not in self.notes] or \
                [f"{self.name}: no shared memory on another node, messages instead"]
            parts = None
        if parts is None:
            return own_memory(nbytes)
        self._windows.append(parts)
        return parts[self.node.rank]

    def everywhere(self, own: Host) -> list[Host]:
        """Every rank's memory of one `allocate`, in rank order; an empty list where one cannot be reached from here.

        A rank may read another's once both have come out of a collective that began after it was written.
        """
        found = next((parts for parts in self._windows if parts[self.node.rank] is own), [])
        return list(found) if self.node.size == self.size else []

    def prepare(self, array: Any, name: str, *, dtype: str | None = None) -> Collective:
        """The all-reduce of this very array: see `Channel.prepare`.

        `dtype` names a number type that NumPy lacks: "bfloat16" for an array of uint16.
        """
        if not self.shared:
            return self._by_messages(array, name, dtype)
        plan = self._plan(array, name, dtype)
        messages = self._by_messages(array, name, dtype).start if plan.mode == MESSAGE and array.size else None
        return SharedSum(self.queue, self._engine, self._turn, plan, array if array.ndim == 1 else array.reshape(-1), messages)

    def allreduce(self, array: Any, *, name: str, dtype: str | None = None) -> None:
        """Replace `array` by its sum over the ranks, in place; the same bits on every rank. To do it often, `prepare` it."""
        self.prepare(array, name, dtype=dtype).run()

    def start_allreduce(self, array: Any, name: str, *, dtype: str | None = None) -> Work:
        """Begin `allreduce` and return; `array` belongs to the work until that is done. Any number may be in flight."""
        return self.prepare(array, name, dtype=dtype).start()

    def prepare_across(self, array: Any, name: str, own: tuple[int, int], across: Across) -> Collective:
        """The all-reduce of an array in memory of `allocate`, where there are several nodes: the node's sum of elements `own` is
        summed over nodes by `across`. The slices of a node's ranks cover the array; ranks of one number on all nodes have the
        same."""
        assert self.cross is not None
        plan = self._plan(array, name, None, own)
        assert plan.mode == PARTIAL, f'"{name}" does not lie in memory of `allocate`'
        return SharedSum(self.queue, self._engine, self._turn, plan, array.reshape(-1), across=across)

    def prepare_slice(self, array: Any, name: str, own: tuple[int, int], steps: Algorithm) -> Collective:
        """A reduce-scatter; this rank keeps elements `own`. In shared memory where `shares_all`, else messages by `steps`."""
        return self.prepare_sum_of_slice(array, name, own) if self.shares_all else \
            self.messages.prepare_slice(array, name, own, steps)

    @property
    def fuses(self) -> bool:
        """Whether a slice's sum takes `passes`: there is a compiler, and no other node has a part in the sum."""
        return self.shared and self._native and self.cross is None

    def prepare_sum_of_slice(self, array: Any, name: str, own: tuple[int, int],
                             then: Callable[[], None] | None = None) -> SliceSum:
        """A reduce-scatter in place; this rank keeps elements `own` of the sum, and its others are left as they are.

        `array` is float32 or float64 in memory of `allocate`. The slices of a node's ranks cover it without overlap; ranks of
        the same number on all nodes have the same slice. `then` is called once after each start that C does not end, when the
        sum is there. Where `fuses`, `start` takes `passes`. Other ranks may still read `array` when the work is done.
        """
        return SliceSum(self.queue, self._engine, self._turn, self._plan_of_slice(array, name, own), array.reshape(-1), then=then)

    def close(self) -> None:
        """Free the channels. Nothing may be in flight; the memory lives on until the node is closed."""
        if self.cross is not None:
            self.cross.close()
        self.messages.close()

    def _obstacle(self) -> str:
        """The reason why memory cannot be shared, or empty text; the same on all ranks."""
        facts = self.messages.gather_objects([self.node.size, kernels() is not None, engine.can_poll()])
        self._native = all(native for _, native, _ in facts)
        sizes = {size for size, _, _ in facts}
        if len(sizes) > 1:
            return f"nodes have from {min(sizes)} to {max(sizes)} ranks"
        if sizes == {1} and self.size > 1:
            return "one rank on each node"
        if not self._native and not all(x86 for _, _, x86 in facts):
            return "no C compiler, and this CPU may reorder stores"
        return ""

    def _open(self) -> None:
        node = self.node
        block = node.block(Control.nbytes(node.size), self.name)
        if any(self.messages.gather_objects(block is None)):
            self.notes += node.notes or [f"{self.name}: no shared memory on another node, messages instead"]
            self.shared = False
            return
        assert block is not None
        self._control = Control(block, node.size, node.rank)
        self._turn = Turn(0, 0 if node.crowded else SPIN)
        self._engine: Engine = engine.Native(kernels()) if self._native else engine.Polling(self._control)
        if node.size < self.size:
            comm = node.base.Split(node.rank, node.base.rank)
            self.cross = Channel(comm, f"{self.name} across nodes", algorithm=self.messages.algorithm, progress=Progress(),
                                 wire=self.messages.wire)
        self.queue = Queue(self.name, node, self._control, self._engine, self._turn, self.cross)

    def _by_messages(self, array: Any, name: str, dtype: str | None) -> Collective:
        if dtype not in (None, array.dtype.name):
            raise ShapeError(f'{dtype} array "{name}" on channel "{self.name}" cannot go by messages; let it lie in memory of '
                             f"`allocate`" + (f" ({self.notes[-1]})" if self.notes else ""))
        return self.messages.prepare(array, name)

    def _plan(self, array: Any, name: str, dtype: str | None, own: tuple[int, int] | None = None) -> Plan:
        """The plan of this array: in memory of `allocate`, through the scratch buffers if it is small, else by messages. This
        rank sums elements `own` (default: a part that begins on a cache line)."""
        address, number_type = address_of(array), dtype or array.dtype.name
        if dtype is not None:
            type_name(array, dtype)                           # it raises ShapeError for types without a kernel
        place, parts = self._in_window(array, address)
        mode = MESSAGE
        if number_type in TYPES and type(array) is np.ndarray and array.size and array.dtype.isnative:
            if self.cross is None and array.nbytes <= SCRATCH_BYTES:
                mode, place = ONE_SHOT, ""                    # other ranks may have it elsewhere
            elif parts and not (self.cross is not None and number_type == "bfloat16"):
                mode = TWO_SHOT if self.cross is None else PARTIAL
        if mode == MESSAGE:
            place = " by messages"
        own = own or slice_between_lines(address, array.itemsize, array.size, self.node.size, self.node.rank)
        return Plan(self._control, self._turn, mode, number_type, array.size, self.order,
                    Signature.of("allreduce", name + place, number_type, array.size), parts, own, address)

    def _plan_of_slice(self, array: Any, name: str, own: tuple[int, int]) -> Plan:
        if not self.shared:
            raise ShapeError(f'a sum in slices needs shared memory: {"; ".join(self.notes) or "there is one rank"}')
        address = address_of(array)
        place, parts = self._in_window(array, address)
        if not parts or array.dtype.kind != "f":
            raise ShapeError(f'"{name}" on channel "{self.name}" is {array.dtype} outside the memory of `allocate`; a sum in '
                             f"slices works on float32 or float64 inside it")
        signature = Signature.of("reduce_scatter", name + place, str(array.dtype), array.size)
        return Plan(self._control, self._turn, SCATTER, array.dtype.name, array.size, self.order, signature, parts, own,
                    address)

    def _in_window(self, array: Any, address: int) -> tuple[str, list[Host]]:
        """The place of an array in a window, as signatures name it, and every rank's array at that place; else empty."""
        for i, window in enumerate(self._windows):
            if address and inside(window[self.node.rank], address, array.nbytes):
                offset = address - window[self.node.rank].ctypes.data
                return f" at byte {offset} of arena {i}", [part[offset:offset + array.nbytes] for part in window]
        return "", []
