"""Plans: which layers are cut, what each rank keeps of them, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain import models, nn
from mpitrain.config import CommConfig, MeshConfig, TrainConfig
from mpitrain.errors import ConfigError, MeshError
from mpitrain.parallel.layers.tensor_loss import CutLoss
from mpitrain.placement.place import place
from mpitrain.placement.tensor_plan import narrow, read_plan
from mpitrain.schedules.grid import Grid


def gpt(**changed):
    return models.gpt(**{"layers": 2, "heads": 6, "width": 12, "block": 8, "vocabulary": 11, "bias": True, **changed})


def mobile(**changed):
    return models.mobilenet_v3_small(classes=4, **{"width": 0.25, **changed})


def small():
    return nn.Sequential(("conv", nn.Conv2d(2, 4, 3)), ("norm", nn.BatchNorm2d(4)), ("flat", nn.Flatten()),
                         ("a", nn.Linear(4, 8)), ("act", nn.Tanh()), ("b", nn.Linear(8, 3)))


@pytest.mark.parametrize("make", [gpt, lambda: models.mlp(5, [6, 6, 6], 4), models.lenet, models.resnet20, mobile,
                                  lambda: models.resnext50(width=4, groups=2, group_width=2),
                                  lambda: models.fno(width=4, layers=2),
                                  lambda: models.inception_time(1, 2, filters=2, bottleneck=2, kernel=8)])
def test_parts_of_all_ranks_are_the_whole_with_the_values_of_one_rank(make):
    whole = make()
    whole.initialize(seed=3)
    built = {name: np.full(p.shape, np.nan) for name, p in whole.named_parameters()}
    cut = set()
    for rank in range(2):
        model = make()
        narrow(read_plan(model, model.plan), rank, 2)
        model.initialize(seed=3)
        for name, parameter in model.named_parameters():
            cut |= {name} if "tp" in parameter.placement else set()
            for own, start in parameter.boxes():
                part = parameter.array[own]
                built[name][tuple(slice(s, s + n) for s, n in zip(start, part.shape))] = part
    for name, parameter in whole.named_parameters():
        np.testing.assert_array_equal(built[name], parameter.array)
    assert cut and cut < set(built)


def test_a_rank_has_the_same_heads_of_queries_keys_and_values():
    model = gpt()
    narrow(read_plan(model, model.plan), 1, 3)
    attention = model["block0"].attention
    assert attention.qkv.weight.shape == (12, 12) and attention.out.weight.shape == (12, 4)
    assert [box.start[0] for box in attention.qkv.weight.boxes()] == [4, 16, 28]
    assert attention.out.bias.placement == {} and attention.qkv.bias.placement == {"tp": 0}
    assert model["embed"].token.weight.shape == (4, 12) and model["head"].weight is model["embed"].token.weight


def test_a_twin_of_a_cut_parameter_is_cut_alike():
    model = gpt()
    narrow(read_plan(model, model.plan), 1, 2)
    model.untie()
    assert model["head"].weight.shape == (6, 12) and model["head"].weight.offset == (5, 0)


@pytest.mark.parametrize(("model", "n", "message"), [
    (gpt(), 4, 'mesh.tp = 4 does not divide the 6 heads of "block0.attention.qkv"; the nearest that fits the whole model: '
               "mesh.tp = 3 or 6"),
    (gpt(heads=12, vocabulary=3), 4, 'mesh.tp = 4 is more than the 3 rows of "embed.token"; the nearest that fits the whole '
                                     "model: mesh.tp = 3"),
    (models.mlp(5, [7], 4), 2, 'mesh.tp = 2 does not divide the 7 outputs of "linear0"; the nearest that fits the whole model: '
                               "mesh.tp = 1 or 7"),
    (models.lenet(), 4, 'mesh.tp = 4 does not divide the 6 output channels of "conv1"; the nearest that fits the whole model: '
                        "mesh.tp = 3 or 6"),
    (mobile(), 16, 'mesh.tp = 16 does not divide the 24 output channels of "block1.expand.conv"; the nearest that fits the whole '
                   "model: mesh.tp = 8"),
    (models.resnext50(groups=6), 4, 'mesh.tp = 4 does not divide the 6 groups of "stage1_block0.conv2"; the nearest that fits '
                                    "the whole model: mesh.tp = 3 or 6"),
    (models.fno(width=10), 4, 'mesh.tp = 4 does not divide the 10 output channels of "layer0.spectral"; the nearest that fits '
                              "the whole model: mesh.tp = 2"),
])
def test_a_size_that_does_not_fit_is_named_with_the_nearest_that_does(model, n, message):
    with pytest.raises(MeshError) as caught:
        narrow(read_plan(model, model.plan), 0, n)
    assert caught.value.message == message


@pytest.mark.parametrize(("model", "plan", "message"), [
    (small(), {}, "mesh.tp cuts layers by a plan, and this model has none; give it one in mesh.plan"),
    (small(), {"convs": "column"}, 'mesh.plan: no layer matches "convs" (did you mean "conv"?)'),
    (gpt(), {"*.qkv": "column"}, 'mesh.plan: no layer matches "*.qkv"'),
    (small(), {"a": "colum"}, 'mesh.plan: the style "colum" of "a" is not there (did you mean "column"?)'),
    (small(), {"a": "column", "[ab]": "row"}, 'mesh.plan: "a" is "column" by "a" and "row" by "[ab]"; keep one of them'),
    (small(), {"norm": "row"}, 'mesh.plan: "norm" is a BatchNorm2d, and "row" (inputs are cut: ranks\' products are added) is '
                               "for Linear, Conv1d, Conv2d, Conv3d; such a layer may be channels"),
    (gpt(), {"block0": "column"}, '"block0" is a Block, and "column" (outputs are cut: each rank has some of them) is for '
                                  "Linear, Conv1d, Conv2d, Conv3d; name the layers in it"),
    (small(), {"a": "vocabulary"}, 'the outputs of "a" go on to "b", and "vocabulary" leaves them cut for the loss; make it '
                                   '"gathered"'),
    (gpt(), {"embed.token": "vocabulary"}, '"head" shares the parameter "embed.token.weight" with "embed.token", which cuts it '
                                           "along dim 0; cut it alike in both"),
    (nn.Sequential(("conv", nn.Conv2d(4, 4, 3, groups=2))), {"conv": "column"},
     '"conv" is a convolution of 2 groups, whose ranks each have whole groups; make it "channels", between a "column" and its '
     '"row", or leave it whole'),
    (nn.Sequential(("conv", nn.Conv2d(4, 4, 3))), {"conv": "channels"},
     '"conv" is a convolution of one group, and "channels" is for several, of which each rank has some; make it "column" or '
     '"row"'),
    (nn.Sequential(("conv", nn.Conv2d(4, 4, 3, groups=2))), {"conv": "channels"},
     '"conv" is "channels", and its inputs are whole'),
    (nn.Sequential(("a", nn.weight_norm(nn.Linear(4, 4)))), {"a.layer": "column"},
     '"a.layer" is a Linear without a weight of its own, which cannot be cut; leave it whole'),
    (nn.Sequential(("a", nn.Linear(4, 4)), ("drop", nn.Dropout(0.1)), ("b", nn.Linear(4, 4))), {"a": "column", "b": "row"},
     'mesh.plan: "drop" takes the outputs of "a", of which each rank has some; give it the style "channels"'),
])
def test_a_plan_that_cannot_be_is_refused_in_one_line(model, plan, message):
    with pytest.raises(ConfigError) as caught:
        read_plan(model, plan)
    assert message in caught.value.message


def test_dropout_behind_cut_layers_is_refused_only_where_it_drops_what_is_cut():
    for drop, plan in ((nn.Dropout(0.0), {"a": "column", "b": "row"}), (nn.Dropout(0.5), {"a": "gathered"}),
                       (nn.Dropout(0.5), {"a": "column", "drop": "channels", "b": "row"})):
        read_plan(nn.Sequential(("a", nn.Linear(4, 4)), ("drop", drop), ("b", nn.Linear(4, 4)), ("last", nn.Dropout(0.5))), plan)


class Own(nn.Module):
    """A user's function, of which nothing is known."""

    def forward(self, x):
        return x - x.mean(-1, keepdims=True)


class Declared(Own):
    by_element = True

    def forward(self, x):
        return x * 2


class Changed(nn.ReLU):
    """A forward of its own, which the base class knows nothing of."""

    def forward(self, x):
        return x[..., ::-1]


class Scaled(Declared):
    def __init__(self):
        self.scale = nn.Parameter((1,), nn.init.ones)


class OwnLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class Pair(nn.Module):
    def __init__(self, between):
        self.first, self.between, self.second = nn.Linear(4, 8), [between], nn.Linear(8, 4)

    def forward(self, x):
        return self.second(self.between[0](self.first(x)))


class Told(Pair):
    chains = ("first", "between.0", "second"),

    def forward(self, x):
        return super().forward(x)


def between(middle, first=None, second=None):
    return nn.Sequential(("a", first or nn.Linear(4, 8)), ("x", middle), ("b", second or nn.Linear(8, 4)))


PLAN = {"a": "column", "b": "row"}


@pytest.mark.parametrize("middle", [
    nn.AlphaDropout(0.1), nn.Dropout1d(0.1), nn.Dropout2d(0.1), nn.Dropout3d(0.1), nn.DropPath(0.1), nn.RReLU(), nn.GLU(),
    nn.PReLU(), nn.PReLU(8), nn.Softmax(), nn.LogSoftmax(), nn.Softmin(), nn.LayerNorm(8), nn.RMSNorm(8), nn.GroupNorm(2, 8),
    nn.MaxPool2d(2), nn.BatchNorm1d(8), nn.LSTM(8, 8), nn.MultiHeadAttention(8, 2), nn.Linear(8, 8), nn.Flatten(),
    nn.PixelShuffle(2), Own(), Changed(), Scaled(), nn.Sequential(nn.ReLU(), nn.Softmax()), nn.DropoutAdd(0.1)],
    ids=lambda module: type(module).__name__)
def test_what_does_not_declare_that_it_treats_numbers_apart_is_refused_between_a_column_and_its_row(middle):
    for model in (between(middle), Told(middle)):
        plan = PLAN if isinstance(model, nn.Sequential) else {"first": "column", "second": "row"}
        with pytest.raises(ConfigError, match=r'takes the outputs of "(a|first)", of which each rank has some(, and|;)'):
            read_plan(model, plan)


@pytest.mark.parametrize("middle", [nn.AlphaDropout(), nn.Dropout2d(), nn.MaxPool3d(1), nn.ZeroPad3d(1), nn.AvgPool3d(2),
                                    nn.GroupNorm(2, 8), nn.InstanceNorm2d(8), nn.PReLU(8), nn.PixelShuffle(2), nn.Softmax2d(),
                                    nn.BatchNorm2d(8), nn.LocalResponseNorm(2)], ids=lambda module: type(module).__name__)
def test_so_it_is_between_convolutions(middle):
    with pytest.raises(ConfigError, match='"x" takes the outputs of "a", of which each rank has some'):
        read_plan(between(middle, nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 3)), PLAN)


def test_what_declares_it_may_stand_there():
    for middle in (nn.ReLU(), nn.GELU(), nn.Hardswish(), nn.Identity(), nn.Dropout(0.0), Declared(),
                   nn.Sequential(nn.Tanh(), nn.ELU())):
        read_plan(between(middle), PLAN)
        read_plan(Told(middle), {"first": "column", "second": "row"})
    for middle in (nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2), nn.ReflectionPad2d(1), nn.Upsample(scale_factor=2), nn.SiLU()):
        read_plan(between(middle, nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 3)), PLAN)
        read_plan(between(nn.Sequential(middle, nn.Flatten()), nn.Conv2d(4, 8, 3)), PLAN)
    read_plan(nn.SwiGLU(4, 8), {"gate": "column", "up": "column", "down": "row"})
    read_plan(nn.MultiHeadAttention(8, 2, key_heads=1), {"query": "column", "key": "column", "value": "column", "out": "row"})


@pytest.mark.parametrize(("model", "plan", "message"), [
    (Pair(nn.ReLU()), {"first": "column", "second": "row"},
     'mesh.plan: "first" is "column" in "the model" (Pair), which does not say where its numbers go from a column to a row; name '
     'the layers between them in its class, chains = (("column", ..., "row"),), or make columns "gathered" and leave rows out'),
    (between(nn.ReLU(), second=nn.Tanh()), {"a": "column"},
     'the outputs of "a" leave "the model" cut; let a "row" follow, or make "a" "gathered"'),
    (between(nn.ReLU()), {"a": "column"}, '"b" takes the outputs of "a", of which each rank has some; make it "row", or "a" '
                                          '"gathered"'),
    (between(nn.ReLU()), {"b": "row"},
     '"b" is "row", and its inputs are whole; make the layer before it "column", or leave "b" whole'),
    (between(nn.ReLU()), {"a": "column", "b": "column"},
     '"b" is "column", which is for whole inputs, and takes the outputs of "a"'),
    (between(nn.Dropout(0.2)), {"x": "channels"}, '"x" is "channels", and its inputs are whole'),
    (nn.MultiHeadAttention(8, 2, key_heads=1), {"query": "column", "out": "row"}, '"out" is "row", and its inputs are whole'),
    (nn.SwiGLU(4, 8), {"gate": "column", "down": "row"}, '"down" is "row", and its inputs are whole'),
    (nn.Sequential(("layer", nn.TransformerEncoderLayer(8, 2, 16))), {"layer.linear1": "column", "layer.linear2": "row"},
     '"layer.dropout" takes the outputs of "layer.linear1", of which each rank has some; give it the style "channels"'),
    (nn.Sequential(("bag", nn.EmbeddingBag(8, 4))), {"bag": "vocabulary"},
     '"bag" is a EmbeddingBag, a Embedding with a forward of its own, which ranks that have a part would not follow; '
     "leave it whole"),
    (nn.Sequential(("table", nn.Embedding(8, 4, max_norm=1.0))), {"table": "vocabulary"},
     '"table" is an Embedding with max_norm, whose rows change with what each rank looks up; leave it whole'),
    (between(nn.ReLU(), second=OwnLinear(8, 4)), PLAN, '"b" is a OwnLinear, a Linear with a forward of its own'),
])
def test_cut_numbers_that_go_where_nothing_is_known_of_are_refused(model, plan, message):
    with pytest.raises(ConfigError) as caught:
        read_plan(model, plan)
    assert message in caught.value.message


def gated(gate=None, **styles):
    model = nn.Sequential(("a", nn.Conv2d(4, 8, 1)), ("gates", nn.SqueezeExcitation(8, 2)), ("b", nn.Conv2d(8, 4, 1)))
    if gate is not None:
        model.blocks["gates"].gate = gate
    return read_plan(model, {"a": "column", "b": "row", **{f"gates.{name}": style for name, style in styles.items()}})


def test_what_all_paths_through_a_module_give_is_cut_or_whole():
    """A gate, made of cut channels or of whole ones; and a module whose paths are not all there is unknown."""
    gated(squeeze="row", expand="column")
    read_plan(nn.Sequential(("gates", nn.SqueezeExcitation(8, 2))), {"gates.squeeze": "column", "gates.expand": "row"})
    for styles, message in (
            ({}, '"gates.squeeze" takes the outputs of "a", of which each rank has some; make it "row", or "a" "gathered"'),
            ({"squeeze": "row"}, '"gates" (SqueezeExcitation) puts together the outputs of "a", of which each rank has some, and '
                                 'those of "gates.gate", which are whole; cut both, or none'),
            ({"gate": nn.Softmax(), "squeeze": "row", "expand": "column"},
             '"gates.gate" takes the outputs of "gates.expand", of which each rank has some, and Softmax does not declare'),
            ({"squeeze": "column", "expand": "row"}, '"gates.squeeze" is "column", which is for whole inputs')):
        with pytest.raises(ConfigError) as caught:
            gated(**styles)
        assert message in caught.value.message
    with pytest.raises(ConfigError, match='"gates.expand", of which each rank has some, and its input, which is whole; cut both'):
        read_plan(nn.Sequential(("gates", nn.SqueezeExcitation(8, 2)), ("b", nn.Linear(8, 4))), {"gates.expand": "column"})


def test_an_activation_of_a_column_declares_it_too():
    linear = nn.Linear(4, 8)
    linear.after = nn.Softmax()
    for style in ("column", "gathered"):
        with pytest.raises(ConfigError, match='"a" has the activation Softmax, which does not declare that it treats each'):
            read_plan(between(nn.ReLU(), linear), {"a": style})


def test_a_parameter_that_is_twice_in_a_plan_of_twins_is_refused_too():
    model = gpt()
    model.untie()
    with pytest.raises(ConfigError, match='"head" shares the parameter "embed.token.weight" with "embed.token"'):
        read_plan(model, {"embed.token": "vocabulary"})


def placed(cut, **mesh):
    """A model on two ranks along the axis `cut`."""
    return place(small(), Grid({cut: 2}), MeshConfig(**mesh), TrainConfig(), CommConfig())


class Gained(nn.Module):
    """A model with a parameter of its own."""

    def __init__(self, inner):
        self.inner, self.scale = inner, nn.Parameter((8,), nn.init.ones)

    def forward(self, x):
        return self.inner(x) * self.scale


SEQUENCE = {"embed": "vocabulary", "norm": "sequence", "wide": "column", "narrow": "row"}


def along(*blocks):
    return nn.Sequential(("embed", nn.Embedding(16, 8)), ("norm", nn.LayerNorm(8)), *blocks, ("wide", nn.Linear(8, 16)),
                         ("gelu", nn.GELU()), ("narrow", nn.Linear(16, 8)))


@pytest.mark.parametrize(("layer", "said"), [
    (nn.LayerNorm(8), '(LayerNorm): its parameter "weight" would have the gradients of some positions alone; give it the style '
                      '"sequence" in mesh.plan, or set mesh.sequence = false'),
    (nn.Linear(8, 8), '(Linear): its parameter "weight" would have the gradients of some positions alone; give it a style in '
                      'mesh.plan ("sequence" is for LayerNorm, RMSNorm,'),
    (nn.PReLU(), '(PReLU): its parameter "weight" would'),
    (nn.Dropout(0.1), '(Dropout): it would drop other numbers than one rank does; give it the style "sequence"'),
    (nn.AlphaDropout(0.1), "(AlphaDropout): it would drop other numbers than one rank does; give it a style in mesh.plan"),
    (nn.RReLU(), "(RReLU): it would drop other numbers than one rank does"),
    (Gained(nn.ReLU()), '(Gained): its parameter "scale" would have')])
def test_with_sequence_a_layer_that_the_plan_does_not_name_is_refused_by_name(layer, said):
    def placed(plan, sequence=True):
        return place(along(("own", layer)), Grid({"tp": 2}), MeshConfig(plan=plan, sequence=sequence), TrainConfig(),
                     CommConfig())
    with pytest.raises(ConfigError) as caught:
        placed(SEQUENCE)
    start = 'mesh.sequence = true cuts activations along the sequence, and the plan does not name "own" '
    assert caught.value.message.startswith(start + said)
    placed(SEQUENCE, sequence=False)
    if isinstance(layer, (nn.LayerNorm, nn.Dropout)):
        placed({**SEQUENCE, "own": "sequence"})


def test_with_sequence_layers_without_parameters_or_random_numbers_need_no_style():
    plan = {**SEQUENCE, "attention.qkv": "column", "attention.out": "row"}
    model = along(("tanh", nn.Tanh()), ("none", nn.Dropout(0.0)), ("path", nn.DropPath(0.1)),
                    ("attention", nn.MultiHeadAttention(8, 2, dropout=0.1)))
    place(model, Grid({"tp": 2}), MeshConfig(plan=plan, sequence=True), TrainConfig(), CommConfig())
    whole = Gained(along())
    with pytest.raises(ConfigError, match=r'does not name "the model" \(Gained\): its parameter "scale" would have'):
        place(whole, Grid({"tp": 2}), MeshConfig(plan={f"inner.{path}": style for path, style in SEQUENCE.items()},
                                                 sequence=True), TrainConfig(), CommConfig())


def test_what_does_not_go_with_layers_on_several_ranks_is_said_in_one_line():
    for make, message in (
            (lambda: CutLoss(nn.LOSSES["mse"](), None, 0, 4, "head"),
             'mesh.plan leaves the outputs of "head" cut ("vocabulary"), which is for train.loss = '
             '"cross_entropy" without weights; make "head" "gathered" for MSE'),
            (lambda: placed("tp", plan={"a": "column", "b": "row"}, sequence=True),
             'mesh.sequence = true cuts what lies between layers, and the plan has no "sequence" layer'),
            (lambda: placed("dp", plan={"c": "column"}), 'mesh.plan: no layer matches "c"')):
        with pytest.raises(ConfigError) as caught:
            make()
        assert message in caught.value.message
