"""Finds the C sources in ``native/``, compiles each once into the private cache, and loads it.

A library is keyed by its source, the compiler's version and the CPU's features, so one cache folder serves a cluster
of different nodes. The first rank of a node compiles while the others wait; where they cannot (no locks on the file system),
each writes a file of its own and renames it into place.
Without a compiler every kernel has a slower stand-in, so `load` answers None and says so once, in `missing()`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from mpitrain.backend.cache import cache_folder, one_at_a_time
from mpitrain.errors import text_of

# -ffp-contract=off: a fused multiply-add rounds once instead of twice, so bits would depend on what the compiler fused.
# Never -ffast-math when linking: its start-up code flushes denormal numbers for the whole process.
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno",
         "-fno-trapping-math")


def source_folder() -> Path:
    """``native/`` of the checkout, or the copy that an installed wheel carries."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "native"
    return installed if installed.is_dir() else package.parent / "native"


@cache
def compiler() -> str | None:
    """The C compiler: $CC, cc, gcc or clang; None where there is none."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        found = name and shutil.which(name)
        if found:
            return found
    return None


@cache
def load(name: str) -> ctypes.CDLL | None:
    """The library compiled from ``native/<name>.c``; None without a compiler, or where compiling it fails."""
    source = source_folder() / f"{name}.c"
    cc = compiler()
    if cc is None or not source.is_file():
        _missing[name] = "no C compiler (cc, gcc or clang)" if cc is None else f"no source {source}"
        return None
    library = cache_folder() / f"{name}-{_key(source, cc)}.so"
    try:
        if not library.exists():
            with one_at_a_time(name):             # the ranks of a node start together and share its cores
                if not library.exists():
                    compile_library(source, library, cc)
        try:
            return ctypes.CDLL(str(library))
        except OSError:                           # cut off by a full disk, say: made anew, once
            compile_library(source, library, cc)
            return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None)
        _missing[name] = ((output or "").strip() or text_of(error)).strip().splitlines()[-1]
        return None


class Method(ctypes.Structure):
    """Python's PyMethodDef."""

    _fields_ = [("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p)]


NOARGS, FASTCALL = 0x04, 0x80                     # of PyMethodDef: (self, NULL); (self, arguments, their number)
_kept: list[Method] = []


def builtin(function: Any, flags: int) -> Callable[[Any], Callable[..., Any]]:
    """Makes a C function a builtin of this interpreter, called in 0.1 us; by way of ctypes it took 1 to 4.

    What comes back takes the object that the C function gets as its `self`, and gives the builtin for it. The C function takes
    and returns Python objects as any builtin does.
    """
    method = Method(function.__name__.encode(), ctypes.cast(function, ctypes.c_void_p).value, flags, None)
    _kept.append(method)                          # the builtins point to it
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p]
    return lambda bound: make(ctypes.addressof(method), bound, None)


def compile_library(source: Path, library: Path, cc: str) -> None:
    """Compiles to a temporary name beside `library` and renames it, so that nobody loads half a file."""
    partial = library.with_suffix(f".{os.getpid()}.tmp")
    command = [cc, *FLAGS, "-o", str(partial), str(source), "-lm"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    os.replace(partial, library)


def missing() -> dict[str, str]:
    """Libraries asked for that could not be had, with the reason."""
    return dict(_missing)


_missing: dict[str, str] = {}


def describe() -> dict[str, str]:
    """The compiler, and for each source whether its library is there; compiles what has not been compiled."""
    cc = compiler()
    found = {"compiler": ""}
    if cc is not None:
        found["compiler"] = (_version(cc).splitlines() or [""])[0]
    for source in sorted(source_folder().glob("*.c")):
        there = load(source.stem) is not None
        found[source.stem] = f"compiled {_key(source, str(cc))}" if there else f"not compiled: {_missing[source.stem]}"
    return found


@cache
def _version(cc: str) -> str:
    """What the compiler says it is; asked once, not for each of a dozen libraries."""
    return subprocess.run([cc, "--version"], capture_output=True, text=True, timeout=60).stdout


def _key(source: Path, cc: str) -> str:
    digest = hashlib.sha256()
    for header in sorted(source.parent.glob("*.h")):
        digest.update(header.read_bytes())
    digest.update(source.read_bytes())
    digest.update(" ".join(FLAGS).encode())
    digest.update(_version(cc).encode())
    digest.update(_cpu_features())
    return digest.hexdigest()[:20]


def _cpu_features() -> bytes:
    """The CPU's instruction sets: -march=native code for one node may not run on another."""
    try:
        with open("/proc/cpuinfo", "rb") as file:
            return next((line for line in file if line.startswith((b"flags", b"Features"))), b"")
    except OSError:
        return os.uname().machine.encode()


if __name__ == "__main__":                    # make native
    for path in sorted(source_folder().glob("*.c")):
        print(f"{path.name}: {'compiled' if load(path.stem) else missing()[path.stem]}")
