"""`mpitrain plan`: the lines that it prints, and the file that it writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.backend import keep_freed_memory
from mpitrain.config import load_config
from mpitrain.errors import ConfigError, UsageError
from mpitrain.machines.machine import check_ranks, load_machine
from mpitrain.plan.memory_lines import table
from mpitrain.plan.planner.problem import Problem
from mpitrain.plan.planner.result import HEADS, as_json, rests_on, table_of
from mpitrain.plan.planner.search import Plan, best_first
from mpitrain.plan.planner.shortage import explain

if TYPE_CHECKING:
    from mpitrain.schedules.clocks import Table


MOST_RANKS = 1 << 20          # ten times the processors of the largest machine; their meshes are looked at in seconds
LONGEST = 40                  # letters of a number in a message


def plan_lines(path: Path, overrides: Sequence[str], *, ranks: str, machine: str, top: int = 5,
               json_file: Path | None = None, energy: Path | None = None) -> Iterator[str]:
    """The best ways to run a configuration on `ranks` ("N"), or the best one on several numbers of ranks ("a..b"), of a machine.

    `energy` is a table of clocks, for the best plan whose stages it has: lines of `plan.energy_lines` follow.
    Errors are those of a wrong configuration or machine file, UsageError for numbers that cannot be, and MeshError where no way
    fits the machine's memory; a table of clocks that cannot be read is MissingError or DataError.
    """
    counts = numbers_of_ranks(ranks)
    if top < 1:
        raise UsageError(f"--top must be at least 1, found {top}")
    if json_file is not None and (json_file.is_dir() or not json_file.parent.is_dir()):
        raise UsageError(f"--json takes a file to write, in a folder that is there; found {json_file}")
    found = load_machine(machine)
    for n in counts:
        check_ranks(found, n)
    if energy is not None:
        from mpitrain.schedules.clocks import read_table  # few plans are for lower clocks
        clocks = read_table(energy)          # a table that cannot be read is told before the search
    keep_freed_memory()                      # the pool of this process counts bytes of arrays
    problem = Problem(load_config(path, list(overrides)), found)
    start = f"python -m mpitrain train {path} {' '.join(overrides)}".rstrip()
    plans: list[tuple[int, Plan]] = []
    for n in counts:
        best = list(islice(best_first(problem, n), top if len(counts) == 1 else 1))
        if not best and len(counts) == 1:
            raise explain(problem, n)
        plans += [(n, plan) for plan in best]
        if not best:
            yield f"{n} ranks: {explain(problem, n).message}"
    if not plans:
        return
    first = [str(n) if len(counts) > 1 else str(place) for place, (n, _) in enumerate(plans, 1)]
    yield f"{problem.config.run.name} on {found.name}, predicted"
    yield from table(("ranks" if len(counts) > 1 else "plan", *HEADS), table_of(problem, [plan for _, plan in plans], first))
    for head, (n, plan) in zip(first, plans):
        yield f"{head}: mpirun -n {n} {start} {' '.join(plan.candidate.overrides(problem.written))}".rstrip()
    for what, why in rests_on(problem, plans[0 if len(counts) == 1 else -1][1]).items():      # the most ranks are measured least
        yield f"{what}: {why}"
    if energy is not None:
        yield from lower_clocks(problem, dict(zip(first, plans)), clocks, energy)
    if json_file is not None:
        places = range(1, len(plans) + 1) if len(counts) == 1 else [1] * len(plans)
        json_file.write_text("".join(json.dumps(as_json(problem, plan, place)) + "\n"
                                     for place, (_, plan) in zip(places, plans)))


def lower_clocks(problem: Problem, plans: Mapping[str, tuple[int, Plan]], clocks: Table, file: Path) -> Iterator[str]:
    """Clocks by slack of the first of the plans, by their names, whose stages and instructions a table of a file has.
    ConfigError, that of the best plan, where it has those of none."""
    from mpitrain.plan.energy_lines import energy_lines
    refused = list[ConfigError]()
    for name, (n, plan) in plans.items():
        try:
            lines = list(energy_lines(problem.config, plan.candidate, problem.machine.idle_watts, clocks, file))
        except ConfigError as error:
            refused.append(error)
            continue
        yield f"{name}: clocks of {file}, joules of all {n} ranks"
        yield from lines
        return
    raise ConfigError(f"none of the {len(plans)} plans shown can have clocks of this table; the best: {refused[0].message}",
                      file=file)


def numbers_of_ranks(text: str) -> list[int]:
    """``"8"`` is [8]; ``"6..40"`` both ends and the powers of two between them. UsageError for anything else."""
    ends = text.split("..")
    if len(ends) > 2 or not all(end.isascii() and end.isdigit() for end in ends):
        raise UsageError(f'--ranks is a number, or two with .. between them, such as 8 or 8..4096; found "{text}"')
    if any(len(end.lstrip("0")) > len(str(MOST_RANKS)) or int(end) > MOST_RANKS for end in ends):
        raise UsageError(f"--ranks is at most {MOST_RANKS}, more than any machine has; found {text[:LONGEST]}")
    low, high = int(ends[0]), int(ends[-1])
    if low < 1:
        raise UsageError(f"--ranks must be at least 1, found {text}")
    if high < low:
        raise UsageError(f"--ranks goes from the smaller number to the larger one; found {text}, write {high}..{low}")
    powers = (1 << k for k in range(high.bit_length()))
    return sorted({low, high, *(n for n in powers if low <= n <= high)})
