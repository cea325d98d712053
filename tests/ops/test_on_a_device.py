"""Every op on the stand-in for a GPU: nothing may be computed with NumPy, and the results are those of the host."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fakegpu import DEVICES, counted, open_device, put, xp
from ops import fields_cases, later_cases, loss_cases, recurrent_cases
from ops.parity import normal, positive

from mpitrain import ops
from mpitrain.autograd import Backward, Context, Function, Tensor
from mpitrain.backend import asnumpy, random
from mpitrain.errors import ShapeError
from mpitrain.ops.experts import route
from mpitrain.ops.operators import PYTORCH_NAMES


def assigned(x: Tensor, index: Any, values: Any) -> Tensor:
    x[index] = values
    return x


INDEX = np.array([2, 0, 2])
MASK = np.array([True, False, True])
UNARY = ("absolute", "exp", "gelu", "leaky_relu", "log_softmax", "logsumexp", "max", "mean", "min", "negative", "relu", "sigmoid",
         "silu", "softmax", "softplus", "squeeze", "sum", "tanh", "transpose", "var")
BINARY = ("add", "divide", "equal", "greater", "greater_equal", "huber", "l1", "less", "less_equal", "maximum", "minimum", "mse",
          "multiply", "not_equal", "subtract")

# name -> functions of the arrays that follow; floats get gradients
CASES: dict[str, list[tuple[Any, ...]]] = {
    **{name: [(getattr(ops, name), normal(3, 4))] for name in UNARY},
    **{name: [(getattr(ops, name), normal(3, 4), positive(3, 4))] for name in BINARY},
    "log": [(ops.log, positive(3))],
    "sqrt": [(ops.sqrt, positive(3))],
    "power": [(ops.power, positive(3), normal(3)), (lambda x: x ** 2, normal(3))],
    "clip": [(lambda x: ops.clip(x, -0.5, 0.5), normal(5))],
    "where": [(ops.where, MASK, normal(3), normal(3, seed=1))],
    "gelu": [(ops.gelu, normal(9)), (lambda x: ops.gelu(x, "tanh"), normal(9))],
    "sum": [(lambda x: x.sum(1), normal(3, 4)), (lambda x: x.sum(), normal(3, 4))],
    "matmul": [(ops.matmul, normal(2, 3, 4), normal(4, 5)), (ops.matmul, normal(2, 3, 4), normal(2, 4, 5)),
               (lambda x, y: (x @ y).sum(), normal(3, 4), normal(4, 5))],
    "linear": [(ops.linear, normal(2, 3, 4), normal(5, 4), normal(5))],
    "reshape": [(lambda x: x.reshape(6), normal(2, 3))],
    "swapaxes": [(lambda x: ops.swapaxes(x, 0, 1), normal(2, 3))],
    "broadcast_to": [(lambda x: ops.broadcast_to(x, (4, 3)), normal(3))],
    "concatenate": [(lambda x, y: ops.concatenate([x, y]), normal(2, 3), normal(1, 3))],
    "stack": [(lambda x, y: ops.stack([x, y], 1), normal(2, 3), normal(2, 3))],
    "split": [(lambda x: ops.split(x, 2), normal(5, 2))],
    "expand_dims": [(lambda x: ops.expand_dims(x, 0), normal(2))],
    "getitem": [(lambda x: x[1:, None], normal(3, 2)), (lambda x, i: x[i], normal(3, 2), INDEX),
                (lambda x, m: x[m], normal(3, 2), MASK), (lambda x, i: x[1, :, i], normal(3, 2, 3), INDEX),
                (lambda x, y, i: assigned(x * 2, (i[:2], 1), y), normal(3, 2), normal(2), INDEX),
                (lambda x, y, m: assigned(y * 0, m, x), normal(2, 2), normal(3, 2), MASK)],
    "take": [(lambda x, i: ops.take(x, i, 1), normal(2, 3), INDEX)],
    "embedding": [(lambda i, w: ops.embedding(i, w), INDEX, normal(3, 4))],
    "cross_entropy": [(ops.cross_entropy, normal(3, 4), INDEX),
                      (lambda x, t: ops.cross_entropy(x, t, label_smoothing=0.1, ignore_index=0), normal(3, 4), INDEX)],
    "binary_cross_entropy_with_logits": [(ops.binary_cross_entropy_with_logits, normal(3), positive(3))],
    "kl_divergence": [(ops.kl_divergence, normal(3), positive(3))],
    "conv2d": [(lambda x, w, b: ops.conv2d(x, w, b, stride=2, padding=1), normal(2, 3, 5, 6), normal(4, 3, 3, 3), normal(4)),
               (lambda x, w: ops.conv2d(x, w, groups=2, dilation=2), normal(2, 4, 5, 6), normal(6, 2, 2, 2)),
               (ops.conv2d, normal(2, 3, 4, 4), normal(5, 3, 1, 1))],
    "conv_transpose2d": [(lambda x, w: ops.conv_transpose2d(x, w, stride=2, output_padding=1), normal(2, 3, 3, 4),
                          normal(3, 2, 2, 2))],
    "max_pool2d": [(lambda x: ops.max_pool2d(x, 2), normal(2, 3, 4, 5))],
    "avg_pool2d": [(lambda x: ops.avg_pool2d(x, 2, padding=1), normal(2, 3, 4, 5))],
    "subsample2d": [(lambda x: ops.subsample2d(x, 2, (1, 2)), normal(2, 3, 4, 5))],
    "adaptive_max_pool2d": [(lambda x: ops.adaptive_max_pool2d(x, 2), normal(2, 3, 5, 5))],
    "adaptive_avg_pool2d": [(lambda x: ops.adaptive_avg_pool2d(x, 2), normal(2, 3, 5, 5))],
    "batch_norm": [(lambda x, w, b: ops.batch_norm(x, w, b)[0], normal(4, 3, 2, 2), normal(3), normal(3))],
    "batch_norm_inference": [(ops.batch_norm_inference, normal(4, 3), normal(3), positive(3), normal(3), normal(3))],
    "add_layer_norm": [(ops.add_layer_norm, normal(4, 3), normal(4, 3, seed=1), normal(3), normal(3)),
                       (lambda *xs: ops.add_layer_norm(*xs, dropout=0.5, layer="a layer"), normal(2, 3, 8),
                        normal(2, 3, 8, seed=1), normal(8))],
    "layer_norm": [(ops.layer_norm, normal(4, 3), normal(3), normal(3))],
    "group_norm": [(lambda x, w, b: ops.group_norm(x, 2, w, b), normal(2, 4, 3), normal(4), normal(4))],
    "rms_norm": [(ops.rms_norm, normal(4, 3), normal(3))],
    "dropout": [(lambda x: ops.dropout(x, 0.5, "a layer"), normal(4, 9))],
    "scaled_dot_product_attention": [
        (ops.scaled_dot_product_attention, normal(2, 2, 3, 4), normal(2, 2, 5, 4), normal(2, 2, 5, 4)),
        (lambda q, k, v: ops.scaled_dot_product_attention(q, k, v, is_causal=True),
         *(normal(2, 2, 3, 4, seed=i) for i in range(3)))],
    "self_attention": [(lambda x: ops.self_attention(x, 2, causal=True), normal(2, 3, 12)),
                       (lambda x: ops.self_attention(x, 2, dropout=0.5, layer="a layer"), normal(2, 3, 12))],
    "dispatch": [(lambda x, s: ops.dispatch(x, route(s, 2, 2)), normal(5, 3), normal(5, 4))],
    "combine": [(lambda y, g, s: ops.combine(y, g, route(s, 2, 2)), normal(4, 2, 3), normal(2, 5), normal(5, 4))],
    "expert_gates": [(lambda s: ops.expert_gates(s, route(s, 2, 2), normalised=True), positive(5, 4)),
                     (lambda s: ops.expert_gates(s, route(s, 1, 2), normalised=False), positive(5, 4))],
    "expert_balance": [(lambda s: ops.expert_balance(s, route(s, 2, 2), 0.3), positive(5, 4))],
    "expert_linear": [(lambda x, w, b: ops.expert_linear(x, w, b, "gelu"), normal(2, 5, 3), normal(2, 4, 3), normal(2, 4))],
    "cross_entropy_count": [(lambda t: Tensor(put(float(ops.cross_entropy_count(t, ignore_index=0)))), INDEX)],
    "element_count": [(lambda x: Tensor(put(float(ops.element_count(x)))), normal(3))],
    **later_cases.CASES,
    **loss_cases.CASES,
    **fields_cases.CASES,
    **recurrent_cases.CASES,
}


def run(function: Any, arrays: tuple[np.ndarray, ...], move: Any) -> tuple[list[Any], list[Any]]:
    """Results and gradients of `function` on arrays moved by `move`; random numbers start afresh."""
    with random.use(random.Scope(seed=3)):
        return _run(function, arrays, move)


def _run(function: Any, arrays: tuple[np.ndarray, ...], move: Any) -> tuple[list[Any], list[Any]]:
    inputs = [Tensor(move(a), requires_grad=a.dtype.kind == "f") for a in arrays]
    results = function(*inputs)
    results = list(results) if isinstance(results, tuple) else [results]
    roots = [(r, move(normal(*r.shape, seed=9))) for r in results if r.requires_grad]
    if roots:
        Backward(None, False).run(roots)
    return [r.array for r in results], [t.grad for t in inputs if t.grad is not None]


def test_every_op_has_a_case() -> None:
    found = {name for name in dir(ops) if callable(op := getattr(ops, name)) and op.__module__.startswith("mpitrain.ops.")}
    assert set(CASES) == found - PYTORCH_NAMES.keys()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "number"), [(name, i) for name, cases in CASES.items() for i in range(len(cases))])
def test_an_op_stays_on_the_device_and_gives_the_results_of_the_host(name: str, number: int, device: str) -> None:
    function, *arrays = CASES[name][number]
    _, move, kind = open_device(device)
    for found, wanted in zip(run(function, tuple(arrays), move), run(function, tuple(arrays), np.asarray), strict=True):
        for a, b in zip(found, wanted, strict=True):
            assert type(a) is kind
            b = asnumpy(b)
            assert np.allclose(a.get(), b, rtol=1e-11, atol=1e-13) and a.dtype == b.dtype


# Ops that wait for a device: the shape of the result is in the numbers, or an index or a matrix is checked before anything is
# computed with it. The list may only become shorter.
WAITS = {"allclose", "argwhere", "bincount", "cdist", "corrcoef", "cov", "cross_entropy_count", "ctc_loss", "cummax", "cummin",
         "eigh", "eigvalsh", "gather", "getitem", "index_add", "index_copy", "index_fill", "index_reduce", "index_select",
         "kthvalue", "masked_scatter", "masked_select", "matrix_exp", "max_unpool1d", "max_unpool2d", "max_unpool3d",
         "max_with_index", "median", "min_with_index", "msort", "nanmedian", "nanquantile", "nonzero", "one_hot", "quantile",
         "repeat_interleave", "scatter", "scatter_add", "scatter_reduce", "sort", "take_along_dim", "topk", "unique",
         "unique_consecutive"}


@pytest.mark.parametrize("name", CASES)
def test_an_op_and_its_gradient_do_not_wait_for_the_device(name: str) -> None:
    with counted() as counts:
        for function, *arrays in CASES[name]:
            run(function, tuple(arrays), put)
    assert (name in WAITS) == bool(counts.syncs), dict(counts.syncs)


def test_a_label_that_is_no_class_makes_a_loss_on_a_device_no_number_instead_of_a_wait() -> None:
    """The loader has looked at labels already; a loss that is not finite ends the run."""
    x = put(normal(3, 4))
    for wrong in (4, -2):
        labels = put(np.array([0, wrong, 2]))
        for loss in (ops.nll_loss, ops.cross_entropy_loss, ops.focal_loss, ops.multi_margin_loss):
            terms = loss(x, labels, reduction="none").array.get()
            assert np.isnan(loss(x, labels).array.get()) and np.isnan(terms).tolist() == [False, True, False]
    wrong = put(np.array([[0, -1, 0, 0], [4, 1, -1, 0], [2, 1, 0, 3]]))
    assert np.isnan(ops.multilabel_margin_loss(x, wrong, reduction="none").array.get()).tolist() == [False, True, False]
    variances = put(np.array([[1.0] * 4, [1.0, -1.0, 1.0, 1.0], [1.0] * 4]))
    assert np.isnan(ops.gaussian_nll_loss(x, x, variances, reduction="none").array.get()).sum() == 1


@pytest.mark.parametrize("dtype", ["float64", ml_dtypes.bfloat16])
def test_an_index_that_is_not_there_gives_no_number_along_any_dim(dtype: Any) -> None:
    x, indices = normal(2, 3, 4).astype(dtype), np.array([[2, 3], [-1, 0]])
    for dim in (0, 1, 2, -1):
        there = np.clip(indices, 0, x.shape[dim] - 1)
        wanted = np.moveaxis(np.take(x, there, dim), (dim % 3, dim % 3 + 1), (0, 1))
        wanted[there != indices] = np.nan
        found = np.moveaxis(ops.take(put(x), put(indices), dim).array.get(), (dim % 3, dim % 3 + 1), (0, 1))
        np.testing.assert_array_equal(found.astype(float), wanted.astype(float))
        assert found.dtype == x.dtype


class Planted(Function):
    """An op as it should not be: it makes an array with NumPy."""

    @staticmethod
    def forward(ctx: Context, x: Any) -> Any:
        return x + np.zeros(x.shape)

    @staticmethod
    def backward(ctx: Context, grad: Any) -> Any:
        return grad


def test_an_op_that_uses_numpy_is_caught() -> None:
    Planted.apply(np.ones(2))
    with pytest.raises(TypeError, match="a NumPy array was mixed with device arrays"):
        Planted.apply(put(np.ones(2)))


@pytest.mark.parametrize("use", [lambda x: np.exp(x), lambda x: np.zeros(2) + x, lambda x: np.concatenate([x, x]),
                                 lambda x: np.asarray(x), lambda x: xp.exp(np.ones(2)), lambda x: x.__setitem__(0, np.ones(1))])
def test_the_stand_in_refuses_numpy(use: Any) -> None:
    with pytest.raises(TypeError):
        use(put(np.ones(2)))


def test_arrays_on_two_devices_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"Add: one input is on the host \(numpy\), another on the device \(fakegpu\)"):
        ops.add(np.ones(2), put(np.ones(2)))


def test_gradients_on_a_device_land_in_the_given_memory() -> None:
    w = Tensor(put(normal(4, 3)), requires_grad=True)
    w.grad_buffer = put(np.full((4, 3), np.nan))
    ops.sum(ops.linear(put(np.ones((2, 3))), w)).backward()
    assert w.grad is w.grad_buffer and (w.grad.get() == 2).all()
