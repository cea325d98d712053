"""One SHA-256 whatever the ranks: models x buckets x overlap x copies x ranks with train.reproducible = "layout", as a table.

    python benchmarks/layout_matrix.py                     # 200 steps, everything with everything
    python benchmarks/layout_matrix.py --steps 20 --pairs  # each two settings together at least once

A cell is the beginning of a SHA-256 over parameters, buffers, and the loss and gradient norm of every step. The line of the
plain mode ("run") has the same micro-batches: there the hash changes with the ranks, or this comparison would show nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
RANKS = (1, 2, 3, 4, 8)
BUCKETS = (4 << 10, 64 << 10, 4 << 20)                    # bytes: a parameter each, several, all; below and above whole messages
OVERLAP = ("polled", "left alone", "thread")              # messages moved between backward nodes, only at the end, by a thread
COPIES = ("rank", "node")                                 # of the parameters: one on each
MODELS = ("mlp", "lenet", "resnet20", "gpt")

Case = dict[str, Any]


def every_case() -> list[Case]:
    """Everything with everything, but a thread with one copy per node: that is refused."""
    return [one for one in (case(*values) for values in itertools.product(MODELS, RANKS, BUCKETS, OVERLAP, COPIES))
            if (one["overlap"], one["copies"]) != ("thread", "node")]


def pairs() -> list[Case]:
    """A choice of cases in which each two values of two settings meet: the case that adds most pairs, again and again."""
    left = every_case()
    missing = set(itertools.chain.from_iterable(map(pairs_of, left)))
    chosen: list[Case] = []
    while missing:
        chosen.append(max(left, key=lambda c: len(missing & pairs_of(c))))
        missing -= pairs_of(chosen[-1])
    return chosen


def pairs_of(one: Case) -> set[Any]:
    return set(itertools.combinations(sorted((key, str(value)) for key, value in one.items()), 2))


def case(model: str, ranks: int, bucket_bytes: int, overlap: str, copies: str, mode: str = "layout") -> Case:
    return {"model": model, "ranks": ranks, "bucket_bytes": bucket_bytes, "overlap": overlap, "copies": copies, "mode": mode}


def plain() -> list[Case]:
    return [case("mlp", ranks, BUCKETS[-1], OVERLAP[0], COPIES[0], "run") for ranks in RANKS]


def run(cases: Iterable[Case], steps: int) -> list[Case]:
    """The cases with their "hash": one job for each number of ranks."""
    chosen = sorted(cases, key=lambda c: c["ranks"])
    scrubbed = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_"))}
    environment = {**scrubbed, **ROOT_MAY, "OMP_NUM_THREADS": "1",
                   "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), scrubbed.get("PYTHONPATH")]))}
    beside = Path(sys.executable).with_name("mpirun")
    done: list[Case] = []
    for ranks, group in itertools.groupby(chosen, key=lambda c: c["ranks"]):
        with tempfile.TemporaryDirectory() as folder:
            todo, found = Path(folder) / "cases.json", Path(folder) / "hashes.json"
            todo.write_text(json.dumps(list(group)))
            subprocess.run([str(beside) if beside.exists() else "mpirun", "-n", str(ranks), sys.executable, __file__, "--steps",
                            str(steps), "--cases", str(todo), "--into", str(found)], check=True, env=environment)
            done += json.loads(found.read_text())
    return done


def work(cases: list[Case], steps: int, into: Path) -> int:
    """On every rank: trains each case and lets rank 0 write the hashes."""
    import mpitrain
    world = mpitrain.start()
    for one in cases:
        one["hash"] = train(world.comm, one, steps)
    if world.rank == 0:
        into.write_text(json.dumps(cases))
    return 0


def train(comm: Any, one: Case, steps: int) -> str:
    from layout_models import MODELS_BY_NAME, Losses

    import mpitrain
    from mpitrain.config import Config, changed
    from mpitrain.errors import OutputError
    from mpitrain.train import assemble
    described = MODELS_BY_NAME[one["model"]]()
    mesh = mpitrain.Mesh(comm)
    config = changed(changed(Config(), **described.sections), run={"seed": 7}, log={"every": 1},
                     train={"steps": steps, "reproducible": one["mode"], "eval_every": 8},
                     comm={"bucket_mb": one["bucket_bytes"] / 2**20, "node_shared": one["copies"] == "node",
                           "progress": "thread" if one["overlap"] == "thread" else "poll"})
    job = assemble(described.model, described.inputs, mesh, loss=described.loss, optimizer=described.optimizer, config=config,
                   quiet=True)
    if one["copies"] == "node" and job.trainer.notes:
        raise OutputError(f"what was to be compared cannot be had: {job.trainer.notes[0]}")
    if one["overlap"] == "left alone":
        job.trainer.pipeline.reducer.progress = None
    job.trainer.observers.append(losses := Losses())
    job.fit()
    hashes = job.state.hashes()
    job.channel.agree([hashes, losses.seen], "the final parameters")
    mesh.close()
    return hashlib.sha256(json.dumps([hashes, losses.seen], sort_keys=True).encode()).hexdigest()


def table(done: Iterable[Case]) -> list[str]:
    """A line for each model and setting, a column for each number of ranks."""
    lines = [f"{'model':<10}{'mode':<8}{'bucket':>10}  {'messages':<12}{'a copy a':<10}" + "".join(f"{n:>12}" for n in RANKS)]
    keys = ("model", "mode", "bucket_bytes", "overlap", "copies")
    ordered = sorted(done, key=lambda c: [str(c[key]).zfill(9) for key in keys])
    for values, group in itertools.groupby(ordered, key=lambda c: [c[key] for key in keys]):
        cells = {c["ranks"]: c["hash"][:10] for c in group}
        lines.append(f"{values[0]:<10}{values[1]:<8}{values[2]:>10}  {values[3]:<12}{values[4]:<10}"
                     + "".join(f"{cells.get(n, '-'):>12}" for n in RANKS))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pairs", action="store_true", help="each two settings together at least once, instead of all together")
    parser.add_argument("--cases", type=Path, help="a rank of a job of this script: what to train")
    parser.add_argument("--into", type=Path)
    arguments = parser.parse_args()
    if arguments.cases:
        return work(json.loads(arguments.cases.read_text()), arguments.steps, arguments.into)
    done = run(pairs() if arguments.pairs else every_case(), arguments.steps)
    control = run(plain(), arguments.steps)
    print("\n".join(table(done + control)))
    wrong = [model for model in MODELS if len({c["hash"] for c in done if c["model"] == model}) != 1]
    verdict = f"DIFFERENT for {', '.join(wrong)}" if wrong else "one hash a model"
    print(f"{len(done)} runs of {arguments.steps} steps: {verdict}",
          f'(plain mode: {len({c["hash"] for c in control})} hashes on {len(control)} numbers of ranks)')
    return 1 if wrong else 0


if __name__ == "__main__":
    if "--cases" in sys.argv:
        import mpitrain
        mpitrain.Process().run(main)
    sys.exit(main())
