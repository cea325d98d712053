"""Attention by NVIDIA's cuDNN: graphs of its frontend (nvidia-cudnn-frontend), where it and the library are installed.

This has never run on a GPU. Without one were tested: that the frontend takes these graphs, with our shapes and strides, and, by a
stand-in that computes what a graph says, operands, keys, results and the way of what is kept. Not tested: which plans cuDNN has
for them (where it has none, kernels of ours run), and whether what it keeps of a query whose scores are all -inf is -inf, as is
taken here.

Queries, keys and values go as they lie. cuDNN keeps one number of a query, the logarithm of its sum of exps. As (tops, inverses)
that is (logarithm, 1), from which the weights, and the join of two results, come by the formulas of `kernels.flash_attention`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from mpitrain.backend.cudnn_device import Cupy
from mpitrain.backend.namespace import Array, array_module

FORMATS = {"bfloat16": "BFLOAT16", "float16": "HALF"}
WIDE, WIDEST = 128, 256                           # widths of a head: everywhere, and from sm_90 on
HOPPER = 90
STEP = 8                                          # numbers that rows begin at multiples of


class Operand(NamedTuple):
    """Memory as a graph knows it; strides in numbers."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, x: Array) -> Operand:
        return cls(tuple(x.shape), tuple(step // x.itemsize for step in x.strides))

    @property
    def is_aligned(self) -> bool:
        return self.strides[3] == 1 and not any(step % STEP for step in self.strides[:3]) and self.shape[3] % STEP == 0


class Key(NamedTuple):
    """What a graph is made for: q, k, v and out; for a gradient, then grad, dq, dk and dv."""

    dtype: str
    operands: tuple[Operand, ...]
    causal: bool
    scale: float


NAMES = ("q", "k", "v", "o", "dO", "dQ", "dK", "dV")
STATS = len(NAMES) + 1                            # The number of what is kept; those of operands begin at 1.


def graph_of(cudnn: Any, key: Key, handle: Any = None) -> Any:
    """The graph of attention, or of its gradient, not yet validated: that asks for a device."""
    kind, real = getattr(cudnn.data_type, FORMATS[key.dtype]), cudnn.data_type.FLOAT
    graph = cudnn.pygraph(handle=handle, io_data_type=kind, intermediate_data_type=real, compute_data_type=real)
    batch, heads, queries, _ = key.operands[0].shape
    kept = Operand((batch, heads, queries, 1), (heads * queries, queries, 1, 1))

    def given(uid: int, name: str, x: Operand, dtype: Any) -> Any:
        return graph.tensor(name=name, dim=list(x.shape), stride=list(x.strides), data_type=dtype, uid=uid)

    def made(tensor: Any, uid: int, x: Operand, dtype: Any) -> None:
        tensor.set_output(True).set_uid(uid).set_dim(list(x.shape)).set_stride(list(x.strides)).set_data_type(dtype)

    options: dict[str, Any] = {"attn_scale": key.scale}
    if key.causal:                                # query i looks at keys 0..i, of which there may be more or fewer than queries
        options.update(diagonal_alignment=cudnn.diagonal_alignment.TOP_LEFT, diagonal_band_right_bound=0)
    backward = len(key.operands) > 4
    inputs = {name: given(i + 1, name, x, kind) for i, (name, x) in enumerate(zip(NAMES, key.operands[:5 if backward else 3]))}
    if backward:
        stats = given(STATS, "stats", kept, real)
        results = graph.sdpa_backward(**inputs, stats=stats, use_deterministic_algorithm=True, **options)
        for i, tensor in enumerate(results):
            made(tensor, 6 + i, key.operands[5 + i], kind)
    else:
        out, stats = graph.sdpa(**inputs, generate_stats=True, **options)
        made(out, 4, key.operands[3], kind)
        made(stats, STATS, kept, real)
    return graph


def kept_of(logarithms: Array) -> tuple[Array, Array]:
    """(tops, inverses) from the logarithms of sums of exps: zeros for a query without any weight, whose logarithm is -inf."""
    xp, none = array_module(logarithms), logarithms == -math.inf
    return xp.where(none, logarithms.dtype.type(0), logarithms), (~none).astype(logarithms.dtype)


def logarithms_of(tops: Array, inverses: Array) -> Array:
    """The logarithms of sums of exps; +inf for a query without any weight, so that each is exp(-inf)."""
    xp, none = array_module(tops), inverses == 0
    return xp.where(none, tops.dtype.type(math.inf), tops - xp.log(xp.where(none, tops.dtype.type(1), inverses)))


class Attention:
    """Forward and backward, by graphs that are kept for their shapes and strides."""

    def __init__(self, cudnn: Any, device: Any):
        self.cudnn, self.device = cudnn, device
        self._handle = cache(lambda ordinal: cudnn.create_handle())
        self._graph = cache(self._built)

    def takes(self, *arrays: Array) -> bool:
        """A rule on formats, shapes, strides and alignment alone."""
        widest = WIDEST if self.device.capability() >= HOPPER else WIDE
        return all(x.dtype.name in FORMATS and x.shape[3] <= widest and Operand.of(x).is_aligned and self.device.is_aligned(x)
                   for x in arrays)

    def forward(self, q: Array, k: Array, v: Array, out: Array, scale: float, causal: bool) -> tuple[Array, Array] | None:
        """Fills `out` and returns (tops, inverses); None where cuDNN has no plan."""
        kept = array_module(q).empty(q.shape[:3], "float32")
        return kept_of(kept) if self._run((q, k, v, out), kept, scale, causal) else None

    def backward(self, arrays: tuple[Array, ...], tops: Array, inverses: Array, scale: float, causal: bool,
                 grads: tuple[Array | None, ...]) -> bool:
        """Fills `grads`, those of q, k and v where not None, from q, k, v, out and grad; False where cuDNN has no plan."""
        xp = array_module(arrays[0])
        written = tuple(xp.empty(x.shape, x.dtype) if to is None else to for x, to in zip(arrays, grads))
        return self._run((*arrays, *written), logarithms_of(tops, inverses), scale, causal)

    def _run(self, arrays: tuple[Array, ...], kept: Array, scale: float, causal: bool) -> bool:
        key = Key(arrays[0].dtype.name, tuple(map(Operand.of, arrays)), bool(causal), float(scale))
        ordinal, pointer = self.device.ordinal(), self.device.pointer
        graph = self._graph(ordinal, key)
        if graph is None:
            return False
        handle = self._handle(ordinal)
        self.cudnn.set_stream(handle, self.device.stream())
        graph.execute({**{i + 1: pointer(x) for i, x in enumerate(arrays)}, STATS: pointer(kept)},
                      self.device.memory(max(1, graph.get_workspace_size())), handle=handle)
        return True

    def _built(self, ordinal: int, key: Key) -> Any:
        graph = graph_of(self.cudnn, key, self._handle(ordinal))
        try:
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([self.cudnn.heur_mode.A, self.cudnn.heur_mode.FALLBACK])
            graph.check_support()
            graph.build_plans()
        except self.cudnn.cudnnGraphNotSupportedError:
            return None
        return graph


DEVICES: dict[str, Callable[[], Any]] = {"cupy": Cupy}


@cache
def attention_of(module: str) -> Attention | None:
    """cuDNN's attention for arrays of a module, by the module's name; None where the frontend is not installed, or finds no
    library."""
    if module not in DEVICES or find_spec("cudnn") is None:
        return None
    cudnn = import_module("cudnn")
    try:
        cudnn.backend_version()
    except RuntimeError:
        return None
    return Attention(cudnn, DEVICES[module]())
