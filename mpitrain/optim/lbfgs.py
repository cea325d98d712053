"""L-BFGS with its closure, and the line search for the strong Wolfe conditions (Nocedal and Wright, "Numerical Optimization",
2006, algorithms 7.4, 3.5 and 3.6). Its decisions and defaults are those of PyTorch's `LBFGS`.

    def closure():
        optimizer.zero_grad()
        loss = ...
        loss.backward()
        return loss
    optimizer.step(closure)

In a run the trainer is the closure: the loss and the gradient of the step's global batch, over all data-parallel ranks. Every
rank has the same numbers and makes the same steps, so ranks agree bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.errors import ConfigError, GraphError, NumericsError
from mpitrain.optim.layout import Allocate, Segment
from mpitrain.optim.optimizer import Optimizer, require

Evaluate = Callable[[], tuple[float, Array]]      # the loss and the flat gradient where the parameters are
ENOUGH, FLAT = 1e-4, 0.9                          # the two constants of the Wolfe conditions
CURVED = 1e-10                                    # less y s than this is no curvature to remember


class Point(NamedTuple):
    """A place `t` along the direction: the loss there, its gradient, and its slope along the direction."""

    t: float
    loss: float
    gradient: Array
    slope: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.slope)


def whole(model: Any) -> Any:
    """The storage of the model whose parameters a list has, all of them; a model or storage as it is."""
    if hasattr(model, "storage") or hasattr(model, "segments") or not isinstance(model, Iterable):
        return model
    entries = list(model)
    table = entries[0] if len(entries) == 1 and isinstance(entries[0], Mapping) else {"params": entries}
    listed = list(table.get("params", ())) if set(table) == {"params"} else []
    homes = [home() for home in {id(p.home): p.home for p in listed if hasattr(p, "home")}.values() if home is not None]
    given = {id(p) for p in listed}
    if len(homes) != 1 or homes[0] is None or any(id(s.parameter) not in given for s in homes[0].segments):
        raise ConfigError("LBFGS has one rule for all parameters of one model with memory, and this is another list; give it the "
                          "model, or model.parameters(), without groups")
    return homes[0]


class LBFGS(Optimizer):
    """d = -H g, with the inverse Hessian H of the last `history_size` changes of w and g (Liu and Nocedal, 1989).

    One step makes up to `max_iter` moves and asks for the loss up to `max_eval` times (default: 5/4 as often). Each move is lr d,
    or with `line_search_fn` = "strong_wolfe" as far as the line search finds, from lr on. The state is 2 `history_size` + 2
    arrays of the model's size.
    """

    needs_closure = True

    def __init__(self, model: Any, lr: float = 1.0, *, max_iter: int = 20, max_eval: int | None = None,
                 tolerance_grad: float = 1e-7, tolerance_change: float = 1e-9, history_size: int = 100,
                 line_search_fn: str | None = None, allocate: Allocate | None = None):
        require(max_iter >= 1, "max_iter", max_iter, "1 or more")
        require(history_size >= 1, "history_size", history_size, "1 or more")
        require(line_search_fn in (None, "strong_wolfe"), "line_search_fn", f'"{line_search_fn}"', '"strong_wolfe", or not given')
        states = [f"{kind}{i}" for kind in ("step", "turn") for i in range(history_size)]
        super().__init__(whole(model), lr, state=("direction", "previous", *states), allocate=allocate)
        self.max_iter, self.max_eval = max_iter, max_iter * 5 // 4 if max_eval is None else max_eval
        self.tolerance_grad, self.tolerance_change, self.history_size = tolerance_grad, tolerance_change, history_size
        self.wolfe = line_search_fn is not None
        # moves done, length of the last one, scale of H, changes remembered, place of the oldest; and 1 / (y s) of each
        self.numbers = {"moves": np.zeros(5), "curvatures": np.zeros(history_size)}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step from the parameters' own gradients, which `closure` computes anew; returns its first loss."""
        if closure is None:
            raise GraphError("LBFGS computes the loss several times in a step; call step(closure), where closure() clears the "
                             "gradients, runs backward and returns the loss")
        arena = self.storage.attach_gradients()
        first: list[Any] = []

        def evaluate() -> tuple[float, Array]:
            loss = closure()
            first.append(loss)
            present = {s.name for s in self.present()}
            for segment in self.storage.segments:
                if segment.name not in present:
                    arena[segment.start:segment.stop] = 0
            return float(loss), arena
        self.minimise(evaluate, self.lr)
        self.steps += 1
        return first[0]

    def update(self, gradients: Array, *, lr: float, step: int, scale: float = 1.0,
               segments: Sequence[Segment] | None = None, numbers: Array | None = None) -> None:
        raise GraphError("LBFGS computes the loss several times in a step; use step(closure), or minimise(evaluate, lr)")

    def minimise(self, evaluate: Evaluate, lr: float) -> float:
        """One step; the loss it began with. `evaluate` may use the gradient's memory again."""
        loss, gradient = self._at(evaluate)
        first, asked, w, moves = loss, 1, self.storage.values, self.numbers["moves"]
        xp, d, previous = array_module(w), self.state["direction"], self.state["previous"]
        if not largest(gradient) > self.tolerance_grad:
            return first
        for n in range(1, self.max_iter + 1):
            moves[0] += 1
            if moves[0] == 1:
                xp.negative(gradient, out=d)
                moves[2] = 1.0
            else:
                self._remember(gradient)
                self._turn(gradient)
            previous[...] = gradient
            before, slope = loss, dot(gradient, d)
            t = min(1.0, 1.0 / total(gradient)) * lr if moves[0] == 1 else lr
            moves[1] = t
            if not slope <= -self.tolerance_change:
                break
            if self.wolfe:
                found, used = self._search(evaluate, Point(0.0, loss, gradient, slope), t, self.max_eval - asked)
                t, loss, gradient, asked = found.t, found.loss, found.gradient, asked + used
            else:
                self._move(w + t * d)
                if n < self.max_iter:
                    (loss, gradient), asked = self._at(evaluate), asked + 1
                    if not math.isfinite(loss):
                        raise NumericsError(f"LBFGS: the loss is {loss} after move {n} of the step, by lr = {lr}; set "
                                            'line_search_fn = "strong_wolfe", which goes back, or a smaller lr')
            moves[1] = t
            if (asked >= self.max_eval or not largest(gradient) > self.tolerance_grad
                    or not abs(t) * largest(d) > self.tolerance_change or abs(loss - before) < self.tolerance_change):
                break
        return first

    def _at(self, evaluate: Evaluate) -> tuple[float, Array]:
        loss, gradient = evaluate()
        return loss, gradient.copy()

    def _move(self, values: Array) -> None:
        self.storage.values[...] = values
        self.round()
        for segment in self.storage.segments:
            segment.parameter.mark_changed()

    def _remember(self, gradient: Array) -> None:
        """The last change of w and g, where the loss curves up along it; the oldest goes."""
        moves, d = self.numbers["moves"], self.state["direction"]
        y, s = gradient - self.state["previous"], d * float(moves[1])
        curvature = dot(y, s)
        if not curvature > CURVED:
            return
        kept, oldest = int(moves[3]), int(moves[4])
        place = (oldest + kept) % self.history_size
        if kept == self.history_size:
            moves[4] = (oldest + 1) % self.history_size
        else:
            moves[3] = kept + 1
        self.state[f"step{place}"][...] = s
        self.state[f"turn{place}"][...] = y
        self.numbers["curvatures"][place] = 1.0 / curvature
        moves[2] = curvature / dot(y, y)

    def _turn(self, gradient: Array) -> None:
        """The direction -H g, by two passes through the history."""
        moves, d = self.numbers["moves"], self.state["direction"]
        places = [(int(moves[4]) + i) % self.history_size for i in range(int(moves[3]))]
        weights: dict[int, float] = {}
        d[...] = -gradient
        for place in reversed(places):
            weights[place] = dot(self.state[f"step{place}"], d) * float(self.numbers["curvatures"][place])
            d -= weights[place] * self.state[f"turn{place}"]
        d *= float(moves[2])
        for place in places:
            back = dot(self.state[f"turn{place}"], d) * float(self.numbers["curvatures"][place])
            d += (weights[place] - back) * self.state[f"step{place}"]

    def _search(self, evaluate: Evaluate, start: Point, t: float, most: int) -> tuple[Point, int]:
        """Moves along the direction as far as the line search finds; that point, and how often the loss was asked for."""
        origin, d, used = self.storage.values.copy(), self.state["direction"], 0

        def at(t: float) -> Point:
            nonlocal used
            used += 1
            self._move(origin + t * d)
            loss, gradient = self._at(evaluate)
            return Point(t, loss, gradient, dot(gradient, d))
        found = strong_wolfe(at, start, t, most, self.tolerance_change / max(largest(d), 1e-300))
        self._move(origin + found.t * d)
        return found, used


def strong_wolfe(at: Callable[[float], Point], start: Point, t: float, most: int, shortest: float) -> Point:
    """A point with a loss that has fallen enough and a slope that is flat enough, or the lowest that `most` further tries find.

    A bracket of such points is sought first, from `t` outwards, and then narrowed until it is `shortest`. Points whose loss or
    gradient is not finite are too high.
    """
    def too_high(point: Point) -> bool:
        return not (point.finite and point.loss <= start.loss + ENOUGH * point.t * start.slope)

    def flat(point: Point) -> bool:
        return abs(point.slope) <= -FLAT * start.slope
    before, new, tries = start, at(t), 0
    while tries < most:
        if too_high(new) or (tries > 1 and new.loss >= before.loss):
            break
        if flat(new):
            return new
        if new.slope >= 0.0:
            break
        t = lowest(before, new, new.t + 0.01 * (new.t - before.t), 10.0 * new.t)
        before, new, tries = new, at(t), tries + 1
    pair = [start if tries >= most else before, new]
    low, doubtful = lower(pair), False
    while tries < most and not abs(pair[1].t - pair[0].t) < shortest:
        left, right = sorted((pair[0].t, pair[1].t))
        t, margin = lowest(pair[0], pair[1], left, right), 0.1 * (right - left)
        if min(right - t, t - left) < margin:                # Twice near an end, or at it: a tenth inside of it instead.
            near = doubtful or not left < t < right
            if near:
                t = right - margin if abs(t - right) < abs(t - left) else left + margin
            doubtful = not near
        else:
            doubtful = False
        new, tries = at(t), tries + 1
        if too_high(new) or new.loss >= pair[low].loss:
            pair[1 - low] = new
            low = lower(pair)
            continue
        done = flat(new)
        if not done and new.slope * (pair[1 - low].t - pair[low].t) >= 0.0:
            pair[1 - low] = pair[low]
        pair[low] = new
        if done:
            break
    return pair[low]


def lower(pair: Sequence[Point]) -> int:
    """The place of the lower of two points; one whose loss or gradient is not finite is not."""
    heights = [point.loss if point.finite else math.inf for point in pair]
    return int(not heights[0] <= heights[1])


def lowest(a: Point, b: Point, least: float, most: float) -> float:
    """Where the cubic through two points and their slopes is lowest, inside the bounds; their middle if it is so nowhere."""
    if a.t > b.t:
        a, b = b, a
    width = b.t - a.t
    bend = a.slope + b.slope - 3.0 * (a.loss - b.loss) / (a.t - b.t) if width else math.nan
    square = bend * bend - a.slope * b.slope
    if not 0.0 <= square < math.inf:
        return (least + most) / 2.0
    root = math.sqrt(square)
    below = b.slope - a.slope + 2.0 * root
    return min(max(b.t - width * ((b.slope + root - bend) / below), least), most) if below else (least + most) / 2.0


def dot(a: Array, b: Array) -> float:
    """The product of two flat arrays; the order of addition does not depend on threads."""
    return float((a * b).sum())


def largest(a: Array) -> float:
    return float(abs(a).max()) if a.size else 0.0


def total(a: Array) -> float:
    return max(float(abs(a).sum()), 1e-300)
