"""The ways to run a configuration on a number of ranks: meshes, schedules, micro-batches, sharding, recompute.

They are proposals by arithmetic alone; `problem.Problem` asks the run's own checks which of them `train` accepts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mpitrain.config import Config, changed
from mpitrain.config.messages import toml
from mpitrain.config.sections import STATES
from mpitrain.placement.place import micro_batches
from mpitrain.schedules.grid import Grid, fit
from mpitrain.schedules.pipeline import SCHEDULES

PLAIN = "1f1b"                # the schedule where there is one stage, and all are the same


class Cuts(NamedTuple):
    """The lengths of the axes that give a rank a part of the model."""

    pp: int
    ep: int
    cp: int
    tp: int


class Candidate(NamedTuple):
    """One way. `micro_batches` is their number for each data-parallel rank."""

    cuts: Cuts
    dp: int
    schedule: str
    chunks: int
    micro_batches: int
    sharding: str
    recompute: Any

    @property
    def mesh(self) -> dict[str, int]:
        return {"pp": self.cuts.pp, "dp": self.dp, "ep": self.cuts.ep, "cp": self.cuts.cp, "tp": self.cuts.tp}

    @property
    def grid(self) -> Grid:
        """Its first rank."""
        return Grid(self.mesh)

    @property
    def places(self) -> int:
        """How many ranks, or groups that hold one model, have samples of their own."""
        return self.dp * self.cuts.ep

    @property
    def replicas(self) -> int:
        """How many ranks have the same parameters (but for experts)."""
        return self.dp * self.cuts.ep * self.cuts.cp

    def keys(self, config: Config) -> dict[str, Any]:
        """The keys that make the configuration this one, as `section.key`."""
        m = self.cuts
        return {"mesh.pp": m.pp, "mesh.dp": self.dp, "mesh.ep": m.ep, "mesh.cp": m.cp, "mesh.tp": m.tp,
                "mesh.schedule": self.schedule, "mesh.chunks": self.chunks, "mesh.sequence": config.mesh.sequence and m.tp > 1,
                "train.micro_batches": self.micro_batches * self.places, "train.recompute": self.recompute,
                "comm.sharding": self.sharding}

    def overrides(self, config: Config) -> list[str]:
        """`section.key=value` of each key that the configuration has otherwise."""
        found = []
        for key, value in self.keys(config).items():
            section, _, name = key.partition(".")
            if getattr(getattr(config, section), name) != value:
                found.append(f"{key}={value if isinstance(value, str) else toml(value)}")
        return found

    def applied(self, config: Config) -> Config:
        """The configuration with these keys."""
        sections: dict[str, dict[str, Any]] = {}
        for key, value in self.keys(config).items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
        return changed(config, **sections)

    def order(self) -> tuple[Any, ...]:
        """The plainest first, of candidates that take the same time."""
        m = self.cuts
        names = [PLAIN, *(name for name in SCHEDULES if name != PLAIN)]
        return (m.pp, m.tp, m.cp, m.ep, self.chunks, names.index(self.schedule), STATES.index(self.sharding),
                bool(self.recompute), self.micro_batches)


def candidate_of(config: Config, ranks: int) -> Candidate:
    """The way that the configuration itself says; MeshError where it does not fit so many ranks. Where data-parallel ranks have
    unequal numbers of micro-batches, it is the larger one."""
    m = config.mesh
    lengths = fit(ranks, site=m.site, pp=m.pp, dp=m.dp, ep=m.ep, cp=m.cp, tp=m.tp)
    grid = Grid(lengths)
    each = -(-micro_batches(grid, m, config.train) // grid.n_places)
    return Candidate(Cuts(*(lengths[axis] for axis in Cuts._fields)), lengths["dp"], PLAIN if m.pp == 1 else str(m.schedule),
                     m.chunks, each, config.comm.sharding, config.train.recompute)


def cuts_of(ranks: int, n_blocks: int, *, experts: bool) -> Iterator[Cuts]:
    """The lengths whose product divides the number of ranks, with a block for each stage at least."""
    for pp in divisors(ranks):
        if pp > n_blocks:
            break
        for ep in divisors(ranks // pp) if experts else (1,):
            for cp in divisors(ranks // (pp * ep)):
                for tp in divisors(ranks // (pp * ep * cp)):
                    yield Cuts(pp, ep, cp, tp)


def candidates(cuts: Cuts, ranks: int, config: Config, n_blocks: int, *, sequential: bool) -> Iterator[Candidate]:
    """All ways with these cuts that give each data-parallel rank a row."""
    dp = ranks // (cuts.pp * cuts.ep * cuts.cp * cuts.tp)
    places = dp * cuts.ep
    again = dict.fromkeys([config.train.recompute, False, True]) if sequential else [config.train.recompute]
    # A user's own policy would be one of the configuration's, and what it sends is not known here.
    kinds = STATES if places * cuts.cp > 1 else STATES[:1]
    for n in numbers(config.train.batch_size // places, cuts.pp, config.train.micro_batches / places):
        for schedule, chunks in pipelines(cuts.pp, n_blocks):
            for sharding in kinds:
                for recompute in again:
                    yield Candidate(cuts, dp, schedule, chunks, n, sharding, recompute)


def numbers(most: int, pp: int, own: float) -> Sequence[int]:
    """Numbers of micro-batches of a data-parallel rank: powers of two, those times pp, and the configuration's `own`."""
    found = {base << k for base in (1, pp) for k in range(max(most, 1).bit_length()) if base << k <= most}
    return sorted(found | ({int(own)} if own >= 1 and own == int(own) and own <= most else set()))


def pipelines(pp: int, n_blocks: int) -> Iterator[tuple[str, int]]:
    """Schedules with their chunks: doubling, and the most there can be."""
    if pp == 1:
        yield PLAIN, 1
        return
    for name in SCHEDULES:
        if name != "interleaved":
            yield name, 1
    most = n_blocks // pp
    yield from (("interleaved", chunks) for chunks in sorted({1 << k for k in range(1, most.bit_length()) if 1 << k <= most}
                                                             | ({most} if most > 1 else set())))


def divisors(n: int) -> list[int]:
    """In rising order."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return [*small, *(n // d for d in reversed(small) if d * d != n)]
