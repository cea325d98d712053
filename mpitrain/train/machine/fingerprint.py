"""The machine's fingerprint, on which bits depend beside the configuration: CPU kernels, libraries, compilers, versions.

If results must be the same on any ranks, all ranks must compute with the same numerics; a run resumed on another machine
is told the difference.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mpitrain
from mpitrain.backend import native
from mpitrain.backend.cpu import cpu_flags, cpu_info
from mpitrain.comm.face import Objects
from mpitrain.config.values import LAYOUT
from mpitrain.errors import ConfigError, DesyncError
from mpitrain.train.machine.environment import blas, versions

# These prefixes select the CPU flags that decide which code runs; others (virtualisation, security) change no bit.
FEATURES = ("sse", "ssse", "avx", "fma", "f16c", "bmi", "amx", "asimd", "sve", "fp16", "bf16")
SETTINGS = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "NPY_DISABLE_CPU_FEATURES",
            "NPY_ENABLE_CPU_FEATURES", "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_DISABLE_JIT")


def numerics() -> dict[str, str]:
    """One line of text for each item; compiles the native kernels if they are not compiled yet."""
    import numpy
    found = versions()
    cpu = cpu_info()
    libraries = [library for library in blas() if "num_threads" in library and library.get("internal_api") != "openmp"]
    simd = numpy.show_config(mode="dicts").get("SIMD Extensions", {})
    return {
        "mpitrain": mpitrain.__version__,
        "numpy": numpy.__version__,
        "numpy_simd": _words([*simd.get("baseline", []), *simd.get("found", [])]),
        "blas": "; ".join(_words(library.get(key) for key in ("internal_api", "version", "architecture", "threading_layer"))
                          for library in libraries),
        "blas_threads": _words(library["num_threads"] for library in libraries),
        "numba": found.get("numba", ""),
        "llvmlite": found.get("llvmlite", ""),
        "libc": _words(platform.libc_ver()),
        "machine": platform.machine(),
        "cpu": cpu.get("model name", cpu.get("CPU part", "")),
        "cpu_features": _words(sorted(flag for flag in cpu_flags() if flag.startswith(FEATURES))),
        "l2_cache": _read("/sys/devices/system/cpu/cpu0/cache/index2/size"),
        "settings": _words(f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ),
        **{f"native_{name}": text for name, text in native.describe().items()},
    }


def refuse_threads() -> None:
    """ConfigError unless BLAS has one thread: its split of a product among several is its own affair."""
    threads = {library["num_threads"] for library in blas() if library.get("internal_api") != "openmp"}
    if threads - {1}:
        raise ConfigError(f"{LAYOUT} needs one BLAS thread a rank, found {max(threads)}; call "
                          "mpitrain.train.machine.threads.pin(1) first, or set OMP_NUM_THREADS=1")


def agree(mine: Mapping[str, str], host: str, channel: Objects) -> None:
    """DesyncError, naming two ranks and the first item in which their numerics differ. It communicates."""
    everyone = channel.gather_objects([host, dict(mine)])
    first_host, first = everyone[0]
    for rank, (other_host, other) in enumerate(everyone):
        for name in first:
            if other.get(name) != first[name]:
                one, two = _apart(first[name], str(other.get(name)))
                raise DesyncError(f'train.reproducible = "layout" needs the same numerics on all ranks, but "{name}" differs: '
                                  f"{one} on rank 0 ({first_host}), {two} on rank {rank} ({other_host}); use hosts of one kind "
                                  f'with one installation, or train.reproducible = "run"')


def changes(before: Mapping[str, Any] | None, now: Mapping[str, str] | None) -> str:
    """A one-line list of changes since a checkpoint was written; "" if there are none. None: not in this mode."""
    if now is None:
        return "" if before is None else ('the checkpoint was written with train.reproducible = "layout", and the run goes on '
                                          'without it: from here on the bits depend on its ranks')
    if before is None:
        return 'the checkpoint was not written with train.reproducible = "layout": the bits so far depend on its ranks'
    parts = []
    for name, value in now.items():
        if str(before.get(name, "")) != value:
            one, two = _apart(str(before.get(name, "")), value)
            parts.append(f"{name} was {one}, is {two}")
    return f"these are not the numerics of the checkpoint, the bits from here on may differ: {'; '.join(parts)}" if parts else ""


def _apart(one: str, two: str) -> tuple[str, str]:
    """Two texts quoted; long ones are reduced to the words that the other lacks."""
    if max(len(one), len(two)) > 60:
        left, right = one.split(), two.split()
        one, two = (_words(w for w in left if w not in right) or "less", _words(w for w in right if w not in left) or "less")
    return f'"{one}"', f'"{two}"'


def _words(values: Iterable[Any]) -> str:
    return " ".join(str(value) for value in values if value is not None and value != "")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""                            # not Linux, or a container without /sys: one item less is compared
