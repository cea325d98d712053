"""One bit of a parameter flips on one rank, at a random step: is it named before the next checkpoint is published?

    python benchmarks/bit_flips.py                       # 100 flips on 2, 3 and 4 ranks; 6 to 10 minutes
    python benchmarks/bit_flips.py --count 10 --seed 5

Every other run is to be stopped by SIGUSR1 at a random step, and goes on by `--resume auto`. A flip counts as named if the job in
which it happens ends with 76 and one line, of three ranks and more with the right rank in it, and all checkpoints on disk have
the hashes of a run without a fault. Every tenth is resumed to its end, whose hash must be that run's.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/train")]

import runs  # noqa: E402
from launch import Result  # noqa: E402

STEPS, EVERY, RANKS = 60, 12, (2, 3, 4)
SETTINGS = ("model.name=own.py:network", "model.hidden=[48, 32]", f"train.steps={STEPS}",
            f"checkpoint.every={EVERY}", "checkpoint.keep=100", "checkpoint.best=false", 'log.observers=["own.py:Faults"]')


def train(folder: Path, ranks: int, out: str, faults: dict[str, Any]) -> Result:
    environment = {name: json.dumps(fault) for name, fault in faults.items()}
    return runs.train(ranks, folder / "run.toml", *SETTINGS, f"run.out={out}", "--resume", "auto", env=environment)


def hashes(run: Path) -> dict[int, Any]:
    """The hashes of each checkpoint of a run, by step."""
    manifests = [json.loads(path.read_text()) for path in sorted(run.glob("checkpoints/step-*/manifest.json"))]
    return {manifest["step"]: manifest["hashes"] for manifest in manifests}


def final(run: Path) -> Any:
    return runs.record(run)["parameters_sha256"]


def judge(folder: Path, ranks: int, number: int, random_: random.Random, right: dict[int, Any]) -> str:
    """Runs one flip; what is wrong, or nothing."""
    out, step, rank = f"flip-{number}", random_.randint(1, STEPS), random_.randrange(ranks)
    faults: dict[str, Any] = {"FLIP": [rank, step, random_.randrange(100), random_.randrange(1 << 20), random_.randrange(32)]}
    if number % 2:
        faults["STOP"] = [random_.randrange(ranks), random_.randint(1, STEPS - 1)]
    result = train(folder, ranks, out, faults)
    if result.rc == 85:                                       # it goes on without a request to stop
        result = train(folder, ranks, out, {"FLIP": faults["FLIP"]})
    what = f"{faults} on {ranks} ranks: exit {result.rc} {result.error_lines}"
    if result.rc != 76 or len(result.error_lines) != 1:
        return what
    if ranks > 2 and f": rank {rank} (" not in result.error_lines[0]:
        return f"the rank is not named: {what}"
    if any(found != right[at] for at, found in hashes(folder / out).items() if at in right) or max(
            hashes(folder / out), default=0) >= step + EVERY:
        return f"a checkpoint is wrong: {what}"
    if number % 10 == 0 and (train(folder, ranks, out, {}).rc != 0 or final(folder / out) != final(folder / f"whole-{ranks}")):
        return f"resumed, the end is another one: {what}"
    shutil.rmtree(folder / out)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=12)
    options = parser.parse_args()
    random_, wrong = random.Random(options.seed), list[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs.write(folder)
        shutil.copy(ROOT / "tests/train/diverging.py", folder / "own.py")
        right = {}
        for ranks in RANKS:
            result = train(folder, ranks, f"whole-{ranks}", {})
            assert result.rc == 0, result.err
            right[ranks] = hashes(folder / f"whole-{ranks}")
        for number in range(options.count):
            ranks = RANKS[number % len(RANKS)]
            found = judge(folder, ranks, number, random_, right[ranks])
            if found:
                wrong.append(found)
                print(found, flush=True)
    print(f"{options.count - len(wrong)} of {options.count} flips named before the next checkpoint was published")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
