"""docs/from_pytorch.md: what is typed in PyTorch and is not here says so in one line, and what is to be written instead works."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ops.parity import check_gradient, normal

import mpitrain
from mpitrain import Tensor, autograd, nn, ops
from mpitrain.errors import ArgumentError, GraphError, MpitrainError, ShapeError
from mpitrain.ops import pytorch
from mpitrain.ops.inputs import door
from mpitrain.ops.pytorch import each

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.13.0")
pytest.importorskip("torch.overrides")

PAGE = Path(__file__).parents[2] / "docs" / "from_pytorch.md"
ROWS = re.findall(r"^\| `(.+?)` \| `(.+?)` \|$", PAGE.read_text(), re.MULTILINE)


def names() -> dict[str, Any]:
    net = nn.Linear(3, 2)
    net.initialize()
    return {"np": np, "mpitrain": mpitrain, "ops": ops, "nn": nn, "optim": mpitrain.optim, "Tensor": Tensor, "autograd": autograd,
            "net": net,
            "x": Tensor(normal(4, 3).astype(np.float32), requires_grad=True), "labels": Tensor(np.array([0, 2, 1, 1])),
            "images": Tensor(normal(1, 2, 5, 5))}


@pytest.mark.parametrize(("theirs", "ours"), ROWS, ids=[row[0] for row in ROWS])
def test_the_left_line_says_what_to_write_and_the_right_one_works(theirs: str, ours: str) -> None:
    with pytest.raises((MpitrainError, AttributeError)) as caught:
        eval(theirs, names())
    text = str(caught.value)
    assert "\n" not in text and any(mark in text for mark in (";", ":")) and "'NoneType'" not in text
    eval(ours, names())


def test_every_hint_names_what_is_there() -> None:
    hints = [hint for table in (pytorch.ARGUMENTS, pytorch.OPERATIONS, pytorch.OPS, pytorch.TENSOR, pytorch.MODULE, pytorch.NN,
                               pytorch.OPTIM)
             for hint in table.values()]
    named = {found for hint in hints for found in re.findall(r"\b(ops|nn|autograd|mpitrain|optim)\.([a-zA-Z]\w*)", hint)} - {
        ("ops", "NAME"), ("mpitrain", "ops"), ("nn", "functional")}
    assert len(ROWS) > 35 and len(named) > 15
    assert not [f"{owner}.{name}" for owner, name in named if not hasattr(names()[owner], name)]
    assert not [name for name in pytorch.OPS if hasattr(ops, name)] and not [n for n in pytorch.TENSOR if hasattr(Tensor, n)]
    assert not [name for name in pytorch.MODULE if hasattr(nn.Module, name)]


def test_unknown_names_stay_attribute_errors_and_objects_are_copied() -> None:
    x, net = Tensor([1.0]), nn.Linear(2, 1)
    assert not hasattr(x, "nonsense") and not hasattr(net, "nonsense") and not hasattr(net.weight, "nonsense")
    with pytest.raises(AttributeError, match=r"^Linear has no attribute 'nonsense'$"):
        net.nonsense  # noqa: B018
    with pytest.raises(AttributeError, match="in place of PyTorch's cpu"):
        net.weight.cpu  # noqa: B018
    with pytest.raises(AttributeError, match=r"it is mpitrain\.ops\.cdist"):
        x.cdist  # noqa: B018
    assert copy.copy(x).array is x.array and copy.deepcopy(x).item() == pickle.loads(pickle.dumps(x.size)) == 1

    class Broken(nn.Module):
        @property
        def wide(self) -> Any:
            return self.narrow.width

    with pytest.raises(AttributeError, match="narrow"):
        Broken().wide  # noqa: B018


def test_a_type_error_inside_an_operation_is_not_taken_for_a_wrong_call() -> None:
    def broken() -> None:
        raise TypeError("broken() got an unexpected keyword argument 'dtype'")

    for call in (lambda: door(lambda x, dim=None: broken())(1, dim=0), lambda: door(lambda x: float([x]))(1)):
        with pytest.raises(TypeError) as caught:
            call()
        assert not isinstance(caught.value, ArgumentError)
    with pytest.raises(ArgumentError, match=r"^sum: .*'dims'.*\(x, dim, keepdim\)$"):
        Tensor([1.0]).sum(dims=0)


def test_results_have_pytorchs_names() -> None:
    a = normal(3, 3)
    a = a + a.T
    x, t = Tensor(a), torch.tensor(a)
    for name, args in {"max": (1,), "min": (1,), "sort": (), "topk": (2,), "kthvalue": (2,), "median": (1,), "nanmedian": (1,),
                       "cummax": (0,), "cummin": (0,)}.items():
        ours, theirs = getattr(x, name)(*args), getattr(t, name)(*args)
        np.testing.assert_array_equal(ours.values.array, theirs.values, name)
        np.testing.assert_array_equal(ours.indices.array, theirs.indices, name)
    np.testing.assert_allclose(ops.eigh(x).eigenvalues.array, torch.linalg.eigh(t).eigenvalues)
    np.testing.assert_allclose(ops.svd(x).S.array, torch.linalg.svd(t).S)
    np.testing.assert_allclose((ops.qr(x).Q @ ops.qr(x).R).array, a)
    assert ops.slogdet(x).sign.item() == float(torch.linalg.slogdet(t).sign)
    assert ops.aminmax(x).max.item() == a.max() and ops.aminmax(x).min.item() == a.min()


def test_values_are_formatted_as_numbers() -> None:
    assert f"{Tensor([2.5]).sum():.3f}" == "2.500" and f"{Tensor(np.array(7)):d}" == "7"
    assert f"{Tensor([1.0, 2.0])}".startswith("Tensor")
    with pytest.raises(ShapeError, match="expected one value"):
        format(Tensor([1.0, 2.0]), ".3f")


def test_requires_grad_makes_leaves_and_freezes_modules() -> None:
    x = Tensor([1.0, 2.0]).requires_grad_()
    (x * x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2, 4] and not x.requires_grad_(False).requires_grad
    with pytest.raises(GraphError, match="no leaf"):
        (Tensor([1.0]).requires_grad_() * 2).requires_grad_(False)
    with pytest.raises(ShapeError, match="int64"):
        Tensor(np.array([1])).requires_grad_()

    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    net.initialize()
    before = {name: values.copy() for name, values in net.state_dict().items()}
    body, head = (m for m in net.modules() if isinstance(m, nn.Linear))
    assert body.requires_grad_(False) is body
    optimizer = mpitrain.optim.SGD(net, lr=0.1)
    net(normal(5, 3).astype(np.float32)).sum().backward()
    optimizer.step()
    net.zero_grad()
    assert all(p.grad is None for p in net.parameters()) and body.weight.requires_grad is False
    after = net.state_dict()
    changed = {name for name in before if (before[name] != after[name]).any()}
    assert changed == {name for name, p in net.named_parameters() if any(p is q for q in head.parameters())}


def test_modules_are_walked_as_pytorchs_are() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 1)))
    seen: list[nn.Module] = []
    assert net.apply(seen.append) is net and seen[-1] is net and len(seen) == 5
    assert [type(m).__name__ for m in seen] == ["Linear", "ReLU", "Linear", "Sequential", "Sequential"]
    assert list(net.children()) == [m for _, m in net.named_children()] and len(list(net.children())) == 2
    assert list(net.modules())[0] is net and len(list(net.modules())) == 5
    with pytest.raises(GraphError, match=r"a parameter of shape \(4, 3\) has no memory yet; call initialize"):
        net(normal(2, 3))


def test_var_takes_nothing_but_dims_by_place() -> None:
    """In PyTorch x.var(1, False) is not the unbiased one; read as keepdim it would be wrong and say nothing."""
    for call in (lambda x: x.var(1, False), lambda x: ops.std(x, 1, False), lambda x: x.var(False)):
        with pytest.raises(ShapeError, match="var|std"):
            call(Tensor(normal(2, 3)))


def test_renamed_arguments_have_gradients() -> None:
    check_gradient(lambda x: ops.roll(x, 1, dims=1) * ops.flip(x, dims=[0]), normal(2, 3))


# ---- Names of arguments -----------------------------------------------------------------------------------------------

# PyTorch's arguments that an op of the same name has not, and why.
NOT_HERE = {                                      # refused by a line; old; inner; not the documented name
    "out", "layout", "device", "requires_grad", "inplace", "dtype", "out_dtype", "sparse_grad", "train",
    "size_average", "reduce", "_stacklevel", "some", "compute_uv", "names", "other", "te", "ang"}
REASONS = {
    **each("batch_norm gru lstm gru_cell lstm_cell", "another function: the layers of nn have these arguments"),
    **each("binary_cross_entropy_with_logits cross_entropy", "the sum that a run trains on; nn and nll_loss have weights"),
    **each("layer_norm rms_norm", "the weight has the shape; refused by a line"),
    **each("rrelu scaled_dot_product_attention", "random numbers have a layer's name; refused by a line"),
    **each("bmm mv outer pow heaviside cholesky_solve", "the second operand, by place"),
    **each("huber_loss l1_loss mse_loss", "a weight of each element is a product"),
    **each("broadcast_to diag_embed index_reduce isin meshgrid msort permute searchsorted swapdims topk transpose",
           "PyTorch's documentation has our name, or takes them by place"),
    **each("div divide", "rounding_mode: ops.floor_divide and ops.trunc_divide"),
    "embedding": "rows of padding are nn.Embedding's; gradients are dense",
    "unfold": "Tensor.unfold; nn.functional.unfold is im2col",
}


def test_arguments_have_pytorchs_names() -> None:
    functions: dict[str, list[list[str]]] = {}
    for function, stand_in in torch.overrides.get_testing_overrides().items():
        name = getattr(function, "__name__", "")
        if any(getattr(home, name, None) is function
               for home in (torch, torch.nn.functional, torch.linalg, torch.special, torch.fft)):
            functions.setdefault(name, []).append(list(inspect.signature(stand_in).parameters)[1:])
    differ = {}
    for name in dir(ops):
        if name in functions and callable(getattr(ops, name)):
            ours = inspect.signature(getattr(ops, name)).parameters
            missing = min(([a for a in theirs if a not in ours and a not in NOT_HERE] for theirs in functions[name]), key=len)
            if missing:
                differ[name] = missing
    assert len(functions) > 300 and {name: why for name, why in differ.items() if name not in REASONS} == {}
    assert not [name for name in REASONS if name not in differ]
