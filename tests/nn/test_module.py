"""Modules: what they consist of, names, state, slices, and hooks."""

import copy
import subprocess
import sys

import numpy as np
import pytest

from mpitrain import nn, ops
from mpitrain.autograd import Function, Tensor, no_grad, recompute, run_backward
from mpitrain.errors import ConfigError, GraphError, ShapeError
from mpitrain.nn import BatchNorm1d, Buffer, Linear, Module, Parameter, ReLU, Sequential, init
from mpitrain.nn.files import FILES


class Shared(Module):
    """Two uses of one weight, a list of layers, a buffer."""

    def __init__(self):
        self.first = Linear(4, 4)
        self.layers = [Linear(4, 4, bias=False), ReLU()]
        self.again = Linear(4, 4)
        self.again.weight = self.first.weight
        self.seen = Buffer((2,), init.ones)

    def forward(self, x):
        return self.again(self.layers[1](self.layers[0](self.first(x))))


def chain():
    return Sequential(("a", Linear(3, 5)), ("act", ReLU()), ("b", Linear(5, 5)), ("c", Linear(5, 2)))


def test_parameters_are_found_in_order_of_assignment_and_a_shared_one_once():
    model = Shared()
    assert [name for name, _ in model.named_parameters()] == ["first.weight", "first.bias", "layers.0.weight", "again.bias"]
    assert [name for name, _ in model.named_buffers()] == ["seen"]
    assert [name for name, _ in model.named_modules()] == ["", "first", "layers.0", "layers.1", "again"]
    assert model.count_parameters() == 16 + 4 + 16 + 4


def test_a_module_used_twice_is_named_once():
    layer = Linear(2, 2)
    model = Sequential(("x", layer), ("y", layer))
    assert [name for name, _ in model.named_parameters()] == ["x.weight", "x.bias"]
    assert [name for name, _ in model.named_modules()] == ["", "x"]


class Around(Module):
    """A layer that it is given, and one of its own."""

    def __init__(self, layer):
        self.given, self.own = layer, Linear(3, 3)

    def forward(self, x):
        return self.own(self.given(x))


def shared_layers():
    layer, act = Linear(3, 3), ReLU()
    return Sequential(("x", layer), ("act", act), ("y", layer), ("again", act), ("z", Around(layer)))


def test_layers_that_blocks_share_become_one_each_with_the_same_parameters():
    model = shared_layers()
    names = [name for name, _ in model.named_parameters()]
    model.separate()
    assert [name for name, _ in model.named_parameters()] == names
    assert [name for name, _ in model.named_modules()] == ["", "x", "act", "y", "again", "z", "z.given", "z.own"]
    assert model["x"].weight is model["y"].weight is model["z"].given.weight


def test_the_parameters_of_a_layer_that_blocks_share_get_twins_and_the_first_stays():
    model = shared_layers()
    model.untie()
    assert {name: p.twin_of for name, p in model.named_parameters()} == {
        "x.weight": "", "x.bias": "", "y.weight": "x.weight", "y.bias": "x.bias", "z.given.weight": "x.weight",
        "z.given.bias": "x.bias", "z.own.weight": "", "z.own.bias": ""}
    assert model.count_parameters() == 2 * (9 + 3)


def test_blocks_that_share_running_statistics_stay_one_and_cannot_be_untied():
    norm = BatchNorm1d(3)
    model = Sequential(("x", norm), ("between", Linear(3, 3)), ("y", norm))
    model.separate()
    assert model["x"] is model["y"]
    with pytest.raises(ConfigError, match='blocks "x" and "y" share the buffer "y.running_mean".* a layer of its own'):
        model.untie()


def test_state_loads_into_another_model_and_counts_as_a_change():
    model, other = Shared(), Shared()
    model.initialize(seed=1)
    other.initialize(seed=2)
    x = np.ones((2, 4), np.float32)
    waiting = ops.sum(other(x))
    other.load_state_dict({name: value.copy() for name, value in model.state_dict().items()})
    np.testing.assert_array_equal(model(x).array, other(x).array)
    with pytest.raises(GraphError, match="changed in place"):
        waiting.backward()


def test_state_accepts_tensors_of_another_precision():
    model, other = chain(), chain()
    model.initialize(seed=1, dtype="float64")
    other.initialize(seed=2)
    other.load_state_dict({name: Tensor(value) for name, value in model.state_dict().items()})
    np.testing.assert_array_equal(other["c"].bias.array, model["c"].bias.array.astype(np.float32))


def test_state_that_does_not_fit_is_listed_and_nothing_changes():
    model = chain()
    model.initialize()
    before = {name: value.copy() for name, value in model.state_dict().items()}
    state = {name: value + 1 for name, value in before.items() if name != "b.bias"}
    state["c.bias"] = np.zeros(3)
    state["d.bias"] = np.zeros(2)
    with pytest.raises(ShapeError) as error:
        model.load_state_dict(state)
    assert str(error.value) == ("the state does not fit the model; missing: b.bias; unexpected: d.bias; "
                                "of another shape: c.bias is (3,), expected (2,)")
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value, before[name])


def test_state_is_read_only():
    model = chain()
    model.initialize()
    with pytest.raises(ValueError, match="read-only"):
        model.state_dict()["a.bias"][0] = 1.0


def test_train_and_eval_reach_every_module():
    model = Shared().eval()
    assert not any(module.training for _, module in model.named_modules())
    assert all(module.training for _, module in model.train().named_modules())


def test_a_module_without_forward_says_so():
    with pytest.raises(GraphError, match="Nothing defines no forward"):
        type("Nothing", (Module,), {})()(1)


def test_blocks_of_one_name_are_refused():
    with pytest.raises(ShapeError, match=r"need different names, got \['a', 'a'\]"):
        Sequential(("a", ReLU()), ("a", ReLU()))


def test_a_slice_keeps_names_and_values_of_the_whole():
    whole, part = chain(), chain().slice(2, 4)
    whole.initialize(seed=3)
    part.initialize(seed=3)
    assert [name for name, _ in part.named_parameters()] == ["b.weight", "b.bias", "c.weight", "c.bias"]
    for name, value in part.state_dict().items():
        np.testing.assert_array_equal(value, whole.state_dict()[name])
    assert len(part) == 2 and part[0] is part["b"] and list(part) == [part["b"], part["c"]]


def test_a_shared_parameter_keeps_its_first_name_in_a_slice_without_its_first_use():
    def tied():
        first, last = Linear(4, 4, bias=False), Linear(4, 4)
        last.weight = first.weight
        return Sequential(("first", first), ("last", last))
    whole, part = tied(), tied().slice(1, 2)
    whole.initialize()
    part.initialize()
    assert [name for name, _ in part.named_parameters()] == ["first.weight", "last.bias"]
    np.testing.assert_array_equal(part["last"].weight.array, whole["last"].weight.array)


def test_a_copied_model_has_memory_of_its_own_that_its_storage_knows():
    model = Shared()
    storage = model.initialize()
    twin = copy.deepcopy(model)
    assert twin.first.weight is twin.again.weight
    twin.storage.values[...] = 7.0
    assert (twin.first.weight.array == 7.0).all()
    assert not (storage.values == 7.0).any()


# -- hooks -----------------------------------------------------------------------------------------------------------------

class Noted(Function):
    """The identity; notes when its backward runs."""

    @staticmethod
    def forward(ctx, x, *, log, name):
        ctx.log, ctx.name = log, name
        return x.copy()

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append(ctx.name)
        return grad


class Note(Module):
    def __init__(self, log, name):
        self.log, self.name = log, name

    def forward(self, x):
        return Noted.apply(x, log=self.log, name=self.name)


def hooked(log):
    """Three noting blocks; the middle one, itself two blocks, has all four hooks."""
    middle = Sequential(("m1", Note(log, "m1")), ("m2", Note(log, "m2")))
    middle.before_forward(lambda module, inputs: log.append(("before forward", len(inputs))))
    middle.after_forward(lambda module, inputs, output: log.append(("after forward", output.shape)))
    middle.before_backward(lambda module: log.append("before backward"))
    middle.after_backward(lambda module: log.append("after backward"))
    return Sequential(("first", Note(log, "first")), ("middle", middle), ("last", Note(log, "last")))


BACKWARD = ["last", "before backward", "m2", "m1", "after backward", "first"]


def test_hooks_surround_forward_and_backward_of_their_module():
    log = []
    x = Tensor(np.ones(3), requires_grad=True)
    y = hooked(log)(x)
    assert log == [("before forward", 1), ("after forward", (3,))]
    log.clear()
    ops.sum(y).backward()
    assert log == BACKWARD
    np.testing.assert_array_equal(x.grad, np.ones(3))


def test_hooks_run_in_a_recomputed_block_and_in_a_split_backward():
    log = []
    x = Tensor(np.ones(3), requires_grad=True)
    y = ops.sum(recompute(hooked(log), x))
    log.clear()
    y.backward()
    assert [entry for entry in log if isinstance(entry, str)] == BACKWARD
    y = ops.sum(hooked(log)(x))
    log.clear()
    run_backward(y, split=True).run()
    assert log == BACKWARD


def test_the_last_module_of_a_backward_is_left_too_and_a_first_module_without_input_gradient():
    log = []
    model = Sequential(("only", Linear(2, 2)))
    model.initialize()
    model["only"].after_backward(lambda module: log.append(module.weight.grad is not None))
    ops.sum(model(np.ones((1, 2), np.float32))).backward()
    assert log == [True]


def test_hooks_see_a_module_that_returns_a_tuple():
    class Pair(Module):
        def forward(self, x):
            return Noted.apply(x, log=log, name="one"), (Noted.apply(x, log=log, name="two"), 5)
    log = []
    pair = Pair()
    pair.before_backward(lambda module: log.append("before"))
    pair.after_backward(lambda module: log.append("after"))
    one, (two, five) = pair(Tensor(np.ones(2), requires_grad=True))
    assert five == 5
    ops.sum(one + two).backward()
    assert log == ["before", "two", "one", "after"]


def test_a_removed_hook_is_silent_and_without_a_graph_there_is_no_backward_hook():
    log = []
    model = chain()
    model.initialize()
    remove = model.before_backward(lambda module: log.append("before"))
    x = np.ones((1, 3), np.float32)
    with no_grad():
        assert model(x).node is None
    remove()
    ops.sum(model(x)).backward()
    assert log == []


def test_named_arguments_reach_forward_with_and_without_hooks():
    class Scale(Module):
        def forward(self, x, by=1.0):
            return x * by
    scale = Scale()
    x = Tensor(np.ones(2))
    assert scale(x, by=3.0).array[0] == 3.0
    scale.before_forward(lambda module, inputs: None)
    assert scale(x, by=3.0).array[0] == 3.0


def test_a_parameter_before_initialize_says_what_to_do():
    weight = Parameter((3, 4), init.zeros)
    assert weight.shape == (3, 4) and weight.ndim == 2 and weight.size == 12 and len(weight) == 3
    assert repr(weight) == 'Parameter("", shape=(3, 4), no memory yet)'
    with pytest.raises(GraphError, match=r'a parameter of shape \(3, 4\) has no memory yet; call initialize\(\)'):
        weight.array  # noqa: B018
    with pytest.raises(GraphError, match="no memory yet"):
        Linear(3, 4)(np.ones((1, 3), np.float32))
    with pytest.raises(AttributeError):
        weight.nonsense  # noqa: B018
    with pytest.raises(ShapeError, match="no negative numbers"):
        Buffer((-1,), init.zeros)


def test_importing_the_layers_reads_none_of_the_later_files():
    program = ("import sys, mpitrain.nn as nn; from mpitrain.nn.files import FILES; "
               "read = lambda: [f for f in FILES if f'mpitrain.nn.{f}' in sys.modules]; before = read(); nn.DropPath(0.1); "
               "print(before, read())")
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[] ['noise']\n"
    assert not [file for file in FILES if isinstance(getattr(nn, file, None), type)]
