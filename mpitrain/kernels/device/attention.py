"""Attention on a device; see kernels/flash_attention.py, and native/device/attention.h for the tiles.

Queries, keys and values are taken as they lie, wherever their rows are. Numbers of 16 bits are summed in float32, and tops and
inverses kept so.
"""

from __future__ import annotations

from typing import Any

from mpitrain.backend.cudnn_attention import Attention, attention_of
from mpitrain.backend.namespace import Array, array_module
from mpitrain.errors import ShapeError
from mpitrain.kernels.device import device
from mpitrain.kernels.device.code import DeviceFunction, Source, along_rows, computed, contiguous
from mpitrain.kernels.device.random import key_of
from mpitrain.kernels.dropout import WORDS, Dropping

ONCE, WIDTHS, THREADS = Source("attention"), (32, 64, 128, 256), 256
_SIZES = "L?:b L?:b L?:1 ib ih iq ik iw iv i i i i i i d d"                # of attention_forward.h's FORWARD, from `rows` on
_GIVEN = "X~:bhqw X~:bhkw X~:bhkv X~:bhqv"


def _for_widths(source: str, name: str, signature: str, widths: tuple[int, ...] = WIDTHS) -> dict[int, DeviceFunction]:
    return {width: Source(f"{source}_{width}").function(f"{name}_{width}", signature) for width in widths}


_join = ONCE.function("join", "X!~:bhqv X~:bhqv S!:bhq S!:bhq S:bhq S:bhq ib ih iq iv")
_row_dots = ONCE.function("row_dots", "X~:bhqv X~:bhqv S!:bhq ib ih iq iv")
_attend = _for_widths("attention", "attend", f"X~:bhqw X~:bhkw X~:bhkv X!~:bhqv S!:bhq S!:bhq {_SIZES}")
_query_gradients = _for_widths("attention_gradients", "query_gradients", f"{_GIVEN} X!~:bhqw S:bhq S:bhq S:bhq {_SIZES}")
_key_gradients = _for_widths("attention_gradients", "key_gradients", f"{_GIVEN} X?!~:bhkw X?!~:bhkv S:bhq S:bhq S:bhq {_SIZES}")

_TENSOR, TENSOR_WIDTHS, TENSOR_THREADS, TENSOR_SIDE = "ib ih iq ik iw iv i d", (64, 128), 128, 64        # attention_tensor.h's
_tensor_attend = _for_widths("attention_tensor", "tensor_attend", f"X~:bhqw X~:bhkw X~:bhkv X!~:bhqv S!:bhq S!:bhq {_TENSOR}",
                             TENSOR_WIDTHS)
_tensor_query_gradients = _for_widths("attention_tensor", "tensor_query_gradients",
                                      f"{_GIVEN} X!~:bhqw S:bhq S:bhq S:bhq {_TENSOR}", TENSOR_WIDTHS)
_tensor_key_gradients = _for_widths("attention_tensor", "tensor_key_gradients",
                                    f"{_GIVEN} X?!~:bhkw X?!~:bhkv S:bhq S:bhq S:bhq {_TENSOR}", TENSOR_WIDTHS)


def _library(dropping: Dropping | None, *arrays: Array | None) -> Attention | None:
    """cuDNN, where it is installed and takes such arrays: a rule on formats, shapes and strides. It cannot drop what we do."""
    given = [x for x in arrays if x is not None]
    found = attention_of(array_module(given[0]).__name__) if dropping is None else None
    return found if found is not None and found.takes(*given) else None


def _on_tensor_cores(q: Array, v: Array, dropping: Dropping | None) -> bool:
    """A rule on formats and shapes alone."""
    return q.dtype.itemsize == 2 and dropping is None and max(q.shape[3], v.shape[3]) <= TENSOR_WIDTHS[-1]


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


def _sizes(q: Array, k: Array, v: Array, causal: bool) -> tuple[int, ...]:
    return *q.shape[:3], k.shape[2], q.shape[3], v.shape[3], int(causal)


def _words(q: Array, k: Array, dropping: Dropping | None) -> tuple[tuple[Any, ...], tuple[int, ...], float]:
    """Of the dropping: (rows, first words, stored key; key, where words are, the least that keeps; the factor of those)."""
    if dropping is None:
        return (None, None, None), (0, 0, 0, 0, 0), 1.0
    first = dropping.first(q.shape[1] * q.shape[2] * k.shape[2])
    firsts, first = (None, first) if isinstance(first, int) else (contiguous(first), 0)
    stored, key = key_of(dropping.key)
    places = key, first, *dropping.steps(q.shape[2], k.shape[2]), round(dropping.p * WORDS)
    return (contiguous(dropping.rows), firsts, stored), places, dropping.scale


def _rows_of_grid(x: Array) -> tuple[int]:
    """A warp for each query."""
    return (-(-x.shape[0] * x.shape[1] * x.shape[2] // (THREADS // 32)),)


@device("flash_attention")
def flash_attention(q: Array, k: Array, v: Array, out: Array, scale: float, causal: bool, dropping: Dropping | None = None
                    ) -> tuple[Array, Array]:
    q, k, v = along_rows(q), along_rows(k), along_rows(v)
    library = _library(dropping, q, k, v, out)
    known = None if library is None else library.forward(q, k, v, out, scale, causal)
    if known is not None:
        return known
    tops, inverses = (array_module(q).empty(q.shape[:3], computed(q.dtype)) for _ in range(2))
    arrays, sizes, heads = (q, k, v, out, tops, inverses), _sizes(q, k, v, causal), q.shape[0] * q.shape[1]
    if _on_tensor_cores(q, v, dropping):
        grid = (heads * -(-q.shape[2] // TENSOR_SIDE),)
        _of_width(_tensor_attend, q, v)(grid, TENSOR_THREADS, *arrays, *sizes, scale)
    else:
        rows, places, kept = _words(q, k, dropping)
        grid = (heads * -(-q.shape[2] // _side(q)),)
        _of_width(_attend, q, v)(grid, THREADS, *arrays, *rows, *sizes, *places, scale, kept)
    return tops, inverses


@device("flash_attention_grad")
def flash_attention_grad(q: Array, k: Array, v: Array, out: Array, grad: Array, tops: Array, inverses: Array, scale: float,
                         causal: bool, dq: Array | None, dk: Array | None, dv: Array | None,
                         dropping: Dropping | None = None) -> None:
    q, k, v, out, grad = (along_rows(x) for x in (q, k, v, out, grad))
    tops, inverses = (contiguous(x, computed(q.dtype)) for x in (tops, inverses))
    library = _library(dropping, q, k, v, out, grad, dq, dk, dv)
    if library is not None and library.backward((q, k, v, out, grad), tops, inverses, scale, causal, (dq, dk, dv)):
        return
    means = array_module(q).empty(tops.shape, tops.dtype)
    _row_dots(_rows_of_grid(grad), THREADS, grad, out, means, *grad.shape)
    given, known, sizes, heads = (q, k, v, grad), (tops, inverses, means), _sizes(q, k, v, causal), q.shape[0] * q.shape[1]
    if _on_tensor_cores(q, v, dropping):
        functions, threads, side = (_tensor_query_gradients, _tensor_key_gradients), TENSOR_THREADS, TENSOR_SIDE
        rest: tuple[Any, ...] = (*sizes, scale)
    else:
        functions, threads, side = (_query_gradients, _key_gradients), THREADS, _side(q)
        rows, places, kept = _words(q, k, dropping)
        rest = *rows, *sizes, *places, scale, kept
    if dq is not None:
        _of_width(functions[0], q, v)((heads * -(-q.shape[2] // side),), threads, *given, dq, *known, *rest)
    if dk is not None or dv is not None:
        _of_width(functions[1], q, v)((heads * -(-k.shape[2] // side),), threads, *given, dk, dv, *known, *rest)


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
