"""To be imported before NumPy and PyTorch: one thread a process, and no forced BLAS kernel, which would slow one side down."""

import os

for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    if os.environ.get(name):
        raise SystemExit(f"{name} is set; unset it and start again")
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"
