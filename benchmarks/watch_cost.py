"""The cost of the defences that watch a run: whole runs in pairs, the default beside `train.compare_every=0 train.stall_s=0`.

    python benchmarks/watch_cost.py [--models mlp,gpt-nano] [--ranks 1,2] [--pairs 9] [--json FILE]

Both sides run ``mpitrain train`` in turn, A B B A A B ...; a run's time is its seconds of training (run.json) over its steps, so
that heartbeats, the watcher, comparisons and the hashes of the end are in it. The ratio is the median over pairs, with quartiles.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from two_checkouts import ROOT, command, environment, in_pairs

OFF = ("train.compare_every=0", "train.stall_s=0")
MODELS = {"mlp": (3000, ()), "gpt-nano": (100, (str(ROOT / "examples/shakespeare.toml"),))}       # steps of a run, its settings
WHOLE = ("train.epochs=0", "train.eval_every=1000000", "log.every=50", "checkpoint.best=false", "checkpoint.every=1000000")


def seconds_a_step(model: str, ranks: int, folder: Path, defended: bool) -> float:
    """Seconds a step of one run."""
    steps, settings = MODELS[model]
    subprocess.run([*command(ROOT, ranks), "train", *settings, *WHOLE, f"train.steps={steps}", f"run.out={folder}/run",
                    "--overwrite", "--quiet", *(() if defended else OFF)], cwd=folder, env=environment(ROOT), check=True,
                   capture_output=True, timeout=300)
    return float(json.loads((folder / "run/run.json").read_text())["seconds"] / steps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write one object a line")
    given, lines = parser.parse_args(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text((ROOT / "README.md").read_text() + (ROOT / "docs/architecture.md").read_text())
        subprocess.run([*command(ROOT, 1), "data", "import", "text", "text.txt", "--out", "text"], cwd=folder,
                       env=environment(ROOT), check=True, capture_output=True)
        vocabulary = len(set((folder / "text.txt").read_text()))
        MODELS["gpt-nano"] = (100, (*MODELS["gpt-nano"][1], f"model.vocabulary={vocabulary}", f"data.path={folder}/text"))
        for model in given.models.split(","):
            for ranks in map(int, given.ranks.split(",")):
                found = in_pairs(partial(seconds_a_step, model, ranks, folder), True, False, given.pairs)
                lines.append({"what": model, "ranks": ranks, **found})
                (watched, not_watched), (low, high) = found["ms"], found["quartiles"]
                print(f"{model:10} {ranks} rank(s)  watched {watched:8.3f} ms  not {not_watched:8.3f} ms  "
                      f"ratio {found['ratio']:.4f} ({low:.4f} .. {high:.4f})", flush=True)
    if given.json:
        given.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
