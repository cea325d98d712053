"""All parameters, gradients and optimizer state on every rank: each has the whole sum, and updates with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpitrain.comm.face import AnyChannel
from mpitrain.comm.messages.channel import Channel
from mpitrain.parallel.gradients.bucket_sum import AllReduce, BucketSum, TreeSum
from mpitrain.parallel.gradients.reducer import GradientReducer
from mpitrain.parallel.policies.policy import Policy, Setup
from mpitrain.schedules.grid import COPIES

WAYS = {"nccl": "NCCL", "ipc": "the memory of one GPU"}      # by comm.library; "mpi": the channel's own


class Replicated(Policy):
    """A policy that keeps whole parameters and adds up gradients in another way redefines `bucket_sum`."""

    def __init__(self, setup: Setup, channel: AnyChannel):
        super().__init__(setup, channel)
        self.of_experts: Channel | None = None if self.mesh.size("ep") == 1 else self.mesh.channel(
            COPIES, "gradients of experts", algorithm=channel.algorithm, wire=channel.messages.wire)
        if self.of_experts is not None:
            self.of_experts.device_buffers = channel.messages.device_buffers
        self.allocate_gradients: Callable[[int], Any] | None = None       # makes the arena that ranks sum, where they share it

    def bucket_sum(self) -> BucketSum:
        """How buckets are added up over the ranks."""
        if self.setup.config.comm.compress:
            from mpitrain.parallel.compress.choose import choose
            found = choose(self.setup.config, self.channel, self.layout, lambda: self.step)
            if not isinstance(found, str):
                self.compressed = found
                return found
            self.said.append(found)
        if self.setup.config.comm.library == "nccl" and self.channel.size > 1:
            from mpitrain.parallel.gradients.nccl_sum import NcclSum
            return NcclSum(self.channel.messages, self.setup.device)
        if self.setup.config.comm.library == "ipc" and self.channel.size > 1:
            from mpitrain.parallel.gradients.ipc_sum import IpcSum
            shared = IpcSum(self.channel.messages, self.setup.device)
            self.allocate_gradients = shared.allocate
            return shared
        return TreeSum(self.channel, self.tree) if self.tree else AllReduce(self.channel)

    def way(self) -> str:
        way = WAYS.get(self.setup.config.comm.library) or super().way()
        return way if self.compressed is None else f"{way}, compressed between {self.compressed.workers} workers"

    def unlike(self, step: int) -> Sequence[str]:
        return () if self.compressed is None else ("workers", "compress")

    def make_reducer(self) -> GradientReducer:
        apart = [self.of_experts if "ep" in s.parameter.placement else None for s in self.layout.segments]
        bucket_sum = self.bucket_sum()
        if self.channel.shared and not self.tree and self.allocate_gradients is None:    # The sums of a tree go by messages.
            self.allocate_gradients = self.channel.allocate
        reducer = self.reducer_over(bucket_sum, apart=apart, allocate=self.allocate_gradients)
        if self.compressed is not None:
            from mpitrain.parallel.compress.choose import open_sum
            reducer.reserve()
            self.said += open_sum(self.compressed, reducer.buckets, self.context.control)
        return reducer

    def update(self, gradients: Any, lr: float, scale: float) -> None:
        self.change(gradients, lr, scale)
