"""Do the tests notice? One random change a time to a copy of the tree, and the tests that should fail because of it.

    python benchmarks/mutants.py --journal mutants.jsonl                   # 150 changes; goes on where it was stopped
    python benchmarks/mutants.py --journal mutants.jsonl --packages ops,nn # those of the 150 that lie there
    python benchmarks/mutants.py --journal mutants.jsonl --again           # the survivors once more, with the tests of now
    python benchmarks/mutants.py --journal mutants.jsonl --report
    python benchmarks/mutants.py --journal control.jsonl --control         # no change at all: every test must pass so

A change is an operator, a comparison, a constant, a flag or a condition. The choice depends on the seed and the lines' text, so
that work elsewhere leaves it. The first failure kills a mutant, and so does a test that does not end. The journal has {"mutant",
"file", "line", "was", "is", "verdict", "by", "seconds"} of each on a line; the last one counts.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import layout_matrix

ROOT = Path(__file__).resolve().parents[1]
OPERATORS = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "/"),
             ast.Mod: ("%", "*"), ast.Pow: ("**", "*"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.LShift: ("<<", ">>"),
             ast.RShift: (">>", "<<")}
COMPARISONS = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
               ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
               ast.NotIn: ("not in", "in")}
TIMEOUT = 900                             # seconds of one command of tests; one test has 120
NOTHING_RAN = 5                           # pytest's exit code where no test is left of those that were asked for
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


@dataclass(frozen=True)
class Mutant:
    """`text[start:stop]` of the file, as bytes, becomes `new`."""

    file: str
    line: int
    where: str
    start: int
    stop: int
    was: str
    new: str

    @property
    def name(self) -> str:
        """The same as long as its function's name and its line stay."""
        return hashlib.sha256("\0".join((self.file, self.where, self.was, self.new)).encode()).hexdigest()[:12]


class Finder(ast.NodeVisitor):
    """All the changes that could be made to one file."""

    def __init__(self, file: str, text: str):
        self.file, self.text = file, text.encode()
        self.lines = self.text.splitlines(keepends=True)
        self.starts = [0, *itertools.accumulate(map(len, self.lines))]
        self.function: list[str] = []
        self.found: list[Mutant] = []

    def at(self, line: int, column: int) -> int:
        return self.starts[line - 1] + column

    def end(self, node: ast.expr) -> int:
        return self.at(node.end_lineno or 0, node.end_col_offset or 0)

    def add(self, line: int, start: int, stop: int, new: str) -> None:
        column = start - self.starts[line - 1]
        where = f"{'.'.join(self.function)}|{self.lines[line - 1].decode().strip()}|{column}"
        self.found.append(Mutant(self.file, line, where, start, stop, self.text[start:stop].decode(), new))

    def between(self, left: ast.expr, right: ast.expr, pair: tuple[str, str]) -> None:
        """The sign between two expressions, outside of comments and parentheses."""
        start, stop = self.end(left), self.at(right.lineno, right.col_offset)
        gap = re.sub(rb"#[^\n]*", lambda m: b" " * len(m[0]), self.text[start:stop])
        found = re.search(rb"\s+".join(map(re.escape, pair[0].encode().split())), gap)
        if found:
            line = (left.end_lineno or 0) + gap[:found.start()].count(b"\n")
            self.add(line, start + found.start(), start + found.end(), pair[1])

    def whole(self, node: ast.expr, new: str) -> None:
        self.add(node.lineno, self.at(node.lineno, node.col_offset), self.end(node), new)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in OPERATORS and not any(isinstance(side, (ast.JoinedStr, ast.Constant)) and isinstance(
                getattr(side, "value", ""), str) for side in (node.left, node.right)):
            self.between(node.left, node.right, OPERATORS[type(node.op)])
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators):
            self.between(left, right, COMPARISONS[type(op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        pair = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:]):
            self.between(left, right, pair)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.whole(node, str(not node.value))
        elif isinstance(node.value, (int, float)):
            self.whole(node, repr(node.value + 1) if isinstance(node.value, int) else repr(node.value * 2 or 1.0))

    def condition(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        source = ast.get_source_segment(self.text.decode(), node.test) or ""
        self.whole(node.test, f"(not ({source}))")
        self.generic_visit(node)

    visit_If = visit_While = visit_IfExp = condition

    def scope(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        """A function or class: annotations are skipped, defaults are not."""
        self.function.append(node.name)
        if isinstance(node, ast.FunctionDef):
            for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
                self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self.function.pop()

    visit_FunctionDef = visit_ClassDef = scope

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Python 3.11 does not know where in the file the parts of an f-string are."""


def candidates(tree: Path, seed: int) -> list[Mutant]:
    """Every possible change, in the random order that the seed gives."""
    found: list[Mutant] = []
    for path in sorted((tree / "mpitrain").rglob("*.py")):
        finder = Finder(str(path.relative_to(tree)), path.read_text())
        finder.visit(ast.parse(finder.text))
        found += finder.found
    return sorted(found, key=lambda m: hashlib.sha256(f"{seed} {m.name}".encode()).digest())


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
    for group in filter(None, (nearest, own, more)):
        yield [sys.executable, *pytest, "-m", "not slow and not gpu", *group]
    files = [f"tests/{name}.py" for name in bodies if (tree / f"tests/{name}.py").exists()]
    if files and ranks:
        yield ["mpirun", "-n", str(ranks), sys.executable, "-m", "mpi4py", *pytest, "--with-mpi", "-m", "not slow", *files]


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
                failed = re.findall(r"^(?:FAILED|ERROR) (\S+)|^.*\[rank \d+/\d+\] (\S+) ", said, re.MULTILINE)
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
    print(f"{len(records) - len(survivors)} of {len(records)} killed")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("-n", "--number", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2, help="of the tests under mpirun; 0: without them and whole runs")
    parser.add_argument("--packages", help="only those of the choice that lie in these, separated by commas")
    parser.add_argument("--again", action="store_true", help="only the survivors of the journal")
    parser.add_argument("--list", action="store_true", help="print the choice and leave")
    parser.add_argument("--control", action="store_true", help="one mutant of each package, but without its change")
    parser.add_argument("--report", action="store_true", help="print what the journal says and leave")
    a = parser.parse_args()
    lines = a.journal.read_text().splitlines() if a.journal.exists() else []
    known = {record["mutant"]: record for record in map(json.loads, lines)}
    if a.report:
        return report([*known.values()])
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        tree = Path(temporary) / "tree"
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
        chosen = candidates(tree, a.seed)[:a.number]
        if a.control:
            chosen = [replace(m, start=0, stop=0, new="", was="") for m in {package(m.file): m for m in chosen}.values()]
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
