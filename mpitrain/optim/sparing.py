"""An optimizer that leaves alone what a step has not used: parts of parameters keep their values and their state.

A gradient of zero is not enough for that: weight decay shrinks what has it, and momentum and Adam's means go on moving it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mpitrain.backend import Array
from mpitrain.optim.layout import Segment
from mpitrain.optim.optimizer import Held, Optimizer

Unused = Mapping[str, Any]       # the numbers of a parameter's elements, in order, that a step has not used, by its name


class Sparing(Optimizer):
    """`rule`, an optimizer that treats each element by itself, for what a step has used: `unused()` names the rest.

    A parameter that is not used at all is not updated; of the others the rest is put back. Its steps count in bias corrections,
    as for all.
    """

    def __init__(self, rule: Optimizer, unused: Callable[[], Unused]):
        self.rule, self.unused = rule, unused
        super().__init__(rule.storage, rule.lr)
        self.state, self.numbers = rule.state, rule.numbers
        self._places = [_Places(one) for one in (Held("values", rule.storage, rule.storage.values), *rule.held())]

    @property
    def title(self) -> str:
        return self.rule.title

    def state_size(self, parameter: Any) -> int:
        return self.rule.state_size(parameter)

    def held(self) -> list[Held]:
        return self.rule.held()

    def averaged_weights(self, segments: Sequence[Segment] | None = None) -> Iterator[tuple[Segment, Array]]:
        yield from self.rule.averaged_weights(segments)

    def restart(self) -> None:
        self.rule.restart()
        self.steps = 0

    def update(self, gradients: Array, *, lr: float, step: int, scale: float = 1.0,
               segments: Sequence[Segment] | None = None, numbers: Array | None = None) -> None:
        unused, used, kept = self.unused(), [], []
        for segment in self.storage.segments if segments is None else segments:
            rest = unused.get(segment.name, ())
            here = rest[(rest >= segment.first) & (rest < segment.first + segment.stop - segment.start)] if len(rest) else rest
            if len(here) == segment.stop - segment.start > 0:
                continue
            used.append(segment)
            if len(here):
                for places in self._places:
                    part = places.of(segment)
                    if part is not None:
                        kept.append((part, here - segment.first, part[here - segment.first]))
        self.rule.update(gradients, lr=lr, step=step, scale=scale, segments=used, numbers=numbers)
        for part, where, values in kept:
            part[where] = values
        self.rule.round(used)
        self.steps = step


class _Places:
    """Where the parts of parameters lie in a flat array."""

    def __init__(self, held: Held):
        self.flat, self.among = held.flat, held.among
        self.by_name: dict[str, list[Any]] = {}
        for segment in held.storage.segments:
            self.by_name.setdefault(segment.name, []).append(segment)

    def of(self, segment: Segment) -> Array | None:
        """The elements of a segment; None where the array has none of its parameter."""
        size = segment.stop - segment.start
        for whole in self.by_name.get(segment.name, ()):
            start = whole.start + segment.first - whole.first
            if whole.start <= start <= start + size <= whole.stop:
                found: Array = self.flat[start:start + size]
                return found
        return None
