"""Which layers of a model are cut over tensor-parallel ranks, and how: a plan beside the model, patterns of names -> styles.

    {"block*.attention.qkv": "column", "block*.attention.out": "row", "embed.token": "vocabulary", "head": "vocabulary"}

A star stands for any part of a name between two dots. Nothing is allocated or sent here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from mpitrain import nn
from mpitrain.errors import ConfigError, MeshError, nearest
from mpitrain.nn.module import declared
from mpitrain.nn.parameter import Described, Parameter
from mpitrain.placement.cut_numbers import follow

PRODUCTS = nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d         # and other layers that declare their `channel_dims`
STYLES: dict[str, tuple[tuple[type[nn.Module], ...], str]] = {
    "column": (PRODUCTS, "outputs are cut: each rank has some of them"),
    "row": (PRODUCTS, "inputs are cut: ranks' products are added"),
    "gathered": (PRODUCTS, "outputs are cut, and put together on all ranks"),
    "vocabulary": ((nn.Embedding, nn.Linear), "rows of a table of tokens are cut, or the logits that the loss takes"),
    "channels": ((nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm, nn.Dropout, nn.Conv1d, nn.Conv2d, nn.Conv3d),
                 "channels are cut, like those of the layer before"),
    "sequence": ((nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.DropoutAdd, nn.Embedding),
                 "with mesh.sequence = true, positions are cut"),
}


@dataclass(frozen=True)
class Layer:
    """A layer of the plan."""

    path: str
    module: nn.Module
    style: str
    cut: str = ""                                             # of the inputs of "row" and "channels": "features" or "channels"

    @property
    def outputs(self) -> int:
        """How many outputs a Linear has, over all ranks."""
        weight: Parameter = vars(self.module)["weight"]
        return weight.global_shape[0]

    @property
    def first(self) -> int:
        """The first of the outputs that this rank has."""
        weight: Parameter = vars(self.module)["weight"]
        return weight.offset[0]


@dataclass(frozen=True)
class Slit:
    """A cut of `leaf` along `dim`: each of `groups` has `count` units that stay whole, called `what` in messages."""

    layer: Layer
    leaf: Described
    dim: int
    count: int
    unit: int = 1
    groups: int = 1
    what: str = ""
    even: bool = True


def read_plan(model: nn.Module, plan: Mapping[str, str]) -> list[Layer]:
    """The layers that a plan names. ConfigError for a pattern that matches nothing, and for a layer that cannot be cut so."""
    if not plan:
        raise ConfigError("mesh.tp cuts layers by a plan, and this model has none; give it one in mesh.plan, for instance "
                          '{"block*.wide" = "column", "block*.narrow" = "row"}, or set mesh.tp = 1')
    modules = {path: module for path, module in model.named_modules() if path}
    found: dict[str, tuple[str, str]] = {}                    # (pattern, style) by path
    for pattern, style in plan.items():
        if not isinstance(style, str) or style not in STYLES:
            raise ConfigError(f'mesh.plan: the style "{style}" of "{pattern}" is not there{nearest(str(style), STYLES)}')
        matching = [path for path in modules if _matches(path, pattern)]
        if not matching:
            raise ConfigError(f'mesh.plan: no layer matches "{pattern}"{nearest(pattern, modules)}')
        for path in matching:
            other, before = found.setdefault(path, (pattern, style))
            if before != style:
                raise ConfigError(f'mesh.plan: "{path}" is "{before}" by "{other}" and "{style}" by "{pattern}"; keep one of '
                                  "them")
    layers = [Layer(path, modules[path], style) for path, (_, style) in found.items()]
    for layer in layers:
        _refuse_style(layer, list(modules))
    _refuse_two_ways(model, layers)
    cuts = follow(model, {layer.path: layer.style for layer in layers})
    return [replace(layer, cut=cuts.get(layer.path, "")) for layer in layers]


def narrow(layers: Sequence[Layer], rank: int, n: int) -> None:
    """Keeps rank `rank`'s part of `n` of every parameter and buffer of the plan. MeshError where n parts do not fit."""
    slits = [slit for layer in layers for slit in _slits(layer)]
    refuse_sizes(slits, n)
    done: set[int] = set()                                    # A tied parameter is cut once.
    for slit in slits:
        if id(slit.leaf) not in done:
            done.add(id(slit.leaf))
            start, stop = (place * slit.count // n * slit.unit for place in (rank, rank + 1))
            slit.leaf.narrow("tp", slit.dim, start, stop, groups=slit.groups)
    for layer in layers:
        own = vars(layer.module)
        own.update({count: own[count] // n for count in ("features", "groups") if layer.style == "channels" and count in own})


def refuse_sizes(slits: Sequence[Slit], n: int) -> None:
    """MeshError naming the first number that n does not divide, and the nearest ranks that fit the whole model."""
    fitting = math.gcd(*(slit.count for slit in slits if slit.even))
    most = min(slit.count for slit in slits)
    good = [m for m in range(1, most + 1) if fitting % m == 0]
    for slit in slits:
        if n not in good and (slit.count % n if slit.even else slit.count < n):
            verb = "does not divide" if slit.even else "is more than"
            raise MeshError(f'mesh.tp = {n} {verb} the {slit.count} {slit.what} of "{slit.layer.path}"; '
                            f"{nearest_text('tp', n, good)}")


def refuse_unnamed(model: nn.Module, layers: Sequence[Layer]) -> None:
    """ConfigError for a layer that `mesh.sequence` would give some positions of a sample, and that no style tells so.

    Its parameters would have the gradients of these positions alone, and what it draws would not be what one rank does. The
    dropout of attention is of its weights, of which each rank has whole heads; `DropPath` drops samples.
    """
    modules, of_plan = dict(model.named_modules()), {id(layer.module) for layer in layers}
    fits = STYLES["sequence"][0]
    for path, module in modules.items():
        own = next((name for name, leaf in vars(module).items() if isinstance(leaf, Parameter)), "")
        of_weights = isinstance(modules.get(path.rpartition(".")[0]), nn.MultiHeadAttention)
        draws = isinstance(module, (nn.Dropout, nn.DropoutAdd, nn.AlphaDropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)) and \
            module.p > 0 and not of_weights or isinstance(module, nn.RReLU)
        if id(module) in of_plan or not (own or draws):
            continue
        why = f'its parameter "{own}" would have the gradients of some positions alone' if own else \
            "it would drop other numbers than one rank does"
        how = 'give it the style "sequence" in mesh.plan' if isinstance(module, fits) else \
            f'give it a style in mesh.plan ("sequence" is for {", ".join(kind.__name__ for kind in fits)})'
        raise ConfigError(f'mesh.sequence = true cuts activations along the sequence, and the plan does not name "'
                          f'{path or "the model"}" ({type(module).__name__}): {why}; {how}, or set mesh.sequence = false')


def nearest_text(axis: str, n: int, good: Sequence[int]) -> str:
    """The numbers of ranks below and above `n` that are `good`, in words."""
    near = [*[m for m in good if m < n][-1:], *[m for m in good if m > n][:1]]
    return f"the nearest that fits the whole model: mesh.{axis} = {' or '.join(map(str, near))}"


def _slits(layer: Layer) -> Iterator[Slit]:
    """The cuts of a layer."""
    module, style = layer.module, layer.style
    own = vars(module)
    if style == "channels":
        for leaf in (own.get(name) for name in ("weight", "bias", "running_mean", "running_var")):
            if leaf is not None:
                count = own.get("groups", leaf.global_shape[0])
                yield Slit(layer, leaf, 0, count, leaf.global_shape[0] // count, what="groups" if "groups" in own else "channels")
        return
    weight: Parameter | None = own.get("weight")
    if style == "sequence" or weight is None:
        return
    inputs = style == "row"
    dim = (declared(module, "channel_dims") or (0, 1))[inputs]
    unit = (module.in_unit if inputs else module.out_unit) if isinstance(module, nn.Linear) else 1
    groups = module.out_groups if isinstance(module, nn.Linear) and not inputs else 1
    count = weight.global_shape[dim] // (unit * groups)
    what = _word(module, inputs, unit)
    even = style != "vocabulary"
    yield Slit(layer, weight, dim, count, unit, groups, what, even)
    if not inputs and own.get("bias") is not None:
        yield Slit(layer, own["bias"], 0, count, unit, groups, what, even)
    if isinstance(module, nn.Linear) and dim in module.alike:
        yield Slit(layer, own[module.alike[dim]], dim, count, unit, groups, what, even)


def _word(module: nn.Module, inputs: bool, unit: int) -> str:
    if unit > 1:
        return "heads"
    if declared(module, "channel_dims"):
        return "input channels" if inputs else "output channels"
    if isinstance(module, nn.Embedding):
        return "rows"
    return "inputs" if inputs else "outputs"


def _matches(path: str, pattern: str) -> bool:
    names, patterns = path.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def _refuse_style(layer: Layer, paths: Sequence[str]) -> None:
    path, module, style = layer.path, layer.module, layer.style
    kinds, means = STYLES[style]
    if isinstance(module, nn.LowBitLinear | nn.LowBitEmbedding):
        raise ConfigError(f'mesh.plan: "{path}" is in few bits, and such a layer is not cut along tp; set mesh.tp = 1 and use '
                          f'mesh.pp or mesh.dp, or take the run of floats, or one made with: quantize --skip "{path}"')
    dims = declared(module, "channel_dims")
    if not (isinstance(module, kinds) or (dims and nn.Conv2d in kinds)):
        fits = [name for name, (others, _) in STYLES.items() if isinstance(module, others)]
        instead = f"; such a layer may be {' or '.join(fits)}" if fits else "; name the layers in it"
        raise ConfigError(f'mesh.plan: "{path}" is a {type(module).__name__}, and "{style}" ({means}) is for '
                          f"{', '.join(kind.__name__ for kind in kinds)}{instead}")
    kind = next((kind for kind in kinds if isinstance(module, kind)), type(module))
    if type(module).forward is not kind.forward and not (isinstance(module, nn.Linear) and module.alike):
        raise ConfigError(f'mesh.plan: "{path}" is a {type(module).__name__}, a {kind.__name__} with a forward of its own, which '
                          "ranks that have a part would not follow; leave it whole")
    if (dims or isinstance(module, nn.Linear | nn.Embedding)) and "weight" not in vars(module):
        raise ConfigError(f'mesh.plan: "{path}" is a {type(module).__name__} without a weight of its own, which cannot be cut; '
                          "leave it whole")
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        raise ConfigError(f'mesh.plan: "{path}" is an Embedding with max_norm, whose rows change with what each rank looks up; '
                          "leave it whole, or leave max_norm out")
    after = vars(module).get("after")
    if style in ("column", "gathered", "vocabulary", "channels") and after is not None and (
            not declared(after, "by_element") or after.parameters()):
        raise ConfigError(f'mesh.plan: "{path}" has the activation {type(after).__name__}, which does not declare that it treats '
                          'each number by itself (by_element), and each rank would have some of them; leave it whole')
    groups = vars(module).get("groups", 1)
    if dims and (groups > 1) != (style == "channels"):
        raise ConfigError(f'mesh.plan: "{path}" is a convolution of {groups} groups, whose ranks each have whole groups; make it '
                          '"channels", between a "column" and its "row", or leave it whole' if groups > 1 else
                          f'mesh.plan: "{path}" is a convolution of one group, and "channels" is for several, of which each rank '
                          'has some; make it "column" or "row"')
    if style == "vocabulary" and isinstance(module, nn.Linear) and path != paths[-1]:
        raise ConfigError(f'mesh.plan: the outputs of "{path}" go on to "{paths[-1]}", and "vocabulary" leaves them cut for the '
                          'loss; make it "gathered"')


def _refuse_two_ways(model: nn.Module, layers: Sequence[Layer]) -> None:
    """ConfigError for a tied parameter that is not cut alike in all its uses."""
    names = {id(p): p.twin_of or name for name, p in model.named_parameters()}
    cuts = {(slit.layer.path, names[id(slit.leaf)]): slit.dim for layer in layers for slit in _slits(layer)
            if isinstance(slit.leaf, Parameter)}
    dims = {name: dim for (_, name), dim in cuts.items()}
    for path, module in model.named_modules():
        for value in vars(module).values():
            name = names.get(id(value))
            if name in dims and cuts.get((path, name)) != dims[name]:
                others = [other for other, key in cuts if key == name and other != path]
                raise ConfigError(f'mesh.plan: "{path}" shares the parameter "{name}" with "{others[0]}", which cuts it along '
                                  f"dim {dims[name]}; cut it alike in both")
