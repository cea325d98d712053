r"""Operations of elements, reductions, scans, ranks and places, forward and backward, beside PyTorch's.

    env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 \
        python benchmarks/ops_speed.py [OP...]

One thread each, float32, 300,000 numbers or a matrix of 512 x 600; both sides alternate. A figure is our seconds over PyTorch's,
the median over the rounds: below 1 we are faster. The bar is 2; docs/operations.md names what is above it, and why.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from parity_speed import seconds

from mpitrain import ops
from mpitrain.autograd import Tensor, run_backward

ROUNDS, N, ROWS, WIDTH = 3, 300_000, 512, 600
RNG = np.random.default_rng(0)
X, MATRIX = RNG.standard_normal(N, dtype=np.float32), RNG.standard_normal((ROWS, WIDTH), dtype=np.float32)
SHARE, POSITIVE = RNG.uniform(0.02, 0.98, N).astype(np.float32), RNG.uniform(0.05, 5, N).astype(np.float32)
INDEX, ROW = RNG.integers(0, WIDTH, (ROWS, WIDTH)), RNG.integers(0, ROWS, ROWS)

ANY = ("erf erfc sin cos tan atan sinh cosh asinh exp2 expm1 floor frac round sign square trunc nan_to_num sinc sigmoid tanh exp "
       "abs relu")
OF_SHARES = "asin acos atanh erfinv logit"
OF_POSITIVE = "lgamma digamma log log1p log2 log10 rsqrt reciprocal sqrt"
OF_TWO = "atan2 hypot logaddexp fmax fmin maximum minimum copysign remainder fmod mul div xlogy"
ALONG = "sum mean var prod logsumexp cumsum cumprod cummax cummin logcumsumexp median sort softmax nansum"
Case = tuple[str, Callable[[Any, Callable[[Any], Any]], Callable[..., Any]], list[Any]]


def cases() -> Iterator[Case]:
    """(name, a function of (module, what makes an index of an array) that gives the op, its inputs)."""
    for names, arrays in ((ANY, [X]), (OF_SHARES, [SHARE]), (OF_POSITIVE, [POSITIVE]), (OF_TWO, [X, POSITIVE])):
        for name in names.split():
            yield name, lambda m, i, name=name: getattr(m, name), arrays
    for name in ALONG.split():
        yield name, lambda m, i, name=name: lambda x: getattr(m, name)(x, dim=1), [MATRIX]
    two = [MATRIX, MATRIX.copy()]
    yield "topk", lambda m, i: lambda x: m.topk(x, 10, dim=1), [MATRIX]
    yield "kthvalue", lambda m, i: lambda x: m.kthvalue(x, 10, dim=1), [MATRIX]
    yield "flip", lambda m, i: lambda x: m.flip(x, (1,)), [MATRIX]
    yield "roll", lambda m, i: lambda x: m.roll(x, 7, 1), [MATRIX]
    yield "tril", lambda m, i: m.tril, [MATRIX]
    yield "diff", lambda m, i: lambda x: m.diff(x, dim=1), [MATRIX]
    yield "lerp", lambda m, i: lambda x, y: m.lerp(x, y, 0.3), two
    yield "clamp", lambda m, i: lambda x: m.clamp(x, -0.5, 0.5), [X]
    yield "gather", lambda m, i: lambda x: m.gather(x, 1, i(INDEX)), [MATRIX]
    yield "scatter", lambda m, i: lambda x, y: m.scatter(x, 1, i(INDEX), y), two
    yield "scatter_add", lambda m, i: lambda x, y: m.scatter_add(x, 1, i(INDEX), y), two
    yield "scatter_reduce", lambda m, i: lambda x, y: m.scatter_reduce(x, 1, i(INDEX), y, "amax"), two
    yield "index_select", lambda m, i: lambda x: m.index_select(x, 0, i(ROW)), [MATRIX]
    yield "index_add", lambda m, i: lambda x, y: m.index_add(x, 0, i(ROW), y), two
    yield "masked_select", lambda m, i: lambda x: m.masked_select(x, i(MATRIX > 0)), [MATRIX]
    yield "stack", lambda m, i: lambda x, y: m.stack((x, y), 1), two


def ratios(case: Case) -> tuple[float, float, float]:
    """Ours over PyTorch's, forward, and forward and backward; and our milliseconds of both."""
    _, op, arrays = case
    made: dict[int, torch.Tensor] = {}

    def index(array: Any) -> torch.Tensor:
        key = array.size * 2 + (array.dtype == bool)
        return made.setdefault(key, torch.tensor(array)) if key not in made else made[key]

    sides = [(op(ops, lambda a: a), [Tensor(a, requires_grad=True) for a in arrays]),
             (op(torch, index), [torch.tensor(a, requires_grad=True) for a in arrays])]

    def result(side: int) -> Any:
        function, inputs = sides[side]
        found = function(*inputs)
        return found[0] if isinstance(found, tuple) else found

    one = np.ones(result(0).shape, np.float32)
    other = torch.ones(result(1).shape)

    def step(side: int) -> None:
        for x in sides[side][1]:
            x.grad = None
        run_backward(result(0), one) if side == 0 else result(1).backward(other)

    found = []
    for run in (result, step):
        run(0), run(1)
        pairs = [(seconds(partial(run, 0)), seconds(partial(run, 1))) for _ in range(ROUNDS)]
        found.append((median(a / b for a, b in pairs), median(a for a, _ in pairs)))
    return found[0][0], found[1][0], 1e3 * found[1][1]


def main() -> None:
    torch.set_num_threads(1)
    wanted = sys.argv[1:]
    found = [(case[0], *ratios(case)) for case in cases() if not wanted or case[0] in wanted]
    for name, forward, both, ms in sorted(found, key=lambda row: -row[2]):
        print(f"{name:16} forward {forward:6.2f}  and backward {both:6.2f}  ({ms:.3f} ms)")
    print(f"{len(found)} operations: forward and backward above 2: {sum(row[2] > 2 for row in found)}")


if __name__ == "__main__":
    main()
