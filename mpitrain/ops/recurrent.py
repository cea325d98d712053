"""One layer of an LSTM, GRU or RNN over whole sequences, as one operation.

Letters: `L` length, `B` batch, `I` inputs, `H` hidden, `P` numbers of the state h (H unless an LSTM projects it), `R` rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.autograd import Context, Function, Tensor, differentiate
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.kernels import recurrent as kernels
from mpitrain.kernels.product import product
from mpitrain.kernels.sums import sum_rows
from mpitrain.ops.cells import unrolled
from mpitrain.ops.linalg import operands_of, room_for
from mpitrain.ops.shape import reshape

__all__ = ["gru", "lstm", "rnn"]

Arrays = tuple[Any, ...]


class Layer(Function):
    """Inputs: x (R, I), weights of input and state, their biases or None, an LSTM's projection or None, first states or None."""

    floats = 8
    gates = 1
    n_states = 1

    @staticmethod
    def forward(ctx: Context, x: Array, w_input: Array, w_state: Array, b_input: Array | None, b_state: Array | None,
                projection: Array | None, *states: Array | None, sizes: Array, reverse: bool, operands: str, relu: bool) -> Any:
        layer: type[Layer] = ctx.function
        ctx.sizes, ctx.reverse, ctx.operands, ctx.relu, ctx.before = sizes, reverse, operands, relu, None
        width = w_state.shape[1]
        hidden = len(w_state) // layer.gates
        bias = b_input if layer.bias_apart or b_state is None or b_input is None else b_input + b_state
        made = product(x, w_input.T, bias, operands=operands)
        if bias is None and b_state is not None and not layer.bias_apart:
            made += b_state
        batch = int(sizes[0])
        shapes = ((batch, width), (batch, hidden))
        start = [ctx.xp.zeros(shape, x.dtype) if state is None else state for shape, state in zip(shapes, states)]
        ctx.given = [array is not None for array in (x, w_input, w_state, b_input, b_state, projection, *states)]
        last = [state.copy() for state in start]
        out = ctx.xp.empty((len(x), width), x.dtype)
        kept = layer.run(ctx, made, last, out, w_state, b_state, projection)
        ctx.save(x, w_input, w_state, projection, out, made, b_input, b_state, *start, *kept)
        return out, *last

    bias_apart = False                            # True where a gate needs what it has of the state by itself

    @classmethod
    def run(cls, ctx: Context, made: Array, last: list[Array], out: Array, weight: Array, bias: Array | None,
            projection: Array | None) -> Arrays:
        """Fills `out`, takes `made` and `last` on to the gates and the last states; what else `run_back` needs."""
        raise NotImplementedError

    @classmethod
    def run_back(cls, ctx: Context, made: Array, grads: list[Array], out: Array, weight: Array, projection: Array | None,
                 kept: list[Array], start: list[Array]) -> Arrays:
        """Takes `made` and grads[1:] on to the gradients of products and of `start`; answers those of the state's, and of h."""
        raise NotImplementedError

    @staticmethod
    def backward(ctx: Context, *grads: Array) -> Arrays:
        layer: type[Layer] = ctx.function
        x, w_input, w_state, projection, out, made, _, _, *rest = ctx.saved
        start, kept = rest[:layer.n_states], rest[layer.n_states:]
        xp = ctx.xp
        if ctx.before is None:                    # the second half of a split backward finds it made
            ready = [xp.ascontiguousarray(grads[0]), *(grad.copy() for grad in grads[1:])]
            ctx.before = *layer.run_back(ctx, made, ready, out, w_state, projection, kept, start), ready[1:]
        states, by_h, by_start = ctx.before
        needs, found = ctx.needs, [None] * 6
        if needs[0]:
            found[0] = product(made, w_input, operands=ctx.operands)
        if needs[1]:
            found[1] = product(made.T, x, out=ctx.out(1), operands=ctx.operands)
        if needs[2]:
            found[2] = product(states.T, kernels.previous(out, start[0], ctx.sizes, ctx.reverse), out=ctx.out(2))
        for place, summed in ((3, made), (4, states)):
            if needs[place]:
                found[place] = sum_rows(summed, room_for(ctx, place, summed.shape[1:], summed.dtype))
        if needs[5]:
            found[5] = product(by_h.T, kept[1], out=ctx.out(5))
        return *found, *(grad if need else None for grad, need in zip(by_start, needs[6:]))

    @staticmethod
    def derivative(ctx: Context, *grads: Tensor) -> Arrays:
        """By the same steps made of other operations: slow, and of every order."""
        start = ctx.saved[8:8 + ctx.function.n_states]
        inputs = [ctx.input(i) if there else None if i < 6 else Tensor(start[i - 6]) for i, there in enumerate(ctx.given)]

        def steps(*tensors: Any) -> tuple[Tensor, ...]:
            x, *weights = tensors[:6]
            return unrolled(ctx.function.__name__.lower(), x, tuple(weights), tensors[6:], ctx.sizes, ctx.reverse, ctx.relu)
        return differentiate(steps, inputs, grads, ctx.needs)


class LSTM(Layer):
    """Hochreiter and Schmidhuber, 1997, with a projection of Sak et al., 2014; gates in the order input, forget, cell, output."""

    gates, n_states = 4, 2

    @classmethod
    def run(cls, ctx: Context, made: Array, last: list[Array], out: Array, weight: Array, bias: Array | None,
            projection: Array | None) -> Arrays:
        cells = ctx.xp.empty((len(out), last[1].shape[1]), out.dtype)
        raw = None if projection is None else ctx.xp.empty_like(cells)
        kernels.lstm(made, *last, out, cells, raw, _packed(weight), _packed(projection), ctx.sizes, ctx.reverse)
        return cells, raw

    @classmethod
    def run_back(cls, ctx: Context, made: Array, grads: list[Array], out: Array, weight: Array, projection: Array | None,
                 kept: list[Array], start: list[Array]) -> Arrays:
        by_h = None if projection is None else ctx.xp.empty_like(out)
        kernels.lstm_gradients(made, *grads, _packed(start[1]), kept[0], by_h, _packed(weight), _packed(projection), ctx.sizes,
                               ctx.reverse)
        return made, by_h


class GRU(Layer):
    """Cho et al., 2014, in PyTorch's form; gates in the order reset, update, new."""

    gates, bias_apart = 3, True

    @classmethod
    def run(cls, ctx: Context, made: Array, last: list[Array], out: Array, weight: Array, bias: Array | None,
            projection: Array | None) -> Arrays:
        inner = ctx.xp.empty_like(out)
        kernels.gru(made, last[0], out, inner, _packed(weight), _packed(bias), ctx.sizes, ctx.reverse)
        return inner,

    @classmethod
    def run_back(cls, ctx: Context, made: Array, grads: list[Array], out: Array, weight: Array, projection: Array | None,
                 kept: list[Array], start: list[Array]) -> Arrays:
        states = ctx.xp.empty_like(made)
        kernels.gru_gradients(made, states, *grads, _packed(start[0]), out, kept[0], _packed(weight), ctx.sizes, ctx.reverse)
        return states, None


class RNN(Layer):
    """Elman, 1990: tanh or relu of what input and state give."""

    @classmethod
    def run(cls, ctx: Context, made: Array, last: list[Array], out: Array, weight: Array, bias: Array | None,
            projection: Array | None) -> Arrays:
        kernels.rnn(made, last[0], out, _packed(weight), ctx.sizes, ctx.reverse, ctx.relu)
        return ()

    @classmethod
    def run_back(cls, ctx: Context, made: Array, grads: list[Array], out: Array, weight: Array, projection: Array | None,
                 kept: list[Array], start: list[Array]) -> Arrays:
        kernels.rnn_gradients(made, *grads, out, _packed(weight), ctx.sizes, ctx.reverse, ctx.relu)
        return made, None


def _packed(x: Array | None) -> Array | None:
    return x if x is None or x.flags.c_contiguous else x.copy()


def _layer(layer: type[Layer], x: Any, weights: Arrays, states: Arrays, sizes: Any, reverse: bool, relu: bool = False
           ) -> tuple[Tensor, ...]:
    """Checks shapes, and runs the layer on rows."""
    name = layer.__name__.lower()
    shape = tuple(x.shape)
    if len(shape) != (3 if sizes is None else 2):
        raise ShapeError(f"{name}: x has shape {shape}, expected " + (
            "(length, batch, inputs); for packed rows give sizes" if sizes is None else "(rows, inputs), since sizes are given"))
    if sizes is None:
        if shape[0] == 0:
            raise ShapeError(f"{name}: sequences of length 0: x has shape {shape}; give at least one step")
        rows, sizes = reshape(x, shape[0] * shape[1], shape[2]), np.full(shape[0], shape[1], np.int64)
    else:
        rows, sizes = x, np.asarray(sizes)
        if (sizes.ndim != 1 or sizes.dtype.kind not in "iu" or not len(sizes) or sizes[-1] < 1 or (sizes[1:] > sizes[:-1]).any()
                or sizes.sum() != shape[0]):
            raise ShapeError(f"{name}: sizes {sizes.tolist()} do not fit {shape[0]} rows: expected whole numbers from 1 on that "
                             "never grow, whose sum is the number of rows")
        sizes = sizes.astype(np.int64)
    _check(layer, name, shape[-1], int(sizes[0]), weights, states)
    out, *last = layer.apply(rows, *weights, *states, sizes=sizes, reverse=bool(reverse), relu=relu,
                             operands=operands_of(weights[0]))
    return out if len(shape) == 2 else reshape(out, *shape[:2], out.shape[1]), *last


def _check(layer: type[Layer], name: str, inputs: int, batch: int, weights: Arrays, states: Arrays) -> None:
    w_state, projection = weights[1], weights[4]
    if len(w_state.shape) != 2 or w_state.shape[0] % layer.gates or not w_state.shape[0]:
        raise ShapeError(f"{name}: the state's weight has shape {tuple(w_state.shape)}, expected ({layer.gates} x hidden, "
                         f"{'projection or ' if layer is LSTM else ''}hidden)")
    hidden = w_state.shape[0] // layer.gates
    width = hidden if projection is None else projection.shape[0]
    expected = {"the input's weight": (weights[0], (layer.gates * hidden, inputs)),
                "the state's weight": (w_state, (layer.gates * hidden, width)),
                "the input's bias": (weights[2], (layer.gates * hidden,)),
                "the state's bias": (weights[3], (layer.gates * hidden,)),
                "the projection": (projection, (width, hidden)), "h": (states[0], (batch, width)),
                "c": (states[-1] if len(states) > 1 else None, (batch, hidden))}
    for what, (array, shape) in expected.items():
        if array is not None and tuple(array.shape) != shape:
            raise ShapeError(f"{name}: {what} has shape {tuple(array.shape)}, expected {shape}")


def lstm(x: Any, weight_input: Any, weight_state: Any, bias_input: Any = None, bias_state: Any = None, h: Any = None,
         c: Any = None, *, projection: Any = None, sizes: Any = None, reverse: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """(out, last h, last c) of x (L, B, I): out is (L, B, P), the states (B, P) and (B, H).

    weight_input (4 H, I), weight_state (4 H, P), biases (4 H,), gates in the order input, forget, cell, output; `projection`
    (P, H). h and c are the first states, 0 by default. With `sizes`, x is packed, (R, I): step t has the next sizes[t] rows, of
    the longest sequences first. `reverse` runs from the last step to the first. Hochreiter and Schmidhuber, 1997.
    """
    out, h, c = _layer(LSTM, x, (weight_input, weight_state, bias_input, bias_state, projection), (h, c), sizes, reverse)
    return out, h, c


def gru(x: Any, weight_input: Any, weight_state: Any, bias_input: Any = None, bias_state: Any = None, h: Any = None, *,
        sizes: Any = None, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """(out, last h) of x (L, B, I), like `lstm`; weights (3 H, I) and (3 H, H), gates in the order reset, update, new.

    The new gate is tanh(input's part + reset * state's part), as in PyTorch. Cho et al., 2014.
    """
    out, h = _layer(GRU, x, (weight_input, weight_state, bias_input, bias_state, None), (h,), sizes, reverse)
    return out, h


def rnn(x: Any, weight_input: Any, weight_state: Any, bias_input: Any = None, bias_state: Any = None, h: Any = None, *,
        nonlinearity: str = "tanh", sizes: Any = None, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """(out, last h) of x (L, B, I), like `lstm`: h = tanh(x W' + b + h V' + d), or relu of that. Elman, 1990."""
    if nonlinearity not in ("tanh", "relu"):
        raise ShapeError(f'rnn: nonlinearity is "tanh" or "relu", not "{nonlinearity}"')
    out, h = _layer(RNN, x, (weight_input, weight_state, bias_input, bias_state, None), (h,), sizes, reverse,
                    nonlinearity == "relu")
    return out, h
