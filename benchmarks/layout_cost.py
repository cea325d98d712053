"""What train.reproducible = "layout" costs: seconds a step against "run" with the same micro-batches, in one job.

    python benchmarks/layout_cost.py [--ranks 2] [--micro 8] [--pairs 40] [--model gpt]

Both trainers live in one job and take turns, a few steps each: A B A B, .... A pair gives a ratio; its median and quartiles are
printed. Then, apart, the price of more micro-batches: the plain mode with as many as there are ranks against --micro of them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEPS_A_TURN = 3
MODELS = ("gpt", "mlp")


def describe(name: str) -> Any:
    """The transformer and the MLP of the step-time benchmarks: 4 layers of 128 on 12 windows of 64, and 784-1024-1024-10."""
    import numpy as np
    from layout_models import Described, Memory

    from mpitrain import data, models, optim
    from mpitrain.train.build.inputs import Inputs
    rng = np.random.default_rng(0)
    if name == "gpt":
        tokens = rng.integers(0, 65, (240, 65))
        source = Memory(tokens[:, :-1], tokens[:, 1:], "tokens")
        sections = {"train": {"batch_size": 24}, "optimizer": {"clip_norm": 1.0}}
        model = models.gpt(layers=4, heads=4, width=128, block=64, vocabulary=65)
    else:
        source = Memory(rng.standard_normal((2048, 784)).astype(np.float32), rng.integers(0, 10, 2048))
        model, sections = models.mlp(784, [1024, 1024], 10), {"train": {"batch_size": 256}}
    inputs = Inputs(source, range(len(source)), None, range(0), data.Transforms())
    return Described(model, inputs, lambda s: optim.AdamW(s, lr=1e-3), sections)


def stepper(mesh: Any, name: str, micro_batches: int, mode: str) -> Callable[[], float]:
    """A function that takes a few steps and gives the seconds of one, the slowest rank's."""
    import numpy as np

    from mpitrain.config import Config, changed
    from mpitrain.train import assemble
    described = describe(name)
    config = changed(changed(Config(), **described.sections),
                     train={"steps": 1, "micro_batches": micro_batches, "reproducible": mode})
    job = assemble(described.model, described.inputs, mesh, loss=described.loss, optimizer=described.optimizer, config=config,
                   quiet=True)
    job.trainer.update.want_norm = False
    steps = job.trainer.loader.iterate()

    def turn() -> float:
        batches = [next(steps)[1] for _ in range(STEPS_A_TURN)]
        job.channel.barrier()
        began = time.perf_counter()
        for batch in batches:
            job.trainer.train_step(batch)
        seconds = np.zeros(mesh.size("dp"))
        seconds[mesh.coordinate("dp")] = (time.perf_counter() - began) / STEPS_A_TURN
        job.channel.allreduce(seconds, name="seconds")
        return float(seconds.max())
    turn.close = job.trainer.loader.close  # type: ignore[attr-defined]
    return turn


def compare(one: Callable[[], float], other: Callable[[], float], pairs: int) -> dict[str, float]:
    """Median seconds of both, and the ratios other / one of the pairs; the first turns of each are thrown away."""
    from mpitrain.bench.pairs import alternate
    return alternate(lambda _: one(), lambda _: other(), pairs).summary("other")


def line(what: str, result: dict[str, float]) -> str:
    middle, low, high = (f"{100 * (result[key] - 1):+.1f} %" for key in ("ratio", "ratio_low", "ratio_high"))
    return (f"{what}: {result['seconds'] * 1e3:.2f} ms -> {result['other_seconds'] * 1e3:.2f} ms a step, {middle} "
            f"(quartiles {low} to {high})")


def measure(arguments: argparse.Namespace) -> int:
    import mpitrain
    from mpitrain.bench.report import Report
    from mpitrain.train.machine import threads
    world = mpitrain.start()
    report = Report(world.rank, arguments.json)
    threads.pin(1)
    mesh = mpitrain.Mesh(world.comm)
    n, micro = world.comm.size, arguments.micro
    for name in arguments.model or MODELS:
        plain, layout, few = (stepper(mesh, name, m, mode) for m, mode in ((micro, "run"), (micro, "layout"), (n, "run")))
        for change, one, other in ((f'{micro} micro-batches, "run" -> "layout"', plain, layout),
                                   (f'"run", {n} -> {micro} micro-batches', few, plain)):
            result = compare(one, other, arguments.pairs)
            report.line(line(f"{name}, {n} ranks, {change}", result))
            report.record({"bench": "layout_cost", "model": name, "what": change, "ranks": n, **result})
        for turn in (plain, layout, few):
            turn.close()  # type: ignore[attr-defined]
    mesh.close()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help="a rank of the job that this script starts")
    arguments = parser.parse_args()
    if arguments.rank:
        return measure(arguments)
    from layout_matrix import ROOT_MAY
    scrubbed = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_", "OPENBLAS_"))}
    beside = Path(sys.executable).with_name("mpirun")
    paths = os.pathsep.join(filter(None, [str(ROOT), scrubbed.get("PYTHONPATH")]))
    environment = {**scrubbed, **ROOT_MAY, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return subprocess.run([str(beside) if beside.exists() else "mpirun", "-n", str(arguments.ranks), sys.executable, __file__,
                           *sys.argv[1:], "--rank"], env=environment).returncode


if __name__ == "__main__":
    if "--rank" in sys.argv:
        import mpitrain
        mpitrain.Process().run(main)
    sys.exit(main())
