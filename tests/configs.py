"""Configurations for tests that build a run from Python: keys without their sections, where these are clear."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from mpitrain.config.sections import SECTIONS, Config

ORDER = ("train", "mesh", "comm", "optimizer", "data", "run", "sync", "checkpoint", "log")   # the first that has the key
OTHER = {"log_every": ("log", "every"), "bucket_bytes": ("comm", "bucket_mb")}


def flat(**keys: Any) -> Config:
    """The configuration with these keys: ``flat(steps=3, sharding="optimizer")``."""
    config = Config()
    for key, value in keys.items():
        section, name = OTHER.get(key) or (next(s for s in ORDER if key in {f.name for f in fields(SECTIONS[s])}), key)
        value = value / 2**20 if key == "bucket_bytes" else value
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config
