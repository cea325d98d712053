"""The journal: what a crash leaves, what damage is, and whose it is."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from acted import decisions

from mpitrain.errors import CheckpointError, MissingError, OutputError, PeerError, StorageError
from mpitrain.search import shared_table
from mpitrain.search.journal import Journal, line_of, record_of
from mpitrain.search.pruners import Unpruned
from mpitrain.search.shared_table import SharedTable, Turn

RECORDS = [{"kind": "start", "trial": 0, "rung": 0, "values": {"a.b": [1, 0.1, "é"]}},
           {"kind": "result", "trial": 0, "rung": 0, "values": {"accuracy": 1 / 3}, "seconds": 2.5}]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    made = Journal(tmp_path / "journal.jsonl")
    made.create({"trials": 3})
    made.append(*RECORDS)
    return made


def test_what_is_written_is_read(journal: Journal) -> None:
    assert journal.read() == ([{"kind": "study", "trials": 3}, *RECORDS], "")
    journal.append({"kind": "result", "trial": 0, "rung": 1, "values": {"loss": math.nan, "ms": math.inf}})
    assert journal.read()[0][-1]["values"] == {"loss": None, "ms": None}
    assert journal.path.read_text().count("NaN") == 0


def test_a_torn_last_line_is_dropped_said_and_cut_off_at_every_byte(journal: Journal) -> None:
    whole = journal.path.read_bytes()
    start = len(whole) - len(line_of(RECORDS[1]))
    for length in range(start + 1, len(whole)):
        journal.path.write_bytes(whole[:length])
        records, told = journal.read()
        assert records[1:] == RECORDS[:1] and f"({length - start} bytes)" in told and "torn" in told
    journal.mend()
    assert journal.path.read_bytes() == whole[:start]
    journal.append(RECORDS[1])
    assert journal.path.read_bytes() == whole


def test_a_flipped_bit_anywhere_else_is_an_error_with_its_line(journal: Journal) -> None:
    whole = bytearray(journal.path.read_bytes())
    last = len(whole) - len(line_of(RECORDS[1]))
    for place in range(0, last - 1, 3):
        damaged = whole.copy()
        damaged[place] ^= 1
        journal.path.write_bytes(damaged)
        with pytest.raises(CheckpointError) as error:
            journal.read()
        assert "journal" in str(error.value) and str(journal.path) in str(error.value)


def test_a_flipped_bit_of_the_last_line_drops_it(journal: Journal) -> None:
    whole = bytearray(journal.path.read_bytes())
    whole[-30] ^= 1
    journal.path.write_bytes(whole)
    records, told = journal.read()
    assert records[1:] == RECORDS[:1] and "torn" in told


def test_of_a_line_that_a_full_disk_cut_nothing_stays(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another group may write as soon as there is room again, and half a line before its own would be damage."""
    whole, plain = journal.path.read_bytes(), os.write

    def full(fd: int, data: bytes) -> int:
        if len(data) < len(line_of(RECORDS[1])):
            raise OSError(errno.ENOSPC, "no space")
        return plain(fd, data[:7])
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StorageError):
            journal.append(RECORDS[1])
    assert journal.path.read_bytes() == whole
    journal.append(RECORDS[1])
    assert journal.read()[0][-1] == RECORDS[1]


def test_a_job_that_lives_on_writes_nothing_once_another_one_has_begun(journal: Journal) -> None:
    """Ranks on another host may outlive their launcher for a while, and somebody may --resume meanwhile."""
    begins = {"kind": "job", "event": "begins", "groups": 1, "ranks": 1, "time": 0.0}
    path = journal.path.with_name("other.jsonl")
    made = Journal(path)
    made.create({"trials": 27})
    made.append(begins)
    old = SharedTable(decisions(Unpruned()), made)
    old.catch_up()
    old.next()
    made.append({**begins, "time": 1.0})
    whole = path.read_bytes()
    for writes in (old.next, lambda: old.add(begins)):
        with pytest.raises(OutputError, match="another job has begun"):
            writes()
        assert path.read_bytes() == whole and not old.turn.path.exists()
    SharedTable(decisions("none"), made).catch_up()                   # one that comes later knows both


def test_a_turn_whose_holder_was_killed_is_found_out_and_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_table, "STALE_S", 0.0)
    takes = "import sys, time; from pathlib import Path; from mpitrain.search.shared_table import Turn\n" \
            "with Turn(Path(sys.argv[1]))(): print('taken', flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", takes, tmp_path], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "taken\n"
    waited = list[None]()

    def waits() -> None:
        waited.append(None)
        if len(waited) == 3:                                  # a living holder is waited for
            other.kill()
            other.wait()
    said = rf"ended in the midst of a decision \(host=.* pid={other.pid} since=.*; go on with --resume"
    with other, pytest.raises(PeerError, match=said), Turn(tmp_path, waits)():
        pass
    assert len(waited) >= 3
    assert f"pid={other.pid} " in (said := Turn(tmp_path).clear()) and "its lock is removed" in said
    with Turn(tmp_path)():
        assert f"pid={os.getpid()} " in Turn(tmp_path).holder()
    assert Turn(tmp_path).clear() == ""


def test_a_turn_that_nobody_can_see_the_holder_of_is_told_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shared_table, "STALE_S", 0.0)
    monkeypatch.setattr(shared_table, "LONG_S", 0.0)
    (tmp_path / "turn").write_text("host=node7 pid=12 since=today born=1 boot=another space=another")

    def waits() -> None:
        if "has been waited for" in (said := capsys.readouterr().err):
            raise InterruptedError(said)                      # as MPI's error where it knows that a rank is lost
    with pytest.raises(InterruptedError, match=r"\(host=node7 pid=12 since=today\); if that process is gone, end this job"), \
            Turn(tmp_path, waits)():
        pass


def test_two_studies_in_one_folder_are_refused(journal: Journal) -> None:
    with pytest.raises(OutputError) as error:
        journal.create({"trials": 3})
    assert "--resume" in str(error.value) and "--overwrite" in str(error.value) and error.value.exit_code == 73


def test_nothing_to_go_on_with_and_files_that_are_no_journal_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingError):
        Journal(tmp_path / "none.jsonl").read()
    for content in (b"", b"\n", b"hello\n", b"\xff\xfe\n", line_of(RECORDS[0])):
        (tmp_path / "journal.jsonl").write_bytes(content)
        with pytest.raises(CheckpointError):
            Journal(tmp_path / "journal.jsonl").read()
    with pytest.raises((StorageError, OutputError)):
        Journal(tmp_path / "none" / "journal.jsonl").append(RECORDS[0])


def test_a_line_is_json_for_anybody_and_its_checksum_is_that_of_zlib() -> None:
    import json
    import zlib
    found = json.loads(line_of(RECORDS[0]))
    crc = found.pop("crc")
    assert found == RECORDS[0] and int(crc, 16) == zlib.crc32(json.dumps(RECORDS[0]).encode())
    assert record_of(line_of(RECORDS[0]).strip()) == RECORDS[0]
