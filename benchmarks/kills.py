"""A random rank is killed, again and again, and the run resumed on another number of ranks: is the end that of a run left alone?

    python benchmarks/kills.py                       # 200 kills on 1 to 8 ranks; about 10 minutes
    python benchmarks/kills.py --count 20 --seed 5

Each kill has a place: a moment of the start of Python, of MPI or of the job, a phase of a random step, a checkpoint that the
thread is writing, the end, or any moment at all. A job that no kill reached is done, and must then have the hashes and the lines
of metrics.jsonl of a run without a kill, each line once; the next run begins in a new folder. Every killed job must end within
LIMIT with the code of the kill, leave no process behind, and keep every checkpoint that was published.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/train")]

from launch import UNBORN, HangError, Job  # noqa: E402
from runs import lines, record, start, train, without_times, write  # noqa: E402

from mpitrain.comm.watch.processes import RANK_VARIABLES  # noqa: E402
from mpitrain.comm.watch.record import PHASE, PHASES, STEP, TEXT  # noqa: E402

RANKS, STEPS, LIMIT, POLL = (1, 1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8), 60, 5.0, 1e-3      # the more ranks, the slower
PLACES = ("python", "start", "load", "forward", "backward", "exchange", "update", "evaluation", "save", "writer", "finish",
          "any", "any", "any")
KILLED = 128 + signal.SIGKILL
SETTINGS = ("model.name=own.py:network", "model.hidden=[256, 128]", f"train.steps={STEPS}", "train.micro_batches=8",
            "train.reproducible=layout", "train.eval_every=12", "checkpoint.every=5", "checkpoint.keep=3")
NETWORK = """
from mpitrain import nn

def network(inputs, hidden, outputs):
    return nn.Sequential(("flatten", nn.Flatten()), ("first", nn.Linear(inputs, hidden[0])), ("act", nn.ReLU()),
                         ("drop", nn.Dropout(0.3)), ("second", nn.Linear(*hidden)), ("last", nn.Linear(hidden[1], outputs)))
"""


@dataclass
class Kill:
    """Where a rank is to be killed: in `place`, so many `seconds` after it was first seen, or so many `steps` of its own."""

    place: str
    rank: int
    seconds: float
    steps: int

    def strike(self, job: Job, checkpoints: Path) -> str:
        """Kills the rank when it has come there; what it was doing, "" if the job ended before."""
        pid, record, seen, first = 0, 0, 0.0, 0
        try:
            while job.process.poll() is None and time.monotonic() < job.started + 60:
                time.sleep(POLL)
                pid = pid or process_of(job, self.rank)
                if not pid:
                    continue
                seen = seen or time.monotonic()
                record = record or record_of(pid)
                words = memoryview(os.pread(record, TEXT, 0) if record else b"").cast("Q").tolist() or [0] * (TEXT // 8)
                phase, first = PHASES[words[PHASE]] if record else "python", first or words[STEP]
                if self.due(phase, time.monotonic() - seen, words[STEP] - first, checkpoints):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        return f"{phase} of step {words[STEP]}"
            return ""
        finally:
            if record:
                os.close(record)

    def due(self, phase: str, seconds: float, steps: int, checkpoints: Path) -> bool:
        if self.place in ("python", "any", "start"):
            return seconds >= self.seconds and (self.place != "start" or phase == "start")
        if self.place == "writer":
            return steps >= self.steps and phase != "save" and any(checkpoints.glob("*.tmp-*"))
        return (phase in ("finish", "rest")) if self.place == "finish" else phase == self.place and steps >= self.steps


def process_of(job: Job, rank: int) -> int:
    """The id of a rank's own process, not that of a child it has; 0 before it is there."""
    for pid in job.ranks():
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if any(f"{name}={rank}".encode() in environment for name in RANK_VARIABLES) and \
                    b"\0mpitrain\0train\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return 0


def record_of(pid: int) -> int:
    """A descriptor of the record that its watcher reads; 0 before there is one."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            if os.readlink(entry.path).startswith("/memfd:mpitrain-record"):
                return os.open(entry.path, os.O_RDONLY)
    return 0


class Campaign:
    """Runs in a folder of their own, one after the other, until so many kills have been."""

    def __init__(self, folder: Path, seed: int, *, verbose: bool):
        self.folder, self.random, self.verbose = folder, random.Random(seed), verbose
        self.config = write(folder)
        (folder / "own.py").write_text(NETWORK)
        self.wrong, self.kills, self.runs, self.ranks, self.slowest = list[str](), Counter[str](), 0, 0, 0.0
        began = time.monotonic()
        whole = train(1, self.config, *SETTINGS, "run.out=whole")
        assert whole.rc == 0, whole.err
        self.takes, self.right = time.monotonic() - began, end_of(folder / "whole")

    def run(self, name: str, kills: int) -> None:
        """One run to its end, with `kills` at the most."""
        asynchronous = f"checkpoint.asynchronous={str(self.runs % 4 != 3).lower()}"
        run, done = self.folder / name, False
        while not done:
            ranks = self.random.choice([n for n in RANKS if n != self.ranks])
            kill = Kill(self.random.choice(PLACES), self.random.randrange(ranks), 0.0, self.random.randrange(1, STEPS // 3))
            share = {"python": 0.15, "start": 0.3}.get(kill.place, 1.2)
            kill.seconds = self.random.random() * share * self.takes * (1 + ranks / 4)
            before = published(run)
            job = start(ranks, self.config, *SETTINGS, f"run.out={name}", asynchronous, "--resume", "auto")
            where = kill.strike(job, run / "checkpoints") if kills else ""
            struck, self.ranks = time.monotonic(), ranks
            what = f"run {name}: {where or 'not killed'} ({kill.place}), rank {kill.rank} of {ranks}"
            try:
                result = job.finish(60)
            except (HangError, AssertionError) as error:
                self.wrong.append(f"{what}: {error}")
                break
            done = result.rc == 0
            if where and not done:
                kills -= 1
                self.kills[where.partition(" ")[0] if kill.place != "writer" else "writer"] += 1
                self.slowest = max(self.slowest, result.ended - struck)
                if result.rc != KILLED or result.ended - struck > LIMIT:
                    self.wrong.append(f"{what}: exit {result.rc} after {result.ended - struck:.1f} s\n{result.err}")
            elif UNBORN in result.err:
                continue
            elif not done:
                self.wrong.append(f"{what}: exit {result.rc}\n{result.err}")
                break
            if published(run) < before:
                self.wrong.append(f"{what}: the checkpoint of step {before} is gone")
            if self.verbose:
                print(f"{what}: exit {result.rc} after {result.seconds:.1f} s, step {published(run)} published", flush=True)
        if done and end_of(run) != self.right:
            self.wrong.append(f"run {name}: its end is not that of a run without a kill")
        else:
            shutil.rmtree(run, ignore_errors=True)
        self.runs += 1


def published(run: Path) -> int:
    """The newest step with a checkpoint under its final name; -1 if there is none."""
    return max((int(path.name[5:]) for path in run.glob("checkpoints/step-*") if path.name[5:].isdigit()), default=-1)


def end_of(run: Path) -> Any:
    """All that must be the same: hashes, each line of metrics.jsonl, the hashes of the last checkpoint."""
    about = record(run)
    manifest = json.loads((run / f"checkpoints/step-{published(run):08}/manifest.json").read_text())
    return about["status"], about["parameters_sha256"], about["buffers_sha256"], manifest["hashes"], without_times(lines(run))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="kills")
    parser.add_argument("--seed", type=int, default=12)
    parser.add_argument("--verbose", action="store_true", help="a line for each job")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        campaign = Campaign(Path(name), options.seed, verbose=options.verbose)
        while (left := options.count - campaign.kills.total()) > 0 and len(campaign.wrong) < 10:
            before = len(campaign.wrong)
            campaign.run(f"run-{campaign.runs}", left)
            print(*campaign.wrong[before:], sep="\n", end="\n" * (len(campaign.wrong) > before), flush=True)
    print(f"{campaign.kills.total()} kills in {campaign.runs} runs ({dict(campaign.kills.most_common())}): {len(campaign.wrong)} "
          f"wrong; the slowest job ended {campaign.slowest:.1f} s after its kill")
    sys.exit(bool(campaign.wrong))


if __name__ == "__main__":
    main()
