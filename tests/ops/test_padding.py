"""Padding in all its modes against PyTorch, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain import ops
from mpitrain.errors import ShapeError
from mpitrain.kernels.resample import resample
from tests.ops.parity import check, check_gradient

SHAPES = {1: (2, 3, 7), 2: (2, 3, 5, 6), 3: (1, 2, 4, 5, 6)}
WIDTHS = {1: [(1, 2), (0, 3), (-2, 1)], 2: [(1, 2, 0, 3), (2, -1, 0, 0)], 3: [(1, 2, 3, 0, 1, 1), (1, 0, -1, 0, 2, 2)]}


def theirs(widths, **options):
    functions = pytest.importorskip("torch").nn.functional
    return lambda x: functions.pad(x, widths, **options)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular", "constant"])
@pytest.mark.parametrize("native", [True, False])
def test_padding_equals_pytorch(dims, mode, native, monkeypatch):
    if not native:
        monkeypatch.setattr(resample, "host", lambda: None)
    for widths in WIDTHS[dims]:
        check(lambda x, w=widths: ops.pad(x, w, mode), theirs(widths, mode=mode), SHAPES[dims])


def test_a_negative_width_cuts_off():
    check(lambda x: ops.pad(x, [(-1, 0), (2, -3)], value=0.5), theirs((2, -3, -1, 0), value=0.5), (3, 7))
    check_gradient(lambda x: ops.pad(x, (-1, 2, 1, -1)), (3, 4))


def test_integers_are_padded_as_they_are():
    x = np.arange(12).reshape(1, 3, 4)
    found = ops.pad(x, (1, 2), "reflect")
    assert found.dtype == np.int64 and found.array[0, 0].tolist() == [1, 0, 1, 2, 3, 2, 1]
    assert ops.pad(x, (0, 1)).dtype == np.int64


def test_padding_that_does_not_fit_is_refused():
    x = np.zeros((1, 2, 3))
    cases = [
        (lambda: ops.pad(x, (3, 0), "reflect"), 'mode "reflect" want more than shape .* has; at most 2 in a dim of 3'),
        (lambda: ops.pad(x, (4, 0), "circular"), "at most 3 in a dim of 3"),
        (lambda: ops.pad(np.zeros((1, 2, 0)), (1, 0), "replicate"), "at most 0 in a dim of 0"),
        (lambda: ops.pad(x, (-2, -2)), "take away more than shape"),
        (lambda: ops.pad(x, (1, 1, 1)), "pad: 3 widths for the 3 dims"),
        (lambda: ops.pad(x, (1.5, 1)), r"pad: widths \(1.5, 1\), expected a pair of integers for each dim"),
        (lambda: ops.pad(x, (1, 1), "mirror"), 'pad: mode is "mirror", expected "constant"'),
        (lambda: ops.pad(x, (1, 1), "reflect", 2.0), 'value is 2.0, which mode "reflect" does not use'),
    ]
    for call, message in cases:
        with pytest.raises(ShapeError, match=message):
            call()
