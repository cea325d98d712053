"""Does a supernet rank its networks as training each of them alone does?

    python benchmarks/supernet.py                          # examples/supernet.toml; about 5 minutes on a free core
    python benchmarks/supernet.py examples/supernet.toml model.widths=[4,8] train.epochs=60 --alone 30 --seeds 3 --paths 16

A supernet is trained, and some of its paths are evaluated with its weights. The same paths are then trained by themselves, from
their own first weights, and evaluated on the same rows. Printed are both accuracies and losses of each path, and the rank
correlations (Spearman's rho and Kendall's tau) of accuracies, of losses, and, beside them, of accuracy alone with multiply-adds.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from mpitrain import Process, Run, SavedRun, load_config, start
from mpitrain.config import changed

ROOT = Path(__file__).resolve().parents[1]


def ranks(values: list[float]) -> np.ndarray:
    """Ranks from 0, equal values with the mean of theirs."""
    array = np.asarray(values)
    return np.array([((array < value).sum() + (array <= value).sum() - 1) / 2 for value in array])


def spearman(a: list[float], b: list[float]) -> float:
    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def kendall(a: list[float], b: list[float]) -> float:
    """tau-b, which allows for equal values."""
    x, y = (np.sign(np.subtract.outer(np.asarray(v), np.asarray(v)))[np.triu_indices(len(v), 1)] for v in (a, b))
    return float((x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config", nargs="?", type=Path, default=ROOT / "examples/supernet.toml")
    parser.add_argument("arguments", nargs="*", metavar="section.key=value")
    parser.add_argument("--paths", type=int, default=14, help="compared: the largest, the smallest, others drawn (default: 14)")
    parser.add_argument("--alone", type=int, default=0, help="epochs of each path alone (default: the supernet's)")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each path alone, whose mean counts (default: 2)")
    options = parser.parse_args()
    comm = start().comm
    with tempfile.TemporaryDirectory() as folder:
        folder = comm.bcast(folder)
        out = Path(folder)
        config = load_config(options.config, [f"run.out={out / 'super'}", *options.arguments])
        with Run(config, comm, process=PROCESS, quiet=True) as run:
            whole = run.train()
        with SavedRun(config, comm, process=PROCESS) as saved, saved.paths(out / "super") as supernet:
            elastic = supernet.elastic
            chosen = [elastic.largest, elastic.smallest, *(elastic.draw("compared", i) for i in range(options.paths - 2))]
            rows = [(elastic.write(path), supernet.evaluate(path), supernet.cost(path)) for path in chosen]
        tell(comm, f"supernet of {elastic.count:,} networks, {config.train.epochs} epochs; its largest path: "
                   f"accuracy {whole.metrics['accuracy']:.4f}")
        tell(comm, f"{'accuracy':>17} {'loss':>17} {'M multiply-adds':>16}")
        tell(comm, " ".join(f"{word:>8}" for word in ("shared", "alone", "shared", "alone")))
        shared, alone = [], []
        for text, metrics, cost in rows:
            found = []
            for seed in range(options.seeds):
                own = changed(config, model={"arguments": {**config.model.arguments, "path": text}},
                              run={"out": str(out / "alone"), "seed": config.run.seed + 1 + seed})
                own = changed(own, train={"epochs": options.alone or config.train.epochs})
                with Run(own, comm, process=PROCESS, quiet=True) as run:
                    found.append(run.train(overwrite=True).metrics)
            mean = {key: float(np.mean([one[key] for one in found])) for key in ("accuracy", "loss")}
            shared.append(metrics)
            alone.append(mean)
            tell(comm, f"{metrics['accuracy']:8.4f} {mean['accuracy']:8.4f} {metrics['loss']:8.4f} {mean['loss']:8.4f} "
                       f"{cost['flops'] / 1e6:16.3f}  {text}")
        for key in ("accuracy", "loss"):
            a, b = [one[key] for one in shared], [one[key] for one in alone]
            tell(comm, f"{key:>8}: Spearman {spearman(a, b):.3f}, Kendall {kendall(a, b):.3f} of {len(a)} paths")
        work = [cost["flops"] for *_, cost in rows]
        tell(comm, f"accuracy alone with multiply-adds: Spearman {spearman([one['accuracy'] for one in alone], work):.3f}")
    return 0


def tell(comm: object, text: str) -> None:
    if comm.rank == 0:                                        # type: ignore[attr-defined]
        print(text, flush=True)


if __name__ == "__main__":
    PROCESS = Process()
    PROCESS.run(main)
