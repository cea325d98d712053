"""The front of accuracy against cost on Fashion-MNIST: four efficient nets, and LeNet-5 and ResNet-20 as marks.

    python examples/fashion/data.py
    python benchmarks/front.py examples/fashion/data [--epochs 5] [--ranks 2] [--json FILE] [--draw FOLDER]
    python benchmarks/front.py --from FILE --draw FOLDER

Each model is trained by `mpitrain train` with one recipe (AdamW, cosine, batch 64), and its accuracy on the 10,000 test images is
that of its last step. Parameters and multiply-adds of a sample are counted from shapes. Milliseconds of a training step of 64
images, and of a sample in prediction of 64, are medians in this process, one thread; joules are those that the processor's
packages take in such a step (`mpitrain.energy.zones`), where their counters may be read. A table comes first, then
front-light.svg and front-dark.svg in --draw. What --json FILE has of the same settings on the same CPU is taken from there:
started again, a run goes on with the next model. `make figures ARGS="--add FILE"` puts it on the page.
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

import pinned  # noqa: F401  (first: it sets what NumPy reads)

# isort: split
import accuracy
import numpy as np
import recipe
from recipe import BATCH

from mpitrain import models, nn
from mpitrain.autograd import no_grad
from mpitrain.backend import keep_freed_memory
from mpitrain.bench import arguments
from mpitrain.bench.report import Report, cpu_name
from mpitrain.bench.train import Training
from mpitrain.bench.workloads import Workload
from mpitrain.comm.job.guard import Process, symmetric
from mpitrain.comm.job.start import start
from mpitrain.energy.zones import Energy
from mpitrain.errors import DataError, MissingError
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
MORE = "eval_every = 1000000\n[checkpoint]\nbest = false\n"
ROUNDS = 12

Record = dict[str, Any]


def made(name: str) -> nn.Module:
    kind, settings = MODELS[name]
    return models.MODELS[kind](classes=10, **settings)


def trained(name: str, data: Path, work: Path, options: argparse.Namespace) -> float:
    """The accuracy on the test images after training."""
    kind, settings = MODELS[name]
    folder = str(data.resolve())
    recipe.write(work / "run.toml", {"name": kind, "classes": 10, **settings},
                 {"path": f"{folder}/train", "validation": f"{folder}/test", "transform": ["standardise"]}, MORE)
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


def kept(path: Path | None, wanted: Record | None = None) -> dict[str, Record]:
    """What a file of --json has of models that were measured with these settings, or with any; no file has none."""
    if path is None or not path.is_file():
        return {}
    try:
        found = [record for record in map(json.loads, filter(None, path.read_text().splitlines())) if record["bench"] == "front"]
    except (ValueError, KeyError, TypeError):
        raise DataError("is not what --json has written; name another file, or remove it", file=str(path)) from None
    return {record["what"]: record for record in found if wanted is None or wanted.items() <= record.items()}


def drawn(records: list[Record]) -> dict[str, str]:
    """File name -> the picture, for a light page and a dark one."""
    sys.path.insert(0, str(accuracy.ROOT / "docs/figures"))
    from front_chart import drawn as chart
    from shapes import THEMES
    return {f"front-{name}.svg": chart(theme, records) for name, theme in THEMES.items()}


def measure(names: list[str], options: argparse.Namespace) -> list[Record]:
    """The records of these models, of which the file of --json has each as soon as it is there."""
    settings = {"length": f"{options.steps} steps" if options.steps else f"{options.epochs} epoch{'s' * (options.epochs > 1)}",
                "seed": options.seed, "ranks": options.ranks, "batch": BATCH, "threads": 1, "cpu": cpu_name()}
    with symmetric():
        before = kept(options.json, settings)
    keep_freed_memory()
    world, report, records = start(), Report(0, options.json), []
    for record in before.values():
        report.record(record)
    for name in names:
        if name not in before:
            with tempfile.TemporaryDirectory() as folder:
                reached = trained(name, options.data, Path(folder), options)
            before[name] = {"bench": "front", "what": name, "accuracy": reached, **measured(name, world), **settings}
            report.record(before[name])
        records.append(before[name])
        report.line(table(records[-1:]) if len(records) == 1 else table(records[-1:]).splitlines()[1])
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, nargs="?", help="the folder that examples/fashion/data.py writes")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="so many steps instead of epochs")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="a line for each model; what it has is not trained again")
    parser.add_argument("--draw", type=Path, metavar="FOLDER")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="print and draw what --json FILE has written")
    options = parser.parse_args()
    with symmetric():
        names = arguments.names(options.models, MODELS, "--models")
        for flag, least in ("epochs", 1), ("ranks", 1), ("steps", 0):
            arguments.at_least(getattr(options, flag), least, f"--{flag}")
        if options.source and not options.source.is_file():
            raise MissingError("the file of measurements is not there; --json FILE writes it", file=str(options.source))
        if not options.source and not (options.data and (options.data / "train").is_dir()):
            raise MissingError("there is no data of Fashion-MNIST; python examples/fashion/data.py writes it, and the folder is "
                               "the argument", file=str((options.data or Path()) / "train"))
        if options.draw:
            options.draw.mkdir(parents=True, exist_ok=True)
    if options.source:
        records = [record for name, record in kept(options.source).items() if name in names]
        print(table(records))
    else:
        records = measure(names, options)
    for file, contents in (drawn(records) if options.draw else {}).items():
        (options.draw / file).write_text(contents)
    return 0


if __name__ == "__main__":
    Process().run(main)
