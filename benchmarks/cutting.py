"""Cut nets: what accuracy they have after tuning, against the whole net and the same sizes from scratch, and how fast they are.

    python benchmarks/cutting.py accuracy IMAGES_IDX.gz [--net lenet|resnet20] [--seeds 5] [--epochs 10] [--tune 4] [--scratch]
    python benchmarks/cutting.py speed [--rounds 15]

accuracy: MNIST's 10,000 test images, the last fifth held out; each seed trains a net, cuts it with `mpitrain cut` and goes on for
some epochs. speed: outputs of 64 samples as `predict` computes them, one thread, whole and cut in turns; the sizes
are those of a cut net with random weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORK = {"lenet": 0.32, "resnet20": 0.5}
SHAPES = {"lenet": (1, 28, 28), "resnet20": (1, 32, 32)}


def accuracy(work: Path, images: Path, options: argparse.Namespace) -> None:
    """A line for each seed, and the medians: points of whole, cut, cut and tuned, from scratch."""
    import recipe
    from accuracy import results, run

    from mpitrain.config import load_run
    net = options.net
    run("data", "import", "idx", images.resolve(), "--out", "mnist", "--overwrite", cwd=work)
    recipe.write(work / "net.toml", {"name": net} if net == "lenet" else {"name": net, "channels": 1},
                 {"path": str(work / "mnist"), "transform": ["scale"], "validation": "tail:0.2"})
    found: list[dict[str, float]] = []
    for seed in range(options.first, options.first + options.seeds):
        of_seed = f"run.seed={seed}"

        def trained(config: str, out: str, epochs: int, *more: str, of_seed: str = of_seed) -> float:
            run("train", config, of_seed, f"run.out={work / out}", f"train.epochs={epochs}", *more, "--quiet", "--overwrite",
                ranks=1, cwd=work)
            return 100 * float(results(work / out)["metrics"]["accuracy"])
        whole = trained("net.toml", "whole", options.epochs)
        run("cut", "whole", "--work", WORK[net], "--out", "cut", "--overwrite", cwd=work)
        tuned = trained("cut/config.toml", "tuned", options.tune, f"model.init_from={work / 'cut'}", f"optimizer.lr={options.lr}")
        line = {"seed": seed, "whole": whole, "tuned": tuned, "change": tuned - whole}
        if options.scratch:
            line["scratch"] = trained("cut/config.toml", "scratch", options.epochs + options.tune)
        line["work"] = results(work / "cut")["made"]["work"]
        found.append(line)
        print(json.dumps({**{k: round(v, 3) for k, v in line.items()}, **load_run(work / "cut", []).model.arguments}), flush=True)
    print(json.dumps({"net": net, **{key: round(statistics.median([line[key] for line in found]), 3) for key in found[0]}}))


def speed(rounds: int) -> None:
    """Medians of images per second and of the ratio of pairs, after the outputs of the two have been compared."""
    import numpy as np

    from mpitrain import models
    from mpitrain.backend import keep_freed_memory
    from mpitrain.infer.recorded import Recorded
    from mpitrain.shrink.cut import choose, transfer
    from mpitrain.shrink.importance import norms
    from mpitrain.shrink.tracing import trace
    keep_freed_memory()                           # as predict does
    for net, shape in SHAPES.items():
        arguments: dict[str, Any] = {"channels": 1}
        model = models.MODELS[net](**arguments)
        model.initialize(0)
        x = np.random.default_rng(0).standard_normal((64, *shape), dtype=np.float32)
        chosen = choose(model.eval(), trace(model, x[:2]), norms(model), WORK[net])
        smaller = models.MODELS[net](**arguments, **chosen.sizes)
        smaller.initialize(0)
        transfer(model, smaller, chosen, x[:2])
        both: tuple[Any, Any] = Recorded(model), Recorded(smaller)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            for each, taken in zip(both, times, strict=True):
                began = time.perf_counter()
                for _ in range(1 if net == "resnet20" else 10):
                    each.of(x)
                taken.append(time.perf_counter() - began)
        ratios = [a / b for a, b in zip(times[0][1:], times[1][1:], strict=True)]
        print(json.dumps({"net": net, "work": round(chosen.work, 3), "sizes": next(iter(chosen.sizes.values())),
                          "faster": round(statistics.median(ratios), 2)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", choices=("accuracy", "speed"))
    parser.add_argument("images", type=Path, nargs="?")
    parser.add_argument("--net", choices=tuple(WORK), default="lenet")
    for name, default in (("seeds", 5), ("first", 0), ("epochs", 10), ("tune", 4), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=2e-3, help="of tuning")
    parser.add_argument("--scratch", action="store_true")
    options = parser.parse_args()
    if options.which == "speed":
        from threadpoolctl import threadpool_limits
        with threadpool_limits(1):
            speed(options.rounds)
        return
    if options.images is None:
        parser.error("accuracy needs the images' file")
    with tempfile.TemporaryDirectory() as folder:
        accuracy(Path(folder), options.images, options)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
