"""Convolutions by NVIDIA's cuDNN: graphs of its frontend (nvidia-cudnn-frontend), where it and the library are installed.

This has never run on a GPU. Without one were tested: that the frontend takes these graphs and infers our shapes and strides
from them, and, by a stand-in that computes what a graph says, the operands, keys and results. Not tested: which plans cuDNN has
for them, and that float32 gradients of 16-bit images are among them (where they are not, a 16-bit gradient is converted).

Images (N, C, H, W) go as they lie: without gaps, or without gaps as (N, H, W, C), and what comes out lies so too. Only plans
that give the same bits each time are taken; in float32, none that computes by Winograd's or Fourier's transforms, or has
operands of fewer bits, but for TF32 where that is asked for.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from mpitrain.backend.cudnn_device import Cupy
from mpitrain.backend.namespace import Array, array_module

FORMATS = {"float32": "FLOAT", "bfloat16": "BFLOAT16", "float16": "HALF"}
NEVER = ("NONDETERMINISTIC", "REDUCED_PRECISION_REDUCTION")
NEVER_IN_TF32 = "DOWN_CONVERT_INPUTS", "WINOGRAD", "FFT"        # tensor cores take float32 as TF32: what is converted is less
NEVER_IN_FLOAT32 = "TENSOR_CORE", *NEVER_IN_TF32
FIRST, SECOND, RESULT = 1, 2, 3                   # numbers of the operands in a graph
Shape = tuple[int, ...]


class Operand(NamedTuple):
    """Memory as a graph knows it; strides in numbers."""

    shape: Shape
    strides: Shape
    dtype: str

    @classmethod
    def of(cls, shape: Shape, dtype: str, channels_last: bool) -> Operand:
        n, c, h, w = shape
        return cls(shape, (c * h * w, 1, w * c, c) if channels_last else (c * h * w, h * w, w, 1), dtype)


class Key(NamedTuple):
    """What a graph is made for: "conv_fprop", "conv_dgrad" or "conv_wgrad" of two operands, and the result's memory."""

    product: str
    first: Operand
    second: Operand
    result: Operand
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    operands: str = ""                            # "tf32": products of float32 may have 10 bits of fraction


PORTS = {"conv_fprop": ("image", "weight"), "conv_dgrad": ("loss", "filter"), "conv_wgrad": ("image", "loss")}


def graph_of(cudnn: Any, key: Key, handle: Any = None) -> Any:
    """The graph of a convolution, not yet validated: that asks for a device."""
    types = {name: getattr(cudnn.data_type, kind) for name, kind in FORMATS.items()}
    graph = cudnn.pygraph(handle=handle, io_data_type=types[key.first.dtype], intermediate_data_type=types["float32"],
                          compute_data_type=types["float32"])
    operands = [graph.tensor(dim=list(x.shape), stride=list(x.strides), data_type=types[x.dtype], name=name, uid=uid)
                for uid, name, x in zip((FIRST, SECOND), PORTS[key.product], (key.first, key.second))]
    result = getattr(graph, key.product)(
        **dict(zip(PORTS[key.product], operands)),
        **{name: list(getattr(key, name)) for name in ("padding", "stride", "dilation")})
    result.set_output(True).set_data_type(types[key.result.dtype]).set_dim(list(key.result.shape))
    result.set_stride(list(key.result.strides)).set_uid(RESULT)
    return graph


def notes_of(cudnn: Any, dtype: str, operands: str = "") -> list[Any]:
    """What a plan for operands of that dtype may not be."""
    more = () if dtype != "float32" else NEVER_IN_TF32 if operands == "tf32" else NEVER_IN_FLOAT32
    return [getattr(cudnn.numerical_note, name) for name in (*NEVER, *more)]


class Convolutions:
    """The three products, by graphs that are kept. Each answers None where cuDNN has no plan for it."""

    def __init__(self, cudnn: Any, device: Any):
        self.cudnn, self.device = cudnn, device
        self._handle = cache(lambda ordinal: cudnn.create_handle())
        self._graph = cache(self._built)

    def takes(self, dtype: Any) -> bool:
        return dtype.name in FORMATS

    def convolve(self, x: Array, weight: Array, shape: Shape, window: Any, operands: str = "") -> Array | None:
        """y of that shape from x and weight, without a bias."""
        return self._product("conv_fprop", x, weight, shape, window, operands)

    def adjoint(self, y: Array, weight: Array, shape: Shape, window: Any, operands: str = "") -> Array | None:
        """x of that shape from y and weight, without a bias."""
        return self._product("conv_dgrad", y, weight, shape, window, operands)

    def gradient(self, x: Array, y: Array, shape: Shape, window: Any, operands: str = "") -> Array | None:
        """The kernel's gradient, of that shape, in float32 whatever x."""
        found = self._product("conv_wgrad", x, y, shape, window, operands, "float32")
        if found is None and x.dtype.name != "float32":
            found = self._product("conv_wgrad", x, y, shape, window)
        return None if found is None else found.astype("float32", copy=False)

    def _product(self, product: str, first: Array, second: Array, shape: Shape, window: Any, operands: str = "",
                 dtype: str = "") -> Array | None:
        xp, name = array_module(first), first.dtype.name
        last = is_channels_last(first)
        first, second = laid(first, last), laid(second, last)
        result = Operand.of(shape, dtype or name, last)
        key = Key(product, Operand.of(first.shape, name, last), Operand.of(second.shape, name, last), result, window.stride,
                  window.padding, window.dilation, operands)
        ordinal = self.device.ordinal()
        graph = self._graph(ordinal, key)
        if graph is None:
            return None
        n, c, h, w = shape
        made = xp.empty((n, h, w, c) if last else shape, dtype or first.dtype)
        out = made.transpose(0, 3, 1, 2) if last else made
        handle, pointer = self._handle(ordinal), self.device.pointer
        self.cudnn.set_stream(handle, self.device.stream())
        graph.execute({FIRST: pointer(first), SECOND: pointer(second), RESULT: pointer(out)},
                      self.device.memory(max(1, graph.get_workspace_size())), handle=handle)
        return out

    def _built(self, ordinal: int, key: Key) -> Any:
        graph = graph_of(self.cudnn, key, self._handle(ordinal))
        try:
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([self.cudnn.heur_mode.A, self.cudnn.heur_mode.FALLBACK])
            graph.deselect_numeric_notes(notes_of(self.cudnn, key.first.dtype, key.operands))
            graph.check_support()
            graph.build_plans()
        except self.cudnn.cudnnGraphNotSupportedError:
            return None
        return graph


def is_channels_last(x: Array) -> bool:
    """Whether numbers lie without gaps as (N, H, W, C), and not as (N, C, H, W)."""
    return bool(not x.flags.c_contiguous and x.transpose(0, 2, 3, 1).flags.c_contiguous)


def laid(x: Array, channels_last: bool) -> Array:
    """x as a graph takes it: itself where it lies so, else a copy."""
    xp = array_module(x)
    return xp.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2) if channels_last else xp.ascontiguousarray(x)


@cache
def convolutions() -> Convolutions | None:
    """Those of CuPy's arrays; None where the frontend finds no cuDNN library."""
    import cudnn
    try:
        cudnn.backend_version()
    except RuntimeError:
        return None
    return Convolutions(cudnn, Cupy())
