"""Convolutions against PyTorch, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain import ops
from mpitrain.backend.native import compiler, missing, wanted
from mpitrain.errors import ShapeError
from mpitrain.kernels import convolution
from tests.ops.parity import check, check_gradient

# batch, channels, height, width; outputs, kernel; stride, padding, dilation, groups
GEOMETRIES = [
    (2, 3, 8, 8, 5, (3, 3), 1, 1, 1, 1),
    (2, 4, 9, 7, 6, (3, 2), (2, 3), (1, 0), 1, 2),
    (3, 4, 11, 10, 4, (3, 3), (1, 2), (2, 1), (2, 3), 4),
    (2, 16, 6, 6, 20, (1, 1), 1, 0, 1, 1),
    (2, 5, 7, 7, 3, (1, 1), 2, 0, 1, 1),
    (1, 1, 28, 28, 6, (5, 5), 1, 2, 1, 1),
    (2, 2, 3, 3, 2, (2, 2), 1, 4, 1, 1),
    (2, 2, 40, 50, 9, (3, 3), 1, 1, 1, 1),
    (2, 2, 3, 3, 2, (5, 5), 1, 18, 5, 1),            # more padding than a vector has lanes
    (1, 1, 1, 1, 1, (1, 1), 1, 0, 1, 1),
    (0, 2, 4, 4, 3, (3, 3), 1, 1, 1, 1),
    (2, 3, 9, 9, 2, (3, 3), 4, 0, 1, 1),
    (2, 3, 9, 9, 4, (2, 2), 3, 0, 2, 1),
    (40, 3, 32, 32, 4, (3, 3), 1, 1, 1, 1),
    (2, 6, 14, 14, 16, (5, 5), 1, 0, 1, 1),
    (2, 8, 12, 20, 24, (3, 3), 2, 1, 1, 1),
    # tiles of 2 x 2 results: rows of 1, 2 and 4 in a vector, odd sizes, groups, blocks of rows, pieces of channels
    (4, 16, 8, 8, 16, (3, 3), 1, 1, 1, 1),
    (2, 17, 13, 15, 18, (3, 3), 1, 0, 1, 1),
    (2, 32, 9, 34, 36, (3, 3), 1, (2, 1), 1, 2),
    (1, 16, 70, 50, 16, (3, 3), 1, 1, 1, 1),
    (5, 35, 8, 8, 33, (3, 3), 1, 1, 1, 1),
    (2, 64, 13, 20, 66, (3, 3), 1, 1, 1, 2),
    (2, 32, 6, 37, 40, (3, 3), 1, 0, 1, 1),
    # each channel by itself: rows of part of a vector, of some and a part, bands of rows, all paddings of both strides
    (3, 4, 16, 16, 4, (3, 3), 1, 1, 1, 4),
    (2, 3, 7, 7, 3, (3, 3), 2, 1, 1, 3),
    (2, 3, 7, 5, 3, (3, 3), 1, (0, 2), 1, 3),
    (2, 3, 9, 8, 3, (3, 3), 2, (2, 0), 1, 3),
    (2, 2, 90, 70, 2, (3, 3), 1, (2, 1), 1, 2),
    (2, 2, 91, 67, 2, (3, 3), 2, (1, 2), 1, 2),
    (2, 3, 20, 37, 3, (5, 5), 1, (2, 0), 1, 3),
    (2, 3, 35, 33, 3, (5, 5), 2, (4, 2), 1, 3),
    (2, 3, 20, 37, 3, (5, 5), 2, (1, 3), 1, 3),
    (2, 3, 20, 37, 3, (5, 5), 1, 4, 1, 3),
    (2, 32, 8, 8, 32, (3, 3), 1, 1, 1, 32),          # small ones, with vectors over channels: whole vectors, and a part
    (2, 20, 9, 7, 20, (3, 3), 2, 1, 1, 20),
    (2, 17, 5, 6, 17, (5, 5), 1, (2, 3), 1, 17),
    (2, 17, 10, 9, 17, (5, 5), 2, 2, 1, 17),
    (3, 18, 3, 4, 18, (3, 3), 1, (2, 1), 1, 18),
    (3, 13, 9, 9, 40, (1, 1), 1, 0, 1, 1),           # gradients of kernels by 6 channels, whole and in part
    (20, 30, 4, 4, 34, (1, 1), 1, 0, 1, 1),
    (3, 28, 7, 7, 66, (1, 1), 1, 0, 1, 2),
]
WINOGRAD = [g for g in GEOMETRIES if g[1] // g[9] >= 16 and g[5] == (3, 3)]
# without those that PyTorch refuses here: no images, and more padding than image
TRANSPOSED = [g for g in GEOMETRIES if g[0] > 0 and g[2:4] != (3, 3)]


def torch_functions():
    return pytest.importorskip("torch").nn.functional


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("native", [True, False], ids=["native", "matrix products"])
@pytest.mark.promise("D7")
def test_conv2d_equals_pytorch(geometry, native, monkeypatch):
    if not native:
        without_compiler(monkeypatch)
    elif compiler() and wanted() != "numpy":
        assert convolution.convolve.host() is not None, missing()
    n, c, h, w, o, kernel, stride, padding, dilation, groups = geometry
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    functions = torch_functions()
    check(lambda x, k, b: ops.conv2d(x, k, b, **options), lambda x, k, b: functions.conv2d(x, k, b, **options),
          (n, c, h, w), (o, c // groups, *kernel), (o,))


@pytest.mark.parametrize("geometry", TRANSPOSED, ids=str)
@pytest.mark.parametrize("native", [True, False], ids=["native", "matrix products"])
def test_conv_transpose2d_equals_pytorch(geometry, native, monkeypatch):
    if not native:
        without_compiler(monkeypatch)
    n, c, h, w, o, kernel, stride, padding, dilation, groups = geometry
    extra = tuple(s - 1 for s in (stride if isinstance(stride, tuple) else (stride, stride)))
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "output_padding": extra}
    functions = torch_functions()
    o = o if o % groups == 0 else o * groups
    check(lambda x, k, b: ops.conv_transpose2d(x, k, b, **options),
          lambda x, k, b: functions.conv_transpose2d(x, k, b, **options),
          (n, c, h, w), (c, o // groups, *kernel), (o,))


def without_compiler(monkeypatch):
    for kernel in (convolution.convolve, convolution.convolve_adjoint, convolution.kernel_gradient):
        monkeypatch.setattr(kernel, "host", lambda: None)


@pytest.mark.parametrize("geometry", [g for g in GEOMETRIES if g[0] > 1], ids=str)
def test_the_bits_of_an_image_do_not_depend_on_the_others(geometry):
    n, c, h, w, o, kernel, stride, padding, dilation, groups = geometry
    rng = np.random.default_rng(0)
    x, weight, bias = (rng.standard_normal(shape, dtype=np.float32) for shape in ((n, c, h, w), (o, c // groups, *kernel), (o,)))
    window = convolution.Window(kernel, *(s if isinstance(s, tuple) else (s, s) for s in (stride, padding, dilation)))
    y = convolution.convolve(x, weight, bias, window, groups)
    back = convolution.convolve_adjoint(y, weight, None, window, groups, (h, w))
    for i in range(n):
        alone = convolution.convolve(x[i:i + 1], weight, bias, window, groups)
        assert alone.tobytes() == y[i:i + 1].tobytes()
        assert convolution.convolve_adjoint(alone, weight, None, window, groups, (h, w)).tobytes() == back[i:i + 1].tobytes()


@pytest.mark.parametrize("geometry", WINOGRAD, ids=str)
def test_tiles_of_results_are_as_exact_as_plain_sums(geometry):
    n, c, h, w, o, kernel, stride, padding, dilation, groups = geometry
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((n, c, h, w)), rng.standard_normal((o, c // groups, *kernel))
    window = convolution.Window(kernel, (stride, stride), padding if isinstance(padding, tuple) else (padding, padding))
    exact = convolution.convolve.reference(x, weight, None, window, groups)
    found = convolution.convolve(x.astype(np.float32), weight.astype(np.float32), None, window, groups)
    assert np.abs(found - exact).max() <= 1e-6 * np.abs(exact).max()


def test_a_convolution_without_a_bias_passes_the_gradient_check():
    check_gradient(lambda x, k: ops.conv2d(x, k, padding=1), (2, 3, 5, 4), (2, 3, 3, 3))


def test_a_transposed_convolution_of_no_images_gives_no_images():
    assert ops.conv_transpose2d(np.zeros((0, 2, 4, 4)), np.zeros((2, 3, 2, 2)), stride=2).shape == (0, 3, 8, 8)


def test_shapes_that_do_not_fit_are_refused():
    x, weight = np.zeros((2, 4, 5, 5)), np.zeros((6, 4, 3, 3))
    cases = [
        (lambda: ops.conv2d(x[0, 0], weight), r"conv2d: the input has shape \(5, 5\), expected \(N, C, H, W\)"),
        (lambda: ops.conv2d(x, weight[0]), r"conv2d: the weight has shape \(4, 3, 3\), expected 4 dims"),
        (lambda: ops.conv2d(x[:, :3], weight), "conv2d: the input has 3 channels, the weight .* expects 4"),
        (lambda: ops.conv2d(x, weight, groups=4), "conv2d: 16 input and 6 output channels cannot be split into 4 groups"),
        (lambda: ops.conv2d(x, weight, dilation=3), "does not fit into images of 5x5"),
        (lambda: ops.conv2d(x, weight, stride=0), "conv2d: stride is 0, expected an integer of at least 1"),
        (lambda: ops.conv2d(x, weight, np.zeros(4)), r"conv2d: the bias has shape \(4,\), expected \(6,\)"),
        (lambda: ops.conv_transpose2d(x, weight), "conv_transpose2d: the input has 4 channels, the weight .* expects 6"),
        (lambda: ops.conv_transpose2d(x, weight[:4], output_padding=1), r"output_padding is \(1, 1\); it must be smaller"),
        (lambda: ops.conv_transpose2d(x, weight[:4], padding=4), "would give -1x-1; pad less"),
    ]
    for call, message in cases:
        with pytest.raises(ShapeError, match=message):
            call()
