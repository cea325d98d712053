"""Layers against PyTorch's in float64: values, input gradients, and parameter gradients, with PyTorch's own weights."""

from types import SimpleNamespace

import numpy as np
import pytest

from mpitrain import nn, ops
from mpitrain.autograd import Tensor, no_grad
from mpitrain.backend import random
from mpitrain.errors import ConfigError, GraphError, ShapeError
from mpitrain.nn.recurrent import Recurrent

torch = pytest.importorskip("torch")
CLOSE = {"rtol": 0, "atol": 1e-10}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def adopt(ours, theirs, rename=lambda name: name):
    """`ours`, initialised in float64, with the values of `theirs` (a torch module in float64)."""
    ours.initialize(dtype="float64")
    theirs.double()
    state = {rename(name): value.detach().numpy() for name, value in theirs.state_dict().items()
             if not name.endswith("num_batches_tracked")}
    ours.load_state_dict(state)
    return ours


def compare(ours, theirs, *shape, rename=lambda name: name, x=None):
    """Results and all gradients, for a random cotangent."""
    adopt(ours, theirs, rename)
    x = normal(*shape) if x is None else x
    mine = Tensor(x, requires_grad=x.dtype.kind == "f")
    other = torch.tensor(x, requires_grad=x.dtype.kind == "f")
    y, expected = ours(mine), theirs(other)
    if isinstance(y, tuple):
        y, expected = y[0], expected[0]
    np.testing.assert_allclose(y.array, expected.detach().numpy(), **CLOSE)
    cotangent = normal(*y.shape, seed=1)
    y.backward(cotangent)
    expected.backward(torch.tensor(cotangent))
    if x.dtype.kind == "f":
        np.testing.assert_allclose(mine.grad, other.grad.numpy(), **CLOSE)
    grads = {rename(name): p.grad for name, p in theirs.named_parameters()}
    assert set(grads) == {name for name, _ in ours.named_parameters()}
    for name, p in ours.named_parameters():
        np.testing.assert_allclose(p.grad, grads[name].numpy(), err_msg=name, **CLOSE)


LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), lambda: torch.nn.Linear(4, 3), (2, 5, 4)),
    "linear without bias": (lambda: nn.Linear(4, 3, bias=False), lambda: torch.nn.Linear(4, 3, bias=False), (2, 4)),
    "conv": (lambda: nn.Conv2d(4, 6, (3, 2), stride=2, padding=1, dilation=(1, 2), groups=2),
             lambda: torch.nn.Conv2d(4, 6, (3, 2), stride=2, padding=1, dilation=(1, 2), groups=2), (2, 4, 7, 8)),
    "conv transpose": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2, bias=False),
                       lambda: torch.nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2, bias=False),
                       (2, 4, 3, 4)),
    "max pool": (lambda: nn.MaxPool2d(3, 2, 1), lambda: torch.nn.MaxPool2d(3, 2, 1), (2, 3, 7, 8)),
    "average pool": (lambda: nn.AvgPool2d(2, padding=1), lambda: torch.nn.AvgPool2d(2, padding=1), (2, 3, 6, 8)),
    "average pool without padding": (lambda: nn.AvgPool2d(3, 1, 1, count_include_pad=False),
                                     lambda: torch.nn.AvgPool2d(3, 1, 1, count_include_pad=False), (2, 3, 6, 8)),
    "adaptive average": (lambda: nn.AdaptiveAvgPool2d((3, 2)), lambda: torch.nn.AdaptiveAvgPool2d((3, 2)), (2, 3, 7, 8)),
    "adaptive max": (lambda: nn.AdaptiveMaxPool2d(3), lambda: torch.nn.AdaptiveMaxPool2d(3), (2, 3, 7, 8)),
    "layer norm": (lambda: nn.LayerNorm((3, 4)), lambda: torch.nn.LayerNorm((3, 4)), (2, 3, 4)),
    "layer norm without bias": (lambda: nn.LayerNorm(4, bias=False), lambda: torch.nn.LayerNorm(4, bias=False), (2, 3, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 6), lambda: torch.nn.GroupNorm(2, 6), (3, 6, 2, 2)),
    "RMS norm": (lambda: nn.RMSNorm(5), lambda: torch.nn.RMSNorm(5), (2, 3, 5)),
    "batch norm 1d": (lambda: nn.BatchNorm1d(4), lambda: torch.nn.BatchNorm1d(4), (6, 4)),
    "batch norm 1d with length": (lambda: nn.BatchNorm1d(4), lambda: torch.nn.BatchNorm1d(4), (3, 4, 5)),
    "batch norm 2d": (lambda: nn.BatchNorm2d(4), lambda: torch.nn.BatchNorm2d(4), (3, 4, 5, 2)),
    "flatten": (nn.Flatten, torch.nn.Flatten, (2, 3, 4)),
    "relu": (nn.ReLU, torch.nn.ReLU, (3, 4)),
    "leaky relu": (lambda: nn.LeakyReLU(0.2), lambda: torch.nn.LeakyReLU(0.2), (3, 4)),
    "gelu": (nn.GELU, torch.nn.GELU, (3, 4)),
    "gelu tanh": (lambda: nn.GELU("tanh"), lambda: torch.nn.GELU("tanh"), (3, 4)),
    "silu": (nn.SiLU, torch.nn.SiLU, (3, 4)),
    "tanh": (nn.Tanh, torch.nn.Tanh, (3, 4)),
    "sigmoid": (nn.Sigmoid, torch.nn.Sigmoid, (3, 4)),
    "softplus": (nn.Softplus, torch.nn.Softplus, (3, 4)),
    "softmax": (lambda: nn.Softmax(dim=0), lambda: torch.nn.Softmax(dim=0), (3, 4)),
    "lstm": (lambda: nn.LSTM(3, 4, num_layers=2), lambda: torch.nn.LSTM(3, 4, num_layers=2, batch_first=True), (2, 5, 3)),
    "lstm without bias": (lambda: nn.LSTM(3, 4, bias=False), lambda: torch.nn.LSTM(3, 4, bias=False, batch_first=True),
                          (2, 1, 3)),
    "gru": (lambda: nn.GRU(3, 4, num_layers=3), lambda: torch.nn.GRU(3, 4, num_layers=3, batch_first=True), (2, 5, 3)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_what_pytorch_s_does(name):
    ours, theirs, shape = LAYERS[name]
    compare(ours(), theirs(), *shape)


def test_an_embedding_computes_what_pytorch_s_does():
    compare(nn.Embedding(7, 3), torch.nn.Embedding(7, 3), x=np.random.default_rng(0).integers(0, 7, (4, 5)))


ATTENTION = {"in_proj_weight": "qkv.weight", "in_proj_bias": "qkv.bias", "out_proj.weight": "out.weight",
             "out_proj.bias": "out.bias"}


class TorchAttention(torch.nn.MultiheadAttention):
    """Self-attention of one argument."""

    def __init__(self, *args, causal):
        super().__init__(*args, batch_first=True)
        self.causal = causal

    def forward(self, x):
        mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1) if self.causal else None
        return super().forward(x, x, x, need_weights=False, attn_mask=mask)[0]


@pytest.mark.parametrize("causal", [False, True])
def test_attention_computes_what_pytorch_s_does(causal):
    compare(nn.MultiHeadAttention(6, 3, causal=causal), TorchAttention(6, 3, causal=causal), 2, 5, 6, rename=ATTENTION.get)


def test_a_transformer_layer_built_from_ours_computes_what_pytorch_s_does():
    class Layer(nn.Module):
        def __init__(self):
            self.norm1, self.norm2 = nn.LayerNorm(6), nn.LayerNorm(6)
            self.self_attn = nn.MultiHeadAttention(6, 2)
            self.linear1, self.linear2 = nn.Linear(6, 11), nn.Linear(11, 6)

        def forward(self, x):
            x = x + self.self_attn(self.norm1(x))
            return x + self.linear2(ops.gelu(self.linear1(self.norm2(x))))

    def rename(name):
        for old, new in ATTENTION.items():
            name = name.replace("self_attn." + old, "self_attn." + new)
        return name
    theirs = torch.nn.TransformerEncoderLayer(6, 2, 11, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
    compare(Layer(), theirs, 2, 4, 6, rename=rename)


@pytest.mark.parametrize("kind", ["bool", "added"])
@pytest.mark.parametrize("causal", [False, True])
def test_masked_attention_with_dropout_is_the_fused_one_where_nothing_is_dropped(kind, causal, monkeypatch):
    layer = nn.MultiHeadAttention(6, 2, dropout=0.5, causal=causal)
    layer.initialize(dtype="float64")
    x = normal(2, 4, 6)
    mask = {"bool": np.array([False, True, True, False]) | np.eye(4, dtype=bool), "added": normal(4, 4)}[kind]
    if kind == "bool":
        mask[0] = False                                   # a query that may look nowhere
    expected = layer.eval()(x, mask=mask).array
    dropped = layer.train()(x, mask=mask).array
    assert np.abs(dropped - expected).max() > 1e-3
    monkeypatch.setattr(ops, "dropout", lambda x, p, layer, **options: x)
    np.testing.assert_allclose(layer(x, mask=mask).array, expected, **CLOSE)


def test_a_width_that_the_heads_do_not_divide_is_refused():
    with pytest.raises(ShapeError, match="a width of 6 cannot be cut into 4 heads"):
        nn.MultiHeadAttention(6, 4)


@pytest.mark.parametrize("make", [lambda: (nn.LSTM(3, 4, 2), torch.nn.LSTM(3, 4, 2, batch_first=True)),
                                  lambda: (nn.GRU(3, 4, 2), torch.nn.GRU(3, 4, 2, batch_first=True))])
def test_a_recurrent_state_goes_in_and_out(make):
    ours, theirs = make()
    adopt(ours, theirs)
    x, h, c = normal(2, 5, 3), normal(2, 2, 4, seed=1), normal(2, 2, 4, seed=2)
    lstm = isinstance(ours, nn.LSTM)
    y, state = ours(x, (Tensor(h), Tensor(c)) if lstm else Tensor(h))
    expected, final = theirs(torch.tensor(x), (torch.tensor(h), torch.tensor(c)) if lstm else torch.tensor(h))
    np.testing.assert_allclose(y.array, expected.detach().numpy(), **CLOSE)
    for mine, other in zip(state, final) if lstm else [(state, final)]:
        np.testing.assert_allclose(mine.array, other.detach().numpy(), **CLOSE)


def test_dropout_between_recurrent_layers_acts_in_training_only():
    layer = nn.GRU(3, 4, num_layers=2, dropout=0.5)
    layer.initialize(dtype="float64")
    x = normal(2, 5, 3)
    quiet = layer.eval()(x)[0].array
    assert not np.allclose(layer.train()(x)[0].array, quiet)
    np.testing.assert_array_equal(layer.eval()(x)[0].array, quiet)


def test_recurrent_layers_name_wrong_input():
    layer = nn.LSTM(3, 4)
    layer.initialize()
    with pytest.raises(ShapeError, match=r"LSTM expects input of shape \(batch, length, 3\), got \(2, 5, 4\)"):
        layer(np.zeros((2, 5, 4), np.float32))
    with pytest.raises(ShapeError, match="sequences of length 0"):
        layer(np.zeros((2, 0, 3), np.float32))
    bare = Recurrent(3, 4)
    bare.initialize()
    with pytest.raises(GraphError, match="defines no layer"):
        bare(np.zeros((2, 1, 3), np.float32))


class Same(nn.Module):
    def forward(self, x):
        return x


class SomeHeads(nn.Module):
    """What is left of queries, keys and values of 4 heads of width 2 on the rank that has 2 of them."""

    def __init__(self, whole, part):
        self.whole, self.part, self.weight = whole, part, SimpleNamespace(offset=(4 * part,))

    def forward(self, x):
        q, k, v = ops.split(self.whole(x), 8, dim=-1)
        return ops.concatenate([each[..., 4 * self.part:4 * self.part + 4] for each in (q, k, v)], dim=-1)


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("shape", [(4, 5, 5), (2, 4, 5, 5), (1, 5, 5), (5, 5)], ids=str)
def test_a_rank_with_some_of_the_heads_takes_their_masks(shape, part):
    whole, cut = nn.MultiHeadAttention(8, 4), nn.MultiHeadAttention(8, 4)
    whole.initialize(seed=1)
    whole.out, cut.out, cut.qkv = Same(), Same(), SomeHeads(whole.qkv, part)
    rng = np.random.default_rng(0)
    x, mask = rng.standard_normal((2, 5, 8)).astype(np.float32), (rng.random(shape) < 0.5) | np.eye(5, dtype=bool)
    np.testing.assert_allclose(cut(x, mask).array, whole(x, mask).array[..., 4 * part:4 * part + 4], rtol=1e-5, atol=1e-6)


def test_initial_values_have_pytorch_s_bounds():
    torch.manual_seed(0)
    for ours, theirs in ((nn.Linear(50, 400), torch.nn.Linear(50, 400)), (nn.Conv2d(8, 90, 3), torch.nn.Conv2d(8, 90, 3)),
                         (nn.LSTM(20, 50), torch.nn.LSTM(20, 50)),
                         (nn.ConvTranspose2d(8, 90, 3), torch.nn.ConvTranspose2d(8, 90, 3))):
        ours.initialize()
        for name, p in ours.named_parameters():
            expected = dict(theirs.named_parameters())[name].detach()
            assert float(np.abs(p.array).max()) == pytest.approx(float(expected.abs().max()), rel=0.1), name
            assert float(p.array.std()) == pytest.approx(float(expected.std()), rel=0.15), name


def test_dropout_is_keyed_by_the_layer_s_name_and_absent_in_eval():
    model = nn.Sequential(("one", nn.Dropout(0.5)), ("two", nn.Dropout(0.5)))
    model.initialize()
    x = np.ones((4, 100), np.float32)

    def draw(block, seed):
        with random.use(random.Scope(seed=seed)):
            return block(x).array
    one = draw(model["one"], 0)
    assert set(np.unique(one)) == {0.0, 2.0}
    np.testing.assert_array_equal(one, draw(model["one"], 0))
    assert (one != draw(model["two"], 0)).any() and (one != draw(model["one"], 1)).any()
    assert model.eval()(x) is x and nn.Dropout(0.0)(x) is x
    with pytest.raises(ShapeError, match=r"the probability of dropout lies in \[0, 1\), not 1.0"):
        nn.Dropout(1.0)


def test_channels_and_groups_must_fit():
    with pytest.raises(ShapeError, match="from 4 to 6 channels cannot have 4 groups"):
        nn.Conv2d(4, 6, 3, groups=4)
    with pytest.raises(ShapeError, match="5 channels cannot be cut into 2 groups"):
        nn.GroupNorm(2, 5)


def test_layers_work_without_a_graph():
    layer = nn.Linear(4, 3)
    layer.initialize()
    with no_grad():
        assert layer(np.zeros((2, 4), np.float32)).node is None


@pytest.mark.parametrize("name", ["relu", "gelu", "softplus"])
def test_a_linear_layer_with_an_activation_is_the_layer_and_the_activation(name: str) -> None:
    joined = nn.Linear(4, 3, activation=name)
    apart = nn.Sequential(("linear", nn.Linear(4, 3)), ("act", nn.ACTIVATIONS.resolve(name)()))
    x = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    for model in (joined, apart):
        model.initialize(seed=0)
    for ours, theirs in zip(joined.parameters(), apart.parameters(), strict=True):
        theirs.array[...] = ours.array
    assert np.array_equal(joined(x).array, apart(x).array) and len(joined.parameters()) == 2


def test_a_linear_layer_with_an_unknown_activation_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match='unknown activation "gleu"'):
        nn.Linear(4, 3, activation="gleu")


def test_batch_norm_takes_relu_as_its_activation_and_a_residual():
    layer, plain = nn.BatchNorm2d(3, activation="relu"), nn.BatchNorm2d(3)
    for module in (layer, plain):
        module.initialize(seed=0)
    x, around = (np.random.default_rng(i).standard_normal((4, 3, 5, 5)).astype(np.float32) for i in range(2))
    for training in (True, False):
        layer.train(training)
        plain.train(training)
        np.testing.assert_allclose(layer(x, around).array, np.maximum(plain(x).array + around, 0), rtol=1e-6, atol=1e-6)
    with pytest.raises(ConfigError, match='unknown activation "gellu"'):
        nn.BatchNorm2d(3, activation="gellu")
    with pytest.raises(ConfigError, match='max pooling takes "relu" as its activation, or None, not "gelu"'):
        nn.MaxPool2d(2, activation="gelu")


def test_dropout_and_addition_in_one_are_the_two_after_each_other():
    layer, plain = nn.DropoutAdd(0.3), nn.Dropout(0.3)
    layer.path = plain.path = "drop"
    x, around = (np.random.default_rng(i).standard_normal((4, 30)).astype(np.float32) for i in range(2))
    for training in (True, False):
        found = []
        for module, add in ((layer, None), (plain, around)):
            module.train(training)
            with random.use(random.Scope(1, 2)):
                found.append(module(x, around).array if add is None else np.asarray(module(x)) + add)
        assert np.array_equal(*found)
