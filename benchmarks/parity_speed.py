r"""Convolutions of one and three dims, einsum, interpolation and Fourier transforms, forward and backward, beside PyTorch's.

    env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 \
        python benchmarks/parity_speed.py [OP...]

One thread each, float32, 20 shapes an op; both sides alternate, and a figure is the median over the rounds of PyTorch's seconds
over ours: above 1 we are faster. The bar: 0.9 in the median over the shapes of an op, none below 0.5.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from mpitrain import ops
from mpitrain.autograd import Tensor, run_backward

ROUNDS, SECONDS = 5, 0.01  # of a shape; at least that long a side and round
F = torch.nn.functional
Case = tuple[str, Callable[..., Any], Callable[..., Any], list[tuple[int, ...]]]

# batch, channels, length, outputs, kernel, stride, padding, groups
SERIES = [
    (8, 64, 1024, 64, 3, 1, 1, 1),
    (16, 128, 256, 128, 5, 1, 2, 1),
    (4, 1, 16000, 64, 80, 16, 0, 1),
    (8, 256, 128, 256, 1, 1, 0, 1),
    (8, 256, 512, 256, 4, 1, 3, 256),
    (32, 32, 100, 32, 7, 1, 3, 1),
    (2, 512, 1000, 512, 3, 2, 0, 1),
    (1, 80, 1500, 384, 3, 1, 1, 1),
    (16, 16, 512, 32, 9, 1, 4, 1),
    (4, 64, 2048, 64, 3, 2, 1, 1),
    (32, 3, 300, 16, 7, 2, 3, 1),
    (8, 32, 400, 64, 3, 1, 1, 2),
    (64, 8, 64, 8, 3, 1, 1, 1),
    (2, 192, 500, 384, 5, 1, 2, 1),
    (8, 128, 300, 128, 31, 1, 15, 128),
    (16, 64, 128, 128, 2, 2, 0, 1),
    (4, 40, 200, 64, 11, 1, 5, 1),
    (1, 16, 8192, 16, 15, 1, 7, 1),
    (8, 1, 1000, 32, 9, 1, 4, 1),
    (16, 96, 196, 96, 3, 1, 1, 96),
]
# shape, outputs, kernel, stride, padding
VOLUMES = [
    ((2, 16, 16, 32, 32), 16, 3, 1, 1),
    ((1, 32, 16, 16, 16), 64, 3, 1, 1),
    ((4, 3, 8, 56, 56), 32, 3, 2, 1),
    ((2, 64, 8, 8, 8), 64, 3, 1, 1),
    ((1, 8, 32, 32, 32), 8, 5, 1, 2),
    ((2, 32, 8, 16, 16), 64, 1, 1, 0),
    ((1, 1, 32, 64, 64), 16, 3, 1, 1),
    ((2, 32, 16, 16, 16), 32, (3, 1, 1), 1, (1, 0, 0)),
    ((2, 32, 16, 16, 16), 32, (1, 3, 3), 1, (0, 1, 1)),
    ((1, 16, 24, 24, 24), 32, 2, 2, 0),
    ((4, 4, 8, 8, 8), 8, 3, 1, 1),
    ((8, 1, 16, 16, 16), 8, 3, 1, 1),
    ((1, 16, 32, 32, 32), 16, 3, 2, 1),
    ((2, 3, 16, 32, 32), 16, (3, 7, 7), (1, 2, 2), (1, 3, 3)),
    ((1, 24, 12, 20, 20), 24, 3, 1, 1),
    ((2, 8, 10, 10, 10), 16, 4, 2, 1),
    ((1, 48, 8, 12, 12), 48, 3, 1, 1),
    ((4, 16, 4, 16, 16), 32, 3, 1, 1),
    ((1, 2, 40, 40, 40), 4, 3, 1, 1),
    ((2, 32, 4, 4, 4), 32, 3, 1, 1),
]
EINSUMS = [
    ("bhqd,bhkd->bhqk", (4, 8, 64, 32), (4, 8, 64, 32)),
    ("bhqk,bhkd->bhqd", (4, 8, 64, 64), (4, 8, 64, 32)),
    ("ij,jk->ik", (256, 256), (256, 256)),
    ("bij,bjk->bik", (32, 64, 64), (32, 64, 64)),
    ("bqhd,bkhd->bhqk", (2, 64, 8, 32), (2, 64, 8, 32)),
    ("bhqk,bkhd->bqhd", (2, 8, 64, 64), (2, 64, 8, 32)),
    ("bld,dk->blk", (8, 128, 128), (128, 256)),
    ("bi,bj->bij", (64, 64), (64, 128)),
    ("bixy,ioxy->boxy", (4, 16, 12, 12), (16, 16, 12, 12)),
    ("bixy,io->boxy", (8, 32, 16, 16), (32, 32)),
    ("bld,bld->bl", (16, 128, 64), (16, 128, 64)),
    ("bcn,bdn->bcd", (8, 64, 196), (8, 64, 196)),
    ("nchw,nqc->nqhw", (2, 64, 24, 24), (2, 50, 64)),
    ("bnd,nde->bne", (64, 8, 32), (8, 32, 64)),
    ("ij,jk,kl->il", (128, 64), (64, 256), (256, 32)),
    ("bi,oij,bj->bo", (64, 16), (8, 16, 24), (64, 24)),
    ("...ij,...jk->...ik", (4, 6, 48, 48), (4, 6, 48, 48)),
    ("abcd,cd->ab", (16, 16, 24, 24), (24, 24)),
    ("bhid,hde->bihe", (4, 8, 50, 32), (8, 32, 32)),
    ("bsgd,gde->bsge", (4, 100, 4, 32), (4, 32, 64)),
]
IMAGES: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((8, 32, 32, 32), {"scale_factor": 2, "mode": "nearest"}),
    ((8, 32, 32, 32), {"scale_factor": 2, "mode": "bilinear"}),
    ((2, 64, 56, 56), {"size": 112, "mode": "bilinear", "align_corners": True}),
    ((4, 3, 224, 224), {"size": 128, "mode": "bilinear"}),
    ((4, 16, 64, 64), {"scale_factor": 2, "mode": "bicubic"}),
    ((2, 8, 16, 16, 16), {"scale_factor": 2, "mode": "trilinear"}),
    ((8, 64, 256), {"scale_factor": 4, "mode": "linear"}),
    ((16, 128, 7, 7), {"size": 14, "mode": "nearest"}),
    ((4, 32, 64, 64), {"size": 17, "mode": "area"}),
    ((1, 256, 16, 16), {"size": 50, "mode": "bilinear"}),
    ((2, 8, 16, 16, 16), {"scale_factor": 2, "mode": "nearest"}),
    ((8, 64, 256), {"scale_factor": 2, "mode": "nearest"}),
    ((2, 3, 256, 256), {"size": 224, "mode": "bicubic"}),
    ((1, 768, 14, 14), {"size": 16, "mode": "bicubic"}),
    ((4, 64, 28, 28), {"size": 7, "mode": "bilinear"}),
    ((8, 16, 20, 20), {"scale_factor": 3, "mode": "nearest-exact"}),
    ((2, 32, 8, 24, 24), {"size": (4, 12, 12), "mode": "area"}),
    ((16, 8, 100), {"size": 333, "mode": "linear", "align_corners": True}),
    ((2, 21, 33, 33), {"size": 257, "mode": "bilinear"}),
    ((1, 64, 20, 30, 30), {"size": (10, 15, 15), "mode": "trilinear"}),
]
TRANSFORMS: list[tuple[str, tuple[int, ...]]] = [
    ("rfft", (64, 1024)),
    ("rfft", (256, 128)),
    ("rfft", (16, 1000)),
    ("rfft", (8, 8, 4096)),
    ("rfft", (4, 65536)),
    ("fft", (64, 512)),
    ("fft", (128, 100)),
    ("fft", (16, 2048)),
    ("rfft2", (8, 32, 64, 64)),
    ("rfft2", (4, 16, 32, 32)),
    ("rfft2", (2, 3, 224, 224)),
    ("rfft2", (1, 20, 85, 85)),
    ("fft2", (4, 16, 64, 64)),
    ("rfftn", (2, 8, 16, 16, 16)),
    ("fftn", (2, 4, 20, 20, 20)),
    ("rfft", (32, 14, 360)),
    ("irfft", (64, 513)),
    ("irfft2", (8, 32, 64, 33)),
    ("irfftn", (2, 8, 16, 16, 9)),
    ("ifft2", (2, 16, 48, 48)),
]


def transform(name: str, side: Any) -> Callable[[Any], Any]:
    """Of a real array, or two of complex parts; as real numbers, so that the gradient is of real ones."""
    options = {"dim": (-3, -2, -1)} if name.endswith("n") else {}
    module, root = (ops, ops) if side is ops else (torch.fft, torch)
    function = getattr(module, name)
    if name.startswith("ir"):
        return lambda x: function(root.view_as_complex(x), **options)
    return lambda x: root.view_as_real(function(x, **options))


def cases(op: str) -> Iterator[Case]:
    if op == "conv1d":
        for n, c, length, o, k, s, p, g in SERIES:
            yield (
                f"{(n, c, length)} to {o}, kernel {k}, stride {s}, groups {g}",
                lambda x, w, b, a=(s, p, 1, g): ops.conv1d(x, w, b, *a),
                lambda x, w, b, a=(s, p, 1, g): F.conv1d(x, w, b, *a),
                [(n, c, length), (o, c // g, k), (o,)],
            )
    elif op == "conv3d":
        for shape, o, k, s, p in VOLUMES:
            yield (
                f"{shape} to {o}, kernel {k}, stride {s}",
                lambda x, w, b, a=(s, p): ops.conv3d(x, w, b, *a),
                lambda x, w, b, a=(s, p): F.conv3d(x, w, b, *a),
                [shape, (o, shape[1], *([k] * 3 if isinstance(k, int) else k)), (o,)],
            )
    elif op == "einsum":
        for equation, *shapes in EINSUMS:
            yield (
                f"{equation} {shapes}",
                lambda *xs, e=equation: ops.einsum(e, *xs),
                lambda *xs, e=equation: torch.einsum(e, *xs),
                shapes,
            )
    elif op == "interpolate":
        for shape, options in IMAGES:
            yield (
                f"{shape} {options}",
                lambda x, o=options: ops.interpolate(x, **o),
                lambda x, o=options: F.interpolate(x, **o),
                [shape],
            )
    else:
        for name, shape in TRANSFORMS:
            yield (
                f"{name} {shape}",
                transform(name, ops),
                transform(name, torch),
                [(*shape, 2) if name.startswith("ir") else shape],
            )


def seconds(run: Callable[[], Any]) -> float:
    start, count = perf_counter(), 0
    while (passed := perf_counter() - start) < SECONDS or not count:
        run()
        count += 1
    return passed / count


def ratio(ours: Callable[..., Any], theirs: Callable[..., Any], shapes: list[tuple[int, ...]]) -> tuple[float, float]:
    """(our seconds, PyTorch's over ours)."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    mine, yours = [Tensor(a, requires_grad=True) for a in arrays], [torch.tensor(a, requires_grad=True) for a in arrays]
    cotangent = rng.standard_normal(ours(*mine).shape, dtype=np.float32)
    other = torch.tensor(cotangent)

    def our_step() -> None:
        for x in mine:
            x.grad = None
        run_backward(ours(*mine), cotangent)

    def their_step() -> None:
        for x in yours:
            x.grad = None
        theirs(*yours).backward(other)

    our_step(), their_step()
    pairs = [(seconds(our_step), seconds(their_step)) for _ in range(ROUNDS)]
    return median(a for a, _ in pairs), median(b / a for a, b in pairs)


def main() -> None:
    torch.set_num_threads(1)
    for op in sys.argv[1:] or ("conv1d", "conv3d", "einsum", "interpolate", "fft"):
        found = []
        for label, ours, theirs, shapes in cases(op):
            took, faster = ratio(ours, theirs, shapes)
            found.append(faster)
            print(f"  {op} {label}: {1e3 * took:.3f} ms, {faster:.2f}")
        print(
            f"{op}: median {median(found):.2f}, lowest {min(found):.2f}; below 0.5: {sum(f < 0.5 for f in found)}"
        )


if __name__ == "__main__":
    main()
