"""What a backward that fails, or comes twice, leaves behind: nothing in the graph, and an error that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from autograd.leaves import leaf, trained

from mpitrain import ops
from mpitrain.autograd import Context, Function, Tensor, recompute, run_backward
from mpitrain.errors import GraphError


class Failing(Function):
    """x, whose backward raises."""

    @staticmethod
    def forward(ctx: Context, x: Any, *, error: type[BaseException]) -> Any:
        ctx.error = error
        return x + 0

    @staticmethod
    def backward(ctx: Context, grad: Any) -> Any:
        raise ctx.error


class FailingOnce(Function):
    """x * w, which raises once the gradient of x is made, or of w where that is asked for alone."""

    @staticmethod
    def forward(ctx: Context, x: Any, w: Any, *, only: int) -> Any:
        ctx.save(x, w)
        ctx.only = only
        return x * w

    @staticmethod
    def backward(ctx: Context, grad: Any) -> Any:
        x, w = ctx.saved
        if ctx.needs[ctx.only]:
            raise ValueError
        return grad * w, grad * x


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_backward_that_fails_leaves_no_gradient_in_the_graph(error: type[BaseException]) -> None:
    x = leaf(1.0, 1.0)
    h = x * 1.0
    loss = ops.sum(Failing.apply(h, error=error)) + ops.sum(h * 10.0)
    with pytest.raises(error):
        loss.backward()
    assert x.grad is None
    ops.sum(h).backward()
    np.testing.assert_array_equal(x.grad, [1, 1])


def test_a_recomputed_block_that_fails_leaves_no_gradient_either() -> None:
    x = leaf(1.0, 1.0)
    h = x * 1.0
    loss = ops.sum(recompute(lambda h: Failing.apply(h, error=ValueError), h)) + ops.sum(h * 10.0)
    with pytest.raises(ValueError):
        loss.backward()
    ops.sum(h).backward()
    np.testing.assert_array_equal(x.grad, [1, 1])


@pytest.mark.parametrize("failing", [0, 1])
def test_a_node_that_a_failed_split_backward_has_begun_with_refuses_the_next(failing: int) -> None:
    """Half a result that it keeps for the second call would be taken for the next backward's."""
    x, w, v = leaf(1.0, 2.0), trained(2), trained(2, seed=1)
    y = FailingOnce.apply(x * v, w, only=failing) * v
    with pytest.raises(ValueError):
        deferred = run_backward(ops.sum(y), split=True)
        assert deferred is not None
        deferred.run()
    with pytest.raises(GraphError, match="Multiply: backward ran twice"):
        ops.sum(y).backward()


IMAGE, MATRIX = (2, 4, 4, 4), (3, 4)
OPS: dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    "Add": (MATRIX, lambda x: x + 1.0),
    "Multiply": (MATRIX, lambda x: x * 2.0),
    "Sum": (MATRIX, lambda x: ops.sum(x, 0)),
    "Mean": (MATRIX, lambda x: ops.mean(x, 0)),
    "Extremum": (MATRIX, lambda x: ops.max(x, 0)),
    "Variance": (MATRIX, lambda x: ops.var(x, 0)),
    "Reshape": (MATRIX, lambda x: ops.reshape(x, (4, 3))),
    "Transpose": (MATRIX, lambda x: ops.transpose(x, (1, 0))),
    "Slice": (MATRIX, lambda x: x[1:]),
    "Gather": (MATRIX, lambda x: x[np.array([0, 2, 2])]),
    "Concatenate": (MATRIX, lambda x: ops.concatenate([x, x], 0)),
    "Pointwise": (MATRIX, ops.gelu),
    "Linear": (MATRIX, lambda x: ops.linear(x, np.ones((2, 4)), None, "gelu")),
    "CrossEntropy": (MATRIX, lambda x: ops.cross_entropy(x, np.zeros(3, np.int64))),
    "RowNorm": (MATRIX, lambda x: ops.layer_norm(x, np.ones(4))),
    "GroupNorm": (IMAGE, lambda x: ops.group_norm(x, 2)),
    "BatchNorm": (IMAGE, lambda x: ops.batch_norm(x)[0]),
    "MaxPool": (IMAGE, lambda x: ops.max_pool2d(x, 2)),
    "MeanPool": (IMAGE, lambda x: ops.avg_pool2d(x, 2)),
    "Attention": (IMAGE, lambda x: ops.scaled_dot_product_attention(x, x, x)),
    "Recompute": (MATRIX, lambda x: recompute(ops.exp, x)),
}


@pytest.mark.parametrize("name", list(OPS))
def test_a_second_backward_is_refused_by_the_first_op_it_meets(name: str) -> None:
    shape, op = OPS[name]
    y = op(Tensor(np.random.default_rng(0).standard_normal(shape), requires_grad=True))
    y.backward(np.ones(y.shape))
    with pytest.raises(GraphError, match=f"^{name}: backward ran twice through the same graph; what it saved was released "
                                         "the first time, so run forward again"):
        y.backward(np.ones(y.shape))
