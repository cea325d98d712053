"""The planner's seconds of a step beside those of `train`: an MLP, a transformer and ResNet-20 on 1 to 4 ranks, in pairs.

    python benchmarks/plan_vs_measured.py                              about 5 minutes; prints the bars, and whether they are met
    python benchmarks/plan_vs_measured.py --machine here.toml          with a machine file that is there: without calibration
    python benchmarks/plan_vs_measured.py --json plan.json --only gpt --rounds 1

    calibrate (bench fit, 4 ranks) | round 1: [plan, train] of each configuration | round 2: the other way round | ...

A round plans each configuration in this process, as `mpitrain plan` does, and trains it by `mpitrain train` under mpirun: seconds
of a step are those of its metrics.jsonl, the median of their means over a few steps. Both are repeated, and medians are compared.
Three and four ranks on two cores take turns; that is part of what is predicted. The bars: the median error is at most 10 %, the
largest at most 25 %, and of the pairs of meshes of one model on as many ranks whose measured times differ by 10 % or more, 8 of
10 are in the right order.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import shutil
import sys
import tempfile
import time
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"
for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(name, None)                                   # a forced kernel would compute at another speed

import h5py  # noqa: E402
import numpy as np  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from launch import mpirun  # noqa: E402

from mpitrain.backend import keep_freed_memory  # noqa: E402
from mpitrain.machines import MachineFile, load_machine  # noqa: E402

MEDIAN_BAR, LARGEST_BAR, ORDER_BAR, APART = 0.10, 0.25, 0.8, 0.10
RANKS = 4                            # of the calibration
LASTS = 0.5                          # seconds of training that are measured, about
EVERY = 5                            # steps of which metrics.jsonl has the mean
STEPS = 30, 600                      # at least and at most
COMMON = """
[run]
out = "run"
[optimizer]
name = "adamw"
lr = 1e-4
[train]
threads = 1
steps = 30
{train}
[log]
every = 5
progress_s = 0
[data]
path = "{data}"
validation = 0
"""
sys.path.insert(0,"/tmp/cal"); import glue  # TEMP
def predict(path, case, machine): glue.cache.clear(); return glue.predict(path, list(case.keys), case.ranks, machine)  # TEMP
MODELS = {
    "mlp": ("images.h5", 'name = "mlp"\ninputs = 784\nhidden = [1024, 1024]\noutputs = 10\n', "batch_size = 120"),
    "gpt": ("text", 'name = "gpt"\nlayers = 4\nheads = 4\nwidth = 128\nblock = 64\nvocabulary = 65\n', "batch_size = 12"),
    "resnet20": ("pictures.h5", 'name = "resnet20"\n', "batch_size = 24")}


class Case(NamedTuple):
    """A run: a model of MODELS, how many ranks, and the keys that cut it."""

    model: str
    ranks: int
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.model} n={self.ranks} {' '.join(key.split('.')[1] for key in self.keys)}".strip()


FOUR = "train.micro_batches=4"
CASES = [
    Case("mlp", 1), Case("mlp", 1, (FOUR,)), Case("mlp", 2), Case("mlp", 2, ("mesh.tp=2",)), Case("mlp", 2, ("mesh.pp=2", FOUR)),
    Case("mlp", 3), Case("mlp", 4), Case("mlp", 4, ("mesh.tp=2",)),
    Case("gpt", 1), Case("gpt", 1, (FOUR,)), Case("gpt", 2), Case("gpt", 2, ("mesh.tp=2",)), Case("gpt", 2, ("mesh.pp=2", FOUR)),
    Case("gpt", 3), Case("gpt", 4), Case("gpt", 4, ("mesh.tp=2",)), Case("gpt", 4, ("mesh.tp=4",)),
    Case("gpt", 4, ("mesh.pp=2", FOUR)), Case("gpt", 4, ("mesh.pp=4", FOUR)),
    Case("resnet20", 1), Case("resnet20", 2), Case("resnet20", 2, ("mesh.pp=2", FOUR)), Case("resnet20", 3), Case("resnet20", 4),
    Case("resnet20", 4, ("mesh.pp=2", FOUR))]


class Lab:
    """A folder with the models' files, and what has been predicted and measured in it."""

    def __init__(self, folder: Path, machine: MachineFile):
        self.folder, self.machine = folder, machine
        self.predicted: dict[Case, list[Any]] = {}
        self.measured: dict[Case, list[tuple[float, float]]] = {}

    def plan(self, case: Case) -> None:
        """One more prediction, from nothing: the blocks are timed again."""
        self.predicted.setdefault(case, []).append(predict(self.folder / f"{case.model}.toml", case, self.machine))

    def train(self, case: Case) -> None:
        """One more measurement: (seconds of a step, of these exposed), medians over the lines of metrics.jsonl but the first."""
        expected = self.predicted[case][-1].total if case in self.predicted else self.measured[case][-1][0]
        steps = int(min(max(LASTS / expected, STEPS[0]), STEPS[1])) // EVERY * EVERY
        run = self.folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        result = mpirun(case.ranks, "-m", "mpitrain", "train", f"{case.model}.toml", f"train.steps={steps}", *case.keys,
                        cwd=self.folder, timeout=300)
        if result.rc:
            sys.exit(f"{case}: exit code {result.rc}\n{result.out}\n{result.err}")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        kept = [line for line in lines if "step_s" in line][2:]
        self.measured.setdefault(case, []).append(
            (statistics.median(line["step_s"] for line in kept), statistics.median(line["comm_exposed_s"] for line in kept)))

    def result(self, case: Case) -> dict[str, Any]:
        """Medians over the rounds, with the parts of the prediction that is in the middle, and the error."""
        plans = sorted(self.predicted[case], key=lambda time: time.total)
        plan = plans[len(plans) // 2]
        step, exposed = (statistics.median(values) for values in zip(*self.measured[case]))
        return {"case": str(case), "model": case.model, "ranks": case.ranks, "keys": list(case.keys), "predicted_s": plan.total,
                "measured_s": step, "measured_exposed_s": exposed, "error": plan.total / step - 1,
                "parts": {name: getattr(plan, name) for name in PARTS}, "rounds": len(self.measured[case])}


PARTS = ("compute", "bubble", "tensor", "exposed", "update", "stragglers")


def write_inputs(folder: Path) -> None:
    """Samples of chance and a text to train on, and a configuration for each model."""
    rng = np.random.default_rng(0)
    for name, shape in (("images", (784,)), ("pictures", (3, 32, 32))):
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file["x"] = rng.standard_normal((1200, *shape), dtype=np.float32)
            file["y"] = rng.integers(0, 10, 1200)
    text = "".join(chr(32 + number) for number in rng.integers(0, 65, 200_000))
    (folder / "text.txt").write_text(text)
    ran = mpirun(1, "-m", "mpitrain", "data", "import", "text", "text.txt", "--out", "text", cwd=folder)
    if ran.rc:
        sys.exit(ran.out + ran.err)
    for name, (data, model, train) in MODELS.items():
        (folder / f"{name}.toml").write_text(f"[model]\n{model}" + COMMON.format(train=train, data=data))


def calibrate(folder: Path) -> Path:
    """Writes the machine file of this host."""
    print(f"calibrating: bench fit on {RANKS} ranks", flush=True)
    result = mpirun(RANKS, "-m", "mpitrain", "bench", "fit", "--out", "here.toml", cwd=folder, timeout=300)
    if result.rc:
        sys.exit(result.out + result.err)
    print(result.out, flush=True)
    return folder / "here.toml"


def bars(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The median and the largest error, and the share of pairs of meshes in the right order."""
    errors = [abs(result["error"]) for result in results]
    pairs = [(one, other) for one, other in combinations(results, 2)
             if (one["model"], one["ranks"]) == (other["model"], other["ranks"])
             and max(one["measured_s"], other["measured_s"]) >= (1 + APART) * min(one["measured_s"], other["measured_s"])]
    right = sum((one["measured_s"] < other["measured_s"]) == (one["predicted_s"] < other["predicted_s"]) for one, other in pairs)
    return {"configurations": len(results), "median_error": statistics.median(errors), "largest_error": max(errors),
            "pairs": len(pairs), "right_order": right}


def report(results: list[dict[str, Any]]) -> bool:
    """Prints the table and the bars; whether they are met."""
    print(f"{'ms':<34}{'predicted':>10}{'measured':>10}{'error':>8}   predicted " +
          "".join(f"{name:>11}" for name in PARTS) + "   exposed, measured")
    for result in results:
        print(f"{result['case']:<34}{result['predicted_s'] * 1e3:>10.2f}{result['measured_s'] * 1e3:>10.2f}"
              f"{result['error']:>8.1%}{'':13}" + "".join(f"{result['parts'][name] * 1e3:>11.2f}" for name in PARTS) +
              f"{result['measured_exposed_s'] * 1e3:>12.2f}")
    found = bars(results)
    order = found["right_order"] / found["pairs"] if found["pairs"] else 1.0
    met = found["median_error"] <= MEDIAN_BAR and found["largest_error"] <= LARGEST_BAR and order >= ORDER_BAR
    print(f"{found['configurations']} configurations: median error {found['median_error']:.1%} (bar {MEDIAN_BAR:.0%}), largest "
          f"{found['largest_error']:.1%} (bar {LARGEST_BAR:.0%}); {found['right_order']} of {found['pairs']} pairs of meshes "
          f"{APART:.0%} apart in the right order (bar {ORDER_BAR:.0%}): {'met' if met else 'NOT met'}")
    return met


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", type=Path, help="a file of bench fit (default: one is made)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="configurations whose line has this in it")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    return parser.parse_args()


def main() -> int:
    arguments = read_arguments()
    keep_freed_memory()
    cases = [case for case in CASES if arguments.only in str(case)]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        lab = Lab(folder, load_machine(str(arguments.machine or calibrate(folder))))
        for number in range(arguments.rounds):
            for case in cases:
                for action in (lab.plan, lab.train) if number % 2 == 0 else (lab.train, lab.plan):
                    action(case)
            print(f"round {number + 1} of {arguments.rounds} done after {time.perf_counter() - began:.0f} s", flush=True)
    results = [lab.result(case) for case in cases]
    met = report(results)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"bench": "plan_vs_measured", "machine": lab.machine.name, **bars(results),
                                              "results": results}, indent=1) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
