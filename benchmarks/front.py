"""The front of accuracy against cost on Fashion-MNIST: four efficient nets, and LeNet-5 and ResNet-20 as marks.

    python examples/fashion/data.py
    python benchmarks/front.py examples/fashion/data [--epochs 5] [--ranks 2] [--json FILE] [--draw FOLDER]

Each model is trained by `mpitrain train` with one recipe (AdamW, cosine, batch 64), and its accuracy on the 10,000 test images is
that of its last step. Parameters and multiply-adds of a sample are counted from shapes. Milliseconds of a training step of 64
images, and of a sample in prediction of 64, are medians in this process, one thread; joules are those that the processor's
packages take in such a step (`mpitrain.bench.energy`), where their counters may be read. A table comes first, then
front-light.svg and front-dark.svg in --draw.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pinned  # noqa: F401  (first: it sets what NumPy reads)

# isort: split
import accuracy
import numpy as np

from mpitrain import models, nn
from mpitrain.autograd import no_grad
from mpitrain.backend import keep_freed_memory
from mpitrain.bench import arguments
from mpitrain.bench.energy import Energy
from mpitrain.bench.report import Report, cpu_name
from mpitrain.bench.train import Training
from mpitrain.bench.workloads import Workload
from mpitrain.comm.job.guard import Process, symmetric
from mpitrain.comm.job.start import start
from mpitrain.errors import MissingError
from mpitrain.plan.flops import count

SMALL = {"channels": 1, "halvings": 4}            # images of 28 x 28 end as 2 x 2
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "lenet": ("lenet", {}),
    "resnet20": ("resnet20", {"channels": 1}),
    "mobilenet_v2-0.35": ("mobilenet_v2", {"width": 0.35, **SMALL}),
    "mobilenet_v3_small-0.5": ("mobilenet_v3_small", {"width": 0.5, **SMALL}),
    "shufflenet_v2-0.5": ("shufflenet_v2", {"width": 0.5, **SMALL}),
    "mnasnet-0.5": ("mnasnet", {"width": 0.5, **SMALL}),
}
MARKS = ("lenet", "resnet20")
RECIPE = """
[data]
path = "{data}/train"
validation = "{data}/test"
transform = ["standardise"]
[optimizer]
name = "adamw"
lr = 2e-3
weight_decay = 0.01
decay = "matrices"
schedule = "cosine"
warmup_steps = 50
[train]
batch_size = 64
eval_every = 1000000
threads = 1
[checkpoint]
best = false
"""
BATCH, ROUNDS = 64, 12

Record = dict[str, Any]


def made(name: str) -> nn.Module:
    kind, settings = MODELS[name]
    return models.MODELS[kind](classes=10, **settings)


def trained(name: str, data: Path, work: Path, options: argparse.Namespace) -> float:
    """The accuracy on the test images after training."""
    kind, settings = MODELS[name]
    keys = [f'name = "{kind}"', "classes = 10", *(f"{key} = {json.dumps(value)}" for key, value in settings.items())]
    (work / "run.toml").write_text("[model]\n" + "\n".join(keys) + RECIPE.format(data=data.resolve()))
    length = [f"train.steps={options.steps}"] if options.steps else [f"train.epochs={options.epochs}"]
    accuracy.run("train", "run.toml", "--quiet", f"run.out={name}", f"run.seed={options.seed}", *length, cwd=work,
                 ranks=options.ranks)
    return float(accuracy.results(work / name)["metrics"]["accuracy"])


def measured(name: str, world: Any) -> Record:
    """Counts, and the costs of a training step and of a prediction."""
    model, sample = made(name), np.zeros((1, 1, 28, 28), np.float32)
    found: Record = {"parameters": model.count_parameters(), "multiply_adds": count(model, sample).forward}
    training = Training(Workload(lambda: made(name), BATCH, (1, 28, 28), 10, 0), world.comm)
    training.run(4)
    energy, steps = Energy(), []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        training.step()
        steps.append(time.perf_counter() - began)
    joules = energy.joules()
    found |= {"step_s": statistics.median(steps), "step_j": None if joules is None else joules / ROUNDS}
    x, predictions = training.batches[0][0], []
    model = training.model.eval()
    with no_grad():
        for _ in range(ROUNDS):
            began = time.perf_counter()
            model(x)
            predictions.append(time.perf_counter() - began)
    training.close()
    return {**found, "sample_s": statistics.median(predictions[2:]) / BATCH}


def table(records: list[Record]) -> str:
    lines = [f"{'model':<24}{'accuracy':>9}{'parameters':>12}{'MMAdds':>9}{'ms a step':>11}{'ms a sample':>13}{'J a step':>10}"]
    lines += [f"{r['what']:<24}{r['accuracy']:>9.4f}{r['parameters']:>12,}{r['multiply_adds'] / 1e6:>9.2f}"
              f"{1e3 * r['step_s']:>11.1f}{1e3 * r['sample_s']:>13.3f}"
              f"{'-' if r['step_j'] is None else format(r['step_j'], '.2f'):>10}" for r in records]
    return "\n".join(lines)


def on_front(record: Record, records: list[Record]) -> bool:
    """Nothing else is better in time or accuracy and in the other no worse."""
    mine = record["step_s"], -record["accuracy"]
    others = [(o["step_s"], -o["accuracy"]) for o in records]
    return not any(o != mine and o[0] <= mine[0] and o[1] <= mine[1] for o in others)


def drawn(records: list[Record]) -> dict[str, str]:
    """Accuracy over the milliseconds of a step, on a logarithmic axis; a line joins what is on the front."""
    sys.path.insert(0, str(accuracy.ROOT / "docs/figures"))
    import draw
    left, right, top, bottom = 70, draw.WIDTH - 170, 70, 360
    low, high = (pick(math.log10(r["step_s"]) for r in records) for pick in (min, max))
    least, most = (pick(r["accuracy"] for r in records) for pick in (min, max))
    low, high, least, most = low - 0.1, high + 0.1, least - 0.005, most + 0.005

    def place(r: Record) -> tuple[float, float]:
        return (left + (math.log10(r["step_s"]) - low) / (high - low) * (right - left),
                bottom - (r["accuracy"] - least) / (most - least) * (bottom - top))
    files = {}
    for theme, c in draw.THEMES.items():
        shapes = [draw.text(16, 26, "Fashion-MNIST: accuracy against the time of a training step", c.text, 15, weight="bold"),
                  draw.text(16, 48, f"64 images on one thread; the line joins what nothing else beats in both. "
                            f"Trained for {records[0]['length']}.",
                            c.faint, 12), draw.line([(left, top), (left, bottom), (right, bottom)], c.line)]
        front = sorted(place(r) for r in records if on_front(r, records))
        shapes.append(draw.line(front, c.accent, 1.5, "4 3"))
        for r in records:
            x, y = place(r)
            colour = c.series[2] if r["what"] in MARKS else c.series[0]
            reached, cost = f"{r['accuracy']:.3f}", f"{1e3 * r['step_s']:.0f} ms"
            shapes += [draw.box(x - 5, y - 5, 10, 10, colour, radius=5), draw.text(x + 10, y + 4, r["what"], c.text, 12),
                       draw.text(x, bottom + 18, cost, c.faint, 11, "middle"),
                       draw.text(left - 8, y + 4, reached, c.faint, 11, "end")]
        said = "; ".join(f"{r['what']} {r['accuracy']:.3f} at {1e3 * r['step_s']:.0f} ms" for r in records)
        files[f"front-{theme}.svg"] = draw.picture(bottom + 40, f"Accuracy on Fashion-MNIST, the time of a step: {said}", shapes)
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="the folder that examples/fashion/data.py writes")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="so many steps instead of epochs")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--draw", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    with symmetric():
        names = arguments.names(options.models, MODELS, "--models")
        arguments.at_least(options.epochs, 1, "--epochs")
        arguments.at_least(options.ranks, 1, "--ranks")
        arguments.at_least(options.steps, 0, "--steps")
        if not (options.data / "train").is_dir():
            raise MissingError("there is no data of Fashion-MNIST; python examples/fashion/data.py writes it",
                               file=str(options.data / "train"))
        if options.draw:
            options.draw.mkdir(parents=True, exist_ok=True)
    keep_freed_memory()
    world, report, records = start(), Report(0, options.json), []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            reached = trained(name, options.data, Path(folder), options)
        records.append({"bench": "front", "what": name, "accuracy": reached, **measured(name, world), "batch": BATCH,
                        "threads": 1, "length": f"{options.steps} steps" if options.steps else f"{options.epochs} epochs",
                        "seed": options.seed, "cpu": cpu_name()})
        report.record(records[-1])
        report.line(table(records[-1:]) if len(records) == 1 else table(records[-1:]).splitlines()[1])
    for file, contents in (drawn(records) if options.draw else {}).items():
        (options.draw / file).write_text(contents)
    return 0


if __name__ == "__main__":
    Process().run(main)
