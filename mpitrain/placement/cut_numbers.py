"""Where numbers go that are cut over tensor-parallel ranks: from a "column" through layers that treat them apart to a "row".

    x -- column --> some features or channels on each rank --> activation, pooling, "channels" ... --> row --> whole again

What a module does is what its class declares (`by_element`, `by_channel`, `chains`, `paths`); nothing is known of the others, and
so they are refused. A plan is followed along every Sequential, and along the chains and paths that other classes name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from mpitrain import nn
from mpitrain.errors import ConfigError
from mpitrain.nn.module import declared

WHOLE_INPUTS = ("column", "gathered", "vocabulary", "sequence")


Chain: TypeAlias = list[tuple[str, nn.Module]]                # names and modules


class Cut(NamedTuple):
    """What each rank has some of, and the layer that it comes from: "features" are the last dim, "channels" are dim 1."""

    what: str
    by: str


def follow(model: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """What is cut of the inputs of each "channels" layer, by name; `styles` are those of all layers of a plan.

    ConfigError where cut numbers come to a module that does not declare what it does with them, or leave what is known of.
    """
    modules = dict(model.named_modules())
    walk = _Walk({id(modules[path]): style for path, style in styles.items()})
    ways = {path: (_chains(path, module), _paths(path, module)) for path, module in modules.items()}
    inside = {id(module) for both in ways.values() for way in (*both[0], *both[1]) for _, module in way}
    for path, (chains, paths) in ways.items():
        for chain in chains:
            walk.from_whole_to_whole(path, chain)
        for chain in paths if id(modules[path]) not in inside else ():          # else it is part of another chain
            walk.from_whole_to_whole(path, chain)
    for path, style in styles.items():
        if style in ("column", "row", "channels") and id(modules[path]) not in walk.seen:
            parent = path.rpartition(".")[0]
            while parent not in modules:                      # a list is no module
                parent = parent.rpartition(".")[0]
            owner = modules[parent]
            raise ConfigError(f'mesh.plan: "{path}" is "{style}" in "{parent or "the model"}" ({type(owner).__name__}), which '
                              "does not say where its numbers go from a column to a row; name the layers between them in its "
                              'class, chains = (("column", ..., "row"),), or make columns "gathered" and leave rows out')
    return walk.cuts


class _Walk:
    def __init__(self, styles: Mapping[int, str]):
        self.styles, self.seen, self.cuts = styles, set[int](), dict[str, str]()

    def from_whole_to_whole(self, path: str, chain: Sequence[tuple[str, nn.Module]]) -> None:
        cut = self.along(chain, None)
        if cut is not None:
            raise ConfigError(f'mesh.plan: the outputs of "{cut.by}" leave "{path or "the model"}" cut; let a "row" follow, or '
                              f'make "{cut.by}" "gathered"')

    def along(self, chain: Sequence[tuple[str, nn.Module]], cut: Cut | None) -> Cut | None:
        for name, module in chain:
            cut = self.through(name, module, cut)
        return cut

    def through(self, path: str, module: nn.Module, cut: Cut | None) -> Cut | None:
        """What is cut of the outputs of a module."""
        style = self.styles.get(id(module), "")
        self.seen.add(id(module))
        if style in WHOLE_INPUTS:
            if cut is not None:
                raise ConfigError(f'mesh.plan: "{path}" is "{style}", which is for whole inputs, and takes the outputs of '
                                  f'"{cut.by}", of which each rank has some; make "{cut.by}" "gathered", or let a "row" come '
                                  "between them")
            return Cut("channels" if declared(module, "channel_dims") else "features", path) if style == "column" else None
        if style in ("row", "channels"):
            if cut is None or (cut.what == "features" and declared(module, "channel_dims")):
                found = "are whole" if cut is None else f'have other dims cut by "{cut.by}"'
                raise ConfigError(f'mesh.plan: "{path}" is "{style}", and its inputs {found}; make the layer before it "column", '
                                  f'or leave "{path}" whole')
            self.cuts[path] = cut.what
            return None if style == "row" else cut
        if paths := _paths(path, module):
            ends = [self.along(chain, cut) for chain in paths]
            if None in ends and any(ends):
                some = next(end.by for end in ends if end is not None)
                whole = next(f'those of "{chain[-1][0]}", which are' if chain else "its input, which is"
                             for chain, end in zip(paths, ends) if end is None)
                raise ConfigError(f'mesh.plan: "{path}" ({type(module).__name__}) puts together the outputs of "{some}", of '
                                  f"which each rank has some, and {whole} whole; cut both, or none")
            return ends[0]
        if cut is not None:
            _refuse(path, module, cut)
        return cut


def _refuse(path: str, module: nn.Module, cut: Cut) -> None:
    """ConfigError unless `module` declares that it treats what is cut apart."""
    takes = f'mesh.plan: "{path}" takes the outputs of "{cut.by}", of which each rank has some'
    if isinstance(module, nn.Dropout) and module.p:
        raise ConfigError(f'{takes}; give it the style "channels", so that it drops what one rank would')
    if isinstance(module, nn.Linear) or declared(module, "channel_dims"):
        instead = "channels" if vars(module).get("groups", 1) > 1 else "row"
        raise ConfigError(f'{takes}; make it "{instead}", or "{cut.by}" "gathered"')
    which = "by_element" if cut.what == "features" else "by_channel"
    if not (declared(module, "by_element") or (which == "by_channel" and declared(module, which))):
        each = "number" if which == "by_element" else "channel"
        raise ConfigError(f'{takes}, and {type(module).__name__} does not declare that it treats each {each} by itself and draws '
                          f'no random ones; make "{cut.by}" "gathered", or, if it does, set {which} = True in its class')
    own = next((name for name, _ in module.named_parameters()), "")
    if own:
        raise ConfigError(f'{takes}, and has the parameter "{own}", whose gradient would be a part on each; make "{cut.by}" '
                          '"gathered"')


def _is_sequential(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _chains(path: str, module: nn.Module) -> list[Chain]:
    """The chains of a module whose layers are all there."""
    return [] if _is_sequential(module) else _there(path, module, declared(module, "chains"))


def _paths(path: str, module: nn.Module) -> list[Chain]:
    """The chains from the input of a module to its output; none where they are not known."""
    if isinstance(module, nn.Sequential) and _is_sequential(module):
        start = f"{path}." if path else ""
        return [[(start + name, block) for name, block in module.blocks.items()]]
    paths = declared(module, "paths")
    found = _there(path, module, paths)
    return found if len(found) == len(paths) else []


def _there(path: str, module: nn.Module, chains: Sequence[Sequence[str]]) -> list[Chain]:
    start, below = f"{path}." if path else "", dict(module.named_modules()) if chains else {}
    return [[(start + name, below[name]) for name in chain] for chain in chains if all(name in below for name in chain)]
