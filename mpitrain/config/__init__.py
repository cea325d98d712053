"""The configuration of a run: sections, the TOML loader, and the rules of what may not go together."""

from mpitrain.config.load import load_config, load_run, made_config, to_toml
from mpitrain.config.sections import (
    SECTIONS,
    CheckpointConfig,
    CommConfig,
    Config,
    DataConfig,
    LogConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
    changed,
)

__all__ = ["SECTIONS", "CheckpointConfig", "CommConfig", "Config", "DataConfig", "LogConfig", "MeshConfig", "ModelConfig",
           "OptimizerConfig", "RunConfig", "TrainConfig", "changed", "load_config", "load_run", "made_config",
           "to_toml"]
