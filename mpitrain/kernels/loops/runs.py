"""Passes over runs of numbers of one channel, of four vectors at a time, in LLVM's own language: as in native/normalise.h, to the
same bits. Each says where the next runs lie (`later` numbers on), and has them on their way to the cache: runs lie in pages of
their own, where no CPU looks by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils as _cgutils

from mpitrain.kernels.loops.mathematics import intrinsic

cgutils: Any = _cgutils

VECTORS, BYTES = 4, 64                            # Vectors of a step, and their bytes.
NEAR, FAR = 1024, 16384                           # Numbers from the way into the cache to their use; of a long run.
MOMENTS, EIGHT = -1, 8
RELU, RELU6, HARDSWISH = 1, 2, 3
I64, I32 = ir.IntType(64), ir.IntType(32)


def number_of_type(array: Any) -> tuple[Any, int]:
    """(LLVM's type of an array's numbers, their bytes)."""
    return (ir.FloatType(), 4) if array.dtype == types.float32 else (ir.DoubleType(), 8)


def pointer_to(context: Any, builder: Any, kind: Any, value: Any, at: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, value).data, [at])


def fetch(builder: Any, pointer: Any, written: bool) -> None:
    """The line at a pointer is on its way to the second cache; where there is no memory, nothing happens."""
    byte = ir.IntType(8).as_pointer()
    function = builder.module.declare_intrinsic("llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32]))
    builder.call(function, [builder.bitcast(pointer, byte), *(ir.Constant(I32, n) for n in (int(written), 2, 1))])


@intrinsic
def bring(context: Any, x: Any, at: Any, lines: Any) -> Any:
    """`lines` lines of x from x[at] on are on their way, to be read."""
    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        value, first, count = given
        start = pointer_to(context, builder, x, value, first)
        with cgutils.for_range(builder, count, intp=I64) as loop:
            line = builder.mul(loop.index, ir.Constant(I64, BYTES // number_of_type(x)[1]))
            fetch(builder, builder.gep(start, [line]), False)
        return context.get_dummy_value()
    return types.none(x, types.int64, types.int64), code


@intrinsic
def every_second(context: Any, x: Any, at: Any, y: Any, to: Any, n: Any) -> Any:
    """y[to + i] = x[at + 2 i] for i below n; of x, what lies before, between and behind these is not read beyond its last one."""
    number, size = number_of_type(x)

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        x_value, x_first, y_value, y_first, count = given
        px, py = pointer_to(context, builder, x, x_value, x_first), pointer_to(context, builder, y, y_value, y_first)
        run = Run(builder, number, size, [px], [py], count, ir.Constant(I64, 0))
        half, order = ir.VectorType(number, EIGHT), ir.VectorType(I32, EIGHT)
        whole = run.until(EIGHT)
        with run.between(ir.Constant(I64, 0), whole, EIGHT) as (i, _):
            place = builder.mul(i, ir.Constant(I64, 2))
            low, high = run.load(px, place, half), run.load(px, builder.add(place, ir.Constant(I64, EIGHT - 1)), half)
            picked = ir.Constant(order, [*range(0, EIGHT, 2), *range(EIGHT + 1, 2 * EIGHT, 2)])
            run.store(builder.shuffle_vector(low, high, picked), py, i)
        with run.between(whole, count, 1) as (i, _):
            run.store(run.load(px, builder.mul(i, ir.Constant(I64, 2)), number), py, i)
        return context.get_dummy_value()
    return types.none(x, types.int64, y, types.int64, types.int64), code


class Run:
    """`n` numbers of some arrays, taken by vectors of `lanes`, and what is left by vectors and at last by numbers."""

    def __init__(self, builder: Any, number: Any, size: int, read: list[Any], written: list[Any], n: Any, later: Any):
        self.builder, self.number, self.size, self.later, self.n = builder, number, size, later, n
        self.arrays, self.written = read + written, [False] * len(read) + [True] * len(written)
        self.lanes = BYTES // size
        self.vector = ir.VectorType(number, self.lanes)

    def load(self, pointer: Any, at: Any, kind: Any) -> Any:
        found = self.builder.load(self.builder.bitcast(self.builder.gep(pointer, [at]), kind.as_pointer()))
        found.align = self.size
        return found

    def store(self, value: Any, pointer: Any, at: Any) -> None:
        place = self.builder.bitcast(self.builder.gep(pointer, [at]), value.type.as_pointer())
        self.builder.store(value, place).align = self.size

    def spread(self, value: Any, kind: Any) -> Any:
        """A number in all lanes of `kind`."""
        if kind == self.number:
            return value
        none = ir.Constant(kind, ir.Undefined)
        whole = self.builder.insert_element(none, value, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(whole, none, ir.Constant(ir.VectorType(I32, self.lanes), [0] * self.lanes))

    def positive(self, sign: Any, value: Any, test: str) -> Any:
        """`value`, but 0 where `sign` is below 0 (or is 0, where the test is "<=")."""
        return self.builder.select(self.builder.fcmp_ordered(test, sign, ir.Constant(sign.type, None)),
                                   ir.Constant(value.type, None), value)

    def real(self, value: float, kind: Any) -> Any:
        """One number in all lanes of `kind`, rounded as NumPy rounds it."""
        rounded = float(np.float32(value)) if self.size == 4 else value
        return self.spread(ir.Constant(self.number, rounded), kind)

    def activated(self, u: Any, activation: int) -> Any:
        """`activated` of native/activated.h."""
        builder, kind = self.builder, u.type
        if not activation:
            return u
        v = builder.fadd(u, self.real(3, kind)) if activation == HARDSWISH else u
        v = self.positive(v, v, "<")
        if activation > RELU:
            six = self.real(6, kind)
            v = builder.select(builder.fcmp_ordered(">", v, six), six, v)
        return builder.fmul(builder.fmul(u, v), self.real(1 / 6, kind)) if activation == HARDSWISH else v

    def passed(self, u: Any, g: Any, activation: int) -> Any:
        """`passed` of native/activated.h, of what the activation got; of ReLU, that may be what it gave."""
        builder, kind = self.builder, u.type
        if activation == HARDSWISH:
            line = builder.fadd(builder.fmul(u, self.real(1 / 3, kind)), self.real(0.5, kind))
            inside = builder.fcmp_ordered("<", u, self.real(3, kind))
            g = builder.fmul(g, builder.select(inside, line, self.real(1, kind)))
            return builder.select(builder.fcmp_ordered("<=", u, self.real(-3, kind)), ir.Constant(kind, None), g)
        g = self.positive(u, g, "<=")
        if activation == RELU6:
            g = builder.select(builder.fcmp_ordered(">=", u, self.real(6, kind)), ir.Constant(kind, None), g)
        return g

    def until(self, step: int) -> Any:
        """The numbers of the run that are in whole steps."""
        return self.builder.and_(self.n, ir.Constant(I64, -step))

    def between(self, start: Any, stop: Any, step: int) -> Any:
        return cgutils.for_range_slice(self.builder, start, stop, ir.Constant(I64, step), intp=I64)

    def ahead(self, at: Any) -> None:
        """What comes `later` is on its way, all VECTORS lines of each array."""
        for pointer, written in zip(self.arrays, self.written):
            for v in range(VECTORS):
                line = self.builder.add(self.builder.add(at, self.later), ir.Constant(I64, v * self.lanes))
                fetch(self.builder, self.builder.gep(pointer, [line]), written)

    def each(self, body: Callable[[Any, Any], None]) -> None:
        """body(at, kind) for each vector, and each number at the end."""
        whole, vectors = self.until(VECTORS * self.lanes), self.until(self.lanes)
        with self.between(ir.Constant(I64, 0), whole, VECTORS * self.lanes) as (at, _):
            self.ahead(at)
            for v in range(VECTORS):
                body(self.builder.add(at, ir.Constant(I64, v * self.lanes)), self.vector)
        with self.between(whole, vectors, self.lanes) as (at, _):
            body(at, self.vector)
        with self.between(vectors, self.n, 1) as (at, _):
            body(at, self.number)

    def sums(self, to: list[Any], body: Callable[[Any, Any], list[Any]]) -> None:
        """Adds the numbers that body(at, kind) makes to the lanes of each of `to`: those of VECTORS in turn."""
        builder, whole, vectors = self.builder, self.until(VECTORS * self.lanes), self.until(self.lanes)
        places = [[ir.Constant(I64, v * self.lanes) for v in range(VECTORS)] for _ in to]
        before, block, after = builder.block, builder.append_basic_block("whole"), builder.append_basic_block("rest")
        done = builder.append_basic_block("done")
        starts = [[self.load(pointer, place, self.vector) for place in row] for pointer, row in zip(to, places)]
        builder.cbranch(builder.icmp_signed(">", whole, ir.Constant(I64, 0)), block, after)
        builder.position_at_end(block)
        at, held = builder.phi(I64), [[builder.phi(self.vector) for _ in row] for row in starts]
        made: list[list[Any]] = [[] for _ in to]
        self.ahead(at)
        for v in range(VECTORS):
            for j, one in enumerate(body(builder.add(at, ir.Constant(I64, v * self.lanes)), self.vector)):
                made[j].append(builder.fadd(held[j][v], one))
        following = builder.add(at, ir.Constant(I64, VECTORS * self.lanes))
        for phi, first, again in [(at, ir.Constant(I64, 0), following),
                                  *[(held[j][v], starts[j][v], made[j][v]) for j in range(len(to)) for v in range(VECTORS)]]:
            phi.add_incoming(first, before)
            phi.add_incoming(again, block)
        builder.cbranch(builder.icmp_signed("<", following, whole), block, done)
        builder.position_at_end(done)
        for j, pointer in enumerate(to):
            for v in range(VECTORS):
                self.store(made[j][v], pointer, places[j][v])
        builder.branch(after)
        builder.position_at_end(after)
        self._rest(to, body, whole, vectors)

    def _rest(self, to: list[Any], body: Callable[[Any, Any], list[Any]], whole: Any, vectors: Any) -> None:
        for start, stop, step, kind in ((whole, vectors, self.lanes, self.vector), (vectors, self.n, 1, self.number)):
            with self.between(start, stop, step) as (at, _):
                lane = self.builder.sub(at, whole)
                for pointer, one in zip(to, body(at, kind)):
                    self.store(self.builder.fadd(self.load(pointer, lane, kind), one), pointer, lane)


def _summing(masked: int) -> Any:
    """Adds to the lanes of a and b, from number `to` of theirs on. With z = x - m, where `masked` is MOMENTS: z and z z;
    otherwise h and h z, where h is what passes of g: all (0), what has y > 0, which goes to h (1), or what ReLU, ReLU6 or
    hard-swish of z s + shift pass (2, 3, 4).
    """
    @intrinsic
    def add(context: Any, a: Any, b: Any, to: Any, x: Any, g: Any, y: Any, h: Any, at: Any, n: Any, later: Any, m: Any, s: Any,
            shift: Any) -> Any:
        number, size = number_of_type(x)

        def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            a_value, b_value, lane, x_value, g_value, y_value, h_value, first, count, distance, middle, scale, constant = given
            lanes = [pointer_to(context, builder, kind, value, lane) for kind, value in ((a, a_value), (b, b_value))]
            px, pg, py, ph = (pointer_to(context, builder, kind, value, first)
                              for kind, value in ((x, x_value), (g, g_value), (y, y_value), (h, h_value)))
            read = [px] if masked == MOMENTS else [px, pg, py] if masked == 1 else [px, pg]
            run = Run(builder, number, size, read, [ph] if masked == 1 else [], count, distance)

            def body(i: Any, kind: Any) -> list[Any]:
                z = builder.fsub(run.load(px, i, kind), run.spread(middle, kind))
                if masked == MOMENTS:
                    return [z, builder.fmul(z, z)]
                v = run.load(pg, i, kind)
                if masked == 1:
                    v = run.positive(run.load(py, i, kind), v, "<=")
                    run.store(v, ph, i)
                elif masked:
                    scaled = builder.fmul(z, run.spread(scale, kind))
                    v = run.passed(builder.fadd(scaled, run.spread(constant, kind)), v, masked - 1)
                return [v, builder.fmul(v, z)]
            run.sums(lanes, body)
            return context.get_dummy_value()
        return types.none(a, b, to, x, g, y, h, types.int64, types.int64, types.int64, m, s, shift), code
    return add


def _normalising(residual: bool, activation: int) -> Any:
    """y = (x - m) s + shift, plus r where there is a residual, and the activation of that."""
    @intrinsic
    def normalise(context: Any, x: Any, r: Any, y: Any, at: Any, n: Any, later: Any, m: Any, s: Any, shift: Any) -> Any:
        number, size = number_of_type(x)

        def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            x_value, r_value, y_value, first, count, distance, middle, scale, constant = given
            px, pr, py = (pointer_to(context, builder, kind, value, first)
                          for kind, value in ((x, x_value), (r, r_value), (y, y_value)))
            run = Run(builder, number, size, [px, pr] if residual else [px], [py], count, distance)

            def body(i: Any, kind: Any) -> None:
                z = builder.fsub(run.load(px, i, kind), run.spread(middle, kind))
                v = builder.fadd(builder.fmul(z, run.spread(scale, kind)), run.spread(constant, kind))
                if residual:
                    v = builder.fadd(v, run.load(pr, i, kind))
                run.store(run.activated(v, activation), py, i)
            run.each(body)
            return context.get_dummy_value()
        return types.none(x, r, y, types.int64, types.int64, types.int64, m, s, shift), code
    return normalise


def _sloping(activation: int) -> Any:
    """dx = s h + slope (x - m) + constant, where h is what the activation of (x - m) s + shift passes of g."""
    @intrinsic
    def slope_of(context: Any, g: Any, x: Any, dx: Any, at: Any, n: Any, later: Any, m: Any, s: Any, shift: Any, slope: Any,
                 constant: Any) -> Any:
        number, size = number_of_type(x)

        def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            g_value, x_value, dx_value, first, count, distance, *numbers = given
            pg, px, to = (pointer_to(context, builder, kind, value, first)
                          for kind, value in ((g, g_value), (x, x_value), (dx, dx_value)))
            run = Run(builder, number, size, [pg, px], [to], count, distance)

            def body(i: Any, kind: Any) -> None:
                middle, scale, moved, steep, level = (run.spread(value, kind) for value in numbers)
                z, h = builder.fsub(run.load(px, i, kind), middle), run.load(pg, i, kind)
                if activation:
                    h = run.passed(builder.fadd(builder.fmul(z, scale), moved), h, activation)
                total = builder.fadd(builder.fmul(scale, h), builder.fmul(steep, z))
                run.store(builder.fadd(total, level), to, i)
            run.each(body)
            return context.get_dummy_value()
        return types.none(g, x, dx, types.int64, types.int64, types.int64, m, s, shift, slope, constant), code
    return slope_of


add_moments, add_plain, add_passed = (_summing(masked) for masked in (MOMENTS, 0, 1))
add_signed, add_signed6, add_signed_swish = (_summing(masked) for masked in (2, 3, 4))
normalise, normalise_relu, normalise_relu6, normalise_hardswish = (_normalising(False, activation) for activation in range(4))
add_residual, add_residual_relu = (_normalising(True, activation) for activation in (0, RELU))
sloped, sloped_signed, sloped_signed6, sloped_signed_swish = (_sloping(activation) for activation in range(4))
