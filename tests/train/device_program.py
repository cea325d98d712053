"""``python -m mpitrain`` with the stand-in for a GPU: python device_program.py train run.toml train.device=gpu

Whether MPI takes the stand-in's memory is tried out in a process with the stand-in, where $MPITRAIN_FAKE_MPI is done first.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fakegpu

from mpitrain.__main__ import main
from mpitrain.comm.messages import gpu_probe


def with_stand_in() -> None:
    first = os.environ.get("MPITRAIN_FAKE_MPI", "pass")
    gpu_probe.CHILD = f"import fakegpu; fakegpu.instead_of_cupy(); {first}; {gpu_probe.CHILD}"
    fakegpu.instead_of_cupy()


if __name__ == "__main__":
    with_stand_in()
    main()
