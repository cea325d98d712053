"""benchmarks/gpu.py with the stand-in for a GPU, which counts what it is asked for.

The first piece is a process of its own, as all are on a GPU; the others are forks of this one, which has PyTorch already: its
import takes two seconds.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]
os.environ["MPITRAIN_FAKE_BUS"] = "0000:01:00.0"           # ranks share the GPU

import fakegpu  # noqa: E402
import gpu_tools  # noqa: E402
from device_counts import counted  # noqa: E402


def asked_of(bench, work):
    with counted() as counts:
        work()
    graphs = counts.launches.pop("graph", 0)
    waits = sum(count for what, count in counts.syncs.items() if what != "event")
    return {"launches": counts.n_launches, "graphs": graphs, "waits": waits, "up": counts.up, "down": counts.down}


fakegpu.instead_of_cupy()
gpu_tools.asked_of = asked_of

import gpu  # noqa: E402

from mpitrain.comm.job.guard import Process  # noqa: E402


def forked(command, **options):
    """What subprocess.run(command, stdout=PIPE, text=True, check=True) does with a command that starts this program."""
    if "torch" not in sys.modules:
        import torch  # noqa: F401  (for the pieces that follow)
        return subprocess.run(command, **options)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(writing, 1)
        sys.argv = command[1:]
        try:
            Process().run(gpu.main)
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code or 0)
    os.close(writing)
    with os.fdopen(reading) as out:
        said = out.read()
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise subprocess.CalledProcessError(code, command)
    return subprocess.CompletedProcess(command, code, said)


if __name__ == "__main__":
    gpu.subprocess = SimpleNamespace(**{**vars(subprocess), "run": forked})
    Process().run(gpu.main)
