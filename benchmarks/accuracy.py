"""The example runs at full length, and the figures they must reach.

    python benchmarks/accuracy.py digits
    python benchmarks/accuracy.py mnist IMAGES_IDX.gz
    python benchmarks/accuracy.py shakespeare TEXT [--curves]

digits: the built-in run with 5 seeds on 2 ranks, median accuracy and wall time of each run. mnist: LeNet-5 on 2 ranks, the last
fifth held out. shakespeare: 2,000 steps on 2 ranks, loss over the whole held-out tenth; with --curves also the first 50 steps on
1, 2, 3 and 4 ranks and their largest relative difference.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe": "1"}


def run(*arguments: Any, ranks: int = 0, cwd: Path) -> None:
    """``mpirun -n RANKS python -m mpitrain ...``; without ranks, without mpirun."""
    scrubbed = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_", "OPENBLAS_"))}
    paths = os.pathsep.join(filter(None, [str(ROOT), scrubbed.get("PYTHONPATH")]))
    beside = Path(sys.executable).with_name("mpirun")
    launcher = [str(beside) if beside.exists() else "mpirun", "-n", str(ranks)] if ranks else []
    subprocess.run([*launcher, sys.executable, "-P", "-m", "mpitrain", *map(str, arguments)], check=True, cwd=cwd,
                   env={**scrubbed, **ROOT_MAY, "PYTHONPATH": paths})


def results(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return record


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "split" not in line]


def digits(work: Path, seeds: int = 5) -> dict[str, float]:
    """{"accuracy": the median over seeds, "seconds": the longest run, from command to end}."""
    found, times = [], []
    for seed in range(seeds):
        began = time.perf_counter()
        run("train", f"run.seed={seed}", f"run.out=digits{seed}", "--quiet", "--overwrite", ranks=2, cwd=work)
        times.append(time.perf_counter() - began)
        found.append(results(work / f"digits{seed}")["metrics"]["accuracy"])
    print("digits:", " ".join(f"{a:.4f}" for a in found))
    return {"accuracy": statistics.median(found), "seconds": max(times)}


def mnist(work: Path, images: Path) -> dict[str, float]:
    """{"accuracy": on the last 2,000 images}."""
    shutil.copy(ROOT / "examples/mnist.toml", work)
    run("data", "import", "idx", images.resolve(), "--out", "mnist", "--overwrite", cwd=work)
    run("train", "mnist.toml", "--quiet", "--overwrite", ranks=2, cwd=work)
    metrics: dict[str, float] = results(work / "runs/mnist")["metrics"]
    return metrics


def shakespeare(work: Path, text: Path, *overrides: str, ranks: int = 2) -> dict[str, float]:
    """{"loss": over the whole held-out tenth}."""
    shutil.copy(ROOT / "examples/shakespeare.toml", work)
    run("data", "import", "text", text.resolve(), "--out", "shakespeare", "--overwrite", cwd=work)
    run("train", "shakespeare.toml", "--quiet", "--overwrite", *overrides, ranks=ranks, cwd=work)
    metrics: dict[str, float] = results(work / "runs/shakespeare")["metrics"]
    return metrics


def curves(work: Path, text: Path, counts: tuple[int, ...] = (1, 2, 3, 4)) -> float:
    """The largest relative difference between the first 50 losses on `counts` ranks and those on one."""
    found = []
    for n in counts:
        run_length = ("train.steps=50", "optimizer.schedule=constant", "log.every=1", "data.validation=tail:0.001")
        shakespeare(work, text, *run_length, ranks=n)
        found.append(losses(work / "runs/shakespeare"))
    return max(abs(a - b) / b for curve in found for a, b in zip(curve, found[0], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", choices=("digits", "mnist", "shakespeare"))
    parser.add_argument("source", type=Path, nargs="?")
    parser.add_argument("--curves", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if options.which == "digits":
            print(json.dumps(digits(work)))
            return
        if options.source is None:
            parser.error(f"{options.which} needs its source file")
        if options.which == "mnist":
            print(json.dumps(mnist(work, options.source)))
            return
        if options.curves:
            print(json.dumps({"largest relative difference over 50 steps": curves(work, options.source)}))
        print(json.dumps(shakespeare(work, options.source)))


if __name__ == "__main__":
    main()
