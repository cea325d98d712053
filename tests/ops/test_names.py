"""docs/operations.md: each of PyTorch's names in its table is there under the name it says, or has a reason."""

from __future__ import annotations

import re
from pathlib import Path

from mpitrain import Tensor, nn, ops

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
OWNERS = {"ops": ops, "x": Tensor, "nn": nn}


def test_every_name_of_the_table_is_there_or_has_a_reason() -> None:
    rows = re.findall(r"^\| (\S+) \| (\d+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) > 50 and all(int(files) >= 8 for _, files, _ in rows)
    missing = []
    for name, _, here in rows:
        if found := re.fullmatch(r"`(\w+)\.(\w+)`", here):
            if not callable(getattr(OWNERS[found[1]], found[2], None)):
                missing.append(name)
        else:
            assert len(here) > 40, f"{name}: a reason is a sentence"
    assert not missing
