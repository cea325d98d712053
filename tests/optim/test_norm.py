"""The global norm: exact in value, fixed in its order of addition."""

import math

import numpy as np
import pytest

from mpitrain.kernels.optimizer import NORM_BLOCK, square_sums
from mpitrain.nn import FlatStorage, Parameter, init
from mpitrain.optim import clip_factor, squared_norm

SIZES = {"w": 3 * NORM_BLOCK + 5, "a": 10, "b": NORM_BLOCK, "empty": 0, "one": 1}


def storage(names, dtype="float32"):
    parameters = []
    for name in names:
        parameters.append(Parameter((SIZES[name],), init.normal(1.0)))
        parameters[-1].name = name
    made = FlatStorage(parameters, dtype)
    made.initialise(1)
    return made


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_norm_is_that_of_all_parameters_and_not_of_the_gaps(dtype):
    s = storage(SIZES, dtype)
    flat = np.full(s.size, np.nan, dtype)
    for view in s.views(flat):
        view[...] = 1.0
    for view, segment in zip(s.views(flat), s.segments):
        view[...] = segment.parameter.array
    expected = math.fsum(float(x) ** 2 for view in s.views(flat) for x in view)
    assert squared_norm(s.segments, flat) == pytest.approx(expected, rel=1e-14)


def test_the_bits_do_not_depend_on_where_parameters_lie():
    one, two = storage(["w", "a", "b", "one"]), storage(["one", "b", "w", "a"])
    assert squared_norm(one.segments, one.values) == squared_norm(two.segments, two.values)


def test_parameters_are_folded_by_name_and_block():
    s = storage(["w", "a", "b"])
    blocks = [square_sums.reference(s.segments[i].parameter.array) for i in (1, 2, 0)]       # a, b, w
    total = 0.0
    for block in np.concatenate(blocks):
        total += float(block)
    assert squared_norm(s.segments, s.values) == total
    assert squared_norm(s.segments[:1], s.values) == pytest.approx(float(blocks[2].sum()))


@pytest.mark.parametrize("n", [0, 1, 2, 3, 100, 2047, 2048, 2049, *(NORM_BLOCK + i for i in (-1, 0, 1, NORM_BLOCK + 77))])
def test_the_compiled_block_sums_equal_their_definition_at_every_size(n):
    for dtype in (np.float32, np.float64):
        x = np.random.default_rng(n).standard_normal(n).astype(dtype)
        np.testing.assert_array_equal(square_sums(x), square_sums.reference(x))
        assert len(square_sums(x)) == -(-n // NORM_BLOCK)


def test_not_a_number_comes_through_and_no_parameters_have_norm_zero():
    s = storage(["a", "b"])
    s.segments[1].parameter.array[5] = np.nan
    assert math.isnan(squared_norm(s.segments, s.values))
    s.segments[1].parameter.array[5] = np.inf
    assert squared_norm(s.segments, s.values) == math.inf
    assert squared_norm([], np.zeros(0, np.float32)) == 0.0
    assert squared_norm(storage(["empty"]).segments, np.zeros(0, np.float32)) == 0.0


def test_clipping_is_that_of_pytorch():
    torch = pytest.importorskip("torch")
    for limit in (0.5, 3.0, 1e9):
        p = torch.nn.Parameter(torch.zeros(10, dtype=torch.float64))
        p.grad = torch.arange(10.0, dtype=torch.float64)
        norm = float(torch.nn.utils.clip_grad_norm_([p], limit))
        np.testing.assert_allclose(p.grad.numpy(), np.arange(10.0) * clip_factor(norm, limit), rtol=1e-12)
