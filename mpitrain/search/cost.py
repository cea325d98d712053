"""What a trial costs, beside the metrics of its evaluations.

    parameters   of the whole model, from its shapes
    flops        two for each multiply-add of a sample's forward pass, from its shapes (`plan.flops`)
    ms           the median of its training steps, by the clock of its first rank: the step_s of its metrics.jsonl
    J            joules so far of [energy]: those in its metrics.jsonl, for the steps that no line counts as for the others, times
                 this trial's part of the ranks, since a counter counts all that its host does; None where they are unknown
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.backend import CPU
from mpitrain.backend.memory import available
from mpitrain.comm.face import Objects
from mpitrain.comm.job import guard
from mpitrain.config import Config
from mpitrain.energy.report import NOT_YET
from mpitrain.errors import ConfigError
from mpitrain.nn.by_name import ByName
from mpitrain.parallel.pipeline.feed import Feed
from mpitrain.placement.place import place
from mpitrain.plan.flops import count
from mpitrain.plan.memory import forecast_of
from mpitrain.schedules.grid import Grid
from mpitrain.search.front import Objective
from mpitrain.train.build.inputs import Inputs
from mpitrain.train.build.model import make_model
from mpitrain.train.build.sizes import with_sizes
from mpitrain.train.machine.threads import Place

SMALL = 8               # a model whose parameters and gradients take less than 1/SMALL of the memory needs no forecast


class Costs:
    """The costs that a study asks for; `share` is the part of a host's ranks that a trial has there."""

    def __init__(self, objectives: Sequence[Objective], inputs: Inputs, share: float):
        self.asked = {one.name for one in objectives}
        self.inputs, self.share = inputs, share

    def of_shapes(self, config: Config) -> dict[str, int]:
        """`parameters` and `flops`, where they are objectives."""
        found: dict[str, int] = {}
        if self.asked & {"parameters", "flops"}:
            model = make_model(with_sizes(config, self.inputs))
            found["parameters"] = model.count_parameters()
            if "flops" in self.asked:
                sample = Feed(CPU, np.dtype("float32"), tokens=self.inputs.tokens).tensors(self.inputs.sample()[0])
                found["flops"] = 2 * count(model, sample if isinstance(sample, ByName) else sample.array).forward
        return found

    def of_run(self, metrics: Path, step: int, batch: int) -> dict[str, float | None]:
        """`ms`, and `J` where something counts it, of a trial after a step. ConfigError where no line has an objective."""
        lines = _steps(metrics, step)
        if not lines:
            for name in sorted(self.asked & {"ms", "J"}):
                raise ConfigError(f"-{name} is read from metrics.jsonl, which has no line of the first {step} steps; set "
                                  f"log.every to {step} or less", file=metrics)
            return {}
        found: dict[str, float | None] = {"ms": 1e3 * statistics.median(line["step_s"] for line in lines)}
        if "J" in self.asked or "joules" in lines[0]:
            joules = joules_of(lines, batch)
            found["J"] = None if joules is None else joules * step * batch * self.share
        return found

    def unknown(self, values: Mapping[str, Any], metrics: Path, step: int) -> str:
        """Why the joules of a trial, which are an objective, are unknown; "" where they are not."""
        if "J" not in self.asked or values.get("J") is not None:
            return ""
        lost = next((line for line in _steps(metrics, step) if is_lost(line)), None)
        how = f"its counter has not moved in {step} steps" if lost is None else f"its counter is lost before step {lost['step']}"
        return f"-J is an objective, and the joules of this trial are unknown: {how}"


def joules_of(lines: Sequence[Mapping[str, Any]], batch: int) -> float | None:
    """Joules a sample of the lines of steps, with batches of so many; None where the counter was lost, or has never moved. A
    line before it moves counts with the next one that has joules."""
    if any(map(is_lost, lines)):
        return None
    joules = samples = 0.0
    for before, line in zip([None, *lines[:-1]], lines):
        if line.get("joules_per_sample"):
            joules += line["joules"]
            samples += line["joules"] / line["joules_per_sample"]
        elif line.get("joules") is not None and before is not None:        # 0 J: it has not moved since the line before
            samples += (line["step"] - before["step"]) * batch
    return joules / samples if joules else None


def is_lost(line: Mapping[str, Any]) -> bool:
    """Whether a line has no joules, and no line after it has those."""
    return line.get("joules") is None and line.get("energy_source") != NOT_YET


def refuse_without_joules(objectives: Sequence[Objective], config: Config) -> None:
    """ConfigError where joules are an objective and nothing counts them."""
    if any(one.name == "J" for one in objectives) and config.energy.source == "off":
        raise ConfigError('-J cannot be an objective while energy.source = "off": the joules of every trial would be unknown; '
                          'set energy.source = "auto"')


def refuse_unknown_joules(objectives: Sequence[Objective], config: Config, control: Objects, places: Sequence[Place]) -> None:
    """ConfigError, on all ranks, where joules are an objective and no host has a counter, and no watts to estimate them by. It
    communicates."""
    if not any(one.name == "J" for one in objectives) or config.energy.source == "model" or config.energy.busy_watts > 0:
        return
    from mpitrain.energy.sources import Asked, open_counters
    hosts = [one.host for one in places]
    why = ""
    if hosts.index(hosts[control.rank]) == control.rank and config.energy.source != "nvml":      # GPUs are the trials' to open
        found = open_counters(Asked(config.energy.source, Path(config.energy.root)))
        why = "" if found.counter is not None else found.error.message if found.error is not None else "there is no counter"
    everyone = control.gather_objects(why)
    with guard.symmetric():
        for host, said in zip(hosts, everyone):
            if said:
                raise ConfigError(f"-J cannot be an objective: joules of {host} are unknown ({said}); give energy.idle_watts and "
                                  "energy.busy_watts for estimates, or take it out of search.objective")


def memory_of_a_rank(ranks_of_host: int) -> int:
    """Bytes that each of the ranks of this host may take."""
    return available() // ranks_of_host


def refuse_too_large(config: Config, inputs: Inputs, lengths: Mapping[str, int], room: int) -> None:
    """ConfigError, E_MEMORY, where a rank of a mesh of these lengths would need more than `room` bytes for this run; nothing
    large is allocated."""
    config, mesh = with_sizes(config, inputs), config.mesh
    rough = 2 * np.dtype(np.float32).itemsize * make_model(config).count_parameters() // (mesh.pp * mesh.tp * mesh.ep)
    if rough * SMALL < room:
        return
    found = forecast_of(config, place(make_model(config), Grid(dict(lengths)), mesh, config.train, config.comm), inputs)
    most = max([rough, *(use.pool or 0 for use in found.stages)])
    if most > room:
        raise ConfigError(f"a rank would need {most >> 20} MiB, and {room >> 20} MiB are free for each; cut the model "
                          "in [mesh], give a trial more ranks, or take the value out of [space]", code="E_MEMORY")


def _steps(metrics: Path, step: int) -> list[dict[str, Any]]:
    """The lines of training steps until `step`; a line in the making is none."""
    try:
        lines = metrics.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    found = [json.loads(line) for line in lines]
    return [line for line in found if "step_s" in line and line["step"] <= step]
