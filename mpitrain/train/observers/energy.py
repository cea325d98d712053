"""[energy]: joules of the hosts while the run is under way, in metrics.jsonl and run.json.

    each rank                  seconds by phase, from the spans of its timeline, in memory that the ranks of its host see
    first rank of each host    the reader: a thread that samples the host's counter beside those seconds
    lines of the log           each host's joules so far, or that they are unknown, added up over the control channel

A counter counts all that its processors do, whoever's work it is.
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitrain.comm.job import guard
from mpitrain.comm.messages.channel import Channel
from mpitrain.config.energy import EnergyConfig
from mpitrain.energy.carbon import intensity
from mpitrain.energy.phases import PHASES, WORDS, PhaseClock, seconds_of_all
from mpitrain.energy.reader import Counter, Reader
from mpitrain.energy.report import NOT_YET, UNKNOWN, line, phases_of, together
from mpitrain.energy.sources import Asked, Opened, estimated, open_counters, source_words
from mpitrain.errors import MissingError, MpitrainError
from mpitrain.parallel.gradients.timeline import Timeline
from mpitrain.train.intervals import Step
from mpitrain.train.observers.observer import Observer, Watched

if TYPE_CHECKING:
    from mpitrain.comm.shared.node import Node

Opens = Callable[[Asked, Sequence[str]], Opened]


class EnergyUse(Observer):
    """Every rank has one. `node` are the ranks of `channel` on this host, None where there is one rank alone; `gpu` is the
    address of the GPU that this rank computes on, "" without one. It communicates when it is made, in steps that are logged, and
    at the end. MissingError, AccessError or DataError, alike on all ranks, where a named source is on no host.
    """

    def __init__(self, config: EnergyConfig, channel: Channel, node: Node | None, timeline: Timeline, *, gpu: str = "",
                 notes: list[str] | None = None, opens: Opens = open_counters, host: str = ""):
        self.config, self.channel, self.timeline = config, channel, timeline
        self.asked = Asked(config.source, Path(config.root), config.idle_watts, config.busy_watts)
        self.carbon = intensity(config.carbon_g_per_kwh)
        self.host = host or socket.gethostname()
        mine = channel.rank if node is None else node.ranks[0]                 # the first rank of this host
        everyone = channel.gather_objects([self.host, mine, os.getpid(), gpu])
        self.first = mine == channel.rank
        self.ranks = sum(first == mine for _, first, *_ in everyone)
        self.hosts = {first: name for name, first, *_ in sorted(everyone, key=lambda one: one[1])}      # of the first ranks
        parts = node.allocate(8 * WORDS, "energy") if node is not None and node.size > 1 else None
        self.no_phases = "" if not gpu else "work of a GPU overlaps the phases of its host"
        if node is not None and node.size > 1 and parts is None:
            self.no_phases = f"ranks of a host cannot see each other's phases: {node.obstacle}"
        words: list[Any] = [part.data.cast("d") for part in parts or ()]       # of each rank of the host
        self.clock = PhaseClock(words[node.rank] if words and node is not None else None)
        self.words = words or [self.clock.words]
        self.reader: Reader | None = None
        self.why = self.gap = self.source = ""
        self._take(opens, [pid for _, first, pid, _ in everyone if first == mine],
                   [address for _, first, _, address in everyone if first == mine and address], [] if notes is None else notes)
        self._told = np.zeros(len(self.hosts))                # joules of each host at the last line
        self._lost = {host for host, found in zip(self.hosts, self._everyone_has) if not found}
        self._steps, self._trained, self._since = 0, 0, 0.0

    def _take(self, opens: Opens, pids: Sequence[int], gpus: Sequence[str], notes: list[str]) -> None:
        """Opens this host's counter, if this is its first rank. It communicates."""
        opened = Opened(None, None)
        if self.first and self.config.source != "model":
            opened = opens(self.asked, gpus)
        error = told(opened.error)
        self.why = error["text"] if error is not None else ""
        found = self.channel.gather_objects([opened.counter is not None, error, opened.gap])
        found = [found[first] for first in self.hosts]
        estimates = self.config.source == "model" or (
            self.config.source == "auto" and self.config.idle_watts > 0 < self.config.busy_watts
            and not any(there for there, *_ in found))
        with guard.symmetric():
            if not estimates and not any(there for there, *_ in found):
                self._refuse([why for _, why, _ in found if why])
        counter: Counter | None = opened.counter
        if estimates and self.first:
            counter = estimated(self.asked, pids)
        self._everyone_has = [estimates or there for there, *_ in found]
        kinds = self.channel.gather_objects(counter.kind if counter is not None else "")
        kind = next(filter(None, (kinds[first] for first in self.hosts)), "")
        self.source = source_words(self.asked, kind) if kind else UNKNOWN
        if counter is not None:
            self.gap = opened.gap
            self.reader = Reader(counter, self.config.period_ms / 1e3, self._phases, len(PHASES))
        for host, (there, why, gap) in zip(self.hosts.values(), found):
            where = f" on {host}" if len(self.hosts) > 1 else ""
            if not (there or estimates):
                notes.append(f"energy unknown{where}: {why['text']}")
            elif gap:
                notes.append(f"energy{where}: {gap}")
        if any(self._everyone_has):
            notes.append(f"energy is {self.source}, read every {self.config.period_ms:g} ms")

    def _refuse(self, errors: Sequence[Mapping[str, str]]) -> None:
        """Raises the first error of a host where the user has named what is on no host: a source, or a folder."""
        for error in errors:
            if self.config.source in ("powercap", "nvml") or \
                    (self.config.root != EnergyConfig.root and error["kind"] == "no folder"):
                raise made(error, self.config.source)

    def _phases(self, lag: float = 0.0) -> list[float] | None:
        return seconds_of_all(self.words, lag=lag)

    def begin(self, run: Watched) -> None:
        self.run, self.more = run, run.more
        self.before = joules_before(run) if run.rank == 0 else 0.0
        self.clock.start()
        self.timeline.listen(self.clock.span)
        self.timeline.when_landed(self.clock.landed)
        self._began = self._since = perf_counter()
        if self.reader is not None:
            self.reader.start()

    def after_step(self, step: int, fields: Step, seconds: float) -> None:
        self._steps += 1
        self._trained += 1
        if self.run.plan.logs(step):
            self.more.update(self._numbers(step))

    def _numbers(self, step: int) -> dict[str, Any]:
        """The fields of a line, since the line before that has joules. It communicates."""
        now = perf_counter()
        joules = self._joules()
        used = joules - self._told
        known = ~np.isnan(used)
        lost = {first for first, is_known in zip(self.hosts, known) if not is_known}
        if lost - self._lost:
            self._tell_lost(step)
        self._lost |= lost
        if known.any() and not joules[known].any():           # What is on uses some watts: 0 is no measurement of it.
            return {"joules": math.nan, "joules_per_sample": math.nan, "watts": math.nan, "energy_source": NOT_YET}
        samples, seconds = self._steps * self.run.plan.batch_size, now - self._since
        self._told, self._since, self._steps = joules, now, 0
        total = float(used[known].sum()) if known.any() else math.nan
        without = [name for name, is_known in zip(self.hosts.values(), known) if not is_known]
        source = f"at least, {self.source}, without {', '.join(without)}" if without else self.source
        return {"joules": total, "joules_per_sample": total / samples, "watts": total / max(seconds, 1e-9),
                "energy_source": source if known.any() else UNKNOWN}

    def _joules(self) -> np.ndarray[Any, Any]:
        """The joules of each host since the start, NaN: unknown. It communicates."""
        table = np.zeros((len(self.hosts), 2))
        if self.first:
            joules = None if self.reader is None else self.reader.joules()
            table[list(self.hosts).index(self.channel.rank)] = (0.0, 1.0) if joules is None else (joules, 0.0)
        self.channel.allreduce(table.reshape(-1), name="joules")
        return np.where(table[:, 1] > 0, math.nan, table[:, 0])

    def _tell_lost(self, step: int) -> None:
        reasons = self.channel.gather_objects("" if self.reader is None else self.reader.why)
        for first, host in self.hosts.items():
            if reasons[first] and first not in self._lost:
                self.run.tell(f"step {step}  energy unknown from here on"
                              f"{f' on {host}' if len(self.hosts) > 1 else ''}: {reasons[first]}")

    def finish(self, step: int) -> Mapping[str, Any]:
        seconds = perf_counter() - self._began
        found = self.channel.gather_objects(self._host() if self.first else None)
        if self.run.rank != 0:
            return {}
        record = together([found[first] for first in self.hosts], samples=self._trained * self.run.plan.batch_size,
                          seconds=seconds, before=self.before, idle=self.config.idle_watts, pue=self.config.pue,
                          carbon=self.carbon)
        self.run.tell(line(record))
        return {"energy": record}

    def _host(self) -> dict[str, Any]:
        """The record of this host: see `energy.report`."""
        host: dict[str, Any] = {"host": self.host, "ranks": self.ranks, "cores": os.cpu_count(), "joules": None, "seconds": 0.0,
                                "source": UNKNOWN, "why": self.why, "gap": self.gap, "parts": {}, "phases": None,
                                "no_phases": self.no_phases, "residual": None, "readings": 0, "known": None}
        reader = self.reader
        if reader is None:
            return host
        reader.sample()
        joules = reader.joules()
        reader.stop()
        if joules == 0.0:                                     # What is on uses some watts: nothing was counted.
            joules, reader.why = None, "the counter of this host has not moved"
        host |= {"joules": joules, "seconds": reader.seconds, "source": self.source, "why": reader.why,
                 "readings": reader.samples, "parts": reader.counter.parts()}
        if joules is None:
            return host | {"source": UNKNOWN, "parts": {}, "known": {"joules": reader.known, "seconds": reader.seconds}}
        if not self.no_phases:
            host["phases"], host["residual"], host["no_phases"] = phases_of(reader.fit, self._phases() or [0.0] * len(PHASES))
        return host

    def close(self) -> None:
        self.clock.detach()
        self.words = []
        if self.reader is not None:
            self.reader.stop()


def told(error: MpitrainError | None) -> dict[str, str] | None:
    """An error as JSON for other ranks."""
    if error is None:
        return None
    file = error.file or ""
    kind = "no folder" if isinstance(error, MissingError) and file and not Path(file).is_dir() else ""
    return {"name": type(error).__name__, "message": error.message, "file": file, "kind": kind,
            "text": f"{error.message}{f' ({file})' if file else ''}"}


def made(error: Mapping[str, str], source: str) -> MpitrainError:
    """The error that another rank has `told`, with what to change."""
    from mpitrain import errors
    change = "leave energy.root out, or name the folder that has zones such as intel-rapl:0" if source == "auto" else \
        'set energy.source = "auto" for a run that goes on without, or "model" for an estimate'
    found: MpitrainError = getattr(errors, error["name"])(f"energy: {error['message']}; {change}", file=error["file"] or None)
    return found


def joules_before(run: Watched) -> float | None:
    """Joules of the run that this one continues, from the lines of its metrics.jsonl; None where one of them is unknown."""
    if not run.step or run.folder is None:
        return 0.0
    lines = [json.loads(text) for text in (run.folder / "metrics.jsonl").read_text().splitlines()]
    joules = [one.get("joules") for one in lines if "split" not in one]
    return None if not joules or None in joules else float(sum(joules))
