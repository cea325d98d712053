"""Studies on the ranks of this machine: how busy they are, what decisions and set-ups take, and what a killed study finds.

    python benchmarks/search_runs.py utilisation     # 27 equal trials on 1 and 2 groups, by turns; 2 minutes
    python benchmarks/search_runs.py rungs           # the same with rungs [1, 3, 9]: many short trainings; 1 minute
    python benchmarks/search_runs.py decisions       # 2 groups decide on a table of 1,000 trials; 20 seconds
    python benchmarks/search_runs.py decisions --trials 300 --sampler optuna:TPESampler     # with its questions; 10 seconds
    python benchmarks/search_runs.py same            # order = "fixed" on 1, 2 and 4 groups; search against train; 1 minute
    python benchmarks/search_runs.py kills           # a rank is killed at 20 random moments; about 2 minutes
    python benchmarks/search_runs.py digits          # examples/digits_search.toml against examples/digits.toml; 1 minute

Utilisation is the part of all ranks' seconds, from the first decision to the end of the study, in which they are at work on a
trial; trained, the part in which they train, evaluate or save, which is that without set-ups. A set-up is the time from the end
of a trial's training to the first step of the next one, with all that is written between.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/search")]

from launch import clean_environment, find_mpirun, is_python, launch, send  # noqa: E402
from studies import STUDY, lines, told  # noqa: E402

DIGITS, STUDY_OF_DIGITS = ROOT / "examples/digits.toml", ROOT / "examples/digits_search.toml"
EQUAL = """
[search]
trials = 27
pruner = "none"
objective = ["accuracy"]
[space]
"optimizer.lr" = {log = [0.01, 0.1]}
"optimizer.weight_decay" = {log = [1e-5, 1e-2]}
"""


def mpirun(n: int, folder: Path, *words: str | Path) -> float:
    """Seconds of a command of mpitrain on `n` ranks, each with a thread; it must end well."""
    command = [find_mpirun(), "-n", str(n), "--bind-to", "none", sys.executable, "-m", "mpitrain", *map(str, words)]
    began = time.perf_counter()
    environment = {**clean_environment(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return time.perf_counter() - began


def study_json(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "study.json").read_text())
    return found


def utilisation(folder: Path, options: argparse.Namespace, *, rungs: bool = False) -> None:
    """27 trials of the digits run: groups of one rank, one of them and two of them in turns."""
    file = folder / "equal.toml"
    text = DIGITS.read_text().replace('name = "digits-sgd"', 'name = "equal"').replace("epochs = 20", "epochs = 9" if rungs else
                                                                                      f"epochs = {options.epochs}")
    file.write_text(text + EQUAL.replace('"none"', '"asha"\nrungs = [1, 3, 9]' if rungs else '"none"'))
    found: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
    for turn in range(options.rounds):
        for groups in (1, 2):
            out = folder / f"{groups}-{turn}"
            mpirun(groups, folder, "search", file, f"run.out={out}")
            found[groups].append(study_json(out)["times"])
    for groups, times in found.items():
        of = {key: statistics.median(one[key] for one in times) for key in ("seconds", "utilisation", "trained", "set_up_s",
                                                                                 "decision_s")}
        print(f"{groups} group{'s' * (groups > 1)}: {of['seconds']:.2f} s, utilisation {of['utilisation']:.3f}, trained "
              f"{of['trained']:.3f}, a set-up {of['set_up_s'] * 1e3:.1f} ms, a decision {of['decision_s'] * 1e3:.2f} ms")
    ratios = [one["seconds"] / two["seconds"] for one, two in zip(found[1], found[2])]
    print(f"two groups are {statistics.median(ratios):.2f} times as fast as one, median of {len(ratios)} pairs")


def decisions(folder: Path, options: argparse.Namespace) -> None:
    """Two processes that act as groups take 1,000 trials in turns, without training any."""
    from multiprocessing import get_context

    from mpitrain.search.journal import Journal
    from mpitrain.search.study_file import read_study
    file = folder / "study.toml"
    file.write_text(STUDY.replace("trials = 9", f"trials = {options.trials}").replace('order = "fixed"', "").replace(
        'sampler = "random"', f'sampler = "{options.sampler}"'))
    Journal(folder / "journal.jsonl").create(read_study(file, []).header())
    with get_context("spawn").Pool(2) as pool:
        everyone = pool.starmap(act, [(file, folder, group) for group in (0, 1)])
    whole = sorted(seconds for own in everyone for seconds, _ in own)
    alone = sorted(seconds - synced for own in everyone for seconds, synced in own)
    late = sorted(seconds - synced for own in everyone for seconds, synced in own[-len(own) // 10:])
    for what, found in (("with the journal's sync", whole), ("without the sync", alone), ("of the last tenth, without it", late)):
        print(f"a decision {what}: median {statistics.median(found) * 1e3:.3f} ms, 95 % below "
              f"{found[int(0.95 * len(found))] * 1e3:.3f} ms ({len(found)} decisions)")


def act(file: Path, folder: Path, group: int) -> list[tuple[float, float]]:
    """The seconds of each decision of a group whose trials take no time, and of the sync in it."""
    from mpitrain.search.journal import Journal
    from mpitrain.search.pruners import Done, Wait
    from mpitrain.search.shared_table import SharedTable, wait_for_more
    from mpitrain.search.study_file import read_study
    from mpitrain.search.table import result
    synced, sync = [0.0], os.fsync

    def timed(fd: int) -> None:
        began = time.perf_counter()
        sync(fd)
        synced[0] += time.perf_counter() - began
    os.fsync = timed
    table = SharedTable(read_study(file, []).decisions(), Journal(folder / "journal.jsonl"))
    found, outcomes, chance = list[tuple[float, float]](), list[dict[str, Any]](), random.Random(group)
    while True:
        synced[0] = 0.0
        action = table.next(*outcomes)
        found.append((table.seconds[-1], synced[0]))
        if isinstance(action, Done):
            return found
        if isinstance(action, Wait):
            wait_for_more(table.journal.path, table.offset)
            outcomes = []
            continue
        outcomes = [result(action.trial.id, action.rung, {"accuracy": chance.random()}, group=group)]


def same(folder: Path, options: argparse.Namespace) -> None:
    """One study on 1, 2 and 4 groups; its best trial at once through `train`; trials of 1, 2 and 3 ranks with one layout."""
    file = folder / "study.toml"
    file.write_text(STUDY.replace("trials = 9", "trials = 27").replace("rungs = [1, 2, 4]", "rungs = [1, 3, 9]").replace(
        "epochs = 4", "epochs = 9"))
    for n in (1, 2, 4):
        mpirun(n, folder, "search", file, f"run.out={folder}/on-{n}")
    found = [told(folder / f"on-{n}") for n in (1, 2, 4)]
    print("1, 2, 4 groups: study.json", "equal but for times" if found[0] == found[1] == found[2] else "DIFFERENT")
    best = found[0]["best"]
    mpirun(1, folder, "train", folder / "on-4/best.toml", f"run.out={folder}/at-once", "--quiet")
    about = json.loads((folder / "at-once/run.json").read_text())
    trial = folder / f"on-4/trials/{best['trial']:04d}"
    equal = about["parameters_sha256"] == best["parameters_sha256"] and lines(trial) == lines(folder / "at-once")
    print(f"rungs [1, 3, 9] through search, 9 epochs at once through train: {'equal' if equal else 'DIFFERENT'} SHA-256 "
          f"({about['parameters_sha256'][:12]}) and metrics.jsonl")
    for n in (1, 2, 3):
        mpirun(n, folder, "search", file, f"run.out={folder}/ranks-{n}", f"search.ranks={n}", "train.reproducible=layout",
               "train.micro_batches=6", "search.trials=9")
    found = [told(folder / f"ranks-{n}") for n in (1, 2, 3)]
    print('1, 2, 3 ranks a trial, reproducible = "layout":', "equal" if found[0] == found[1] == found[2] else "DIFFERENT")


def kills(folder: Path, options: argparse.Namespace) -> None:
    """A rank of two is killed at a random moment of a study; it goes on, and is compared with one that was left alone."""
    file, chance = folder / "study.toml", random.Random(options.seed)
    file.write_text(STUDY)
    mpirun(2, folder, "search", file, f"run.out={folder}/whole")
    whole, bad, finished = told(folder / "whole"), 0, 0
    records = lines_of(folder / "whole")
    for number in range(options.count):
        out = folder / f"killed-{number}"
        job = launch(2, "-m", "mpitrain", "search", file, f"run.out={out}", cwd=folder)
        at = chance.uniform(0, records)                       # after that record, and a part of 0.1 s
        while job.process.poll() is None and lines_of(out) < int(at):
            time.sleep(1e-3)
        time.sleep(0.1 * (at % 1))
        ranks = [pid for pid in job.ranks() if is_python(pid)]
        if ranks:
            send(chance.choice(ranks), signal.SIGKILL)
        job.finish(60, allow_orphans=True)
        before = results(out)
        finished += sum(before.values())
        mpirun(2, folder, "search", file, f"run.out={out}", *(["--resume"] if (out / "journal.jsonl").exists() else []))
        after = results(out)
        lost = [key for key in before if key not in after]
        twice = [key for key, n in after.items() if n > 1]
        if lost or twice or told(out) != whole:
            bad += 1
            print(f"kill {number}: lost {lost}, twice {twice}, the same study: {told(out) == whole}")
    print(f"{options.count} kills, {finished} results before them: {bad} studies lost one, ran one twice or found another best")


def lines_of(folder: Path) -> int:
    path = folder / "journal.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def results(folder: Path) -> Counter[tuple[int, int]]:
    """How often a study has the result of a trial at a rung."""
    if not (folder / "journal.jsonl").exists():
        return Counter()
    whole = (folder / "journal.jsonl").read_text().split("\n")[:-1]      # the last line may be torn
    return Counter((r["trial"], r["rung"]) for r in map(json.loads, whole) if r["kind"] == "result")


def digits(folder: Path, options: argparse.Namespace) -> None:
    """The study of the examples beside the run that it starts from: accuracy, and samples trained."""
    mpirun(2, folder, "train", DIGITS, f"run.out={folder}/run", "--quiet")
    mpirun(2, folder, "search", STUDY_OF_DIGITS, f"run.out={folder}/study")
    about, found = json.loads((folder / "run/run.json").read_text()), study_json(folder / "study")
    best = found["best"]["results"][str(found["rungs"][-1])]["accuracy"]
    of_a_run = 20 * 1437
    print(f"examples/digits.toml: accuracy {about['metrics']['accuracy']:.4f}; the study's best: {best:.4f} "
          f"({found['best']['values']}), after {found['times']['seconds']:.1f} s")
    print(f"trials at the rungs: {found['reached']}; samples {found['samples']:,}, "
          f"{found['samples'] / (len(found['trials']) * of_a_run):.3f} of those of {len(found['trials'])} full runs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shows = {"utilisation": utilisation, "rungs": lambda folder, options: utilisation(folder, options, rungs=True),
             "decisions": decisions, "same": same, "kills": kills, "digits": digits}
    parser.add_argument("what", choices=shows)
    parser.add_argument("--rounds", type=int, default=5, help="pairs of studies on one group and on two (5)")
    parser.add_argument("--epochs", type=int, default=20, help="of each of the 27 equal trials (20)")
    parser.add_argument("--trials", type=int, default=1000, help="of the table that is decided on (1000)")
    parser.add_argument("--sampler", default="random", help="of the trials that are decided on (random)")
    parser.add_argument("--count", type=int, default=20, help="kills (20)")
    parser.add_argument("--seed", type=int, default=18, help="of the moments of kills (18)")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="mpitrain-search-"))
    try:
        shows[options.what](folder, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
