"""The worked examples of examples/ at full length, with the figures they must reach.

    python benchmarks/examples.py [NAME ...] [--seeds 3] [--ranks 1 2] [--json FILE]

An example is a folder with `data.py` and `figure.toml`, which has a table for each of its runs:

    [[run]]
    config = "lenet.toml"
    metric = "accuracy"          # of run.json: the last evaluation; `best = true`: the best of all
    at_least = 0.89              # or at_most
    published = "0.876 to 0.916: two convolutions with pooling (the data set's README)"
    folds = 10                   # the mean over so many folds, with as many rows of each class; 0: one run
    ranks = 2                    # of the slow test, which runs one seed
    long = false                 # true: the slow test takes MPITRAIN_LONG_EXAMPLES=1
    given = "text.txt"           # a file of ../shared/data that `data.py` is given; "": none

Each line that is printed has the figures of all seeds, the bar, and the seconds of one run from its command to its end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accuracy import ROOT, results
from accuracy import run as mpitrain

EXAMPLES = ROOT / "examples"


@dataclass(frozen=True)
class Figure:
    """A run of an example, and what it must reach; the fields are those of `figure.toml`."""

    example: str
    config: str
    metric: str
    published: str
    at_least: float | None = None
    at_most: float | None = None
    best: bool = False
    folds: int = 0
    ranks: int = 2
    long: bool = False
    given: str = ""

    @property
    def name(self) -> str:
        return self.example if self.config == "run.toml" else f"{self.example}-{Path(self.config).stem}"

    @property
    def bar(self) -> str:
        return f">= {self.at_least}" if self.at_least is not None else f"<= {self.at_most}"

    def holds(self, figure: float) -> bool:
        if self.at_least is not None:
            return figure >= self.at_least
        return self.at_most is not None and figure <= self.at_most


def figures(names: list[str] | None = None) -> Iterator[Figure]:
    """Those of the named examples, or of all, in the order of their folders."""
    for path in sorted(EXAMPLES.glob("*/figure.toml")):
        for table in tomllib.loads(path.read_text())["run"]:
            figure = Figure(example=path.parent.name, **table)
            if (figure.at_least is None) == (figure.at_most is None):
                raise ValueError(f"{path}: {figure.config} has one of at_least and at_most")
            if not names or {figure.example, figure.name} & {*names}:
                yield figure


def prepare(figure: Figure, work: Path) -> tuple[int, str]:
    """A copy of the example in `work`, with its data, made once: (exit status of data.py, its last line of errors)."""
    folder = work / figure.example
    if (folder / "ready").exists():
        return 0, ""
    if folder.exists():                            # what a data.py that failed has left
        shutil.rmtree(folder)
    folder.mkdir()
    for path in (EXAMPLES / figure.example).iterdir():
        if path.is_file():                         # what has been written there before stays behind
            shutil.copy(path, folder)
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    given = [ROOT.parent / "shared/data" / figure.given] if figure.given else []
    done = subprocess.run([sys.executable, "-P", folder / "data.py", *given], env={**os.environ, "PYTHONPATH": paths}, text=True,
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if done.returncode == 0:
        (folder / "ready").touch()
    return done.returncode, (done.stderr.splitlines() or [""])[-1]


def reached(figure: Figure, work: Path, seed: int, ranks: int) -> tuple[float, float]:
    """(the figure of one seed, seconds from the command to its end)."""
    out, began = work / "runs" / f"{figure.name}-{seed}-of-{ranks}", time.perf_counter()
    verb = ["folds", "--k", figure.folds, "--stratified"] if figure.folds else ["train"]
    mpitrain(*verb, f"{figure.example}/{figure.config}", f"run.seed={seed}", f"run.out={out}", "--quiet", "--overwrite",
             ranks=ranks, cwd=work)
    seconds = time.perf_counter() - began
    if figure.folds:
        return float(json.loads((out / "folds.json").read_text())["metrics"][figure.metric]["mean"]), seconds
    return best(figure, out) if figure.best else float(results(out)["metrics"][figure.metric]), seconds


def best(figure: Figure, run: Path) -> float:
    """The best of all evaluations."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    values = [float(line[figure.metric]) for line in lines if "split" in line]
    return max(values) if figure.at_least is not None else min(values)


def measure(figure: Figure, work: Path, seeds: int, ranks: int) -> dict[str, Any]:
    found = [reached(figure, work, seed, ranks) for seed in range(seeds)]
    return {**asdict(figure), "name": figure.name, "ranks": ranks, "figures": [value for value, _ in found],
            "seconds": [seconds for _, seconds in found]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="examples, or runs of them; default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path, help="append a line for each run to this file")
    options, missed = parser.parse_args(), 0
    with tempfile.TemporaryDirectory() as folder:
        print(f"{'run':22}{'ranks':>6}  {'metric':12}{'bar':>9}   figures of {options.seeds} seeds   longest run, s   published")
        for figure in figures(options.names):
            status, said = prepare(figure, Path(folder))
            if status:
                print(f"{figure.name:22} not run: {said}", flush=True)
                continue
            for ranks in options.ranks:
                record = measure(figure, Path(folder), options.seeds, ranks)
                missed += not all(map(figure.holds, record["figures"]))
                print(f"{figure.name:22}{ranks:6}  {figure.metric:12}{figure.bar:>9}   "
                      f"{' '.join(f'{value:.4f}' for value in record['figures'])}   {max(record['seconds']):14.1f}   "
                      f"{figure.published}", flush=True)
                if options.json:
                    with open(options.json, "a") as file:
                        file.write(json.dumps(record) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
