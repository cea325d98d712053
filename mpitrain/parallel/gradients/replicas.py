"""All ranks start from the same bits, by a broadcast and checksums, and normalise with the same SyncBatchNorm statistics."""

from __future__ import annotations

import hashlib

import numpy as np

from mpitrain.backend import Array, array_module, asnumpy
from mpitrain.comm.messages.channel import Channel
from mpitrain.nn import Module, SyncBatchNorm
from mpitrain.nn.across import Across


def broadcast_state(arrays: dict[str, Array], channel: Channel) -> None:
    """Every rank gets rank 0's values, in place, and proves it: raises DesyncError where a checksum differs afterwards.

    Initial values are functions of (seed, name), so they should be equal already; a user's own model may have drawn its own.
    """
    if channel.size == 1:
        return                                    # A single rank saves a second for each 200 MB.
    for name, array in arrays.items():
        host = np.ascontiguousarray(asnumpy(array))
        channel.broadcast(host, name=f"initial {name}")
        if host is not array:
            array[...] = array_module(array).asarray(host)
    channel.agree(checksum(arrays), "the initial parameters (a checksum)")


def checksum(arrays: dict[str, Array]) -> str:
    """SHA-256 over names, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        host = np.ascontiguousarray(asnumpy(arrays[name]))
        digest.update(f"{name}\t{host.dtype}\t{host.shape}\n".encode())
        digest.update(host.view(np.uint8).data if host.size else b"")
    return digest.hexdigest()


class SumOverRanks(Across):
    """The all-reduce of a SyncBatchNorm over a channel; without one, over this rank alone."""

    def __init__(self, channel: Channel | None):
        self.channel = channel

    def reduce(self, array: Array) -> None:
        if self.channel is not None:
            self.channel.allreduce(array, name="batch norm")

    def alone(self) -> Across:
        return SumOverRanks(None)


def synchronise_batch_norm(model: Module, channel: Channel) -> None:
    """Every SyncBatchNorm of `model` sums over `channel` from now on.

    Each use is a collective, so every rank must run the same number of micro-batches in every step.
    """
    for _, module in model.named_modules():
        if isinstance(module, SyncBatchNorm):
            module.across = SumOverRanks(channel)
