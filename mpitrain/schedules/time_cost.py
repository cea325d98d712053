"""The least cost of a set of activities for every time in which all of them can be done: the whole front at once.

An activity takes between its fastest and its slowest time, and costs more the faster it is: a convex polyline. Some follow
others. The least total cost within T seconds is a linear program; its dual is a flow from the first event to the last, of which
an activity bears as much as it costs to make it a second shorter. So a flow along longest paths, augmented until none is longer
than T, visits every corner of the front, from the slowest to the fastest (Fulkerson, "A network flow computation for project cost
curves", 1961; Phillips and Dessouky (1977) cut the critical paths step by step instead, as `lowtime` does).

All numbers inside are integers, of TICK seconds and GRAIN watts: paths of equal length are equal, and rounding adds nothing up.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

TICK, GRAIN = 1e-12, 1e-9
ENDLESS = 1 << 200


class Corner(NamedTuple):
    """A corner of the front: the time of all in seconds, their cost in joules, and the seconds that each activity takes."""

    total: float
    cost: float
    seconds: list[float]


class Activity(NamedTuple):
    """From one event to another: (seconds, joules) from the fastest to the slowest, on a convex polyline; one alone is fixed."""

    tail: int
    head: int
    options: Sequence[tuple[float, float]]


class Arc:
    """An activity in the network. Of its flow the first `bounds[0]` have the length `lengths[0]`, the slowest; and so on."""

    __slots__ = ("back", "bounds", "flow", "head", "lengths", "longer", "room", "shorter", "tail")

    def __init__(self, activity: Activity):
        self.tail, self.head, options = activity.tail, activity.head, activity.options
        self.lengths = [round(seconds / TICK) for seconds, _ in reversed(options)]
        steepness = [max(0, round((faster[1] - slower[1]) / (slower[0] - faster[0]) / GRAIN))
                     for slower, faster in zip(options[:0:-1], options[-2::-1])]
        self.bounds = [*accumulate(steepness, max), ENDLESS]
        self.flow = 0
        self.add(0)

    def add(self, flow: int) -> None:
        """More flow, or less. `longer` is the length of one more unit, and `room` how many have it; `shorter` and `back` are the
        same of one unit less, without a flow none."""
        self.flow += flow
        level = bisect_right(self.bounds, self.flow)
        self.longer, self.room = self.lengths[level], self.bounds[level] - self.flow
        level = bisect_left(self.bounds, self.flow)
        self.shorter, self.back = -self.lengths[level], self.flow - (self.bounds[level - 1] if level else 0)


Way: TypeAlias = tuple[int, Arc, bool]            # to an event: its number, the arc, whether along it


class Network:
    """The activities between the events 0 (all begins) and `n_events` - 1 (all is over). Every event is on a way between them."""

    def __init__(self, activities: Sequence[Activity], n_events: int):
        self.activities, self.n_events = activities, n_events
        self.arcs = [Arc(activity) for activity in activities]
        self._ends = [(arc.tail, arc.head, arc.lengths[0]) for arc in self.arcs]
        self.leaving: list[list[Arc]] = [[] for _ in range(n_events)]
        self.coming: list[list[Arc]] = [[] for _ in range(n_events)]
        for arc in self.arcs:
            self.leaving[arc.tail].append(arc)
            self.coming[arc.head].append(arc)

    def corners(self) -> Iterator[Corner]:
        """The front from the slowest to the fastest. Between two corners a second less costs as much as there is flow."""
        times, shortest = self._latest(slowest=True), self._latest(slowest=False)[-1]
        cost, flow = sum(activity.options[-1][1] for activity in self.activities), 0
        yield self._corner(times, cost)
        while times[-1] > shortest:
            added, near = self._augment(times)
            flow += added
            shift = self._distances(times, near)
            most = shift[-1]
            cost += flow * GRAIN * most * TICK
            times = [time - (far if far < most else most) for time, far in zip(times, shift)]
            if times[-1] < shortest:
                raise AssertionError("the flow went past the shortest time")
            yield self._corner(times, cost)

    def _latest(self, *, slowest: bool) -> list[int]:
        """The earliest time of each event, by its longest way from the first."""
        times, waits = [0] * self.n_events, [0] * self.n_events
        for arc in self.arcs:
            waits[arc.head] += 1
        ready = [event for event, count in enumerate(waits) if not count]
        for event in ready:
            for arc in self.leaving[event]:
                times[arc.head] = max(times[arc.head], times[event] + arc.lengths[0 if slowest else -1])
                waits[arc.head] -= 1
                if not waits[arc.head]:
                    ready.append(arc.head)
        return times

    def _corner(self, times: Sequence[int], cost: float) -> Corner:
        taken = [TICK * (room if (room := times[head] - times[tail]) < slowest else slowest)
                 for tail, head, slowest in self._ends]
        return Corner(times[-1] * TICK, cost, taken)

    # Where flow may go from an event: along an arc that leaves it, with the slack of one unit more there, and back along one that
    # comes to it and has flow. The two loops over that are written out: with a generator of ways, and one for Dinic's ranks, one
    # for his ways and one for Dijkstra from the start, 8 stages of 32 micro-batches took half as long again (3.5 s, now 2.3).

    def _explore(self, times: Sequence[int]) -> tuple[list[int], list[list[Way]], list[int]]:
        """Along ways without slack from the first event: the number of steps to each event (-1: none, or more than to the last
        event), from each the ways to events one step further, and the least slack from those to each event, 0 to themselves."""
        last = limit = self.n_events - 1
        rank, near = [-1] * self.n_events, [ENDLESS] * self.n_events
        ways: list[list[Way]] = [[] for _ in rank]
        rank[0], reached = 0, [0]
        for event in reached:
            now, next_rank, found = times[event], rank[event] + 1, ways[event]
            if next_rank > limit:
                break
            for arc in self.leaving[event]:
                other = arc.head
                if slack := times[other] - now - arc.longer:
                    if slack < near[other]:
                        near[other] = slack
                elif rank[other] < 0 or rank[other] == next_rank:
                    found.append((other, arc, True))
                    if rank[other] < 0:
                        rank[other] = next_rank
                        reached.append(other)
                        if other == last:
                            limit = next_rank
            for arc in self.coming[event]:
                if arc.flow:
                    other = arc.tail
                    if slack := times[other] - now - arc.shorter:
                        if slack < near[other]:
                            near[other] = slack
                    elif rank[other] < 0 or rank[other] == next_rank:
                        found.append((other, arc, False))
                        if rank[other] < 0:
                            rank[other] = next_rank
                            reached.append(other)
        for event in reached:
            near[event] = 0
        return rank, ways, near

    def _augment(self, times: Sequence[int]) -> tuple[int, list[int]]:
        """Adds all flow that fits on ways without slack (Dinic); its amount, and the slack from there to each event."""
        added = 0
        while True:
            rank, ways, near = self._explore(times)
            if rank[-1] < 0:
                return added, near
            added += self._block(times, ways)

    def _distances(self, times: Sequence[int], far: list[int]) -> list[int]:
        """By how much less time each event may come, with all flow on longest ways (Dijkstra over the slack), from `far`, the
        slack of one way. No more than that of the last event is asked for, so of what is further it is a bound."""
        last = self.n_events - 1
        heap = [(distance, event) for event, distance in enumerate(far) if 0 < distance < ENDLESS]
        heapq.heapify(heap)
        while heap:
            distance, event = heapq.heappop(heap)
            if distance > far[event]:
                continue
            if event == last:
                break
            from_here = distance - times[event]
            for arc in self.leaving[event]:
                further = from_here + times[arc.head] - arc.longer
                if further < far[arc.head] and further < far[last]:
                    far[arc.head] = further
                    heapq.heappush(heap, (further, arc.head))
            for arc in self.coming[event]:
                if arc.flow:
                    further = from_here + times[arc.tail] - arc.shorter
                    if further < far[arc.tail] and further < far[last]:
                        far[arc.tail] = further
                        heapq.heappush(heap, (further, arc.tail))
        return far

    def _block(self, times: Sequence[int], ways: list[list[Way]]) -> int:
        """Fills `ways` from each event to the next rank, until an arc of each has no room at its length."""
        path: list[tuple[int, Arc, bool]] = []
        event, last, added = 0, self.n_events - 1, 0
        while True:
            if event == last:
                room = min(arc.room if along else arc.back for _, arc, along in path)
                for _, arc, along in path:
                    arc.add(room if along else -room)
                added += room
                event, path = 0, []
            found = next_way(ways[event], times, event)
            if found is not None:
                other, arc, along = found
                path.append((event, arc, along))
                event = other
            elif path:
                event = path.pop()[0]
                ways[event].pop()                            # that way leads nowhere any more
            else:
                return added


def next_way(ways: list[Way], times: Sequence[int], event: int) -> tuple[int, Arc, bool] | None:
    """The last of `ways` that still has no slack; those that have are dropped."""
    while ways:
        other, arc, along = ways[-1]
        if (along or arc.flow) and times[other] - times[event] == (arc.longer if along else arc.shorter):
            return other, arc, along
        ways.pop()
    return None


def cost_at(options: Sequence[tuple[float, float]], seconds: float) -> float:
    """The cost on the polyline."""
    if seconds <= options[0][0]:
        return options[0][1]
    for (fast, dear), (slow, cheap) in zip(options, options[1:]):
        if seconds <= slow:
            return dear + (cheap - dear) * (seconds - fast) / (slow - fast)
    return options[-1][1]


def convex(options: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The corners of the lower convex hull of (seconds, joules), from the fastest to the cheapest; what is slower is left out."""
    hull: list[tuple[float, float]] = []
    for seconds, cost in sorted(options):
        if hull and cost >= hull[-1][1]:
            continue                                         # slower, and no cheaper
        while hull and seconds - hull[-1][0] < TICK:
            hull.pop()
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (seconds - hull[-2][0]) >= \
                (cost - hull[-2][1]) * (hull[-1][0] - hull[-2][0]):
            hull.pop()
        hull.append((seconds, cost))
    return hull
