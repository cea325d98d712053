"""Finds the C sources in ``native/``, compiles each once into the private cache, and loads it.

A library is keyed by its source, the compiler's version and the CPU's features, so one cache folder serves a cluster
of different nodes. The first rank of a node compiles while the others wait (`cache.one_at_a_time`).
Without a compiler every kernel has a stand-in, so `load` answers None and says so once, in `missing()`. So it does where
the cache folder takes no file: a cache is never what ends a run; and where $MPITRAIN_KERNELS wants no C.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.backend.cache import cache_folder, one_at_a_time
from mpitrain.backend.cpu import cpu_flags
from mpitrain.errors import ConfigError, nearest, text_of

# -ffp-contract=off: a fused multiply-add rounds once instead of twice, so bits would depend on what the compiler fused.
# Where a source asks for fusing, all of it: tuned for some CPUs, as AMD's, GCC leaves out chains of fused vectors of 256 bits,
# but not in each of the loops that are to give the same sums. (Clang takes the parameter, and does without.)
# Never -ffast-math when linking: its start-up code flushes denormal numbers for the whole process.
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared", "-ffp-contract=off", "--param=avoid-fma-max-bits=0",
         "-fno-math-errno", "-fno-trapping-math")
HASH = hashlib.sha256().digest_size               # Each library ends with a hash of so many bytes.
ROOM = 768 << 10                                  # The largest library, product.c's, takes 520 KB (2026-11).


def source_folder() -> Path:
    """``native/`` of the checkout, or the copy that an installed wheel carries."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "native"
    return installed if installed.is_dir() else package.parent / "native"


@cache
def compiler() -> tuple[str, ...] | None:
    """The C compiler's command: $CC, which may have arguments ("ccache gcc"), cc, gcc or clang; None where there is none, or
    $MPITRAIN_KERNELS wants none used.
    """
    if wanted() in ("numba", "numpy"):
        return None
    for words in (_words(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]):
        found = words and shutil.which(words[0])
        if found:
            return found, *words[1:]
    return None


def _words(command: str) -> list[str]:
    """As a shell splits them; a command with an open quote is no command there either."""
    try:
        return shlex.split(command)
    except ValueError:
        return []


class Obstacle(NamedTuple):
    """Why a library could not be had, and what to change."""

    reason: str
    cure: str


NO_COMPILER = Obstacle("no C compiler (cc, gcc or clang)", "install one, or set CC to its command")
VARIABLE, KINDS = "MPITRAIN_KERNELS", ("c", "numba", "numpy")


@cache
def wanted() -> str:
    """What $MPITRAIN_KERNELS asks for: "c", "numba" or "numpy"; "" where it is not set. ConfigError for another word."""
    word = os.environ.get(VARIABLE, "")
    if word not in ("", *KINDS):
        raise ConfigError(f'{VARIABLE} is "{word}"{nearest(word, KINDS)}')
    return word


@cache
def load(name: str) -> ctypes.CDLL | None:
    """The library compiled from ``native/<name>.c``; None without a compiler or a place to keep it, or where compiling fails.

    ConfigError where it fails and MPITRAIN_KERNELS=c wants nothing else.
    """
    found = _load(name)
    if found is None and wanted() == "c":
        reason, cure = _missing[name]
        raise ConfigError(f"{VARIABLE}=c, but {reason}; {cure}, or unset {VARIABLE}")
    return found


def _load(name: str) -> ctypes.CDLL | None:
    source = source_folder() / f"{name}.c"
    cc = compiler()
    if cc is None or not source.is_file():
        why = NO_COMPILER if wanted() in ("", "c") else Obstacle(f"{VARIABLE}={wanted()}", "unset it")
        _missing[name] = why if cc is None else Obstacle(f"no source {source}", "install mpitrain anew")
        return None
    folder = None
    try:
        folder = cache_folder()
        library = folder / f"{name}-{_key(source, cc)}.so"
        if not whole(library):
            with one_at_a_time(name):             # The ranks of a node start together and share its cores.
                if not whole(library):
                    compile_library(source, library, cc)
        return ctypes.CDLL(str(library))
    except CompilerError as error:
        _missing[name] = Obstacle(f"the C compiler {shlex.join(cc)} fails: {error}", "make it work, or set CC to one that does")
    except OSError as error:
        _missing[name] = Obstacle(f"the cache folder {folder or ''} cannot be used: {error.strerror or text_of(error)}",
                                  "make room there, or set MPITRAIN_CACHE_DIR to another folder")
    return None


class CompilerError(Exception):
    """The compiler cannot be started, or refuses, or has nowhere to write to; the text says why, in a line."""


def _run(command: Sequence[str], timeout: float) -> str:
    """What it prints."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=timeout).stdout
    except subprocess.CalledProcessError as error:
        lines = [line.strip() for line in error.stderr.splitlines() if line.strip()]
        said = next((line for line in lines if "error" in line), lines[-1] if lines else f"exit status {error.returncode}")
        raise CompilerError(said) from error
    except (OSError, subprocess.SubprocessError) as error:
        raise CompilerError(text_of(error)) from error


class Method(ctypes.Structure):
    """Python's PyMethodDef."""

    _fields_ = [("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p)]


NOARGS, FASTCALL = 0x04, 0x80                     # PyMethodDef's flags: f(self, NULL); f(self, arguments, their number)
_kept: list[Method] = []


def builtin(function: Any, flags: int) -> Callable[[Any], Callable[..., Any]]:
    """Makes a C function a builtin of this interpreter, called in 0.1 us; by way of ctypes it took 1 to 4.

    What comes back takes the object that the C function gets as its `self`, and gives the builtin for it. The C function takes
    and returns Python objects as any builtin does.
    """
    method = Method(function.__name__.encode(), ctypes.cast(function, ctypes.c_void_p).value, flags, None)
    _kept.append(method)                          # The builtins point to the method.
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p]
    return lambda bound: make(ctypes.addressof(method), bound, None)


def compile_library(source: Path, library: Path, cc: Sequence[str]) -> None:
    """Compiles and puts the result in place whole, with its hash at the end; OSError where `library`'s folder cannot take it.

    Room is taken first: in a full folder nobody compiles for nothing, at each start. The compiler writes elsewhere, so that what
    it fails of is told from what the folder fails of.
    """
    handle, partial = tempfile.mkstemp(".tmp", f"{library.stem}.", library.parent)
    try:
        with open(handle, "wb") as file:
            file.write(bytes(ROOM))
            file.flush()
            code = _compiled(source, cc)
            file.seek(0)
            file.write(code + hashlib.sha256(code).digest())
            file.truncate()
            file.flush()
            os.fsync(file.fileno())               # A power cut may otherwise leave the name without its content.
        os.replace(partial, library)
    except BaseException:
        os.unlink(partial)
        raise


def _compiled(source: Path, cc: Sequence[str]) -> bytes:
    try:
        with tempfile.TemporaryDirectory(prefix="mpitrain-") as folder:
            made = Path(folder) / f"{source.stem}.so"
            _run([*cc, *FLAGS, "-o", str(made), str(source), "-lm"], timeout=300)
            return made.read_bytes()
    except OSError as error:                      # The temporary folder is full, or the compiler succeeded and made nothing.
        raise CompilerError(text_of(error)) from error


def whole(library: Path) -> bool:
    """Whether the file is as `compile_library` left it. To load one that was cut off ends the process, with SIGBUS."""
    try:
        content = library.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-HASH]).digest() == content[-HASH:]


def missing() -> dict[str, str]:
    """Libraries asked for that could not be had, with the reason."""
    return {name: obstacle.reason for name, obstacle in _missing.items()}


def obstacle() -> Obstacle | None:
    """What kept the first library that could not be had from being there."""
    return next(iter(_missing.values()), None)


_missing: dict[str, Obstacle] = {}


def describe() -> dict[str, str]:
    """The compiler, and for each source whether its library is there; compiles what has not been compiled."""
    cc = compiler()
    found = {"compiler": ""}
    if cc is not None:
        found["compiler"] = (_version(cc).splitlines() or [""])[0]
    for source in sorted(source_folder().glob("*.c")):
        if load(source.stem) is not None and cc is not None:
            found[source.stem] = f"compiled {_key(source, cc)}"
        else:
            found[source.stem] = f"not compiled: {_missing[source.stem].reason}"
    return found


@cache
def _version(cc: tuple[str, ...]) -> str:
    """What the compiler says it is; asked once, not for each of a dozen libraries."""
    try:
        return _run([*cc, "--version"], timeout=60)
    except CompilerError:                         # The compiler cannot say its version; it may compile all the same.
        return ""


@cache
def _headers(folder: Path) -> hashlib._Hash:
    """Of their bytes; read once, not for each of the sources: 60 files, 1 ms."""
    return hashlib.sha256(b"".join(header.read_bytes() for header in sorted(folder.glob("*.h"))))


def _key(source: Path, cc: tuple[str, ...]) -> str:
    digest = _headers(source.parent).copy()
    digest.update(source.read_bytes())
    digest.update(" ".join([*cc[1:], *FLAGS]).encode())
    digest.update(_version(cc).encode())
    digest.update(" ".join([os.uname().machine, *sorted(cpu_flags())]).encode())     # -march=native code is not for every node.
    return digest.hexdigest()[:20]


if __name__ == "__main__":                    # make native
    for path in sorted(source_folder().glob("*.c")):
        print(f"{path.name}: {'compiled' if load(path.stem) else missing()[path.stem]}")
