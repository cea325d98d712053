"""Every kernel of native/device compiled to machine code of three generations of GPUs, without one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mpitrain.backend.compiling import SLOWEST
from mpitrain.backend.cubins import ARCHITECTURES, CompilationError, Resources, compiled, resources_of, version
from mpitrain.backend.runtime import device_folder

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda.bindings and NVRTC are not installed (mpitrain[cuda-build])",
                    exc_type=ImportError)
REGISTERS = json.loads(Path(__file__).with_name("registers.json").read_text())
SOURCES = sorted(path.stem for path in device_folder().glob("*.cu"))


@pytest.mark.parametrize("source", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOWEST))
                                    for name in SOURCES])
@pytest.mark.parametrize("architecture", [pytest.param(name, marks=[pytest.mark.slow] * (name != "sm_90"))
                                          for name in ARCHITECTURES])
def test_a_source_compiles_without_warnings_and_its_kernels_spill_nothing(source: str, architecture: str) -> None:
    cubin, kernels, warnings = compiled(device_folder() / f"{source}.cu", architecture)
    assert cubin[:4] == b"\x7fELF" and kernels and not warnings
    assert {name: used for name, used in kernels.items() if used.stack or used.spilled} == {}
    assert {name: used.shared for name, used in kernels.items() if used.shared > 48 << 10} == {}
    if architecture == "sm_90":
        more = {name: used.registers for name, used in kernels.items()
                if used.registers > REGISTERS.get(re.sub(r"_(float32|float64|bfloat16|float16)$", "", name), 0)}
        assert more == {}, "more registers than tests/kernels/registers.json allows, or a kernel that it lacks"


def test_a_source_that_is_wrong_is_refused_with_the_place(tmp_path: Path) -> None:
    source = tmp_path / "wrong.cu"
    source.write_text('extern "C" __global__ void f(float *x) { y[0] = 1; }')
    with pytest.raises(CompilationError, match=r'wrong.cu, sm_90: wrong.cu\(1\): error: identifier "y" is undefined'):
        compiled(source, "sm_90")


def test_stack_and_spills_are_read_off_the_log() -> None:
    log = """ptxas info    : Compiling entry function 'f' for 'sm_90'
ptxas info    : Function properties for f
ptxas         .     24 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 24 bytes cumulative stack size, 128 bytes smem
"""
    assert resources_of(log) == {"f": Resources(registers=40, shared=128, stack=24, spilled=20)}


def test_what_is_kept_of_a_source_has_another_name_once_a_header_changes(tmp_path: Path) -> None:
    """CuPy's own cache would go on with what it has compiled: it looks at the text of the source alone."""
    (tmp_path / "a.cu").write_text('#include "a.h"')
    (tmp_path / "a.h").write_text("one")
    before = version(tmp_path / "a.cu", "90")
    assert version(tmp_path / "a.cu", "90") == before != version(tmp_path / "a.cu", "80")
    (tmp_path / "a.h").write_text("two")
    assert version(tmp_path / "a.cu", "90") != before
