"""Searches on recorded learning curves in virtual time: random search and synchronous halving against ASHA.

    python benchmarks/search_replay.py                          # 2 seconds; --workers 1,4,16,64 --seeds 20
    python benchmarks/search_replay.py --decisions 1000         # microseconds of a decision in a study of so many trials
    python benchmarks/search_replay.py --record curves.jsonl    # trains the 200 trials of tests/search/curves.toml, 4 minutes

tests/search/curves.jsonl has the validation accuracies of 200 networks on digits after each of 27 epochs. A search sees them in a
random order, a job takes the seconds that its epochs took, and a worker asks for the next job when it has done one. The target is
fixed before: the time when a trial has been trained to the end whose accuracy is that of the fifth best of all 200, or better.
The ratio of configurations to workers matters: where each worker has few of them, random search has tried all in a few rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.search.decisions import Decisions, FixedDecisions
from mpitrain.search.front import Objective
from mpitrain.search.pruners import PRUNERS
from mpitrain.search.replay import Curve, Recorded, job_of, read_curves, replay
from mpitrain.search.samplers import SAMPLERS
from mpitrain.search.space import read_space
from mpitrain.search.table import Table

HERE = Path(__file__).resolve().parents[1] / "tests" / "search"
RUNGS, ETA, BEST = (1, 3, 9, 27), 3, 5
SEARCHES = {"random": "none", "halving": "halving", "asha": "asha", "asha-stop": "asha-stop"}


def time_to_target(curves: list[Curve], pruner: str, workers: int, seed: int, target: float) -> float:
    """Virtual seconds until a trial has reached the last rung with the target; infinite where none does."""
    table = Table(RUNGS, [Objective("accuracy", higher=True)], len(curves))
    kind: Any = PRUNERS[pruner]
    made = kind() if pruner == "none" else kind(ETA)
    order = np.random.default_rng(seed).permutation(len(curves))

    def reached(ended: Any) -> bool:
        return ended.rung == table.last and table.trials[ended.trial.id].results[ended.rung]["accuracy"] >= target
    ended, _ = replay(Decisions(table, made, Recorded(list(order))), workers, job_of(curves, RUNGS), reached)
    return ended[-1].time if reached(ended[-1]) else float("inf")


def target_of(curves: list[Curve], best: int = BEST) -> float:
    return sorted((curve.accuracies[-1] for curve in curves), reverse=True)[best - 1]


def medians(curves: list[Curve], workers: int, seeds: int, best: int = BEST) -> dict[str, float]:
    """The median time to the target of each search, in units of a mean epoch."""
    target = target_of(curves, best)
    epoch = statistics.mean(curve.seconds for curve in curves)
    return {name: statistics.median(time_to_target(curves, pruner, workers, seed, target) for seed in range(seeds)) / epoch
            for name, pruner in SEARCHES.items()}


def record(path: Path) -> None:
    """Trains every trial of the study alone and to the end, and writes its curve."""
    from mpitrain import Process
    from mpitrain.search.study_file import read_study
    from mpitrain.train.observers.observer import Observer

    class Watch(Observer):
        """The accuracy of each evaluation."""

        def __init__(self) -> None:
            self.found: list[float] = []

        def after_evaluation(self, step: int, metrics: Any, seconds: float) -> None:
            self.found.append(float(metrics["accuracy"]))
    study = read_study(HERE / "curves.toml", [])

    def main() -> int:
        import mpitrain
        from mpitrain.plan.inspect import open_data
        from mpitrain.train.build.from_config import build
        from mpitrain.train.build.sizes import with_sizes
        inputs = open_data(study.base)
        mesh = mpitrain.Mesh(mpitrain.start().comm)
        decisions, rows = study.decisions(), len(inputs.validation_rows)
        lines = [{"rows": rows, "epochs": study.rungs[-1]}]
        for number in range(study.trials):
            values = decisions.sampler.ask(decisions.table, number).values
            watch = Watch()
            job = build(with_sizes(study.config_with(values), inputs), inputs, mesh, quiet=True)
            job.trainer.observers.append(watch)
            began = time.process_time()
            job.fit()
            spent = (time.process_time() - began) / study.rungs[-1]
            lines.append({"values": values, "ms": round(1000 * spent, 2), "correct": [round(a * rows) for a in watch.found]})
            print(number, values, watch.found[-1], flush=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        mesh.close()
        return 0
    Process().run(main)


def decisions(trials: int) -> None:
    """Prints what a decision takes when nine tenths of the trials have started, with 8 workers."""
    space = read_space({"a.lr": {"log": [1e-4, 1e-1]}, "a.hidden": {"choices": [[64], [128], [256]]},
                        "a.batch": {"integer": [16, 256], "step": 16}, "a.decay": {"uniform": [0, 1]}})
    for sampler, pruner, n, ahead in [(s, p, 1, 0) for s in ("random", "qmc", "grid", "evolution") for p in PRUNERS] + [
            ("evolution", "asha", 1, 8), ("evolution", "asha", 2, 0), ("random", "asha", 3, 0), ("random", "halving", 2, 0)]:
        objectives = [Objective("accuracy", True), Objective("ms", False), Objective("parameters", False)][:n]
        table, kind, of_space = Table(RUNGS, objectives, trials), PRUNERS[pruner], SAMPLERS[sampler](space, 0)
        made = (FixedDecisions(table, kind(), of_space, ahead) if ahead else Decisions(table, kind(), of_space))
        random, taken = np.random.default_rng(0), list[tuple[float, float]]()
        ask = made.next

        def timed(ask: Any = ask, table: Table = table, taken: list[tuple[float, float]] = taken) -> Any:
            began = time.perf_counter(), time.thread_time()
            found = ask()
            if table.left < trials // 10:
                taken.append((time.perf_counter() - began[0], time.thread_time() - began[1]))
            return found
        made.next = timed                                             # type: ignore[method-assign]
        replay(made, 8, lambda trial, reached, rung, random=random: (
            dict(zip(("accuracy", "ms", "parameters"), random.random(3).tolist())), 1 + float(random.random())))
        print(json.dumps({"sampler": sampler, "pruner": pruner, "objectives": n, "order": "fixed" if ahead else "free",
                          "median us": round(1e6 * statistics.median(wall for wall, _ in taken)),
                          "of the processor, 95 %": round(1e6 * sorted(cpu for _, cpu in taken)[len(taken) * 95 // 100])}))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--record", type=Path, metavar="FILE", help="train the trials and write their curves")
    made.add_argument("--curves", type=Path, default=HERE / "curves.jsonl")
    made.add_argument("--decisions", type=int, metavar="TRIALS", help="measure how long decisions take instead")
    made.add_argument("--workers", default="1,4,16,64")
    made.add_argument("--seeds", type=int, default=20)
    made.add_argument("--best", type=int, default=BEST, help="the target is the accuracy of the trial at this place")
    return made


def main() -> None:
    asked = parser().parse_args()
    if asked.record:
        record(asked.record)
        return
    if asked.decisions:
        decisions(asked.decisions)
        return
    curves = read_curves(asked.curves)
    target = target_of(curves, asked.best)
    print(json.dumps({"curves": len(curves), "target accuracy": round(target, 4),
                      "curves that reach it": sum(curve.accuracies[-1] >= target for curve in curves)}))
    for workers in map(int, asked.workers.split(",")):
        found = medians(curves, workers, asked.seeds, asked.best)
        print(json.dumps({"workers": workers, "configurations a worker": len(curves) / workers, "seeds": asked.seeds,
                          **{f"{name}, epochs": round(value, 1) for name, value in found.items()},
                          "random / asha": round(found["random"] / found["asha"], 2),
                          "halving / asha": round(found["halving"] / found["asha"], 2)}))


if __name__ == "__main__":
    main()
