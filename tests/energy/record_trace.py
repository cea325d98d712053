"""Records trace.npz, which test_phases replays: when each of two ranks changed its phase in a minute of real training.

    mpirun -n 2 python tests/energy/record_trace.py run.toml tests/energy/trace.npz [key=value ...]

Arrays of (n,) for each rank: `phases`, numbers in PHASES, and `microseconds`, since the change before.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from mpitrain.config import load_config
from mpitrain.energy.phases import FIRST, PhaseClock
from mpitrain.errors import Stopped
from mpitrain.run import Run
from mpitrain.train import Observer
from mpitrain.train.build import extensions

SECONDS = 60.0


class Recorded(PhaseClock):
    """Keeps the moments of all turns."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[tuple[float, int]] = []

    def turn(self, place: int) -> None:
        super().turn(place)
        self.turns.append((self.began, place))


class Recorder(Observer):
    def __init__(self, run: extensions.Assembled):
        self.run, self.clock = run, Recorded()

    def begin(self, run: object) -> None:
        timeline = self.run.policy.reducer.timeline
        timeline.listen(self.clock.span)
        timeline.when_landed(self.clock.landed)
        self.clock.start()
        self.began = self.clock.began

    def after_step(self, step: int, fields: object, seconds: float) -> None:
        if perf_counter() - self.began > SECONDS:
            self.run.trainer.stop.asked = True

    def finish(self, step: int) -> Mapping[str, Any]:
        times = np.array([self.began, *(now for now, _ in self.clock.turns)])
        found = {"phases": np.array([place - FIRST for _, place in self.clock.turns], np.uint8),
                 "microseconds": np.diff(np.rint((times - self.began) * 1e6).astype(np.int64)).astype(np.uint32)}
        everyone = self.run.control.gather_objects({name: array.tolist() for name, array in found.items()})
        if self.run.control.rank == 0:
            np.savez_compressed(sys.argv[2], **{f"{name}_{rank}": np.array(array, found[name].dtype)
                                                for rank, arrays in enumerate(everyone) for name, array in arrays.items()})
        return {}


def main() -> None:
    observe = extensions.observe

    def with_recorder(run: extensions.Assembled) -> None:
        observe(run)
        run.trainer.observers.append(Recorder(run))
    from mpitrain.train.build import assembly
    assembly.observe = with_recorder
    with suppress(Stopped), Run.of_job(load_config(Path(sys.argv[1]), sys.argv[3:])) as run:
        run.train(overwrite=True)


if __name__ == "__main__":
    main()
