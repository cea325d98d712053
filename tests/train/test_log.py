"""metrics.jsonl and progress: whole lines, exact numbers, rank 0 alone."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest

from mpitrain.errors import LostFolderError, StorageError
from mpitrain.train.observers import log
from mpitrain.train.observers.log import Metrics, Progress, duration


def lines(path: Path) -> list[Any]:
    def refuse(text: str) -> None:
        pytest.fail(f"{text} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


@pytest.mark.promise("B14")
def test_each_line_is_there_as_soon_as_it_is_written_and_floats_keep_their_bits(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "m.jsonl")
    value = struct.unpack("<d", struct.pack("<Q", 0x3FB999999999999B))[0]
    metrics.write({"step": 1, "loss": value})
    assert lines(tmp_path / "m.jsonl") == [{"step": 1, "loss": value}]
    metrics.write({"step": 2, "split": "validation"})
    metrics.sync()
    metrics.close()
    assert (tmp_path / "m.jsonl").read_text() == f'{{"step": 1, "loss": {value!r}}}\n{{"step": 2, "split": "validation"}}\n'


def test_numpy_numbers_are_numbers_and_nan_and_infinity_are_null(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "m.jsonl")
    metrics.write({"step": np.int64(3), "loss": np.float32(0.5), "array": np.array(2.5), "nan": float("nan"),
                   "inf": np.float32("-inf")})
    metrics.close()
    assert lines(tmp_path / "m.jsonl") == [{"step": 3, "loss": 0.5, "array": 2.5, "nan": None, "inf": None}]


def test_a_resumed_run_adds_to_the_file(tmp_path: Path) -> None:
    for step in (1, 2):
        metrics = Metrics(tmp_path / "m.jsonl")
        metrics.write({"step": step})
        metrics.close()
    assert lines(tmp_path / "m.jsonl") == [{"step": 1}, {"step": 2}]


def test_once_closed_nothing_is_written(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "m")
    metrics.write({"step": 1})
    metrics.close()
    metrics.write({"step": 2})
    metrics.close()
    assert [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()] == [{"step": 1}]


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    metrics = Metrics(None)
    metrics.write({"step": 1})
    metrics.sync()
    metrics.close()
    assert os.listdir(tmp_path) == []


def test_a_disk_that_fills_up_in_a_line_leaves_the_lines_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics(tmp_path / "m.jsonl")
    metrics.write({"step": 1})
    before = (tmp_path / "m.jsonl").stat().st_size
    pwrite = os.pwrite

    def failing(fd: int, data: memoryview, offset: int) -> int:
        if offset > before:
            raise OSError(errno.ENOSPC, "x")
        return pwrite(fd, data[:5], offset)

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(StorageError, match="writing failed: No space left on device .*; it needs 12 bytes, .* free") as caught:
        metrics.write({"step": 2})
    assert caught.value.offset == before
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1}\n'
    monkeypatch.undo()
    metrics.write({"step": 3})
    metrics.close()
    assert lines(tmp_path / "m.jsonl") == [{"step": 1}, {"step": 3}]


def test_a_folder_that_is_gone_and_a_failing_sync_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LostFolderError, match='m.jsonl": opening failed: No such file.* was moved or removed'):
        Metrics(tmp_path / "none" / "m.jsonl")
    metrics = Metrics(tmp_path / "m.jsonl")

    def failing(fd: int) -> None:
        raise OSError(errno.EIO, "x")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(StorageError, match="syncing to the disk failed: Input/output error"):
        metrics.sync()
    metrics.close()


# ---- progress --------------------------------------------------------------------------------------------------------

VALUES = {"loss": 2.34567, "lr": 1e-3, "samples_per_s": 12345.6, "step_s": 0.5}


def test_without_a_terminal_there_is_one_plain_line_for_each_due_update() -> None:
    out = io.StringIO()
    progress = Progress(100, every_s=0, stream=out)
    for step in range(1, 21):
        progress.update(step, VALUES, due=step % 10 == 0)
    progress.message("saved step 20")
    progress.close()
    assert out.getvalue() == ("step 10/100  loss 2.3457  lr 1.00e-03  12,346 samples/s  ETA 0:00:45\n"
                              "step 20/100  loss 2.3457  lr 1.00e-03  12,346 samples/s  ETA 0:00:40\n"
                              "saved step 20\n")


def test_values_that_are_not_known_are_left_out() -> None:
    out = io.StringIO()
    Progress(3, stream=out).update(1, {"loss": 1.0})
    assert out.getvalue() == "step 1/3  loss 1.0000\n"


def test_by_default_it_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    Progress(3).update(1, {"loss": 1.0})
    assert capsys.readouterr() == ("step 1/3  loss 1.0000\n", "")


@pytest.mark.promise("F10")
def test_control_characters_in_a_message_are_escaped() -> None:
    out = io.StringIO()
    Progress(3, stream=out).message("dataset x\x1b[2J\nmpitrain: é")
    assert out.getvalue() == "dataset x\\x1b[2J\\x0ampitrain: é\n"


def read_until(master: int, end: str) -> str:
    """What a terminal got, up to `end`: one read of it may give a part only, and the watchdog ends a test that waits for ever."""
    shown = b""
    while not (text := shown.decode(errors="ignore")).rstrip().endswith(end):
        shown += os.read(master, 1 << 16)
    return text


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TextIO, int]]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream:
        yield stream, master
    os.close(master)


def test_on_a_terminal_there_is_a_bar_with_loss_rate_and_time_left(terminal: tuple[TextIO, int]) -> None:
    stream, master = terminal
    progress = Progress(100, stream=stream)
    progress.update(40, VALUES, due=False)
    progress.message("saved [bold]step 40[/bold]")
    progress.close()
    shown = read_until(master, "\x1b[?25h")                                 # the last it does: the cursor is visible again
    assert "step 40/100" in shown and "loss 2.3457" in shown and "12,346 samples/s" in shown and "ETA 0:00:30" in shown
    assert "saved [bold]step 40[/bold]" in shown and "━" in shown


def test_the_bar_is_not_redrawn_at_every_step_but_at_the_last(
        terminal: tuple[TextIO, int], monkeypatch: pytest.MonkeyPatch) -> None:
    stream, _ = terminal
    progress = Progress(1000, stream=stream)
    assert progress._bar is not None
    drawn: list[int] = []
    monkeypatch.setattr(progress._bar, "get_time", lambda: 5.0)
    monkeypatch.setattr(progress._bar, "refresh", lambda: drawn.append(1))
    for step in range(1, 1001):
        progress.update(step, VALUES)
    assert len(drawn) == 2


@pytest.mark.parametrize("error", [BrokenPipeError(errno.EPIPE, "x"), OSError(errno.ENOSPC, "x"), OSError(errno.EIO, "x"),
                                   UnicodeEncodeError("ascii", "é", 0, 1, "x")])
def test_a_terminal_that_goes_away_ends_the_display_and_not_the_run(error: Exception) -> None:
    class Gone(io.StringIO):
        calls = 0

        def write(self, text: str) -> int:
            Gone.calls += 1
            raise error

    progress = Progress(10, stream=Gone())
    for step in range(3):
        progress.update(step, VALUES)
    progress.message("saved")
    progress.close()
    assert Gone.calls == 1


def test_durations_are_written_in_hours() -> None:
    assert [duration(s) for s in (0, 59.6, 3723, 360_000)] == ["0:00:00", "0:01:00", "1:02:03", "100:00:00"]


# ---- how often --------------------------------------------------------------------------------------------------------

def steps_shown(progress: Progress, monkeypatch: pytest.MonkeyPatch, out: io.StringIO, *, step_s: float, n: int) -> list[int]:
    """The steps that have a line, where each step takes `step_s` seconds by this clock."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for step in range(1, n + 1):
        now[0] += step_s
        progress.update(step, {"loss": 1.0, "step_s": step_s}, due=step % 10 == 0)
    return [int(line.split()[1].split("/")[0]) for line in out.getvalue().splitlines()]


def test_a_log_gets_the_first_step_the_last_one_and_a_line_in_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    assert steps_shown(Progress(100, stream=out), monkeypatch, out, step_s=0.5, n=100) == [1, 21, 41, 61, 81, 100]
    out = io.StringIO()
    assert steps_shown(Progress(4, stream=out), monkeypatch, out, step_s=30, n=4) == [1, 2, 3, 4], "log.every is not due"


def test_somebody_who_watches_through_a_launcher_sees_a_line_in_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr(log, "is_watched", lambda stream: True)
    shown = steps_shown(Progress(100), monkeypatch, out, step_s=0.3, n=100)
    assert max(b - a for a, b in zip(shown, shown[1:])) * 0.3 <= 2.0 and len(shown) < 100 * 0.3
