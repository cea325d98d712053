"""To be imported before NumPy and PyTorch: one thread a process, and no forced BLAS kernel, which would slow one side down."""

import os

for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    if os.environ.get(name):
        raise SystemExit(f"{name} is set; unset it and start again")
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"


def keep_to_one_core(channel) -> None:
    """Binds this rank to a core of its own, unless its launcher has; refuses to share one."""
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[channel.rank % len(allowed)]})
    taken = channel.gather_objects(sorted(os.sched_getaffinity(0)))
    if len({core for cores in taken for core in cores}) < channel.size:
        raise SystemExit(f"{channel.size} ranks on cores {taken}: each needs its own; use fewer ranks")
