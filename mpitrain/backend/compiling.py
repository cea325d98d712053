"""Kernels of ``native/device`` are compiled by child processes while a run starts, where they are not kept already.

NVRTC compiles one source at a time in a process, however many threads ask (timed on NVRTC 12.9: 4 sources take 18.9 s on two
threads, 20.6 s of one core's work), and all sources want a minute of one core. So there are several processes:

    the run      starts children, and goes on: imports, MPI, data
    a child      for each source: it is kept, or a process is at it: the next; else compiles it and keeps it
    the run      at a kernel's first use: its source is kept: loads it; a child is at it: waits; else compiles it itself

Who compiles what is decided by locks of files alone, so ranks of a node share the work without messages.

    python -m mpitrain.backend.compiling 90 convolution optimizer          # a child, for GPUs of sm_90
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from mpitrain.backend.cache import one_at_a_time
from mpitrain.backend.runtime import device_folder

MOST = 12                                 # children, of some 300 MB each
# They begin with those that take longest: 3 to 7 s each (NVRTC 12.9, sm_90); others take less than 3 s.
SLOWEST = ("convolution", "attention_gradients_256", "layer_norm", "optimizer", "layer_norm_gradients", "attention_gradients_128",
           "attention_tensor_128", "attention_gradients_64", "attention_gradients_32", "batch_norm", "attention_tensor_64",
           "decode", "rows")
_children: list[subprocess.Popen[bytes]] = []


def in_order() -> list[str]:
    """The sources, those that take longest first."""
    found = sorted(path.stem for path in device_folder().glob("*.cu"))
    return sorted(found, key=lambda name: SLOWEST.index(name) if name in SLOWEST else len(SLOWEST))


def compile_ahead(device: str) -> int:
    """Starts the children that a run on `device` ("cpu", "gpu" or "auto") has use for, and returns how many at once.

    To be called before MPI starts, since nothing forks afterwards. What goes wrong in a child is told by nobody: the run compiles
    the source itself then, and says what is wrong with it.
    """
    if device == "cpu":
        return 0
    from mpitrain.backend import namespace
    found, _ = namespace._cupy()
    if found is None or found.__name__ != "cupy":
        return 0
    from mpitrain.backend.cuda import kept_at
    target = found.cuda.Device(0).compute_capability
    missing = [name for name in in_order() if not kept_at(name, target).exists()]
    command = [sys.executable, "-m", "mpitrain.backend.compiling", target, *missing]
    for _ in range(min(MOST, len(missing), os.cpu_count() or 1)):
        try:
            _children.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                              stderr=subprocess.DEVNULL))
        except OSError:                   # no room for another process
            break
    return len(_children)


def main(target: str, names: Sequence[str]) -> int:
    """What a child does: one of as many as there may be on this machine, or nothing."""
    with suppress(AttributeError, OSError):         # a sandbox may refuse this, and a job have none of these cores
        os.sched_setaffinity(0, range(os.cpu_count() or 1))       # mpirun binds a rank to a core, and a child would share that
    for place in range(MOST):
        with one_at_a_time(f"compiling-{place}", wait=0) as mine:
            if mine:
                return _compile(target, names)
    return 0                              # those of other ranks are at it


def _compile(target: str, names: Sequence[str]) -> int:
    import cupy

    from mpitrain.backend.cuda import keep
    if cupy.cuda.Device(0).compute_capability != target:
        return 1
    for name in names:
        keep(name, target, wait=0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
