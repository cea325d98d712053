"""The sum of arrays of several ranks in the memory of one GPU (parallel/gradients/ipc_sum.py)."""

from __future__ import annotations

from collections.abc import Sequence

from mpitrain.backend.namespace import Array
from mpitrain.backend.runtime import address
from mpitrain.errors import ShapeError
from mpitrain.kernels.device.code import Source, over

SOURCE, WIDE, MOST = Source("shared_sum"), 256, 8                     # shared_sum.cu's WIDE and MOST
VECTOR = 16                                                           # bytes that a thread loads at once
_sum = SOURCE.function("sum_of_ranks", "X!:n i in i i i i i i i i")


def sum_of_ranks(own: Array, rank: int, addresses: Sequence[int]) -> None:
    """`own`, which is the array of rank `rank`, and the arrays of the other ranks become their sum.

    `addresses` has each rank's array, as this process sees it, contiguous and of own's length and format, which nothing can check
    here. Added in the order of `schedules.steps.tree_split`; numbers of 16 bits in float32, rounded once. ShapeError for more
    than MOST ranks.
    """
    if not 0 <= rank < len(addresses) <= MOST or own.size and addresses[rank] != address(own):
        raise ShapeError(f"ranks of one GPU, {MOST} at most, add up their arrays, not rank {rank} of {len(addresses)}, with its "
                         "own array at another address")
    if own.size:
        _sum(over(-(-own.size * own.itemsize // VECTOR), WIDE), WIDE, own, len(addresses), own.size, *addresses,
             *[0] * (MOST - len(addresses)))
