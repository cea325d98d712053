"""`mesh.stages = "time"`: the cut of a model by the times of its blocks, measured once and kept for the whole run."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain import nn
from mpitrain.backend import Device
from mpitrain.comm.job.together import on_first
from mpitrain.comm.messages.channel import Channel
from mpitrain.placement.stages import balanced
from mpitrain.train.build.inputs import Inputs


class MeasuredCut:
    """The number of blocks of each virtual stage so that all take about equally long, by times that rank 0 measures.

    All ranks call it alike with the model. `rows` is the size of a micro-batch, `parts` the number of virtual stages.
    """

    def __init__(self, inputs: Inputs, control: Channel, device: Device, *, rows: int, parts: int, seed: int, precision: str):
        self.inputs, self.control, self.device, self.rows, self.parts = inputs, control, device, rows, parts
        self.seed, self.precision = seed, precision
        self.choices: dict[str, Any] = {}                    # the seconds behind the cut, once it is made

    def __call__(self, model: nn.Sequential) -> list[int]:
        seconds: list[float] = on_first(self.control, lambda: self._measure(model))
        self.choices["block_seconds"] = dict(zip(model.blocks, seconds))
        return balanced(seconds, self.parts)

    def _measure(self, model: nn.Sequential) -> list[float]:
        from mpitrain.parallel.pipeline.block_seconds import block_seconds
        x, _ = self.inputs.sample()
        return block_seconds(model, np.repeat(x, self.rows, axis=0), seed=self.seed, precision=self.precision,
                             device=self.device, tokens=self.inputs.tokens)


def kept(stages: Any, parts: int, choices: dict[str, Any] | None) -> Any:
    """`stages` if it is no measured cut, else the numbers of blocks that a run has chosen for so many virtual stages.

    If that run had another number of them, "time" stays for a new one to measure.
    """
    bounds = (choices or {}).get("stages") or []
    return [b - a for a, b in zip(bounds, bounds[1:])] if stages == "time" and len(bounds) == parts + 1 else stages
