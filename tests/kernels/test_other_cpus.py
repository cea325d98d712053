"""Loops that are to give the same sums, compiled as for a CPU without AVX-512, where GCC by itself would fuse in some only."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpitrain.kernels import linear, product, sparse
from mpitrain.kernels.cached_attention import cached_attention, scale_of
from mpitrain.kernels.few_rows import few_rows
from mpitrain.kernels.flash_attention import flash_attention
from mpitrain.kernels.library import bind

SIZES = [(8, 8), (65, 127), (37, 403), (9, 33), (48, 900)]
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 17]


def products(dtype: str) -> str:
    """A hash of products of rows; each way to them must give its bits."""
    digest, rng = hashlib.sha256(), np.random.default_rng(1)
    by_packed = bind("product", "few_rows_packed", "X:mk X X?:n X!:mn im in ik")
    assert by_packed is not None
    for n, k in SIZES:
        w, bias = rng.standard_normal((n, k)).astype(dtype), rng.standard_normal(n).astype(dtype)
        x = rng.standard_normal((max(ROWS), k)).astype(dtype)
        whole, packed = product.native(x, w.T, bias, None), linear.pack(w)
        digest.update(whole.tobytes())
        assert packed is not None
        for m in ROWS:
            beside, layer = np.empty((m, n), dtype), linear.packed_layer(m, (n, k), packed, bias, None)
            by_packed(x[:m], packed, bias, beside, m, n, k)
            assert layer is not None
            found = {"product": product.native(x[:m], w.T, bias, None), "few_rows": few_rows(x[:m], w, bias),
                     "few_rows_packed": beside, "packed_layer": layer(x[:m]),
                     "csr": sparse.csr_product(x[:m], *sparse.to_csr(w), bias)}
            if n % sparse.HEIGHT == 0:
                found["blocks"] = sparse.block_product(x[:m], *sparse.to_blocks(w), bias)
            wrong = [name for name, y in found.items() if y.tobytes() != whole[:m].tobytes()]
            assert not wrong, (wrong, dtype, m, n, k)
    return digest.hexdigest()


def attend(dtype: str) -> None:
    """The queries of a text, all at once and one by one."""
    length, heads, width = 150, 2, 19
    qkv = np.random.default_rng(2).standard_normal((1, length, 3, heads, width)).astype(dtype)
    whole = np.empty((1, length, heads, width), dtype)
    q, k, v = qkv.transpose(2, 0, 3, 1, 4)
    flash_attention(q, k, v, whole.swapaxes(1, 2), scale_of(width), True, None)
    keys, values = np.zeros((2, 1, heads, length, width), dtype)
    for at in range(length):
        one = cached_attention(qkv[:, at].reshape(1, -1), keys, values, np.array([0]), np.array([at]))
        assert one.tobytes() == whole[0, at].tobytes(), (dtype, at)


@pytest.mark.slow                                                                   # the compiler takes its time
@pytest.mark.skipif(shutil.which("gcc") is None or platform.machine() != "x86_64" or product.native.host() is None,
                    reason="needs gcc for x86-64")
def test_a_cpu_without_avx_512_gives_one_row_the_bits_of_many_and_those_of_this_cpu(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nexec gcc "$@" -mno-avx512f -mtune=znver3\n')
    compiler.chmod(0o755)
    environment = os.environ | {"CC": str(compiler), "MPITRAIN_CACHE_DIR": str(tmp_path), "MPITRAIN_KERNELS": "c"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [products("float32"), products("float64")]


if __name__ == "__main__":
    for kind in ("float32", "float64"):
        attend(kind)
        print(products(kind))
