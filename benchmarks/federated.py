"""Federations of 100 clients on MNIST: rounds to 90 %, one hash on any ranks, and rounds a second beside Flower and APPFL.

    python benchmarks/federated.py accuracy IMAGES_IDX.gz [--seeds 0 1 2]
    python benchmarks/federated.py hashes IMAGES_IDX.gz
    python benchmarks/federated.py speed IMAGES_IDX.gz [--peers PYTHON]

Images are the 10,000 of t10k-images-idx3-ubyte.gz, a fifth held out: 100 clients of 80, 10 a round, an MLP 784-64-10, 5 local
epochs of batches of 20, SGD 0.05, or what CASES say. `accuracy` evaluates after each round and says when 90 % was reached first,
and the accuracy after the last round. `speed` evaluates at the end alone, on 8 ranks; PYTHON is that of an environment with
flwr[simulation], appfl, mpi4py and torch, which run the same clients (`benchmarks/federated_peers.py`). All runs say what they
reached.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from accuracy import ROOT_MAY, results, run

PEERS = Path(__file__).with_name("federated_peers.py")
CONFIG = """
[model]
name = "mlp"
inputs = 784
hidden = [64]
outputs = 10
[data]
path = "mnist"
transform = ["scale"]
validation = 0.2
[optimizer]
name = "sgd"
lr = 0.05
momentum = 0.0
[train]
steps = 30
batch_size = 20
eval_every = 1
[workers]
count = 100
each_round = 10
[[sync]]
over = "workers"
every = "5 epochs"
[checkpoint]
best = false
[log]
progress_s = 1000.0
"""
SKEWED = "workers.rows=dirichlet:0.1"
# Rates of clients and of adaptive servers were chosen with seeds 3, 4 and 5.
FASTER = "optimizer.lr=0.1"
ADAM, YOGI = (f"sync.levels=[{{over='workers', every='5 epochs', outer='{rule}', lr=0.02}}]" for rule in ("fedadam", "fedyogi"))
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "iid FedAvg": (40, ("workers.rows=iid", FASTER)),
    "dirichlet FedAvg": (150, (SKEWED,)),
    "dirichlet FedProx 0.1": (150, (SKEWED, "workers.correct=prox:0.1")),
    "dirichlet SCAFFOLD": (90, (SKEWED, "workers.correct=scaffold")),
    "dirichlet FedAdam 0.02": (100, (SKEWED, FASTER, ADAM)),
    "dirichlet FedYogi 0.02": (100, (SKEWED, FASTER, YOGI))}


def prepare(work: Path, images: Path) -> Path:
    (work / "fed.toml").write_text(CONFIG)
    run("data", "import", "idx", images.resolve(), "--out", "mnist", "--overwrite", cwd=work)
    return work / "fed.toml"


def curve(folder: Path) -> list[float]:
    """The accuracy after each evaluation."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["accuracy"] for line in lines if line.get("split") == "validation"]


def reached(accuracies: list[float], level: float = 0.9) -> int | None:
    return next((round for round, accuracy in enumerate(accuracies, 1) if accuracy >= level), None)


def accuracy(work: Path, seeds: list[int], cases: list[str]) -> dict[str, dict[int, tuple[int | None, float]]]:
    """{case: {seed: (the first round at 90 %, the accuracy after the last)}}."""
    found: dict[str, dict[int, tuple[int | None, float]]] = {}
    for name in cases:
        rounds, words = CASES[name]
        for seed in seeds:
            run("train", "fed.toml", f"train.steps={rounds}", f"run.seed={seed}", *words, "--quiet", "--overwrite", ranks=2,
                cwd=work)
            accuracies = curve(work / "runs/fed")
            found.setdefault(name, {})[seed] = reached(accuracies), accuracies[-1]
        print(f"{name:24}", "  ".join(f"seed {seed}: 90 % at {at or '-':>3}, {last:.4f} at {rounds}"
                                      for seed, (at, last) in found[name].items()), flush=True)
    return found


def hashes(work: Path, counts: tuple[int, ...] = (1, 2, 3, 8)) -> dict[str, list[str]]:
    """{case: the SHA-256 of the parameters on each number of ranks}."""
    found: dict[str, list[str]] = {}
    for name in ("dirichlet FedAvg", "dirichlet SCAFFOLD"):
        for n in counts:
            run("train", "fed.toml", "train.steps=20", "train.eval_every=20", *CASES[name][1], "workers.drop=0.1", "--quiet",
                "--overwrite", ranks=n, cwd=work)
            found.setdefault(name, []).append(results(work / "runs/fed")["parameters_sha256"])
        print(f"{name:24}", *(f"{n} ranks {sha[:16]}" for n, sha in zip(counts, found[name])), flush=True)
        assert len(set(found[name])) == 1
    return found


def ours(work: Path, rounds: int) -> dict[str, Any]:
    """Rounds a second of this package: the rounds of the run over the seconds between its first and its last."""
    run("train", "fed.toml", f"train.steps={rounds}", f"train.eval_every={rounds}", "log.every=1", "--quiet", "--overwrite",
        ranks=8, cwd=work)
    lines = map(json.loads, (work / "runs/fed/metrics.jsonl").read_text().splitlines())
    seconds = [line["step_s"] for line in lines if "step_s" in line]
    return {"rounds_s": 1 / statistics.fmean(seconds[1:]), "accuracy": curve(work / "runs/fed")[-1]}


def peer(which: str, python: str, work: Path, rounds: int) -> dict[str, Any]:
    """Rounds a second of a peer, as its program says."""
    environment = {**os.environ, **ROOT_MAY, "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}
    before = [str(Path(sys.executable).with_name("mpirun")), "-n", "11"] if which == "appfl" else []
    done = subprocess.run([*before, python, str(PEERS), which, str(work / "images.npz"), str(rounds)], cwd=work, check=False,
                          env=environment, capture_output=True, text=True, timeout=900)
    line = next((line for line in reversed(done.stdout.splitlines()) if line.startswith("{")), None)
    if line is None:
        return {"failed": done.stderr[-1500:] or done.stdout[-1500:]}
    found: dict[str, Any] = json.loads(line)
    return found


def speed(work: Path, images: Path, python: str | None, times: int = 3) -> None:
    if python is not None:
        import numpy as np

        from mpitrain.data import Dataset, describe
        data = Dataset(describe(work / "mnist"))
        x, y = data.read(np.arange(len(data), dtype=np.int64))
        np.savez(work / "images.npz", x=x.reshape(len(x), -1), y=y)
    found: dict[str, list[float]] = {}
    for _ in range(times):
        every = {"mpitrain": ours(work, 100)} | ({} if python is None else {which: peer(which, python, work, rounds)
                                                                          for which, rounds in (("flower", 10), ("appfl", 10))})
        for name, result in every.items():
            print(name, json.dumps(result), flush=True)
            found.setdefault(name, []).append(result.get("rounds_s", float("nan")))
    for name, rates in found.items():
        best = statistics.median(rates)
        print(f"{name:10} {best:8.2f} rounds a second (median of {times}); ours is "
              f"{statistics.median(found['mpitrain']) / best:.1f} times that")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", choices=("accuracy", "hashes", "speed"))
    parser.add_argument("images", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--cases", default=";".join(CASES), help="of accuracy, with semicolons")
    parser.add_argument("--peers", help="the Python of an environment with flwr[simulation], appfl, mpi4py and torch")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(work, options.images)
        if options.which == "accuracy":
            accuracy(work, options.seeds, options.cases.split(";"))
        elif options.which == "hashes":
            hashes(work)
        else:
            speed(work, options.images, options.peers)


if __name__ == "__main__":
    main()
