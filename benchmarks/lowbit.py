"""Products with weights in few bits: against our own in float32, and against ggml's of the same width. One thread.

    python benchmarks/lowbit.py [tokens|mlp|batches ...] [--ggml FOLDER] [--rounds 9] [--json FILE]

One token: all products of GPT-2's shape (12 layers of 768, 50,257 tokens) at one row, so 124 M weights are read; and of a GPT of
6 layers of 384. An MLP: 784-512-512-10 in batches of 64. Batches: single layers on 1 to 256 rows. Members take turns, A B A
B; a ratio is the median over rounds. FOLDER has libggml-base.so and libggml-cpu.so, built from ggml's sources for this CPU (cmake
-DGGML_NATIVE=ON -DGGML_OPENMP=OFF); its q8_0 and q4_0 make int8 of the row, too. Results are compared with the float products of
the same weights.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pinned  # noqa: F401  (first: it sets what NumPy reads)

# isort: split
import numpy as np

from mpitrain import models
from mpitrain.autograd import no_grad
from mpitrain.backend import keep_freed_memory
from mpitrain.kernels.product import product
from mpitrain.shrink.formats import FORMATS
from mpitrain.shrink.quantize import quantize

TOKENS = {"GPT-2 124M": [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12 + [(50257, 768)],
          "GPT 6 x 384": [(1152, 384), (384, 384), (1536, 384), (384, 1536)] * 6 + [(65, 384)]}
LAYERS = [(512, 784), (512, 512), (384, 384), (1152, 384), (1536, 384), (384, 1536), (3072, 768), (768, 3072)]
NAMES = ("int8", "int4", "int8-dynamic", "int4-dynamic")
TYPES = {"q8_0": (8, 34), "q4_0": (2, 18)}        # ggml's numbers of these types, and bytes of a block of 32


def in_turn(members: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each member in each round; the first two rounds are not counted."""
    found: dict[str, list[float]] = {name: [] for name in members}
    for round_ in range(rounds + 2):
        for name, run in members.items():
            began = time.perf_counter()
            run()
            if round_ > 1:
                found[name].append(time.perf_counter() - began)
    return found


def ratio(found: dict[str, list[float]], ours: str, theirs: str) -> float:
    return round(statistics.median(b / a for a, b in zip(found[ours], found[theirs], strict=True)), 2)


class Ggml:
    """A graph of products of one row of each width with all weights of a type, computed by ggml on one thread."""

    def __init__(self, folder: Path, kind: str, weights: list[np.ndarray], rows: dict[int, np.ndarray]):
        base = ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
        self.cpu, pointer, long = ctypes.CDLL(str(folder / "libggml-cpu.so")), ctypes.c_void_p, ctypes.c_int64
        for name, result, arguments in (
                ("ggml_init", pointer, [Parameters]), ("ggml_new_tensor_2d", pointer, [pointer, ctypes.c_int, long, long]),
                ("ggml_mul_mat", pointer, [pointer] * 3), ("ggml_new_graph", pointer, [pointer]),
                ("ggml_build_forward_expand", None, [pointer] * 2), ("ggml_get_data", pointer, [pointer]),
                ("ggml_quantize_chunk", ctypes.c_size_t, [ctypes.c_int, pointer, pointer, long, long, long, pointer])):
            function = getattr(base, name)
            function.restype, function.argtypes = result, arguments
        self.cpu.ggml_cpu_init()
        number, block = TYPES[kind]
        room = sum(w.size // 32 * block for w in weights) + (64 << 20)
        self.context = base.ggml_init(Parameters(room, None, False))
        self.graph, self.results = base.ggml_new_graph(self.context), []
        inputs = {}
        for k, row in rows.items():
            inputs[k] = base.ggml_new_tensor_2d(self.context, 0, k, 1)
            ctypes.memmove(base.ggml_get_data(inputs[k]), row.ctypes.data, row.nbytes)
        for w in weights:
            tensor = base.ggml_new_tensor_2d(self.context, number, w.shape[1], w.shape[0])
            base.ggml_quantize_chunk(number, w.ctypes.data, base.ggml_get_data(tensor), 0, w.shape[0], w.shape[1], None)
            made = base.ggml_mul_mat(self.context, tensor, inputs[w.shape[1]])
            base.ggml_build_forward_expand(self.graph, made)
            self.results.append((base.ggml_get_data(made), w.shape[0]))
        self.cpu.ggml_graph_compute_with_ctx.argtypes = [pointer, pointer, ctypes.c_int]

    def __call__(self) -> None:
        self.cpu.ggml_graph_compute_with_ctx(self.context, self.graph, 1)

    def outputs(self) -> list[np.ndarray]:
        return [np.ctypeslib.as_array((ctypes.c_float * n).from_address(at)).copy() for at, n in self.results]


class Parameters(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def token(shapes: list[tuple[int, int]], ggml: Path | None, rounds: int) -> dict[str, Any]:
    """Tokens/s of products alone, and ratios."""
    rng = np.random.default_rng(0)
    rows = {k: rng.normal(size=(1, k)).astype(np.float32) for _, k in shapes}
    weights = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    exact = [product(rows[w.shape[1]], w.T) for w in weights]
    members: dict[str, Callable[[], Any]] = {"float32": lambda: [product(rows[w.shape[1]], w.T) for w in weights]}
    for name in NAMES:
        made = FORMATS[name]()
        known = {shape: made.quantize(w) for shape, w in zip(shapes, weights)}
        arrays = [{key: a.copy() for key, a in known[shape].items()} for shape in shapes]      # memory of its own for each layer
        check(name, [made.product(rows[shape[1]], a, None)[0] for shape, a in zip(shapes, arrays)],
              [(rows[s[1]] @ made.dequantize(a, s[1]).T)[0] for s, a in zip(shapes[:4], arrays)])
        members[name] = lambda made=made, arrays=arrays: [made.product(rows[s[1]], a, None) for s, a in zip(shapes, arrays)]
    for kind in TYPES if ggml else ():
        assert ggml is not None
        members[kind] = theirs = Ggml(ggml, kind, weights, rows)
        theirs()
        check(kind, theirs.outputs(), [y[0] for y in exact[:4]])
    found = in_turn(members, rounds)
    result: dict[str, Any] = {name: f"{1 / statistics.median(times):.0f} tokens/s" for name, times in found.items()}
    result |= {f"{name} against float32": ratio(found, name, "float32") for name in NAMES}
    if ggml:
        result |= {f"{name} against {kind}": ratio(found, name, kind) for kind in TYPES for name in NAMES if kind[1] == name[3]}
    return result


def check(name: str, found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for a, b in zip(found, wanted):
        error = float(np.linalg.norm(a - b) / np.linalg.norm(b))
        assert error < (0.15 if "4" in name else 0.02), f"{name} is off by {error:.3f}"


def mlp(rounds: int) -> dict[str, Any]:
    """Images/s in batches of 64 of 784-512-512-10, whose head stays in floats."""
    x = np.random.default_rng(0).normal(size=(64, 784)).astype(np.float32)
    members: dict[str, Callable[[], Any]] = {}
    for name in ("float32", *NAMES):
        model = models.mlp(784, [512, 512], 10)
        model.initialize(0)
        if name != "float32":
            quantize(model, {"linear0": name, "linear1": name})
        model.eval()
        members[name] = lambda model=model: [model(x) for _ in range(20)]
    with no_grad():
        found = in_turn(members, rounds)
    result: dict[str, Any] = {name: f"{20 * 64 / statistics.median(times):,.0f} images/s" for name, times in found.items()}
    return result | {f"{name} against float32": ratio(found, name, "float32") for name in NAMES}


def repeated(count: int, function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return lambda: [function(*arguments) for _ in range(count)]


def batches(rounds: int) -> dict[str, Any]:
    """Of each format the ratios over single layers, as (M, N, K): ratio, and the lowest one."""
    result: dict[str, Any] = {}
    for n, k in LAYERS:
        weight = np.random.default_rng(0).normal(size=(n, k)).astype(np.float32)
        made = {name: (FORMATS[name](), FORMATS[name]().quantize(weight)) for name in NAMES}
        for m in (1, 8, 64, 256):
            x, bias = np.random.default_rng(1).normal(size=(m, k)).astype(np.float32), np.zeros(n, np.float32)
            count = 1 + (1 << 27) // (m * n * k)
            members: dict[str, Callable[[], Any]] = {"float32": repeated(count, product, x, weight.T, bias)}
            for name, (format, arrays) in made.items():
                members[name] = repeated(count, format.product, x, arrays, bias)
            found = in_turn(members, rounds)
            result[f"{m}, {n}, {k}"] = {name: ratio(found, name, "float32") for name in NAMES}
    return {**result, "lowest": {name: min(one[name] for one in result.values()) for name in NAMES}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=("tokens", "mlp", "batches", []), help="all, if none is named")
    parser.add_argument("--ggml", type=Path, metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    keep_freed_memory()
    parts, found = options.parts or ("tokens", "mlp", "batches"), {}
    if "tokens" in parts:
        found = {name: token(shapes, options.ggml, options.rounds) for name, shapes in TOKENS.items()}
    if "mlp" in parts:
        found["MLP 784-512-512-10, 64 rows"] = mlp(options.rounds)
    if "batches" in parts:
        found["Layers of M rows, N outputs, K inputs, against float32"] = batches(options.rounds)
    for name, figures in found.items():
        print(name, *(f"  {key}: {value}" for key, value in figures.items()), sep="\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
