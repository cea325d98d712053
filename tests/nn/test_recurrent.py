"""Recurrent layers, cells and packed sequences against PyTorch's, from the same weights: values, states, and all gradients."""

import itertools

import numpy as np
import pytest

from mpitrain import nn, ops
from mpitrain.autograd import Tensor, grad
from mpitrain.backend import random
from mpitrain.errors import ShapeError
from mpitrain.kernels import recurrent
from mpitrain.kernels.kernel import kind as kernels_are

torch = pytest.importorskip("torch")
TOLERANCE = {"float64": 1e-10, "float32": 2e-5}
LENGTHS = [3, 5, 1, 5]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def pair(kind, *sizes, dtype="float64", **options):
    """(ours, PyTorch's) with PyTorch's weights."""
    torch.manual_seed(0)
    theirs = getattr(torch.nn, kind)(*sizes, **options).to(getattr(torch, dtype))
    ours = getattr(nn, kind)(*sizes, **options)
    ours.initialize(dtype=dtype)
    ours.load_state_dict({name: value.detach().numpy() for name, value in theirs.state_dict().items()})
    return ours, theirs


def both(array, dtype):
    """The same leaf on both sides."""
    array = array.astype(dtype)
    return Tensor(array, requires_grad=True), torch.tensor(array, requires_grad=True)


def flat(result):
    """The tensors of a result, in order."""
    if isinstance(result, (nn.PackedSequence, torch.nn.utils.rnn.PackedSequence)):
        return [result.data]
    return [each for part in result for each in flat(part)] if isinstance(result, (tuple, list)) else [result]


def agree(ours, theirs, mine, others, results, expected, dtype):
    """Results, and the gradients of inputs and weights for random cotangents of all results."""
    results, expected = flat(results), flat(expected)
    near = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    total, wanted = 0.0, 0.0
    for at, (result, right) in enumerate(zip(results, expected, strict=True)):
        assert result.dtype == dtype
        np.testing.assert_allclose(result.array, right.detach().numpy(), **near)
        weights = normal(*result.shape, seed=5 + at).astype(dtype)
        total, wanted = total + (result * weights).sum(), wanted + (right * torch.tensor(weights)).sum()
    total.backward()
    wanted.backward()
    near = {"rtol": TOLERANCE[dtype], "atol": 5 * TOLERANCE[dtype]}
    for tensor, right in zip(mine, others, strict=True):
        np.testing.assert_allclose(tensor.grad, right.grad.numpy(), **near)
    gradients = dict(theirs.named_parameters())
    assert [name for name, _ in ours.named_parameters()] == list(gradients)
    for name, parameter in ours.named_parameters():
        np.testing.assert_allclose(parameter.grad, gradients[name].grad.numpy(), err_msg=name, **near)


OPTIONS = {"two layers": {"num_layers": 2}, "both directions": {"num_layers": 2, "bidirectional": True},
           "no bias": {"bias": False}, "projected": {"proj_size": 3, "num_layers": 2, "bidirectional": True},
           "relu": {"nonlinearity": "relu", "num_layers": 2}}
CASES = [(kind, name) for kind, name in itertools.product(("LSTM", "GRU", "RNN"), OPTIONS)
         if {"projected": kind == "LSTM", "relu": kind == "RNN"}.get(name, True)]


@pytest.mark.parametrize("shape", ["batch first", "length first", "one sequence", "packed", "packed and sorted"])
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_layer_is_pytorch_s(kind, name, shape):
    ours, theirs = pair(kind, 3, 7, batch_first=shape != "length first", **OPTIONS[name])
    x, other = both(normal(*{"length first": (5, 4, 3), "one sequence": (5, 3)}.get(shape, (4, 5, 3))), "float64")
    count = ours.layers * len(ours.suffixes)
    batch = () if shape == "one sequence" else (4,)
    widths = (ours.width, ours.hidden)[:ours.n_states]
    starts = [both(normal(count, *batch, width, seed=3 + width), "float64") for width in widths]
    mine, others = [x, *(each[0] for each in starts)], [other, *(each[1] for each in starts)]
    given, right = x, other
    if "packed" in shape:
        lengths, is_sorted = (sorted(LENGTHS)[::-1], True) if "sorted" in shape else (LENGTHS, False)
        given = nn.pack_padded_sequence(x, lengths, enforce_sorted=is_sorted)
        right = torch.nn.utils.rnn.pack_padded_sequence(other, lengths, batch_first=True, enforce_sorted=is_sorted)
    state, first = (tuple(mine[1:]), tuple(others[1:])) if kind == "LSTM" else (mine[1], others[1])
    agree(ours, theirs, mine, others, ours(given, state), theirs(right, first), "float64")


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("batch", [1, 5, 13])
def test_float32_and_wide_layers_are_pytorch_s(kind, batch):
    ours, theirs = pair(kind, 20, 130, dtype="float32", batch_first=True)
    x, other = both(normal(batch, 6, 20), "float32")
    agree(ours, theirs, [x], [other], ours(x), theirs(other), "float32")


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
def test_a_row_has_the_same_bits_in_every_batch(kind):
    kernel = getattr(recurrent, kind)
    if kernels_are() != "c":
        pytest.skip("NumPy's products have other bits in other batches")
    gates = {"lstm": 4, "gru": 3, "rnn": 1}[kind]
    made, weight = normal(4, 13, gates * 40).astype(np.float32), normal(gates * 40, 40).astype(np.float32)

    def run(rows):
        batch, count = len(made[0, rows]), 4 * len(made[0, rows])
        start = [np.zeros((batch, 40), np.float32) for _ in range(2 if kind == "lstm" else 1)]
        out, kept = np.empty((2, count, 40), np.float32)
        more = {"lstm": (kept, None, weight, None), "gru": (kept, weight, None), "rnn": (weight,)}[kind]
        kernel(made[:, rows].reshape(count, -1).copy(), *start, out, *more, np.full(4, batch), False, *[False] * (kind == "rnn"))
        return out.reshape(4, batch, 40)
    together = run(slice(0, 13))
    for rows in (slice(0, 1), slice(3, 8), slice(5, 13), slice(1, 13)):
        np.testing.assert_array_equal(run(rows), together[:, rows])


def test_sequences_are_padded_and_packed_like_pytorch_s():
    theirs = torch.nn.utils.rnn
    parts = [normal(length, 2, seed=length) for length in LENGTHS]
    for batch_first, side in itertools.product((True, False), ("right", "left")):
        mine = nn.pad_sequence(parts, batch_first, 7.0, side).array
        np.testing.assert_array_equal(mine, theirs.pad_sequence([torch.tensor(p) for p in parts], batch_first, 7.0, side).numpy())
        padded = normal(*((4, 6, 2) if batch_first else (6, 4, 2)))
        packed = nn.pack_padded_sequence(padded, LENGTHS, batch_first, enforce_sorted=False)
        expected = theirs.pack_padded_sequence(torch.tensor(padded), LENGTHS, batch_first, enforce_sorted=False)
        np.testing.assert_array_equal(packed.data.array, expected.data.numpy())
        np.testing.assert_array_equal(packed.batch_sizes, expected.batch_sizes.numpy())
        np.testing.assert_array_equal(packed.unsorted_indices[packed.sorted_indices], np.arange(4))
        back, lengths = nn.pad_packed_sequence(packed, batch_first, -1.0, 6)
        wanted, right = theirs.pad_packed_sequence(expected, batch_first, -1.0, 6)
        np.testing.assert_array_equal(back.array, wanted.numpy())
        np.testing.assert_array_equal(lengths, right.numpy())
    np.testing.assert_array_equal(nn.pack_sequence(parts, enforce_sorted=False).data.array,
                                  theirs.pack_sequence([torch.tensor(p) for p in parts], enforce_sorted=False).data.numpy())


def test_dropout_is_that_of_sample_and_step_however_sequences_are_packed():
    def run(packed):
        layer = nn.LSTM(3, 4, num_layers=2, dropout=0.5)
        layer.initialize(dtype="float64")
        x = normal(4, 5, 3)
        with random.use(random.Scope(1, 2)):
            if not packed:
                return layer(x)[0].array
            return nn.pad_packed_sequence(layer(nn.pack_padded_sequence(x, LENGTHS, enforce_sorted=False))[0])[0].array
    padded, packed = run(False), run(True)
    for i, length in enumerate(LENGTHS):
        np.testing.assert_allclose(packed[i, :length], padded[i, :length], rtol=1e-12, atol=1e-12)


def test_what_does_not_fit_is_refused_in_a_line():
    lstm = nn.LSTM(3, 4)
    lstm.initialize()
    x = np.zeros((2, 5, 3), np.float32)
    with pytest.raises(ShapeError, match=r"LSTM expects a state of shape \(1, 2, 4\) and \(1, 2, 4\), got \(1, 3, 4\)"):
        lstm(x, np.zeros((1, 3, 4), np.float32))
    with pytest.raises(ShapeError, match="LSTM got an empty batch"):
        lstm(x[:0])
    with pytest.raises(ShapeError, match=r"packed input of shape \(rows, 3\), got \(10, 2\)"):
        lstm(nn.pack_padded_sequence(x[..., :2], [5, 5]))
    with pytest.raises(ShapeError, match="proj_size is 4, expected less than hidden, 4"):
        nn.LSTM(3, 4, proj_size=4)
    with pytest.raises(ShapeError, match='nonlinearity is "tanh" or "relu", not "sine"'):
        nn.RNN(3, 4, nonlinearity="sine")
    for lengths, said in (([3, 5], "are not sorted"), ([5, 0], "leave out sequences without steps"), ([6, 5], "expected 1 to 5"),
                          ([5], "a whole number for each of 2"), ([5, 2.5], "are float64, expected whole numbers")):
        with pytest.raises(ShapeError, match=said):
            nn.pack_padded_sequence(x, lengths)
    with pytest.raises(ShapeError, match="total_length is 4, the longest sequence has 5 steps"):
        nn.pad_packed_sequence(nn.pack_padded_sequence(x, [5, 3]), total_length=4)
    with pytest.raises(ShapeError, match="the same dims after the first"):
        nn.pad_sequence([x[0], x])
    w = np.zeros((16, 3), np.float32)
    for arguments, options, said in (
            ((x[0], w, np.zeros((16, 4), np.float32)), {}, "expected \\(length, batch, inputs\\)"),
            ((x, w, np.zeros((15, 4), np.float32)), {}, "the state's weight has shape \\(15, 4\\), expected \\(4 x hidden"),
            ((x, w[:, :2], np.zeros((16, 4), np.float32)), {}, "the input's weight has shape \\(16, 2\\), expected \\(16, 3\\)"),
            ((x[0], w, np.zeros((16, 4), np.float32)), {"sizes": [1, 2, 2]}, "never grow")):
        with pytest.raises(ShapeError, match=said):
            ops.lstm(*arguments, **options)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell"])
def test_a_cell_is_pytorch_s(kind, single):
    ours, theirs = pair(kind, 3, 7, **({"nonlinearity": "relu"} if single and kind == "RNNCell" else {}))
    x, other = both(normal(*(() if single else (4,)), 3), "float64")
    starts = [both(normal(*x.shape[:-1], 7, seed=1 + i), "float64") for i in range(2 if kind == "LSTMCell" else 1)]
    mine, others = [x, *(each[0] for each in starts)], [other, *(each[1] for each in starts)]
    state, first = (tuple(mine[1:]), tuple(others[1:])) if kind == "LSTMCell" else (mine[1], others[1])
    agree(ours, theirs, mine, others, ours(x, ours(x, state)), theirs(other, theirs(other, first)), "float64")
    for result, expected in zip(flat(ours(x.array)), flat(theirs(other)), strict=True):
        np.testing.assert_allclose(result.array, expected.detach().numpy(), rtol=1e-12, atol=1e-12)


def test_cells_refuse_what_does_not_fit():
    cell = nn.GRUCell(3, 4)
    cell.initialize()
    with pytest.raises(ShapeError, match=r"GRUCell expects input of shape \(batch, 3\), got \(2, 4\)"):
        cell(np.zeros((2, 4), np.float32))
    with pytest.raises(ShapeError, match=r"GRUCell expects a state of shape \(2, 4\), got \(2, 3\)"):
        cell(np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32))
    with pytest.raises(ShapeError, match=r"rnn_cell: h has shape \(2, 4\), expected \(2, 5\)"):
        ops.rnn_cell(np.zeros((2, 3)), np.zeros((2, 4)), np.zeros((5, 3)), np.zeros((5, 5)))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
def test_the_second_derivative_of_a_layer_is_pytorch_s(kind, reverse):
    """Of a penalty on the gradient of the input, with respect to the input and all weights."""
    x, h, c = normal(4, 2, 3), normal(2, 5, seed=1), normal(2, 5, seed=2)
    rows = {"lstm": 20, "gru": 15, "rnn": 5}[kind]
    weights = [0.4 * normal(*shape, seed=3 + i) for i, shape in enumerate(((rows, 3), (rows, 5), (rows,), (rows,)))]
    mine, others = zip(*(both(array, "float64") for array in (x, *weights, h, *([c] if kind == "lstm" else []))))
    out, last, *_ = getattr(ops, kind)(*mine, reverse=reverse)
    states = tuple(each[None] for each in others[5:])
    start = others[0].flip(0) if reverse else others[0]
    named = {"lstm": torch.lstm, "gru": torch.gru, "rnn": torch.rnn_tanh}[kind]
    expected, right, *_ = named(start, states if kind == "lstm" else states[0], others[1:5], True, 1, 0.0, True, False, False)
    slope, = torch.autograd.grad((expected**2).sum() + (right**3).sum(), others[0], create_graph=True)
    wanted = torch.autograd.grad((slope**2).sum(), others)
    steep, = grad((out * out).sum() + (last * last * last).sum(), mine[0], create_graph=True)
    np.testing.assert_allclose(steep.array, slope.detach().numpy(), rtol=1e-10, atol=1e-10)
    for found, there in zip(grad((steep * steep).sum(), mine), wanted, strict=True):
        np.testing.assert_allclose(found.array, there.numpy(), rtol=1e-9, atol=1e-9)


def test_gradients_of_biases_lose_no_digits_over_many_rows():
    x, weight, bias = np.zeros((4, 25_000, 1), np.float32), np.zeros((2, 1), np.float32), np.ones(2, np.float32)
    bias = Tensor(bias, requires_grad=True)
    out, _ = ops.rnn(x, weight, np.zeros((2, 2), np.float32), bias, nonlinearity="relu")
    out.backward(np.full(out.shape, 0.1, np.float32))
    np.testing.assert_allclose(bias.grad, 1e5 * float(np.float32(0.1)), rtol=1e-6)


@pytest.mark.parametrize("make", [lambda: nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2), lambda: nn.GRU(3, 4, 2),
                                  lambda: nn.RNN(3, 4, bidirectional=True)], ids=["LSTM", "GRU", "RNN"])
def test_second_derivatives_reach_first_states_that_were_given(make):
    """A penalty on the gradient of the inputs alone, differentiated by first states that are results: float64 differences."""
    model, rng = make(), np.random.default_rng(4)
    model.initialize(dtype="float64")
    _, last = model(rng.standard_normal((2, 5, 3)))
    shapes = [tuple(s.shape) for s in (last if isinstance(last, tuple) else (last,))]
    start = [rng.standard_normal(shape) for shape in shapes]
    values = rng.standard_normal((2, 5, 3))

    def penalty(given, x):
        x, leaves = Tensor(x, requires_grad=True), [Tensor(each, requires_grad=True) for each in given]
        states = tuple(ops.tanh(leaf) for leaf in leaves)
        y, last = model(x, states if len(states) > 1 else states[0])
        ends = last if isinstance(last, tuple) else (last,)
        by_x, = grad(ops.sum(y * y) + sum(ops.sum(end * end * end) for end in ends), x, create_graph=True)
        return ops.sum(by_x * by_x), leaves

    loss, leaves = penalty(start, values)
    for place, found in enumerate(grad(loss, leaves)):
        along = rng.standard_normal(shapes[place])
        ends = [float(penalty([s + step * along if i == place else s for i, s in enumerate(start)], values)[0].array)
                for step in (1e-5, -1e-5)]
        assert float((found.array * along).sum()) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-7)
