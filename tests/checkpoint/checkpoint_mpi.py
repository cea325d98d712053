"""Saving and finding checkpoints with real ranks and our own channels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain.checkpoint.store import Piece, latest, save
from mpitrain.comm.messages.channel import Channel
from mpitrain.errors import MissingError


def test_each_rank_writes_its_rows_and_each_reads_the_whole(comm: Any, mpi_tmp_path: Path) -> None:
    channel = Channel(comm, "checkpoints")
    rank, n = channel.rank, channel.size
    rows = 2 * n + 1
    whole = np.arange(3.0 * rows).reshape(rows, 3)
    low, high = rows * rank // n, rows * (rank + 1) // n
    with pytest.raises(MissingError):
        latest(mpi_tmp_path / "c", channel)
    save(mpi_tmp_path / "c", 7, [Piece("w", whole[low:high], whole.shape, (low, 0))], {"n": n}, channel)
    found = latest(mpi_tmp_path / "c", channel)
    assert (found.step, found.meta, len(found.parts)) == (7, {"n": n}, n)
    np.testing.assert_array_equal(found.read("w"), whole)
