"""benchmarks/gpu.py without a GPU: its table of bars, what it reads of a trace, and each of its pieces, tiny, on the stand-in."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from launch import ROOT, Job, clean_environment

PROGRAM = Path(__file__).with_name("gpu_program.py")
TORCH = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed (make bench-comm installs it)")
OF_TORCHVISION = {"resnet18 256", "resnet50 256"}                       # models whose other side is torchvision's
SAME_CODE = {"gpt2 64 x 1024", "gpt 1.5B", "resnet20 1024"}             # as others that are tried
NO_GPU = {"kernel tests"}                                               # a run of tests that are all skipped takes some seconds


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield import_module
    for name in set(sys.modules) - before:
        if name.startswith("gpu"):
            del sys.modules[name]


def test_each_bar_has_pieces_that_measure_it_and_a_table_says_what_was_met(scripts: Any) -> None:
    rows, gpu = scripts("gpu_rows"), scripts("gpu")
    assert list(rows.ROWS) == list(range(1, 24))
    assert {name for row in rows.ROWS.values() for name in row.pieces} | {"ceilings", "bench train"} == set(gpu.PIECES)
    found = [{"piece": "feed", "what": "", "of_resident": 1.01, "finite": True}, {"piece": "staged", "what": "", "exposed": 0.5},
             {"piece": "gpt2 16 x 1024", "of_compiled": 2.0}, {"piece": "memcheck", "missing": "compute-sanitizer"},
             {"piece": "racecheck", "missing": "compute-sanitizer"}, {"piece": "initcheck", "missing": "compute-sanitizer"}]
    said = {int(line.split("|")[1]): line for line in rows.table(found)[2:]}
    assert said[18].endswith("| of_resident 1.01; finite: True | met |") and said[21].endswith("| exposed 0.5 | missed |")
    assert said[9].endswith("|  | not measured |") and said[3].endswith("| compute-sanitizer is not installed | not measured |")


def test_a_trace_says_what_the_host_asked_for_during_a_step_whenever_the_device_did_it(scripts: Any) -> None:
    def event(name: str, kind: str, when: float, number: int = 0, **more: Any) -> dict[str, Any]:
        return {"ph": "X", "name": name, "cat": kind, "ts": when, "dur": 1.0, "args": {"correlation": number, **more}}
    trace = [{**event("work of this step", "user_annotation", 10.0), "dur": 10.0}, {"ph": "M", "name": "process_name"},
             event("cuLaunchKernel", "cuda_driver", 11.0, 1), event("cudaLaunchKernelExC", "cuda_runtime", 12.0, 2),
             event("cudaGraphLaunch", "cuda_runtime", 13.0, 3), event("cudaMemcpyAsync", "cuda_runtime", 14.0, 4),
             event("cudaMemcpyAsync", "cuda_runtime", 15.0, 5), event("cudaStreamSynchronize", "cuda_runtime", 16.0, 6),
             event("cuLaunchKernel", "cuda_driver", 9.0, 7), event("cudaDeviceSynchronize", "cuda_runtime", 25.0, 8),
             event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 30.0, 4, bytes=640),
             event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 31.0, 5, bytes=8),
             event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 15.0, 99, bytes=1)]
    found = scripts("gpu_tools").asked_in({"traceEvents": trace})
    assert found == {"launches": 2, "graphs": 1, "waits": 1, "up": 640, "down": 8}


@TORCH
@pytest.mark.slow
def test_every_piece_runs_on_the_stand_in_once_and_is_left_out_when_it_has_been(tmp_path: Path, scripts: Any) -> None:
    names = [name for name in scripts("gpu").PIECES if name not in OF_TORCHVISION | SAME_CODE | NO_GPU]
    command = [sys.executable, str(PROGRAM), "--tiny", "--seconds", "1000", "--json", "r.json", "--report", "table.md", *names]
    without_report = [word for word in command if word not in ("--report", "table.md")]
    env = {k: v for k, v in clean_environment().items() if not k.startswith("OPENBLAS_")}
    first = Job(without_report, env, tmp_path).finish(1000)
    assert first.rc == 0, first.out + first.err
    records = [json.loads(line) for line in (tmp_path / "r.json").read_text().splitlines()]
    assert {record["piece"] for record in records} == set(names)
    found = {record["piece"]: record for record in records}
    assert found["ipc"]["equal"] and "have one GPU" in found["ipc"]["refusal"]
    assert all(found["loss scale"][key] for key in ("skipped", "alike", "as_torch"))
    assert found["feed"]["finite"] and found["adamw"]["moved"] > 0.9
    assert all(record["distance"] < 1e-2 for record in records if "distance" in record)
    assert all(record["waits"] == 0 and 0 < record["up"] <= record["batch"] + 1024 for record in records if "waits" in record)
    again = Job(command, env, tmp_path).finish(60)
    assert again.rc == 0 and len((tmp_path / "r.json").read_text().splitlines()) == len(records), again.err
    assert (tmp_path / "table.md").read_text() in again.out
