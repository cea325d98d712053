"""Sparse linear maps along a dim as in native/resample.c: the same bits."""

from __future__ import annotations

from typing import Any

from mpitrain.kernels.loops.mathematics import u


def resample(x: Any, y: Any, starts: Any, index: Any, weight: Any, outer: int, size: int, outputs: int, inner: int,
             taps: int) -> None:
    zero = x.dtype.type(0)
    for a in range(outer):
        first, to = a * size * inner, a * outputs * inner
        if inner != 1:
            for j in range(outputs):
                at = to + j * inner
                for i in range(inner if starts[j] == starts[j + 1] else 0):
                    y[u(at + i)] = zero
                for t in range(starts[j], starts[j + 1]):
                    share, start = weight[t], first + index[t] * inner
                    if t == starts[j]:
                        for i in range(inner):
                            y[u(at + i)] = share * x[u(start + i)]
                    else:
                        for i in range(inner):
                            y[u(at + i)] += share * x[u(start + i)]
        elif taps > 0:                            # index and weight lie tap by tap
            for j in range(outputs):
                total = weight[j] * x[first + index[j]]
                for t in range(1, taps):
                    total += weight[t * outputs + j] * x[first + index[t * outputs + j]]
                y[to + j] = total
        else:
            for j in range(outputs):
                total = zero
                for t in range(starts[j], starts[j + 1]):
                    total += weight[t] * x[first + index[t]]
                y[to + j] = total
