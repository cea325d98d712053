"""Methods and operators of Tensor as people who know PyTorch, or NumPy, type them."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from ops.parity import check, normal, positive

from mpitrain import Tensor, nn, no_grad, ops, optim
from mpitrain.errors import ArgumentError, GraphError, ShapeError
from mpitrain.ops import operators

# One expression for both libraries.
EXPRESSIONS = {
    "2 ** x": lambda x, y: 2 ** x, "x ** y": lambda x, y: y ** x, "abs(x)": lambda x, y: abs(x), "x % y": lambda x, y: x % y,
    "x // y": lambda x, y: x.detach() // y.detach() + 0 * x, "1 % y": lambda x, y: 1 % y.detach() + 0 * y,
    "3 // y": lambda x, y: 3 // y.detach() + 0 * y, "1 / y": lambda x, y: 1 / y,
    "~(x > y)": lambda x, y: ~(x > y), "(x > 0) & (y > 1)": lambda x, y: (x > 0) & (y > 1),
    "(x > 0) | (y > 1)": lambda x, y: (x > 0) | (y > 1), "x == y": lambda x, y: x.floor() == y.floor(),
    "x != 0": lambda x, y: x.floor() != 0, "mul, add, sub, div": lambda x, y: x.mul(y).add(1).sub(y).div(y),
    "max of a dim": lambda x, y: x.max(dim=1)[0] + x.min(1)[0], "the index of the largest": lambda x, y: x.max(dim=-1)[1],
    "max of all": lambda x, y: x.max() + y.min(), "max of two": lambda x, y: x.max(y),
    "permute, unsqueeze, view": lambda x, y: x.permute(1, 0).unsqueeze(0).contiguous().view(2, -1),
    "transpose": lambda x, y: x.transpose(0, 1) @ y,
    "chunks": lambda x, y: x.chunk(2, dim=-1),
    "cumsum, clamp, sin": lambda x, y: x.cumsum(dim=0).clamp(min=-1).clamp(max=y).sin(),
    "topk": lambda x, y: x.topk(2, dim=1)[0], "masked_fill": lambda x, y: x.masked_fill(y > 1, 3.0),
    "for row in x": lambda x, y: sum(row * i for i, row in enumerate(x)), "std": lambda x, y: x.std(dim=(0, 1), keepdim=True),
    "norm": lambda x, y: x.norm(dim=1), "x.T, x.mT": lambda x, y: x.T @ y + y.mT @ x, "repeat": lambda x, y: x.repeat(2, 1, 2),
    "expand": lambda x, y: x.unsqueeze(1).expand(-1, 3, -1), "flatten, flip": lambda x, y: x.flatten().flip(0),
    "x += y": lambda x, y: _plus_equals(x, y), "softmax": lambda x, y: x.softmax(dim=1).log_softmax(-1),
    "roll, tril": lambda x, y: x.roll(1, 0).tril(), "argmax": lambda x, y: x.argmax(dim=1),
    "any": lambda x, y: (x > 1).any(dim=1),
    "gather": lambda x, y: x.gather(1, x.argsort(dim=1)), "to int": lambda x, y: x.long(),
    "where": lambda x, y: x.where(x > y, y * 2), "+x": lambda x, y: +x * y,
    "outer, dot": lambda x, y: x[0].outer(y[1]) * x[2].dot(y[2]), "inner, kron": lambda x, y: x.inner(y).kron(y),
    "addmm": lambda x, y: x[:, :3].addmm(x, y.mT, beta=0.5), "cross": lambda x, y: x[:, :3].cross(y[:, 1:], dim=-1),
    "baddbmm": lambda x, y: x[None, :, :3].baddbmm(x[None], y.mT[None]),
    "det, inverse": lambda x, y: x[:, :3].det() * y[:, :3].inverse(),
    "logdet": lambda x, y: (x @ x.mT).logdet(), "real": lambda x, y: x.real * x.conj() + x.angle(),
    "polygamma": lambda x, y: y.polygamma(1) * x, "prelu": lambda x, y: x.prelu(y[0, :1]),
    "vdot, matrix_power": lambda x, y: x[0].vdot(y[0]) * x[:, :3].matrix_power(2), "fix": lambda x, y: x.fix() + 0 * x,
    "numbers": lambda x, y: x.numel() * x.dim() * y,
}


def _plus_equals(x: Any, y: Any) -> Any:
    z = x * 1
    z += y
    return z


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_an_expression_gives_what_pytorch_gives(name: str) -> None:
    expression = EXPRESSIONS[name]
    check(expression, expression, normal(3, 4), positive(3, 4))


@pytest.mark.parametrize("expression", [
    lambda x: x * 0.5, lambda x: 0.5 + x, lambda x: x - 1.5, lambda x: x / 2, lambda x: x ** 0.5, lambda x: 2.0 ** x,
    lambda x: x % 2.5, lambda x: x * 2, lambda x: x // 2, lambda x: -x, lambda x: x ** 2, lambda x: abs(x), lambda x: x > 0.5,
    lambda x: x.sum(), lambda x: x.cumsum(0), lambda x: x.prod(), lambda x: x.sqrt(), lambda x: x.sin(), lambda x: x.clamp(1, 2),
    lambda x: x.floor()])
@pytest.mark.parametrize("kind", ["int64", "uint8"])
def test_integers_become_what_they_become_in_pytorch(expression: Any, kind: str) -> None:
    torch = pytest.importorskip("torch")
    values = np.arange(1, 5).astype(kind)
    mine, theirs = expression(Tensor(values)).array, expression(torch.tensor(values)).numpy()
    assert mine.dtype == theirs.dtype and np.allclose(mine, theirs, rtol=1e-6)


@pytest.mark.parametrize("axis", [0, -1, (0, 1), None])
@pytest.mark.parametrize("name", ["sum", "mean", "std", "var", "max", "prod", "norm", "any", "logsumexp"])
def test_axis_and_keepdims_mean_dim_and_keepdim(name: str, axis: Any) -> None:
    x, op = normal(3, 4), getattr(ops, name)
    assert np.array_equal(op(x, axis=axis, keepdims=True).array, op(x, dim=axis, keepdim=True).array)
    assert np.array_equal(op(x, axis=axis).array, op(x, dim=axis).array)
    with pytest.raises(ShapeError, match="dim and axis were both given"):
        op(x, dim=axis, axis=axis)


def test_every_operation_with_a_dim_takes_axis_too() -> None:
    """By its signature alone: a name that it did not know would be the error."""
    found = 0
    for name in dir(ops):
        op = getattr(ops, name)
        known = inspect.signature(op).parameters if inspect.isfunction(op) and not name.startswith("_") else {}
        for theirs, ours in (("axis", "dim"), ("axis", "dims"), ("keepdims", "keepdim")):
            if ours in known:
                found += 1
                with pytest.raises(ShapeError, match=f"{ours} and {theirs} were both given"):
                    op(**{ours: 0, theirs: 0})
                with pytest.raises(ShapeError) as caught:
                    op(**{theirs: 0, "nonsense": 0})
                assert "'nonsense'" in str(caught.value)
    assert found > 130
    x = Tensor(normal(4, 6))
    for call in (lambda **more: ops.glu(x, **more), lambda **more: ops.softmin(x, **more), lambda **more: ops.swiglu(x, **more),
                 lambda **more: ops.matrix_norm(x, axis=(0, 1), keepdims=True), lambda **more: ops.select_scatter(
                     x, x[0] if "axis" in more else x[:, 0], index=1, **{"axis": 0} if "axis" in more else {"dim": 1}),
                 lambda **more: ops.slice_scatter(x, x, **more), lambda **more: ops.unflatten(x, sizes=(2, 2), **{
                     next(iter(more)): 0})):
        assert np.isfinite(call(axis=1).array).all() and np.isfinite(call(dim=1).array).all()


def test_a_tensor_is_itself_in_dicts_and_lists_though_equality_is_by_elements() -> None:
    x, y = Tensor(np.ones(2)), Tensor(np.ones(2))
    assert {x: 1, y: 2}[x] == 1 and x in [x] and len({x, y}) == 2
    assert (x == y).array.all() and not (x != y).array.any() and (x == 1).array.all()
    assert (x == None) is False and (x != None) is True and x != "a"  # noqa: E711


def test_one_value_is_a_number_and_a_truth() -> None:
    one = Tensor(np.array([2.5]))
    assert (float(one), int(one), bool(one > 2), len(one), one.tolist()) == (2.5, 2, True, 1, [2.5])
    assert [10, 20, 30][Tensor(np.array(1))] == 20
    with pytest.raises(ShapeError, match="float64 stands where an integer is wanted"):
        [10, 20, 30][one]
    with pytest.raises(ShapeError, match="ambiguous"):
        bool(Tensor(np.ones(2)) == 1)


@pytest.mark.parametrize("name", ["add_", "mul_", "clamp_", "masked_fill_", "relu_", "zero_", "fill_", "normal_"])
def test_changing_a_tensor_in_place_is_refused_with_the_way_round(name: str) -> None:
    x = Tensor(np.ones(2))
    with no_grad(), pytest.raises(GraphError, match=rf"{name}: operations do not change tensors in place; x"):
        getattr(x, name)(1)
    assert np.array_equal(x.array, np.ones(2))


def test_every_method_with_an_underscore_is_refused() -> None:
    for name in (*operators.LATER.split(), *operators.PYTORCH_NAMES, "exp", "transpose"):
        with pytest.raises(GraphError, match=rf"x = x\.{name}\("):
            getattr(Tensor(np.ones(2)), f"{name}_")()


def test_all_of_pytorchs_methods_with_an_underscore_say_what_to_do() -> None:
    torch = pytest.importorskip("torch")
    names = [name for name in dir(torch.Tensor) if name.endswith("_") and not name.startswith("_")]
    says_nothing = []
    for name in set(names) - {"copy_", "requires_grad_"}:
        try:
            getattr(Tensor(np.ones((2, 2))), name)()
        except GraphError as error:
            if f"{name}: operations do not change tensors in place; x" not in str(error):
                says_nothing.append(name)
        except AttributeError as error:
            if f"; in place of PyTorch's {name}: " not in str(error):
                says_nothing.append(name)
        else:
            says_nothing.append(name)
    assert len(names) > 150 and not says_nothing


def test_round_and_factors_are_methods() -> None:
    x = Tensor(normal(4, 3))
    np.testing.assert_array_equal(round(x).array, np.rint(x.array))  # type: ignore[call-overload]
    np.testing.assert_allclose(round(x, 1).array, np.round(x.array, 1))  # type: ignore[call-overload]
    np.testing.assert_allclose((x.mT @ x).cholesky().array, np.linalg.cholesky(x.array.T @ x.array))
    np.testing.assert_allclose((x.qr().Q @ x.qr().R).array, x.array)


def test_parts_of_complex_numbers_are_attributes() -> None:
    z = Tensor(normal(3, 2) + 1j * normal(3, 2, seed=1), requires_grad=True)
    np.testing.assert_array_equal(z.mH.array, z.array.conj().T)
    np.testing.assert_array_equal(z.conj().array, z.array.conj())
    np.testing.assert_array_equal(z.real.array + 1j * z.imag.array, z.array)
    with pytest.raises(ShapeError, match="imag: the input is float64, expected complex numbers"):
        Tensor(normal(2)).imag  # noqa: B018


def test_names_without_a_counterpart_have_a_hint() -> None:
    x = Tensor(np.ones((2, 2)))
    for name in ("svd", "clamp_min", "clamp_max", "dist", "element_size", "H", "nbytes", "is_contiguous", "mode", "multinomial",
                 "pinverse", "stft", "lstsq", "histc", "take_along", "to_sparse", "data_ptr", "float_power"):
        with pytest.raises(AttributeError, match=f"; in place of PyTorch's {name}: "):
            getattr(x, name)
    for package, name in ((ops, "stft"), (ops, "take_along"), (optim, "SparseAdam"),
                          (nn, "AdaptiveLogSoftmaxWithLoss"), (nn, "CrossMapLRN2d")):
        with pytest.raises(AttributeError, match=f"; in place of PyTorch's {name}: "):
            getattr(package, name)


def test_what_overwrites_a_tensor_does_as_the_page_says() -> None:
    x = old = Tensor(np.ones(2), requires_grad=True)
    x += 1
    assert x is not old and old.array.tolist() == [1, 1]
    x.sum().backward()
    assert old.grad is not None and old.grad.tolist() == [1, 1]
    for change in (lambda: old.__setitem__(0, 1), lambda: old.copy_(x)):
        with pytest.raises(GraphError, match="compute a new one, or do it under no_grad"):
            change()
    x[0] = 7
    assert x.requires_grad and x.array.tolist() == [7, 2]
    with no_grad():
        old[0] = 5
    assert old.array.tolist() == [5, 1]
    with pytest.raises(ValueError, match="read-only"):
        old.data[0] = 1
    with pytest.raises(TypeError, match="out"):
        ops.add(x, x, out=old)  # type: ignore[call-arg]


def test_every_pytorch_name_is_of_an_operation() -> None:
    for name, ours in operators.PYTORCH_NAMES.items():
        assert getattr(ops, name) is getattr(ops, ours)


@pytest.mark.parametrize("call", [
    lambda x: ops.gather(x, 0, np.array([[5]])), lambda x: ops.roll(x, (1, 2), (0,)), lambda x: x.cumsum(3),
    lambda x: x.topk(9), lambda x: x.repeat(2), lambda x: ops.add(x, np.ones((5, 5))), lambda x: x.view(7),
    lambda x: ops.atan2(x, np.ones(5)), lambda x: x.flatten(1, 0), lambda x: x.unflatten(0, (2, 2)), lambda x: x.sum("a"),
    lambda x: ops.prod(x, dim=(0, 0)), lambda x: ops.where(x > 0, x, np.ones(7)), lambda x: x.to("cuda"),
    lambda x: x.select(0, 9),
    lambda x: x.narrow(0, 2, 5), lambda x: ops.one_hot(np.array([3]), 2), lambda x: x.index_add(0, np.array([0]), x),
    lambda x: ops.arange(0, 5, 0), lambda x: x.quantile(2.0), lambda x: ops.meshgrid(x), lambda x: x.tril(0).diagonal(0, 0, 0),
    lambda x: x.chunk(0), lambda x: ops.hstack([]), lambda x: x.movedim((0, 1), 0), lambda x: x.int() // 0,
    lambda x: x.masked_fill(x, 1.0), lambda x: ops.isclose(x, x, rtol=-1),
    lambda x: x.scatter_reduce(0, np.array([[0]]), x, "median"),
    lambda x: ops.bitwise_not(x), lambda x: ops.sort(x, dim=2), lambda x: ops.unique(x, dim=4)])
def test_a_mistake_is_one_line(call: Any) -> None:
    with pytest.raises(ShapeError) as caught:
        call(Tensor(normal(3, 4)))
    assert "\n" not in str(caught.value)


def test_numpys_functions_of_a_tensor_are_refused_with_what_to_write() -> None:
    x = Tensor(np.ones(2), requires_grad=True)
    for call, words in ((lambda: np.sin(x), r"ops\.sin\(x\), which has a gradient, or np\.sin\(x\.numpy\(\)\)"),
                        (lambda: np.spacing(x), r"write np\.spacing\(x\.numpy\(\)\)"),
                        (lambda: np.add.reduce(x), "np.add of a tensor"),
                        (lambda: np.add(np.ones(2), x, out=np.ones(2)), r"ops\.add\(x\)")):
        with pytest.raises(ArgumentError, match=words):
            call()


def test_arrays_and_numpys_numbers_ask_the_tensor() -> None:
    x, a = Tensor(np.array([2., 3.]), requires_grad=True), np.array([4., 7.])
    for made, expected in ((a + x, [6, 10]), (a // x, [2, 2]), (a ** x, [16, 343]), (np.float64(6) / x, [3, 2]), (a @ x, 29)):
        assert isinstance(made, Tensor) and made.requires_grad and np.array_equal(made.numpy(), expected)
    assert np.array_equal((a > x).numpy(), [True, True]) and np.array_equal((a == x).numpy(), [False, False])
    a += x
    assert isinstance(a, Tensor) and a.numpy().tolist() == [6, 10]


def test_round_and_divmod_are_the_operations() -> None:
    x = Tensor(np.array([2.567, -3.5]))
    assert round(x).numpy().tolist() == [3, -4] and round(x, 1).numpy().tolist() == [2.6, -3.5]
    quotient, rest = divmod(x, 2)
    assert np.array_equal(quotient.numpy(), [1, -2]) and np.allclose(rest.numpy(), [0.567, 0.5])
    assert [part.item() for part in divmod(7, Tensor(2.0))] == [3, 1]


def test_where_of_a_condition_alone_gives_places_as_pytorch() -> None:
    torch = pytest.importorskip("torch")
    x = np.array([[0, 3, 0], [4, 0, 5]])
    for ours, theirs in zip(ops.where(Tensor(x > 0)), torch.where(torch.tensor(x > 0))):
        assert ours.dtype == "int64" and np.array_equal(ours.numpy(), theirs.numpy())
    with pytest.raises(ArgumentError, match="one of two choices is missing"):
        ops.where(x > 0, x)  # type: ignore[call-overload]


def test_one_tensor_is_no_list_of_them() -> None:
    for op in (ops.cat, ops.stack):
        with pytest.raises(ShapeError, match=r"expected a list of tensors, found one of shape \(2, 3\)"):
            op(Tensor(np.ones((2, 3))))


def test_a_mask_times_a_number_beside_float64_says_what_to_write() -> None:
    x, mask = Tensor(np.ones(2)), Tensor(np.array([True, False]))
    with pytest.raises(ShapeError, match=r'convert one of them first, as in x\.to\("float64"\);.*mask\.to\("float64"\) \* 1e3'):
        x + mask * 1e3
    assert (x + mask.to("float64") * 1e3).numpy().tolist() == [1001, 1]
