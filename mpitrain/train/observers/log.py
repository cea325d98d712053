"""The writers of metrics.jsonl and of the progress line; `record` chooses their fields."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from mpitrain.comm.job.start import launched
from mpitrain.comm.job.streams import Output, drop
from mpitrain.files.disk import FILE_MODE, storage_error, write_fully

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

REFRESH_S = 0.1      # seconds between redraws of the bar at most: drawing one costs about a millisecond
WATCHED_S = 1.7      # seconds between lines on a terminal that a launcher keeps; with 2.0 some came 2.2 s apart at load 15
COMMANDS = ("mpirun", "mpiexec", "mpiexec.hydra", "prterun", "prte", "orterun", "srun")


class Metrics:
    """metrics.jsonl: one JSON object a line, each line there whole or not at all. Without a path it does nothing.

    Floats are written so that they read back to the same bits. JSON has no NaN or infinity: they become null, which
    pandas reads as NaN.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self._fd: int | None = None
        if path is not None:
            try:
                self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
                self._end = os.lseek(self._fd, 0, os.SEEK_END)
            except OSError as error:
                raise storage_error(error, "opening", path) from error

    def write(self, values: Mapping[str, Any]) -> None:
        """Add a line. On StorageError (a full disk) the file still ends with the line before."""
        if self._fd is None or self.path is None:
            return
        line = (json.dumps(plain_values(values), allow_nan=False) + "\n").encode()
        try:
            write_fully(self._fd, memoryview(line), self._end)
        except OSError as error:
            failure = storage_error(error, "writing", self.path, offset=self._end, needed=len(line))
            os.ftruncate(self._fd, self._end)
            raise failure from error
        self._end += len(line)

    def sync(self) -> None:
        """Make the lines so far survive a power cut; call it before a checkpoint of their steps is saved."""
        if self._fd is not None and self.path is not None:
            try:
                os.fsync(self._fd)
            except OSError as error:
                raise storage_error(error, "syncing to the disk", self.path) from error

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values that JSON can hold: NumPy scalars as Python's numbers; NaN and the infinities as None."""
    numbers = {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}
    return {name: None if isinstance(n, float) and not math.isfinite(n) else n for name, n in numbers.items()}


class Progress:
    """The progress of the run: a bar on a terminal, otherwise lines, one every `every_s` seconds at most.

    Open MPI 5 passes on what ranks write in whole lines, so a bar would not show: somebody who watches a job on a terminal gets
    a line every WATCHED_S seconds. With `every_s` 0 there is a line for each `update` that is due (`log.every`). The first step
    and the last always have a line. Under mpirun only stdout is a terminal, so progress goes there. A terminal
    that goes away (a closed pipe, a full disk under a redirected log) ends the display, not the run.
    """

    def __init__(self, total_steps: int, *, every_s: float = 10.0, stream: TextIO | None = None):
        self.total, self.every_s = total_steps, every_s
        self._stream: TextIO | None = sys.stdout if stream is None else stream
        self._bar: Bar | None = None
        self._drawn = -math.inf
        self._step_s = 0.0
        self._ahead = False                               # whether a line comes rather before its time than after it
        if is_watched(self._stream):
            if self._stream is not sys.stdout or not launched():
                self._bar = self._new_bar(self._stream)
            elif every_s:
                self.every_s, self._ahead = min(every_s, WATCHED_S), True

    def _new_bar(self, stream: TextIO) -> Bar:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        # A refresh thread would take the interpreter from the training step at any moment, so there is none.
        bar = Progress(TextColumn("step {task.completed}/{task.total}"), BarColumn(), TextColumn("{task.fields[about]}"),
                       console=Console(file=stream), auto_refresh=False)
        bar.add_task("train", total=self.total, about="")
        bar.start()
        return bar

    def update(self, step: int, values: Mapping[str, Any], *, due: bool = True) -> None:
        """`step` steps are done; `values` holds `loss`, which becomes a number where it is shown, and `lr`, `samples_per_s`,
        `step_s` where known.

        `due` tells that `log.every` wants a line. Rates and the time left rest on `step_s`, which excludes
        evaluation and saving.
        """
        step_s = values.get("step_s", 0.0)
        self._step_s = 0.9 * self._step_s + 0.1 * step_s if self._step_s and step_s else step_s or self._step_s
        if self._stream is None or (self._bar is None and not self._is_due(step, due)):
            return
        left_s = (self.total - step) * self._step_s
        if self._bar is None:
            self._show(f"step {step}/{self.total}  {_about(values, left_s)}")
            return
        now = self._bar.get_time()
        if now - self._drawn < REFRESH_S and step < self.total:      # Who asks for the loss of a device waits for it.
            self._bar.update(self._bar.task_ids[0], completed=step)
            return
        self._bar.update(self._bar.task_ids[0], completed=step, about=_about(values, left_s))
        self._drawn = now
        self._show(None)

    def _is_due(self, step: int, due: bool) -> bool:
        """Whether this step has a line of its own."""
        if not self.every_s or step >= self.total:
            return due or step >= self.total
        now = time.monotonic()
        late = now + (self._step_s if self._ahead else 0.0) - self._drawn >= self.every_s
        if late:
            self._drawn = now
        return late

    def message(self, text: str) -> None:
        """Print a line (above the bar): a checkpoint saved, an evaluation; control characters in it are escaped."""
        self._show("".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text))

    def _show(self, line: str | None) -> None:
        """Print a line, or only redraw the bar."""
        if self._stream is None:
            return
        try:
            if self._bar is None:
                print(line, file=self._stream, flush=True)
            elif line is None:
                self._bar.refresh()
            else:
                self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        except (OSError, UnicodeEncodeError):             # nobody watches any more; hours of training are worth more
            if isinstance(self._stream, Output):
                drop()
            self._stream = None

    def close(self) -> None:
        """Leave the terminal as it was, with the bar where it stopped."""
        if self._bar is not None and self._stream is not None:
            try:
                self._bar.stop()
            except OSError:
                self._stream = None
        self._bar = None


def is_watched(stream: TextIO) -> bool:
    """Whether somebody looks at this stream on a terminal, perhaps through a launcher.

    Open MPI gives each rank a terminal of its own and Hydra a pipe, whatever their own output is: it tells who looks.
    """
    if stream is not sys.stdout or not launched():
        return stream.isatty()
    process = os.getppid()
    try:
        while process > 1:                                # Hydra's ranks are grandchildren of mpiexec
            folder = Path(f"/proc/{process}")
            if (folder / "comm").read_text().strip() in COMMANDS:
                return os.readlink(folder / "fd/1").startswith(("/dev/pts/", "/dev/tty"))
            process = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:                                       # no /proc, or another host's daemon: lines for a log are safe
        pass
    return False


def _about(values: Mapping[str, Any], seconds_left: float) -> str:
    words = [f"loss {float(values['loss']):.4f}"] if "loss" in values else []
    if "lr" in values:
        words.append(f"lr {values['lr']:.2e}")
    if "samples_per_s" in values:
        words.append(f"{values['samples_per_s']:,.0f} samples/s")
    if seconds_left > 0:
        words.append(f"ETA {duration(seconds_left)}")
    return "  ".join(words)


def duration(seconds: float) -> str:
    """``1:02:03``; days are counted in hours."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}"
