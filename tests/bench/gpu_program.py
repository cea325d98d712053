"""benchmarks/gpu.py with the stand-in for a GPU, which counts what it is asked for."""

import os
import sys
from pathlib import Path

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

if __name__ == "__main__":
    Process().run(gpu.main)
