"""Memory of this process as Linux counts it: resident now, at most so far, and pages that had to be brought in."""

from __future__ import annotations

import ctypes
import gc
import resource
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"                  # proc(5); Linux 4.0


def resident_mb(peak: bool = False) -> float:
    """MiB resident now, or at most since `forget_peak`.

    Not getrusage's maximum where there is a choice: a process inherits that from the one which started it.
    """
    wanted = "VmHWM:" if peak else "VmRSS:"
    if STATUS.is_file():
        for line in STATUS.read_text().splitlines():
            if line.startswith(wanted):
                return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def forget_peak() -> bool:
    """Hands freed memory back to the system, then counts the peak anew. False where the system does not let us."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        CLEAR.write_text(RESET_PEAK)
    except OSError:
        return False
    return True


def page_faults() -> int:
    """Pages brought in without reading a disk since this process began: first touches of fresh memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
