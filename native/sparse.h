/* Products y = x w' + bias by a sparse w, for one number type T. */

#include "turn.h"

#define PER_BLOCK (HEIGHT / LANES)                                            /* vectors of a block */
#define TILE_ROWS (VECTOR_BYTES == 64 ? LANES : LANES / 2)                     /* of x: their sums fill half of the registers */
#define SOME_ROWS 4                                                           /* of x, where fewer are left */
#define ONE_TOGETHER (CHAINS / PER_BLOCK)                                     /* rows of blocks that meet one row of x together */
#define SOME_TOGETHER (CHAINS / PER_BLOCK / SOME_ROWS > 0 ? CHAINS / PER_BLOCK / SOME_ROWS : 1)

/* Columns of rows of x in vectors of `width` numbers, zero past the last row. */
static void NAME(turn_rows)(const T *x, i64 rows, i64 k, T *turned, i64 width)
{
    i64 c = 0;
    if (width == LANES && rows == LANES)
        for (; c + LANES <= k; c += LANES) NAME(turn)(x + c, k, turned + c * LANES, LANES, LANES);
    for (; c < k; c++)
        for (i64 i = 0; i < width; i++) turned[c * width + i] = i < rows ? x[i * k + c] : 0;
}

/* A block times numbers of its column. */
INLINE void NAME(block_times)(const T *from, const T *value, V *sum, const int rows)
{
    UNROLL for (int v = 0; v < PER_BLOCK; v++) {
        V right = *(const V *)(value + v * LANES);
        UNROLL for (int i = 0; i < rows; i++) sum[i * PER_BLOCK + v] += from[i] * right;
    }
}

/* `rows` rows of x, whose column c begins at x + c * width, times `together` rows of blocks that follow each other. */
INLINE void NAME(block_tile)(const T *x, const i64 *starts, i64 pieces, const int32_t *columns, const T *values, const T *bias,
                             T *y, i64 y_step, const i64 width, const int rows, const int together)
{
    for (i64 p = 0; p < pieces; p++) {
        V sum[HEIGHT] = {0};
        const int32_t *column[CHAINS];
        const T *value[CHAINS];
        i64 count[CHAINS], common = 0;
        UNROLL for (int q = 0; q < together; q++) {
            i64 first = starts[q * pieces + p];
            column[q] = columns + first, value[q] = values + first * HEIGHT, count[q] = starts[q * pieces + p + 1] - first;
            common = q ? least(common, count[q]) : count[q];
        }
        for (i64 b = 0; b < common; b++)
            UNROLL for (int q = 0; q < together; q++)
                NAME(block_times)(x + column[q][b] * width, value[q] + b * HEIGHT, sum + q * rows * PER_BLOCK, rows);
        if (together > 1)
            UNROLL for (int q = 0; q < together; q++)
                for (i64 b = common; b < count[q]; b++)
                    NAME(block_times)(x + column[q][b] * width, value[q] + b * HEIGHT, sum + q * rows * PER_BLOCK, rows);
        UNROLL for (int q = 0; q < together; q++) UNROLL for (int i = 0; i < rows; i++) UNROLL for (int v = 0; v < PER_BLOCK; v++) {
            V all = sum[(q * rows + i) * PER_BLOCK + v], *to = (V *)(y + i * y_step + q * HEIGHT + v * LANES);
            if (p) all += *to;
            if (bias && p == pieces - 1) all += *(const V *)(bias + q * HEIGHT + v * LANES);
            *to = all;
        }
    }
}

#define TILE(name, width, rows, together)                                                                                       \
static __attribute__((noinline)) void NAME(name)(const T *x, const i64 *starts, i64 pieces, const int32_t *columns,              \
                                                 const T *values, const T *bias, T *y, i64 y_step)                              \
{                                                                                                                               \
    NAME(block_tile)(x, starts, pieces, columns, values, bias, y, y_step, width, rows, together);                               \
}
TILE(many_rows, LANES, TILE_ROWS, 1)
TILE(some_rows, SOME_ROWS, SOME_ROWS, SOME_TOGETHER)
TILE(some_rows_once, SOME_ROWS, SOME_ROWS, 1)
TILE(one_row, 1, 1, ONE_TOGETHER)
TILE(one_row_once, 1, 1, 1)
#undef TILE

typedef void (*NAME(BlockTile))(const T *, const i64 *, i64, const int32_t *, const T *, const T *, T *, i64);

/* Rows g0 .. g1 of blocks by a tile, `together` of them at a time, and the rest by `once`. */
static void NAME(down)(NAME(BlockTile) tile, NAME(BlockTile) once, i64 together, i64 g0, i64 g1, const T *x, const i64 *starts,
                       i64 pieces, const int32_t *columns, const T *values, const T *bias, T *y, i64 y_step)
{
    for (i64 g = g0, step; g < g1; g += step) {
        step = g1 - g >= together ? together : 1;
        (step == together ? tile : once)(x, starts + g * pieces, pieces, columns, values, bias ? bias + g * HEIGHT : NULL,
                                         y + g * HEIGHT, y_step);
    }
}

/* `turned` has room for MOST_ROWS * k numbers. */
int NAME(block_product)(const T *x, const i64 *starts, const int32_t *columns, const T *values, const T *bias, T *turned, T *y,
                        i64 m, i64 n, i64 k, i64 n_starts, i64 blocks)
{
    const i64 groups = n / HEIGHT, pieces = pieces_of(k), most = STAYS / (i64)sizeof(T) / HEIGHT;
    if (n % HEIGHT || wrong(starts, n_starts, columns, groups, blocks, k)) return 2;
    for (i64 i0 = 0, rows; i0 < m; i0 += rows) {
        rows = least(m - i0, MOST_ROWS);
        const i64 by_lanes = rows - rows % LANES, by_some = LANES > SOME_ROWS ? rows - rows % SOME_ROWS : by_lanes;
        for (i64 i = 0; i < by_lanes; i += LANES) NAME(turn_rows)(x + (i0 + i) * k, LANES, k, turned + i * k, LANES);
        for (i64 i = by_lanes; i < by_some; i += SOME_ROWS)
            NAME(turn_rows)(x + (i0 + i) * k, SOME_ROWS, k, turned + i * k, SOME_ROWS);
        for (i64 g0 = 0, g1; g0 < groups; g0 = g1) {
            for (g1 = g0 + 1; g1 < groups && starts[(g1 + 1) * pieces] - starts[g0 * pieces] <= most; g1++);
#define DOWN(tile, once, together, from) \
    NAME(down)(NAME(tile), NAME(once), together, g0, g1, from, starts, pieces, columns, values, bias, y + (i0 + i) * n, n)
            i64 i = 0;
            for (; i < by_lanes; i += TILE_ROWS) DOWN(many_rows, many_rows, 1, turned + i / LANES * LANES * k + i % LANES);
            for (; i < by_some; i += SOME_ROWS) DOWN(some_rows, some_rows_once, SOME_TOGETHER, turned + i * k);
            for (; i < rows; i++) DOWN(one_row, one_row_once, ONE_TOGETHER, x + (i0 + i) * k);
#undef DOWN
        }
    }
    return 0;
}

INLINE void NAME(csr_times)(const T *from, T value, V *sum, const int vectors)
{
    UNROLL for (int v = 0; v < vectors; v++) sum[v] += value * *(const V *)(from + v * LANES);
}

/* to[0 .. vectors * LANES) = sum over j of values[j] * x'[columns[j]], rows of x' being PANEL numbers apart, added to what is
   there or not; and the same of a second row beside it, where there is one. */
INLINE void NAME(csr_rows)(const T *turned, const i64 *starts, i64 pieces, const int32_t *columns, const T *values, T *to, int add,
                           const int vectors, const int together)
{
    V sum[2][PANEL / LANES] = {0};
    const i64 first[2] = {starts[0], starts[together > 1 ? pieces : 0]};
    const i64 count[2] = {starts[1] - first[0], together > 1 ? starts[pieces + 1] - first[1] : 0};
    const i64 common = together > 1 ? least(count[0], count[1]) : count[0];
    for (i64 j = 0; j < common; j++)
        UNROLL for (int q = 0; q < together; q++)
            NAME(csr_times)(turned + columns[first[q] + j] * (i64)PANEL, values[first[q] + j], sum[q], vectors);
    if (together > 1)
        UNROLL for (int q = 0; q < together; q++)
            for (i64 j = common; j < count[q]; j++)
                NAME(csr_times)(turned + columns[first[q] + j] * (i64)PANEL, values[first[q] + j], sum[q], vectors);
    UNROLL for (int q = 0; q < together; q++) UNROLL for (int v = 0; v < vectors; v++) {
        V *sums = (V *)(to + q * PANEL + v * LANES);
        if (add) sum[q][v] += *sums;
        *sums = sum[q][v];
    }
}

/* Columns of x in rows of PANEL numbers, zero past the last row of x. */
static void NAME(turn_panel)(const T *x, i64 rows, i64 k, T *turned)
{
    for (i64 i = 0; i < (rows + LANES - 1) / LANES * LANES; i += LANES) {
        i64 c = 0;
        if (rows - i >= LANES) for (; c + LANES <= k; c += LANES) NAME(turn)(x + i * k + c, k, turned + c * PANEL + i, PANEL, LANES);
        for (; c < k; c++)
            for (i64 r = 0; r < LANES; r++) turned[c * PANEL + i + r] = i + r < rows ? x[(i + r) * k + c] : 0;
    }
}

int NAME(csr_product)(const T *x, const i64 *starts, const int32_t *columns, const T *values, const T *bias, T *turned, T *y, i64 m,
                      i64 n, i64 k, i64 n_starts, i64 count)
{
    T sums[LANES * PANEL] __attribute__((aligned(64))), block[LANES * LANES] __attribute__((aligned(64)));
    const i64 pieces = pieces_of(k);
    if (wrong(starts, n_starts, columns, n, count, k)) return 2;
    for (i64 i0 = 0; i0 < m; i0 += PANEL) {
        i64 rows = least(m - i0, PANEL), vectors = (rows + LANES - 1) / LANES;
        NAME(turn_panel)(x + i0 * k, rows, k, turned);
        for (i64 j0 = 0; j0 < n; j0 += LANES) {
            i64 there = least(n - j0, LANES);
            for (i64 p = 0; p < pieces; p++) for (i64 j = 0, step; j < there; j += step) {
                const i64 *s = starts + (j0 + j) * pieces + p;
                step = vectors == PANEL / LANES && there - j > 1 ? 2 : 1;
                if (step > 1) NAME(csr_rows)(turned, s, pieces, columns, values, sums + j * PANEL, p > 0, PANEL / LANES, 2);
                else for (i64 w = 0; w < vectors; w++)
                    NAME(csr_rows)(turned + w * LANES, s, pieces, columns, values, sums + j * PANEL + w * LANES, p > 0, 1, 1);
            }
            for (i64 i = 0; i < rows; i += LANES) {
                if (there == LANES) NAME(turn)(sums + i, PANEL, block, LANES, LANES);
                for (i64 r = 0; r < least(rows - i, LANES); r++) for (i64 j = 0; j < there; j++) {
                    T value = there == LANES ? block[r * LANES + j] : sums[j * PANEL + i + r];
                    y[(i0 + i + r) * n + j0 + j] = bias ? value + bias[j0 + j] : value;
                }
            }
        }
    }
    return 0;
}

#undef TILE_ROWS
#undef SOME_ROWS
#undef ONE_TOGETHER
#undef SOME_TOGETHER
