"""What a run on a device has beside one on the host."""

from __future__ import annotations

from mpitrain.backend import Device
from mpitrain.config import Config
from mpitrain.parallel.pipeline.uploads import Uploads
from mpitrain.parallel.policies.policy import Policy
from mpitrain.train.build.graphs import capture
from mpitrain.train.trainer import Trainer


def prepare(trainer: Trainer, config: Config, device: Device, policy: Policy) -> None:
    """Micro-batches become graphs, where they can be captured, and batches come up a step ahead. ConfigError where graphs are
    asked for and cannot be."""
    pipeline = trainer.pipeline
    if config.train.graph != "off":
        capture(pipeline, config, device, policy)
    if pipeline.stage.index == 0 and not isinstance(config.data.x, dict):
        trainer.ahead = Uploads(pipeline.feed).ahead
