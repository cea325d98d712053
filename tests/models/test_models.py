"""Models: sizes that the literature states, values against PyTorch, cutting into stages, and clear errors on wrong input."""

import importlib
import inspect
import json
import math
import re

import numpy as np
import pytest
from published import PUBLISHED

from mpitrain import nn, ops
from mpitrain.autograd import no_grad
from mpitrain.errors import ConfigError, DataError, ShapeError
from mpitrain.models import MODELS, gpt, lenet, mlp, resnet18, resnet20, resnet32, resnet34, resnet50, resnet56
from mpitrain.models.residual import Residual
from mpitrain.optim import SGD, AdamW, squared_norm

TINY = {"layers": 2, "heads": 2, "width": 8, "block": 6, "vocabulary": 11}
SMALL = {
    "mlp": ({"inputs": 12, "hidden": [8, 8], "outputs": 3}, (4, 2, 6), 3),
    "lenet": ({"size": 12, "channels": 2}, (4, 2, 12, 12), 10),
    "resnet20": ({"classes": 5}, (2, 3, 8, 8), 5),
    "resnet32": ({"channels": 1}, (2, 1, 8, 8), 10),
    "resnet56": ({"norm": "sync"}, (2, 3, 8, 8), 10),
    "resnet18": ({"classes": 4}, (4, 3, 48, 48), 4),
    "resnet34": ({"classes": 4}, (4, 3, 48, 48), 4),
    "resnet50": ({"classes": 4}, (4, 3, 48, 48), 4),
}
# Models that other files test, and their sizes; what a size is at least, where that is not 1.
OTHERS = {
    "lstm": {"inputs": 2, "hidden": 3, "outputs": 2}, "gru": {"inputs": 2, "hidden": 3, "outputs": 2},
    "tcn": {"inputs": 2, "channels": [3, 3], "outputs": 2}, "fcn": {"inputs": 2, "outputs": 2, "channels": [2, 3, 2]},
    "inception_time": {"inputs": 2, "outputs": 2, "filters": 2}, "deepfm": {"categories": [3, 2], "width": 2, "hidden": [3]},
    "ft_transformer": {"numeric": 2, "outputs": 2, "width": 8}, "graphsage": {"inputs": 2, "outputs": 2, "hidden": [3, 3]},
    "autoencoder": {"size": 8, "widths": [4], "code": 3}, "vae": {"size": 8, "widths": [4], "code": 3},
    "fno": {"width": 2, "modes": [2, 2], "hidden": 3}, "unet": {"width": 2, "levels": 2},
    "vit": {"width": 8, "layers": 1, "heads": 2, "patch": 4, "size": 8}, "swin": {"width": 4, "depths": [1, 1], "heads": [2, 2]},
    "elastic_gpt": {"depths": [1], "heads": [2], "hidden": [8], "width": 8, "block": 4, "vocabulary": 5},
    "elastic_mlp": {"inputs": 2, "outputs": 2},
    "swin_t": {"channels": 1}, **{f"vit_{size}_16": {"channels": 1} for size in ("ti", "s", "b")},
}
LEAST = {("gpt", "experts"): 0, ("inception_time", "bottleneck"): 0, ("inception_time", "kernel"): 4,
         ("ft_transformer", "numeric"): 0, ("fno", "padding"): 0}


def batch(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tokens(*shape, vocabulary=11):
    return np.random.default_rng(0).integers(0, vocabulary, shape)


def sizes_of(name):
    """The model's arguments that are an integer, or a list of integers."""
    kinds = {"int": False, "Sequence[int]": True}
    return [(key, kinds[p.annotation]) for key, p in inspect.signature(MODELS[name]).parameters.items() if p.annotation in kinds]


def arguments(name):
    """Those that a model needs, or that make it small."""
    known = {"gpt": TINY, **OTHERS, **{small: settings for small, (settings, _, _) in SMALL.items()}}
    return known.get(name) or next((p.arguments for key, p in PUBLISHED.items() if key.partition(":")[0] == name), {})


@pytest.mark.parametrize(("name", "key", "is_list"), [(name, *size) for name in MODELS for size in sizes_of(name)])
def test_every_size_is_an_integer_of_at_least_one(name, key, is_list):
    least, settings = LEAST.get((name, key), 1), arguments(name)
    for value in (least - 1, -3, 1.5, True, "abc"):
        for wrong in ([8, value], value) if is_list else (value,):
            with pytest.raises(ConfigError) as caught:
                MODELS[name](**settings | {key: wrong})
            what = r"a list of (\d+ )?integers" if is_list else "an integer"
            assert re.fullmatch(rf"model\.{key} must be {what} of at least {least}, found {re.escape(json.dumps(wrong))}; "
                                rf"change model\.{key}", caught.value.message)


def test_each_expert_of_gpt_has_the_sizes_of_the_mlp_it_stands_for():
    plain, mixed = (dict(gpt(**TINY, bias=True, experts=n).named_parameters()) for n in (0, 3))
    for layer in ("wide", "narrow"):
        assert mixed[f"block1.mixture.{layer}"].shape == (3, *plain[f"block1.{layer}.weight"].shape)


def test_a_model_may_have_no_hidden_layer():
    assert mlp(4, [], 2).count_parameters() == 10


def test_the_sizes_are_those_that_the_literature_states():
    assert lenet().count_parameters() == 61_706                      # LeNet-5 on padded 28 x 28
    assert resnet20().count_parameters() == 269_722                  # 0.27 M of He et al., table 6
    assert resnet32().count_parameters() == 464_154
    assert resnet56().count_parameters() == 853_018
    assert resnet18().count_parameters() == 11_689_512               # torchvision's resnet18
    assert resnet34().count_parameters() == 21_797_672               # and its resnet34
    assert resnet50().count_parameters() == 25_557_032               # and its resnet50
    assert mlp(784, [1024, 1024], 10).count_parameters() == 784 * 1024 + 1024 + 1024**2 + 1024 + 10240 + 10


def test_gpt_has_nanogpt_s_number_of_parameters():
    model = gpt(layers=4, heads=4, width=128, block=64, vocabulary=65)
    without_positions = model.count_parameters() - 64 * 128          # as nanoGPT reports it
    assert f"{without_positions / 1e6:.2f}M" == "0.80M" and without_positions == 795_904
    assert gpt(layers=12, heads=12, width=768, block=1024, vocabulary=50257, bias=True).count_parameters() == 124_439_808


# resnet50's loss goes up and down with 4 images, in PyTorch too; tests/interchange compares its gradients with PyTorch's
@pytest.mark.parametrize("name", [name for name in SMALL if name != "resnet50"])
def test_a_model_trains_on_images(name):
    settings, shape, classes = SMALL[name]
    model = MODELS[name](**settings)
    storage = model.initialize(seed=1)
    x, labels = batch(shape), np.arange(shape[0]) % classes
    optimizer = SGD(model, 0.002)
    losses = []
    for _ in range(3):
        y = model(x)
        assert y.shape == (shape[0], classes) and y.dtype == np.float32
        loss = nn.LOSSES["cross_entropy"]()(y, labels)
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and math.isfinite(squared_norm(storage.segments, storage.values))
    with no_grad():
        assert np.isfinite(model.eval()(x).array).all()


def test_gpt_trains_and_its_shared_embedding_gets_one_gradient_of_two_uses():
    model = gpt(**TINY, dropout=0.1)
    model.initialize(seed=1, dtype="float64")
    x = tokens(3, 6)
    loss = nn.LOSSES["cross_entropy"]()
    optimizer = AdamW(model, 0.01)
    first = loss(model(x), x)
    first.backward()
    both = model["embed"].token.weight.grad.copy()
    optimizer.step()
    for _ in range(5):
        optimizer.zero_grad()
        last = loss(model(x), x)
        last.backward()
        optimizer.step()
    assert last.item() < first.item()
    assert model["head"].weight is model["embed"].token.weight
    unused = np.setdiff1d(np.arange(11), x)
    assert len(unused) and (both[unused] != 0).any()                 # the head's part: rows of tokens that do not occur


def test_gpt_computes_what_pytorch_s_layers_do():
    torch = pytest.importorskip("torch")
    model = gpt(**TINY)
    model.initialize(dtype="float64")
    state = {name: torch.tensor(value.copy()) for name, value in model.state_dict().items()}
    x = tokens(3, 5)
    h = state["embed.token.weight"][torch.tensor(x)] + state["embed.position.weight"][:5]
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    names = {"norm1.weight": "norm1.weight", "norm2.weight": "norm2.weight", "self_attn.in_proj_weight": "attention.qkv.weight",
             "self_attn.out_proj.weight": "attention.out.weight", "linear1.weight": "wide.weight",
             "linear2.weight": "narrow.weight"}
    for i in range(2):
        layer = torch.nn.TransformerEncoderLayer(8, 2, 32, dropout=0.0, activation="gelu", batch_first=True, norm_first=True,
                                                 bias=False, dtype=torch.float64)
        layer.load_state_dict({theirs: state[f"block{i}.{ours}"] for theirs, ours in names.items()})
        h = layer(h, src_mask=mask)
    h = torch.nn.functional.layer_norm(h, (8,), state["norm.weight"])
    expected = (h @ state["embed.token.weight"].T).detach().numpy()
    np.testing.assert_allclose(model(x).array, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("inputs", "outputs", "stride", "project"), [(4, 4, 1, True), (4, 6, 2, True), (4, 7, 2, False)])
def test_a_residual_block_computes_what_pytorch_s_layers_do(inputs, outputs, stride, project):
    torch = pytest.importorskip("torch")
    F = torch.nn.functional
    block = Residual(inputs, outputs, outputs, stride, "batch", project)
    block.initialize(dtype="float64")
    w = {name: torch.tensor(value.copy()) for name, value in block.state_dict().items()}

    def norm(y, name):
        return F.batch_norm(y, None, None, w[f"{name}.weight"], w[f"{name}.bias"], training=True)
    x = torch.tensor(np.random.default_rng(0).standard_normal((2, inputs, 5, 6)))
    y = norm(F.conv2d(x, w["conv1.weight"], stride=stride, padding=1), "norm1").relu()
    y = norm(F.conv2d(y, w["conv2.weight"], padding=1), "norm2")
    around = x
    if "shortcut.conv.weight" in w:
        around = norm(F.conv2d(x, w["shortcut.conv.weight"], stride=stride), "shortcut.norm")
    elif stride != 1:
        around = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, (outputs - inputs) // 2, outputs - inputs - (outputs - inputs) // 2))
    np.testing.assert_allclose(block(x.numpy()).array, (y + around).relu().numpy(), rtol=0, atol=1e-12)


def test_gpt_starts_like_nanogpt():
    model = gpt(layers=4, heads=4, width=128, block=64, vocabulary=65, bias=True)
    model.initialize()
    for name, p in model.named_parameters():
        values = p.array
        if name.endswith("bias"):
            assert (values == 0).all(), name
        elif "norm" in name:
            assert (values == 1).all(), name
        else:
            small = name.endswith(("attention.out.weight", "narrow.weight"))
            assert float(values.std()) == pytest.approx(0.02 / math.sqrt(8) if small else 0.02, rel=0.03), name
    x = tokens(4, 64, vocabulary=65)
    others = (x + 7) % 65                                            # tied embeddings favour the token itself
    assert nn.LOSSES["cross_entropy"]()(model(x), others).item() / 256 == pytest.approx(math.log(65), rel=0.05)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_stages_of_gpt_in_turn_compute_what_the_whole_does(cut):
    model = gpt(**TINY)
    model.initialize(seed=4)
    first, second = gpt(**TINY).slice(0, cut), gpt(**TINY).slice(cut, 5)
    first.initialize(seed=4)
    second.initialize(seed=4)
    x = tokens(2, 6)
    np.testing.assert_array_equal(model(x).array, second(first(x)).array)
    assert [name for name, _ in second.named_parameters()][-1] == "embed.token.weight"


def test_a_causal_model_does_not_look_ahead():
    model = gpt(**TINY)
    model.initialize()
    x = tokens(1, 6)
    changed = x.copy()
    changed[0, 4:] = (changed[0, 4:] + 1) % 11
    one, two = model(x).array, model(changed).array
    np.testing.assert_array_equal(one[:, :4], two[:, :4])
    assert (one[:, 4:] != two[:, 4:]).any()


def test_an_mlp_flattens_images_and_takes_any_activation():
    for name in nn.ACTIVATIONS:
        model = mlp(12, [5], 2, activation=name)
        model.initialize()
        x = batch((3, 1, 3, 4))
        np.testing.assert_array_equal(model(x).array, model(x.reshape(3, 12)).array)
    assert [name for name, _ in mlp(12, [5], 2).named_parameters()] == [
        "linear0.weight", "linear0.bias", "head.weight", "head.bias"]
    assert len(list(mlp(12, [], 2).named_parameters())) == 2


@pytest.mark.parametrize(("make", "x", "message"), [
    (lambda: mlp(12, [5], 2), batch((3, 1, 4, 4)), r"expects 12 numbers a sample, the input of shape \(3, 1, 4, 4\) has 16"),
    (lambda: lenet(), batch((2, 1, 32, 32)), r"lenet expects input of shape \(any, 1, 28, 28\), got \(2, 1, 32, 32\)"),
    (lambda: lenet(), batch((2, 784)), r"lenet expects input of shape \(any, 1, 28, 28\), got \(2, 784\)"),
    (lambda: resnet20(), batch((2, 1, 8, 8)), r"resnet expects input of shape \(any, 3, any, any\), got \(2, 1, 8, 8\)"),
    (lambda: gpt(**TINY), tokens(2, 7), r"token numbers of shape \(batch, at most 6\), got \(2, 7\); set model.block"),
    (lambda: gpt(**TINY), tokens(7), r"token numbers of shape \(batch, at most 6\), got \(7,\)")])
def test_input_that_does_not_fit_is_named(make, x, message):
    model = make()
    model.initialize()
    with pytest.raises(ShapeError, match=message):
        model(x)


def test_settings_that_do_not_fit_are_named():
    with pytest.raises(ShapeError, match="lenet needs images of at least 12x12, not 8x8"):
        lenet(size=8)
    with pytest.raises(ConfigError, match='unknown activation "rely".*did you mean "relu"'):
        mlp(3, [4], 2, activation="rely")
    with pytest.raises(ConfigError, match='unknown norm "layer"'):
        resnet20(norm="layer")
    with pytest.raises(ShapeError, match="a width of 8 cannot be cut into 3 heads"):
        gpt(layers=1, heads=3, width=8, block=4, vocabulary=5)


def test_a_token_outside_the_vocabulary_is_an_error_not_a_wrong_row():
    model = gpt(**TINY)
    model.initialize()
    with pytest.raises(DataError, match="11 is not in 0 ... 10"):
        model(np.array([[1, 11]]))


def test_gradients_of_a_model_do_not_depend_on_the_arena():
    one, two = resnet20(), resnet20()
    one.initialize(seed=2, dtype="float64")
    two.initialize(seed=2, dtype="float64").attach_gradients()
    x = batch((2, 3, 8, 8)).astype(np.float64)
    for model in (one, two):
        ops.sum(model(x)).backward()
    for mine, expected in zip(two.parameters(), one.parameters()):
        np.testing.assert_array_equal(mine.grad, expected.grad)


def test_a_model_stays_a_function_of_the_package_when_its_file_is_read() -> None:
    from mpitrain import models
    from mpitrain.models.files import FILES
    for file, names in FILES.items():
        importlib.import_module(f"mpitrain.models.{file}")
        assert all(callable(getattr(models, name)) for name in names.split()), file
