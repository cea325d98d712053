"""The peak of this process's memory, counted anew for each model of a benchmark."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

from mpitrain.backend.memory import pool_in_use

CLEAR = Path("/proc/self/clear_refs")
RESET_PEAK = "5"                  # proc(5); Linux 4.0


def forget_peak() -> bool:
    """Hands freed memory back to the system, then counts the peak anew. False where the system does not let us."""
    gc.collect()
    pool = pool_in_use()
    if pool is not None:
        pool.trim()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        CLEAR.write_text(RESET_PEAK)
    except OSError:
        return False
    return True
