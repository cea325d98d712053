"""Patches, shuffles and sampling at positions against PyTorch, and what is refused."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from mpitrain import ops
from mpitrain.autograd import Tensor, grad
from mpitrain.errors import ShapeError
from tests.ops.parity import check

torch = pytest.importorskip("torch")
F = torch.nn.functional
RNG = np.random.default_rng(0)


@pytest.mark.parametrize("window", [(2, 1, 0, 1), ((3, 2), (1, 2), (1, 0), (2, 1)), (3, 1, 1, 3)], ids=str)
def test_patches_equal_pytorch(window):
    check(lambda x: ops.im2col(x, *window), lambda x: F.unfold(x, *window), (2, 3, 7, 6))
    columns = F.unfold(torch.zeros(2, 3, 7, 6), *window).shape
    check(lambda x: ops.fold(x, (7, 6), *window), lambda x: F.fold(x, (7, 6), *window), tuple(columns))


def test_shuffles_equal_pytorch():
    check(lambda x: ops.pixel_shuffle(x, 2), lambda x: F.pixel_shuffle(x, 2), (2, 8, 3, 4))
    check(lambda x: ops.pixel_unshuffle(x, 2), lambda x: F.pixel_unshuffle(x, 2), (2, 3, 4, 6))
    check(lambda x: ops.channel_shuffle(x, 3), lambda x: F.channel_shuffle(x, 3), (2, 6, 3, 4))


@pytest.mark.parametrize(("mode", "padding", "align"), list(product(("bilinear", "nearest", "bicubic"), (
    "zeros", "border", "reflection"), (True, False))), ids=str)
def test_sampling_equals_pytorch(mode, padding, align):
    options = {"mode": mode, "padding_mode": padding, "align_corners": align}
    check(lambda x, g: ops.grid_sample(x, g, **options), lambda x, g: F.grid_sample(x, g, **options),
          (2, 3, 5, 6), RNG.uniform(-1.6, 1.6, (2, 4, 3, 2)))
    if mode != "bicubic":
        check(lambda x, g: ops.grid_sample(x, g, **options), lambda x, g: F.grid_sample(x, g, **options),
              (1, 2, 3, 5, 4), RNG.uniform(-1.6, 1.6, (1, 2, 4, 3, 3)))


@pytest.mark.parametrize("align", [True, False])
def test_affine_grids_equal_pytorch(align):
    for size, theta in (((2, 1, 4, 5), (2, 2, 3)), ((1, 2, 3, 4, 2), (1, 3, 4))):
        check(lambda t, s=size: ops.affine_grid(t, s, align), lambda t, s=size: F.affine_grid(t, s, align), theta)


def test_sampling_has_second_derivatives():
    x, places = RNG.standard_normal((1, 2, 5, 5)), RNG.uniform(-0.8, 0.8, (1, 3, 3, 2))
    leaf = Tensor(places, requires_grad=True)

    def slope(values):
        at = Tensor(values, requires_grad=True)
        return at, grad((ops.grid_sample(x, at, "bicubic", align_corners=True) ** 2).sum(), at, create_graph=True)[0]
    leaf, first = slope(places)
    direction = RNG.standard_normal(places.shape)
    second, = grad((first * direction).sum(), leaf)
    step = 1e-6
    numeric = (slope(places + step * direction)[1].array - slope(places - step * direction)[1].array) / (2 * step)
    np.testing.assert_allclose(second.array, numeric, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused():
    x = np.zeros((1, 4, 3, 3))
    cases = [
        (lambda: ops.im2col(x, 4), "im2col: the window .4, 4. with dilation .* does not fit into images of 3x3"),
        (lambda: ops.fold(np.zeros((1, 4, 5)), 3, 2), r"fold: columns of shape .*, expected \(N, C \* 4, 4\)"),
        (lambda: ops.pixel_shuffle(x, 3), "pixel_shuffle: shape .* with factor 3"),
        (lambda: ops.pixel_unshuffle(x, 2), "pixel_unshuffle: shape .* with factor 2"),
        (lambda: ops.channel_shuffle(x, 3), "channel_shuffle: shape .* in 3 groups"),
        (lambda: ops.grid_sample(x, np.zeros((2, 1, 1, 2))), "grid_sample: an input of shape"),
        (lambda: ops.grid_sample(x, np.zeros((1, 1, 1, 2)), "cubic"), 'grid_sample: mode "cubic"'),
        (lambda: ops.affine_grid(np.zeros((1, 2, 2)), (1, 1, 2, 2)), "affine_grid: theta"),
    ]
    for call, message in cases:
        with pytest.raises(ShapeError, match=message):
            call()
