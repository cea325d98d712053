"""Every MPI of PyPI that mpitrain supports, side by side: ``python tests/mpis.py FOLDER...``, as `make test-mpis` calls it.

Each folder is an environment with one MPI, made by make. All of them run the collective tests on 2 and 3 ranks, the tests of
launch and faults, and the same small runs; with train.reproducible = "layout" all MPIs and numbers of ranks have one hash.
It prints the table of docs/running.md, and ends with 1 where a cell says what went wrong. With ``--tested=FOLDER``, the tests of
that MPI are those that `make test` has run, and are left out.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from launch import ROOT, Job, Result, clean_environment

sys.path.insert(0, str(ROOT / "tests/train"))
from runs import SMALL

BODIES = sorted(map(str, (ROOT / "tests").rglob("*_mpi.py")))
FAULTS = ROOT / "tests/comm/faults.py"
LAUNCH = [str(ROOT / "tests" / name) for name in (
    "comm/test_start.py", "comm/test_launch.py", "comm/test_guard.py", "comm/test_shared.py", "comm/test_shared_window.py",
    "train/test_terminal.py", "train/test_time_left.py")]
PLUGINS = ("-p", "pytest_mpi", "-p", "pytest_timeout", "-p", "no:cacheprovider")
LAYOUT = ("train.reproducible=layout", "train.micro_batches=4", "train.steps=20")
FAILED = "FAILED"


class Mpi:
    """One environment; its methods are the columns of the table, each gives the text of a cell."""

    def __init__(self, folder: Path, scratch: Path):
        self.folder, self.scratch = folder.absolute(), scratch
        self.hashes: set[str] = set()
        (scratch / "run.toml").write_text(SMALL)

    def environment(self) -> dict[str, str]:
        """Intel MPI's mpirun is a script that looks for its programs on PATH."""
        clean = clean_environment()
        return {**clean, "PATH": f"{self.folder / 'bin'}:{clean['PATH']}"}

    def job(self, n: int, *arguments: str, timeout: float = 60) -> Result:
        command = [str(self.folder / "bin/mpirun"), "-n", str(n), str(self.folder / "bin/python"), *arguments]
        environment = {**self.environment(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_DEBUG_TEMPROOT": str(self.scratch)}
        return Job(command, environment, self.scratch).finish(timeout)

    def train(self, n: int, out: str, *options: str) -> Result:
        return self.job(n, "-m", "mpitrain", "train", "run.toml", f"run.out={out}", *options)

    def library(self) -> str:
        said = self.job(1, "-c", "from mpitrain.comm.job.start import *; start(); print(library_version())").out
        name = re.match(r"Open MPI v[\d.]+|MPICH Version: [\d.]+|Intel\(R\) MPI Library [\d.]+", said)
        return name[0].replace(" Version:", "").replace("(R)", "").replace(" Library", "") if name else f"{FAILED}: {said[:80]}"

    def collective_tests(self) -> str:
        cells = []
        for n in (2, 3):
            result = self.job(n, "-m", "mpi4py", "-m", "pytest", "-q", "-x", *PLUGINS, "--with-mpi", "--rootdir", str(ROOT), "-c",
                              str(ROOT / "setup.cfg"), *BODIES, timeout=900)
            passed = re.findall(r"(\d+) passed", result.out)
            cells.append(passed[0] if not result.rc and len(passed) == n else self.failed(result))
        return ", ".join(cells)

    def launch_tests(self) -> str:
        """As in `make test`: two at a time, then those that need the machine to themselves."""
        def run(tests: Sequence[str], which: str, *how: str) -> subprocess.CompletedProcess[str]:
            command = [self.folder / "bin/python", "-m", "pytest", "-q", "-m", f"{which} and not slow and not gpu",
                       "-p", "no:cacheprovider", *how, *tests]
            return subprocess.run(command, cwd=ROOT, env=self.environment(), capture_output=True, text=True)
        done = run(LAUNCH, "not alone", "-n", "2", "--dist", "worksteal"), run(LAUNCH, "alone")
        said = "".join(one.stdout for one in done)
        counts: Counter[str] = Counter()
        for count, what in re.findall(r"(\d+) (passed|failed|skipped|error)", said):
            counts[what] += int(count)
        failed = re.findall(r"^FAILED (.+?)(?: - .*)?$", said, re.MULTILINE)
        if 0 < len(failed) <= 2 and run(failed, "not slow").returncode == 0:      # a launcher's own failure, perhaps
            return f"{counts['passed']} passed, at the second try: {', '.join(failed)}"
        if any(one.returncode for one in done):
            print(said[-6000:], file=sys.stderr)
            return f"{FAILED}: {dict(counts)}"
        return ", ".join(f"{count} {what}" for what, count in counts.items())

    def shared_memory(self) -> str:
        result = self.train(2, "shared", "train.steps=5")
        if result.rc:
            return self.failed(result)
        way = json.loads((self.scratch / "shared/run.json").read_text())["choices"]["exchange"]["way"]
        return "yes" if "memory" in way else f"no: {way}"

    def progress_thread(self) -> str:
        result = self.train(2, "thread", "train.steps=5", "comm.progress=thread", "comm.algorithm=ring")
        return "yes" if not result.rc else self.failed(result)

    def all_reduce(self) -> str:
        result = self.job(2, "-m", "mpitrain", "bench", "allreduce", "--sizes", "8,64K", "--pairs", "2")
        return "right" if not result.rc else self.failed(result)

    def killed_rank(self) -> str:
        lost = (0,) if "MPICH 4.1." in self.library() else ()          # `launch.may_end_with_0`
        return self.fault("kill", rc=(137, 9, 255, *lost), lines=(0, 1))

    def exception(self) -> str:
        return self.fault("bug", rc=(70,), lines=(1,))

    def fault(self, name: str, rc: Sequence[int], lines: Sequence[int]) -> str:
        result = self.job(3, str(FAULTS), name, "1")
        seconds = result.ended - min(map(float, re.findall(r"failed at (\S+)", result.out)))
        right = result.rc in rc and len(result.error_lines) in lines and seconds < 5
        return f"exit {result.rc}, {seconds:.1f} s" if right else self.failed(result)

    def one_hash(self) -> str:
        for n in (1, 2, 3, 4):
            result = self.train(n, f"layout-{n}", *LAYOUT)
            if result.rc:
                return self.failed(result)
            self.hashes.add(json.loads((self.scratch / f"layout-{n}/run.json").read_text())["parameters_sha256"])
        return " and ".join(hash[:8] for hash in sorted(self.hashes))

    def failed(self, result: Result) -> str:
        print(result.out[-4000:] + result.err[-4000:], file=sys.stderr)
        return f"{FAILED}: exit {result.rc}"


COLUMNS: dict[str, Callable[[Mpi], str]] = {
    "MPI": Mpi.library, "collective tests on 2, 3 ranks": Mpi.collective_tests, "tests of launch and faults": Mpi.launch_tests,
    "shared memory": Mpi.shared_memory, "progress thread": Mpi.progress_thread, "`bench allreduce`": Mpi.all_reduce,
    "killed rank": Mpi.killed_rank, "exception": Mpi.exception, "layout hash on 1 to 4 ranks": Mpi.one_hash}
BY_MAKE_TEST = (Mpi.collective_tests, Mpi.launch_tests)


def main(words: Sequence[str]) -> int:
    tested = [word.removeprefix("--tested=") for word in words if word.startswith("--tested=")]
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|", flush=True)
    hashes: set[str] = set()
    good = True
    for folder in [word for word in words if not word.startswith("--tested=")]:
        with tempfile.TemporaryDirectory(prefix="mpitrain-mpis-") as scratch:
            mpi = Mpi(Path(folder), Path(scratch))
            cells = []
            for column in COLUMNS.values():
                try:
                    cells.append("left out" if folder in tested and column in BY_MAKE_TEST else column(mpi))
                except AssertionError as error:               # a hang, or processes left: the text has the stacks
                    print(error, file=sys.stderr)
                    cells.append(f"{FAILED}: {type(error).__name__}")
            print("| " + " | ".join(cells) + " |", flush=True)
            good = good and not any(cell.startswith(FAILED) or FAILED in cell for cell in cells)
            hashes |= mpi.hashes
    print("one hash over all" if len(hashes) == 1 else f"{FAILED}: {len(hashes)} hashes", flush=True)
    return 0 if good and len(hashes) == 1 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
