"""The start of the process that parses HDF5 metadata (`data.probe`).

It imports h5py, which takes as long as a rank's own imports: a program starts it before those, and asks it after them.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

# This package comes before another one of its name that is installed, and after the standard library: where it is installed
# itself, so are others, one of which may be called `json` or `math`.
CHILD = ("import gc, sys; gc.disable(); "
         "place = next((i for i, p in enumerate(sys.path) if p.endswith('-packages')), len(sys.path)); "
         f"sys.path.insert(place, {str(Path(__file__).parents[2])!r}); "
         "from mpitrain.files.parser_child import main; main()")


def start_parser() -> subprocess.Popen[bytes]:
    """A new process, which answers when it is ready; it ends when its stdin is closed, and so with this process."""
    here = os.getcwd()
    paths = [p for p in sys.path if os.path.isabs(p) and p != here]      # A data folder's h5py.py is not imported.
    variables = {k: v for k, v in os.environ.items()                     # An h5py built with MPI must not join the job.
                 if not k.startswith(("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "PYTHON", "HDF5_"))}
    variables |= {"HDF5_PLUGIN_PRELOAD": "::", "HDF5_USE_FILE_LOCKING": "FALSE", "MPI4PY_RC_INITIALIZE": "0",
                  "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-I", "-c", CHILD], env=variables, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    with contextlib.suppress(OSError, AttributeError):                   # A launcher binds a rank to a core, which imports too:
        os.sched_setaffinity(process.pid, range(os.cpu_count() or 1))    # the process takes any that the job may use.
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):                           # It has died, which who asks it will see.
        process.stdin.write(json.dumps({"paths": paths}).encode() + b"\n")
        process.stdin.flush()
    return process
