"""Asking a rank for its stacks leaves it alone, whatever it is doing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpitrain.comm.watch.seen import Rank
from mpitrain.comm.watch.stacks import ask

TIMES = 60
BUSY = """
import json, threading
from mpitrain.comm.watch.pulse import Pulse

def changes_its_frames(depth=0):
    if depth < 400:
        eval(compile(f"changes_its_frames({depth} + 20)", f"made at {depth}", "eval"))      # code that is freed when it has run

def works():
    while True:
        changes_its_frames()

pulse = Pulse(60, 60, "warn")
for _ in range(3):
    threading.Thread(target=works, daemon=True).start()
print(json.dumps(pulse.contact()), flush=True)
works()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ranks are watched through /proc")
@pytest.mark.promise("A4")
def test_a_rank_whose_threads_run_python_is_not_hurt_by_the_question(tmp_path: Path) -> None:
    second_of_the_node = {**os.environ, "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True, env=second_of_the_node) as busy:
        try:
            assert busy.stdout is not None
            rank = Rank(1, *json.loads(busy.stdout.readline())[2:])
            for _ in range(TIMES):
                assert "in works" in ask([rank])[rank]        # of a rank that has crashed there is none
            rank.close()
        finally:
            busy.kill()
