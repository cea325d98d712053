"""What mpitrain promises when something goes wrong, and the tests that show it: writes the table of docs/reliability.md.

    python tests/promises.py                          # or: make promises
    pytest $(python tests/promises.py A4 B11)         # runs the tests of these promises

A test shows a promise where it, or one of its parameters, is marked: ``@pytest.mark.promise("A4")``. The marks are read from
the source, so nothing is imported for it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/reliability.md"
BEGIN, END = "<!-- promises -->\n", "<!-- end -->\n"
LONGEST = 80                                      # characters of the cell that lists tests

GROUPS = {
    "A": "A failure ends the job, and nothing hangs",
    "B": "Checkpoints and going on",
    "C": "Data",
    "D": "Numbers",
    "E": "Signals and batch systems",
    "F": "Hostile files and other users",
}

PROMISES = {
    "A1": "An exception, `sys.exit` or Ctrl-C on one rank ends the job within 5 s: one line, its exit code, no process left.",
    "A2": "A rank that is killed, crashes or is ended for want of memory ends the job within 5 s; want of memory is said.",
    "A3": "An allocation that fails is exit 71 and names the bytes, the array or the limit, also under `ulimit -v`.",
    "A4": "A rank that stands still is named with its host, step and phase, and the job ends with 75 instead of hanging.",
    "A5": "A network that stops carrying messages ends the job on both sides.",
    "A6": "Ranks that call different collectives, or with other types or sizes, are told both before a value is used: exit 76.",
    "A7": "Ranks with other configurations, versions, code or data do not start: exit 76; the line names field and ranks.",
    "A8": "Ranks on CPUs or libraries that round otherwise do not start in layout mode.",
    "A9": "A rank that is slower than the others is named in a line; results stay the same.",
    "A10": "Clocks that are wrong or jump change nothing: the newest checkpoint is told by its step.",
    "A11": "No rank outlives a launcher that was killed.",
    "A12": "A failure while a failure is reported still ends the job, with a non-zero code.",
    "B1": "A save that is killed at any system call leaves the old checkpoint or the new one, whole.",
    "B2": "An error of the system at any call of a save is exit 74 with file and reason; nothing damaged is ever published.",
    "B3": "A disk, quota or file limit that is too small is found before a value is written; older checkpoints stay.",
    "B4": "A checkpoint that was announced survives a power cut.",
    "B5": "A damaged newest checkpoint is passed over with a line that names the file; another run's is refused.",
    "B6": "Where all checkpoints are bad, each is named and the run does not start anew by itself.",
    "B7": "A resumed run has the bits of one that was never interrupted.",
    "B8": "In layout mode that holds on any other number of ranks and any other mesh too.",
    "B9": "What changed since the checkpoint is refused if it moves rows, and told if it changes bits; `--strict` refuses both.",
    "B10": "A checkpoint of another model is refused with lists of missing, unexpected and reshaped names.",
    "B11": "One job at a time uses a run folder; the second is told who holds it. A lock never outlives its job.",
    "B12": "A folder that holds anything, a link, a file, a read-only folder is refused; nothing of anyone else is deleted.",
    "B13": "Deleting old checkpoints never deletes the last whole one, wherever it is interrupted.",
    "B14": "The metrics of a run that was interrupted have each step once.",
    "C1": "Truncated, empty and foreign files are refused in a line with file and offset.",
    "C2": "A flipped bit is found before its values are used, where the data have checksums.",
    "C3": "A file that crashes or hangs the HDF5 library costs a child process, and no rank.",
    "C4": "A file that changes while it is read, or between two jobs of a run, is an error with its name.",
    "C5": "Shapes, types and rows that do not fit are named before the first step.",
    "C6": "Labels out of range, NaN and infinity in data are named with file and row.",
    "C7": "What a file declares or unpacks to is bounded before memory is taken; the line names the limit.",
    "C8": "Any number of ranks reads the same samples in the same order; too few are refused with the numbers.",
    "C9": "A file system that does not answer is named.",
    "C10": "Names with line ends, of other alphabets or of no encoding work, or are refused in a line.",
    "C11": "Reading data needs no file locks.",
    "D1": "A loss or gradient that is not finite is exit 79, names rank, step and place, and changes no parameter.",
    "D2": "A rank whose parameters differ is named before a checkpoint is published.",
    "D3": "A step can be computed again and compared with what was recorded.",
    "D4": "The same run on the same layout has the same bits twice.",
    "D5": "In layout mode ranks, meshes, buckets and transports change no bit.",
    "D6": "A change of results cannot go unnoticed: the hash of a run is kept with the tests.",
    "D7": "Gradients are right: by finite differences, by another framework, and by one rank.",
    "D8": "bfloat16 resumes to the same bits, and its overflow ends all ranks alike.",
    "D9": "Layout mode refuses by name what has no fixed order of sums, and names code of the user's that it cannot judge.",
    "E1": "SIGUSR1 saves after the present step and exits with 85; before the run listens, 138, and batch scripts go on too.",
    "E2": "SIGTERM ends the job in the launcher's time; checkpoint and metrics stay whole, and a line says what is kept.",
    "E3": "Ctrl-C, also twice, leaves no process and no damaged file.",
    "E4": "A job that is suspended goes on when it is continued, with the same bits.",
    "E5": "A job that Slurm requeues goes on by itself.",
    "E6": "A run can save and stop before its time is over.",
    "F1": "Nothing is ever unpickled or evaluated: no file, no message.",
    "F2": "A configuration is data: a wrong, deep or huge one is refused in a line.",
    "F3": "A data file cannot make a run open another file.",
    "F4": "Metadata of HDF5 files are parsed in a process with limits and without plugins.",
    "F5": "Deep, long and huge manifests and index structures are refused before they take memory.",
    "F6": "A manifest cannot name a file outside its folder.",
    "F7": "Planted links are not followed; a run folder that other users may write is refused.",
    "F8": "Compiled code is loaded from a private folder only.",
    "F9": "The environment is never written to a file or a terminal.",
    "F10": "Control characters in names and messages are escaped.",
    "F11": "What a peer says about sizes is checked before memory is taken.",
    "F12": "No code is loaded from the current folder or from beside the data.",
}

# What a promise says that is not so yet, or that no test shows. Whoever builds it deletes the line.
PARTLY = {
    "E2": "Open MPI 5 shows nothing of it by itself, but `supervise` does, and saves",
}


class Mark(NamedTuple):
    """A mark in the source: the promise, the file and the name of the test."""

    promise: str
    file: Path
    test: str


def marks(folder: Path = ROOT / "tests") -> Iterator[Mark]:
    """Every mark in the tests below a folder, in the order of the files and of their lines."""
    for file in sorted(folder.rglob("*.py")):
        text = file.read_text()
        if "mark.promise(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                for promise in (name for decorator in node.decorator_list for name in _named(decorator)):
                    yield Mark(promise, file, node.name)


def _named(decorator: ast.expr) -> list[str]:
    """The promises that a decorator names, by itself or for a parameter."""
    calls = [node for node in ast.walk(decorator)
             if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.promise"]
    return list(dict.fromkeys(ast.literal_eval(argument) for call in calls for argument in call.args))


def shown_by(found: list[Mark]) -> str:
    """The files of the tests, each with its number of tests, as far as there is room."""
    if not found:
        return "not shown yet"
    tests = {mark.file: len({other.test for other in found if other.file == mark.file}) for mark in found}
    cells = [f"`{file.relative_to(ROOT / 'tests').with_suffix('')}`" + (f" {n}" if n > 1 else "") for file, n in tests.items()]
    kept = next(n for n in range(len(cells), 0, -1) if n == 1 or len(", ".join(cells[:n])) <= LONGEST)
    return ", ".join(cells[:kept]) + (f", {len(cells) - kept} more" if kept < len(cells) else "")


def table(found: list[Mark]) -> str:
    lines = []
    for letter, title in GROUPS.items():
        lines += [f"| {letter} | {title} | shown by |", "|---|---|---|"]
        for name in (name for name in PROMISES if name[0] == letter):
            tests = shown_by([mark for mark in found if mark.promise == name])
            lines.append(f"| {name} | {PROMISES[name]} | {tests}{f' (**partly**: {PARTLY[name]})' if name in PARTLY else ''} |")
        lines.append("")
    marked = {mark.promise for mark in found}
    shown, partly, missing = len(marked - {*PARTLY}), len(marked & {*PARTLY}), len({*PROMISES} - marked)
    return "\n".join([f"Of {len(PROMISES)} promises, tests show {shown}, and {partly} in part; {missing} are not shown yet.", "",
                      *lines])


def written(page: str, found: list[Mark]) -> str:
    """The text of the page with the table as the marks make it."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table(found) + END + after


def main(asked: list[str]) -> None:
    found = list(marks())
    if asked:
        print(*dict.fromkeys(f"{mark.file.relative_to(ROOT)}::{mark.test}" for mark in found if mark.promise in asked))
    else:
        PAGE.write_text(written(PAGE.read_text(), found))


if __name__ == "__main__":
    main(sys.argv[1:])
