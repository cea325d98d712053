"""Batch normalisation over all ranks: gives each SyncBatchNorm layer the reduction it asks for."""

from __future__ import annotations

from mpitrain.backend import Array
from mpitrain.comm.messages.channel import Channel
from mpitrain.nn import Module, SyncBatchNorm


def synchronise_batch_norm(model: Module, channel: Channel) -> int:
    """Injects the sum over `channel` into every SyncBatchNorm of `model`; returns how many there are.

    Each use is a collective, so every rank must run the same number of micro-batches in every step.
    """
    layers = [module for _, module in model.named_modules() if isinstance(module, SyncBatchNorm)]

    def add_over_ranks(array: Array) -> None:
        channel.allreduce(array, name="batch norm")

    for layer in layers:
        layer.reduce = add_over_ranks
    return len(layers)
