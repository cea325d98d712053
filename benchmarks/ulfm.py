"""A rank is killed at a random moment: do the others go on without it, how soon, and to the same bits?

    python benchmarks/ulfm.py                            # 50 kills on 4 ranks of Open MPI 5; 5 to 15 minutes
    python benchmarks/ulfm.py --count 10 --seed 5

Each run has `train.on_lost = "go_on"` and `reproducible = "layout"`. SIGKILL comes to any rank, rank 0 too, within the time of
two steps after a random step has begun. A run is right if it ends with 0 and the hash of an undisturbed run, its run.json tells
of the lost rank, and each step and evaluation has one line in metrics.jsonl. The time is that from the kill to the end of the
first step on the ranks left. A kill in the first ten steps comes before there is a copy or a checkpoint: the run starts anew.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/train")]

import runs  # noqa: E402
from launch import Result  # noqa: E402

STEPS, RANKS, LIMIT = 60, 4, 5.0
SETTINGS = ("model.hidden=[48, 32]", f"train.steps={STEPS}", "train.micro_batches=12", "train.eval_every=15",
            "train.reproducible=layout", "train.on_lost=go_on", "checkpoint.every=20", 'log.observers=["own.py:Killed"]')
OWN = '''
import json
import os
import signal
import threading
import time
from pathlib import Path

from mpitrain.train import Observer


class Killed(Observer):
    """KILL is [rank at the start, step, seconds]: that rank is killed so long after it has begun that step."""

    def begin(self, run):
        self.size, self.lead, self.log = run.size, run.rank == 0, run.folder.parent / f"{run.folder.name}.times"

    def before_step(self, step):
        rank, when, seconds = json.loads(os.environ.get("KILL", "[-1, 0, 0]"))
        if step == when and rank == int(os.environ["OMPI_COMM_WORLD_RANK"]):
            threading.Timer(seconds, self.die).start() if seconds else self.die()

    def die(self):
        with self.log.open("a") as file:
            file.write(f"0 {time.time()}\\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def after_step(self, step, fields, seconds):
        if self.lead:
            with self.log.open("a") as file:
                file.write(f"{self.size} {time.time()}\\n")
'''


def train(folder: Path, out: str, kill: list[float] | None = None) -> Result:
    return runs.train(RANKS, folder / "run.toml", *SETTINGS, f"run.out={out}", timeout=90,
                      env={} if kill is None else {"KILL": json.dumps(kill)}, mpi_args=("--with-ft", "ulfm"))


def times(run: Path) -> list[tuple[int, float]]:
    """(ranks, time) of each step that ended; 0 ranks for a kill."""
    lines = [line.split() for line in run.with_name(f"{run.name}.times").read_text().splitlines()]
    return sorted(((int(size), float(when)) for size, when in lines), key=lambda one: one[1])


def judge(result: Result, run: Path, rank: int, right: str) -> tuple[float | None, str]:
    """The seconds until the first step on the ranks left, None where none was lost; and what is wrong, or nothing."""
    what = f"exit {result.rc} {result.error_lines}"
    if result.rc != 0:
        return None, what
    found = runs.record(run)
    keys = [(line["step"], line.get("split")) for line in runs.lines(run)]
    if found["parameters_sha256"] != right or found["status"] != "done":
        return None, f"another hash: {what}"
    if len(set(keys)) != len(keys) or {step for step, split in keys if not split} != set(range(1, STEPS + 1)):
        return None, f"lines of metrics.jsonl are missing or come twice: {what}"
    told = times(run)
    if all(size for size, _ in told):
        return None, ""
    killed = next(when for size, when in told if size == 0)
    if [lost["ranks"] for lost in found.get("lost", [])] != [[rank]]:
        return None, f"run.json tells of {found.get('lost')}: {what}"
    after = [when for size, when in told if size == RANKS - 1]
    return (after[0] - killed, "") if after else (None, "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance, seconds, wrong, untouched = random.Random(options.seed), [], 0, 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        runs.write(folder)
        (folder / "own.py").write_text(OWN)
        assert train(folder, "right").rc == 0
        right, ended = runs.record(folder / "right"), [when for _, when in times(folder / "right")]
        step_s = statistics.median(b - a for a, b in zip(ended, ended[1:]))
        for number in range(options.count):
            rank, step, delay = chance.randrange(RANKS), chance.randint(1, STEPS), chance.random() * 2 * step_s
            run = folder / f"run-{number}"
            try:
                took, bad = judge(train(folder, run.name, [rank, step, delay]), run, rank, right["parameters_sha256"])
            except AssertionError as error:                   # a hang, or a process that was left
                took, bad = None, str(error).partition("\n")[0]
            slow = took is not None and took > LIMIT
            wrong += bool(bad) or slow
            untouched += took is None and not bad
            seconds += [] if took is None else [took]
            said = runs.record(run).get("lost", [{}])[-1] if not bad else {}
            print(f"rank {rank} killed {delay * 1e3:.1f} ms into step {step}: {bad or ('' if took is None else f'{took:.2f} s')} "
                  f"{'too slow ' * slow}{said}", flush=True)
    print(f"{options.count - wrong} of {options.count} right; {len(seconds)} went on after "
          f"{statistics.median(seconds):.2f} s (median), {max(seconds):.2f} s at most; {untouched} had no step left to do")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
