"""Pieces of benchmarks/gpu.py that run tests on the GPU, and kernels under NVIDIA's compute-sanitizer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from gpu_tools import Bench, Record, piece

ROOT = Path(__file__).resolve().parents[1]
TOOLS = "memcheck", "racecheck", "initcheck"
# CuPy's pool gives out parts of larger blocks, so a kernel that writes behind an array would write to its neighbour unseen.
WITHOUT_POOL = "import sys, cupy, pytest; cupy.cuda.set_allocator(None); sys.exit(pytest.main(sys.argv[1:]))"
LIMIT = 540                                  # seconds: a piece is to end within ten minutes


def sanitizer() -> str | None:
    """compute-sanitizer: on PATH, or where toolkits of CUDA have it."""
    places = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin"), *sorted(Path("/usr/local").glob("cuda*/bin"))]
    there = (str(place / "compute-sanitizer") for place in places if (place / "compute-sanitizer").exists())
    return shutil.which("compute-sanitizer") or next(there, None)


def pytest_on_gpu(arguments: Sequence[str], before: Sequence[str] = (), code: Sequence[str] = ("-m", "pytest")) -> Record:
    """What pytest counts of tests marked gpu, and the lines that a tool around it prints."""
    began = time.perf_counter()
    command = [*before, sys.executable, *code, "-q", "-p", "no:cacheprovider", "-m", "gpu", *arguments]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_", "PMI_"))}
    try:
        out = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                             timeout=LIMIT).stdout
    except subprocess.TimeoutExpired as error:
        said = error.stdout or ""
        out = f"1 failed: not done after {LIMIT} s\n" + (said.decode(errors="replace") if isinstance(said, bytes) else said)
    found = {name: sum(map(int, re.findall(rf"(\d+) {name}", out))) for name in ("passed", "failed", "skipped", "error")}
    failed = found["failed"] + found["error"]
    if failed or not found["passed"]:
        sys.stderr.write(out[-4000:])
    errors = [int(n) for n in re.findall(r"(?:ERROR SUMMARY: |RACECHECK SUMMARY: )(\d+)", out)]
    return {"passed": found["passed"], "failed": failed, "skipped": found["skipped"], "seconds": time.perf_counter() - began,
            **({"errors": sum(errors) if errors else -1} if before else {})}


@piece("tests")
def tests(bench: Bench) -> Iterator[Record]:
    yield {"what": "make test-gpu", **pytest_on_gpu(bench.size(["tests"], ["tests/ops/test_rotary.py"]))}


@piece("kernel tests")
def kernel_tests(bench: Bench) -> Iterator[Record]:
    yield {"what": "tests of kernels", **pytest_on_gpu(bench.size(["tests/kernels"], ["tests/kernels/test_wire.py"]))}


def under(tool: str, bench: Bench) -> Iterator[Record]:
    """The tests of kernels under a tool of compute-sanitizer."""
    found = sanitizer()
    if found is None:
        yield {"what": tool, "missing": "compute-sanitizer"}
        return
    before = [found, "--tool", tool, "--target-processes", "application-only", "--error-exitcode", "9", "--print-limit", "20"]
    yield {"what": f"tests of kernels under {tool}",
           **pytest_on_gpu(["tests/kernels/test_device_kernels.py"], before, ("-c", WITHOUT_POOL))}


for _tool in TOOLS:
    piece(_tool)(partial(under, _tool))
