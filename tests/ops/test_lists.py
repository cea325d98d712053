"""Lists are the float32 tensors that Tensor makes of them, in every operation; Python's own operators never see them."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from mpitrain import Tensor, nn, no_grad, ops
from mpitrain.errors import MpitrainError, ShapeError

OPS = {name: getattr(ops, name) for name in dir(ops) if not name.startswith("_") and inspect.isfunction(getattr(ops, name))}
PAIRS = [name for name, op in OPS.items() if [p.name for p in inspect.signature(op).parameters.values() if p.kind < 2 and (
    p.default is p.empty)] in (["x", "y"], ["x", "other"])]


def results(made: Any) -> list[np.ndarray]:
    return [np.asarray(x.array if isinstance(x, Tensor) else x) for x in (made if isinstance(made, tuple | list) else (made,))]


@pytest.mark.parametrize("name", PAIRS)
def test_two_lists_are_two_tensors(name: str) -> None:
    x, y = [1.0, 2.0, 3.0], [3, 2, 5]
    for given in ((x, y), (tuple(x), y), (x, 2), (2, y), (Tensor(x), y), (x, Tensor(y))):
        tensors = [Tensor(a) if isinstance(a, list | tuple) else a for a in given]
        try:
            wanted = results(OPS[name](*tensors))
        except MpitrainError:
            continue                              # of whole numbers, or matrices, alone
        try:
            found = results(OPS[name](*given))
        except ShapeError as error:
            assert "is a list" in str(error) or "is a tuple" in str(error), str(error)
            continue
        for mine, other in zip(found, wanted, strict=True):
            assert mine.dtype == other.dtype and mine.shape == other.shape
            np.testing.assert_array_equal(mine, other)


def test_no_list_is_read_in_pythons_way() -> None:
    """By every op of one, two or three inputs: what tensors give, or a line."""
    differ = []
    with np.errstate(all="ignore"):
        for name, op in OPS.items():
            count = sum(p.kind < 2 and p.default is p.empty for p in inspect.signature(op).parameters.values())
            if not 1 <= count <= 3:
                continue
            for place in range(count):
                given: list[Any] = [Tensor([0.5, 0.25])] * count
                try:
                    wanted = results(op(*given))
                    given[place] = [0.5, 0.25]
                    found = results(op(*given))
                except MpitrainError:
                    continue
                if not all(a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
                           for a, b in zip(found, wanted)):
                    differ.append(f"{name} {place}: {found} {wanted}")
    assert not differ, "\n".join(differ)


def test_results_of_lists_have_pytorchs_default_dtype() -> None:
    assert ops.add([1, 2], [3, 4]).array.tolist() == [4, 6] and ops.add([1.0], 1).dtype == "float32"
    assert ops.multiply([1, 2], 3).array.tolist() == [3, 6] and ops.multiply((1, 2), 2).array.tolist() == [2, 4]
    assert ops.greater([1, 2], [0, 3]).array.tolist() == [True, False] and ops.sum([1.0, 2.0]).item() == 3
    assert ([1.0, 2.0] + Tensor([[1.0], [2.0]])).array.tolist() == [[2, 3], [3, 4]]


TENSORS = "list (of tensors that require gradients|has tensors, whose gradients).*ops.stack"


def test_lists_that_are_no_numbers_are_refused() -> None:
    for values, message in (([[1, 2], [3]], "Tensor: .*expected real numbers, lists of equal lengths"),
                            (["a"], "expected real numbers"),
                            ([None, Tensor([1.0], requires_grad=True)], TENSORS),
                            (nn.pack_padded_sequence(np.zeros((2, 5, 3), "f4"), [5, 4]),
                             "PackedSequence, expected a Tensor.*; give its .data"),
                            (Tensor([[1.0, 2.0]]).max(1), "Places, expected a Tensor.*; give one of its parts"),
                            (([Tensor([1.0], requires_grad=True)],), TENSORS)):
        for op in (ops.add, ops.sin, ops.logaddexp):
            with pytest.raises(ShapeError, match=message):
                op(*[values] * (1 if op is ops.sin else 2))
    with no_grad():
        assert ops.exp([Tensor(np.array(0.0), requires_grad=True)]).array.tolist() == [1]
