"""What the pieces of benchmarks/gpu.py share: times by events, sides in turns, what a step asks a device for, processes."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.backend import Device, asnumpy

ROUNDS = 3
Record = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """Where pieces run. `tiny` has problems of sizes at which only their code is tried, and no torch.compile."""

    device: Device
    torch: str                               # PyTorch's device: "cuda", or "cpu" where code is tried
    tiny: bool = False

    @property
    def xp(self) -> Any:
        return self.device.xp

    def size(self, full: Any, tiny: Any) -> Any:
        return tiny if self.tiny else full


Piece = Callable[[Bench], Iterator[Record]]
PIECES: dict[str, Piece] = {}
IN_RANKS: dict[str, Callable[[Bench, Any], Iterator[Record]]] = {}


def piece(name: str) -> Callable[[Piece], Piece]:
    def register(function: Piece) -> Piece:
        PIECES[name] = function
        return function
    return register


def in_ranks(name: str) -> Callable[[Any], Any]:
    """A piece of two ranks, which share the GPU: its records are those of rank 0."""
    def register(function: Any) -> Any:
        IN_RANKS[name] = function
        PIECES[name] = lambda bench: iter(child(bench, "--ranks-of", name, ranks=2))
        return function
    return register


def child(bench: Bench, *arguments: str, ranks: int = 0, env: Mapping[str, str] | None = None) -> list[Record]:
    """The records that this program prints when it is started again, by mpirun with `ranks`."""
    beside = Path(sys.executable).with_name("mpirun")
    launcher = [str(beside) if beside.exists() else shutil.which("mpirun") or "mpirun", "-n", str(ranks)] if ranks else []
    outer = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_", "PMI_"))}
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
               "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    command = [*launcher, sys.executable, os.path.abspath(sys.argv[0]), *arguments, *["--tiny"] * bench.tiny]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**outer, **allowed, **(env or {})})
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def seconds_of(bench: Bench, work: Callable[[], Any], least: float = 0.5) -> float:
    """Seconds of one call, by events around as many as take `least`."""
    cuda, least = bench.xp.cuda, bench.size(least, 0.0)
    work()
    bench.device.synchronize()
    began = time.perf_counter()
    work()
    bench.device.synchronize()
    count = max(1, min(1000, int(least / max(time.perf_counter() - began, 1e-6))))
    first, last = cuda.Event(), cuda.Event()
    first.record()
    for _ in range(count):
        work()
    last.record()
    last.synchronize()
    return float(cuda.get_elapsed_time(first, last)) / 1e3 / count


def in_turn(bench: Bench, sides: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Median seconds of each side over rounds in which they take turns."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(bench.size(ROUNDS, 1)):
        for name, work in sides.items():
            found[name].append(seconds_of(bench, work))
    return {name: statistics.median(times) for name, times in found.items()}


def drawn(bench: Bench, *shape: int, dtype: Any = "float32", seed: int = 0) -> Any:
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return bench.xp.asarray(values).astype(dtype)


def bfloat16() -> Any:
    import ml_dtypes
    return np.dtype(ml_dtypes.bfloat16)


def host(array: Any) -> Any:
    return asnumpy(array).astype("float64")


def distance(found: Any, wanted: Any) -> float:
    a, b = (np.asarray(x, np.float64) for x in (found, wanted))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def bandwidth_of(bench: Bench) -> float:
    """Bytes a second that a copy of 1 GiB reads and writes."""
    source = drawn(bench, bench.size(1 << 28, 1 << 10))
    target = bench.xp.empty_like(source)
    return 2 * source.nbytes / seconds_of(bench, lambda: bench.xp.copyto(target, source))


def asked_of(bench: Bench, work: Callable[[], Any]) -> Record:
    """What the process asks the device for while `work` runs, whoever asks: CUPTI tells, by PyTorch's profiler."""
    import torch
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA, kinds.CPU]) as profile:
        with torch.profiler.record_function("work of this step"):
            work()
        bench.device.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        return asked_in(json.loads(path.read_text()))


def asked_in(trace: Mapping[str, Any]) -> Record:
    """Launches, graphs, waits and bytes of a trace, of what the host asked for during "work of this step".

    Copies and kernels run later on the device; a number leads from each to the call that asked for it.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    span = next(event for event in events if event["name"] == "work of this step" and event.get("cat") == "user_annotation")
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")
             and span["ts"] <= event["ts"] < span["ts"] + span["dur"]]
    names = [event["name"] for event in calls]
    numbers = {event["args"]["correlation"] for event in calls if "correlation" in event.get("args", {})}
    copies = [event for event in events if event.get("cat") == "gpu_memcpy" and event["args"].get("correlation") in numbers]

    def nbytes(way: str) -> int:
        return sum(int(event["args"]["bytes"]) for event in copies if way in event["name"])
    return {"launches": sum("Launch" in name and "Kernel" in name for name in names),
            "graphs": sum("GraphLaunch" in name for name in names),
            "waits": sum(name.endswith(("StreamSynchronize", "DeviceSynchronize", "CtxSynchronize")) for name in names),
            "up": nbytes("HtoD"), "down": nbytes("DtoH")}
