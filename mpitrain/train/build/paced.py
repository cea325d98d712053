"""A federation whose workers do not wait for each other: `workers.arrival`.

    simulated          workers' speeds come from the seed, and a virtual clock orders what arrives: the same run every time
    recorded           results are applied as they come, and arrivals.jsonl in the run folder says in which order
    file.jsonl         the order of such a record: the same parameters, to the bit, on any number of ranks
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

from mpitrain.config import Config
from mpitrain.config.messages import written
from mpitrain.data import Loader, MicroBatch
from mpitrain.data.keyed import key
from mpitrain.data.rounds import RoundLoader, Rounds
from mpitrain.errors import ConfigError, MissingError
from mpitrain.optim.outer import Average
from mpitrain.parallel.pipeline.runner import Pipeline
from mpitrain.parallel.workers.paced import Paced, Seated, seated
from mpitrain.schedules.arrivals import Arrival, AsTheyCome, Clock, Order, Pace, Player, Round, Tape
from mpitrain.schedules.grid import REPLICAS
from mpitrain.schedules.steps import ScheduleError
from mpitrain.train.build.federation import Federation, level_of
from mpitrain.train.build.inputs import Inputs
from mpitrain.train.observers.arrivals import ArrivalsFile
from mpitrain.train.observers.observer import Observer

SIMULATED, RECORDED = "simulated", "recorded"


class PacedLoader(RoundLoader):
    """Reads nothing ahead: which rank trains whom is found out in the round."""

    def load(self, step: int) -> list[MicroBatch]:
        return []


class PacedFederation(Federation):
    """ConfigError, on all ranks alike, for what does not go with it, and for a record of another run."""

    def __init__(self, config: Config, inputs: Inputs):
        super().__init__(config, inputs)
        w, rounds, level = config.workers, self.rounds, level_of(config)
        for found, instead in refused(config, level.outer):
            raise config.wrong(f'workers.arrival = "{w.arrival}" applies results one after the other, found {found}; {instead}',
                               ("workers.arrival",))
        self.pace, self.tape = Pace(w.in_flight, w.buffer, w.staleness, w.discount), dict[int, list[int]]()
        if w.arrival not in (SIMULATED, RECORDED):
            self.tape = read_record(config.folder / w.arrival, config, rounds, self.pace)
        self.rate, self.rule = level.lr, Average(1.0)    # What rank 0 has at the end of a round is the result of all.

    def order_of(self, round: int, turns: Sequence[Seated]) -> Order:
        """Who arrives when in a round, counted from 0."""
        w, seed = self.config.workers, self.config.run.seed
        if w.arrival == SIMULATED:
            return Clock([speed(seed, one.worker, w.spread) * one.steps for one in turns])
        return AsTheyCome() if w.arrival == RECORDED else Tape(self.tape[round])

    def loader(self, kind: Any) -> Any:
        return self.turns_ahead

    def turns_ahead(self, *arguments: Any, **options: Any) -> Loader:
        """The loader, which the pipeline asks for single turns."""
        self.reads = PacedLoader(*arguments, **options)
        return self.reads

    def turns(self, *arguments: Any, **options: Any) -> Pipeline:
        self.made = Paced(*arguments, rounds=self.rounds, inner=self.inner, policy=self.policy,
                          clip_norm=self.config.optimizer.clip_norm, pace=self.pace, order_of=self.order_of, rate=self.rate,
                          turn_of=lambda round, one: self.reads.turn(round, one.seat, one.worker, one.weight),
                          link=self.policy.mesh.link(REPLICAS, "turns"), **options)
        return self.made

    def observers(self) -> list[Observer]:
        return [ArrivalsFile(lambda: self.made.found)]

    def lines(self) -> list[str]:
        pace, how = self.pace, self.config.workers.arrival
        order = {SIMULATED: "in the order of a virtual clock", RECORDED: "as they come, which arrivals.jsonl records"}.get(
            how, f"in the order of {how}")
        return [*super().lines(), f"{pace.in_flight} workers train at once; results are applied {order}, {pace.buffer} at a "
                f"time, {pace.staleness} changes late at most, with a factor (1 + lateness)^-{pace.discount:g}"]


def refused(config: Config, outer: str) -> Iterator[tuple[str, str]]:
    """What goes with no arrivals: (what was found, what to set instead)."""
    w = config.workers
    if outer != "average":
        yield f'[[sync]] outer = "{outer}", a rule for the mean of a round', 'set outer = "average"; lr is the rate'
    if w.correct and w.correct.partition(":")[0] != "prox":
        yield f'workers.correct = "{w.correct}", which adds up over a round', 'set it to "" or "prox:0.1"'
    if config.privacy.unit != "none":
        yield f'privacy.unit = "{config.privacy.unit}", which accounts for sums of a round', 'set it to "none"'
    if config.privacy.secure:
        yield "privacy.secure = true, which shows sums of a round alone", "set it to false"
    for name, value in (("discount", w.discount), ("spread", w.spread)):
        if not math.isfinite(value):
            yield f"workers.{name} = {written(value)}", "set it to a number of 0 or more"


def speed(seed: int, worker: int, spread: float) -> float:
    """The virtual seconds that a worker takes for a local step: log-normal, by the seed."""
    uniform = (key(seed, "speed", worker) + 0.5) / 2.0**64
    return math.exp(spread * NormalDist().inv_cdf(min(max(uniform, 1e-12), 1.0 - 1e-12)))


def read_record(path: Path, config: Config, rounds: Rounds, pace: Pace) -> dict[int, list[int]]:
    """The turns in the order in which they arrived, by round (from 0), of an arrivals.jsonl. ConfigError for a record that is not
    of these rounds: every one of them is played before anything is trained."""
    found: dict[int, list[dict[str, Any]]] = {}
    try:
        text = path.read_text()
    except OSError as error:
        raise MissingError(f'workers.arrival = "{config.workers.arrival}" is neither "{SIMULATED}" nor "{RECORDED}", and no '
                           f"record can be read there: {error.strerror}", file=path) from None
    for number, line in enumerate(text.splitlines(), 1):
        try:
            one = json.loads(line)
            found.setdefault(int(one["round"]) - 1, []).append(
                {"factor": float(one["factor"]), **{name: int(one[name]) for name in ("turn", "worker", "version")}})
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"line {number} must be an object with round, turn, worker, version and factor, found "
                              f"{line[:80]!r}; use a record that a run has written", file=path) from None
    for index in range(config.train.steps):
        turns, lines = seated(rounds, index), found.get(index, [])
        try:
            if len(lines) != len(turns):
                raise ScheduleError(f"{len(lines)} arrivals, and {len(turns)} workers train in it")
            if wrong := [one for one in lines if not 0 <= one["turn"] < len(turns) or turns[one["turn"]].worker != one["worker"]]:
                raise ScheduleError(f"turn {wrong[0]['turn']} of worker {wrong[0]['worker']}, which is another worker's")
            played = played_back(len(turns), pace, [one["turn"] for one in lines])
            if [(arrival.version, arrival.factor) for arrival in played] != [(one["version"], one["factor"]) for one in lines]:
                raise ScheduleError("results that began with other versions, or count otherwise, than they would now")
        except ScheduleError as error:
            raise ConfigError(f"round {index + 1} has {error.message}; take the data, seed, [workers] and train.steps of the run "
                              "that wrote this record", file=path) from None
    return {index: [one["turn"] for one in lines] for index, lines in found.items()}


def played_back(turns: int, pace: Pace, order: Sequence[int]) -> list[Arrival]:
    """The arrivals of a round in a recorded order. ScheduleError where it does not fit."""
    player = Player(Round(turns, pace), Tape(order), lambda turn: None, lambda arrival, new: None)
    player.advance()
    return player.arrivals
