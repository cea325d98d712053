"""Whatever an op or a layer is called with, it answers, or says in one line what is wrong."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mpitrain import Function, Tensor, nn, ops
from mpitrain.errors import ArgumentError, MpitrainError, ShapeError
from mpitrain.ops.inputs import door
from mpitrain.shrink.formats import FORMATS

BAD: dict[str, Any] = {
    "None": None, "a text": "text", "a list": [1.0, 2.0], "a ragged list": [[1.0], [2.0, 3.0]], "a dict": {"a": 1},
    "objects": np.array([1, "a"], object), "texts": np.array(["a", "b"]), "a number": 2.5, "an object": object(),
    "a complex array": np.ones((2, 3), complex), "no dims": np.float32(1).reshape(()), "no numbers": np.ones((0, 3), "f"),
    "booleans": np.ones((2, 3), bool), "an unsigned integer": np.uint8(3)}
OPS = {name: getattr(ops, name) for name in dir(ops) if not name.startswith("_") and inspect.isfunction(getattr(ops, name))}
# What layers are made with, by the names of arguments that have no default; 2 for others.
MADE: dict[str, Any] = {"shape": (3,), "sizes": (3, 1), "size": 2, "padding": 1, "modules": {}, "dropout": 0.1, "heads": 1,
                        "nhead": 1, "encoder_layer": nn.TransformerEncoderLayer(4, 1), "decoder_layer":
                        nn.TransformerDecoderLayer(4, 1), "init": nn.init.zeros, "what": "it", "change": "change it",
                        "format": FORMATS["int8"]()}
# They have no forward, or are made of a layer that has memory.
NO_LAYERS = {"ParameterDict", "ParameterList", "ModuleDict", "ModuleList", "Module", "Loss", "SparseLinear"}


def layers() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in dir(nn):
        kind = getattr(nn, name)
        if isinstance(kind, type) and issubclass(kind, nn.Module | nn.Loss) and name not in NO_LAYERS:
            needed = [p for p in inspect.signature(kind).parameters.values() if p.default is p.empty and p.kind < 2]
            layer = kind(*[MADE.get(p.name, 2) for p in needed])
            if isinstance(layer, nn.Module):
                layer.initialize()
            yield name, layer


def wrong(name: str, call: Callable[..., Any], places: int) -> Iterator[str]:
    """What is raised that is no error of ours in one line, by every bad value in every place, beside good ones and alone."""
    good = Tensor(np.ones((2, 3), "f"))
    for tag, bad in BAD.items():
        for inputs in ([bad] * places, *([good] * i + [bad] + [good] * (places - 1 - i) for i in range(places))):
            try:
                call(*inputs)
            except MpitrainError as error:
                if "\n" in str(error) or len(str(error)) < 12:
                    yield f"{name}: {tag}: no line: {error}"
            except Exception as error:
                yield f"{name}: {tag}: {type(error).__name__}: {error}"


def inputs_of(call: Callable[..., Any]) -> int:
    found = [p for p in inspect.signature(call).parameters.values() if p.kind < 2 and p.default is p.empty]
    return max(len(found), 1)


def test_no_op_raises_pythons_errors() -> None:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        found = [line for name, op in OPS.items() for line in wrong(name, op, inputs_of(op))]
    assert len(OPS) > 350 and not found, "\n".join(found[:40])


def test_no_layer_raises_pythons_errors() -> None:
    made = dict(layers())
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        found = [line for name, layer in made.items()
                 for line in wrong(name, layer, inputs_of(layer.forward if isinstance(layer, nn.Module) else layer) + isinstance(
                     layer, nn.Loss))]
    assert len(made) > 130 and not found, "\n".join(found[:40])


@pytest.mark.parametrize("name", ["add", "matmul", "relu", "linear", "zeros", "reshape", "conv2d", "sin", "sum", "cat", "arange"])
def test_an_argument_of_pytorch_that_is_not_here_says_what_to_write(name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^{OPS[name].__name__}: .*'out'; its arguments are \(.*write y = ops") as caught:
        OPS[name](*[np.ones((2, 2), "f")] * 2, out=np.ones(2))
    assert isinstance(caught.value, TypeError) and "\n" not in str(caught.value)


def test_every_op_and_layer_names_its_arguments() -> None:
    for op in OPS.values():
        if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(op).parameters.values()):
            with pytest.raises(ArgumentError, match=r"nonsense.*; its arguments are \("):
                op(nonsense=1)
    for name in dir(nn):
        kind = getattr(nn, name)
        if isinstance(kind, type) and issubclass(kind, nn.Module | nn.Loss | nn.Parameter | nn.Buffer) and name != "Identity":
            with pytest.raises(ArgumentError, match=f"^{name}: .*arguments"):
                kind(nonsense=1)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: nn.Dropout(inplace=True), "Dropout: .*'inplace'; its arguments are .p.; no operation changes .*leave it out"),
    (lambda: nn.Dropout(0.5, True), r"Dropout: too many positional arguments; its arguments are \(p\)"),
    (lambda: nn.Linear(3), r"Linear: missing a required argument: 'outputs'; its arguments are \(inputs, outputs, bias"),
    (lambda: nn.Linear(3, 4, device="cpu"), "Linear: .*on one device"),
    (lambda: nn.Parameter(np.zeros(2)), r"Parameter: missing a required argument: 'init'.*nn.Parameter\(shape, init\)"),
    (lambda: nn.MSELoss(size_average=True), r"MSELoss: .*'size_average'; its arguments are \(reduction"),
    (lambda: ops.add(np.ones(2)), r"add: missing 1 required positional argument: 'y'; its arguments are \(x, y\)"),
    (lambda: Tensor([1.0]).exp(out=1), "exp: .*'out'.*no operation writes into an array"),
    (lambda: ops.conv2d([1.0], np.ones((1, 1, 1, 1))), r"conv2d: x is a list, expected a Tensor or an array; make a Tensor"),
    (lambda: nn.ReflectionPad2d(1)(None), "ReflectionPad2d: x is None|pad: .* None"),
    (lambda: nn.Flatten()(3.0), r"Flatten: x is 3.0, expected a Tensor"),
    (lambda: ops.linear(np.ones(3, "f"), np.ones((2, 3), "f"), foo=1), "linear: .*'foo'")])
def test_what_is_typed_wrong_is_said_in_a_line(call: Any, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        call()


def test_errors_of_users_own_lines_stay_as_they_are() -> None:
    class Mine(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.nothing

    class Wrong(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.nothing

    def distance(x: Any, y: Any) -> Any:
        return [].nothing  # type: ignore[attr-defined]

    x = np.ones((2, 3), "f")
    for call in (lambda: Mine()(x), lambda: Wrong.apply(x), lambda: nn.Sequential(Mine())(x), lambda: door(distance)(x, x),
                 lambda: ops.triplet_margin_with_distance_loss(x, x, x, distance_function=distance)):
        with pytest.raises(AttributeError, match="nothing"):
            call()
