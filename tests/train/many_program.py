"""Several runs, and evaluations of what they saved, by one start of mpirun: each on the first so many of its ranks.

    mpirun -n 2 python many_program.py '[[1, "run.toml", "run.out=a"], [2, "run.toml", "--resume"], [2, "evaluate", "a"]]'

Rank 0 prints an object of JSON for each: its metrics, with a run's steps and hashes or an evaluation's tables; or the status and
the message of what is refused.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import examined  # noqa: E402

from mpitrain import MpitrainError, Process, Run, load_config, start  # noqa: E402
from mpitrain.config import load_run  # noqa: E402
from mpitrain.run.saved_run import SavedRun  # noqa: E402
from mpitrain.run.session import before_mpi, look_at_files  # noqa: E402

process = Process()


def trained(words: list[str], files: Any, comm: Any) -> dict[str, Any]:
    with Run(configured(words), comm, process=process, quiet=True, files=files) as run:
        found = run.train(resume="auto" if "--resume" in words else None)
    return {**found.metrics, **found.hashes, "steps": found.steps}


def evaluated(folder: Path, step: str | None, comm: Any) -> dict[str, Any]:
    with SavedRun(load_run(folder, []), comm, process=process, quiet=True) as saved:
        found = saved.evaluate(folder, step)
    return {**found.metrics, **found.tables}


def configured(words: list[str]) -> Any:
    return load_config(Path(words[0]), [word for word in words[1:] if not word.startswith("--")])


def main() -> int:
    asked = json.loads(sys.argv[1])
    examined.once(built_in=False)
    looked = [None if words[0] == "evaluate" else before_mpi(partial(look_at_files, configured(words))) for _, *words in asked]
    world = start().comm
    for (n, *words), files in zip(asked, looked):
        part = world.Split(int(world.rank < n), world.rank)
        if world.rank < n:
            try:
                told = trained(words, files, part) if files else evaluated(Path(words[1]), (*words, None)[2], part)
            except MpitrainError as error:
                told = {"status": error.exit_code, "message": str(error)}
            if world.rank == 0:
                print(json.dumps(told), flush=True)
        part.Free()
        everyone = world.Ibarrier()
        while not everyone.Test():                # in a barrier these ranks would take cores from those that train
            time.sleep(0.005)
    return 0


process.run(main)
