"""`grad`: its results are values with a graph, equal to PyTorch's; what has no higher derivatives is refused by name."""

import numpy as np
import pytest

from mpitrain import Tensor, autograd, nn, ops
from mpitrain.autograd import Function, grad
from mpitrain.errors import GraphError

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.13.0")


def values(*shape):
    return np.random.default_rng(len(shape)).normal(size=shape) + 3


def test_third_derivatives_of_a_cube_are_what_the_formula_says():
    x = Tensor(values(3, 4), requires_grad=True)
    first, = grad((x * x * x).sum(), x, create_graph=True)
    second, = grad((first * first).sum(), x, create_graph=True)           # sum of (3 x^2)^2
    third, = grad(second.sum(), x)
    assert abs(second.array - 36 * x.array ** 3).max() < 1e-11
    assert abs(third.array - 108 * x.array ** 2).max() < 1e-11
    assert x.grad is None and not third.requires_grad


def test_the_gradient_of_a_penalty_on_a_gradient_reaches_a_leaf_as_in_pytorch():
    x0, w0 = values(3, 4), values(4)
    x, w = Tensor(x0, requires_grad=True), Tensor(w0, requires_grad=True)
    y = ((x * w) ** 3.0).mean(0) / (x + 1)
    slope, = grad(y.sum(), [x], create_graph=True)
    ((slope * slope).sum() + y.sum()).backward()
    tx, tw = torch.tensor(x0, requires_grad=True), torch.tensor(w0, requires_grad=True)
    ty = ((tx * tw) ** 3.0).mean(0) / (tx + 1)
    t, = torch.autograd.grad(ty.sum(), tx, create_graph=True)
    ((t * t).sum() + ty.sum()).backward()
    for ours, theirs in ((x, tx), (w, tw)):
        assert np.abs(ours.grad / theirs.grad.numpy() - 1).max() < 1e-12


def test_results_and_two_uses_of_one_tensor_can_be_differentiated_by():
    x = Tensor(values(3), requires_grad=True)
    y = x * 2
    z = (y * y + y.detach() * y).sum()
    by_y, by_x = grad(z, [y, x], retain_graph=True)
    assert np.allclose(by_y.array, 3 * y.array) and np.allclose(by_x.array, 6 * y.array)
    first, = grad((y * y.detach()).sum(), y, create_graph=True)
    assert not first.requires_grad


def test_a_graph_is_kept_where_asked_and_released_otherwise():
    x = Tensor(values(2), requires_grad=True)
    y = (x * x).sum()
    grad(y, x, retain_graph=True)
    grad(y, x)
    with pytest.raises(GraphError, match="ran twice"):
        grad(y, x)


def test_what_was_not_used_is_refused_or_none():
    x, other = (Tensor(values(2), requires_grad=True) for _ in range(2))
    y = (x * x).sum()
    with pytest.raises(GraphError, match="input 1, of shape"):
        grad(y, [x, other], create_graph=True)
    assert grad(y, [x, other], allow_unused=True)[1] is None
    with pytest.raises(GraphError, match="does not require a gradient"):
        grad(y, Tensor(values(2)))


class Cube(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save(x * 1)
        return x * x * x

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.saved[0] ** 2 * grad


class KeptCube(Cube):
    @staticmethod
    def derivative(ctx, grad):
        return 3 * ctx.input(0) ** 2 * grad


def test_an_op_without_derivative_is_refused_by_name_and_one_that_kept_no_input_says_how():
    x = Tensor(values(2), requires_grad=True)
    with pytest.raises(GraphError, match="Cube: it has a first derivative only"):
        grad(Cube.apply(x).sum(), x, create_graph=True)
    with pytest.raises(GraphError, match="KeptCube: .*keep_inputs"):
        grad(KeptCube.apply(x).sum(), x, create_graph=True)
    with autograd.keep_inputs():
        y = KeptCube.apply(x * 1).sum()
    first, = grad(y, x, create_graph=True)
    assert np.allclose(grad(first.sum(), x)[0].array, 6 * x.array)


def test_derivative_alone_gives_backward_its_values():
    x = Tensor(values(), requires_grad=True)
    ops.exp(ops.sqrt(x)).backward()
    assert np.isclose(x.grad, np.exp(np.sqrt(x.array)) / (2 * np.sqrt(x.array)))


def test_a_change_in_place_between_the_two_is_noticed():
    x = Tensor(values(2), requires_grad=True)
    first, = grad((x * x * x).sum(), x, create_graph=True)
    with autograd.no_grad():
        x[0] = 1
    with pytest.raises(GraphError, match="changed in place"):
        first.sum().backward()


def test_a_recomputed_block_has_the_derivatives_of_the_block():
    x, w = Tensor(values(3, 4), requires_grad=True), Tensor(values(4), requires_grad=True)

    def block(h, v):
        return ops.tanh(h * v * w) * w

    found = []
    for run in (block, lambda *given: autograd.recompute(block, *given)):
        h = x * w                                  # the leaf is used outside of the block, too
        y = run(h, w * w).sum()
        first = grad(y, [x, w], create_graph=True)
        second = grad((first[0] * first[0]).sum() + first[1].sum(), [x, w], retain_graph=True)
        plain = grad(run(x * w, w * w).sum(), [x, w])
        found.append([g.array for g in (*first, *second, *plain)])
    for ours, wanted in zip(*found):
        assert np.abs(ours - wanted).max() < 1e-12 and np.abs(wanted).max() > 0


def test_a_module_with_backward_hooks_is_refused_before_a_hook_runs():
    model, calls = nn.Sequential(("only", nn.Linear(3, 3))), []
    model.initialize(seed=0, dtype="float64")
    model.before_backward(calls.append)
    x = Tensor(values(2, 3), requires_grad=True)
    with pytest.raises(GraphError, match="Marker: a module on the way has backward hooks"):
        grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(GraphError, match="Marker: only Tensor.backward comes through here"):
        grad(model(x).sum(), x)
    assert not calls
    model(x).sum().backward()
    assert len(calls) == 1


def test_two_passes_give_the_same_bits():
    x, w = (Tensor(np.random.default_rng(i).normal(size=(40, 40)).astype("float32"), requires_grad=True) for i in (0, 1))
    y = ops.softmax(x @ w) * ops.tanh(x) + x
    found = [grad(g.sum(), [x, w], retain_graph=True) for _ in range(2) for g in grad((y * y).sum(), [x], create_graph=True)]
    assert all(a.array.tobytes() == b.array.tobytes() for a, b in zip(*found))


def test_a_recomputed_block_may_take_derivatives_inside():
    found = []
    for run in (lambda f, x: f(x), autograd.recompute):
        w = Tensor(values(3), requires_grad=True)

        def block(x, w=w):
            with autograd.enable_grad():
                inner = Tensor(x.array, requires_grad=True)
                return grad(ops.tanh(inner * w).sum(), inner, create_graph=True)[0]
        run(block, Tensor(values(3) / 9)).sum().backward()
        found.append(w.grad)
    assert np.array_equal(*found) and found[0].any()


def test_a_parameter_that_is_both_inputs_of_an_op_is_found_for_both():
    model = nn.Linear(3, 3)
    model.initialize(seed=0, dtype="float64")
    w = model.weight
    first, = grad((w * w * w).sum(), w, create_graph=True)
    second, = grad((first * first).sum(), w)
    assert np.allclose(second.array, 36 * w.array ** 3, rtol=1e-12)
