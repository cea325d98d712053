"""Whether a run notices that BLAS computes with slower kernels than the CPU has, and leaves the user's choice alone."""

from __future__ import annotations

import os
from typing import Any

import pytest
from runs import record, train, write

from mpitrain.backend.cpu import cpu_flags
from mpitrain.run.session import told_once
from mpitrain.train.machine.blas_kernels import NEEDS, wrong_kernels

AVX2 = frozenset({"sse2", "avx", "avx2", "fma"})
AVX512 = AVX2 | {"avx512f", "avx512dq", "avx512bw", "avx512vl"}


def openblas(architecture: str | None, version: str = "0.3.31") -> list[dict[str, Any]]:
    return [{"internal_api": "openmp", "num_threads": 1},
            {"internal_api": "openblas", "version": version, "architecture": architecture, "num_threads": 1}]


@pytest.mark.parametrize(("architecture", "flags"), [
    ("SkylakeX", AVX512), ("Cooperlake", AVX512), ("SapphireRapids", AVX512), ("Haswell", AVX2), ("Zen", AVX2),
    ("Zen", AVX2 - {"fma"}), ("SkylakeX", AVX2), ("neoversen1", frozenset({"asimd", "fphp"})), ("Unheard", AVX512),
    (None, AVX512), ("Haswell", AVX2 | {"avx512f"})])
def test_the_kernels_of_this_cpu_are_nothing_to_speak_of(architecture: str | None, flags: frozenset[str]) -> None:
    assert wrong_kernels(openblas(architecture), flags, {}) == ""


def test_a_forced_core_type_is_named_with_the_cure() -> None:
    assert wrong_kernels(openblas("Haswell"), AVX512, {"OPENBLAS_CORETYPE": "Haswell"}) == (
        'openblas runs on kernels for AVX2 ("Haswell"), this CPU has AVX-512: OPENBLAS_CORETYPE=Haswell is set; unset it and '
        "products of matrices get faster")
    said = wrong_kernels(openblas("Prescott"), AVX2, {"OPENBLAS_CORETYPE": "x"})
    assert 'kernels for SSE ("Prescott"), this CPU has AVX2:' in said


def test_a_build_that_misreads_the_cpu_is_named_with_its_version_and_the_cure() -> None:
    assert wrong_kernels(openblas("Zen", "0.3.20"), AVX512, {}) == (
        'openblas runs on kernels for AVX2 ("Zen"), this CPU has AVX-512: openblas 0.3.20 does not know it; set '
        "OPENBLAS_CORETYPE=SkylakeX, or install a newer NumPy")
    blis = [{"internal_api": "blis", "version": None, "architecture": "generic"}]
    assert wrong_kernels(blis, AVX2, {}).endswith(
        "blis of unknown version does not know it; set BLIS_ARCH_TYPE=haswell, or install a newer NumPy")
    zen3 = [{**blis[0], "architecture": "zen3"}]
    assert "BLIS_ARCH_TYPE=zen3 is set" in wrong_kernels(zen3, AVX512, {"BLIS_ARCH_TYPE": "zen3"})


@pytest.mark.parametrize(("variable", "value", "kernels"), [
    ("MKL_ENABLE_INSTRUCTIONS", "AVX2", "AVX2"), ("MKL_CBWR", "COMPATIBLE", "SSE"), ("MKL_CBWR", "AVX,STRICT", "AVX"),
    ("MKL_CBWR", "BRANCH=AVX2", "AVX2")])
def test_mkl_tells_no_architecture_so_its_settings_are_looked_at(variable: str, value: str, kernels: str) -> None:
    mkl = [{"internal_api": "mkl", "version": "2024.1"}]
    assert wrong_kernels(mkl, AVX512, {variable: value}, "GenuineIntel") == (
        f"mkl runs on kernels for {kernels}, this CPU has AVX-512: {variable}={value} is set; unset it and products of matrices "
        "get faster")
    for harmless in ({}, {"MKL_CBWR": "AUTO"}, {"MKL_ENABLE_INSTRUCTIONS": "AVX512"}):
        assert wrong_kernels(mkl, AVX512, harmless, "GenuineIntel") == ""


def test_mkl_on_another_maker_s_cpu_is_told() -> None:
    mkl = [{"internal_api": "mkl", "version": "2024.1"}]
    assert wrong_kernels(mkl, AVX512, {}, "AuthenticAMD").startswith("mkl keeps its kernels for AVX-512 for other makers' CPUs; ")
    assert wrong_kernels(mkl, AVX2, {}, "AuthenticAMD") == ""


def test_several_ranks_say_the_same_once_and_name_the_host_where_there_are_several() -> None:
    assert told_once([("a", ["x", ""]), ("a", ["x", "y"])]) == ["x", "y"]
    assert told_once([("a", ["", ""]), ("b", ["x", "on b"]), ("c", ["x", ""])]) == ["x (b)", "on b"]


@pytest.mark.skipif(not NEEDS[0][1] <= cpu_flags(), reason="a CPU without AVX-512: Haswell's kernels are as good as any here")
def test_a_run_under_a_forced_core_type_says_so_in_one_line_and_keeps_it(tmp_path) -> None:
    config = write(tmp_path)
    result = train(2, config, "train.steps=2", env={"OPENBLAS_CORETYPE": "Haswell"})
    assert result.rc == 0, result.err
    assert result.out.count("OPENBLAS_CORETYPE=Haswell is set; unset it") == 1
    libraries = record(tmp_path / "runs/run")["blas"]
    assert "Haswell" in [library.get("architecture") for library in libraries], "it was overridden"


@pytest.mark.skipif(bool(os.environ.get("OPENBLAS_CORETYPE")), reason="OPENBLAS_CORETYPE is set")
def test_a_run_with_nothing_forced_says_nothing(tmp_path) -> None:
    result = train(1, write(tmp_path), "train.steps=2", "train.threads=1")
    assert result.rc == 0, result.err
    assert "BLAS" not in result.out and "take turns" not in result.out
