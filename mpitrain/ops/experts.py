"""The operations of a mixture of experts: routing, dispatch of rows to experts, combination, and products by expert.

Letters: `T` rows, `D` width, `E` experts, `K` choices of each row, `C` places of each expert, `I` inputs, `O` outputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mpitrain.autograd import Context, Function, Tensor, batch_share
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.kernels import experts as kernels
from mpitrain.kernels.pointwise import ACTIVATIONS
from mpitrain.kernels.product import product
from mpitrain.kernels.sums import EXACT, sum_over
from mpitrain.ops.linalg import operands_of, room_for

__all__ = ["combine", "dispatch", "expert_balance", "expert_gates", "expert_linear"]


@dataclass(frozen=True)
class Route:
    """The routing of one batch; see `kernels.experts` for slots (K, T) and sources (E C,). No gradient."""

    chosen: Array                            # (T, K), first choices first
    counts: Array                            # (E,): how often each expert was chosen, whether there was a place or not
    slots: Array
    sources: Array
    tokens: Array                            # (E C,): the row that is at each place, -1 where nobody is
    capacity: int

    @property
    def assigned(self) -> int:
        """The number of choices, with those that are dropped."""
        return int(self.slots.size)


def capacity_of(rows: int, experts: int, top_k: int, factor: float) -> int:
    """C: the places of an expert for a batch of so many rows; `factor` times what it would take if choices were even."""
    return math.ceil(min(rows, factor * top_k * rows / experts))


def route(scores: Any, top_k: int, capacity: int) -> Route:
    """The `top_k` experts of largest score (T, E) for each row, and a place there for as many as fit."""
    array = scores.array if isinstance(scores, Tensor) else scores
    if array.ndim != 2 or not 1 <= top_k <= array.shape[1] or capacity < 1 or not len(array):
        raise ShapeError(f"route: scores of shape {tuple(array.shape)}, {top_k} choices and {capacity} places; wants (rows, "
                         "experts), a row at least, 1 to experts choices, and a place at least")
    chosen, counts, slots, sources, tokens = (found.array for found in Choose.apply(array, top_k=top_k, capacity=capacity))
    return Route(chosen, counts, slots, sources, tokens, capacity)


class Choose(Function):
    """The arrays of a `Route`, from scores: an operation, so that a recorded model chooses anew for other samples."""

    @staticmethod
    def forward(ctx: Context, scores: Array, *, top_k: int, capacity: int) -> tuple[Array, ...]:
        chosen = kernels.largest(scores, top_k)
        slots, sources, counts = kernels.places(chosen, scores.shape[1], capacity)
        return chosen, counts, slots, sources, sources % len(scores) - (sources < 0) * len(scores)     # -1 % rows is rows - 1


class Gates(Function):
    """The scores of the chosen experts, (K, T); normalised: those of a row add up to 1."""

    @staticmethod
    def forward(ctx: Context, scores: Array, chosen: Array, *, normalised: bool) -> Array:
        rows = ctx.xp.arange(len(chosen))
        gates = ctx.xp.stack([scores[rows, column] for column in chosen.T])
        total = gates.sum(axis=0) if normalised else None
        if total is not None:
            gates /= total
        ctx.save(gates)
        ctx.total, ctx.chosen, ctx.shape = total, chosen, scores.shape
        return gates

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Any, ...]:
        gates, = ctx.saved
        if ctx.total is not None:
            grad = (grad - (grad * gates).sum(axis=0)) / ctx.total
        by_scores, rows = ctx.xp.zeros(ctx.shape, grad.dtype), ctx.xp.arange(len(ctx.chosen))
        for k, column in enumerate(ctx.chosen.T):             # a row's choices differ: nothing is written twice
            by_scores[rows, column] = grad[k]
        return by_scores, None


class Balance(Function):
    """The scores as they are; backward adds the gradient of the balance, a term of the loss that has no other way back."""

    views = True

    @staticmethod
    def forward(ctx: Context, scores: Array, counts: Array, *, weight: float) -> Array:
        ctx.counts, ctx.weight = counts, weight
        return scores

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Any, ...]:
        rows, experts = grad.shape
        assigned = ctx.counts.sum()
        return grad + (ctx.counts * (ctx.weight * batch_share() * experts / rows) / assigned).astype(grad.dtype), None


class Dispatch(Function):
    """Rows (T, D) at their experts' places (E, C, D), zeros at those that nobody has."""

    half = "own"

    @staticmethod
    def forward(ctx: Context, x: Array, slots: Array, tokens: Array, *, capacity: int) -> Array:
        if x.ndim != 2 or len(x) != slots.shape[1]:
            raise ShapeError(f"dispatch: rows of shape {x.shape} for a route of {slots.shape[1]} rows")
        ctx.slots = slots
        return kernels.rows_at(x, tokens).reshape(-1, capacity, x.shape[1])

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Any, ...]:
        return kernels.add_rows(grad.reshape(-1, grad.shape[2]), ctx.slots), None, None


class Combine(Function):
    """The rows at places (E, C, D) back where they came from, (T, D): a row's choices, times their gates (K, T), added up."""

    half = "own"

    @staticmethod
    def forward(ctx: Context, x: Array, gates: Array, slots: Array, sources: Array, tokens: Array, *, capacity: int) -> Array:
        places = len(sources) // capacity, capacity
        if x.ndim != 3 or x.shape[:2] != places or gates.shape != slots.shape:
            raise ShapeError(f"combine: places of shape {x.shape} and gates of shape {gates.shape} for a route to {places} "
                             f"places, with gates {slots.shape}")
        ctx.save(x, gates)
        ctx.slots, ctx.sources, ctx.tokens = slots, sources, tokens
        return kernels.add_rows(x.reshape(-1, x.shape[2]), slots, gates)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Any, ...]:
        x, gates = ctx.saved
        by_x = by_gates = None
        if ctx.needs[0]:
            factors = gates.reshape(-1)[ctx.xp.maximum(ctx.sources, 0)]
            by_x = kernels.rows_at(grad, ctx.tokens)
            by_x *= factors[:, None]
            by_x = by_x.reshape(x.shape)
        if ctx.needs[1]:
            by_gates = kernels.dot_rows(x.reshape(-1, x.shape[2]), ctx.slots, grad)
        return by_x, by_gates, None, None, None


class ExpertLinear(Function):
    """a(x_e W_e' + b_e) for each expert e, gradients written where they will be sent from: `ops.linear`, many times.

    Products are made one by one: each is large, and ours have the same bits however many rows there are.
    """

    floats = 4

    @staticmethod
    def forward(ctx: Context, x: Array, weight: Array, bias: Array | None, *, activation: str | None,
                operands: str) -> Array:
        if x.ndim != 3 or weight.ndim != 3 or len(x) != len(weight) or x.shape[2] != weight.shape[2]:
            raise ShapeError(f"expert_linear: an input of shape {x.shape} does not fit a weight of shape {weight.shape} "
                             "(experts, outputs, inputs)")
        if bias is not None and bias.shape != weight.shape[:2]:
            raise ShapeError(f"expert_linear: a bias of shape {bias.shape} does not fit a weight of shape {weight.shape}")
        result = ctx.xp.empty((*x.shape[:2], weight.shape[1]), x.dtype)
        for e in range(len(x)):
            product(x[e], weight[e].T, None if bias is None else bias[e], out=result[e], operands=operands)
        fused = None if activation is None else ACTIVATIONS[activation]
        ctx.activation, ctx.operands, ctx.before, kept = fused, operands, None, None
        if fused is not None:
            result, kept = fused.forward(result, ours=True, training=True in ctx.needs)
        ctx.save(x, weight, *(() if kept is None else (kept,)))
        return result

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Any, ...]:
        x, weight, *kept = ctx.saved
        if ctx.before is None:                                # the second half of a split backward finds it made
            ctx.before = ctx.activation.gradient(kept[0], grad, None) if kept else ctx.xp.ascontiguousarray(grad)
        grad = ctx.before
        by_x = ctx.xp.empty_like(x) if ctx.needs[0] else None
        by_weight = room_for(ctx, 1, weight.shape, weight.dtype) if ctx.needs[1] else None
        for e in range(len(x)):
            if by_x is not None:
                product(grad[e], weight[e], out=by_x[e], operands=ctx.operands)
            if by_weight is not None:
                product(grad[e].T, x[e], out=by_weight[e], operands=ctx.operands)
        by_bias = None
        if ctx.needs[2]:
            by_bias = ctx.xp.sum(grad, axis=1, out=ctx.out(2)) if grad.shape[1] <= EXACT else sum_over(grad, 1)
        return by_x, by_weight, by_bias


def expert_gates(scores: Any, to: Route, *, normalised: bool) -> Tensor:
    """The scores (T, E) of each row's choices, (K, T), divided by their sum where `normalised`."""
    return Gates.apply(scores, to.chosen, normalised=normalised)


def expert_balance(scores: Any, to: Route, weight: float) -> Tensor:
    """The scores, unchanged; with a gradient that evens out how often experts are chosen.

    It is that of `weight` * E * sum over i of f_i P_i, where f_i is the share of choices that expert i has and P_i its mean score
    (Fedus et al. 2021, equation 4), times `autograd.batch_share()`: so the loss has the mean over the global batch of this term.
    """
    return Balance.apply(scores, to.counts, weight=weight)


def balance_value(scores: Any, to: Route) -> Array:
    """E * sum over i of f_i P_i, a 0-d array: 1 where choices and scores are even, E where one expert has all."""
    array = scores.array if isinstance(scores, Tensor) else scores
    shares = to.counts / to.counts.sum()
    return (shares * array.mean(axis=0)).sum() * len(to.counts)


def dispatch(x: Any, to: Route) -> Tensor:
    """Rows (T, D) at their experts' places: (E, C, D), zeros at those that nobody has."""
    return Dispatch.apply(x, to.slots, to.tokens, capacity=to.capacity)


def combine(x: Any, gates: Any, to: Route) -> Tensor:
    """The rows at places (E, C, D) in their first order, (T, D), weighted by gates (K, T); zeros for rows without a place."""
    return Combine.apply(x, gates, to.slots, to.sources, to.tokens, capacity=to.capacity)


def expert_linear(x: Any, weight: Any, bias: Any = None, activation: str | None = None) -> Tensor:
    """``activation(x[e] @ weight[e].T + bias[e])`` for each expert e of x (E, C, I), weight (E, O, I), bias (E, O).

    `activation` is None or one of FUSED_ACTIVATIONS.
    """
    if activation is not None and activation not in ACTIVATIONS:
        raise ShapeError(f'expert_linear: activation is None or one of {", ".join(sorted(ACTIVATIONS))}, not "{activation}"')
    return ExpertLinear.apply(x, weight, bias, activation=activation, operands=operands_of(weight))
