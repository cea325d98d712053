"""What convolutions and pools ask about their arguments: numbers for each dim, padding by name, shapes that fit."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from mpitrain.errors import ShapeError

Numbers = int | Sequence[int]
Padding = int | Sequence[int] | str


def numbers(name: str, what: str, value: Numbers, dims: int, least: int = 1) -> tuple[int, ...]:
    """`value` once for each of the dims; ShapeError where it is none of that, or below `least`."""
    try:
        found = tuple(map(operator.index, value)) if isinstance(value, Sequence) else (operator.index(value),) * dims
    except (TypeError, ValueError):
        raise ShapeError(f"{name}: {what} is {value!r}, expected an integer or {dims} of them") from None
    if len(found) == 1:
        found *= dims
    if len(found) != dims or min(found) < least:
        raise ShapeError(f"{name}: {what} is {value}, expected an integer of at least {least}, or {dims} of them")
    return found


LAYOUTS = {1: "(N, C, L)", 2: "(N, C, H, W)", 3: "(N, C, D, H, W)"}


def check_input(name: str, x: Any, dims: int, batch: bool = True) -> None:
    if len(x.shape) != dims + 2 and (batch or len(x.shape) != dims + 1):
        raise ShapeError(f"{name}: the input has shape {tuple(x.shape)}, expected {LAYOUTS[dims]}, or that without N")


def check_weight(name: str, weight: Any, dims: int) -> None:
    if len(weight.shape) != dims + 2:
        raise ShapeError(f"{name}: the weight has shape {tuple(weight.shape)}, expected {dims + 2} dims")


def check_channels(name: str, x: Any, weight: Any, bias: Any, groups: int, *, channels: int, outputs: int) -> None:
    if groups < 1 or channels % groups or outputs % groups:
        raise ShapeError(f"{name}: {channels} input and {outputs} output channels cannot be split into {groups} groups")
    if x.shape[1] != channels:
        raise ShapeError(f"{name}: the input has {x.shape[1]} channels, the weight {tuple(weight.shape)} with groups={groups} "
                         f"expects {channels}")
    if bias is not None and tuple(bias.shape) != (outputs,):
        raise ShapeError(f"{name}: the bias has shape {tuple(bias.shape)}, expected ({outputs},)")


def padding_by_name(name: str, padding: str, kernel: Sequence[int], stride: Sequence[int],
                    dilation: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What "same" or "valid" puts before each dim, and what more than that behind it."""
    if padding == "valid":
        return (0,) * len(kernel), (0,) * len(kernel)
    if padding != "same":
        raise ShapeError(f'{name}: padding is "{padding}", expected integers, "same" or "valid"')
    if max(stride) > 1:
        raise ShapeError(f'{name}: padding="same" wants a stride of 1, found {tuple(stride)}; give the padding in numbers')
    totals = [d * (k - 1) for k, d in zip(kernel, dilation)]
    return tuple(total // 2 for total in totals), tuple(total % 2 for total in totals)
