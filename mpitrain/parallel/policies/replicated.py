"""All parameters, gradients and optimizer state on every rank: each has the whole sum, and updates with the same bits."""

from __future__ import annotations

from typing import Any

from mpitrain.comm.face import AnyChannel
from mpitrain.comm.messages.channel import Channel
from mpitrain.errors import ConfigError
from mpitrain.parallel.gradients.bucket_sum import AllReduce, BucketSum, TreeSum
from mpitrain.parallel.gradients.reducer import GradientReducer
from mpitrain.parallel.policies.policy import Policy, Setup
from mpitrain.schedules.grid import COPIES


class Replicated(Policy):
    """A policy that keeps whole parameters and adds up gradients in another way redefines `bucket_sum`."""

    def __init__(self, setup: Setup, channel: AnyChannel):
        super().__init__(setup, channel)
        self.of_experts: Channel | None = None if self.mesh.size("ep") == 1 else self.mesh.channel(
            COPIES, "gradients of experts", algorithm=channel.algorithm, wire=channel.messages.wire)

    def bucket_sum(self) -> BucketSum:
        """How buckets are added up over the ranks."""
        if self.setup.config.comm.library == "nccl" and self.channel.size > 1:
            from mpitrain.parallel.gradients.nccl_sum import NcclSum
            if self.of_experts is not None:
                raise ConfigError('comm.library = "nccl" adds up gradients of all ranks, and those of experts are of fewer, '
                                  f'found mesh.ep = {self.mesh.size("ep")}; set comm.library = "mpi"')
            return NcclSum(self.channel.messages, self.setup.device)
        return TreeSum(self.channel, self.tree) if self.tree else AllReduce(self.channel)

    def make_reducer(self) -> GradientReducer:
        apart = [self.of_experts if "ep" in s.parameter.placement else None for s in self.layout.segments]
        shared = self.channel.shared and not self.tree        # The sums of a tree go by messages.
        return self.reducer_over(self.bucket_sum(), apart=apart, allocate=self.channel.allocate if shared else None)

    def update(self, gradients: Any, lr: float, scale: float) -> None:
        self.change(gradients, lr, scale)
