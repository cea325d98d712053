"""For test_two_hosts.py: ``python hosts_program.py where`` or ``... allreduce BYTES [ALGORITHM]``; they print lines of JSON."""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np

from mpitrain.comm.job.start import start
from mpitrain.comm.messages.channel import Channel


def where() -> None:
    """Each rank: its host, the ranks it shares memory with, and what of the environment came with it."""
    from mpi4py import MPI
    world = start()
    node = world.comm.Split_type(MPI.COMM_TYPE_SHARED)
    about = {"rank": world.rank, "host": os.uname().nodename, "node": node.allgather(world.rank),
             "cores": sorted(os.sched_getaffinity(0)), "asked": os.environ.get("ASKED"), "unasked": os.environ.get("UNASKED"),
             "mca": {name: value for name, value in os.environ.items() if name.startswith("OMPI_MCA_btl_")}}
    print(json.dumps(about), flush=True)


def allreduce(size: int, algorithm: str = "ring") -> None:
    """Five sums of `size` bytes, each begun and ended by all together; rank 0 prints the seconds of each."""
    world = start()
    channel = Channel(world.comm.Dup(), "test", algorithm=algorithm)
    seconds = []
    for _ in range(5):
        array = np.ones(size // 4, np.float32)
        channel.barrier()
        began = time.monotonic()
        channel.allreduce(array, name="x")
        channel.barrier()
        seconds.append(time.monotonic() - began)
        assert (array == world.size).all()
    if world.rank == 0:
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "where":
        where()
    else:
        allreduce(int(sys.argv[2]), *sys.argv[3:])
