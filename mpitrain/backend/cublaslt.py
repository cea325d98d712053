"""Matrix products by cuBLASLt, called through ctypes with a handle, a workspace and descriptors of our own.

CuPy's own products cannot be captured in a graph, copy operands with gaps, and take no batches of bfloat16; see
https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api for what is called here.

cuBLASLt takes matrices by columns. One that is stored by rows is, read by columns, its transpose; and out' = y' x' is the product
of the transposes in the other order. So y is its first operand and x the second, and nothing is copied:

    here, by rows          cuBLASLt, by columns
    out (m, n) = x y       D (n, m) = op(A) op(B)       A is the memory of y, op: transpose where y is stored transposed
    bias (n,) to each row  to each column               B is the memory of x, likewise

No part of this file needs CuPy: memory comes as addresses, and the stream as a handle.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import byref, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from mpitrain.backend.runtime import Operand, ProductForm

WORKSPACE = 32 << 20                         # bytes a stream: what NVIDIA says to give on Hopper
MAJORS = (13, 12)                            # of cuBLAS, whose interface is the same here

# Values of enums in library_types.h, cublas_api.h and cublasLt.h (12.9, the same in 13.0).
OK, NOT_SUPPORTED = 0, 15
DATA = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14, "tf32": 0}
COMPUTE = {"float32": 68, "float16": 68, "bfloat16": 68, "float64": 70, "tf32": 77}
TRANSA, TRANSB, EPILOGUE, BIAS_POINTER = 3, 4, 7, 8                          # of products
BATCH_COUNT, BATCH_STEP = 5, 6                                               # of layouts
MOST_BYTES, ALIGNMENTS = 1, (5, 6, 7, 8)                                     # of preferences
EPILOGUES = {("", False): 1, ("bias", True): 4,
             ("gelu_tanh", False): 32, ("gelu_tanh", True): 36,              # cuBLASLt's GELU is the one by tanh
             ("row_sums", True): 512}                                        # BGRADB: sums of B over the dim that is summed

P = ctypes.POINTER(c_void_p)
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cublasLtCreate": (P,),
    "cublasLtMatmulDescCreate": (P, c_int, c_int),
    "cublasLtMatmulDescSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatrixLayoutCreate": (P, c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatrixLayoutSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulPreferenceCreate": (P,),
    "cublasLtMatmulPreferenceSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulPreferenceDestroy": (c_void_p,),
    "cublasLtMatmulAlgoGetHeuristic": (*(c_void_p,) * 7, c_int, c_void_p, c_void_p),
    "cublasLtMatmul": (*(c_void_p,) * 14, c_size_t, c_void_p),
}


class Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t; `algorithm` is its first member."""

    _fields_ = (("algorithm", c_uint64 * 8), ("workspace", c_size_t), ("state", c_int), ("waves", c_float),
                ("reserved", c_int * 4))


class Plan(NamedTuple):
    product: c_void_p
    a: c_void_p
    b: c_void_p
    d: c_void_p
    found: Found


class CublasLt:
    """Products on one device. `library` is what `load` found; descriptors live as long as the process, a few for each form."""

    def __init__(self, library: Any):
        self._library = library
        for name, types in FUNCTIONS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, c_int
        self._lock = Lock()
        self._plans: dict[tuple[ProductForm, tuple[int, ...]], Plan | None] = {}
        self._handle = self._made("cublasLtCreate")

    def run(self, form: ProductForm, addresses: tuple[int, int, int, int], alpha: float, beta: float, stream: int,
            workspace: int) -> bool:
        """Launches a product of matrices at the addresses of x, y, out and bias (0 for none); False where cuBLASLt says that it
        has none for this form. `workspace` is the address of WORKSPACE bytes, which nobody else uses on this stream."""
        x, y, out, bias = addresses
        key = form, tuple([address & -address & 255 or 256 for address in addresses])
        with self._lock:                                     # the address of the bias is set in the plan itself
            plan = self._plans[key] if key in self._plans else self._plans.setdefault(key, self._plan(form, key[1]))
            if plan is None:
                return False
            if bias:
                self._set("cublasLtMatmulDescSetAttribute", plan.product, BIAS_POINTER, c_uint64(bias))
            number = c_double if form.operands == "float64" else c_float
            self._call("cublasLtMatmul", self._handle, plan.product, byref(number(alpha)), y, plan.a, x, plan.b,
                       byref(number(beta)), out, plan.d, out, plan.d, byref(plan.found), workspace, WORKSPACE, stream)
        return True

    def _plan(self, form: ProductForm, alignments: tuple[int, ...]) -> Plan | None:
        """Descriptors and the algorithm: the first that the heuristic names, so that all ranks take the same one."""
        epilogue = EPILOGUES.get((form.ending, form.biased))
        if epilogue is None:
            return None
        x, y, operands, result = form.x, form.y, DATA[form.operands], DATA[form.result]
        factors = DATA["float64" if form.operands == "float64" else "float32"]
        product = self._made("cublasLtMatmulDescCreate", COMPUTE[form.operands], factors)
        for attribute, value in ((TRANSA, y.transposed), (TRANSB, x.transposed), (EPILOGUE, epilogue)):
            self._set("cublasLtMatmulDescSetAttribute", product, attribute, c_uint32(value))
        if form.biased:
            self._set("cublasLtMatmulDescSetAttribute", product, BIAS_POINTER, c_uint64(alignments[3]))    # only looked at
        a = self._layout(operands, *((form.k, form.n) if y.transposed else (form.n, form.k)), y, form.batch)
        b = self._layout(operands, *((form.m, form.k) if x.transposed else (form.k, form.m)), x, form.batch)
        d = self._layout(result, form.n, form.m, form.out, form.batch)
        preference, found, count = self._made("cublasLtMatmulPreferenceCreate"), Found(), c_int()
        self._set("cublasLtMatmulPreferenceSetAttribute", preference, MOST_BYTES, c_uint64(WORKSPACE))
        for attribute, place in zip(ALIGNMENTS, (1, 0, 2, 2)):
            self._set("cublasLtMatmulPreferenceSetAttribute", preference, attribute, c_uint32(alignments[place]))
        status = self._library.cublasLtMatmulAlgoGetHeuristic(self._handle, product, a, b, d, d, preference, 1, byref(found),
                                                              byref(count))
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        if status == NOT_SUPPORTED or (status == OK and (not count.value or found.state == NOT_SUPPORTED)):
            return None
        self._checked("cublasLtMatmulAlgoGetHeuristic", status or found.state)
        return Plan(product, a, b, d, found)

    def _layout(self, data: int, rows: int, columns: int, matrix: Operand, batch: int) -> c_void_p:
        """That of matrices by columns, each of `leading` numbers at least."""
        layout = self._made("cublasLtMatrixLayoutCreate", data, rows, columns, matrix.leading)
        if batch > 1:
            self._set("cublasLtMatrixLayoutSetAttribute", layout, BATCH_COUNT, c_int32(batch))
            self._set("cublasLtMatrixLayoutSetAttribute", layout, BATCH_STEP, c_int64(matrix.step))
        return layout

    def _made(self, name: str, *arguments: Any) -> c_void_p:
        made = c_void_p()
        self._call(name, byref(made), *arguments)
        return made

    def _set(self, name: str, of: c_void_p, attribute: int, value: Any) -> None:
        self._call(name, of, attribute, byref(value), sizeof(value))

    def _call(self, name: str, *arguments: Any) -> None:
        self._checked(name, getattr(self._library, name)(*arguments))

    def _checked(self, name: str, status: int) -> None:
        if status != OK:
            tell = self._library.cublasLtGetStatusName
            tell.argtypes, tell.restype = (c_int,), c_char_p
            raise RuntimeError(f"{name}: {(tell(status) or b'unknown status').decode()} ({status})")


def load() -> ctypes.CDLL | None:
    """cuBLASLt: that of NVIDIA's wheels, which CuPy's extra `ctk` brings, else the system's; None where there is none."""
    for path in (*_of_wheels(), *(f"libcublasLt.so.{major}" for major in MAJORS)):
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            continue
    return None


def _of_wheels() -> Iterator[Path]:
    found = find_spec("nvidia")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        for major in MAJORS:
            for place in (f"cu{major}", "cublas"):
                yield from Path(folder, place, "lib").glob(f"libcublasLt.so.{major}")
