"""Shape and indexing ops against PyTorch and against differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ops.parity import check, check_gradient, normal, torch

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.errors import DataError, ShapeError

MOVES = {
    "reshape": (lambda x: ops.reshape(x, 4, -1), lambda x: x.reshape(4, -1), (2, 6)),
    "reshape to a tuple": (lambda x: ops.reshape(x, (2, 3)), lambda x: x.reshape(2, 3), (3, 2)),
    "reshape of nothing": (lambda x: ops.reshape(x, 0, 5), lambda x: x.reshape(0, 5), (2, 0)),
    "reshape to no dims": (lambda x: ops.reshape(x, ()), lambda x: x.reshape(()), (1, 1)),
    "transpose": (lambda x: ops.transpose(x), lambda x: x.permute(2, 1, 0), (2, 3, 4)),
    "transpose with an order": (lambda x: ops.transpose(x, 1, 2, 0), lambda x: x.permute(1, 2, 0), (2, 3, 4)),
    "transpose counted from the end": (lambda x: ops.transpose(x, (0, -1, 1)), lambda x: x.permute(0, -1, 1), (2, 3, 4)),
    "swapaxes": (lambda x: ops.swapaxes(x, 0, -1), lambda x: x.swapaxes(0, -1), (2, 3, 4)),
    "broadcast_to": (lambda x: ops.broadcast_to(x, (4, 2, 3)), lambda x: x.broadcast_to(4, 2, 3), (2, 1)),
    "broadcast a number": (lambda x: ops.broadcast_to(x, (2, 3)), lambda x: x.broadcast_to(2, 3), ()),
    "squeeze": (lambda x: ops.squeeze(x), lambda x: x.squeeze(), (1, 3, 1)),
    "squeeze one dim": (lambda x: ops.squeeze(x, -1), lambda x: x.squeeze(-1), (1, 3, 1)),
    "expand_dims": (lambda x: ops.expand_dims(x, 1), lambda x: x.unsqueeze(1), (2, 3)),
    "expand_dims at the end": (lambda x: ops.expand_dims(x, -1), lambda x: x.unsqueeze(-1), (2, 3)),
    "split evenly": (lambda x: ops.split(x, 2, 1), lambda x: x.split(2, 1), (2, 5)),
    "split into sizes": (lambda x: ops.split(x, [1, 0, 3], -1), lambda x: x.split([1, 0, 3], -1), (2, 4)),
    "split nothing": (lambda x: ops.split(x, 2), lambda x: x.split(2), (0, 4)),
    "pad": (lambda x: ops.pad(x, [(1, 2), (0, 3)], value=0.5),
            lambda x: torch.nn.functional.pad(x, (0, 3, 1, 2), value=0.5), (2, 3)),
    "item": (lambda x: x[1, 2], lambda x: x[1, 2], (2, 3)),
    "row": (lambda x: x[1], lambda x: x[1], (2, 3)),
    "slices": (lambda x: x[:, 1:3], lambda x: x[:, 1:3], (2, 4, 2)),
    "steps": (lambda x: x[::2, ..., 0], lambda x: x[::2, ..., 0], (5, 2, 3)),
    "new dim": (lambda x: x[None, :, None], lambda x: x[None, :, None], (3,)),
    "array": (lambda x: x[np.array([2, 0, 2])], lambda x: x[torch.tensor([2, 0, 2])], (3, 4)),
    "list": (lambda x: x[[1, 1, -1]], lambda x: x[[1, 1, -1]], (3, 2, 2)),
    "pairs": (lambda x: x[np.array([0, 1, 0]), np.array([2, 2, 2])], lambda x: x[[0, 1, 0], [2, 2, 2]], (2, 3)),
    "slice and array": (lambda x: x[:, np.array([[0, 1], [1, 1]])], lambda x: x[:, torch.tensor([[0, 1], [1, 1]])], (2, 3)),
    "mask": (lambda x: x[np.array([True, False, True])], lambda x: x[torch.tensor([True, False, True])], (3, 2)),
    "nothing": (lambda x: x[np.array([], np.int64)], lambda x: x[torch.tensor([], dtype=torch.long)], (3, 2)),
    "take": (lambda x: ops.take(x, np.array([2, 0, 2]), 1), lambda x: x.index_select(1, torch.tensor([2, 0, 2])), (2, 3, 4)),
    "take pairs": (lambda x: ops.take(x, np.array([[2, 0], [1, 1]]), -1), lambda x: x[..., torch.tensor([[2, 0], [1, 1]])],
                   (2, 3)),
    "take one": (lambda x: ops.take(x, np.array(1)), lambda x: x[1], (2, 3)),
}


@pytest.mark.parametrize("name", MOVES)
def test_moving_and_choosing_equals_torch(name: str) -> None:
    ours, theirs, shape = MOVES[name]
    check(ours, theirs, shape)


@pytest.mark.parametrize("name", [name for name in MOVES if not name.startswith("split")])
def test_gradients_of_moving_and_choosing_equal_differences(name: str) -> None:
    ours, _, shape = MOVES[name]
    check_gradient(lambda x: ours(ops.multiply(x, x)), shape)


@pytest.mark.parametrize(("shapes", "dim"), [(((2, 3), (1, 3)), 0), (((2, 3), (2, 0), (2, 4)), -1), (((3,),), 0),
                                             (((0, 2), (1, 2)), 0)])
def test_concatenate_equals_torch(shapes: Any, dim: int) -> None:
    check(lambda *x: ops.concatenate(x, dim), lambda *x: torch.cat(x, dim), *shapes)
    check_gradient(lambda *x: ops.concatenate(x, dim), *shapes)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_stack_equals_torch(dim: int) -> None:
    check(lambda *x: ops.stack(x, dim), lambda *x: torch.stack(x, dim), (2, 3), (2, 3))


def test_one_array_may_stand_in_several_places() -> None:
    check(lambda x: ops.concatenate([x, x]), lambda x: torch.cat([x, x]), (2, 3))


@pytest.mark.parametrize("indices", [np.array([[0, 2], [2, 2]]), np.array(1), np.array([], np.int64),
                                     np.array([1, 0], np.int32)], ids=str)
def test_embedding_equals_torch(indices: np.ndarray) -> None:
    check(ops.embedding, lambda i, w: torch.nn.functional.embedding(i, w), indices, normal(3, 4))
    check_gradient(lambda w: ops.embedding(indices, w), (3, 4))


def test_the_gradient_of_an_embedding_is_written_into_the_given_memory() -> None:
    weight = Tensor(np.ones((3, 2), np.float32), requires_grad=True)
    weight.grad_buffer = np.full((3, 2), np.nan, np.float32)
    ops.sum(ops.embedding(np.array([2, 2, 0]), weight)).backward()
    assert weight.grad is weight.grad_buffer and weight.grad[:, 0].tolist() == [1, 0, 2]


def test_moves_show_the_same_memory() -> None:
    x = Tensor(np.arange(6.0).reshape(2, 3))
    views = [x.reshape(3, 2), x.T, x[0], x[:, 1:], ops.broadcast_to(x, (2, 2, 3)), *ops.split(x, 1),
             ops.squeeze(x), ops.expand_dims(x, 0)]
    assert all(np.shares_memory(v.array, x.array) for v in views)
    assert not np.shares_memory(x[np.array([0])].array, x.array)


def test_changing_the_memory_behind_a_view_is_noticed() -> None:
    from mpitrain.errors import GraphError
    x = Tensor(np.ones((2, 3)))
    w = Tensor(np.ones(3), requires_grad=True)
    loss = ops.sum(x[0] * w)
    x[0] = 5.0
    with pytest.raises(GraphError, match="Multiply: an array it saved for backward was changed in place"):
        loss.backward()


ERRORS = {
    "reshape: 6 values of shape (2, 3) do not fill the shape (4, 2)": lambda x: ops.reshape(x, 4, 2),
    "transpose: dims (0, 0) are no order of the 2 dims of shape (2, 3)": lambda x: ops.transpose(x, (0, 0)),
    "broadcast_to: shape (2, 3) does not broadcast to (3, 3)": lambda x: ops.broadcast_to(x, (3, 3)),
    "concatenate along dim 0: shapes (2, 3), (2, 2) do not fit": lambda x: ops.concatenate([x, x[:, :2]]),
    "concatenate along dim 5: shapes (2, 3), (2, 3) do not fit": lambda x: ops.concatenate([x, x], 5),
    "concatenate needs at least one tensor": lambda x: ops.concatenate([]),
    "stack: shapes (2, 3), (2, 2) differ": lambda x: ops.stack([x, x[:, :2]]),
    "pad: 1 pairs of widths for the 2 dims of shape (2, 3)": lambda x: ops.pad(x, [(1, 1)]),
    "squeeze: dim 1 of shape (2, 3) is not 1": lambda x: ops.squeeze(x, 1),
    "expand_dims: dim 4 of a result with 3 dims": lambda x: ops.expand_dims(x, 4),
    "split: sizes (1, 1) do not add up to dim 1 of shape (2, 3)": lambda x: ops.split(x, [1, 1], 1),
    "split: parts of size 0; the size must be positive": lambda x: ops.split(x, 0),
    "split: dim 2 of an array with 2 dims, shape (2, 3)": lambda x: ops.split(x, 1, 2),
    "take: dim 2 of an array with 2 dims, shape (2, 3)": lambda x: ops.take(x, np.array([0]), 2),
    "embedding: wants integer indices and a weight with 2 dims, found float64 and shape (2, 3); x.long() makes indices of floats":
        lambda x: ops.embedding(x, x),
}


@pytest.mark.parametrize("message", ERRORS)
def test_what_does_not_fit_is_named(message: str) -> None:
    with pytest.raises(ShapeError) as caught:
        ERRORS[message](Tensor(np.ones((2, 3))))
    assert caught.value.message == message


def test_an_index_out_of_range_is_named_with_its_row() -> None:
    with pytest.raises(DataError, match=r"row=1: embedding: index 5 is not in 0 ... 3"):
        ops.embedding(np.array([[0, 1], [2, 5]]), np.ones((4, 2)))
    with pytest.raises(DataError, match=r"row=0: take: index -1 is not in 0 ... 1"):
        ops.take(np.ones((2, 3)), np.array([-1]))
