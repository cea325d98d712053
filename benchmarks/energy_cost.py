"""The cost of measuring energy: training steps with [energy] beside the same steps without, in turn in one process.

    python benchmarks/energy_cost.py [--models mlp,gpt-nano] [--pairs 40] [--seconds 0.5] [--period-ms 50] [--json FILE]
    mpirun -n 2 python benchmarks/energy_cost.py

A turn is so many steps as take `seconds`, put together as in training: data and step spans, and a line of the log every 10 steps.
With energy, a reader looks at a tree of files that stands for two packages with memory, and ranks write their phases to shared
memory. Ratios are medians over pairs, with quartiles: of time, and of processor time, which other programs on the machine move
less. `parts` are what a span, a reading and a line of the log take by themselves, and the share of a step that they make: a lower
bound, which other programs hardly move. Bar: at most 1.005.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests/energy")]
from trees import set_joules, zone  # noqa: E402

from mpitrain.backend import keep_freed_memory  # noqa: E402
from mpitrain.bench.pairs import Pairs, alternate, quartiles  # noqa: E402
from mpitrain.bench.train import WARM_UP, Training  # noqa: E402
from mpitrain.bench.workloads import WORKLOADS  # noqa: E402
from mpitrain.comm.job.start import World, start  # noqa: E402
from mpitrain.config.energy import EnergyConfig  # noqa: E402
from mpitrain.parallel.gradients.timeline import no_span  # noqa: E402
from mpitrain.train.intervals import Plan, Step  # noqa: E402
from mpitrain.train.machine import threads  # noqa: E402
from mpitrain.train.observers.energy import EnergyUse  # noqa: E402
from mpitrain.train.observers.observer import Watched  # noqa: E402

LOGGED = 10


def fastest(run: Callable[[], object], calls: int, tries: int = 7) -> float:
    """Microseconds of a call."""
    took = []
    for _ in range(tries):
        began = time.perf_counter()
        for _ in range(calls):
            run()
        took.append((time.perf_counter() - began) / calls)
    return 1e6 * min(took)


def tree(root: Path) -> list[Path]:
    """Two packages with memory beside them."""
    packages = [zone(root, f"intel-rapl:{i}", f"package-{i}") for i in range(2)]
    return [*packages, *(zone(package, f"{package.name}:0", "dram") for package in packages)]


class Turns:
    """The steps of one model with and without energy; all ranks make it and call it alike."""

    def __init__(self, name: str, world: World, seconds: float, config: EnergyConfig, zones: list[Path]):
        self.world, self.config, self.zones, self.joules = world, config, zones, 1.0
        self.training = Training(WORKLOADS[name], world.comm)
        self.trainer: Any = self.training.job.trainer
        self.timeline, self.channel = self.training.job.timeline, self.training.job.channel
        self.node = self.training.job.state.mesh.node(self.channel) if world.size > 1 else None
        self.cpu: dict[bool, list[float]] = {True: [], False: []}         # processor seconds a step, with energy and without
        self.training.run(WARM_UP)
        began = time.perf_counter()
        self.training.run(WARM_UP)
        took = max(self.channel.gather_objects(time.perf_counter() - began)) / WARM_UP
        self.steps = max(LOGGED, round(seconds / took))
        self.plan = Plan(1 << 30, 1 << 30, WORKLOADS[name].batch, 0, 0, False, LOGGED)

    def without(self, turn: int) -> float:
        self.timeline.listener, self.timeline.landed = no_span, lambda: None
        return self._turn(None)

    def measured(self, turn: int) -> float:
        self.timeline.listener, self.timeline.landed = no_span, lambda: None
        self.joules += 1.0
        for one in self.zones if self.world.rank == 0 else ():
            set_joules(one, self.joules)
        observer = EnergyUse(self.config, self.channel, self.node, self.timeline)
        observer.begin(Watched(self.channel.rank, self.channel.size, 0, self.plan, None, lambda text: None, {}))
        seconds = self._turn(observer)
        observer.finish(self.steps)
        observer.close()
        return seconds

    def parts(self, step_s: float) -> dict[str, float]:
        """Microseconds of a span, a reading and a line, each the fastest of several tries, and the share of a step of so long."""
        self.timeline.listener, self.timeline.landed = no_span, lambda: None
        observer = EnergyUse(self.config, self.channel, self.node, self.timeline)
        observer.begin(Watched(self.channel.rank, self.channel.size, 0, self.plan, None, lambda text: None, {}))
        spans = [0]
        plain = self.timeline.listener

        def counted(row: str, name: str) -> Any:
            spans[0] += 1
            return plain(row, name)
        self.timeline.listener = counted
        self.training.launch()
        self.timeline.listener = plain

        def spanned() -> None:
            with self.trainer.span("compute", "forward 0"):
                pass
        step = Step(0.0, 0.0, None, 0.0)
        span_us, line_us = fastest(spanned, 2000), fastest(lambda: observer.after_step(LOGGED, step, 0.0), 50)
        sample_us = fastest(observer.reader.sample, 50) if observer.reader is not None else 0.0
        observer.finish(self.steps)
        observer.close()
        each = (spans[0] + 2) * span_us + line_us / LOGGED + sample_us * step_s / (1e-3 * self.config.period_ms)
        return {"spans": spans[0] + 2, "span_us": span_us, "reading_us": sample_us, "line_us": line_us,
                "share": 1e-6 * each / step_s}

    def _turn(self, observer: EnergyUse | None) -> float:
        span = self.trainer.span
        self.world.comm.Barrier()
        began, cpu = time.perf_counter(), time.process_time()
        for step in range(1, self.steps + 1):
            with span("data", "wait for a batch"):
                pass
            with span("step", f"step {step}"):
                self.training.launch()
            if observer is not None:
                observer.after_step(step, Step(0.0, 0.0, None, 0.0), 0.0)
        self.cpu[observer is not None].append((time.process_time() - cpu) / self.steps)
        return (time.perf_counter() - began) / self.steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mlp,gpt-nano")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--period-ms", type=float, default=50.0)
    parser.add_argument("--json", type=Path, help="write one object a line")
    given = parser.parse_args()
    keep_freed_memory()
    world, lines = start(), []
    threads.pin(1)
    with tempfile.TemporaryDirectory() as name:
        zones = tree(Path(name))
        config = EnergyConfig(source="powercap", root=name, period_ms=given.period_ms)
        for model in given.models.split(","):
            turns = Turns(model, world, given.seconds, config, zones)
            found = alternate(turns.measured, turns.without, given.pairs)
            parts = turns.parts(statistics.median(found.theirs))
            turns.training.close()
            cpu = Pairs(*(turns.cpu[measured][-given.pairs:] for measured in (True, False)))
            line: dict[str, Any] = {"what": "energy_cost", "model": model, "ranks": world.size, "parts": parts}
            said = [f"{model:10} {world.size} rank(s)  "]
            for what, pairs in (("time", found), ("cpu", cpu)):
                one = pairs.summary("without")
                ms, ratios = [1e3 * one[key] for key in ("seconds", "without_seconds")], [1 / ratio for ratio in pairs.ratios]
                low, high = quartiles(ratios)
                line[what] = {"ms": ms, "ratio": statistics.median(ratios), "quartiles": [low, high], "pairs": given.pairs}
                said.append(f"{what} {ms[0]:.3f} ms with, {ms[1]:.3f} without, ratio {line[what]['ratio']:.4f} ({low:.4f} .. "
                            f"{high:.4f})  ")
            said.append(f"parts: {parts['spans']} spans of {parts['span_us']:.2f} us, a reading {parts['reading_us']:.0f} us, "
                        f"a line {parts['line_us']:.0f} us: {parts['share']:.3%} of a step")
            lines.append(line)
            if world.rank == 0:
                print("".join(said).rstrip(), flush=True)
    if given.json and world.rank == 0:
        given.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
