"""Convolutions of series and volumes against PyTorch, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain import nn, ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ShapeError
from mpitrain.kernels.product import rounded
from tests.ops.parity import check, check_gradient

# shape, outputs, kernel; stride, padding, dilation, groups
SERIES = [((2, 3, 10), 5, (3,), 1, 1, 1, 1), ((2, 4, 17), 6, (4,), 3, 2, 2, 2), ((1, 6, 9), 6, (3,), 2, (1,), 1, 6),
          ((2, 16, 33), 20, (1,), 2, 0, 1, 1), ((1, 2, 3), 2, (5,), 1, 12, 3, 1), ((0, 2, 8), 3, (3,), 1, 1, 1, 1),
          ((3, 70), 4, (5,), 4, 1, 1, 1)]
VOLUMES = [((2, 3, 5, 6, 7), 4, (3, 3, 3), 1, 1, 1, 1), ((2, 4, 9, 8, 7), 6, (2, 3, 1), (2, 3, 1), (1, 0, 2), (3, 2, 1), 2),
           ((1, 4, 4, 5, 5), 4, (3, 3, 3), 1, 1, 1, 4), ((2, 2, 3, 3, 3), 2, (3, 2, 2), 3, 4, 2, 1),
           ((1, 16, 4, 8, 8), 17, (3, 3, 3), 1, 1, 1, 1), ((0, 2, 4, 4, 4), 2, (3, 3, 3), 1, 1, 1, 1),
           ((3, 4, 5, 6), 2, (2, 2, 2), 2, 0, 1, 1), ((2, 3, 6, 4, 4), 2, (1, 3, 3), (4, 1, 1), 0, 1, 1)]


def functions():
    return pytest.importorskip("torch").nn.functional


@pytest.mark.parametrize("geometry", [*SERIES, *VOLUMES], ids=str)
def test_convolutions_of_one_and_three_dims_equal_pytorch(geometry):
    shape, o, kernel, stride, padding, dilation, groups = geometry
    dims, options = len(kernel), {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    c = shape[-dims - 1]
    ours, theirs = getattr(ops, f"conv{dims}d"), getattr(functions(), f"conv{dims}d")
    check(lambda x, w, b: ours(x, w, b, **options), lambda x, w, b: theirs(x, w, b, **options),
          shape, (o, c // groups, *kernel), (o,))


@pytest.mark.parametrize("geometry", [g for g in (*SERIES, *VOLUMES) if g[0][0] > 0], ids=str)
def test_transposed_convolutions_of_one_and_three_dims_equal_pytorch(geometry):
    shape, o, kernel, stride, padding, dilation, groups = geometry
    dims = len(kernel)
    padding = 1 if padding in (4, 12) else padding
    steps, apart = ([v] * dims if isinstance(v, int) else v for v in (stride, dilation))
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups,
               "output_padding": tuple(max(s, d) - 1 for s, d in zip(steps, apart))}
    ours, theirs = getattr(ops, f"conv_transpose{dims}d"), getattr(functions(), f"conv_transpose{dims}d")
    check(lambda x, w, b: ours(x, w, b, **options), lambda x, w, b: theirs(x, w, b, **options),
          shape, (shape[-dims - 1], o // groups, *kernel), (o // groups * groups,))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.filterwarnings("ignore:Using padding=.same.")
def test_padding_by_name_equals_pytorch(dims, padding):
    ours, theirs = getattr(ops, f"conv{dims}d"), getattr(functions(), f"conv{dims}d")
    for kernel, dilation in ((4, 1), (3, 2), (2, 3)):
        options = {"padding": padding, "dilation": dilation}
        check(lambda x, w, o=options: ours(x, w, **o), lambda x, w, o=options: theirs(x, w, **o),
              (2, 2, *[8, 7, 9][:dims]), (3, 2, *[kernel] * dims))


def test_images_and_rows_that_no_window_reaches_equal_pytorch():
    f = functions()
    check(lambda x, w, b: ops.conv2d(x, w, b), f.conv2d, (3, 6, 5), (4, 3, 2, 2), (4,))
    check(lambda x, w, b: ops.conv_transpose2d(x, w, b, 1, 0, (2, 0), 1, (3, 1)),
          lambda x, w, b: f.conv_transpose2d(x, w, b, 1, 0, (2, 0), 1, (3, 1)), (3, 6, 5), (3, 4, 2, 2), (4,))


def test_volumes_pass_the_gradient_check():
    check_gradient(lambda x, w: ops.conv3d(x, w, stride=2, padding=1), (2, 2, 4, 5, 3), (3, 2, 3, 2, 2))
    check_gradient(lambda x, w: ops.conv_transpose3d(x, w, stride=2, padding=1), (2, 2, 3, 3, 3), (2, 3, 3, 2, 2))


def test_the_bits_of_a_volume_do_not_depend_on_the_others():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((3, 4, 5, 8, 8), dtype=np.float32), rng.standard_normal((6, 4, 3, 3, 3), dtype=np.float32)
    together = ops.conv3d(x, w, padding=1).array
    for i in range(3):
        assert ops.conv3d(x[i:i + 1], w, padding=1).array.tobytes() == together[i:i + 1].tobytes()


def test_convolutions_that_do_not_fit_are_refused():
    x, w = np.zeros((2, 4, 5)), np.zeros((6, 4, 3))
    cases = [
        (lambda: ops.conv1d(np.zeros(3), w), r"conv1d: the input has shape \(3,\), expected \(N, C, L\), or that without N"),
        (lambda: ops.conv3d(x, w), r"conv3d: the weight has shape \(6, 4, 3\), expected 5 dims"),
        (lambda: ops.conv1d(x, w, dilation=3), r"window \(3,\) with dilation \(3,\) does not fit into an input of \(5,\)"),
        (lambda: ops.conv1d(x, w, stride=0), "conv1d: stride is 0, expected an integer of at least 1"),
        (lambda: ops.conv1d(x, w, stride=(1, 2)), r"conv1d: stride is \(1, 2\), expected an integer .*, or 1 of them"),
        (lambda: ops.conv1d(x, w, padding="full"), 'conv1d: padding is "full", expected integers, "same" or "valid"'),
        (lambda: ops.conv1d(x, w, padding="same", stride=2), r'padding="same" wants a stride of 1, found \(2,\)'),
        (lambda: ops.conv1d(x[:, :3], w), "conv1d: the input has 3 channels, the weight .* expects 4"),
        (lambda: ops.conv1d(x, w, groups=3), "12 input and 6 output channels cannot be split into 3 groups|expects 12"),
        (lambda: ops.conv1d(x, w.astype(np.float32)), "inputs of float64 and float32; convert one of them first"),
        (lambda: ops.conv_transpose1d(x, w[:4], padding=9), "conv_transpose1d: .* would give -11; pad less"),
        (lambda: ops.conv_transpose1d(x, w[:4], output_padding=1), r"output_padding is \(1,\); it must be smaller"),
    ]
    for call, message in cases:
        with pytest.raises(ShapeError, match=message):
            call()


@pytest.mark.parametrize("layer", [nn.Conv1d, nn.ConvTranspose1d, nn.Conv3d, nn.ConvTranspose3d])
def test_a_weight_in_bfloat16_rounds_what_is_multiplied(layer):
    shape = (2, 8, 20) if "1d" in layer.__name__ else (2, 8, 5, 6, 6)
    x, made = np.random.default_rng(0).standard_normal(shape).astype(np.float32), layer(8, 6, 3, bias=False)
    made.initialize()
    full = made(Tensor(x)).array
    made.weight.operands = "bfloat16"
    found = made(Tensor(x)).array
    made.weight.operands, made.weight.array[...] = "", rounded(made.weight.array)
    np.testing.assert_allclose(found, made(Tensor(rounded(x))).array, rtol=0, atol=2e-5)
    assert np.abs(found - full).max() > 1e-4
