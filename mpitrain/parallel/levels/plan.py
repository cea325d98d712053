"""What [[sync]] asks for, checked before any allocation or message: who meets whom, after which steps, with which rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from mpitrain.config import Config
from mpitrain.config.levels import Level as Table
from mpitrain.config.levels import levels_of, make_outer
from mpitrain.config.messages import toml
from mpitrain.config.topology import GRAPHS
from mpitrain.errors import ConfigError, nearest
from mpitrain.optim.outer import OuterRule
from mpitrain.parallel.levels.rounds import Rounds
from mpitrain.registry import named
from mpitrain.schedules.graph_check import METHODS, Proved, check_graph
from mpitrain.schedules.grid import REPLICAS, Grid

if TYPE_CHECKING:
    from mpitrain.nn import Module

ORDER = ("node", "site", "workers")              # from the inside out
KEPT = ("start", "sent", "sum_error")                         # states that are no rule's


@dataclass(frozen=True)
class Planned:
    """The level between sites."""

    table: Table
    rounds: Rounds
    rule: OuterRule | None                       # None: gradients are added up, in each step, or there is a graph
    graph: Proved | None = None                  # of the sites that meet


def plan(config: Config, grid: Grid, model: Module, steps: int, steps_per_epoch: int, closure: str = "") -> Planned | None:
    """The level of the sites of a run of so many steps; None where there is one site. ConfigError for what cannot be had.

    `model` is whole, and may be without memory; `closure` names an optimizer that computes the loss several times.
    """
    tables = levels_of(config)
    for message in _order(tables):
        raise config.wrong(message, ("sync.levels",))
    if any(table.over == "workers" for table in tables) and not config.workers.count:
        raise config.wrong('[[sync]] over = "workers" is of the clients of [workers], and workers.count = 0; set over = "site" '
                           "and mesh.site, or workers.count", ("sync.levels", "workers.count"))
    table = next((table for table in tables if table.over == "site"), None)
    if grid.n_sites == 1:
        if table is not None:
            raise config.wrong('[[sync]] meets over "site", and mesh.site = 1: there is nobody to meet; set mesh.site to the '
                               "number of groups of ranks that train apart, 2 or more", ("sync.levels", "mesh.site"))
        return None
    if table is None:
        raise config.wrong(f"mesh.site = {grid.n_sites} trains as many models, and no [[sync]] says when they meet; add one with "
                           'over = "site" and every, or set mesh.site = 1', ("sync.levels", "mesh.site"))
    for found, instead in refused(config, closure):
        raise config.wrong(f"mesh.site = {grid.n_sites} has sites that train apart, found {found}; {instead}, or set mesh.site "
                           "= 1", ("mesh.site",))
    every = table.every if isinstance(table.every, int) else int(table.every.split()[0]) * steps_per_epoch
    rounds = Rounds(every, table.after, table.fragments, table.delay, steps)
    for message in (*_of_gradients(table), *_of_graph(table), *_times(table, rounds, steps), *_fragments(table, rounds, model)):
        raise config.wrong(message, ("sync.levels",))
    if table.graph:
        return Planned(table, rounds, None, prove(config, table, grid.n_sites))
    if table.what == "gradients":
        return Planned(table, rounds, None)
    if table.compress:
        refuse_compressed(config, grid, table, model)
    rule = make_outer(table.outer, table.lr, table.arguments, config.folder)
    for name in rule.states:
        if name in KEPT or "/" in name:
            raise config.wrong(f'outer = "{table.outer}" has a state called "{name}"; give it another name, without "/", that is '
                               f"none of {', '.join(KEPT)}", ("sync.levels",))
    return Planned(table, rounds, rule)


def describe(planned: Planned, sites: int) -> str:
    """Who meets when, and what travels."""
    table, rounds = planned.table, planned.rounds
    if planned.graph is not None:
        after = f", after {rounds.after} steps that add up gradients" if rounds.after else ""
        often = "in each step" if rounds.every == 1 else f"every {rounds.every} steps"
        return f"{sites} sites meet their neighbours {often}{after}, by {planned.graph.method}; {planned.graph}"
    if planned.rule is None:
        late = f", which take effect {rounds.delay} steps later" if rounds.delay else ""
        return f"{sites} sites add up their gradients in each step{late}"
    first = f"gradients in each of the first {rounds.after} steps, then " if rounds.after else ""
    coded = f" as {table.compress}" if table.compress else ""
    parts = f" in {rounds.fragments} fragments" if rounds.fragments > 1 else ""
    late = f", which take effect {rounds.delay} steps later" if rounds.delay else ""
    return f"{sites} sites exchange {first}parameters{coded} every {rounds.every} steps{parts}{late}, outer rule {table.outer}"


def refuse_compressed(config: Config, grid: Grid, table: Table, model: Module) -> None:
    """ConfigError for a compressor that is not there, keeps what no checkpoint of sites has, or has no whole parameters to work
    on."""
    from mpitrain.parallel.compress.compressor import Piece, make_compressor
    what = f'[[sync]] compress = "{table.compress}"'
    try:
        make = make_compressor(table.compress, config.folder)
    except ConfigError as error:
        raise config.wrong(error.message.replace("comm.compress =", "[[sync]] compress =", 1), ("sync.levels",)) from None
    for name, p in model.named_parameters() if not make.own else ():
        states = make([Piece(name, 0, prod(p.global_shape), 0, p.global_shape)], grid.n_sites).states()
        if any(kept.of == "all" for kept in states.values()):
            raise config.wrong(f"{what} keeps matrices of its own; use int8, int4, levels, onebit or topk", ("sync.levels",))
    if grid.count(REPLICAS) > 1 and (config.comm.cuts != "none" or config.comm.node_shared):
        raise config.wrong(f"{what} needs whole parameters on each rank, found comm.sharding or comm.node_shared, which cut them "
                           "into slices; leave these out, or compress", ("sync.levels",))
    if config.train.precision == "float64":
        raise config.wrong(f'{what} is for parameters of float32, found train.precision = "float64"; leave compress out',
                           ("sync.levels",))


def _order(tables: Sequence[Table]) -> Iterator[str]:
    seen: list[str] = [table.over for table in tables]
    for over in ORDER:
        if seen.count(over) > 1:
            yield f'two [[sync]] tables meet over "{over}": the same ranks; leave one of them out'
    if [ORDER.index(over) for over in seen] != sorted(ORDER.index(over) for over in seen):
        yield (f"[[sync]] tables go from the inside out, {', '.join(ORDER)}, found {', '.join(seen)}: put them in this order")
    for table in tables:
        if table.over == "node" and table != Table(over="node", what="gradients"):
            yield ('[[sync]] over = "node" is what each step does: what = "gradients", every = 1, and no other key; its exchange '
                   "is set in [comm]")


def refused(config: Config, closure: str = "") -> Iterator[tuple[str, str]]:
    """What goes with no sites: (what was found, what to set instead)."""
    t = config.train
    if t.reproducible == "layout":
        yield 'train.reproducible = "layout", which adds up the micro-batches of all ranks in one tree', 'set it to "run"'
    if t.on_nan != "stop":
        yield f'train.on_nan = "{t.on_nan}", which leaves out a step of all ranks', 'set it to "stop"'
    if t.on_lost != "stop":
        yield f'train.on_lost = "{t.on_lost}", and what a lost site has learned is nowhere else', 'set it to "stop"'
    if t.precision == "float16":
        yield 'train.precision = "float16", whose loss scale all ranks share', 'set it to "bfloat16" or "float32"'
    if config.average.kind != "none":
        yield f'average.kind = "{config.average.kind}", an average of one model\'s weights', 'set it to "none"'
    if config.shrink.prune:
        yield f'shrink.prune = "{config.shrink.prune}", whose zeros would be others on each site', 'set it to ""'
    if config.comm.compress:
        yield f'comm.compress = "{config.comm.compress}"', "set compress in [[sync]] instead, for what travels between sites"
    if config.comm.compress_parameters:
        yield (f'comm.compress_parameters = "{config.comm.compress_parameters}", whose rounded values would be others on each '
               'site', 'set it to ""')
    if config.workers.count:
        yield f"workers.count = {config.workers.count}, a federation of its own", "set it to 0"
    if closure:
        yield f"{closure}, which asks for the loss of all ranks several times in a step", "use another optimizer.name"


def _of_graph(table: Table) -> Iterator[str]:
    if not table.graph:
        return
    for key, default in (("outer", "average"), ("lr", 1.0), ("fragments", 1), ("delay", 0), ("alpha", 1.0), ("compress", "")):
        if (found := getattr(table, key)) != default:
            yield (f"[[sync]] graph = {toml(table.graph)} averages parameters of neighbours by the weights of the graph, found "
                   f"{key} = {toml(found)}; leave it out")
    if unknown := sorted(table.arguments.keys() - {"method", "period"}):
        yield (f"[[sync]] with a graph has no key {unknown[0]}{nearest(unknown[0], ('method', 'period'))}; there are method and "
               "period beside those of every level")
    if (method := table.arguments.get("method", "d-psgd")) not in METHODS:
        yield f'sync.method must be "d-psgd" or "push-sum", found {toml(method)}'


def prove(config: Config, table: Table, n_sites: int) -> Proved:
    """The graph of a level. ConfigError where it is wrong on so many sites."""
    graph = GRAPHS.resolve(table.graph, config.folder)
    if not callable(graph):
        raise config.wrong(f"sync.graph = {toml(table.graph)} must be a function of (round, n) that yields (from, to, weight), "
                           f"found {named(graph)}", ("sync.levels",))
    return check_graph(graph, n_sites, table.arguments.get("period"), method=table.arguments.get("method", "d-psgd"),
                       name=table.graph)


def _of_gradients(table: Table) -> Iterator[str]:
    if table.what != "gradients":
        return
    for key, default in (("every", 1), ("outer", "average"), ("lr", 1.0), ("fragments", 1), ("alpha", 1.0), ("after", 0),
                         ("compress", ""), ("graph", ""), ("arguments", {})):
        found = getattr(table, key)
        if found != default:
            shown = ", ".join(found) if key == "arguments" else f"{key} = {toml(found)}"
            yield (f'[[sync]] what = "gradients" adds up the gradients of each step, perhaps those of `delay` steps ago, found '
                   f'{shown}; leave it out, or set what = "parameters"')


def _times(table: Table, rounds: Rounds, steps: int) -> Iterator[str]:
    every, after, fragments, delay, _ = rounds
    if table.what == "gradients":
        if delay >= steps:
            yield f"[[sync]] delay = {delay} is beyond the run, which has {steps} steps: nothing would be updated; set it to less"
        return
    if after + every > steps:
        beyond = f"[[sync]] every = {toml(table.every)}" + (f" after = {after}" if after else "")
        yield (f"{beyond} is beyond the run, which has {steps} steps: sites would not meet; set every to {max(1, steps - after)} "
               "or less")
    if fragments > every:
        yield (f"[[sync]] fragments = {fragments} leave one after the other in the {every} steps of a round; set fragments to "
               f"{every} or less, or every to {fragments} or more")
    elif delay >= every // fragments and delay:
        yield (f"[[sync]] delay = {delay} steps is not less than every / fragments = {every // fragments}: the next fragment "
               f"would leave before this one has landed; set delay to {every // fragments - 1}"
               + (" or less" if every // fragments > 1 else ""))


def _fragments(table: Table, rounds: Rounds, model: Any) -> Iterator[str]:
    found = len(trained(model))
    if rounds.fragments > found:
        yield (f"[[sync]] fragments = {rounds.fragments} are cut between the parameters of the model, which has {found} that are "
               f"trained; set fragments to {found} or less")


def trained(model: Any) -> list[tuple[str, int]]:
    """The names and sizes of the parameters of the whole model that are ever trained."""
    found = {p.twin_of or name: p for name, p in model.named_parameters() if p.trained_from != float("inf")}
    sizes = dict.fromkeys(found, 1)
    for name, p in found.items():
        for n in p.global_shape:
            sizes[name] *= n
    return list(sizes.items())
