"""Batch normalisation over all ranks: gives each SyncBatchNorm layer the reduction it asks for."""

from __future__ import annotations

from mpitrain.backend import Array
from mpitrain.comm.messages.channel import Channel
from mpitrain.nn import Module, SyncBatchNorm
from mpitrain.nn.across import Across


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
