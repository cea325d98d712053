"""Compiles the kernels of ``native/device`` to machine code of GPUs, on any machine: NVRTC needs no GPU and no driver.

    python -m mpitrain.backend.cubins [sm_90 ...]        # registers, shared memory, stack and spills of each kernel
    python -m mpitrain.backend.cubins --table FILE       # registers alone, as tests/kernels/registers.json has them

Needs ``pip install mpitrain[cuda-build]``. What runs on a GPU is compiled where it runs (`mpitrain.backend.cuda`), with the same
options, and kept in the private cache under a `version` of all that it is made of.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from mpitrain.backend.cache import one_at_a_time
from mpitrain.backend.runtime import device_folder
from mpitrain.errors import text_of

OPTIONS = ("--std=c++17", "--fmad=false")
"""A product and a sum are fused where a source says `fmaf`, and nowhere else, so that bits are the host's."""

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")               # A100; H100 and H200; B200


class Resources(NamedTuple):
    """What a kernel takes of a multiprocessor: registers of a thread, bytes of a block's shared memory (known when compiled), and
    bytes of a thread's stack and of registers that did not fit, each of which is slow memory."""

    registers: int
    shared: int
    stack: int
    spilled: int


class CompilationError(Exception):
    """NVRTC refuses a source; the text is its log."""


def version(source: Path, *made_by: object) -> str:
    """Names what is compiled of a source by what is in it and the folder's headers, the options, and who compiles for whom."""
    texts = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h")))]
    return hashlib.sha256(b"\0".join((*texts, repr((OPTIONS, *made_by)).encode()))).hexdigest()[:32]


def keep(file: Path, make: Callable[[], bytes], wait: float | None = None) -> bytes | None:
    """Puts a cubin there, unless it is there. One process makes it; others wait for it or, with `wait` 0, leave it to that one.
    Where it cannot be written (the folder is full, say): the cubin itself, and a warning, once; each start compiles then."""
    if file.exists():
        return None
    with one_at_a_time(file.name, wait) as mine:
        if file.exists() or not (mine or wait != 0):
            return None
        made, new = make(), file.with_suffix(f".{os.getpid()}-{os.urandom(4).hex()}")        # containers have equal numbers
        try:
            new.write_bytes(made)
            new.replace(file)
        except OSError as error:
            with suppress(OSError):
                new.unlink(missing_ok=True)
            _warn(f"compiled kernels cannot be kept in {file.parent} ({text_of(error)}), so each start compiles them; make room "
                  "there, or set MPITRAIN_CACHE_DIR")
            return made
    return None


@cache
def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def compiled(source: Path, architecture: str) -> tuple[bytes, dict[str, Resources], list[str]]:
    """(the cubin, the resources of each kernel by name, warnings)."""
    from cuda.bindings import nvrtc
    error, program = nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), 0, [], [])
    options = [option.encode() for option in (*OPTIONS, f"-I{source.parent}", f"--gpu-architecture={architecture}",
                                              "--ptxas-options=-v")]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    text = log.rstrip(b"\0").decode(errors="replace")
    if int(error):
        raise CompilationError(f"{source.name}, {architecture}: {text}")
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    cubin = bytearray(size)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin), resources_of(text), [line for line in text.splitlines() if "warning" in line.lower()]


def resources_of(log: str) -> dict[str, Resources]:
    """What ptxas says with ``-v`` of each kernel."""
    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        name = part.partition("'")[0]
        numbers = {key: int(match[1]) if (match := re.search(pattern, part)) else 0
                   for key, pattern in (("registers", r"Used (\d+) registers"), ("shared", r"(\d+) bytes smem"),
                                        ("stack", r"(\d+) bytes stack frame"))}
        spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", part.split("Compiling entry")[0]))
        found[name] = Resources(**numbers, spilled=spilled)
    return found


def table(architecture: str = "sm_90") -> dict[str, int]:
    """The registers of each kernel, the most of its formats; tests allow no more than the last table that was committed."""
    found: dict[str, int] = {}
    for source in sorted(device_folder().glob("*.cu")):
        for name, used in compiled(source, architecture)[1].items():
            plain = re.sub(r"_(float32|float64|bfloat16|float16)$", "", name)
            found[plain] = max(found.get(plain, 0), used.registers)
    return dict(sorted(found.items()))


def main(architectures: list[str]) -> int:
    if architectures[:1] == ["--table"]:
        Path(architectures[1]).write_text(json.dumps(table(), indent=0) + "\n")
        return 0
    failed = 0
    for source in sorted(device_folder().glob("*.cu")):
        for architecture in architectures or ARCHITECTURES:
            try:
                _, kernels, warnings = compiled(source, architecture)
            except CompilationError as error:
                print(error)
                failed = 1
                continue
            for warning in warnings:
                print(warning)
            for name, used in sorted(kernels.items()):
                bad = used.stack or used.spilled
                failed |= bool(bad)
                print(f"{architecture:7} {source.stem:14} {name:40} {used.registers:3} registers {used.shared:6} bytes shared"
                      + (f"  {used.stack} bytes of stack, {used.spilled} spilled" if bad else ""))
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
