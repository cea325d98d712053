"""`mpitrain bench compress`: what it writes is what the simulator takes, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from standing import mpirun

from mpitrain.bench import command
from mpitrain.bench.compress import measured, pieces_of
from mpitrain.errors import ConfigError, UsageError
from mpitrain.parallel.compress.compressor import make_compressor
from mpitrain.schedules.simulate import Machine
from mpitrain.schedules.simulate_levels import Coding, simulate_coded

OWN = """
from mpitrain.parallel.compress.blocks import Int8
class Mine(Int8):
    pass
class Wrong(Int8):
    def decode(self, message, first, stop, total, add):
        super().decode(message, first, stop, total, add)
        total += 1
"""


def test_each_compressor_is_one_line_and_one_object_that_the_simulator_takes(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    names = ["int8", "topk:0.1", "powersgd:2", "own.py:Mine"]
    result = mpirun(1, "-m", "mpitrain", "bench", "compress", "--compressors", ",".join(names), "--elements", "10000",
                    "--repeats", "3", "--json", "r.json", cwd=tmp_path)
    assert result.rc == 0 and result.error_lines == [], result.err
    records = [json.loads(line) for line in (tmp_path / "r.json").read_text().splitlines()]
    assert [r["compressor"] for r in records] == names and len(result.out.splitlines()) == 2 + len(names)
    for r, kind, phases, nbytes in zip(records, ("packed", "gathered", "linear", "packed"), (1, 1, 2, 1),
                                       (10160, 4 * (410 + 410 + 180 + 16), 4 * (16 + 2 * (64 + 156)), 10160)):
        assert (r["bench"], r["kind"], r["phases"], r["bytes"], r["elements"]) == ("compress", kind, phases, nbytes, 10000)
        assert r["rate"] == nbytes / 40000 and 0 < r["encode_lowest"] <= r["encode"] and 0 < r["decode_lowest"] <= r["decode"]
        coding = Coding(r["kind"], r["rate"], r["encode"], r["decode"], r["phases"])
        assert simulate_coded(coding, 4, 10000, Machine(1e-6, 1e-9, 1e-10)) > 40000 * r["encode"]
    wrong = mpirun(1, "-m", "mpitrain", "bench", "compress", "--compressors", "own.py:Wrong", cwd=tmp_path)
    assert wrong.rc == 78 and re.search('E_COMPRESS .*compressor "own.py:Wrong" with n=2: what is sent and the residual do not',
                                        wrong.err)


@pytest.mark.parametrize("name", ["int8", "int4", "onebit", "topk:0.3", "randomk:0.5", "powersgd:1"])
def test_bytes_are_those_of_the_messages_at_any_size(name: str) -> None:
    for elements in (1, 17, 300, 5000):
        pieces = pieces_of(elements)
        assert pieces[-1].stop == elements and sum(np.prod(piece.shape) for piece in pieces) == elements
        cost = measured(make_compressor(name), pieces, 2)
        assert 0 < cost.nbytes <= 6 * elements + 24 and len(cost.encode) == len(cost.decode) == 2


def test_what_cannot_be_measured_is_refused() -> None:
    flags = {"compressors": "int8", "elements": 10, "repeats": 1}
    for changed, line in (({"compressors": ","}, "--compressors is a list with commas"),
                          ({"elements": 0}, "--elements must be at least 1, found 0"),
                          ({"repeats": 0}, "--repeats must be at least 1, found 0")):
        with pytest.raises(UsageError, match=line):
            command.compress(**{**flags, **changed})
    with pytest.raises(ConfigError, match='comm.compress = "topk:0": expected the share'):
        command.compress(**{**flags, "compressors": "topk:0"})
