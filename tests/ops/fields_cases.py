"""Convolutions, pools, resampling, Fourier transforms and linear algebra for test_on_a_device.py: an example of each op."""

from __future__ import annotations

from typing import Any

from fakegpu import put
from ops.parity import apart, normal, positive

from mpitrain import ops
from mpitrain.autograd import Tensor

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
    "einsum": [(lambda x, y: ops.einsum("bij,bkj->kib", x, y), normal(2, 3, 4), normal(2, 5, 4)),
               (lambda x, y: ops.einsum("iij,k->jk", x, y), normal(3, 3, 2), normal(4))],
    "tensordot": [(lambda x, y: ops.tensordot(x, y, 2), normal(2, 3, 4), normal(3, 4, 5))],
}
