"""Supernets: many networks over one set of weights, of which a run trains some in each step (`nn.elastic`, docs/supernet.md).

    depth     how many blocks a stage uses, the first ones
    width     channels, units or heads inside of a block; what blocks pass on has one width, whatever the path
    kernel    the size of a block's first convolution

`path` makes one of the networks by itself, an ordinary model with the names, and the shapes, of the path's parameters. `sampling`
says which paths a step trains: "uniform", one drawn for the step, or "sandwich", of each four micro-batches one with the smallest
path, two with paths that are drawn, and one with the largest (Yu and Huang 2019, 1903.05134).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mpitrain import nn, ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ConfigError, nearest
from mpitrain.models.registry import require_list_of_sizes, require_positive, require_sizes
from mpitrain.models.transformer import STD, Block, Embed, Head
from mpitrain.nn import init
from mpitrain.nn.activation import ACTIVATIONS
from mpitrain.nn.basic import Check
from mpitrain.nn.choices import Choice, Elastic, Size, largest_of
from mpitrain.nn.elastic import ElasticBatchNorm2d, ElasticBlock, ElasticConv2d, ElasticLinear

RULES = "uniform", "sandwich"
HE = init.kaiming_normal(fan="out")


class Sizes:
    """The sizes of a supernet by the names of its choices: the choices, or those numbers that a `path` has for them."""

    def __init__(self, choices: Mapping[str, Choice], sampling: str, path: str):
        if sampling not in RULES:
            raise ConfigError(f'model.sampling is one of {", ".join(RULES)}, found "{sampling}"{nearest(sampling, RULES)}')
        self.elastic = Elastic(choices, sampling)
        self.fixed = self.elastic.read(path) if path else None

    def __call__(self, name: str) -> Size:
        return self.elastic.choices[name] if self.fixed is None else self.fixed[name]

    def kept(self, blocks: Sequence[tuple[str, str, Callable[[], ElasticBlock]]]) -> list[tuple[str, nn.Module]]:
        """The blocks of (name, their depth's name, what makes them): all, or those that the path has."""
        made: list[tuple[str, nn.Module]] = []
        counted: dict[str, int] = {}
        for name, depth, make in blocks:
            place = counted[depth] = counted.get(depth, -1) + 1
            if self.fixed is None:
                block = make()
                block.depth, block.place = self.elastic.choices[depth], place
                made.append((name, block))
            elif place < self.fixed[depth]:
                made.append((name, make()))
        return made

    def finished(self, model: nn.Sequential) -> nn.Sequential:
        if self.fixed is None:
            model.elastic = self.elastic
        return model


def require_options(**options: Any) -> None:
    """ConfigError unless each of these keys of [model] is a list of integers of at least 1 that rise."""
    for name, values in options.items():
        require_list_of_sizes(name, values)
        if not values or list(values) != sorted(set(values)):
            raise ConfigError(f"model.{name} has what a choice can be, one number or more from the smallest to the largest, "
                              f"found {list(values)}; change model.{name}")


def linear(inputs: Size, outputs: Size, bias: bool = True, **more: Any) -> nn.Linear:
    """A linear layer, elastic where a size is a choice; in the other one `groups` and units multiply its sizes."""
    if isinstance(inputs, Choice) or isinstance(outputs, Choice):
        return ElasticLinear(inputs, outputs, bias, **more)
    groups, in_unit, out_unit = (more.pop(key, 1) for key in ("groups", "in_unit", "out_unit"))
    return nn.Linear(inputs * in_unit, groups * outputs * out_unit, bias, **more)


def conv(inputs: Size, outputs: Size, kernel: Size, stride: int = 1) -> nn.Conv2d:
    if any(isinstance(size, Choice) for size in (inputs, outputs, kernel)):
        return ElasticConv2d(inputs, outputs, kernel, stride=stride, bias=False, weight_init=HE)
    assert isinstance(kernel, int)
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False, weight_init=HE)


class ElasticResidual(ElasticBlock):
    """relu(x + norm(conv3(relu(norm(conv_k(x)))))), with elastic channels between and an elastic k (He et al. 2016a).

    Where the shape changes, a convolution of 1 x 1 and a norm go around it. `norm` makes a norm of so many channels.
    """

    def __init__(self, inputs: int, outputs: int, width: Size, kernel: Size, stride: int, norm: Callable[..., nn.Module]):
        self.conv1, self.norm1 = conv(inputs, width, kernel, stride), norm(width, activation="relu")
        self.conv2, self.norm2 = conv(width, outputs, 3), norm(outputs, activation="relu")
        self.shortcut: nn.Sequential | None = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(("conv", conv(inputs, outputs, 1, stride)), ("norm", norm(outputs)))

    def compute(self, x: Any) -> Tensor:
        around = x if self.shortcut is None else self.shortcut(x)
        out: Tensor = self.norm2(self.conv2(self.norm1(self.conv1(x))), around)
        return out


def elastic_resnet(classes: int = 10, channels: int = 3, widths: Sequence[int] = (16, 32, 64), depths: Sequence[int] = (1, 2, 3),
                   inner: Sequence[float] = (0.25, 0.5, 1.0), kernels: Sequence[int] = (3, 5), sampling: str = "uniform",
                   path: str = "") -> nn.Sequential:
    """A supernet of residual nets for small images: stages of `widths` channels, each of which halves the image but the first.

    Of each stage `depths` says how many blocks it can have, `inner` what share of its channels can be inside of a block, and
    `kernels` the sizes of a block's first convolution.
    """
    require_sizes(classes=classes, channels=channels)
    require_list_of_sizes("widths", widths)
    require_options(depths=depths, kernels=kernels)
    _require_shares(inner, widths)
    if any(kernel % 2 == 0 for kernel in kernels):
        raise ConfigError(f"model.kernels are odd, so that a kernel has a middle, found {list(kernels)}; change model.kernels")
    choices: dict[str, Choice] = {}
    for s, outputs in enumerate(widths, 1):
        depth = choices[f"stage{s}.depth"] = Choice(depths)
        for b in range(depths[-1]):
            choices[f"stage{s}_block{b}.width"] = Choice([int(share * outputs) for share in inner], depth, b)
            choices[f"stage{s}_block{b}.kernel"] = Choice(kernels, depth, b)
    sizes = Sizes(choices, sampling, path)
    norm: Any = ElasticBatchNorm2d if sizes.fixed is None else nn.BatchNorm2d
    blocks, inputs = [], widths[0]
    for s, outputs in enumerate(widths, 1):
        for b in range(depths[-1]):
            name = f"stage{s}_block{b}"
            blocks.append((name, f"stage{s}.depth", partial(
                ElasticResidual, inputs, outputs, sizes(f"{name}.width"), sizes(f"{name}.kernel"), 2 if s > 1 and not b else 1,
                norm)))
            inputs = outputs
    return sizes.finished(nn.Sequential(
        ("input", Check("elastic_resnet", (None, channels, None, None), "set model.channels")),
        ("conv", nn.Conv2d(channels, widths[0], 3, padding=1, bias=False, weight_init=HE)),
        ("norm", norm(widths[0], activation="relu")), *sizes.kept(blocks),
        ("pool", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten()), ("head", nn.Linear(inputs, classes))))


def _require_shares(inner: Any, widths: Sequence[int]) -> None:
    if isinstance(inner, str) or not isinstance(inner, Sequence) or not inner:
        raise ConfigError(f"model.inner is a list of numbers above 0, found {inner!r}; change model.inner")
    require_positive(**{f"inner[{i}]": share for i, share in enumerate(inner)})
    for outputs in widths:
        sizes = [int(share * outputs) for share in inner]
        if sizes[0] < 1 or sizes != sorted(set(sizes)):
            raise ConfigError(f"model.inner = {list(inner)} makes {sizes} channels of a stage's {outputs}, expected 1 or more "
                              "that rise; change model.inner or model.widths")


class ElasticMlpBlock(ElasticBlock):
    """x + narrow(wide(norm(x))), of (B, D), with an elastic width inside."""

    def __init__(self, width: int, hidden: Size, activation: str):
        self.norm = nn.LayerNorm(width)
        self.wide = linear(width, hidden, activation=activation, weight_init=init.kaiming_normal(), bias_init=init.zeros)
        self.narrow = linear(hidden, width, weight_init=init.xavier_uniform(), bias_init=init.zeros)

    def compute(self, x: Any) -> Tensor:
        out: Tensor = ops.add(x, self.narrow(self.wide(self.norm(x))))
        return out


def elastic_mlp(inputs: int, outputs: int, width: int = 64, hidden: Sequence[int] = (32, 64, 128),
                depths: Sequence[int] = (1, 2, 3), activation: str = "relu", sampling: str = "uniform",
                path: str = "") -> nn.Sequential:
    """A supernet of residual multi-layer perceptrons; a sample of any shape with `inputs` numbers is flattened.

    `depths` says how many blocks there can be, and `hidden` how wide each can be inside; between blocks are `width` numbers.
    """
    require_sizes(inputs=inputs, outputs=outputs, width=width)
    require_options(hidden=hidden, depths=depths)
    ACTIVATIONS.resolve(activation)
    depth = Choice(depths)
    sizes = Sizes({"depth": depth, **{f"block{i}.width": Choice(hidden, depth, i) for i in range(depths[-1])}}, sampling, path)
    blocks = [(f"block{i}", "depth", partial(ElasticMlpBlock, width, sizes(f"block{i}.width"), activation))
              for i in range(depths[-1])]
    return sizes.finished(nn.Sequential(
        ("flatten", nn.Flatten(inputs)),
        ("embed", nn.Linear(inputs, width, activation=activation, weight_init=init.kaiming_normal(), bias_init=init.zeros)),
        *sizes.kept(blocks), ("norm", nn.LayerNorm(width)),
        ("head", nn.Linear(width, outputs, weight_init=init.xavier_uniform(), bias_init=init.zeros))))


class ElasticGptBlock(Block, ElasticBlock):
    """A block of `gpt` with elastic heads and an elastic width inside of its MLP; a head keeps its width."""

    def __init__(self, width: int, heads: Size, head_width: int, hidden: Size, layers: int, dropout: float, bias: bool,
                 activation: str):
        super().__init__(width, largest_of(heads), head_width, largest_of(hidden), layers, dropout, bias, {}, activation)
        small, plain = init.normal(STD / math.sqrt(2 * layers)), init.normal(STD)
        attention = self.attention
        if isinstance(heads, Choice):
            attention.qkv = linear(width, heads, bias, groups=3, out_unit=head_width, weight_init=plain, bias_init=init.zeros)
            attention.out = linear(heads, width, bias, in_unit=head_width, weight_init=small, bias_init=init.zeros)
        if isinstance(hidden, Choice):
            self.wide = linear(width, hidden, bias, activation=activation, weight_init=plain, bias_init=init.zeros)
            self.narrow = linear(hidden, width, bias, weight_init=small, bias_init=init.zeros)

    def forward(self, x: Any) -> Any:
        return ElasticBlock.forward(self, x)

    def compute(self, x: Any) -> Tensor:
        return Block.forward(self, x)


def elastic_gpt(depths: Sequence[int], heads: Sequence[int], hidden: Sequence[int], width: int, block: int, vocabulary: int,
                head_width: int | None = None, dropout: float = 0.0, bias: bool = False, activation: str = "gelu",
                sampling: str = "uniform", path: str = "") -> nn.Sequential:
    """A supernet of decoders such as `gpt`: `depths` says how many blocks there can be, `heads` how many heads each can have and
    `hidden` how wide its MLP can be inside. `head_width` is the width over the most heads by default."""
    require_options(depths=depths, heads=heads, hidden=hidden)
    require_sizes(width=width, block=block, vocabulary=vocabulary)
    if head_width is None and width % heads[-1]:
        raise ConfigError(f"a width of {width} cannot be cut into {heads[-1]} heads; change model.width or model.heads, or set "
                          "model.head_width")
    each = width // heads[-1] if head_width is None else head_width
    require_sizes(head_width=each)
    depth = Choice(depths)
    choices = {"depth": depth}
    for i in range(depths[-1]):
        choices[f"block{i}.heads"], choices[f"block{i}.width"] = Choice(heads, depth, i), Choice(hidden, depth, i)
    sizes = Sizes(choices, sampling, path)
    blocks = [(f"block{i}", "depth", partial(ElasticGptBlock, width, sizes(f"block{i}.heads"), each, sizes(f"block{i}.width"),
                                            depths[-1], dropout, bias, activation))
              for i in range(depths[-1])]
    embed = Embed(vocabulary, block, width, dropout)
    return sizes.finished(nn.Sequential(("embed", embed), *sizes.kept(blocks), ("norm", nn.LayerNorm(width, bias=bias)),
                                        ("head", Head(embed.token.weight))))
