"""The journal: what a crash leaves, what damage is, and whose it is."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mpitrain.errors import CheckpointError, MissingError, OutputError, StorageError
from mpitrain.search.journal import Journal, line_of, record_of

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
