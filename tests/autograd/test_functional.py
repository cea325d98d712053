"""vjp, jvp, hvp, jacobian and hessian are those of torch.autograd.functional."""

import numpy as np
import pytest

from mpitrain import Tensor, autograd, ops
from mpitrain.errors import GraphError, ShapeError

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.13.0")
theirs = pytest.importorskip("torch.autograd.functional")

X, W = np.random.default_rng(1).normal(size=(3, 2)), np.random.default_rng(2).normal(size=(2, 4))


def net(x, w):
    return ops.gelu(x @ w)


def torch_net(x, w):
    return torch.nn.functional.gelu(x @ w)


def scalar(x, w):
    return (net(x, w) ** 2.0).sum()


def torch_scalar(x, w):
    return (torch_net(x, w) ** 2.0).sum()


ALONG = X * 2, W - 1
CALLS = {"vjp": (net, torch_net, np.ones((3, 4))), "jvp": (net, torch_net, ALONG), "hvp": (scalar, torch_scalar, ALONG),
         "jacobian": (net, torch_net), "hessian": (scalar, torch_scalar)}


def flat(found):
    if isinstance(found, tuple):
        return [array for part in found for array in flat(part)]
    return [found.detach().numpy() if isinstance(found, torch.Tensor) else found.array]


def tensors(of, given):
    return tuple(of(g) for g in given) if isinstance(given, tuple) else of(given)


@pytest.mark.parametrize("name", CALLS)
def test_each_is_pytorch_s(name):
    ours, torchs, *v = CALLS[name]
    x = Tensor(X, requires_grad=True)
    found = flat(getattr(autograd, name)(ours, (x, Tensor(W)), *(tensors(Tensor, g) for g in v)))
    wanted = flat(getattr(theirs, name)(torchs, (torch.tensor(X), torch.tensor(W)), *(tensors(torch.tensor, g) for g in v)))
    assert len(found) == len(wanted) and x.grad is None
    for a, b in zip(found, wanted):
        assert a.shape == b.shape and np.abs(a - b).max() < 1e-12


@pytest.mark.parametrize("name", CALLS)
def test_each_can_be_differentiated_again(name):
    ours, torchs, *v = CALLS[name]
    x, t = Tensor(X, requires_grad=True), torch.tensor(X, requires_grad=True)
    found = getattr(autograd, name)(ours, (x, Tensor(W)), *(tensors(Tensor, g) for g in v), create_graph=True)
    wanted = getattr(theirs, name)(torchs, (t, torch.tensor(W)), *(tensors(torch.tensor, g) for g in v), create_graph=True)
    first(found).sum().backward()
    first(wanted).sum().backward()
    assert np.abs(x.grad - t.grad.numpy()).max() < 1e-11


def first(found):
    """Of (value, product), the product; of a tuple for inputs, that of the first."""
    found = found[-1] if isinstance(found, tuple) and not isinstance(found[0], tuple) and len(found) == 2 else found
    while isinstance(found, tuple):
        found = found[0]
    return found


def test_one_input_gives_one_tensor_and_what_does_not_fit_is_refused():
    assert autograd.jacobian(ops.exp, Tensor(X)).shape == (3, 2, 3, 2)
    assert autograd.hessian(lambda x: x.sum(), Tensor(X)).array.any() == False  # noqa: E712
    with pytest.raises(ShapeError, match="hvp: the function gave"):
        autograd.hvp(ops.exp, Tensor(X), Tensor(X))
    with pytest.raises(ShapeError, match="jvp: v has the shapes"):
        autograd.jvp(ops.exp, Tensor(X), Tensor(W))
    with pytest.raises(GraphError, match="an input is ndarray"):
        autograd.vjp(ops.exp, X)
