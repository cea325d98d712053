"""The list of operations: with `Function.forward` alone it gives a model's outputs for other inputs, to the bit."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from autograd.leaves import leaf

from mpitrain import models, nn, ops
from mpitrain.autograd import Context, Function, Operation, Tensor, Value, no_grad, recompute, record
from mpitrain.backend import random
from mpitrain.kernels.pool import Side
from mpitrain.nn.norm import NORMS

RNG = np.random.default_rng(0)


def images(*shape: int) -> Callable[[], Any]:
    return lambda: RNG.standard_normal((4, *shape), dtype=np.float32)


def tokens() -> Any:
    return RNG.integers(0, 11, (4, 8))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "mlp": (lambda: models.mlp(12, [16, 8], 5), images(12)),
    "lenet": (lambda: models.lenet(), images(1, 28, 28)),
    "resnet20": (lambda: models.resnet20(), images(3, 32, 32)),
    "gpt": (lambda: models.gpt(2, 2, 8, 8, 11, dropout=0.2), tokens),
    "experts": (lambda: models.gpt(2, 2, 8, 8, 11, dropout=0.2, experts=4), tokens),
}


def replay(operations: Iterable[Operation], *given: tuple[Any, Any]) -> list[Any]:
    """The arrays of the last operation, with other inputs in the places of those recorded; an interpreter in ten lines."""
    known: dict[Value, Any] = {}

    def array_of(x: Any) -> Any:
        if not isinstance(x, Value):
            return x
        return known[x] if x.array is None else next((new for old, new in given if old is x.array), x.array)

    made: Any = None
    for operation in operations:
        inputs = [array_of(x) for x in operation.inputs]
        ctx = Context(operation.function, np, (False,) * len(inputs))
        made = operation.function.forward(ctx, *inputs, **operation.attributes, **operation.links)
        made = list(made) if isinstance(made, tuple) else [made]
        known.update(zip(operation.outputs, made, strict=True))
    return made


def scope() -> Any:
    return random.use(random.Scope(3, 5, np.arange(4, dtype=np.uint64)))


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", MODELS)
def test_a_recorded_model_is_computed_by_forward_alone(name: str, training: bool) -> None:
    make, sample = MODELS[name]
    model = make()
    model.initialize(0)
    model.train(training)
    first, other = sample(), sample()
    with scope(), record() as operations:
        known = model(first)
    with scope(), no_grad():
        expected = model(other)
    assert not np.array_equal(known.array, expected.array)
    with scope():
        assert replay(operations)[-1].tobytes() == known.array.tobytes()
    with scope():
        assert replay(operations, (first, other))[-1].tobytes() == expected.array.tobytes()


def plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(plain(v) for v in value)
    if isinstance(value, Side):
        return plain((value.starts, value.stops, value.size))
    return value is None or value is Ellipsis or isinstance(value, (bool, int, float, str, slice))


@pytest.mark.parametrize("name", MODELS)
def test_attributes_are_plain_values_and_parameters_have_their_names(name: str) -> None:
    make, sample = MODELS[name]
    model = make().eval()
    model.initialize(0)
    with no_grad(), record() as operations:
        model(sample())
    assert all(plain(value) for operation in operations for value in operation.attributes.values())
    assert not any(operation.links for operation in operations)
    used = {x.name: x.array for operation in operations for x in operation.inputs if isinstance(x, Value) and x.name}
    leaves = {name: found.array for name, found in (*model.named_parameters(), *model.named_buffers())}
    assert used.keys() == leaves.keys() and all(used[name] is leaves[name] for name in leaves)


@pytest.mark.parametrize("name", ["lenet", "resnet20", "experts"])
def test_an_operation_has_the_path_of_the_module_whose_parameters_it_uses(name: str) -> None:
    make, sample = MODELS[name]
    model = make()
    model.initialize(0)
    with scope(), record() as operations:
        loss = ops.sum(model(sample()))
    assert operations[-1].path == "" and operations[-1].name == "Sum" and loss.size == 1
    paths: dict[str, set[str]] = {}               # of a tied parameter, several
    for path, module in model.named_modules():
        for parameter in vars(module).values():
            if isinstance(parameter, nn.Parameter):
                paths.setdefault(parameter.name, set()).add(path)
    seen = 0
    for operation in operations:
        for x in operation.inputs:
            if isinstance(x, Value) and x.name in paths and "router" not in x.name:      # of a mixture, which uses it itself
                assert operation.path in paths[x.name]
                seen += 1
    assert seen >= len(paths) - 2


def summary(operations: Iterable[Operation]) -> list[Any]:
    return [(o.name, o.path, o.attributes, [getattr(x, "number", x) for x in o.inputs], [y.shape for y in o.outputs])
            for o in operations]


def test_blocks_that_run_again_and_hooks_leave_the_list_as_it_is() -> None:
    found = []
    for again, watched in ((False, False), (True, False), (True, True)):
        model = models.gpt(2, 2, 8, 8, 11, dropout=0.2)
        model.recompute = again
        model.initialize(0)
        if watched:
            for _, module in model.named_modules():
                module.before_backward(lambda module: None)
        x = np.arange(8)[None] % 11
        with random.use(random.Scope(0, 0, np.zeros(1, np.uint64))), record() as operations:
            loss = ops.sum(model(x))
            count = len(operations)
            loss.backward()                       # which runs the blocks once more
        assert len(operations) == count
        found.append(summary(operations))
    assert found[0] == found[1] == found[2]


class Both(Function):
    """x + y and x - y."""

    @staticmethod
    def forward(ctx: Context, x: Any, y: Any, *, scale: float) -> Any:
        return (x + y) * scale, (x - y) * scale

    @staticmethod
    def backward(ctx: Context, plus: Any, minus: Any) -> Any:
        return plus + minus, plus - minus


def test_a_user_s_function_with_two_results_in_nested_recorders() -> None:
    x, y = leaf(1.0, 2.0), np.array([5.0, 7.0])
    with record() as outer:
        z = ops.negative(x)
        with record() as inner:
            a, b = Both.apply(z, y, scale=2.0)
        c = recompute(lambda t: ops.multiply(t, 3.0), b)
    assert [o.name for o in inner] == ["Both"] and [o.name for o in outer] == ["Negative", "Both", "Multiply"]
    negative, both, times = outer
    assert both.function is Both and both.attributes == {"scale": 2.0} and both.inputs[0] is negative.outputs[0]
    assert times.inputs[0] is both.outputs[1] and times.inputs[1] == 3.0 and both.inputs[1].array is y
    assert [v.array for v in both.outputs] == [None, None] and negative.inputs[0].array is x.array
    assert [v.number for v in (*negative.inputs, *negative.outputs)] == [0, 1]
    assert (a.array == [8, 10]).all() and replay(outer)[0].tobytes() == c.array.tobytes()


def test_nothing_is_recorded_before_after_and_on_other_threads_and_nothing_kept() -> None:
    x = leaf(1.0, 2.0)
    ops.negative(x)
    with pytest.raises(ZeroDivisionError), record() as operations:
        kept = weakref.ref(ops.negative(ops.negative(x)).array)
        other = threading.Thread(target=lambda: ops.exp(x))
        other.start()
        other.join()
        raise ZeroDivisionError
    ops.negative(x)
    assert [o.name for o in operations] == ["Negative", "Negative"] and kept() is None


@pytest.mark.parametrize("index", [np.array([2, 0]), [1, 1], (slice(1), np.array([0, 2])), (np.array([True, False, True]), 1),
                                   (None, slice(None), Tensor(np.array([1, 2])))], ids=str)
def test_arrays_in_an_index_are_inputs(index: Any) -> None:
    x = Tensor(RNG.standard_normal((3, 3)))
    with record() as operations:
        y = x[index]
    assert plain(operations[-1].attributes["index"]) and len(operations[-1].inputs) == 2
    assert replay(operations)[0].tobytes() == y.array.tobytes()


def test_statistics_over_ranks_are_no_attribute() -> None:
    layer = NORMS.resolve("batch")(3)
    layer.initialize(0)
    with record() as operations:
        layer(images(3, 4, 4)())
    assert list(operations[0].links) == ["record"] and operations[0].attributes["reduce"] is None
