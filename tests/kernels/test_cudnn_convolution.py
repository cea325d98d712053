"""Convolutions by cuDNN's graphs, without cuDNN: a stand-in computes what a graph says; the frontend, where it is, takes it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from device_on_host import compiler
from fakegpu import put, xp

from mpitrain import nn
from mpitrain.autograd import Tensor
from mpitrain.backend import Device, cudnn_convolution
from mpitrain.backend.cudnn_convolution import Convolutions, Key, Operand, graph_of, is_channels_last
from mpitrain.kernels import convolution
from mpitrain.kernels.convolution import Window
from mpitrain.kernels.device import convolution as on_device

NAMES = {"FLOAT": np.dtype("float32"), "HALF": np.dtype("float16"), "BFLOAT16": np.dtype(ml_dtypes.bfloat16)}


class Unsupported(Exception):
    """What a graph raises for which there is no plan."""


class Names:
    """An enumeration: each name is its value."""

    def __getattr__(self, name: str) -> str:
        return name


class Memory:
    """A tensor of a graph."""

    def __init__(self, **said: Any):
        self.said = said

    def __getattr__(self, name: str) -> Any:
        def put(value: Any) -> Memory:
            self.said[name.removeprefix("set_")] = value
            return self
        return put


class Graph:
    """A graph that runs as the reference does, on arrays in the place of addresses."""

    def __init__(self, frontend: Frontend, **types: Any):
        self.frontend, self.types, self.tensors, self.steps = frontend, types, {}, []

    def tensor(self, **said: Any) -> Memory:
        self.tensors[said["uid"]] = Memory(**said)
        return self.tensors[said["uid"]]

    def __getattr__(self, name: str) -> Any:
        def node(**said: Any) -> Memory:
            self.product, self.said, self.tensors[3] = name, said, Memory()
            return self.tensors[3]

        def step(*given: Any) -> None:
            self.steps.append((name, *given))
            refused = self.frontend.refuses(self) if name == "check_support" else False
            if refused:
                raise Unsupported
        return node if name.startswith("conv_") else step

    def get_workspace_size(self) -> int:
        return 100

    def execute(self, given: dict[int, Any], workspace: Any, handle: Any) -> None:
        assert [name for name, *_ in self.steps] == ["validate", "build_operation_graph", "create_execution_plans",
                                                     "deselect_numeric_notes", "check_support", "build_plans"]
        assert handle == self.types["handle"] and workspace == 100
        for uid, x in given.items():
            said = self.tensors[uid].said
            assert tuple(said["dim"]) == x.shape and NAMES[said["data_type"]] == x.dtype
            strides = [s // x.dtype.itemsize for s in x._memory.strides]
            assert [s for s, n in zip(said["stride"], x.shape) if n > 1] == [s for s, n in zip(strides, x.shape) if n > 1]
        a, b, out = (given[i]._memory for i in (1, 2, 3))
        kernel = (out if self.product == "conv_wgrad" else b).shape[2:]
        window = Window(kernel, *(tuple(self.said[name]) for name in ("stride", "padding", "dilation")))
        channels = {"conv_fprop": a.shape[1], "conv_dgrad": out.shape[1], "conv_wgrad": a.shape[1]}[self.product]
        groups = channels // (out if self.product == "conv_wgrad" else b).shape[1]
        a, b = a.astype("float64"), b.astype("float64")
        out[...] = (convolution._convolve(a, b, None, window, groups) if self.product == "conv_fprop" else
                    convolution._adjoint(a, b, None, window, groups, out.shape[2:]) if self.product == "conv_dgrad" else
                    convolution._kernel_gradient(a, b, window, groups)[0])
        self.frontend.runs += 1


class Frontend:
    """What `import cudnn` gives."""

    data_type = numerical_note = heur_mode = Names()
    cudnnGraphNotSupportedError = Unsupported

    def __init__(self, refuses: Any = lambda graph: False):
        self.refuses, self.graphs, self.streams, self.runs = refuses, [], [], 0

    def pygraph(self, **types: Any) -> Graph:
        self.graphs.append(Graph(self, **types))
        return self.graphs[-1]

    def create_handle(self) -> str:
        return "handle"

    def set_stream(self, handle: str, stream: int) -> None:
        self.streams.append((handle, stream))


class OneDevice:
    """A device whose addresses are arrays."""

    def ordinal(self) -> int:
        return 0

    def stream(self) -> int:
        return 7

    def pointer(self, x: Any) -> Any:
        return x

    def memory(self, size: int) -> int:
        return size


def used(monkeypatch: pytest.MonkeyPatch, frontend: Frontend) -> Frontend:
    library = Convolutions(frontend, OneDevice())
    monkeypatch.setattr(on_device, "_installed", lambda module: library)
    return frontend


def data(dtype: Any, channels_last: bool = False) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    window, groups = Window((3, 2), (2, 1), (1, 2), (1, 2)), 2
    x, weight, bias, y = (rng.standard_normal(s).astype(dtype) for s in ((3, 4, 7, 6), (6, 2, 3, 2), (6,), (3, 6, 4, 8)))
    if channels_last:
        x, y = (np.ascontiguousarray(a.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2) for a in (x, y))
    return x, weight, bias, y, window, groups


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", list(NAMES.values()), ids=str)
def test_products_of_graphs_are_those_of_the_kernels(dtype: Any, channels_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    frontend = used(monkeypatch, Frontend())
    x, weight, bias, y, window, groups = data(dtype, channels_last)
    wide = [a.astype("float64") for a in (x, weight, bias, y)]
    for _ in range(2):                            # The second time no graph is made.
        made = on_device.convolve(put(x), put(weight), put(bias), window, groups)
        back = on_device.convolve_adjoint(put(y), put(weight), None, window, groups, (7, 6))
        out = put(np.full(weight.shape, np.nan, "float32"))
        gradient, sums = on_device.kernel_gradient(put(x), put(y), window, groups, out, "y")
    assert len(frontend.graphs) == 3 and frontend.runs == 6 and set(frontend.streams) == {("handle", 7)}
    assert gradient is out and is_channels_last(made) == is_channels_last(back) == channels_last and made.dtype == dtype
    tolerance = 1e-6 if dtype == "float32" else 0.02
    for found, wanted in ((made, convolution._convolve(*wide[:3], window, groups)), (out, convolution._kernel_gradient(
            wide[0], wide[3], window, groups)[0]), (back, convolution._adjoint(wide[3], wide[1], None, window, groups, (7, 6))),
            (sums, wide[3].sum((0, 2, 3)))):
        np.testing.assert_allclose(found.get().astype("float64"), wanted, rtol=0, atol=tolerance * abs(wanted).max())


def test_tensor_cores_take_float32_where_a_layer_is_in_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    frontend = used(monkeypatch, Frontend())
    layer = nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2)
    layer.initialize(seed=1, dtype="tf32", device=Device("gpu", xp))
    x, *_, y, _, _ = data("float32")
    layer(Tensor(put(x), requires_grad=True)).backward(put(y))
    assert len(frontend.graphs) == 3
    for graph in frontend.graphs:                 # forward, and both gradients
        assert graph.steps[3][1] == ["NONDETERMINISTIC", "REDUCED_PRECISION_REDUCTION", "DOWN_CONVERT_INPUTS", "WINOGRAD", "FFT"]


def test_float32_is_not_rounded_and_no_plan_may_change_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, more in (("float32", ["TENSOR_CORE", "DOWN_CONVERT_INPUTS", "WINOGRAD", "FFT"]), ("float16", [])):
        frontend = used(monkeypatch, Frontend())
        x, weight, _, _, window, groups = data(dtype)
        on_device.convolve(put(x), put(weight), None, window, groups)
        assert frontend.graphs[0].steps[3][1] == ["NONDETERMINISTIC", "REDUCED_PRECISION_REDUCTION", *more]


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_our_kernels_serve_without_the_package_where_there_is_no_plan_and_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias, _, window, groups = data("float32")
    monkeypatch.setattr(on_device, "find_spec", lambda name: None)
    assert on_device._installed("fakegpu") is None and on_device._installed.__wrapped__("cupy") is None
    wanted = on_device.convolve(put(x), put(weight), put(bias), window, groups)
    frontend = used(monkeypatch, Frontend(lambda graph: True))
    found = on_device.convolve(put(x), put(weight), put(bias), window, groups)
    np.testing.assert_array_equal(found.get(), wanted.get())
    on_device.convolve(put(x.astype("float64")), put(weight.astype("float64")), None, window, groups)
    assert len(frontend.graphs) == 1 and frontend.runs == 0


def test_a_16_bit_gradient_is_converted_where_there_is_no_plan_for_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    frontend = used(monkeypatch, Frontend(lambda graph: graph.tensors[3].said["data_type"] == "FLOAT"))
    x, _, _, y, window, groups = data("float16")
    gradient, _ = on_device.kernel_gradient(put(x), put(y), window, groups)
    assert gradient.dtype == np.dtype("float32") and len(frontend.graphs) == 2 and frontend.runs == 1


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_frontend_takes_the_graphs_and_infers_our_shapes(channels_last: bool) -> None:
    cudnn = pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")
    x, weight, y = (Operand.of(s, "bfloat16", channels_last) for s in ((3, 4, 7, 6), (6, 2, 3, 2), (3, 6, 4, 8)))
    for product, first, second, result in (("conv_fprop", x, weight, y), ("conv_dgrad", y, weight, x),
                                           ("conv_wgrad", x, y, weight._replace(dtype="float32"))):
        graph = graph_of(cudnn, Key(product, first, second, result, (2, 1), (1, 2), (1, 2)))
        by_number = {t.uid: t for t in graph.tensors.values()}
        for uid, operand in ((1, first), (2, second), (3, result)):
            assert (tuple(by_number[uid].dim), tuple(by_number[uid].stride)) == operand[:2]
        assert [t.uid for t in graph.get_outputs()] == [3] and len(graph.nodes) == 1
        notes = cudnn_convolution.notes_of(cudnn, "float32")
        assert len(notes) == len(set(notes)) == 6


def test_an_image_that_lies_in_no_order_is_copied() -> None:
    x = put(np.ones((2, 3, 5, 7), "float32"))
    assert not is_channels_last(x) and cudnn_convolution.laid(x, False) is not None
    assert is_channels_last(xp.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2))
    assert cudnn_convolution.laid(x[:, ::2], False).flags.c_contiguous
