"""Outer gradients that travel compressed: a compressor for each fragment, whose worker is a site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mpitrain.backend import Array
from mpitrain.optim import Segment
from mpitrain.parallel.compress.compressor import CompressError, Make, Piece
from mpitrain.parallel.compress.exchange import Clock, Exchange
from mpitrain.parallel.levels.fragments import Fragment

if TYPE_CHECKING:
    from mpitrain.comm.work import Work
    from mpitrain.parallel.levels.level import Level, Parts


class Coded:
    """The compressed sums of a level's fragments, with error feedback: what a site's message leaves out is in its next one.

    A compressor of the user's own is proved at the sizes of this model. CompressError, on all ranks, where it is wrong or keeps
    what cannot be in a checkpoint here. It communicates.
    """

    def __init__(self, level: Level, fragments: Sequence[Fragment], make: Make):
        self.level, self.fragments, self.make, self.clock = level, fragments, make, Clock()
        control, seed = level.policy.context.control, level.policy.setup.config.run.seed
        self.states: dict[int, dict[str, Array]] = {}
        self.exchanges: dict[int, Exchange] = {}
        wrong = ""
        for fragment in fragments:
            pieces = pieces_of(fragment)
            if not pieces:
                continue
            compressor = make(pieces, level.n_sites, seed=seed)
            if any(kept.of == "all" for kept in compressor.states().values()):
                wrong = f'[[sync]] compress = "{make.text}" keeps matrices of its own; use int8, int4, levels, onebit or topk'
            elif make.own and level.site == 0 and not wrong:
                wrong = _proof(make, level.n_sites, pieces, seed)
            state = self.states[fragment.number] = compressor.new_state()
            name = f"outer gradient {fragment.number}"
            self.exchanges[fragment.number] = Exchange(level.channel, compressor, make.text, state, name,
                                                       lambda: level.policy.step, self.clock)
        if refused := next(filter(None, control.gather_objects(wrong)), ""):
            raise CompressError(refused)

    def start(self, fragment: Fragment) -> Work:
        """Begins the sum of its message over the sites, in place."""
        return self.level.channel.progress.added(self.exchanges[fragment.number].start(fragment.message))

    def sent(self, fragment: Fragment) -> int:
        """Bytes that this rank posts for it."""
        return self.exchanges[fragment.number].sent

    @property
    def nbytes(self) -> int:
        """Of what is kept from round to round."""
        return sum(array.nbytes for state in self.states.values() for array in state.values())

    def own_states(self) -> Mapping[str, Parts]:
        """What each site's messages have left out."""
        return {f"outer_{name}": self._parts(name) for name in self._names("worker")}

    def owned_states(self) -> Mapping[str, Parts]:
        """What the rounding of the sums has left out, of the elements that this site rounds for everyone."""
        return {name: self._parts(name, owned=True) for name in self._names("owner")}

    def _names(self, of: str) -> list[str]:
        """The states of workers or of owners; a rank without a parameter has none."""
        found = {name: None for exchange in self.exchanges.values()
                 for name, kept in exchange.compressor.states().items() if kept.of == of}
        return list(found)

    def _parts(self, name: str, *, owned: bool = False) -> Parts:
        parts: Parts = []
        for fragment in self.fragments:
            if fragment.number not in self.states:
                continue
            first, stop = self.exchanges[fragment.number].owned if owned else (0, fragment.size)
            for s, there in fragment.places:
                low, high = max(there.start, first), min(there.stop, stop)
                if low < high:
                    parts.append((part_of(s, low - there.start), self.states[fragment.number][name][low:high]))
        return parts


class PartOf:
    """A segment from an element on."""

    def __init__(self, segment: Segment, first: int):
        self.parameter, self.name, self.decay = segment.parameter, segment.name, segment.decay
        self.start, self.stop, self.first = segment.start + first, segment.stop, segment.first + first


def part_of(segment: Segment, first: int) -> Segment:
    return PartOf(segment, first) if first else segment


def pieces_of(fragment: Fragment) -> list[Piece]:
    """The pieces of a fragment's message."""
    return [Piece(s.name, there.start, there.stop, s.first, tuple(s.parameter.shape)) for s, there in fragment.places
            if there.stop > there.start]


def _proof(make: Make, n: int, pieces: list[Piece], seed: int) -> str:
    from mpitrain.parallel.compress.check import check_compressor
    try:
        check_compressor(make, n, pieces, seed=seed)
    except CompressError as error:
        return error.message
    return ""
