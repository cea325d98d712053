"""Checks that BLAS runs as fast as it could here. No setting is changed: it is the user's.

NumPy's OpenBLAS does 240 GFLOP/s on a core with AVX-512 and half of that where OPENBLAS_CORETYPE=Haswell is exported
(two-core Zen 5, 2026-11); the loss goes unnoticed, since results are as right as before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SETS = ("SSE", "AVX", "AVX2", "AVX-512")
NEEDS = ((3, {"avx512f", "avx512dq", "avx512bw", "avx512vl"}), (2, {"avx2", "fma"}), (1, {"avx"}), (0, {"sse2"}))

# The architectures as threadpoolctl names them: OpenBLAS's core types and BLIS's sub-configurations -> an index in SETS.
ARCHITECTURES = {
    3: ("skylakex", "cooperlake", "sapphirerapids", "skx", "knl", "zen4", "zen5"),
    2: ("haswell", "zen", "excavator", "zen2", "zen3"),
    1: ("sandybridge", "bulldozer", "piledriver", "steamroller"),
    0: ("katmai", "coppermine", "northwood", "prescott", "banias", "atom", "core2", "penryn", "dunnington", "nehalem", "athlon",
        "opteron", "opteron_sse3", "barcelona", "bobcat", "nano", "generic"),
}
BY_NAME = {name: level for level, names in ARCHITECTURES.items() for name in names}
FORCED_BY = {"openblas": "OPENBLAS_CORETYPE", "blis": "BLIS_ARCH_TYPE"}
BEST = {"openblas": ("Prescott", "Sandybridge", "Haswell", "SkylakeX"), "blis": ("generic", "sandybridge", "haswell", "skx")}
MKL = {"SSE2": 0, "SSE3": 0, "SSSE3": 0, "SSE4_1": 0, "SSE4_2": 0, "COMPATIBLE": 0, "AVX": 1, "AVX2": 2, "AVX2_E1": 2}


def wrong_kernels(libraries: Sequence[Mapping[str, Any]], flags: frozenset[str], environment: Mapping[str, str],
                  vendor: str = "") -> str:
    """A one-line warning, with the cure, about the first of threadpoolctl's `libraries` that is slower than it could be.

    The text is "" if none is, or if it cannot be known: another CPU than x86, a core type not named here. `flags` and
    `vendor` describe the CPU.
    """
    best = next((level for level, needed in NEEDS if needed <= flags), -1)
    for library in libraries:
        api, text = library.get("internal_api", ""), ""
        if api == "mkl":
            text = _mkl(best, environment, vendor)
        elif api in FORCED_BY:
            text = _by_architecture(library, api, best, environment)
        if text:
            return text
    return ""


def _by_architecture(library: Mapping[str, Any], api: str, best: int, environment: Mapping[str, str]) -> str:
    name = library.get("architecture") or ""
    level = BY_NAME.get(name.lower())
    if level is None or level >= best:
        return ""
    what = f'{api} runs on kernels for {SETS[level]} ("{name}"), this CPU has {SETS[best]}: '
    variable = FORCED_BY[api]
    if environment.get(variable):
        return f"{what}{variable}={environment[variable]} is set; unset it and products of matrices get faster"
    version = library.get("version") or "of unknown version"
    return f"{what}{api} {version} does not know it; set {variable}={BEST[api][best]}, or install a newer NumPy"


def _mkl(best: int, environment: Mapping[str, str], vendor: str) -> str:
    for variable in ("MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR"):
        value = environment.get(variable, "")
        level = MKL.get(value.upper().partition(",")[0].removeprefix("BRANCH="))
        if level is not None and level < best:
            return (f"mkl runs on kernels for {SETS[level]}, this CPU has {SETS[best]}: {variable}={value} is set; unset it and "
                    "products of matrices get faster")
    if vendor == "AuthenticAMD" and best == len(SETS) - 1:
        return (f"mkl keeps its kernels for {SETS[best]} for other makers' CPUs; install NumPy from PyPI, whose OpenBLAS uses "
                "them here")
    return ""
