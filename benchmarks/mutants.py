"""Do the tests notice? One random change a time to a copy of the tree, and the tests that should fail because of it.

    python benchmarks/mutants.py --journal mutants.jsonl                   # 150 changes; goes on where it was stopped
    python benchmarks/mutants.py --journal mutants.jsonl --packages ops,nn # those of the 150 that lie there
    python benchmarks/mutants.py --journal mutants.jsonl --again           # the survivors once more, with the tests of now
    python benchmarks/mutants.py --journal mutants.jsonl --report
    python benchmarks/mutants.py --control                                 # no change at all: every test must pass so

A change is an operator, a comparison, a constant, a flag or a condition. The choice depends on the seed and the lines' text, so
that work elsewhere leaves it. The first failure kills a mutant, and so does a test that does not end. The journal has {"mutant",
"file", "line", "was", "is", "verdict", "by", "seconds"} of each on a line; the last one counts.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import layout_matrix
from mutations import Mutant, candidates

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 900                             # seconds of one command of tests; one test has 120
NOTHING_RAN = 5                           # pytest's exit code where no test is left of those that were asked for
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)|^.*\[rank \d+/\d+\] (\S+) ", re.MULTILINE)
TAG = "MPITRAIN_MUTANT"                   # in the environment of all that a mutant's tests start

# What a package's modules meet besides the tests of its own folder: those that run by themselves, and the bodies under mpirun.
RUNS = ("tests/train/test_runs.py",)
BODIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "autograd": (("tests/nn", "tests/ops"), ("parallel/pipeline_mpi", "parallel/reducer_mpi")),
    "backend": (("tests/kernels", "tests/ops/test_on_a_device.py", "tests/ops/test_dropout.py"), ("comm/exchange_mpi",)),
    "bench": ((), ()), "data": (RUNS, ()), "plan": (RUNS, ()), "run": (RUNS, ()),
    "checkpoint": (RUNS, ("checkpoint/checkpoint_mpi", "checkpoint/state_mpi")),
    "comm": (RUNS, ("comm/collectives_mpi", "comm/exchange_mpi", "comm/shared_mpi", "comm/progress_mpi", "comm/mesh_mpi",
                    "comm/clock_mpi", "parallel/reducer_mpi")),
    "config": (("tests/test_config.py", "tests/train/test_exchange.py", *RUNS), ()),
    "files": (("tests/checkpoint",), ("checkpoint/checkpoint_mpi",)),
    "kernels": (("tests/ops", "tests/optim", "tests/nn"), ("comm/exchange_mpi",)),
    "models": ((), ("parallel/pipeline_mpi", "parallel/mesh_mpi")),
    "nn": (("tests/ops", "tests/models"), ("parallel/mesh_mpi", "parallel/experts_mpi")),
    "ops": (("tests/nn",), ("parallel/experts_mpi", "parallel/context_mpi")),
    "optim": (RUNS, ("parallel/node_shared_mpi", "train/offload_mpi")),
    "parallel": (RUNS, (*(f"parallel/{name}_mpi" for name in ("reducer", "pipeline", "node_shared", "node_cut", "tree", "experts",
                                                              "context", "mesh")), "train/sharding_mpi", "train/exposed_mpi")),
    "placement": (("tests/plan", *RUNS), ("placement/placement_mpi", "parallel/mesh_mpi", "parallel/pipeline_mpi",
                                          "parallel/node_cut_mpi", "train/sharding_mpi")),
    "schedules": ((), ("comm/collectives_mpi", "comm/exchange_mpi", "parallel/pipeline_mpi")),
    "train": ((), ("train/exposed_mpi", "train/offload_mpi", "train/sharding_mpi", "checkpoint/checkpoint_mpi")),
    "verbs": (("tests/test_config.py", "tests/train", "tests/plan"), ()),
    "": (("tests/test_config.py", "tests/test_errors.py", "tests/test_registry.py", *RUNS), ()),
}


def package(file: str) -> str:
    """The key of BODIES that a file belongs to; "" of a module beside the packages."""
    name = Path(file).parts[1]
    return name if name in BODIES else ""


def commands(mutant: Mutant, tree: Path, ranks: int) -> Iterator[list[str]]:
    """The commands of tests, those first that are likely to fail."""
    pytest = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "120"]
    folder, stem = package(mutant.file), Path(mutant.file).stem.rstrip("s")
    serial, bodies = BODIES[folder]
    own = [f"tests/{folder}"] if folder and (tree / "tests" / folder).is_dir() else []
    nearest = sorted(str(p.relative_to(tree)) for p in (tree / "tests").glob(f"*/test_*{stem}*.py"))
    more = [name for name in serial if (tree / name).exists() and (ranks or name not in RUNS)]
    files = [f"tests/{name}.py" for name in bodies if (tree / f"tests/{name}.py").exists()]
    known = [f"--ignore={name}" for name in nearest]
    if nearest:
        yield [sys.executable, *pytest, "-m", "not slow and not gpu", *nearest]
    if files and ranks:
        yield ["mpirun", "-n", str(ranks), sys.executable, "-m", "mpi4py", *pytest, "--with-mpi", "-m", "not slow", *files]
    for group in filter(None, (own, more)):
        yield [sys.executable, *pytest, "-m", "not slow and not gpu", *known, *group]


def control(tree: Path, chosen: list[Mutant], ranks: int) -> int:
    """Runs all tests that the chosen mutants would meet, each file or folder once and to its end; 1 if any fails."""
    every = {(command[0], place): [word for word in command if word != "-x" and "tests/" not in word] + [place]
             for mutant in chosen for command in commands(mutant, tree, ranks) for place in command if place.startswith("tests/")}
    failures = 0
    for (program, place), command in every.items():
        if any((program, str(folder)) in every for folder in Path(place).parents):
            continue
        with tempfile.TemporaryDirectory(prefix="mutant-") as temporary:
            os.chmod(temporary, 0o755)
            began = time.monotonic()
            code, said = run(command, Path(shutil.copytree(tree, Path(temporary) / "tree")), temporary)
        failed = code not in (0, NOTHING_RAN)
        names = sorted({"".join(found) for found in FAILED.findall(said)}) or [said.strip()[-300:]]
        failures += failed
        print(f"{'failed' if failed else 'passed'}{time.monotonic() - began:6.0f} s  {Path(program).name} {place}",
              *(names if failed else ()), sep="\n    ", flush=True)
    return int(failures > 0)


def try_out(mutant: Mutant, tree: Path, ranks: int) -> dict[str, Any]:
    """What the tests say of a copy of the tree with this change."""
    began = time.monotonic()
    verdict, by = "survived", ""
    with tempfile.TemporaryDirectory(prefix="mutant-") as temporary:
        os.chmod(temporary, 0o755)                            # some tests go on as a user without rights
        copy = Path(shutil.copytree(tree, Path(temporary) / "tree"))
        text = (copy / mutant.file).read_bytes()
        (copy / mutant.file).write_bytes(text[:mutant.start] + mutant.new.encode() + text[mutant.stop:])
        for command in commands(mutant, tree, ranks):
            code, said = run(command, copy, temporary)
            if code not in (0, NOTHING_RAN):
                failed = FAILED.findall(said)
                verdict, by = "killed", "".join(failed[0]) if failed else said.strip()[-300:]
                break
    return {"mutant": mutant.name, "file": mutant.file, "line": mutant.line, "where": mutant.where, "was": mutant.was,
            "is": mutant.new, "verdict": verdict, "by": by, "seconds": round(time.monotonic() - began, 1)}


def run(command: list[str], tree: Path, temporary: str) -> tuple[int, str]:
    """Exit code and output, once all that the command started has ended."""
    tag = f"{TAG}={temporary}"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_", "PMI_"))}
    environment = {**kept, **layout_matrix.ROOT_MAY, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree), "TMPDIR": temporary,
                   "PATH": os.pathsep.join([str(Path(sys.executable).parent), kept["PATH"]]), "MPITRAIN_TEST_LIMIT": "120",
                   TAG: temporary}
    with open(Path(temporary) / "said", "w+", errors="replace") as said:
        process = subprocess.Popen(command, cwd=tree, env=environment, stdout=said, stderr=subprocess.STDOUT,
                                   stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            code = process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            code = 1
            said.write(f"no end within {TIMEOUT} s")
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if tag.encode() in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    os.kill(int(entry), signal.SIGKILL)
        process.wait()
        said.seek(0)
        return code, said.read()


def report(records: list[dict[str, Any]]) -> int:
    survivors = sorted((r for r in records if r["verdict"] == "survived"), key=lambda r: (r["file"], r["line"]))
    print(*(f"{r['file']}:{r['line']}  {r['was']} -> {r['is']}    {r['where'].split('|')[1]}" for r in survivors), sep="\n")
    for folder, group in itertools.groupby(sorted(records, key=lambda r: package(r["file"])), lambda r: package(r["file"])):
        verdicts = [r["verdict"] for r in group]
        print(f"{folder or '(beside the packages)':<24}{verdicts.count('killed'):4} of {len(verdicts)} killed")
    print(f"{len(records) - len(survivors)} of {len(records)} killed")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--journal", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("-n", "--number", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2, help="of the tests under mpirun; 0: without them and whole runs")
    parser.add_argument("--packages", help="only those of the choice that lie in these, separated by commas")
    parser.add_argument("--again", action="store_true", help="only the survivors of the journal")
    parser.add_argument("--list", action="store_true", help="print the choice and leave")
    parser.add_argument("--control", action="store_true", help="the tests that mutants of all packages meet, without a change")
    parser.add_argument("--report", action="store_true", help="print what the journal says of the present choice, and leave")
    a = parser.parse_args()
    lines = a.journal.read_text().splitlines() if a.journal.exists() else []
    known = {record["mutant"]: record for record in map(json.loads, lines)}
    if a.report:
        return report([known[m.name] for m in candidates(ROOT, a.seed)[:a.number] if m.name in known])
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        tree = Path(temporary) / "tree"
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
        chosen = candidates(tree, a.seed)[:a.number]
        if a.control:
            return control(tree, [*{package(m.file): m for m in chosen}.values()], a.ranks)
        for mutant in chosen:
            done = known.get(mutant.name)
            if a.packages and package(mutant.file) not in a.packages.split(",") or (
                    (done is None or done["verdict"] == "killed") if a.again else done is not None and not a.list):
                continue
            if a.list:
                print(f"{mutant.file}:{mutant.line}  {mutant.was} -> {mutant.new}")
                continue
            record = try_out(mutant, tree, a.ranks)
            with open(a.journal, "a") as file:
                file.write(json.dumps(record) + "\n")
            print(f"{record['verdict']:<9}{record['seconds']:6.0f} s  {mutant.file}:{mutant.line}  {mutant.was} -> {mutant.new}  "
                  f"{record['by'][-100:]!r}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
