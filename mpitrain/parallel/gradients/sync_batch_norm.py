"""Batch normalisation over all ranks: gives each SyncBatchNorm layer the reduction it asks for."""

from __future__ import annotations

from mpitrain.backend import Array
from mpitrain.comm.messages.channel import Channel
from mpitrain.errors import ConfigError
from mpitrain.nn import Module, SyncBatchNorm
from mpitrain.nn.across import Across


class SumOverRanks(Across):
    """What a SyncBatchNorm asks of the ranks of a channel; with no channel, the sum over this rank."""

    def __init__(self, channel: Channel | None):
        self.channel = channel

    def reduce(self, array: Array) -> None:
        if self.channel is not None:
            self.channel.allreduce(array, name="batch norm")

    def alone(self) -> Across:
        return SumOverRanks(None)


def synchronise_batch_norm(model: Module, channel: Channel, n_micro: int, n_ranks: int, *, drop_last: bool) -> int:
    """Every SyncBatchNorm of `model` sums over `channel` from now on; returns how many there are.

    Each use is a collective, so every rank must run the same number of micro-batches in every step.
    """
    layers = [module for _, module in model.named_modules() if isinstance(module, SyncBatchNorm)]
    if layers and n_micro % n_ranks:
        raise ConfigError(f"synchronised batch norm needs as many micro-batches on each rank: {n_micro} do not divide by "
                          f"{n_ranks}; change train.micro_batches")
    if layers and not drop_last:
        raise ConfigError("synchronised batch norm needs as many micro-batches on each rank, which a short last batch may not "
                          "have; set data.drop_last = true")

    for layer in layers:
        layer.across = SumOverRanks(channel)
    return len(layers)
