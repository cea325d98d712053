"""Layers beyond the common ones: against PyTorch where PyTorch's own samples do not come by, and by what they promise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain import nn, optim
from mpitrain.autograd import Tensor
from mpitrain.backend import random
from mpitrain.errors import ConfigError, MpitrainError, ShapeError

torch = pytest.importorskip("torch")
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-11}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def compare(ours: nn.Module, theirs: Any, *inputs: np.ndarray, rename: dict[str, str] | None = None, steps: int = 1) -> None:
    """Outputs and all gradients in training, PyTorch's values in our layer; buffers after so many steps; then eval."""
    names = rename or {}
    ours.initialize(dtype="float64")
    theirs.double()
    state = {names.get(name, name): value.detach().numpy() for name, value in theirs.state_dict().items()}
    ours.load_state_dict({name: value for name, value in state.items() if name in ours.state_dict()})
    for _ in range(steps):
        mine, other = ([kind(x, requires_grad=True) if x.dtype.kind == "f" else (x if kind is Tensor else torch.tensor(x))
                        for x in inputs] for kind in (Tensor, torch.tensor))
        y, expected = ours(*mine), theirs(*other)
        np.testing.assert_allclose(y.array, expected.detach().numpy(), **CLOSE)
        for p in ours.parameters():
            p.grad = None
        theirs.zero_grad()
        y.backward(normal(*y.shape, seed=1))
        expected.backward(torch.tensor(normal(*y.shape, seed=1)))
    for a, b in zip(mine, other):
        if isinstance(a, Tensor):
            np.testing.assert_allclose(a.grad, b.grad.numpy(), **CLOSE)
    own = dict(ours.named_parameters())
    for name, p in theirs.named_parameters():
        np.testing.assert_allclose(own[names.get(name, name)].grad, p.grad.numpy(), err_msg=name, **CLOSE)
    np.testing.assert_allclose(ours.eval()(*inputs).array, theirs.eval()(*map(torch.tensor, inputs)).detach().numpy(), **CLOSE)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [1, "same"])
def test_convolutions_pad_with_what_the_mode_says(mode: str, padding: Any) -> None:
    compare(nn.Conv2d(2, 3, (3, 4), padding=padding, dilation=(2, 1), padding_mode=mode),
            torch.nn.Conv2d(2, 3, (3, 4), padding=padding, dilation=(2, 1), padding_mode=mode), normal(2, 2, 6, 7))
    compare(nn.Conv1d(2, 3, 3, padding=padding, padding_mode=mode),
            torch.nn.Conv1d(2, 3, 3, padding=padding, padding_mode=mode), normal(2, 2, 7))


def test_weight_norm_is_pytorchs_and_starts_as_the_layer_without_it() -> None:
    names = {"weight_g": "weight_g", "weight_v": "weight_v", "bias": "layer.bias"}
    for dim in (0, 1, None):
        with pytest.warns(FutureWarning):
            theirs = torch.nn.utils.weight_norm(torch.nn.Conv2d(3, 4, 2), dim=dim)
        if dim is None:
            theirs.weight_g.data = theirs.weight_g.data.reshape(1, 1, 1, 1)
        compare(nn.weight_norm(nn.Conv2d(3, 4, 2), dim=dim), theirs, normal(2, 3, 5, 5), rename=names)
    layer, plain = nn.Sequential(nn.weight_norm(nn.Linear(6, 4))), nn.Sequential(nn.Linear(6, 4))
    layer.initialize(seed=3, dtype="float64")
    plain.initialize(seed=3, dtype="float64")
    v, g = (dict(layer.named_parameters())[f"0.weight_{which}"].array for which in "vg")
    np.testing.assert_allclose(g, np.linalg.norm(v, axis=1, keepdims=True), rtol=1e-14)


def test_spectral_norm_follows_the_largest_singular_value_as_pytorch_does_step_by_step() -> None:
    place = "parametrizations.weight."
    names = {place + "original": "original", place + "0._u": "u", place + "0._v": "v", "bias": "layer.bias"}
    compare(nn.spectral_norm(nn.Linear(6, 4)), torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(6, 4)),
            normal(3, 6), rename=names, steps=3)
    compare(nn.spectral_norm(nn.ConvTranspose2d(3, 4, 2), iterations=2),
            torch.nn.utils.parametrizations.spectral_norm(torch.nn.ConvTranspose2d(3, 4, 2), n_power_iterations=2),
            normal(2, 3, 4, 4), rename=names, steps=2)
    layer = nn.Sequential(nn.spectral_norm(nn.Linear(30, 20, bias=False)))
    layer.initialize(seed=1, dtype="float64")
    made = layer.eval()(np.eye(30)).array
    assert abs(np.linalg.norm(made, 2) - 1) < 0.02        # near from the start: 15 iterations of the power method


def test_a_stack_of_layers_with_norms_inside_has_them_in_each_of_its_own() -> None:
    layer = nn.TransformerEncoderLayer(6, 2, 10, dropout=0.0)
    layer.linear1, layer.linear2 = nn.weight_norm(layer.linear1), nn.spectral_norm(layer.linear2)
    ours = nn.TransformerEncoder(layer, 2)
    theirs = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(6, 2, 10, 0.0, batch_first=True), 2,
                                         enable_nested_tensor=False)
    for each in theirs.layers:
        with pytest.warns(FutureWarning):
            torch.nn.utils.weight_norm(each.linear1)
        torch.nn.utils.parametrizations.spectral_norm(each.linear2)
        for p in each.parameters():
            torch.nn.init.uniform_(p, -0.5, 0.5)
    short = {"in_proj_weight": "qkv.weight", "in_proj_bias": "qkv.bias", "out_proj": "out", "linear1.bias": "linear1.layer.bias",
             "linear2.bias": "linear2.layer.bias", "parametrizations.weight.original": "original",
             "parametrizations.weight.0._": ""}
    names = {name: name for name in theirs.state_dict()}
    for found, wanted in short.items():
        names = {name: mine.replace(found, wanted) for name, mine in names.items()}
    compare(ours, theirs, normal(2, 4, 6), rename=names, steps=2)
    ours.initialize(seed=2, dtype="float64")
    for first in ours.layers:
        v, g = first.linear1.weight_v.array, first.linear1.weight_g.array
        np.testing.assert_allclose(g, np.linalg.norm(v, axis=1, keepdims=True), rtol=1e-14)
    assert not np.array_equal(ours.layers[0].linear2.u.array, ours.layers[1].linear2.u.array)


def test_a_padding_row_starts_as_zeros_and_gets_no_gradient() -> None:
    indices = np.array([[0, 3, 1], [3, 3, 2]])
    compare(nn.Embedding(5, 4, padding_idx=3), torch.nn.Embedding(5, 4, padding_idx=3), indices)
    whole = nn.Embedding(1000, 70, padding_idx=999)
    whole.initialize(seed=1)
    plain = nn.Embedding(1000, 70)
    plain.initialize(seed=1)
    assert not whole.weight.array[999].any() and np.array_equal(whole.weight.array[:999], plain.weight.array[:999])


@pytest.mark.parametrize("norm_type", [2.0, 1.0])
def test_rows_longer_than_max_norm_come_out_scaled_as_in_pytorch(norm_type: float) -> None:
    compare(nn.Embedding(5, 4, max_norm=1.5, norm_type=norm_type), torch.nn.Embedding(5, 4, max_norm=1.5, norm_type=norm_type),
            np.array([[0, 3, 1], [3, 3, 2]]))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, np.inf])
def test_stored_rows_longer_than_max_norm_are_scaled_in_steps_of_an_optimizer_as_in_pytorch(norm_type: float) -> None:
    ours, theirs = (library.Embedding(6, 4, max_norm=0.7, norm_type=norm_type) for library in (nn, torch.nn))
    ours.initialize(dtype="float64")
    theirs.double()
    with torch.no_grad():
        theirs.weight.copy_(torch.tensor(ours.weight.array))
    mine, other = optim.SGD(ours, lr=0.3), torch.optim.SGD(theirs.parameters(), lr=0.3)
    for step in range(3):
        indices = np.array([[0, 3, 1], [3, 3, step]])
        for model, optimizer, x in ((ours, mine, indices), (theirs, other, torch.tensor(indices))):
            optimizer.zero_grad()
            (model(x) ** 3.0).sum().backward()
            optimizer.step()
    np.testing.assert_allclose(ours.weight.array, theirs.weight.detach().numpy(), **CLOSE)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2])
def test_bags_are_pytorchs_with_offsets_empty_bags_and_padding(mode: str, padding: int | None) -> None:
    def pair() -> tuple[nn.Module, Any]:
        return (nn.EmbeddingBag(6, 3, mode, padding_idx=padding),
                torch.nn.EmbeddingBag(6, 3, mode=mode, padding_idx=padding))
    compare(*pair(), np.array([[0, 2, 5], [2, 2, 2], [1, 1, 4]]))
    compare(*pair(), np.array([0, 2, 5, 2, 1, 4, 3]), np.array([0, 3, 3, 4]))
    if mode == "sum":
        weights = normal(7)
        ours, theirs = pair()
        ours.initialize(dtype="float64")
        theirs.double().weight.data = torch.tensor(ours.state_dict()["weight"].copy())
        found = ours(np.array([0, 2, 5, 2, 1, 4, 3]), np.array([0, 3, 7]), weights)
        wanted = theirs(torch.tensor([0, 2, 5, 2, 1, 4, 3]), torch.tensor([0, 3, 7]), torch.tensor(weights))
        np.testing.assert_allclose(found.array, wanted.detach().numpy(), **CLOSE)


def test_means_over_all_steps_where_momentum_is_none() -> None:
    compare(nn.BatchNorm1d(4, momentum=None), torch.nn.BatchNorm1d(4, momentum=None), normal(6, 4), steps=3)
    layer = nn.BatchNorm1d(4, momentum=None)
    layer.initialize(dtype="float64")
    batches = [normal(6, 4, seed=i) for i in range(3)]
    for x in batches:
        layer(x)
    np.testing.assert_allclose(layer.running_mean.array, np.mean([x.mean(axis=0) for x in batches], axis=0), rtol=1e-12)


def test_shuffles_are_pytorchs() -> None:
    x = normal(2, 8, 4, 6)
    for ours, theirs in ((nn.PixelShuffle(2), torch.nn.PixelShuffle(2)), (nn.PixelUnshuffle(2), torch.nn.PixelUnshuffle(2)),
                         (nn.ChannelShuffle(4), torch.nn.ChannelShuffle(4)),
                         (nn.Unflatten(1, (2, -1)), torch.nn.Unflatten(1, (2, 4))),
                         (nn.Flatten(start=2), torch.nn.Flatten(2)), (nn.Unfold(2, 1, 1, 2), torch.nn.Unfold(2, 1, 1, 2)),
                         (nn.Upsample(scale_factor=2), torch.nn.Upsample(scale_factor=2))):
        assert np.array_equal(ours(Tensor(x)).array, theirs(torch.tensor(x)).numpy())


@pytest.mark.parametrize(("layer", "shape"), [
    (nn.Dropout1d(0.4), (500, 7, 3)), (nn.Dropout2d(0.4), (500, 7, 2, 3)), (nn.Dropout3d(0.4), (500, 7, 2, 1, 3)),
    (nn.DropPath(0.4), (3500, 2, 3)), (nn.AlphaDropout(0.4), (700, 9)), (nn.FeatureAlphaDropout(0.4), (500, 7, 4))])
def test_masks_belong_to_samples_and_keep_what_they_promise(layer: Any, shape: tuple[int, ...]) -> None:
    x = np.ones(shape)
    layer.path = "layer"
    with random.use(random.Scope(seed=1, samples=np.arange(shape[0]))):
        y = layer(x).array
    with random.use(random.Scope(seed=1, samples=np.arange(100, shape[0]))):
        assert np.array_equal(layer(x[100:]).array, y[100:])
    kept = layer.kept or len(shape)
    flat = y.reshape(*shape[:kept], -1)
    assert (flat == flat[..., :1]).all() and len(np.unique(y)) == 2
    assert abs((y == y.min()).mean() - 0.4) < 0.04
    if isinstance(layer, nn.AlphaDropout):
        noise = normal(4000, 8, seed=2) if layer.kept is None else normal(4000, 8, 1, seed=2)
        z = layer(noise).array
        assert abs(z.mean()) < 0.03 and abs(z.std() - 1) < 0.03
    else:
        assert set(np.unique(y)) == {0.0, 1 / 0.6}
    assert layer.eval()(x) is x


def test_squeeze_and_excitation_gates_channels_by_their_means() -> None:
    layer = nn.SqueezeExcitation(4, 2)
    layer.initialize(seed=1, dtype="float64")
    x, state = normal(3, 4, 2, 5), layer.state_dict()
    hidden = np.maximum(x.mean(axis=(2, 3)) @ state["squeeze.weight"].T + state["squeeze.bias"], 0)
    gates = 1 / (1 + np.exp(-(hidden @ state["expand.weight"].T + state["expand.bias"])))
    np.testing.assert_allclose(layer(x).array, x * gates[:, :, None, None], **CLOSE)


def test_containers_name_their_parts_and_take_what_lists_and_dicts_take() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            self.steps = nn.ModuleList([nn.Linear(2, 3), nn.ReLU()]).append(nn.Linear(3, 4))
            self.heads = nn.ModuleDict({"a": nn.Linear(4, 1)})
            self.scales = nn.ParameterList([nn.Parameter((2,), nn.init.ones)])
    net = Net()
    net.heads["b"] = nn.Linear(4, 2)
    net.steps.insert(1, nn.Identity())
    assert [name for name, _ in net.named_parameters()] == [
        "steps.0.weight", "steps.0.bias", "steps.3.weight", "steps.3.bias", "heads.a.weight", "heads.a.bias", "heads.b.weight",
        "heads.b.bias", "scales.0"]
    assert len(net.steps) == 4 and isinstance(net.steps[-1], nn.Linear)
    assert len(net.steps[1:3]) == 2 and list(net.heads) == ["a", "b"]
    net.heads.pop("a")
    net.initialize()
    net.eval()
    assert "a" not in net.heads and not net.steps[0].training and net.scales[0].array.tolist() == [1, 1]


@pytest.mark.parametrize(("wrong", "says", "error"), [
    (lambda: nn.ModuleList([3]), "a part is int, expected Module", ShapeError),
    (lambda: nn.ModuleList()[0], "no part 0 among 0", ShapeError),
    (lambda: nn.ModuleDict()["a"], 'no part "a"', ShapeError),
    (lambda: nn.ModuleDict({"a.b": nn.ReLU()}), "without dots", ShapeError),
    (lambda: nn.PixelShuffle(2)(normal(2, 3, 4, 4)), "a multiple of r", ShapeError),
    (lambda: nn.PixelUnshuffle(2)(normal(2, 3, 3, 4)), "multiples of r", ShapeError),
    (lambda: nn.ChannelShuffle(2)(normal(2, 3, 4)), "a multiple of them", ShapeError),
    (lambda: nn.Unflatten(1, (2, 2))(normal(2, 3)), "cannot be cut", ShapeError),
    (lambda: nn.Flatten(start=1, end=4)(normal(2, 3)), "no dims 1 to 4", ShapeError),
    (lambda: nn.InstanceNorm2d(3)(normal(2, 4, 3, 3)), "with 3 channels", ShapeError),
    (lambda: nn.InstanceNorm1d(3)(normal(2, 3, 1)), "2 or more", ShapeError),
    (lambda: nn.Dropout2d(1.0), r"lies in \[0, 1\)", ShapeError),
    (lambda: nn.Dropout2d()(normal(2, 3)), "expects 4 dims", ShapeError),
    (lambda: nn.DropPath()(normal()), "1 dims or more", ShapeError),
    (lambda: nn.Embedding(3, 2, padding_idx=3), "one of 3 rows", ShapeError),
    (lambda: nn.EmbeddingBag(3, 2, "min"), "mode", ConfigError),
    (lambda: nn.Conv2d(1, 1, 3, padding_mode="mirror"), "padding_mode", ConfigError),
    (lambda: nn.ZeroPad2d((1, 2, 3)), "or 4 of them", ShapeError),
    (lambda: nn.ZeroPad2d(1)(normal(3, 3)), "or that without N", ShapeError),
    (lambda: nn.weight_norm(nn.ReLU()), "no parameter", ConfigError),
    (lambda: nn.spectral_norm(nn.Linear(2, 2), dim=3), "dim 3", ShapeError),
    (lambda: nn.PairwiseDistance(0), "another number", ShapeError)])
def test_what_does_not_fit_is_refused_in_one_line(wrong: Any, says: str, error: type[MpitrainError]) -> None:
    with pytest.raises(error, match=says) as caught:
        wrong()
    assert "\n" not in str(caught.value)
