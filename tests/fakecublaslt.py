"""A stand-in for cuBLASLt: C functions that keep what descriptors are told, and multiply by columns, as its manual says.

It knows nothing of `mpitrain.backend.cublaslt`: argument types and enum values are written down here again, from cublasLt.h, and
matrices are read by columns, number (i, j) at i + j ld. Addresses are those of the host.
"""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, c_double, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any

import ml_dtypes
import numpy as np

CUDA_R = {0: np.float32, 1: np.float64, 2: np.float16, 14: ml_dtypes.bfloat16}
CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_64F, CUBLAS_COMPUTE_32F_FAST_TF32 = 68, 70, 77
DESC_SIZES = {3: 4, 4: 4, 7: 4, 8: 8}                             # transa, transb, epilogue, bias pointer
LAYOUT_SIZES = {5: 4, 6: 8}                                       # batch count, strided batch offset
PREF_SIZES = {1: 8, 5: 4, 6: 4, 7: 4, 8: 4}                       # workspace, alignments of A, B, C, D
EPILOGUE_DEFAULT, EPILOGUE_BIAS, EPILOGUE_GELU, EPILOGUE_GELU_BIAS, EPILOGUE_BGRADB = 1, 4, 32, 36, 512
INVALID_VALUE, NOT_SUPPORTED = 7, 15
NAMES = {7: ctypes.create_string_buffer(b"CUBLAS_STATUS_INVALID_VALUE")}
RESULT_BYTES, STATE_AT = 64 + 8 + 4 + 4 + 16, 72                  # cublasLtMatmulHeuristicResult_t


class FakeCublasLt:
    """`calls` has the names in order; `unsupported` epilogues have no algorithm; `statuses` are answered instead, by name."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.unsupported: set[int] = set()
        self.statuses: dict[str, int] = {}
        self.objects: dict[int, dict[str, Any]] = {}
        self.alignments: list[dict[int, int]] = []
        self.launches: list[tuple[int, int, int]] = []             # (stream, workspace, its bytes)
        P = c_void_p
        for name, types, function in (
                ("cublasLtCreate", (P,), lambda to: self._new(to, kind="handle")),
                ("cublasLtMatmulDescCreate", (P, c_int, c_int),
                 lambda to, compute, scale: self._new(to, kind="desc", compute=compute, scale=scale)),
                ("cublasLtMatmulDescSetAttribute", (P, c_int, P, c_size_t), lambda *given: self._set("desc", DESC_SIZES, *given)),
                ("cublasLtMatrixLayoutCreate", (P, c_int, c_uint64, c_uint64, c_int64),
                 lambda to, dtype, rows, columns, ld: self._new(
                     to, kind="layout", dtype=dtype, rows=rows, columns=columns, ld=ld)),
                ("cublasLtMatrixLayoutSetAttribute", (P, c_int, P, c_size_t),
                 lambda *given: self._set("layout", LAYOUT_SIZES, *given)),
                ("cublasLtMatmulPreferenceCreate", (P,), lambda to: self._new(to, kind="pref")),
                ("cublasLtMatmulPreferenceSetAttribute", (P, c_int, P, c_size_t),
                 lambda *given: self._set("pref", PREF_SIZES, *given)),
                ("cublasLtMatmulPreferenceDestroy", (P,), lambda at: 0 if self.objects.pop(at) else 0),
                ("cublasLtMatmulAlgoGetHeuristic", (*(P,) * 7, c_int, P, P), self._heuristic),
                ("cublasLtMatmul", (*(P,) * 14, c_size_t, P), self._matmul)):
            setattr(self, name, CFUNCTYPE(c_int, *types)(self._counted(name, function)))
        self.cublasLtGetStatusName = CFUNCTYPE(c_void_p, c_int)(lambda status: ctypes.addressof(NAMES[status]))

    def _counted(self, name: str, function: Any) -> Any:
        def call(*given: Any) -> int:
            self.calls.append(name)
            return self.statuses[name] if name in self.statuses else function(*given)
        return call

    def _new(self, to: int, **what: Any) -> int:
        made = 0x1000 + 16 * len(self.calls)
        self.objects[made] = {**what, "attributes": {}}
        c_void_p.from_address(to).value = made
        return 0

    def _set(self, kind: str, sizes: dict[int, int], of: int, attribute: int, at: int, size: int) -> int:
        if self.objects[of]["kind"] != kind or sizes.get(attribute) != size:
            return INVALID_VALUE
        self.objects[of]["attributes"][attribute] = int.from_bytes(ctypes.string_at(at, size), "little")
        return 0

    def _heuristic(self, handle: int, desc: int, a: int, b: int, c: int, d: int, preference: int, asked: int, results: int,
                   count: int) -> int:
        assert self.objects[handle]["kind"] == "handle" and asked == 1 and c == d
        self.alignments.append({k: v for k, v in self.objects[preference]["attributes"].items() if k > 1})
        if self.objects[desc]["attributes"][7] in self.unsupported:
            return NOT_SUPPORTED
        ctypes.memset(results, 0x5A, STATE_AT)
        ctypes.memset(results + STATE_AT, 0, RESULT_BYTES - STATE_AT)
        c_int.from_address(count).value = 1
        return 0

    def _matmul(self, handle: int, desc: int, alpha: int, a: int, a_layout: int, b: int, b_layout: int, beta: int, c: int,
                c_layout: int, d: int, d_layout: int, algorithm: int, workspace: int, workspace_bytes: int,
                stream: int | None) -> int:
        assert ctypes.string_at(algorithm, 64) == b"\x5a" * 64 and c == d and c_layout == d_layout
        of = self.objects[desc]
        attributes = of["attributes"]
        number, c_number = (np.float64, c_double) if of["compute"] == CUBLAS_COMPUTE_64F else (np.float32, c_float)
        assert of["compute"] in (CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_64F, CUBLAS_COMPUTE_32F_FAST_TF32)
        assert of["scale"] == (1 if of["compute"] == CUBLAS_COMPUTE_64F else 0)
        factor, rest = (c_number.from_address(at).value for at in (alpha, beta))
        left, right, out = (self._matrices(*given) for given in ((a, a_layout), (b, b_layout), (d, d_layout)))
        left = left.swapaxes(1, 2) if attributes.get(3) else left
        right = right.swapaxes(1, 2) if attributes.get(4) else right
        result = factor * (left.astype(number) @ right.astype(number)).astype("float64")
        if rest:
            result += rest * out.astype("float64")
        epilogue = attributes[7]
        if epilogue in (EPILOGUE_BIAS, EPILOGUE_GELU_BIAS):        # a number for each row
            result += vector(attributes[8], out.dtype, out.shape[1])[:, None].astype("float64")
        if epilogue in (EPILOGUE_GELU, EPILOGUE_GELU_BIAS):
            result = 0.5 * result * (1 + np.tanh(np.sqrt(2 / np.pi) * (result + 0.044715 * result ** 3)))
        if epilogue == EPILOGUE_BGRADB:                            # a number for each column, sums over "k"
            vector(attributes[8], out.dtype, out.shape[2])[...] = right[0].astype(number).sum(axis=0)
        out[...] = result
        self.launches.append((stream or 0, workspace, workspace_bytes))
        return 0

    def _matrices(self, at: int, layout: int) -> np.ndarray:
        """(batch, rows, columns) at an address, stored by columns."""
        of = self.objects[layout]
        batch, step = of["attributes"].get(5, 1), of["attributes"].get(6, 0)
        assert of["ld"] >= of["rows"]
        dtype = np.dtype(CUDA_R[of["dtype"]])
        size = (batch - 1) * step + (of["columns"] - 1) * of["ld"] + of["rows"]
        strides = tuple(dtype.itemsize * s for s in (step, 1, of["ld"]))
        return np.lib.stride_tricks.as_strided(vector(at, dtype, size), (batch, of["rows"], of["columns"]), strides)


def vector(at: int, dtype: Any, size: int) -> np.ndarray:
    dtype = np.dtype(dtype)
    return np.frombuffer((ctypes.c_char * (size * dtype.itemsize)).from_address(at), dtype)
