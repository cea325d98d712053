"""The windows of a pool along each dim: fixed with padding, stride and dilation, or adaptive."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from mpitrain.backend import Array, array_module
from mpitrain.errors import ShapeError
from mpitrain.kernels.pool import Side
from mpitrain.ops.geometry import Numbers, check_input, numbers

Sizes = int | None | Sequence[int | None]
Counts = tuple[tuple[int, ...], tuple[int, ...]]

ONE = Side((0,), (1,), 1)


@lru_cache(64)
def each(size: int) -> Side:
    """Windows of one position: what a dim is given in which nothing is pooled."""
    return Side(tuple(range(size)), tuple(range(1, size + 1)), size)


class _Span(NamedTuple):
    """The windows along one dim: window i sees the positions i stride - padding + (0 ... kernel - 1) dilation that exist."""

    size: int
    kernel: int
    stride: int
    padding: int
    dilation: int
    outputs: int

    def starts(self) -> list[int]:
        return [i * self.stride - self.padding for i in range(self.outputs)]


class Spans(NamedTuple):
    """The windows of a pool: those along each dim, as sides, and as spans where they are fixed."""

    sides: list[Side]
    fixed: list[_Span]

    @classmethod
    def of(cls, name: str, dims: int, x: Any, kernel: Numbers, stride: Numbers | None, padding: Numbers, dilation: Numbers,
           ceil_mode: bool) -> Spans:
        check_input(name, x, dims, batch=False)
        kernels = numbers(name, "kernel_size", kernel, dims)
        strides = kernels if stride is None or stride == () or stride == [] else numbers(name, "stride", stride, dims)
        paddings, apart = numbers(name, "padding", padding, dims, 0), numbers(name, "dilation", dilation, dims)
        spans = []
        for n, k, s, p, d in zip(x.shape[-dims:], kernels, strides, paddings, apart):
            if p > k // 2:
                raise ShapeError(f"{name}: padding is {paddings}; it must be between 0 and half of the kernel {kernels}")
            reach = n + 2 * p - d * (k - 1) - 1
            outputs = -(-reach // s) + 1 if ceil_mode else reach // s + 1
            if ceil_mode and (outputs - 1) * s >= n + p:
                outputs -= 1                      # a window that begins behind the array and its padding
            if outputs < 1:
                raise ShapeError(f"{name}: the window {kernels} with dilation {apart} does not fit into an input of "
                                 f"{tuple(x.shape[-dims:])} with padding {paddings}; make it smaller or pad more")
            spans.append(_Span(n, k, s, p, d, outputs))
        return cls([_side(span) for span in spans], spans)

    @classmethod
    def adaptive(cls, name: str, dims: int, x: Any, size: Sizes) -> Spans:
        check_input(name, x, dims, batch=False)
        wanted = list(size) if isinstance(size, Sequence) else [size] * dims
        if len(wanted) == dims:
            wanted = [n if w is None else w for n, w in zip(x.shape[-dims:], wanted)]
        counts = numbers(name, "output_size", wanted, dims)           # type: ignore[arg-type]
        if min(x.shape[-dims:]) < 1:
            raise ShapeError(f"{name}: an input of {tuple(x.shape[-dims:])} cannot be cut into {counts} parts; it must be at "
                             "least 1 in each dim")
        return cls([_cut(n, count) for n, count in zip(x.shape[-dims:], counts)], [])

    @property
    def outputs(self) -> tuple[int, ...]:
        return tuple(side.count for side in self.sides)

    @property
    def plain(self) -> bool:
        """Are windows without holes?"""
        return all(span.dilation == 1 or span.kernel == 1 for span in self.fixed)

    def counts(self, include_padding: bool) -> list[tuple[int, ...]]:
        """How many positions each window has along each dim; with the padding, what of it lies in the window."""
        if include_padding:
            return [tuple(min(a + span.kernel, span.size + span.padding) - a for a in span.starts()) for span in self.fixed]
        return [tuple(b - a for a, b in zip(side.starts, side.stops)) for side in self.sides]

    def places(self, x: Any) -> Array:
        """Where the largest value of each window is in the last dims of x, as one number, int64: the first of equals, or NaN."""
        x = getattr(x, "array", x)
        xp, dims, shape = array_module(x), len(self.sides), x.shape[-len(self.sides):]
        planes = x.reshape(-1, *shape)
        best: Any = None
        where: Any = None
        for inside, positions in self._steps(xp):
            at, flat = [slice(None)], 0
            for d, (n, place) in enumerate(zip(shape, positions)):
                along = place.reshape([-1 if e == d else 1 for e in range(dims)])
                at.append(along)
                flat = flat * n + along
            value, flat = planes[tuple(at)], xp.broadcast_to(flat, (len(planes), *self.outputs))
            if best is None:                      # the one place of a window that is known to be inside comes first
                best, where = value, xp.where(inside, flat, -1)
                continue
            takes = inside & ((where < 0) | (value > best) | (xp.isnan(value) & ~xp.isnan(best)))
            best, where = xp.where(takes, value, best), xp.where(takes, flat, where)
        return where.reshape(*x.shape[:-dims], *self.outputs)

    def _steps(self, xp: Any) -> Any:
        """For each position in the windows: which windows have it, and where it is along each dim."""
        tables = [self._table(d) for d in range(len(self.sides))]
        for step in product(*(range(len(table)) for table in tables)):
            inside, positions = xp.ones(self.outputs, dtype=bool), []
            for d, k in enumerate(step):
                found = xp.asarray(tables[d][k])
                has = (found >= 0) & (found < self.sides[d].size)
                inside &= has.reshape([-1 if e == d else 1 for e in range(len(step))])
                positions.append(xp.where(has, found, 0))
            yield inside, positions

    def _table(self, d: int) -> list[list[int]]:
        """Position k of each window along dim d; -1 where a window has none."""
        if self.fixed:
            span = self.fixed[d]
            return [[a + k * span.dilation for a in span.starts()] for k in range(span.kernel)]
        side = self.sides[d]
        return [[a + k if a + k < b else -1 for a, b in zip(side.starts, side.stops)] for k in range(side.widest)]


@lru_cache(256)
def _side(span: _Span) -> Side:
    reach = (span.kernel - 1) * span.dilation + 1
    return Side(tuple(max(a, 0) for a in span.starts()), tuple(min(a + reach, span.size) for a in span.starts()), span.size)


@lru_cache(256)
def _cut(size: int, count: int) -> Side:
    return Side(tuple(i * size // count for i in range(count)), tuple(-(-(i + 1) * size // count) for i in range(count)), size)
