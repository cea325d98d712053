"""Every error a user can meet: a code, an exit status, and where it happened.

An error says what was expected, what was found, where, and what to change. The fields (`step`, `file`, `dataset`,
`offset`, `row`) are printed as ``key=value`` before the message, so that a log can be searched for them:

    mpitrain: E_DATA_CHECKSUM rank=3/8 host=node07 step=1200 file="s-0007.h5" offset=81920: chunk 5 of "x": ...

`comm.job.guard` prints that line, once for the whole job, and ends every rank with `exit_code`.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

LISTED = 12                    # a message lists at most so many known names
LONGEST_NAME = 200             # characters; a longer name is no slip of a known one, and to compare megabytes takes seconds
NOWHERE: Mapping[str, object] = {}
FIELDS = ("step", "file", "dataset", "row", "offset")     # printed in this order


class MpitrainError(Exception):
    """A failure that says where it happened; the base of all errors this package raises on purpose."""

    code = "E_BUG"
    exit_code = 70

    def __init__(self, message: str, *, code: str | None = None, step: int | None = None, file: object = None,
                 dataset: str | None = None, row: int | None = None, offset: int | None = None):
        super().__init__(message)
        if code is not None:
            self.code = code
        self.step, self.dataset, self.row, self.offset = step, dataset, row, offset
        self.file = None if file is None else str(file)

    @property
    def message(self) -> str:
        return str(self.args[0])

    def where(self, moment: Mapping[str, object] = NOWHERE) -> str:
        """The known fields as ``step=3 file="x.h5"``; strings are quoted. `moment` is what is known besides: step and phase."""
        fields = ((name, getattr(self, name)) for name in FIELDS)
        own = {name: f'"{value}"' if isinstance(value, str) else value for name, value in fields if value is not None}
        return " ".join(f"{name}={value}" for name, value in {**moment, **own}.items())

    def __str__(self) -> str:
        where = self.where()
        return f"{where}: {self.message}" if where else self.message


class UsageError(MpitrainError):
    """The command line cannot be understood."""
    code, exit_code = "E_USAGE", 64


class ConfigError(MpitrainError):
    """The run's configuration is wrong: a key, a type, a value, a combination."""
    code, exit_code = "E_CONFIG", 78


class MeshError(ConfigError):
    """The mesh does not fit the ranks, or the batch does not fit the mesh."""
    code = "E_MESH"


class ShapeError(MpitrainError):
    """Arrays that do not fit each other, the model, or the data."""
    code, exit_code = "E_SHAPE", 65


class ArgumentError(ShapeError, TypeError):
    """An operation or a layer is called with arguments that it does not have."""


class DataError(MpitrainError):
    """A data file is damaged, hostile, of another schema, or holds values that cannot be trained on."""
    code, exit_code = "E_DATA", 65


class CheckpointError(MpitrainError):
    """A checkpoint is damaged, incomplete, or belongs to another model."""
    code, exit_code = "E_CHECKPOINT", 65


class DamagedError(CheckpointError):
    """There are checkpoints, and none of them is whole."""


class OtherModelError(CheckpointError):
    """A checkpoint's arrays are not those of the model and its optimizer."""


class MissingError(MpitrainError):
    """An input file or folder is not there."""
    code, exit_code = "E_MISSING", 66


class OutputError(MpitrainError):
    """The output folder is busy, exists already, or is read-only."""
    code, exit_code = "E_OUTPUT", 73


class LostFolderError(OutputError):
    """The folder that a run writes to is not its own any more: it was moved or removed, or its lock file was."""


class StorageError(MpitrainError):
    """Writing or reading failed in the operating system: full disk, input/output error, quota."""
    code, exit_code = "E_IO", 74


class PeerError(MpitrainError):
    """A rank was lost."""
    code, exit_code = "E_PEER", 75


class StallError(PeerError):
    """A rank stands still. The watcher says so (`comm.watch.watcher`), for that rank may be unable to."""
    code, exit_code = "E_STALL", 75


class DesyncError(MpitrainError):
    """Ranks disagree: about the configuration, the versions, or the next collective."""
    code, exit_code = "E_DESYNC", 76


class MismatchError(DesyncError):
    """Ranks were started with different configurations, programs or versions."""
    code = "E_MISMATCH"


class AccessError(MpitrainError):
    """The operating system refuses permission."""
    code, exit_code = "E_PERMISSION", 77


class NumericsError(MpitrainError):
    """NaN or Inf where a number was needed, or a run that diverged; where it is known, of which samples."""
    code, exit_code = "E_NAN", 79
    micro_batch: int | None = None
    rows: Sequence[int] = ()       # rows of the training data


class PrivacyError(MpitrainError):
    """A sum of secrets cannot be told without telling more: too few take part, or a message was changed."""
    code, exit_code = "E_PRIVACY", 80


class TooFewError(PrivacyError):
    """Fewer take part than the threshold; all ranks know it alike, before anything is told."""


class GraphError(MpitrainError):
    """The autograd graph was used in a way it cannot serve; the message names the op."""
    code, exit_code = "E_GRAPH", 70


class Stopped(MpitrainError):
    """The run was asked to stop and did, with a complete checkpoint: start it again with --resume."""
    code, exit_code = "E_STOPPED", 85


class Terminated(MpitrainError):
    """SIGTERM has come, which SIGKILL often follows: the run has ended without saving."""
    code, exit_code = "E_TERMINATED", 143


def text_of(error: BaseException) -> str:
    """The exception's own text, or its type's name where it has none (StopIteration, many a MemoryError)."""
    return said(error) or type(error).__name__


def name_and_text(error: BaseException, place: str = "") -> str:
    """``ValueError at file.py:12 in f: text``, without the text where the exception has none."""
    text, name = said(error), type(error).__name__ + (f" {place}" if place else "")
    return f"{name}: {text}" if text else name


def place(error: BaseException) -> str:
    """``at file.py:12 in function`` of the innermost frame, so that the line alone says where to look."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"at {Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}" if frames else "at an unknown line"


def own_place(error: BaseException, mark: str) -> str:
    """``at file.py:12 in function`` of the innermost frame in a module that has the global `mark`; "" where there is none."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if mark in frame.f_globals:
            return f"at {Path(frame.f_code.co_filename).name}:{line} in {frame.f_code.co_name}"
    return ""


def with_place(message: str, where: str) -> str:
    """``what is wrong, where; what to change``: the place comes before the advice."""
    wrong, advises, advice = message.partition(";")
    return f"{wrong}, {where}{advises}{advice}" if where else message


def say_own_place(error: MpitrainError) -> None:
    """Adds the line in a user's own file to an error's message, unless it has that."""
    if (where := own_place(error, "_source")) and where not in error.message:
        error.args = (with_place(error.message, where),)


def said(error: BaseException) -> str:
    """The exception's own text, which may be empty."""
    try:
        text = str(error)
    except Exception as another:                              # a user's own __str__ failed; the first error is the one to report
        return f"(it cannot be printed: {type(another).__name__})"
    return text if text.strip() else ""


def numbered(what: str, numbers: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 1, 4``; the middle of a long list is left out."""
    names = [str(number) for number in numbers]
    if len(names) > LISTED:
        names[LISTED - 2:-1] = ["..."]
    return f"{what}{'s' if len(names) > 1 else ''} {', '.join(names)}"


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean "x"?)`` for the closest known name, or the list of known names, cut off where it is long."""
    import difflib  # few runs have a mistake
    known = sorted(known)
    alike = [k for k in known if k[:1] == name[:1]]       # of others, two letters of "dice" are no guess at "ce"
    close = (difflib.get_close_matches(name, known, n=1, cutoff=0.7) or difflib.get_close_matches(name, alike, n=1)
             if len(name) <= LONGEST_NAME else [])
    if close:
        return f' (did you mean "{close[0]}"?)'
    listed = known if len(known) <= LISTED else [*known[:LISTED], "..."]
    return f" (known: {', '.join(listed)})" if known else ""


def print_warning(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
