"""Tiles of matrix products whose sums stay in registers, written in LLVM's own language: Numba has no vectors.

Every number of a product is a sum of fused multiply-adds in one order, so its bits depend on nothing else in the batch, as BLAS
does not promise.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as _cgutils

from mpitrain.backend.cpu import cpu_flags
from mpitrain.kernels.loops.mathematics import intrinsic

cgutils: Any = _cgutils

WIDE = 64 if "avx512f" in cpu_flags() else 32     # Bytes of a vector; the bits do not depend on it in `tile`.
ROWS, VECTORS = (8, 3) if WIDE == 64 else (4, 3)
SIDE, LANES_BYTES = 4, 64                         # Of `dots`: sums of SIDE x SIDE, each in so many bytes.


def _kind(array: Any) -> tuple[Any, int]:
    return (ir.FloatType(), 4) if array.dtype == types.float32 else (ir.DoubleType(), 8)


def _pointer(context: Any, builder: Any, kind: Any, value: Any, at: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, value).data, [at])


def _load(builder: Any, pointer: Any, steps: Any, kind: Any, size: int) -> Any:
    found = builder.load(builder.bitcast(builder.gep(pointer, [steps]), kind.as_pointer()))
    found.align = size
    return found


def _fused(builder: Any, vector: Any, name: str) -> Any:
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.{name}")
    return lambda a, b, c: builder.call(function, [a, b, c])


def _loop(builder: Any, count: Any, step: int, sums: int, vector: Any, body: Any) -> list[Any]:
    """`sums` vectors, from zeros, that body(i, sums) makes anew for i in range(0, count, step), once at least."""
    i64 = ir.IntType(64)
    before, block, after = builder.block, builder.append_basic_block("terms"), builder.append_basic_block("summed")
    builder.branch(block)
    builder.position_at_end(block)
    i, held = builder.phi(i64), [builder.phi(vector) for _ in range(sums)]
    made = body(i, held)
    following = builder.add(i, ir.Constant(i64, step))
    sums_made = [(phi, ir.Constant(vector, None), again) for phi, again in zip(held, made)]
    for phi, first, again in ((i, ir.Constant(i64, 0), following), *sums_made):
        phi.add_incoming(first, before)
        phi.add_incoming(again, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), block, after)
    builder.position_at_end(after)
    return made


def _shuffled(builder: Any, a: Any, b: Any, lanes: Any) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes)))


def _folded(builder: Any, sums: list[Any], vector: Any) -> list[Any]:
    """Vectors of the sums of each vector's numbers, in order. Numbers are added in halves: i and i + half of all of them, two
    vectors at a time, which make one; so 16 vectors take 15 additions, not 64.
    """
    half = vector.count // 2
    while half:
        lower = [i for i in range(2 * vector.count) if i // half % 2 == 0]
        sums = [builder.fadd(_shuffled(builder, a, b, lower), _shuffled(builder, a, b, [i + half for i in lower]))
                for a, b in zip(sums[::2], sums[1::2])]
        half //= 2
    return sums


@intrinsic
def tile(context: Any, a: Any, a_at: Any, a_row: Any, b: Any, b_at: Any, places: Any, c: Any, c_at: Any, c_row: Any,
         terms: Any) -> Any:
    """c (ROWS, COLUMNS) = a (ROWS, terms) b (terms, COLUMNS), each from a place in its array on; rows of a and c lie so many
    numbers apart, and row i of b from ``b_at + places[i]`` on.
    """
    number, size = _kind(c)
    lanes = WIDE // size
    vector, i64 = ir.VectorType(number, lanes), ir.IntType(64)

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        a_value, a_first, a_step, b_value, b_first, where, c_value, c_first, c_step, count = given
        left, right, to, starts = (_pointer(context, builder, kind, value, at) for kind, value, at in (
            (a, a_value, a_first), (b, b_value, b_first), (c, c_value, c_first), (places, where, ir.Constant(i64, 0))))
        fused = _fused(builder, vector, f"v{lanes}f{8 * size}")
        rows = [builder.gep(left, [builder.mul(a_step, ir.Constant(i64, r))]) for r in range(ROWS)]
        spread = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)

        def body(i: Any, held: list[Any]) -> list[Any]:
            start = builder.load(builder.gep(starts, [i]))
            factors = [_load(builder, right, builder.add(start, ir.Constant(i64, v * lanes)), vector, size)
                       for v in range(VECTORS)]
            made = []
            for r in range(ROWS):
                one = builder.load(builder.gep(rows[r], [i]))
                whole = builder.insert_element(ir.Constant(vector, ir.Undefined), one, ir.Constant(ir.IntType(32), 0))
                whole = builder.shuffle_vector(whole, ir.Constant(vector, ir.Undefined), spread)
                made += [fused(whole, factors[v], held[r * VECTORS + v]) for v in range(VECTORS)]
            return made
        for j, total in enumerate(_loop(builder, count, 1, ROWS * VECTORS, vector, body)):
            place = builder.add(builder.mul(c_step, ir.Constant(i64, j // VECTORS)), ir.Constant(i64, j % VECTORS * lanes))
            builder.store(total, builder.bitcast(builder.gep(to, [place]), vector.as_pointer())).align = size
        return context.get_dummy_value()
    return types.none(a, types.int64, types.int64, b, types.int64, places, c, types.int64, types.int64, types.int64), code


@intrinsic
def dots(context: Any, a: Any, a_at: Any, a_row: Any, b: Any, places: Any, first: Any, c: Any, c_at: Any, c_row: Any,
         terms: Any) -> Any:
    """c (SIDE, SIDE) += a (SIDE, terms) b (SIDE, terms)'; `terms` is a multiple of 16, and row i of b lies from
    ``places[first + i]`` on.
    """
    number, size = _kind(c)
    lanes = LANES_BYTES // size
    vector, i64 = ir.VectorType(number, lanes), ir.IntType(64)

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        a_value, a_first, a_step, b_value, where, number_of_first, c_value, c_first, c_step, count = given
        left, right, to, starts = (_pointer(context, builder, kind, value, at) for kind, value, at in (
            (a, a_value, a_first), (b, b_value, ir.Constant(i64, 0)), (c, c_value, c_first), (places, where, number_of_first)))
        fused = _fused(builder, vector, f"v{lanes}f{8 * size}")
        rows = [builder.gep(left, [builder.mul(a_step, ir.Constant(i64, r))]) for r in range(SIDE)]
        others = [builder.gep(right, [builder.load(builder.gep(starts, [ir.Constant(i64, r)]))]) for r in range(SIDE)]

        def body(i: Any, held: list[Any]) -> list[Any]:
            factors = [_load(builder, other, i, vector, size) for other in others]
            made = []
            for r in range(SIDE):
                one = _load(builder, rows[r], i, vector, size)
                made += [fused(one, factors[q], held[r * SIDE + q]) for q in range(SIDE)]
            return made
        totals = _folded(builder, _loop(builder, count, lanes, SIDE * SIDE, vector, body), vector)
        row = ir.VectorType(number, SIDE)
        for r in range(SIDE):
            whole, first = totals[r * SIDE // lanes], r * SIDE % lanes
            part = _shuffled(builder, whole, whole, range(first, first + SIDE))
            place = builder.bitcast(builder.gep(to, [builder.mul(c_step, ir.Constant(i64, r))]), row.as_pointer())
            before = builder.load(place)
            before.align = size
            builder.store(builder.fadd(before, part), place).align = size
        return context.get_dummy_value()
    return types.none(a, types.int64, types.int64, b, places, types.int64, c, types.int64, types.int64, types.int64), code
