"""A policy on a channel that a test made up, without a mesh of ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mpitrain import nn
from mpitrain.backend import CPU
from mpitrain.config import CommConfig, Config, OptimizerConfig, RunConfig, TrainConfig
from mpitrain.parallel.connect import ParallelContext
from mpitrain.parallel.policies.policy import Policy, Setup
from mpitrain.placement.place import place
from mpitrain.schedules.grid import Grid


def initialised(kind: Any, model: nn.Module, channel: Any, *, clip_norm: float = 0.0, precision: str = "float32", seed: int = 1,
                bucket_bytes: int = 4096, **comm: Any) -> Policy:
    """A policy whose model has its memory; `comm` are keys of [comm]."""
    mesh: Any = SimpleNamespace(size=lambda axis: 1, progress=SimpleNamespace(progress=None))
    config = Config(run=RunConfig(seed=seed), train=TrainConfig(precision=precision),
                    optimizer=OptimizerConfig(clip_norm=clip_norm), comm=CommConfig(bucket_mb=bucket_bytes / 2**20, **comm))
    context = ParallelContext(place(model, Grid({}), config.mesh, config.train, config.comm), mesh, channel, channel, channel)
    policy: Policy = kind(Setup(config, context, CPU), channel)
    policy.initialise()
    return policy
