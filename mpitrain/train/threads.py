"""Threads per rank: the cores bound to it, shared out, pinned before the first product (their number changes bits)."""

from __future__ import annotations

import os
from typing import Any

from mpitrain.kernels.product import one_thread

CHOSEN_BY_USER = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def pin(threads: int, local_ranks: int) -> int:
    """Limits BLAS and OpenMP to `threads`; 0 means the user's environment, else the cores this rank may use, shared out."""
    from threadpoolctl import threadpool_limits
    threads = threads or chosen(os.environ) or share(len(os.sched_getaffinity(0)), os.cpu_count() or 1, local_ranks)
    threadpool_limits(threads)
    one_thread.cache_clear()
    return threads


def chosen(environment: Any) -> int:
    """What the user's environment says, 0 where it says nothing usable."""
    for name in CHOSEN_BY_USER:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return 0


def share(allowed: int, cores: int, local_ranks: int) -> int:
    """A rank that its launcher bound to some cores has them to itself; unbound ranks of a node share all."""
    return max(1, allowed if allowed < cores else allowed // local_ranks)
