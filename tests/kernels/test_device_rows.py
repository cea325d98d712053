"""Softmax, cross-entropy and tables on a device: what the comparison with the references (test_device_kernels) does not see."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_on_host import compiler
from fakegpu import DEVICES, DeviceArray, counted, open_device, put

from mpitrain import ops
from mpitrain.autograd import Tensor, grad
from mpitrain.errors import GraphError
from mpitrain.kernels import rows
from mpitrain.kernels.attention import attention_weights
from mpitrain.kernels.device.tables import CHUNK, sorted_indices

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
RNG = np.random.default_rng(3)


def added(indices: np.ndarray, values: np.ndarray, entries: int, place: Any = put) -> np.ndarray:
    """The sum of the values of each index, on a device."""
    found = place(np.zeros((entries, values.shape[1]), values.dtype))
    assert rows.scatter_add_rows(found, place(indices), place(values)) is found
    made: np.ndarray = found.get()
    return made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("n", "entries", "width"), [(3000, 500, 40), (2100, 70_000, 3), (1, 1, 8), (1025, 255, 16)])
def test_gradients_of_an_embedding_have_the_bits_of_the_host_and_twice_the_same(n: int, entries: int, width: int,
                                                                                device: str) -> None:
    _, place, _ = open_device(device)
    indices, values = RNG.integers(0, entries, n), RNG.standard_normal((n, width)).astype("float32")
    indices[:CHUNK] = entries // 2
    indices[CHUNK:][indices[CHUNK:] == entries // 2] = 0
    expected = np.zeros((entries, width), "float32")
    rows.scatter_add_rows.reference(expected, indices, values)
    found = added(indices, values, entries, place)
    if np.bincount(indices).max() <= CHUNK:
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(added(indices, values, entries, place), found)


def test_an_index_that_comes_often_is_added_up_in_chunks_in_their_order() -> None:
    """A long run may begin and end anywhere, and be one of several: the chunks are its own, not those of the places."""
    lengths = [5, CHUNK + 1, 3 * CHUNK, CHUNK - 1, 777, 1, CHUNK, 2 * CHUNK + 1, 40]
    indices = RNG.permutation(np.repeat(np.arange(len(lengths)), lengths))
    values = RNG.standard_normal((len(indices), 12)).astype("float32")
    expected = RNG.standard_normal((len(lengths), 12)).astype("float32")
    found = put(expected)
    for index in range(len(lengths)):
        own = values[indices == index]
        parts = []
        for first in range(0, len(own), CHUNK):
            part = np.zeros(12, "float32") if first else expected[index].copy()
            for value in own[first:first + CHUNK]:
                part += value
            parts.append(part)
        expected[index] = parts[0]
        for part in parts[1:]:
            expected[index] += part
    rows.scatter_add_rows(found, put(indices), put(values))
    np.testing.assert_array_equal(found.get(), expected)


def test_rows_of_16_bits_are_added_up_in_float32() -> None:
    values = RNG.standard_normal((300, 16)).astype("float16")
    found = put(np.zeros((2, 16), "float32"))
    rows.scatter_add_rows(found, put(np.zeros(300, "int64")), put(values))
    assert found.dtype == "float32"
    np.testing.assert_allclose(found.get()[0], values.astype("float64").sum(0), rtol=1e-5)


@pytest.mark.parametrize("entries", [1, 255, 256, 65_536])
def test_indices_are_sorted_as_numpy_sorts_them(entries: int) -> None:
    indices = RNG.integers(-2, entries + 2, 2500)
    keys, order = sorted_indices(put(indices), entries)
    within = np.where((indices >= 0) & (indices < entries), indices, entries)
    np.testing.assert_array_equal(order.get(), within.argsort(kind="stable"))
    np.testing.assert_array_equal(keys.get(), np.sort(within))


def test_an_index_out_of_range_gives_nan_and_no_gradient() -> None:
    weight = Tensor(put(RNG.standard_normal((7, 8)).astype("float32")), requires_grad=True)
    indices = np.array([[3, 7], [-1, 1 << 40]])
    made = ops.embedding(put(indices), weight)
    np.testing.assert_array_equal(np.isnan(made.array.get()).all(-1), [[False, True], [True, True]])
    np.testing.assert_array_equal(made.array.get()[0, 0], weight.array.get()[3])
    made.sum().backward()
    np.testing.assert_array_equal(weight.grad.get(), (np.arange(7) == 3)[:, None] * np.ones(8))


@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 2, 4)])
def test_entries_along_the_first_dim_are_rows_too(shape: tuple[int, ...]) -> None:
    x, indices = RNG.standard_normal(shape).astype("float32"), np.array([[4, 0, 4], [1, 1, 1]])
    made = []
    for place in (np.asarray, put):
        leaf = Tensor(place(x), requires_grad=True)
        found = ops.take(leaf, place(indices))
        (found * found).sum().backward()
        made.append([a if place is np.asarray else a.get() for a in (found.array, leaf.grad)])
    for on_host, on_device in zip(*made):
        np.testing.assert_array_equal(on_device, on_host)
    with counted() as counts:
        found = ops.take(put(x), put(np.array([5, -1])))
    assert counts.n_syncs == 0 and np.isnan(found.array.get()).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_label_out_of_range_makes_nan_of_its_row_alone(smoothing: float) -> None:
    logits, labels = RNG.standard_normal((5, 41)).astype("float32"), np.array([40, 41, -1, 1 << 40, -100])
    losses, kept, totals = rows.cross_entropy(put(logits), put(labels), smoothing, -100, True)
    slopes = rows.cross_entropy_grad(kept, put(labels), totals, smoothing, -100, put(np.ones((), "float32"))).get()
    wrong = [False, True, True, True, False]
    np.testing.assert_array_equal(np.isnan(losses.get()), wrong)
    np.testing.assert_array_equal(np.isnan(slopes), np.broadcast_to(np.array(wrong)[:, None], slopes.shape))
    assert not slopes[4].any()
    whole, *_ = rows.cross_entropy.reference(put(logits), put(labels), smoothing, -100, True)        # where no kernel serves
    np.testing.assert_array_equal(np.isnan(whole.get()), wrong)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("start", [1, 3])
def test_rows_that_lie_differently_to_16_bytes_give_the_same(dtype: str, start: int) -> None:
    """Vectors and single numbers: each is taken by one thread, so the sums differ by rounding alone."""
    y, g = (RNG.standard_normal(4 * 70 + 8).astype(dtype) for _ in range(2))
    aside = DeviceArray(y[start:start + 280].reshape(4, 70))
    found = rows.softmax_grad(aside, put(g[:280].reshape(4, 70)))
    expected = rows.softmax_grad.reference(y[start:start + 280].reshape(4, 70).astype("float64"), g[:280].reshape(4, 70))
    close = {"float16": 2e-3, "float32": 1e-6, "float64": 1e-14}[dtype]
    np.testing.assert_allclose(found.get(), expected, rtol=close, atol=close * np.abs(expected).max())


def test_rows_without_a_finite_largest_number_are_nan_and_hidden_scores_zero() -> None:
    x = np.zeros((4, 40), "float32")
    x[0, 7], x[1, 3:5], x[2] = np.inf, (np.nan, -np.inf), -np.inf
    for kernel in (rows.softmax, rows.log_softmax):
        np.testing.assert_array_equal(np.isnan(kernel(put(x)).get()).sum(1), [40, 40, 40, 0])
    losses, *_ = rows.cross_entropy(put(x), put(np.zeros(4, "int64")), 0.0, None, True)
    np.testing.assert_array_equal(np.isnan(losses.get()), [True, True, True, False])
    weights = attention_weights(put(x), 1.0, False).get()
    np.testing.assert_array_equal(np.isnan(weights).sum(1), [40, 40, 0, 0])
    assert not weights[2].any()


@pytest.mark.parametrize("sizes", [(6, 37), (2, 3, 64)])
def test_nothing_waits_in_an_embedding_or_a_loss_and_logits_stay_as_they_are(sizes: tuple[int, ...]) -> None:
    logits = Tensor(put(RNG.standard_normal(sizes).astype("float32")), requires_grad=True)
    weight = Tensor(put(RNG.standard_normal((9, 8)).astype("float32")), requires_grad=True)
    labels, tokens = put(RNG.integers(0, sizes[-1], sizes[:-1])), put(RNG.integers(0, 9, (3, 5)))
    before = logits.array.get()
    with counted() as counts:
        ops.cross_entropy(logits, labels, label_smoothing=0.1, ignore_index=0).backward()
        ops.embedding(tokens, weight).sum().backward()
    assert counts.n_syncs == 0 and counts.up == counts.down == 0, counts
    np.testing.assert_array_equal(logits.array.get(), before)
    host = Tensor(before, requires_grad=True)
    ops.cross_entropy(host, labels.get(), label_smoothing=0.1, ignore_index=0).backward()
    np.testing.assert_allclose(logits.grad.get(), host.grad, atol=1e-6)


def test_a_gradient_is_written_over_logits_that_are_given_for_it_and_no_others() -> None:
    logits, labels = RNG.standard_normal((5, 41)).astype("float32"), put(np.array([0, 40, 3, 3, 7]))
    given, one = put(logits), put(np.ones((), "float32"))
    _, kept, totals = rows.cross_entropy(given, labels, 0.1, 3, True)
    apart = rows.cross_entropy_grad(kept, labels, totals, 0.1, 3, one, False)
    np.testing.assert_array_equal(given.get(), logits)
    assert rows.cross_entropy_grad(kept, labels, totals, 0.1, 3, one) is given
    np.testing.assert_array_equal(given.get(), apart.get())


@pytest.mark.parametrize("who", ["a tensor", "an array", "a view", "an op", "nobody"])
def test_logits_that_somebody_else_has_are_left_alone(who: str) -> None:
    x = Tensor(put(RNG.standard_normal((4, 6)).astype("float32")), requires_grad=True)
    made = ops.tanh(x) if who == "an op" else x * 2
    scores = made if who == "nobody" else made.reshape(2, 2, 6)
    before = scores.array.get()
    held = {"a tensor": scores, "an array": scores.array, "a view": made.array, "an op": None, "nobody": None}[who]
    loss = ops.cross_entropy(scores, put(np.array([0, 5, 1, 1]).reshape(scores.shape[:-1])))
    del made, scores
    loss.backward()
    expected = Tensor(x.array.get(), requires_grad=True)
    ops.cross_entropy(ops.tanh(expected) if who == "an op" else expected * 2, np.array([0, 5, 1, 1])).backward()
    np.testing.assert_allclose(x.grad.get(), expected.grad, atol=1e-6)
    if held is not None:
        np.testing.assert_array_equal((held.array if isinstance(held, Tensor) else held).get().reshape(before.shape), before)


def test_logits_that_are_changed_before_backward_are_noticed() -> None:
    logits = Tensor(put(RNG.standard_normal((2, 3)).astype("float32")), requires_grad=True)
    scores = logits * 2
    loss = ops.cross_entropy(scores, put(np.array([0, 2])))
    scores.array[...] = 0
    scores.mark_changed()
    with pytest.raises(GraphError, match="CrossEntropy: an array it saved for backward was changed in place"):
        loss.backward()


def test_what_cross_entropy_keeps_gives_the_softmax_and_second_derivatives() -> None:
    logits, labels = RNG.standard_normal((4, 10)).astype("float64"), np.array([1, 0, 9, 3])
    exps, totals = rows.exponentials(*rows.cross_entropy(put(logits), put(labels), 0.0, None, True)[1:])
    np.testing.assert_allclose((exps / totals[:, None]).get(), rows.softmax.reference(logits), rtol=1e-12)

    def second(place: Any) -> Any:
        x = Tensor(place(logits), requires_grad=True)
        first, = grad(ops.cross_entropy(x, place(labels), label_smoothing=0.1), [x], create_graph=True)
        return grad((first * first).sum(), [x])[0]
    on_host, on_device = second(np.asarray), second(put)
    np.testing.assert_allclose(on_device.array.get(), on_host.array, atol=1e-12)


def test_gradients_of_chosen_elements_are_added_in_order_on_a_device() -> None:
    """`add.at` of a GPU adds in whatever order comes: rows, single elements and places of two arrays are sorted instead."""
    x, i, j = RNG.standard_normal((5, 4, 3)).astype("float32"), np.array([4, 0, 4, 4]), np.array([[1], [3]])
    for index in [(i,), (i, i % 3), (slice(None), i % 4), (slice(1, 4), j, i % 3), (None, i)]:
        grads = []
        for place in (np.asarray, put):
            leaf = Tensor(place(x), requires_grad=True)
            chosen = leaf[tuple(place(e) if isinstance(e, np.ndarray) else e for e in index)]
            (chosen * chosen).sum().backward()
            grads.append(leaf.grad if place is np.asarray else leaf.grad.get())
        np.testing.assert_array_equal(*grads)
