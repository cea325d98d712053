"""Times compressed sums and levels of exchange on a model of the machine (`simulate.Machine`).

Compressing takes the core that would compute, so nothing hides it: a sum that is compressed takes encoding, its messages, and
decoding, one after the other. A level's exchange may travel while steps compute, if it takes effect some steps after it left.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf
from typing import Literal, NamedTuple

from mpitrain.errors import ConfigError
from mpitrain.schedules.collectives import choose
from mpitrain.schedules.direct import direct_all_gather, direct_reduce_scatter
from mpitrain.schedules.simulate import Machine, simulate

ITEM = 4                                                      # bytes of a float32
SLOWEST, FASTEST = 1e-3, 1e7                                  # Mbit/s, between which a break-even is looked for
HALVINGS = 60


class Coding(NamedTuple):
    """What a compressor sends and costs; `bench compress` measures it.

    `rate`: bytes of one rank's message (of all phases together) for each byte of float32. `encode`: seconds for each byte of
    float32, with what is kept as the residual. `decode`: the same of one message, added to a sum.
    """

    kind: Literal["packed", "linear", "gathered"]
    rate: float
    encode: float
    decode: float
    phases: int = 1


def simulate_coded(coding: Coding, n: int, length: int, machine: Machine) -> float:
    """Seconds until the last of n ranks has the sum of arrays of `length` float32 that are compressed.

    packed: parts to their owners, who add all contributions up and encode the sum for everyone. linear: an all-reduce of a
    shorter array in each phase. gathered: everyone has everyone's message, and adds all of them up.
    """
    nbytes = length * ITEM
    message = ceil(coding.rate * nbytes)
    if n == 1:
        return 0.0
    if coding.kind == "packed":
        silent = machine._replace(gamma=0.0)                  # what arrives is decoded, not added up as it is
        there = simulate(direct_reduce_scatter, n, message, 1, silent)
        back = simulate(direct_all_gather, n, message, 1, silent)
        return nbytes * (coding.encode * (1 + 1 / n) + coding.decode * 2) + there + back
    if coding.kind == "linear":
        short = max(1, message // (ITEM * coding.phases))
        sums = coding.phases * simulate(choose("auto", n, short * ITEM), n, short, ITEM, machine)
        return nbytes * (coding.encode + coding.decode) + sums
    travel = simulate(direct_all_gather, n, message * n, 1, machine._replace(gamma=0.0))
    return nbytes * (coding.encode + n * coding.decode) + travel


def break_even_mbit(coding: Coding, n: int, length: int, machine: Machine) -> float:
    """The bandwidth of a link, in Mbit/s, above which the dense sum of n ranks is faster than the compressed one. 0 where it is
    on every link, inf where it is on none. Latency and the speed of sums are the machine's; all ranks are apart.

    The dense sum is the faster of what `auto` takes and the ring, whose messages wait least for each other.
    """
    def gain(mbit: float) -> float:
        link = machine._replace(beta=8e-6 / mbit, nodes=None)
        dense = min(simulate(choose(name, n, length * ITEM), n, length, ITEM, link) for name in ("auto", "ring"))
        return dense - simulate_coded(coding, n, length, link)
    low, high = SLOWEST, FASTEST
    if gain(low) <= 0.0:
        return 0.0
    if gain(high) > 0.0:
        return inf
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if gain(middle) > 0.0 else (low, middle)
    return low


class LevelCost(NamedTuple):
    """A level of exchange as the simulation sees it: every `every` steps its `fragments` leave one after the other, evenly spread
    over them, each takes `seconds` and `nbytes` of a link, and takes effect `delay` steps after it left."""

    every: int
    seconds: float
    nbytes: int
    fragments: int = 1
    delay: int = 0


class Forecast(NamedTuple):
    """Seconds a step, those of them in which nothing but messages moved, bytes a rank sends a step, and at once at most."""

    seconds: float
    exposed: float
    nbytes: float
    largest: int


def simulate_levels(levels: Sequence[LevelCost], step_seconds: float, steps: int) -> Forecast:
    """The forecast of `steps` steps, of which each computes `step_seconds` (with the exposed part of its own sums of gradients).
    One link carries the exchanges of all levels, in the order in which they leave."""
    for level in levels:
        if level.every < 1 or level.fragments < 1 or not 0 <= level.delay <= level.every:
            raise ConfigError(f"cannot simulate a level with every = {level.every}, fragments = {level.fragments}, delay = "
                              f"{level.delay}; every and fragments are 1 or more, delay at most every")
    now, free, sent, exposed = 0.0, 0.0, 0, 0.0
    due: list[tuple[int, float]] = []                         # the step before which an exchange must have ended, and its end
    for step in range(1, steps + 1):
        now += step_seconds
        for level in levels:
            for fragment in range(level.fragments):
                if step >= level.every and (step - fragment * level.every // level.fragments) % level.every == 0:
                    free = max(now, free) + level.seconds
                    sent += level.nbytes
                    due.append((step + level.delay, free))
        waited = max([now, *(end for at, end in due if at <= step)])
        exposed, now = exposed + waited - now, waited
        due = [one for one in due if one[0] > step]
    return Forecast(now / steps, exposed / steps, sent / steps, max((level.nbytes for level in levels), default=0))
