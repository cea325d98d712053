"""Convolutions, pools, resampling, Fourier transforms and linear algebra for test_on_a_device.py: an example of each op."""

from __future__ import annotations

from typing import Any

import numpy as np
from fakegpu import put
from ops.parity import apart, normal, positive

from mpitrain import ops
from mpitrain.autograd import Tensor

SQUARE = positive(3, 3) + 2 * np.eye(3)

CASES: dict[str, list[tuple[Any, ...]]] = {
    "conv1d": [(lambda x, w, b: ops.conv1d(x, w, b, padding="same"), normal(2, 3, 5), normal(4, 3, 2), normal(4))],
    "conv3d": [(lambda x, w, b: ops.conv3d(x, w, b, 2, 1), normal(2, 2, 4, 5, 3), normal(3, 2, 3, 2, 2), normal(3))],
    "conv_transpose1d": [(lambda x, w, b: ops.conv_transpose1d(x, w, b, 2), normal(2, 3, 5), normal(3, 4, 2), normal(4))],
    "conv_transpose3d": [(lambda x, w, b: ops.conv_transpose3d(x, w, b, 2), normal(1, 2, 2, 3, 2), normal(2, 3, 2, 2, 2),
                          normal(3))],
    "interpolate": [(lambda x: ops.interpolate(x, size=7, mode="bicubic"), normal(1, 2, 4, 5)),
                    (lambda x: ops.interpolate(x, size=3), normal(1, 2, 4, 5))],
    "pad": [(lambda x: ops.pad(x, [(1, 0), (2, 1)], value=3.0), normal(2, 2)), (lambda x: ops.pad(x, (1, -1)), normal(2, 2)),
            (lambda x: ops.pad(x, (2, 1), "reflect"), normal(2, 4))],
    **{f"max_pool{d}d": [(lambda x, d=d: getattr(ops, f"max_pool{d}d")(x, 2, ceil_mode=True), apart(2, 3, 4, 5)[(0,) * (3 - d)])]
       for d in (1, 3)},
    **{f"avg_pool{d}d": [(lambda x, d=d: getattr(ops, f"avg_pool{d}d")(x, 2, padding=1), normal(2, 3, 4, 5)[(0,) * (3 - d)])]
       for d in (1, 3)},
    **{f"adaptive_{kind}_pool{d}d": [(lambda x, d=d, k=kind: getattr(ops, f"adaptive_{k}_pool{d}d")(x, 2),
                                      apart(2, 3, 4, 5)[(0,) * (3 - d)])] for d in (1, 3) for kind in ("avg", "max")},
    **{f"lp_pool{d}d": [(lambda x, d=d: getattr(ops, f"lp_pool{d}d")(x, 2.0, 2), positive(2, 3, 4, 5)[(0,) * (3 - d)])]
       for d in (1, 2, 3)},
    **{f"max_unpool{d}d": [(lambda x, d=d: getattr(ops, f"max_unpool{d}d")(
        *getattr(ops, f"max_pool{d}d")(x, 2, return_indices=True), 2), apart(2, 4, 4, 4)[(0,) * (3 - d)])] for d in (1, 2, 3)},
    **{name: [(lambda x, name=name: ops.view_as_real(getattr(ops, name)(x)), normal(3, 4, 5))]
       for name in ("fft", "fft2", "fftn", "ifft", "ifft2", "ifftn", "rfft", "rfft2", "rfftn", "ihfft", "ihfft2", "ihfftn")},
    **{name: [(getattr(ops, name), normal(3, 4, 5))]
       for name in ("irfft", "irfft2", "irfftn", "hfft", "hfft2", "hfftn", "fftshift", "ifftshift", "angle", "real", "conj")},
    **{name: [(lambda n, name=name: Tensor(put(getattr(ops, name)(len(n)).array)), normal(4))]
       for name in ("fftfreq", "rfftfreq")},
    "complex": [(lambda a, b: abs(ops.complex(a, b)), normal(3), normal(3))],
    "polar": [(lambda a, b: ops.view_as_real(ops.polar(a, b)), normal(3), normal(3))],
    "imag": [(lambda a, b: ops.imag(ops.complex(a, b)), normal(3), normal(3))],
    "view_as_real": [(lambda a, b: ops.view_as_real(ops.complex(a, b)), normal(3), normal(3))],
    "view_as_complex": [(lambda x: ops.angle(ops.view_as_complex(x)), normal(3, 2))],
    "is_complex": [(lambda x: Tensor(put(float(ops.is_complex(x)))), normal(3))],
    "cdist": [(ops.cdist, normal(2, 3), normal(4, 3)),
              (ops.cdist, normal(40, 11).astype("f"), normal(40, 11, seed=1).astype("f"))],
    "cosine_similarity": [(ops.cosine_similarity, normal(2, 3), normal(2, 3))],
    "pairwise_distance": [(ops.pairwise_distance, normal(2, 3), normal(2, 3))],
    "cov": [(ops.cov, normal(2, 3))], "corrcoef": [(ops.corrcoef, normal(2, 3))],
    "matrix_exp": [(ops.matrix_exp, normal(3, 3))],
    "einsum": [(lambda x, y: ops.einsum("bij,bkj->kib", x, y), normal(2, 3, 4), normal(2, 5, 4)),
               (lambda x, y: ops.einsum("iij,k->jk", x, y), normal(3, 3, 2), normal(4))],
    "tensordot": [(lambda x, y: ops.tensordot(x, y, 2), normal(2, 3, 4), normal(3, 4, 5))],
    **{name: [(getattr(ops, name), SQUARE)]
       for name in ("cond", "det", "eigvalsh", "inv", "logdet", "matrix_norm", "matrix_rank", "pinv", "qr", "slogdet", "svdvals",
                    "vander", "vector_norm")},
    **{name: [(getattr(ops, name), x, y)] for name, x, y in (
        ("dot", normal(3), normal(3)), ("vdot", normal(3), normal(3)), ("vecdot", normal(2, 3), normal(2, 3)),
        ("inner", normal(2, 3), normal(4, 3)), ("outer", normal(2), normal(3)), ("kron", normal(2, 3), normal(4)),
        ("cross", normal(2, 3), normal(2, 3)), ("solve", SQUARE, normal(3, 2)))},
    **{name: [(getattr(ops, name), x, y, z)] for name, x, y, z in (
        ("addmm", normal(4), normal(2, 3), normal(3, 4)), ("addmv", normal(2), normal(2, 3), normal(3)),
        ("addr", normal(2, 3), normal(2), normal(3)), ("baddbmm", normal(4), normal(2, 2, 3), normal(2, 3, 4)),
        ("addbmm", normal(4), normal(2, 2, 3), normal(2, 3, 4)))},
    "multi_dot": [(lambda x, y, z: ops.multi_dot([x, y, z]), normal(2, 3), normal(3, 4), normal(4))],
    "matrix_power": [(lambda x: ops.matrix_power(x, 3), SQUARE), (lambda x: ops.matrix_power(x, -1), SQUARE)],
    "solve_triangular": [(lambda a, b: ops.solve_triangular(a, b, upper=True, unitriangular=True), SQUARE, normal(3, 2))],
    "cholesky": [(lambda a: ops.cholesky(a @ a.T), SQUARE)], "cholesky_inverse": [(ops.cholesky_inverse, SQUARE)],
    "cholesky_solve": [(ops.cholesky_solve, normal(3, 2), SQUARE)],
    "eigh": [(lambda a: ops.eigh(a + a.T), SQUARE)], "svd": [(lambda a: ops.svd(a.array), SQUARE)],
    "tensorinv": [(lambda a: ops.tensorinv(a.reshape(3, 1, 3), 2), SQUARE)],
    "tensorsolve": [(lambda a, b: ops.tensorsolve(a, b), SQUARE, normal(3))],
    "im2col": [(lambda x: ops.im2col(x, 2), normal(1, 2, 3, 4))], "fold": [(lambda x: ops.fold(x, 3, 2), normal(1, 8, 4))],
    "pixel_shuffle": [(lambda x: ops.pixel_shuffle(x, 2), normal(4, 2, 3))],
    "pixel_unshuffle": [(lambda x: ops.pixel_unshuffle(x, 2), normal(1, 2, 4))],
    "channel_shuffle": [(lambda x: ops.channel_shuffle(x, 2), normal(1, 4, 3))],
    "affine_grid": [(lambda t: ops.affine_grid(t, (2, 1, 3, 3)), normal(2, 2, 3))],
    "grid_sample": [(lambda x, g, m=mode, p=padding: ops.grid_sample(x, g, m, p), normal(1, 2, 3, 4), normal(1, 2, 2, 2))
                    for mode, padding in (("bilinear", "reflection"), ("bicubic", "zeros"), ("nearest", "border"))],
}
