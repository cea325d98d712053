"""x[index], read and written, as PyTorch reads an index; assignment has gradients, and none is lost without a word."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpitrain import ops
from mpitrain.autograd import Tensor, grad, keep_inputs, no_grad
from mpitrain.errors import GraphError, ShapeError

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.13.0")

SHAPE = (4, 5, 6)
I = np.array([0, -1, 2])
MASK = np.array([True, False, True, True])
INDICES: dict[str, Any] = {
    "0, :, i": (0, slice(None), I), "i, :, 0": (I, slice(None), 0), "0, None, i": (0, None, I),
    ":, i, None, 0": (slice(None), I, None, 0),
    "i, 0, i": (I, 0, I), "..., 0, i": (..., 0, I), "i, ..., i": (I, ..., I), "i, ..., -1": (I, ..., -1), "0, i": (0, I),
    "mask, :, 1": (MASK, slice(None), 1), "mask of two dims, 0": (np.arange(20).reshape(SHAPE[:2]) % 7 == 0, 0),
    "a tensor of one number": (slice(None), np.array(2), I), "True, 0, i": (True, 0, I), "i, False": (I, False),
    "a list, 0": ([0, 2, 1], 0), "(2, 1), 1, i": (I[:2, None], 1, I), "empty, 0": (np.zeros(0, int), 0),
    "slices": (1, slice(1, None, 2), None),
    "twice": (np.array([1, 1]), 0), "nothing": (), "numbers": (1, 2, 3), "None, i, :, 0": (None, I, slice(None), 0)}


def random_index(rng: np.random.Generator) -> tuple[Any, ...]:
    index: list[Any] = []
    used = 0
    while used < 3 and rng.random() < 0.9:
        n = SHAPE[used]
        mask = np.zeros(n, bool)
        mask[rng.choice(n, 3, replace=False)] = True
        choices = [int(rng.integers(-n, n)), slice(int(rng.integers(0, 2)), None, int(rng.integers(1, 3))),
                   rng.integers(-n, n, 3), rng.integers(0, n, (2, 1)), None, mask, [0, 2, 1], np.array(1), True]
        index.append(choices[rng.integers(0, len(choices))])
        used += index[-1] is not None and index[-1] is not True
    return tuple(index)


def as_ours(index: Any) -> Any:
    return tuple(Tensor(e) if isinstance(e, np.ndarray) else e for e in index)


def as_theirs(index: Any) -> Any:
    return tuple(torch.tensor(e) if isinstance(e, np.ndarray) else e for e in index)


def read(x: Any, index: Any) -> Any:
    """None where it is refused: in one line, by us."""
    try:
        return x[index]
    except (IndexError, ShapeError):
        return None


def agree(index: tuple[Any, ...], seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(SHAPE)
    ours, theirs = Tensor(values, requires_grad=True), torch.tensor(values, requires_grad=True)
    made, expected = read(ours, as_ours(index)), read(theirs, as_theirs(index))
    assert (made is None) == (expected is None), index
    if made is None:
        return
    assert made.shape == tuple(expected.shape) and np.array_equal(made.numpy(), expected.detach().numpy()), index
    weights = rng.standard_normal(made.shape)
    made.backward(weights), expected.backward(torch.tensor(weights))
    np.testing.assert_allclose(ours.grad, theirs.grad, rtol=0, atol=1e-14)

    places = torch.arange(values.size).reshape(SHAPE)[as_theirs(index)]
    if places.unique().numel() < places.numel():
        return                                    # which of two values is written at one place, PyTorch does not say
    given = rng.standard_normal((1, *made.shape))
    a, b = Tensor(given, requires_grad=True), torch.tensor(given, requires_grad=True)
    x, y = Tensor(values, requires_grad=True), torch.tensor(values, requires_grad=True)
    to, there = x * 2, y * 2
    to[as_ours(index)] = a
    there[as_theirs(index)] = b
    assert np.array_equal(to.numpy(), there.detach().numpy()), index
    weights = rng.standard_normal(SHAPE)
    to.backward(weights), there.backward(torch.tensor(weights))
    assert np.array_equal(a.grad, b.grad) and np.array_equal(x.grad, y.grad), index     # type: ignore[arg-type]


@pytest.mark.parametrize("name", INDICES)
def test_an_index_means_what_it_means_to_pytorch(name: str) -> None:
    agree(INDICES[name])


@pytest.mark.parametrize("part", [0, *[pytest.param(part, marks=pytest.mark.slow) for part in range(1, 9)]])
def test_any_index_reads_writes_and_has_gradients_as_pytorch(part: int) -> None:
    rng = np.random.default_rng(part)
    for number in range(200):
        agree(random_index(rng), number)


def test_numbers_and_arrays_in_a_cube_are_not_transposed() -> None:
    x = np.arange(27.).reshape(3, 3, 3)
    assert np.array_equal(Tensor(x)[0, :, [0, 1, 2]].numpy(), x[0])


def test_rows_chosen_twice_by_a_tuple_have_both_gradients() -> None:
    x = Tensor(np.arange(3.), requires_grad=True)
    x[(0, 0, 2),].sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2, 0, 1]


@pytest.mark.parametrize("index", [9, (0, 9), (I, 9), ([0, 9], 0), (0, 0, 0, I, 0), (..., I, ...), 1.5, ([0.5], 0), "a",
                                   (["a"], 0), ([[0], [1, 2]], 0), (0, MASK), (I, np.arange(2))])
def test_an_index_that_is_none_is_refused_in_one_line(index: Any) -> None:
    x = Tensor(np.zeros(SHAPE))
    for call in (lambda: x[index], lambda: x.__setitem__(index, 1), lambda: x.__setitem__(index, Tensor(np.ones(()), True))):
        with pytest.raises(ShapeError) as told:
            call()
        assert "\n" not in str(told.value)
    assert not x.array.any() and not x.requires_grad


def test_values_that_need_a_gradient_give_it_to_a_target_that_needed_none() -> None:
    w = Tensor(np.ones(3), requires_grad=True)
    out = ops.zeros(2, 3, dtype="float64")
    out[0] = w * 2
    (out.sum() + w.sum()).backward()
    assert out.requires_grad and w.grad is not None and w.grad.tolist() == [3, 3, 3]


@pytest.mark.parametrize("write", [lambda o, v: o.copy_(v), lambda o, v: o.__setitem__((slice(None), slice(1, None)), v[1:]),
                                   lambda o, v: o.__setitem__(..., v), lambda o, v: o.__setitem__((slice(None), [2, 0]), v[0]),
                                   lambda o, v: o.__setitem__(o > 9, v[0]), lambda o, v: o.__setitem__((0, 0), v[2])])
def test_every_assignment_has_pytorchs_gradients(write: Callable[[Any, Any], Any]) -> None:
    values = np.random.default_rng(0).standard_normal((2, 3)) + 9
    found = []
    for make in (lambda a: Tensor(a.copy(), requires_grad=True), lambda a: torch.tensor(a, requires_grad=True)):
        x, v = make(values), make(values[0])
        out = x * 1
        write(out, v * 2)
        (out * out).sum().backward()
        found.append([np.asarray(out.detach().numpy()), np.asarray(x.grad), np.asarray(v.grad)])
    for ours, theirs in zip(*found):
        assert np.allclose(ours, theirs, rtol=1e-14)


def test_a_loop_that_stores_its_states_has_pytorchs_gradients() -> None:
    rng = np.random.default_rng(1)
    values, weights = rng.standard_normal((2, 3, 4)), rng.standard_normal((4, 4))

    def states(lib: Any, x: Any, w: Any, out: Any) -> Any:
        h = x[:, 0]
        for t in range(3):
            h = lib.tanh(h @ w + x[:, t])
            out[:, t] = h
        return (out ** 2).sum()

    w = Tensor(weights, requires_grad=True)
    states(ops, Tensor(values), w, ops.zeros(2, 3, 4, dtype="float64")).backward()
    theirs = torch.tensor(weights, requires_grad=True)
    states(torch, torch.tensor(values), theirs, torch.zeros(2, 3, 4, dtype=torch.float64)).backward()
    np.testing.assert_allclose(w.grad, theirs.grad, rtol=1e-12)


def test_other_dtypes_and_complex_numbers_are_converted_on_the_way() -> None:
    v = Tensor(np.array([1.5, 2.5], "float32"), requires_grad=True)
    for dtype in ("float64", "complex128"):
        out = Tensor(np.zeros(2, dtype))
        out[...] = v
        assert out.dtype == dtype
        ops.real(out * 3).sum().backward()
        assert v.grad is not None and v.grad.dtype == "float32" and v.grad.tolist() == [3, 3]
        v.zero_grad()


def test_assignments_have_second_derivatives() -> None:
    x = Tensor(np.array([1., 2.]), requires_grad=True)
    with keep_inputs():
        out = ops.zeros(3, dtype="float64")
        out[:2] = x ** 3
        out[1:] = x
        first, = grad((out ** 2).sum(), [x], create_graph=True)
        second, = grad(first.sum(), [x])
    assert np.allclose(first.numpy(), [6 + 2, 4]) and np.allclose(second.numpy(), [30 + 2, 2])


@pytest.mark.parametrize("keep", [lambda out: out[0], lambda out: out.reshape(6), lambda out: out.detach(),
                                  lambda out: Tensor(out), lambda out: out.T,
                                  lambda out: out * Tensor(np.ones(3), requires_grad=True)])
def test_a_change_that_others_would_not_know_of_is_refused(keep: Callable[[Tensor], Tensor]) -> None:
    w = Tensor(np.ones(3), requires_grad=True)
    out = ops.zeros(2, 3, dtype="float64")
    other = keep(out)
    for target in (out, out[1:]):
        with pytest.raises(GraphError, match="a gradient would be lost.*x = x.clone()"):
            target[0] = w
    assert not out.array.any()
    del other, target
    out[0] = w
    assert out.requires_grad


@pytest.mark.parametrize("change", [lambda x: x.__setitem__(0, 1), lambda x: x.copy_(Tensor(np.ones(2)))])
def test_a_leaf_that_requires_a_gradient_is_not_changed(change: Callable[[Tensor], Any]) -> None:
    x = Tensor(np.zeros(2), requires_grad=True)
    with pytest.raises(GraphError, match="compute a new one, or do it under no_grad"):
        change(x)
    with no_grad():
        change(x)
    assert x.array[0] == 1


@pytest.mark.parametrize("values, dtype, words", [
    (Tensor(np.ones(2), requires_grad=True), "int64", "an array of int64 has none"), (np.ones(2) * 1j, "float64", "complex128"),
    ([1, [2]], "float64", "lists of equal lengths"), ("ab", "float64", "no number"), (None, "float64", "None is no number"),
    ([Tensor(np.ones(())), 1], "float64", "ops.stack"), (300, "int8", "out of bounds"),
    (np.ones(5), "float64", "could not broadcast"),    (np.array(["a", "b"]), "float64", "convert")])
def test_values_that_do_not_fit_are_refused_in_one_line(values: Any, dtype: str, words: str) -> None:
    for change in (lambda x: x.__setitem__(slice(None), values), lambda x: x.copy_(values)):
        with pytest.raises(ShapeError, match=words):
            change(Tensor(np.zeros(2, dtype)))


def test_without_gradients_an_assignment_is_numpys() -> None:
    x, expected = Tensor(np.zeros((2, 3))), np.zeros((2, 3))
    x[1, [0, 2]] = [1, 2.5]
    expected[1, [0, 2]] = [1, 2.5]
    before = copy.copy(x.array)
    x.copy_(np.ones(3, "float32"))
    assert np.array_equal(before, expected) and x.array.tolist() == [[1] * 3] * 2
    whole = Tensor(np.arange(3))
    whole[0] = 2.7
    assert whole.array.tolist() == [2, 1, 2]
