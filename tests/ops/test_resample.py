"""Interpolation against PyTorch, with the native loops and with plain arrays, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain import ops
from mpitrain.errors import ShapeError
from mpitrain.kernels.resample import Taps, resample
from tests.ops.parity import check, check_gradient


@pytest.fixture(params=["native", "plain arrays"], autouse=True)
def version(request, monkeypatch):
    if request.param == "plain arrays":
        monkeypatch.setattr(resample, "host", lambda: None)


def theirs(**options):
    functions = pytest.importorskip("torch").nn.functional
    return lambda x: functions.interpolate(x, **options)


SHAPES = {1: (2, 3, 7), 2: (2, 2, 5, 8), 3: (1, 2, 4, 3, 6)}
SIZES = [{"size": 9}, {"size": 2}, {"size": 1}, {"scale_factor": 2.0}, {"scale_factor": 1.7}, {"scale_factor": 0.6}]
MODES = {1: ["nearest", "nearest-exact", "area", "linear"], 2: ["nearest", "nearest-exact", "area", "bilinear", "bicubic"],
         3: ["nearest", "nearest-exact", "area", "trilinear"]}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_interpolation_equals_pytorch(dims, size):
    for mode in MODES[dims]:
        corners = [{"align_corners": True}, {"align_corners": False}] if "linear" in mode or mode == "bicubic" else [{}]
        for corner in corners:
            options = {**size, "mode": mode, **corner}
            check(lambda x, o=options: ops.interpolate(x, **o), theirs(**options), SHAPES[dims])


def test_interpolation_with_a_wider_filter_and_sizes_of_each_dim_equals_pytorch():
    for options in ({"size": (3, 11), "mode": "bilinear"}, {"scale_factor": (0.4, 0.9), "mode": "bicubic"},
                    {"size": (2, 8), "mode": "bicubic", "align_corners": True}):
        check(lambda x, o=options: ops.interpolate(x, antialias=True, **o), theirs(antialias=True, **options), (2, 2, 9, 10))
    options = {"scale_factor": (1.3, 0.7), "mode": "bilinear", "recompute_scale_factor": True}
    check(lambda x: ops.interpolate(x, **options), theirs(**options), (2, 2, 9, 10))


def test_a_map_and_its_adjoint_are_one_map():
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 6, 13)
    taps = Taps(9, counts, rng.integers(0, 9, counts.sum()), rng.standard_normal(counts.sum()))
    for shape, dim in (((2, 9, 1100), 1), ((3, 2, 9), 2), ((9,), 0)):
        x = rng.standard_normal(shape)
        y = resample(x, taps, dim)
        z = rng.standard_normal(y.shape)
        assert np.isclose((y * z).sum(), (x * resample(z, taps.transposed, dim)).sum())
    check_gradient(lambda x: ops.interpolate(x, size=(7, 3), mode="bicubic"), (2, 2, 4, 5))


def test_what_is_outside_a_window_changes_nothing():
    x = np.zeros((1, 1, 6), np.float32)
    x[0, 0, 5] = np.nan
    assert np.isfinite(ops.interpolate(x, size=3, mode="area").array[0, 0]).tolist() == [True, True, False]


def test_interpolations_that_do_not_fit_are_refused():
    x = np.zeros((1, 1, 4, 4))
    cases = [
        (lambda: ops.interpolate(x), "wants either a size or a scale_factor"),
        (lambda: ops.interpolate(x, size=(2, 2, 2)), r"3 sizes or factors \(2, 2, 2\) for the 2 dims"),
        (lambda: ops.interpolate(x, size=0), r"to the size \(0, 0\); both must be at least 1"),
        (lambda: ops.interpolate(x, scale_factor=float("nan")), r"to the size \(0, 0\); both must be at least 1"),
        (lambda: ops.interpolate(x, size=3, mode="linear"), r'mode "linear" wants \(N, C, L\), found 4 dims'),
        (lambda: ops.interpolate(x, size=3, mode="cubic"), 'mode is "cubic", expected one of nearest'),
        (lambda: ops.interpolate(x, size=3, align_corners=True), 'align_corners has no meaning in mode "nearest"'),
        (lambda: ops.interpolate(x[0, 0], size=3), r"the input has shape \(4, 4\), expected \(N, C, L\)"),
        (lambda: ops.interpolate(x, size=3, antialias=True), 'antialias is for the modes bilinear and bicubic, not'),
    ]
    for call, message in cases:
        with pytest.raises(ShapeError, match=message):
            call()
