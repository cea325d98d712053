"""examples/language: characters that are hidden are found far better than counting neighbours finds them."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT, clean_environment
from real_data import real
from runs import lines, ok, train

EXAMPLE = ROOT / "examples/language"
BASELINES = {"next frequencies alone": (0.1490, 28.426), "next the character before": (0.2698, 12.050),
             "masked frequencies alone": (0.1423, 28.790), "masked both neighbours": (0.3923, 7.625)}


def prepare(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, EXAMPLE / "characters.py", *arguments], cwd=folder, env=clean_environment(),
                          capture_output=True, text=True, timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_hidden_characters_are_found_better_than_by_counting(tmp_path: Path) -> None:
    done = prepare(tmp_path, str(real("tinyshakespeare.txt")), "--out", "text")
    assert done.returncode == 0, done.stderr
    found = {re.sub(" +", " ", match[1]).strip(): (float(match[2]), float(match[3]))
             for match in re.finditer(r"^(.*?) accuracy ([\d.]+)  perplexity ([\d.]+)$", done.stdout, re.MULTILINE)}
    assert found == BASELINES                      # closed forms: a check of the data, to every digit
    config = shutil.copy(EXAMPLE / "masked.toml", tmp_path)
    ok(train(2, Path(config), f"run.out={tmp_path / 'run'}", timeout=840))
    last = [line for line in lines(tmp_path / "run") if line.get("split") == "validation"][-1]
    assert last["accuracy"] >= 0.48 and math.exp(last["loss"]) <= 6.0


def test_a_text_that_is_missing_or_none_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("abc")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe" * 1000)
    for name, status, words in (("none.txt", 66, "there is no such text"), ("short.txt", 65, "3 characters, 3 different ones"),
                                ("bytes.txt", 65, "cannot be read")):
        done = prepare(tmp_path, name)
        line, = done.stderr.splitlines()
        assert done.returncode == status and words in line and name in line, done.stderr
