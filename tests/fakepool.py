"""Where CuPy's memory pool puts arrays: the best fit among its free blocks, which are split and joined, or else anew.

As `cupy.cuda.memory.SingleDeviceMemoryPool` does it, in numbers alone: nothing here is memory. What a pool has taken of a device
is more than its arrays ever were, by the gaps between them.
"""

from __future__ import annotations

from bisect import bisect_left, insort

UNIT = 512                                            # bytes: all blocks are multiples of it


class Block:
    """A part of what was taken of the device at once; `before` and `behind` are its neighbours there."""

    def __init__(self, size: int, before: Block | None = None, behind: Block | None = None):
        self.size, self.before, self.behind, self.free = size, before, behind, False


class Blocks:
    """The blocks of a pool; `taken` bytes are the device's."""

    def __init__(self) -> None:
        self.taken = 0
        self._free: dict[int, list[Block]] = {}
        self._sizes: list[int] = []                   # those of which there are free blocks

    def take(self, size: int) -> Block:
        size = -(-size // UNIT) * UNIT
        place = bisect_left(self._sizes, size)
        if place == len(self._sizes):
            self.taken += size
            return Block(size)
        block = self._free[self._sizes[place]][-1]
        self._remove(block)
        if block.size > size:
            rest = Block(block.size - size, block, block.behind)
            if rest.behind is not None:
                rest.behind.before = rest
            block.size, block.behind = size, rest
            self._add(rest)
        return block

    def give_back(self, block: Block) -> None:
        for first, second in ((block, block.behind), (block.before, block)):
            other = second if first is block else first
            if first is None or second is None or other is None or not other.free:
                continue
            self._remove(other)
            first.size, first.behind = first.size + second.size, second.behind
            if first.behind is not None:
                first.behind.before = first
            block = first
        self._add(block)

    def trim(self) -> None:
        """Gives the device what is free as a whole."""
        for block in [one for blocks in self._free.values() for one in blocks if one.before is None and one.behind is None]:
            self._remove(block)
            self.taken -= block.size

    def _add(self, block: Block) -> None:
        block.free = True
        if block.size not in self._free:
            self._free[block.size] = []
            insort(self._sizes, block.size)
        self._free[block.size].append(block)

    def _remove(self, block: Block) -> None:
        block.free = False
        same = self._free[block.size]
        same.remove(block)
        if not same:
            del self._free[block.size]
            self._sizes.remove(block.size)
