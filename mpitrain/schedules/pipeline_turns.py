"""Times a pipeline whose stages share cores: at any moment those that compute get equal parts of what cores there are.

    4 stages on 2 cores      one at work: full speed      two: full speed      three: 2/3 each      four: half each

Between two events (an action ends, a message arrives) the speeds are constant, so the moments of all events follow one after the
other (processor sharing; Kleinrock, 1967). A stage that waits gives its core away each time it looks for its message. For a
moment it does not sleep: to the host's scheduler it runs, and two stages that compute may share a core while two that look have
another; then it sleeps between looks (`Progress.pause`), and messages wait for its waking. So a stage that waits weighs a part of
one that computes (generalised processor sharing; Parekh and Gallager, 1993): the part by which the mean speed over all
placements of ranks that never sleep is right (`waiting_weight`). On two cores (Linux 6.18, a quiet machine) two pipelines of two
stages took 35 to 50 ms a step without that sleep, as ranks happened to lie, and four stages 36 to 59; they take 36 to 39, and 41
to 42. This weight says 39 and 41, none at all 37 and 36.

    4 stages on 2 cores, a weight of 0.2      two at work: 2 / (2 + 0.2 * 2) of full speed each
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import comb, inf

TINY = 1e-12                  # of a second: what is left of an action that has ended, by rounding


def stops_in_turns(steps: Sequence[tuple[int, int, int, int]], lasts: Sequence[float], messages: Sequence[float], n_stages: int,
                   capacity: float, waiting: float = 0.0) -> tuple[list[float], list[float]]:
    """(starts, stops) of the actions of a `pipeline_times.Flow`, whose stages have `capacity` cores together.

    `lasts` are the seconds of each kind of action with a core of its own, `messages` those between virtual stages; a stage that
    waits weighs `waiting` (0 to 1) of one that computes.
    """
    order: list[list[int]] = [[] for _ in range(n_stages)]
    for place, (stage, *_) in enumerate(steps):
        order[stage].append(place)
    starts, stops = [0.0] * len(steps), [inf] * len(steps)
    at, left, now = [0] * n_stages, [0.0] * n_stages, 0.0
    running: set[int] = set()
    while True:
        arrivals = inf
        for stage in range(n_stages):
            if stage in running or at[stage] == len(order[stage]):
                continue
            place = order[stage][at[stage]]
            _, kind, need, sent = steps[place]
            arrival = now if need < 0 else stops[need] + messages[sent]
            if arrival <= now:
                running.add(stage)
                starts[place], left[stage] = now, lasts[kind]
            else:
                arrivals = min(arrivals, arrival)
        if not running and arrivals == inf:
            return starts, stops
        speed = min(1.0, capacity / (len(running) + waiting * (n_stages - len(running)))) if running else 1.0
        ahead = min((left[stage] / speed for stage in running), default=inf)
        passed = min(ahead, arrivals - now)
        now += passed
        for stage in sorted(running):
            left[stage] -= passed * speed
            if left[stage] <= TINY:
                running.discard(stage)
                stops[order[stage][at[stage]]] = now
                at[stage] += 1


@lru_cache(maxsize=256)
def waiting_weight(ranks: int, cores: int) -> float:
    """What a rank that waits weighs beside one that computes, where as many compute as there are cores.

    The ranks lie on the cores in equal numbers, in any way alike likely. Of the `size` ranks of a core a computing one meets h
    others that compute with the chance C(cores - 1, h) C(ranks - cores, size - 1 - h) / C(ranks - 1, size - 1), and has
    1 / (1 + h) of it. 0 where each rank has a core.
    """
    if ranks <= cores:
        return 0.0
    least, more = divmod(ranks, cores)
    speed = 0.0
    for size, number in ((least, cores - more), (least + 1, more))[:1 + bool(more)]:
        met = sum(comb(cores - 1, h) * comb(ranks - cores, size - 1 - h) / (1 + h) for h in range(size))
        speed += number * size / ranks * met / comb(ranks - 1, size - 1)
    return (1 / speed - 1) * cores / (ranks - cores)
