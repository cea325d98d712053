"""Attention on a device; see kernels/flash_attention.py, and native/device/attention.h for the tiles.

Queries, keys and values are taken as they lie, wherever their rows are. Numbers of 16 bits are summed, and tops and inverses kept,
in float32.
"""

from __future__ import annotations

from typing import Any

from mpitrain.backend.namespace import Array, array_module
from mpitrain.errors import ShapeError
from mpitrain.kernels.device import device
from mpitrain.kernels.device.code import DeviceFunction, Source, along_rows, computed, contiguous
from mpitrain.kernels.dropout import WORDS, Dropping
from mpitrain.kernels.random import signed

ONCE, WIDTHS, THREADS = Source("attention"), (32, 64, 128, 256), 256
_SIZES = "L?:b L?:b ib ih iq ik iw iv i i i i i i d d"                # of attention_forward.h's FORWARD, from `rows` on
_GIVEN = "X~:bhqw X~:bhkw X~:bhkv X~:bhqv"


def _for_widths(source: str, name: str, signature: str) -> dict[int, DeviceFunction]:
    return {width: Source(f"{source}_{width}").function(f"{name}_{width}", signature) for width in WIDTHS}


_join = ONCE.function("join", "X!~:bhqv X~:bhqv S!:bhq S!:bhq S:bhq S:bhq ib ih iq iv")
_row_dots = ONCE.function("row_dots", "X~:bhqv X~:bhqv S!:bhq ib ih iq iv")
_attend = _for_widths("attention", "attend", f"X~:bhqw X~:bhkw X~:bhkv X!~:bhqv S!:bhq S!:bhq {_SIZES}")
_query_gradients = _for_widths("attention_gradients", "query_gradients", f"{_GIVEN} X!~:bhqw S:bhq S:bhq S:bhq {_SIZES}")
_key_gradients = _for_widths("attention_gradients", "key_gradients", f"{_GIVEN} X?!~:bhkw X?!~:bhkv S:bhq S:bhq S:bhq {_SIZES}")


def _of_width(functions: dict[int, DeviceFunction], q: Array, v: Array) -> DeviceFunction:
    """The function for the rounded-up width of a head."""
    width = max(q.shape[3], v.shape[3])
    for most, function in functions.items():
        if width <= most:
            return function
    raise ShapeError(f"flash_attention: heads are {width} wide, and kernels of a device take {WIDTHS[-1]} at most")


def _side(x: Array) -> int:
    """The rows of a tile: attention.h's Tile<S>::SIDE."""
    return 32 if x.dtype.name == "float64" else 64


def _numbers(q: Array, k: Array, v: Array, scale: float, causal: bool, dropping: Dropping | None) -> tuple[Any, ...]:
    """What kernels take after their arrays: rows and first words of the dropping, sizes, where words are, and factors."""
    sizes = (*q.shape[:3], k.shape[2], q.shape[3], v.shape[3], int(causal))
    if dropping is None:
        return None, None, *sizes, 0, 0, 0, 0, 0, scale, 1.0
    first = dropping.first(q.shape[1] * q.shape[2] * k.shape[2])
    firsts, first = (None, first) if isinstance(first, int) else (contiguous(first), 0)
    key, least = signed(dropping.key), round(dropping.p * WORDS)
    return (contiguous(dropping.rows), firsts, *sizes, key, first, *dropping.steps(q.shape[2], k.shape[2]), least, scale,
            dropping.scale)


def _rows_of_grid(x: Array) -> tuple[int]:
    """A warp for each query."""
    return (-(-x.shape[0] * x.shape[1] * x.shape[2] // (THREADS // 32)),)


@device("flash_attention")
def flash_attention(q: Array, k: Array, v: Array, out: Array, scale: float, causal: bool, dropping: Dropping | None = None
                    ) -> tuple[Array, Array]:
    q, k, v = along_rows(q), along_rows(k), along_rows(v)
    tops, inverses = (array_module(q).empty(q.shape[:3], computed(q.dtype)) for _ in range(2))
    grid = (q.shape[0] * q.shape[1] * -(-q.shape[2] // _side(q)),)
    _of_width(_attend, q, v)(grid, THREADS, q, k, v, out, tops, inverses, *_numbers(q, k, v, scale, causal, dropping))
    return tops, inverses


@device("flash_attention_grad")
def flash_attention_grad(q: Array, k: Array, v: Array, out: Array, grad: Array, tops: Array, inverses: Array, scale: float,
                         causal: bool, dq: Array | None, dk: Array | None, dv: Array | None,
                         dropping: Dropping | None = None) -> None:
    q, k, v, out, grad = (along_rows(x) for x in (q, k, v, out, grad))
    tops, inverses = (contiguous(x, computed(q.dtype)) for x in (tops, inverses))
    means = array_module(q).empty(tops.shape, tops.dtype)
    _row_dots(_rows_of_grid(grad), THREADS, grad, out, means, *grad.shape)
    numbers, heads = _numbers(q, k, v, scale, causal, dropping), q.shape[0] * q.shape[1]
    if dq is not None:
        _of_width(_query_gradients, q, v)((heads * -(-q.shape[2] // _side(q)),), THREADS, q, k, v, grad, dq, tops, inverses, means,
                                          *numbers)
    if dk is not None or dv is not None:
        _of_width(_key_gradients, q, v)((heads * -(-k.shape[2] // _side(q)),), THREADS, q, k, v, grad, dk, dv, tops, inverses,
                                        means, *numbers)


@device("join_attention")
def join_attention(out: Array, tops: Array, inverses: Array, other: Array, other_tops: Array, other_inverses: Array) -> None:
    if not out.size:
        return
    wanted = computed(out.dtype)
    kept = [contiguous(x, wanted) for x in (tops, inverses)]
    _join(_rows_of_grid(out), THREADS, out, along_rows(other), *kept, contiguous(other_tops, wanted),
          contiguous(other_inverses, wanted), *out.shape)
    for x, made in zip((tops, inverses), kept):
        if made is not x:
            x[...] = made
