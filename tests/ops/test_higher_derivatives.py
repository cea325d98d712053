"""Second and third derivatives of every operation: PyTorch's, and those that differences of the derivative before give."""

from itertools import pairwise

import numpy as np
import pytest

from mpitrain import ops
from mpitrain.autograd import Tensor, grad, keep_inputs

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.13.0")
F = pytest.importorskip("torch.nn.functional")

RNG = np.random.default_rng(13)
LABELS = np.array([1, 0, 3])
COLUMNS, FOUR = np.array([0, 2, 2]), np.array([3, 0, 3, 1])


def normal(*shape):
    """Numbers away from 0 and from each other: no difference below crosses a kink."""
    values = np.arange(1, 1 + int(np.prod(shape))) * 0.31 % 2.3 - 1.1
    return RNG.permutation(values + 0.017).reshape(shape)


def positive(*shape):
    return np.abs(normal(*shape)) + 0.3


def case(ours, theirs, *inputs):
    return ours, theirs, inputs


X, Y, ROW = normal(3, 4), normal(3, 4) + 0.1, normal(4)
CASES = {
    "add": case(lambda x, y: (x + y) ** 3.0, lambda x, y: (x + y) ** 3.0, X, ROW),
    "subtract": case(lambda x, y: (x - y) ** 3.0, lambda x, y: (x - y) ** 3.0, ROW, X),
    "multiply": case(lambda x, y: x * y * x, lambda x, y: x * y * x, X, ROW),
    "divide": case(lambda x, y: x / y, lambda x, y: x / y, X, positive(4)),
    "power": case(lambda x, y: x ** y, lambda x, y: x ** y, positive(3, 4), X),
    "power of a number": case(lambda x: 2.0 ** x * x ** 0.5, lambda x: 2.0 ** x * x ** 0.5, positive(3)),
    "square": case(lambda x: x ** 2, lambda x: x ** 2, X),
    "negative": case(lambda x: -x * x, lambda x: -x * x, X),
    "absolute": case(lambda x: ops.absolute(x) * x, lambda x: x.abs() * x, X),
    "exp": case(ops.exp, torch.exp, X),
    "log": case(ops.log, torch.log, positive(3)),
    "sqrt": case(ops.sqrt, torch.sqrt, positive(3)),
    "sin": case(ops.sin, torch.sin, X),
    "maximum": case(lambda x, y: ops.maximum(x, y) ** 3.0, lambda x, y: torch.maximum(x, y) ** 3.0, X, Y),
    "minimum": case(lambda x, y: ops.minimum(x, y) ** 3.0, lambda x, y: torch.minimum(x, y) ** 3.0, X, Y),
    "clip": case(lambda x: ops.clip(x * x, 0.2, 1.0) ** 2.0, lambda x: torch.clip(x * x, 0.2, 1.0) ** 2.0, X),
    "where": case(lambda x, y: ops.where(X > 0, x * x * x, y * x),
                  lambda x, y: torch.where(torch.tensor(X > 0), x * x * x, y * x),
                  X, ROW),
    **{name: case(getattr(ops, name), getattr(F, name), X) for name in ("relu", "tanh", "sigmoid", "silu", "softplus", "gelu")},
    "relu of a square": case(lambda x: ops.relu(x) ** 3.0, lambda x: torch.relu(x) ** 3.0, X),
    "gelu_tanh": case(lambda x: ops.gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh"), X),
    "leaky_relu": case(lambda x: ops.leaky_relu(x) ** 3.0, lambda x: F.leaky_relu(x) ** 3.0, X),
    "softmax": case(lambda x: ops.softmax(x, 0), lambda x: x.softmax(0), X),
    "log_softmax": case(ops.log_softmax, lambda x: x.log_softmax(-1), X),
    "matmul": case(lambda x, y: x @ y, torch.matmul, X, normal(4, 2)),
    "matmul of a batch": case(lambda x, y: x @ y, torch.matmul, normal(2, 3, 4), normal(4, 2)),
    "matmul of batches": case(lambda x, y: x @ y, torch.matmul, normal(2, 1, 3, 4), normal(5, 4, 2)),
    "matmul of vectors": case(lambda x, y: x @ y, torch.matmul, ROW, normal(4)),
    "matmul by a vector": case(lambda x, y: x @ y, torch.matmul, normal(2, 3, 4), ROW),
    "matmul of a vector": case(lambda x, y: x @ y, torch.matmul, ROW, normal(2, 4, 3)),
    "linear": case(ops.linear, F.linear, normal(2, 3, 4), normal(5, 4), normal(5)),
    "linear without bias": case(ops.linear, F.linear, ROW, normal(5, 4)),
    **{f"linear with {name}": case(lambda x, w, b, name=name: ops.linear(x, w, b, name),
                                   lambda x, w, b, theirs=theirs: theirs(F.linear(x, w, b)), X, normal(5, 4), normal(5))
       for name, theirs in {"relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "silu": F.silu, "gelu": F.gelu,
                            "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}.items()},
    "sum": case(lambda x: ops.sum(x * x * x, 0), lambda x: (x * x * x).sum(0), X),
    "mean": case(lambda x: ops.mean(x * x, (0, 1)) ** 2.0, lambda x: (x * x).mean((0, 1)) ** 2.0, X),
    "max": case(lambda x: ops.max(x, 1) ** 3.0, lambda x: x.amax(1) ** 3.0, X),
    "min": case(lambda x: ops.min(x) ** 3.0, lambda x: x.amin() ** 3.0, X),
    "var": case(lambda x: ops.var(x, 1) ** 2.0, lambda x: x.var(1) ** 2.0, X),
    "logsumexp": case(lambda x: ops.logsumexp(x, 1), lambda x: x.logsumexp(1), X),
    "reshape and transpose": case(lambda x: ops.transpose(x.reshape(2, 6)) ** 3.0, lambda x: x.reshape(2, 6).T ** 3.0, X),
    "broadcast_to": case(lambda x: ops.broadcast_to(x, (3, 4)) ** 3.0, lambda x: x.broadcast_to(3, 4) ** 3.0, normal(3, 1)),
    "concatenate": case(lambda x, y: ops.concatenate([x, y, x]) ** 3.0, lambda x, y: torch.cat([x, y, x]) ** 3.0, X, Y),
    "split": case(lambda x: ops.split(x * x, [1, 3], 1)[1] * x[:, 1:], lambda x: (x * x)[:, 1:] * x[:, 1:], X),
    "pad": case(lambda x: ops.pad(x, [(1, 0), (0, 2)]) ** 3.0, lambda x: F.pad(x, (0, 2, 1, 0)) ** 3.0, X),
    "slice": case(lambda x: x[1:, ::2] ** 3.0, lambda x: x[1:, ::2] ** 3.0, X),
    "gather": case(lambda x: x[COLUMNS, COLUMNS] ** 3.0, lambda x: x[COLUMNS, COLUMNS] ** 3.0, X),
    "mask": case(lambda x: x[X > 0] ** 3.0, lambda x: x[torch.tensor(X > 0)] ** 3.0, X),
    "take": case(lambda x: ops.take(x, FOUR, 1) ** 3.0, lambda x: x[:, FOUR] ** 3.0, X),
    "embedding": case(lambda w: ops.embedding(COLUMNS, w) ** 3.0, lambda w: F.embedding(torch.tensor(COLUMNS), w) ** 3.0, X),
    "cross_entropy": case(lambda x: ops.cross_entropy(x, LABELS, label_smoothing=0.1, ignore_index=0),
                          lambda x: F.cross_entropy(x, torch.tensor(LABELS), label_smoothing=0.1, ignore_index=0,
                                                    reduction="sum"), X),
    "mse": case(lambda x, y: ops.mse(x, y) ** 2.0, lambda x, y: F.mse_loss(x, y, reduction="sum") ** 2.0, X, Y),
    "l1": case(lambda x, y: ops.l1(x, y) ** 2.0, lambda x, y: F.l1_loss(x, y, reduction="sum") ** 2.0, X, Y),
    "huber": case(lambda x, y: ops.huber(x, y, 0.7) ** 2.0, lambda x, y: F.huber_loss(x, y, reduction="sum", delta=0.7) ** 2.0,
                  X, Y),
    "binary_cross_entropy": case(ops.binary_cross_entropy_with_logits, lambda x, t: F.binary_cross_entropy_with_logits(
        x, t, reduction="sum"), X, positive(3, 4)),
    "kl_divergence": case(ops.kl_divergence, lambda q, p: F.kl_div(q, p, reduction="sum"), X, positive(3, 4)),
}

IMAGES, WEIGHT = normal(2, 4, 5, 6), normal(6, 2, 3, 2)
CONVOLUTION = {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2), "groups": 2}
Q, K, V = normal(2, 1, 3, 4), normal(2, 1, 5, 4), normal(2, 1, 5, 2)
MASK = np.array([[1, 0, 1, 1, 0], [1, 1, 0, 0, 1], [0, 0, 1, 0, 0]], bool)


def normed(op, **more):
    return lambda x, *others: op(x, *others, **more) ** 3.0


def torch_norm(x, dims, weight=1.0, bias=0.0, eps=1e-5):
    """Composed: the third derivatives of torch.layer_norm and torch.batch_norm are wrong in 2.13, by differences, too."""
    centred = x - x.mean(dims, True)
    return centred / (centred.square().mean(dims, True) + eps).sqrt() * weight + bias


def torch_batch_norm(x, w, b):
    return torch_norm(x, (0, *range(2, x.ndim)), *(p.reshape(-1, *(1,) * (x.ndim - 2)) for p in (w, b)))


def torch_attention(q, k, v, mask=0.0):
    return (q @ k.mT / q.shape[-1] ** 0.5 + mask).softmax(-1) @ v


CASES |= {
    "conv2d": case(lambda x, w, b: ops.conv2d(x, w, b, **CONVOLUTION), lambda x, w, b: F.conv2d(x, w, b, **CONVOLUTION),
                   IMAGES, WEIGHT, normal(6)),
    "conv_transpose2d": case(
        lambda x, w, b: ops.conv_transpose2d(x, w, b, output_padding=(1, 0), **CONVOLUTION),
        lambda x, w, b: F.conv_transpose2d(x, w, b, output_padding=(1, 0), **CONVOLUTION), IMAGES, normal(4, 3, 2, 3), normal(6)),
    "conv1d": case(ops.conv1d, F.conv1d, normal(2, 3, 7), normal(2, 3, 3), normal(2)),
    "conv3d": case(ops.conv3d, F.conv3d, normal(1, 2, 3, 3, 4), normal(2, 2, 2, 2, 2), normal(2)),
    "layer_norm": case(lambda x, w, b: ops.layer_norm(x, w, b) ** 3.0, lambda x, w, b: torch_norm(x, -1, w, b) ** 3.0,
                       normal(2, 3, 4), normal(4), normal(4)),
    "layer_norm over two dims": case(normed(ops.layer_norm), lambda x, w: torch_norm(x, (1, 2), w) ** 3.0, normal(2, 3, 4), X),
    "rms_norm": case(normed(ops.rms_norm, eps=1e-3), lambda x, w: F.rms_norm(x, (4,), w, 1e-3) ** 3.0, X, normal(4)),
    "add_layer_norm": case(lambda x, r, w, b: multiplied(*ops.add_layer_norm(x, r, w, b)),
                           lambda x, r, w, b: multiplied(x + r, torch_norm(x + r, -1, w, b)), X, Y, normal(4), normal(4)),
    "batch_norm": case(lambda x, w, b: ops.batch_norm(x, w, b)[0] ** 3.0, lambda *all: torch_batch_norm(*all) ** 3.0,
                       IMAGES[:, :2, :2], normal(2), normal(2)),
    "batch_norm of vectors": case(lambda x, w, b: ops.batch_norm(x, w, b)[0] ** 3.0, lambda *all: torch_batch_norm(*all) ** 3.0,
                                  X, ROW, normal(4)),
    "batch_norm with relu": case(lambda x, w, b: ops.batch_norm(x, w, b, relu=True)[0] ** 3.0,
                                 lambda x, w, b: F.relu(torch_batch_norm(x, w, b)) ** 3.0,
                                 IMAGES[:, :2, :2], normal(2), normal(2)),
    "batch_norm with relu of a sum": case(
        lambda x, w, b, r: ops.batch_norm(x, w, b, residual=r, relu=True)[0] ** 3.0,
        lambda x, w, b, r: F.relu(torch_batch_norm(x, w, b) + r) ** 3.0,
        IMAGES[:, :2, :2], normal(2), normal(2), normal(2, 2, 2, 6)),
    "batch_norm_inference": case(lambda x, w, b: ops.batch_norm_inference(x, Y[0], Y[1] ** 2, w, b) ** 3.0, lambda x, w, b: (
        (x - torch.tensor(Y[0])) / (torch.tensor(Y[1] ** 2) + 1e-5).sqrt() * w + b) ** 3.0, X, ROW, normal(4)),
    "group_norm": case(lambda x, w, b: ops.group_norm(x, 2, w, b) ** 3.0, lambda x, w, b: F.group_norm(x, 2, w, b) ** 3.0,
                       IMAGES[..., :2], normal(4), normal(4)),
    "subsample2d": case(lambda x: ops.subsample2d(x, 2, (1, 0)) ** 3.0, lambda x: F.pad(x[..., ::2, ::2],
                                                                                            (0,) * 4 + (1, 0)) ** 3.0, IMAGES),
    "attention": case(ops.scaled_dot_product_attention, torch_attention, Q, K, V),
    "causal attention": case(lambda q, k, v: ops.scaled_dot_product_attention(q, k, v, is_causal=True), lambda q, k, v:
                             torch_attention(q, k, v, torch.full((3, 5), -torch.inf, dtype=q.dtype).triu(1)), Q, K, V),
    "attention with a mask": case(lambda q, k, v: ops.scaled_dot_product_attention(q, k, v, attn_mask=MASK), lambda q, k, v:
                                  torch_attention(q, k, v, torch.tensor(np.where(MASK, 0.0, -np.inf))), Q, K, V),
    "attention with a trained mask": case(lambda q, k, v, m: ops.scaled_dot_product_attention(q, k, v, attn_mask=m),
                                          torch_attention, Q, K, V, normal(3, 5)),
    "attention to itself": case(lambda x: ops.scaled_dot_product_attention(x, x, x), lambda x: torch_attention(x, x, x), Q),
    "self_attention": case(lambda x: ops.self_attention(x, 2), lambda x: torch_attention(*(
        part.reshape(2, 3, 2, 2).swapaxes(1, 2) for part in x.split(4, 2))).swapaxes(1, 2).reshape(2, 3, 4), normal(2, 3, 12)),
}


def multiplied(total, normed):
    return total * normed


def ladder(of, gradients, make, inputs, orders=3):
    """The derivatives of orders 1 to `orders`, each of the sum of the one before in fixed directions."""
    tensors = [make(x) for x in inputs]
    with keep_inputs():
        total = weighted(of(*tensors), 0)
    found = []
    for order in range(1, orders + 1):
        got = gradients(total, tensors)
        found.append([np.zeros(np.shape(x)) if g is None else values(g) for g, x in zip(got, inputs)])
        parts = [weighted(g, order + i) for i, g in enumerate(got) if g is not None and g.requires_grad]
        if not parts:
            return found + [[np.zeros(np.shape(x)) for x in inputs]] * (orders - order)
        total = sum(parts[1:], parts[0])
    return found


def direction(shape, seed):
    return np.random.default_rng(seed).normal(size=shape)


def weighted(x, seed):
    weights = direction(tuple(x.shape), seed)
    return (x * (torch.tensor(weights) if isinstance(x, torch.Tensor) else weights)).sum()


def values(x):
    return x.detach().numpy(force=True) if isinstance(x, torch.Tensor) else x.array


def of_ours(total, tensors):
    return grad(total, tensors, create_graph=True, allow_unused=True)


def of_torch(total, tensors):
    return torch.autograd.grad(total, tensors, create_graph=True, allow_unused=True)


def leaf(x):
    return Tensor(x.copy(), requires_grad=True)


def difference(found, expected):
    return np.abs(found - expected).max() / max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("name", CASES)
def test_first_second_and_third_derivatives_are_pytorch_s(name):
    ours, theirs, inputs = CASES[name]
    expected = ladder(theirs, of_torch, lambda x: torch.tensor(x, requires_grad=True), inputs)
    for found, wanted in zip(ladder(ours, of_ours, leaf, inputs), expected):
        assert max(map(difference, found, wanted)) < 1e-9


@pytest.mark.parametrize("name", CASES)
def test_each_derivative_is_the_limit_of_differences_of_the_one_before(name):
    """Six points: the error is of order h^6."""
    ours, _, inputs = CASES[name]
    along = [direction(x.shape, 99 - i) for i, x in enumerate(inputs)]
    h, steps = 1e-3, {1: 45, 2: -9, 3: 1}
    here = ladder(ours, of_ours, leaf, inputs)
    at = {k * sign: ladder(ours, of_ours, leaf, [x + sign * k * h * u for x, u in zip(inputs, along)], 2)
          for k in steps for sign in (1, -1)}
    for lower, (before, after) in enumerate(pairwise(here)):
        def total(found, lower=lower):
            return sum((g * direction(g.shape, lower + 1 + i)).sum() for i, g in enumerate(found[lower]))
        slope = sum(c * (total(at[k]) - total(at[-k])) for k, c in steps.items()) / (60 * h)
        expected = sum((g * u).sum() for g, u in zip(after, along))
        assert abs(slope - expected) < 1e-9 * max(1.0, abs(expected), abs(total(here))), (before, after)
