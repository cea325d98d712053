"""benchmarks/overlap.py runs on any number of ranks and writes figures that belong together."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from launch import ROOT, clean_environment, mpirun

pytestmark = pytest.mark.slow                                  # as tests of the other scripts are


def test_it_writes_what_it_measured_and_hidden_and_share_follow_from_it(tmp_path):
    result = mpirun(2, ROOT / "benchmarks/overlap.py", "--model", "mlp", "--batch", "4", "--rounds", "1", "--bucket-mb", "auto",
                    "--progress", "thread", "--json", tmp_path / "o.jsonl", timeout=150)
    assert result.rc == 0 and result.error_lines == [], result.err
    found = json.loads((tmp_path / "o.jsonl").read_text())
    assert (found["bench"], found["ranks"], found["batch"], found["progress"]) == ("overlap", 2, 4, "thread")
    assert found["hidden"] == pytest.approx(1 - found["exposed_s"] / found["communication_alone_s"])
    assert found["share"] == pytest.approx(found["exposed_s"] / found["step_s"])
    assert 0 <= found["exposed_s"] < found["step_s"] and 0 < found["backward_alone_s"] < found["step_alone_s"]
    assert "communication alone" in result.out and f"{found['buckets']} buckets" in result.out


@pytest.mark.parametrize(("phase", "broken", "message"), [
    ("during backward", "Bench.with_exchange = spoiled(Bench.with_exchange)", "the exchange during backward gave wrong sums: "),
    ("alone", "Channel.start_allreduce = forgotten", "the exchange alone gave wrong sums: ")])
def test_a_wrong_sum_in_either_phase_ends_the_job(phase, broken, message, tmp_path):
    program = tmp_path / "broken.py"
    program.write_text(f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import overlap
from overlap import Bench
from mpitrain.comm.job import guard
from mpitrain.comm.messages.channel import Channel

def spoiled(step):
    def run(self):
        found = step(self)
        if self.update.step > 10:
            self.reducer.gradients[7::11] *= 1.01           # what a bucket would hold that another rank added to twice
        return found
    return run

class Done:
    def wait(self): pass

def forgotten(self, array, name, **options):
    alone = sys._getframe(1).f_code.co_name == "<listcomp>" or sys._getframe(1).f_code.co_name == "exchange_alone"
    return Done() if alone else start(self, array, name, **options)
start = Channel.start_allreduce
{broken}
sys.argv = ["overlap.py", "--model", "mlp", "--batch", "4", "--rounds", "1", "--algorithm", "ring"]
guard.Process().run(overlap.main)
""")
    result = mpirun(2, program, cwd=tmp_path, timeout=100)
    assert result.rc == 79 and len(result.error_lines) == 1, result.err
    assert message in result.error_lines[0] and " elements looked at, one off by " in result.error_lines[0]


@pytest.mark.parametrize(("algorithm", "way", "wire"), [("auto", "shared memory", "float32"), ("ring", "messages", "bfloat16")])
def test_the_way_and_the_wire_that_it_writes_are_those_that_were_used(algorithm, way, wire, tmp_path):
    result = mpirun(2, ROOT / "benchmarks/overlap.py", "--model", "mlp", "--batch", "4", "--rounds", "1", "--wire", "bfloat16",
                    "--algorithm", algorithm, "--json", tmp_path / "o.jsonl", timeout=100)
    assert result.rc == 0 and result.error_lines == [], result.err
    found = json.loads((tmp_path / "o.jsonl").read_text())
    assert (found["way"], found["wire"]) == (way, wire) and f"({way}, {wire})" in result.out


def test_the_commands_in_the_scripts_can_be_given():
    scripts = [(ROOT / "benchmarks" / name).read_text() for name in ("overlap.py", "two_hosts.py")]
    command = re.compile(r"^    .*python .*benchmarks/overlap.py(.*?)(?:   .*)?$", re.MULTILINE)
    shown = [line for text in scripts for line in command.findall(text)]
    assert len(shown) == 3
    for line in shown:
        done = subprocess.run([sys.executable, "-c", f"import overlap, sys; overlap.parser().parse_args({line.split()!r})"],
                              cwd=ROOT / "benchmarks", env=clean_environment(), capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stderr)


def test_a_batch_that_ranks_cannot_share_is_refused():
    result = mpirun(2, ROOT / "benchmarks/overlap.py", "--batch", "3", timeout=60)
    assert result.rc == 64 and len(result.error_lines) == 1
    assert "--batch 3 does not divide by 2 ranks; give a multiple" in result.error_lines[0]
