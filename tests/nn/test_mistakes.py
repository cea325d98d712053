"""A mistake in a call is one line that says what to change."""

from __future__ import annotations

import inspect
import pickle
import sys
from typing import Any

import numpy as np
import pytest

from mpitrain import Function, Tensor, nn, ops, optim
from mpitrain.errors import ConfigError, ShapeError


class Plain(Function):
    floats = 1

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2


def linear() -> nn.Linear:
    layer = nn.Linear(3, 3)
    layer.initialize()
    return layer


@pytest.mark.parametrize(("call", "message"), [
    (lambda: Plain.apply(np.arange(3)), "Plain: an input is int64, expected float32 or float64"),
    (lambda: nn.Sequential(nn.Linear(3, 4), np.tanh), "Sequential: block 1 is <ufunc 'tanh'>, expected a Module"),
    (lambda: nn.Sequential(("a", nn.ReLU(), 1)), "Sequential: block 0 is "),
    (lambda: nn.Dropout("0.1"), r"probability of dropout lies in \[0, 1\), not '0.1'"),
    (lambda: nn.Dropout2d("0.1"), r"probability of dropout lies in \[0, 1\), not '0.1'"),
    (lambda: linear()({"x": [1, 2, 3]}), "Linear: .*dict, expected a Tensor"),
    (lambda: linear()(nn.pack_padded_sequence(np.zeros((2, 5, 3), "f4"), [5, 4])), "PackedSequence, expected.*give its .data"),
    (lambda: nn.Linear(3.0, 3), r"the shape of a parameter has whole numbers, got \(3, 3.0\)"),
    (lambda: nn.pack_padded_sequence(np.zeros((2, 5, 3)), [5.5, 4.0]),
     r"lengths \[5.5, 4.0\] are float64, expected whole numbers"),
    (lambda: nn.pack_padded_sequence(np.zeros((2, 5, 3)), ["5", "4"]), "expected whole numbers"),
    (lambda: nn.pack_padded_sequence(np.zeros((2, 5, 3)), [5.0, np.nan]), "expected whole numbers")])
def test_what_does_not_fit_is_said(call: Any, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        call()


def test_an_optimizer_says_what_it_takes() -> None:
    with pytest.raises(ConfigError, match="not one Parameter; put it into a list"):
        optim.AdamW(linear().weight)
    with pytest.raises(ConfigError, match="parameters of a model, not a Tensor"):
        optim.AdamW([Tensor([1.0])])


def test_tensors_of_torch_are_said_to_be_so() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ShapeError, match="requires grad. Use tensor.detach"):
        Tensor(torch.zeros(3, requires_grad=True))
    with pytest.raises(ShapeError, match="Linear: input 0 is a torch.Tensor, expected a Tensor, an array or a number"):
        linear()(torch.zeros(2, 3))


@pytest.mark.parametrize(("package", "name", "near"), [
    (nn, "GropNorm", "GroupNorm"), (ops, "soft_max", "softmax")])
def test_a_misspelt_name_has_a_nearest_one(package: Any, name: str, near: str) -> None:
    assert not hasattr(package, name)
    with pytest.raises(AttributeError, match=f"has no attribute '{name}' .did you mean \"{near}\""):
        getattr(package, name)


def test_a_misspelt_name_costs_nothing_where_nobody_reads_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "difflib", None)          # an import of it fails
    assert not hasattr(nn, "GropNorm") and not hasattr(ops, "soft_max")


@pytest.mark.parametrize(("make", "message"), [
    (lambda: nn.Linear(in_features=3, out_features=4),
     r"^Linear: got .* 'in_features'; its arguments are \(inputs, outputs, bias"),
    (lambda: nn.Conv1d(3, 4, kernel_size=3), r"^Conv1d: got .* 'kernel_size'; .*inputs, outputs, kernel"),
    (lambda: nn.LSTM(input_size=3, hidden_size=4), r"^LSTM: got .* 'input_size'; .*inputs, hidden")])
def test_a_layer_names_its_arguments(make: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


def test_the_signature_of_a_layer_is_that_of_its_constructor() -> None:
    assert list(inspect.signature(nn.Linear).parameters)[:3] == ["inputs", "outputs", "bias"]
    assert list(inspect.signature(nn.Linear(2, 2)).parameters) == ["inputs", "named"]       # of what calls it
    assert isinstance(pickle.loads(pickle.dumps(nn.ReLU())), nn.ReLU)
