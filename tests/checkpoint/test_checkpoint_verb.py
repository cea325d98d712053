"""`checkpoint list` and `checkpoint verify`: what they print of whole and of damaged checkpoints, and how they exit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpitrain.checkpoint import store
from mpitrain.checkpoint.hashes import array_line, total_sha256
from mpitrain.checkpoint.store import Piece
from mpitrain.cli import main
from mpitrain.errors import CheckpointError, MissingError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with three checkpoints; the last one was written by two ranks that had halves."""
    folder = tmp_path / "run" / "checkpoints"
    for step in (10, 20):
        store.save(folder, step, [Piece.whole("parameters/w", np.full((3, 2), step, np.float32)),
                                  Piece.whole("optimizer/steps", np.array(step))], {"mesh": {"pp": 1, "dp": 2, "tp": 1}})
    store.save(folder, 30, [Piece("parameters/w", np.ones((2, 2), np.float32), (3, 2), (0, 0)),
                            Piece("parameters/w", np.ones((1, 2), np.float32), (3, 2), (2, 0))], {})
    return tmp_path / "run"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    capsys.readouterr()
    assert main(["checkpoint", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_list_has_a_line_for_each_checkpoint_with_the_hash_of_run_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, *rows = printed(capsys, "list", str(run))
    assert head.split() == ["step", "written", "MB", "parts", "mesh", "parameters_sha256", "state"]
    assert [row.split()[0] for row in rows] == ["10", "20", "30"] and all(row.endswith("complete") for row in rows)
    assert "dp=2" in rows[0] and total_sha256([array_line("w", np.full((3, 2), 10, np.float32))])[:16] in rows[0]
    assert rows == printed(capsys, "list", str(run / "checkpoints"))[1:]


def test_list_says_what_is_wrong_with_a_manifest_or_a_size(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(run / "checkpoints/step-00000010/manifest.json", -10)
    os.truncate(run / "checkpoints/step-00000020/part-00000.h5", 50)
    (run / "checkpoints/step-00000030").rename(run / "checkpoints/step-00000099")
    with pytest.raises(CheckpointError, match="3 of 3 checkpoints are damaged; start the run again with --overwrite, or copy"):
        main(["checkpoint", "list", str(run)])
    _, *rows = capsys.readouterr().out.splitlines()
    assert "the manifest is damaged" in rows[0] and "the file has 50 bytes" in rows[1] and "the folder was renamed" in rows[2]
    assert rows[2].split()[0] == "99"
    (run / "checkpoints/step-00000099").rename(run / "checkpoints/step-00000030")
    with pytest.raises(CheckpointError, match="2 of 3 checkpoints are damaged; a run resumes from the newest whole one"):
        main(["checkpoint", "list", str(run)])


def test_verify_reads_every_checkpoint_of_a_run_or_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "verify", str(run))
    assert len(lines) == 3 and all(" whole, " in line and line.endswith("checksums right") for line in lines)
    assert lines[0].startswith("step-00000010: whole, ") and " 3 checksums" in lines[0]
    assert printed(capsys, "verify", str(run / "checkpoints/step-00000020")) == lines[1:2]


@pytest.mark.promise("B5")
def test_verify_names_each_defect_and_the_program_ends_with_65(run: Path) -> None:
    found = store.load(run / "checkpoints/step-00000020")
    flip(run / "checkpoints/step-00000020/part-00000.h5", found.arrays["parameters/w"].pieces[0].offset)
    done = subprocess.run([sys.executable, "-m", "mpitrain", "checkpoint", "verify", str(run)], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60)
    assert done.returncode == 65, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step-00000010", *["step-00000020"] * 2, "step-00000030"]
    assert "part-00000.h5" in lines[1] and "sha256" in lines[1] and 'dataset="parameters/w"' in lines[2] and "offset=" in lines[2]
    (line,) = done.stderr.splitlines()
    assert line.startswith("mpitrain: E_CHECKPOINT") and "1 of 3 checkpoints are damaged" in line


@pytest.mark.promise("B5")
def test_a_folder_that_was_renamed_is_neither_resumed_from_nor_keeps_others_from_staying(
        run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "checkpoints"                              # step-99 would pass for the newest
    (folder / "step-00000010").rename(folder / "step-00000099")
    assert store.latest(folder).step == 30
    told = capsys.readouterr().err
    assert "step-00000099" in told and "the folder was renamed" in told
    (folder / "step-00000020").rename(folder / "step-00000098")
    (folder / "step-00000030").rename(folder / "step-00000097")
    with pytest.raises(CheckpointError, match="none of the checkpoints is whole"):
        store.latest(folder)
    assert store.prune(folder, 1) == []


@pytest.mark.parametrize("verb", ["list", "verify"])
def test_a_folder_without_checkpoints_is_refused(tmp_path: Path, verb: str) -> None:
    with pytest.raises(MissingError, match=r"expected a run folder with checkpoints, or one checkpoint \(step-...\)$"):
        main(["checkpoint", verb, str(tmp_path)])
    with pytest.raises(MissingError, match=r"one checkpoint \(step-...\), found a file"):
        main(["checkpoint", verb, __file__])
    with pytest.raises(MissingError, match=r"one checkpoint \(step-...\), and there is nothing"):
        main(["checkpoint", verb, str(tmp_path / "nowhere")])
