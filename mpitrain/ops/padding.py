"""Padding from the array itself: maps along one dim after the other, as interpolation is."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from mpitrain.autograd import Tensor
from mpitrain.errors import ShapeError
from mpitrain.kernels.resample import Taps
from mpitrain.ops.resample import Resample

__all__: list[str] = []                           # `pad` is in shape.py


def padded_from_itself(x: Any, widths: tuple[tuple[int, int], ...], mode: str) -> Tensor:
    if mode not in ("reflect", "replicate", "circular"):
        raise ShapeError(f'pad: mode is "{mode}", expected "constant", "reflect", "replicate" or "circular"')
    for n, (before, after) in zip(x.shape, widths):
        if before == after == 0:
            continue
        most = {"reflect": n - 1, "circular": n, "replicate": max(before, after) if n else 0}[mode]
        if max(before, after) > most or n + before + after < 0:
            raise ShapeError(f'pad: widths {widths} with mode "{mode}" want more than shape {tuple(x.shape)} has; '
                             f"at most {most} in a dim of {n}")
    result = x if isinstance(x, Tensor) else Tensor(x)
    for dim, (before, after) in enumerate(widths):
        if before or after:
            result = Resample.apply(result, taps=_around(x.shape[dim], before, after, mode), dim=dim)
    return result


@lru_cache(256)
def _around(n: int, before: int, after: int, mode: str) -> Taps:
    index = np.arange(-before, n + after)
    if mode == "replicate":
        index = np.clip(index, 0, n - 1)
    elif mode == "reflect":
        index = np.abs(index)
        index = np.where(index > n - 1, 2 * (n - 1) - index, index)
    else:                                         # what is cut off is not wrapped around either
        low, high = max(-before, 0), n - max(-after, 0)
        index = low + (index - low) % max(high - low, 1)
    return Taps.of_rows(n, index)
