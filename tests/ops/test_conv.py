"""Convolutions against PyTorch, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain import ops
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
    (1, 1, 1, 1, 1, (1, 1), 1, 0, 1, 1),
    (0, 2, 4, 4, 3, (3, 3), 1, 1, 1, 1),
    (2, 3, 9, 9, 2, (3, 3), 4, 0, 1, 1),
    (2, 3, 9, 9, 4, (2, 2), 3, 0, 2, 1),
    (40, 3, 32, 32, 4, (3, 3), 1, 1, 1, 1),
]
# without those that PyTorch refuses here: no images, and more padding than image
TRANSPOSED = [g for g in GEOMETRIES if g[0] > 0 and g[2:4] != (3, 3)]


def torch_functions():
    return pytest.importorskip("torch").nn.functional


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("native", [True, False], ids=["native", "matrix products"])
def test_conv2d_equals_pytorch(geometry, native, monkeypatch):
    if not native:
        without_compiler(monkeypatch)
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


def test_a_convolution_without_a_bias_passes_the_gradient_check():
    check_gradient(lambda x, k: ops.conv2d(x, k, padding=1), (2, 3, 5, 4), (2, 3, 3, 3))


def test_a_transposed_convolution_of_no_images_gives_no_images():
    assert ops.conv_transpose2d(np.zeros((0, 2, 4, 4)), np.zeros((2, 3, 2, 2)), stride=2).shape == (0, 3, 8, 8)


def test_shapes_that_do_not_fit_are_refused():
    x, weight = np.zeros((2, 4, 5, 5)), np.zeros((6, 4, 3, 3))
    cases = [
        (lambda: ops.conv2d(x[0], weight), r"conv2d: the input has shape \(4, 5, 5\), expected \(N, C, H, W\)"),
        (lambda: ops.conv2d(x, weight[0]), r"conv2d: the weight has shape \(4, 3, 3\), expected 4 dims"),
        (lambda: ops.conv2d(x[:, :3], weight), "conv2d: the input has 3 channels, the weight .* expects 4"),
        (lambda: ops.conv2d(x, weight, groups=4), "conv2d: 16 input and 6 output channels cannot be split into 4 groups"),
        (lambda: ops.conv2d(x, weight, dilation=3), "does not fit into images of 5x5"),
        (lambda: ops.conv2d(x, weight, stride=0), r"stride \(0, 0\) .* must be at least 1"),
        (lambda: ops.conv2d(x, weight, np.zeros(4)), r"conv2d: the bias has shape \(4,\), expected \(6,\)"),
        (lambda: ops.conv_transpose2d(x, weight), "conv_transpose2d: the input has 4 channels, the weight .* expects 6"),
        (lambda: ops.conv_transpose2d(x, weight[:4], output_padding=1), r"output_padding is \(1, 1\); it must be smaller"),
        (lambda: ops.conv_transpose2d(x, weight[:4], padding=4), "would give -1x-1; pad less"),
    ]
    for call, message in cases:
        with pytest.raises(ShapeError, match=message):
            call()
