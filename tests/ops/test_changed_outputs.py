"""A result changed in place before backward: refused where backward reads it, and without effect elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from mpitrain import ops
from mpitrain.autograd import Tensor, no_grad
from mpitrain.errors import GraphError

IMAGE, WEIGHT = (2, 3, 4, 4), np.random.default_rng(1).standard_normal((5, 4))


def _linear(x: Any, activation: str | None) -> Tensor:
    return ops.linear(x, WEIGHT, None, activation)


REFUSED: dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    **{f"linear {name}": ((3, 4), partial(_linear, activation=name)) for name in ("relu", "sigmoid", "tanh")},
    "linear relu of a vector": ((4,), partial(_linear, activation="relu")),
    "linear relu of samples": ((2, 3, 4), partial(_linear, activation="relu")),
    **{name: ((3, 4), getattr(ops, name)) for name in ("exp", "log_softmax", "relu", "sigmoid", "softmax", "tanh")},
    **{f"{name} over {dim}": ((3, 4), partial(getattr(ops, name), dim=dim, keepdim=keepdim))
       for name in ("logsumexp", "max", "min") for dim, keepdim in ((None, False), (0, False), (1, True))},
    "batch_norm of a sum with relu": (IMAGE, lambda x: ops.batch_norm(x, residual=x * 2.0, relu=True)[0]),
    "scaled_dot_product_attention": (IMAGE, lambda x: ops.scaled_dot_product_attention(x, x, x)),
    "self_attention": ((2, 3, 12), lambda x: ops.self_attention(x, 2)),
    "the sum of add_layer_norm": ((3, 4), lambda x: ops.add_layer_norm(x, x * 2.0, np.ones(4))[0]),
}
HARMLESS: dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    **{f"linear {name}": ((3, 4), partial(_linear, activation=name)) for name in (None, "gelu", "gelu_tanh", "silu")},
    **{name: ((3, 4), getattr(ops, name)) for name in ("gelu", "silu", "softplus", "leaky_relu", "sum", "mean", "var")},
    "batch_norm": (IMAGE, lambda x: ops.batch_norm(x)[0]),
    "batch_norm with relu": (IMAGE, lambda x: ops.batch_norm(x, relu=True)[0]),
    "group_norm": (IMAGE, lambda x: ops.group_norm(x, 3)),
    "layer_norm": ((3, 4), lambda x: ops.layer_norm(x, np.ones(4))),
    "max_pool2d": (IMAGE, lambda x: ops.max_pool2d(x, 2, relu=True)),
    "avg_pool2d": (IMAGE, lambda x: ops.avg_pool2d(x, 2)),
    "conv2d": (IMAGE, lambda x: ops.conv2d(x, np.ones((2, 3, 3, 3)))),
    "matmul": ((3, 4), lambda x: ops.matmul(x, WEIGHT.T)),
}


def _gradient(shape: tuple[int, ...], op: Callable[[Any], Any], changed: bool) -> Any:
    x = Tensor(np.random.default_rng(0).standard_normal(shape), requires_grad=True)
    y = op(x)
    if changed:
        with no_grad():
            y[...] = 0.5
    y.backward(np.random.default_rng(2).standard_normal(y.shape))
    return x.grad


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_result_that_backward_reads_is_watched(name: str) -> None:
    with pytest.raises(GraphError, match=r"an array it saved for backward was changed in place \(1 changes since\)"):
        _gradient(*REFUSED[name], changed=True)


@pytest.mark.parametrize("name", list(HARMLESS))
def test_a_result_that_backward_does_not_read_may_change(name: str) -> None:
    np.testing.assert_array_equal(_gradient(*HARMLESS[name], changed=True), _gradient(*HARMLESS[name], changed=False))
