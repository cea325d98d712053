"""Products by pruned weights against our product by the same weights with their zeros: one thread, pairs in turn.

    python benchmarks/sparse.py [--outputs 3072] [--inputs 768] [--rounds 30] [--json FILE]

Each pair is timed A B A B; a ratio is the median over rounds of the dense time over the sparse one, with its quartiles. The dense
product is ours at every number of rows (`kernels.few_rows.row_by_row`: the tile kernel from 8 rows on, below the one that text is
generated with). Results must have its bits, and be float64's. Bars: blocks of 16 x 1 at 80 % zeros 3.5 with one row and 2.5 with
64, compressed rows at 90 % with 64 rows 3.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pinned  # noqa: F401  (first: it sets what NumPy reads)

# isort: split
import numpy as np

from mpitrain.bench.pairs import alternate, timed
from mpitrain.bench.report import Report, cpu_name, in_time, ratio_of
from mpitrain.errors import NumericsError
from mpitrain.kernels.few_rows import row_by_row
from mpitrain.kernels.sparse import block_product, csr_product, to_blocks, to_csr

BARS = {("blocks", 0.8, 1): 3.5, ("blocks", 0.8, 64): 2.5, ("csr", 0.9, 64): 3.0}
AT_ONCE = 2e7                                     # multiply-adds of a dense turn: several calls of a short one


def measure(form: str, zeros: float, rows: int, outputs: int, inputs: int, rounds: int) -> dict[str, Any]:
    """Medians and quartiles of one form at one share of zeros."""
    rng = np.random.default_rng(0)
    live = rng.random((outputs // 16, inputs) if form == "blocks" else (outputs, inputs)) >= zeros
    w = rng.standard_normal((outputs, inputs), np.float32) * (np.repeat(live, 16, axis=0) if form == "blocks" else live)
    x = rng.standard_normal((rows, inputs), np.float32)
    kernel, sparse = (block_product, to_blocks(w)) if form == "blocks" else (csr_product, to_csr(w))
    wanted = x.astype(np.float64) @ w.astype(np.float64).T
    bound = (inputs + 2) * np.finfo(np.float32).eps * (np.abs(x).astype(np.float64) @ np.abs(w).T) + 1e-30
    found = kernel(x, *sparse, None)
    if not (np.abs(found - wanted) <= bound).all() or not np.array_equal(found, row_by_row(x, w, None)):
        raise NumericsError(f"{form} at {zeros}: a product is not the dense one's, or not float64's; times of a wrong result "
                            "must not be compared")
    calls = max(1, round(AT_ONCE / (rows * outputs * inputs)))
    pairs = alternate(timed(lambda: kernel(x, *sparse, None), calls), timed(lambda: row_by_row(x, w, None), calls), rounds)
    return {"form": form, "zeros": zeros, "rows": rows, "outputs": outputs, "inputs": inputs, "bytes": sparse.nbytes,
            "dense_bytes": w.nbytes, **pairs.summary("dense"), "bar": BARS.get((form, zeros, rows))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--outputs", type=int, default=3072)
    parser.add_argument("--inputs", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = Report(0, options.json)
    report.line(f"{cpu_name()}: x (M, {options.inputs}) by weights ({options.outputs}, {options.inputs}), float32, one thread")
    report.line(f"{'form':7}{'zeros':>7}{'rows':>6}{'sparse':>12}{'dense':>12}  ratio (quartiles)")
    for form, shares in (("blocks", (0.5, 0.8, 0.9)), ("csr", (0.8, 0.9, 0.95))):
        for zeros in shares:
            for rows in (1, 16, 64):
                found = measure(form, zeros, rows, options.outputs, options.inputs, options.rounds)
                bar = f"  bar {found['bar']}" if found["bar"] else ""
                report.line(f"{form:7}{zeros:7.0%}{rows:6}{in_time(found['seconds']):>12}{in_time(found['dense_seconds']):>12}  "
                            f"{ratio_of(found)}{bar}")
                report.record(found)


if __name__ == "__main__":
    main()
