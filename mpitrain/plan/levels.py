"""What the level between sites will send and keep, from shapes alone: for `inspect`, and for the forecast of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpitrain.comm.messages.prepare import make_plan
from mpitrain.comm.messages.signature import HEADER_BYTES
from mpitrain.config import Config
from mpitrain.config.levels import Level as Table
from mpitrain.config.levels import levels_of, make_outer
from mpitrain.nn import FlatLayout
from mpitrain.parallel.compress.check import check_compressor
from mpitrain.parallel.compress.compressor import Make, Piece, make_compressor
from mpitrain.parallel.compress.programs import program_of
from mpitrain.parallel.levels.fragments import fragments_of
from mpitrain.parallel.levels.plan import Planned, describe, prove, trained
from mpitrain.placement.place import Placement
from mpitrain.schedules.collectives import choose

MIB = 2**20


def level_bytes(config: Config, p: Placement) -> int:
    """Bytes that a rank keeps for its level: start values, outer states, what travels, and what compressed messages left out."""
    table = next((table for table in levels_of(config) if table.over == "site"), None)
    if p.grid.n_sites == 1 or table is None:
        return 0
    layout, cut = p.layout(), 1 if p.kind == "none" else p.grid.count(("dp", "ep", "cp"))
    size, travels = (-(-n // cut) for n in (layout.size, sum(_fragments(layout, {}, 1))))
    if table.what == "gradients":
        return layout.dtype.itemsize * (table.delay + 1) * travels
    if table.graph:
        graph = prove(config, table, p.grid.n_sites)
        row = layout.dtype.itemsize * travels
        return (1 + graph.slots) * (row + graph.tail) + row * (table.after > 0)
    states = make_outer(table.outer, table.lr, table.arguments, config.folder).states
    left_out = len(make_compressor(table.compress, config.folder)((), p.grid.n_sites).states()) if table.compress else 0
    return layout.dtype.itemsize * ((1 + len(states)) * size + (1 + left_out + (table.after > 0)) * travels)


def level_lines(config: Config, stages: Sequence[Placement], planned: Planned) -> Iterator[str]:
    """Who meets when, the bytes of the rank that sends most, and its memory."""
    n, table = stages[0].grid.n_sites, planned.table
    fragment_of = fragments_of(trained(stages[0].stage.whole), table.fragments)
    costs = []
    for p in stages:
        layout = p.layout()
        dense = sum(_posted(n, length, layout.dtype.itemsize) for length in _fragments(layout, {}, 1))
        if planned.graph is not None:
            row = sum(_fragments(layout, {}, 1)) * layout.dtype.itemsize + planned.graph.tail
            costs.append(((HEADER_BYTES + planned.graph.sent * row) / planned.rounds.every, dense))
            continue
        costs.append((_sent(config, table, layout, fragment_of, n) / planned.rounds.every, dense))
    sent, dense = max(costs)
    mib = max(level_bytes(config, p) for p in stages) / MIB
    yield (f"{describe(planned, n)}: {sent:,.0f} bytes of a rank and step between sites instead of {dense:,}; {mib:.2f} MiB of "
           "memory")


def _sent(config: Config, table: Table, layout: FlatLayout, fragment_of: dict[str, int], n: int) -> int:
    """Bytes that a rank posts in a round."""
    lengths = _fragments(layout, fragment_of, table.fragments)
    if not table.compress:
        return sum(_posted(n, length, layout.dtype.itemsize) for length in lengths)
    make, found = make_compressor(table.compress, config.folder), 0
    for f in range(table.fragments):
        pieces, at = list[Piece](), 0
        for s in layout.segments:
            if s.parameter.trained_from != float("inf") and fragment_of[s.parameter.key] == f:
                pieces.append(Piece(s.name, at, at + s.stop - s.start, 0, tuple(s.parameter.shape)))
                at = pieces[-1].stop
        found += _coded(make, pieces, n, config.run.seed) if pieces else 0
    return found


def _coded(make: Make, pieces: Sequence[Piece], n: int, seed: int) -> int:
    """Bytes of a compressed sum. CompressError for a compressor of the user's own that is wrong at these sizes."""
    if make.own:
        check_compressor(make, n, pieces, seed=seed)
    compressor = make(pieces, n, seed=seed)
    return HEADER_BYTES + program_of(compressor, 0, lambda words: choose("auto", n, 4 * words), {}, lambda: 0).sent


def _fragments(layout: FlatLayout, fragment_of: dict[str, int], parts: int) -> list[int]:
    """The elements of each fragment on a rank that has these parameters."""
    found = [0] * parts
    for s in layout.segments:
        if s.parameter.trained_from != float("inf"):
            found[fragment_of.get(s.parameter.key, 0)] += s.stop - s.start
    return found


def _posted(n: int, length: int, itemsize: int) -> int:
    if not length:
        return 0
    plan = make_plan(choose("auto", n, itemsize * length), 0, n, length, itemsize)
    return HEADER_BYTES + sum(stop - start for round_ in plan.rounds for _, start, stop, _ in round_.sends)
