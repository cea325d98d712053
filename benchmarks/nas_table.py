"""Architecture search on a published table: NAS-Bench-Graph (2206.09166), which the package nas-bench-graph of PyPI has inside.

    pip install nas-bench-graph
    python benchmarks/nas_table.py [--dataset arxiv] [--looks 500] [--seeds 20] [--samplers random,evolution]

The table has 26,206 architectures of graph networks with their validation and test accuracy. A search looks up so many of them,
by validation accuracy, and is in the top where its best is one of the best 0.1 % of the table by that. The space is the 9 forms
of links and 9 operations for each of 4 nodes, 59,049 points; those that are one network are one entry, and looking it up again
counts.

The table is a pickle. It is read by an unpickler that knows two names, numpy's scalar and dtype, and nothing else, so that it
cannot run anything.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pickle
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.search.decisions import Decisions
from mpitrain.search.front import Objective
from mpitrain.search.pruners import PRUNERS
from mpitrain.search.replay import replay
from mpitrain.search.samplers import SAMPLERS
from mpitrain.search.space import read_space
from mpitrain.search.table import Table, Trial

PACKAGE = "nas_bench_graph"
ALLOWED = {("numpy", "dtype"): np.dtype}
for _module in ("numpy.core.multiarray", "numpy._core.multiarray"):         # the name in NumPy 1, which the file has, and in 2
    ALLOWED[_module, "scalar"] = np.dtype("f8").type(0).__reduce__()[0]
TOP = 0.001
FORMS = ((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 1), (0, 0, 1, 2), (0, 0, 1, 3), (0, 1, 1, 1), (0, 1, 1, 2), (0, 1, 2, 2),
         (0, 1, 2, 3))                      # for each node, the node that it reads: 0 is the input
OPERATIONS = ("gat", "gcn", "gin", "cheb", "sage", "arma", "graph", "fc", "skip")


class Plain(pickle.Unpickler):
    """Reads numbers, words and tables; any other name in the file is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"the table names {module}.{name}, which is no number")
        return ALLOWED[module, name]


def package_folder() -> Path:
    """Where the package lies; it is not imported for that."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise SystemExit("nas_table: the package nas-bench-graph is missing: pip install nas-bench-graph")
    return Path(found.origin).parent


def read_table(dataset: str) -> dict[int, dict[str, float]]:
    """valid_perf, perf (of the test rows), latency and para of each architecture, by its number."""
    path = package_folder() / "light" / f"{dataset}.bench"
    if not path.is_file():
        raise SystemExit(f"nas_table: no dataset {dataset}; there are {', '.join(sorted(p.stem for p in path.parent.glob('*')))}")
    with open(path, "rb") as file:
        found: dict[int, dict[str, float]] = Plain(file).load()
    return found


def space() -> Any:
    nodes = {f"model.node{i}": {"choices": list(OPERATIONS)} for i in range(4)}
    return read_space({"model.links": {"choices": [list(form) for form in FORMS]}, **nodes})


def number_of(values: dict[str, Any]) -> int | None:
    """The entry of an architecture, by the package's own rules of which ones are the same network; None where it is none."""
    from nas_bench_graph.architecture import Arch
    nodes = [values[f"model.node{i}"] for i in range(4)]
    if set(nodes) == {"skip"}:
        return None
    return int(Arch(list(values["model.links"]), nodes).valid_hash())


def search(table: dict[int, dict[str, float]], sampler: str, looks: int, seed: int, top: float) -> dict[str, Any]:
    """The best architecture of one search, and after how many look-ups one of the top was found (None: never)."""
    seen: list[int] = []

    def job(trial: Trial, reached: int, rung: int) -> tuple[Any, float]:
        number = number_of(trial.values)
        seen.append(-1 if number is None else number)
        return ("E_CONFIG" if number is None else {"accuracy": table[number]["valid_perf"]}), 1.0
    kind: Any = SAMPLERS[sampler]
    decisions = Decisions(Table((1,), [Objective("accuracy", higher=True)], looks), PRUNERS["none"](), kind(space(), seed))
    replay(decisions, 1, job)
    best = max((number for number in seen if number >= 0), key=lambda number: table[number]["valid_perf"])
    first = next((i for i, number in enumerate(seen, 1) if number >= 0 and table[number]["valid_perf"] >= top), None)
    return {"valid": table[best]["valid_perf"], "test": table[best]["perf"], "looks to the top": first,
            "different": len(set(seen))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="arxiv")
    parser.add_argument("--looks", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--samplers", default="random,evolution")
    asked = parser.parse_args()
    table = read_table(asked.dataset)
    accuracies = sorted((entry["valid_perf"] for entry in table.values()), reverse=True)
    n_top = round(TOP * len(table))
    top = accuracies[n_top - 1]
    for sampler in asked.samplers.split(","):
        runs = [search(table, sampler, asked.looks, seed, top) for seed in range(asked.seeds)]
        firsts = [run["looks to the top"] for run in runs if run["looks to the top"]]
        print(json.dumps({
            "dataset": asked.dataset, "architectures": len(table), "sampler": sampler, "looks": asked.looks,
            "top": f"{n_top} best, {top:.4f} or better; the best has {accuracies[0]:.4f}",
            "in the top": f"{len(firsts)} of {asked.seeds}",
            "median looks to it": statistics.median(firsts) if firsts else None,
            "valid, median": round(statistics.median(run["valid"] for run in runs), 4),
            "test, median": round(statistics.median(run["test"] for run in runs), 4),
            "different, median": statistics.median(run["different"] for run in runs)}))


if __name__ == "__main__":
    main()
