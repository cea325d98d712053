"""What the `data.py` of examples/language makes of a text: baselines in closed form, to every digit; faults as one line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT, clean_environment
from real_data import real

EXAMPLE = ROOT / "examples/language"
BASELINES = {"next frequencies alone": (0.1490, 28.426), "next the character before": (0.2698, 12.050),
             "masked frequencies alone": (0.1423, 28.790), "masked both neighbours": (0.3923, 7.625)}


def prepare(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, EXAMPLE / "data.py", *arguments], cwd=folder, env=clean_environment(),
                          capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_counts_of_characters_find_as_many_as_the_page_says(tmp_path: Path) -> None:
    done = prepare(tmp_path, str(real("tinyshakespeare.txt")), "--out", "text")
    assert done.returncode == 0, done.stderr
    found = {re.sub(" +", " ", match[1]).strip(): (float(match[2]), float(match[3]))
             for match in re.finditer(r"^(.*?) accuracy ([\d.]+)  perplexity ([\d.]+)$", done.stdout, re.MULTILINE)}
    assert found == BASELINES


def test_a_text_that_is_missing_or_none_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("abc")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe" * 1000)
    for name, status, words in (("none.txt", 66, "there is no such text"), ("short.txt", 65, "3 characters, 3 different ones"),
                                ("bytes.txt", 65, "cannot be read")):
        done = prepare(tmp_path, name)
        line, = done.stderr.splitlines()
        assert done.returncode == status and words in line and name in line, done.stderr
