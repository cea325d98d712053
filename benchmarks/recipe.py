"""The configuration that benchmarks train small nets of images with: AdamW, a cosine, batches of 64, one thread."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BATCH = 64
RECIPE = """
[optimizer]
name = "adamw"
lr = 2e-3
weight_decay = 0.01
decay = "matrices"
schedule = "cosine"
warmup_steps = 50
[train]
epochs = 10
batch_size = {batch}
threads = 1
"""


def write(file: Path, model: Mapping[str, Any], data: Mapping[str, Any], more: str = "") -> None:
    """A run's TOML: the keys of [model] and of [data], the recipe, and further keys of [train] or whole sections."""
    sections = [f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
                for name, keys in (("model", model), ("data", data))]
    file.write_text("".join(sections) + RECIPE.format(batch=BATCH).lstrip("\n") + more)
