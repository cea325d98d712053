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
from collections import deque
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


Way: TypeAlias = tuple[int, int, Arc, bool]       # to an event: its number, slack in time, the arc, whether along it


class Network:
    """The activities between the events 0 (all begins) and `n_events` - 1 (all is over). Every event is on a way between them."""

    def __init__(self, activities: Sequence[Activity], n_events: int):
        self.activities, self.n_events = activities, n_events
        self.arcs = [Arc(activity) for activity in activities]
        self.at: list[list[tuple[Arc, bool]]] = [[] for _ in range(n_events)]      # arcs that leave an event, or come back to it
        for arc in self.arcs:
            self.at[arc.tail].append((arc, True))
            self.at[arc.head].append((arc, False))

    def corners(self) -> Iterator[Corner]:
        """The front from the slowest to the fastest. Between two corners a second less costs as much as there is flow."""
        times, shortest = self._latest(slowest=True), self._latest(slowest=False)[-1]
        cost, flow = sum(activity.options[-1][1] for activity in self.activities), 0
        yield self._corner(times, cost)
        while times[-1] > shortest:
            flow += self._augment(times)
            shift = self._distances(times)
            cost += flow * GRAIN * shift[-1] * TICK
            times = [time - min(far, shift[-1]) for time, far in zip(times, shift)]
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
            for arc, leaves in self.at[event]:
                if leaves:
                    times[arc.head] = max(times[arc.head], times[event] + arc.lengths[0 if slowest else -1])
                    waits[arc.head] -= 1
                    if not waits[arc.head]:
                        ready.append(arc.head)
        return times

    def _corner(self, times: Sequence[int], cost: float) -> Corner:
        taken = [min(times[arc.head] - times[arc.tail], arc.lengths[0]) for arc in self.arcs]
        return Corner(times[-1] * TICK, cost, [ticks * TICK for ticks in taken])

    def _open(self, event: int, times: Sequence[int]) -> Iterator[Way]:
        """Where flow may go from an event."""
        now = times[event]
        for arc, leaves in self.at[event]:
            if leaves:
                yield arc.head, times[arc.head] - now - arc.longer, arc, True
            elif arc.flow:
                yield arc.tail, times[arc.tail] - now - arc.shorter, arc, False

    def _distances(self, times: Sequence[int]) -> list[int]:
        """By how much less time each event may come, with all flow on longest ways (Dijkstra over the slack)."""
        far = [ENDLESS] * self.n_events
        far[0] = 0
        heap = [(0, 0)]
        while heap:
            distance, event = heapq.heappop(heap)
            if distance > far[event]:
                continue
            if event == self.n_events - 1:
                break                                        # the others are further, and nobody asks how far
            for other, slack, _, _ in self._open(event, times):
                if distance + slack < far[other]:
                    far[other] = distance + slack
                    heapq.heappush(heap, (far[other], other))
        return far

    def _augment(self, times: Sequence[int]) -> int:
        """Adds all flow that fits on ways without slack (Dinic), and gives its amount."""
        last, added = self.n_events - 1, 0
        while True:
            rank = self._ranks(times)
            if rank[last] < 0:
                return added
            ways = [[way for way in self._open(event, times) if way[1] == 0 and rank[way[0]] == rank[event] + 1]
                    if rank[event] >= 0 else [] for event in range(self.n_events)]
            added += self._block(times, ways)

    def _ranks(self, times: Sequence[int]) -> list[int]:
        """The number of steps without slack to each event; -1 where there is no such way, or only one that is longer than that to
        the last event."""
        rank = [-1] * self.n_events
        rank[0], queue = 0, deque([0])
        while queue:
            event = queue.popleft()
            for other, slack, _, _ in self._open(event, times):
                if slack == 0 and rank[other] < 0:
                    rank[other] = rank[event] + 1
                    queue.append(other)
                    if other == self.n_events - 1:
                        return rank
        return rank

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
        other, _, arc, along = ways[-1]
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
