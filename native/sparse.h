/* The body of sparse.c for one number type T. */

#include "turn.h"

#define PER_BLOCK (HEIGHT / LANES)                                            /* vectors of a block */
#if VECTOR_BYTES == 64
#define TILE_ROWS (6 / PER_BLOCK)                                             /* of x: their sums fill 24 of 32 registers */
#else
#define TILE_ROWS 1
#endif

/* Rows of x times a row of blocks: y[i][0..HEIGHT) = sum over b of x[i][columns[b]] * values[b], in CHAINS sums beside each other. */
INLINE void NAME(block_tile)(const T *x, i64 x_step, const int32_t *columns, const T *values, i64 blocks, const T *bias, T *y,
                             i64 y_step, const int rows)
{
    V sum[TILE_ROWS][CHAINS][PER_BLOCK] = {0};
    const T *row[TILE_ROWS];
    UNROLL for (int i = 0; i < rows; i++) row[i] = x + i * x_step;
#define CHAIN(c)                                                                                                                \
    UNROLL for (int v = 0; v < PER_BLOCK; v++) {                                                                                \
        V right = *(const V *)(values + (b + c) * HEIGHT + v * LANES);                                                          \
        UNROLL for (int i = 0; i < rows; i++) sum[i][c][v] += row[i][columns[b + c]] * right;                                   \
    }
    i64 b = 0;
    for (; b + CHAINS <= blocks; b += CHAINS) { CHAIN(0) CHAIN(1) CHAIN(2) CHAIN(3) }
    if (blocks - b > 0) { CHAIN(0) }
    if (blocks - b > 1) { CHAIN(1) }
    if (blocks - b > 2) { CHAIN(2) }
#undef CHAIN
    UNROLL for (int i = 0; i < rows; i++) UNROLL for (int v = 0; v < PER_BLOCK; v++) {
        V all = (sum[i][0][v] + sum[i][1][v]) + (sum[i][2][v] + sum[i][3][v]);
        if (bias) all += *(const V *)(bias + v * LANES);
        *(V *)(y + i * y_step + v * LANES) = all;
    }
}

static __attribute__((noinline)) void NAME(few_rows)(const T *x, i64 x_step, const int32_t *columns, const T *values, i64 blocks,
                                                     const T *bias, T *y, i64 y_step)
{
    NAME(block_tile)(x, x_step, columns, values, blocks, bias, y, y_step, 1);
}

static __attribute__((noinline)) void NAME(many_rows)(const T *x, i64 x_step, const int32_t *columns, const T *values, i64 blocks,
                                                      const T *bias, T *y, i64 y_step)
{
    NAME(block_tile)(x, x_step, columns, values, blocks, bias, y, y_step, TILE_ROWS);
}

int NAME(block_product)(const T *x, const i64 *starts, const int32_t *columns, const T *values, const T *bias, T *y, i64 m, i64 n,
                        i64 k, i64 blocks)
{
    i64 groups = n / HEIGHT, most = STAYS / (i64)sizeof(T) / HEIGHT;
    if (n % HEIGHT || wrong(starts, columns, groups, blocks, k)) return 2;
    for (i64 g0 = 0, g1; g0 < groups; g0 = g1) {
        for (g1 = g0 + 1; g1 < groups && starts[g1 + 1] - starts[g0] <= most; g1++);
        for (i64 i = 0, rows; i < m; i += rows) {
            rows = m - i >= TILE_ROWS ? TILE_ROWS : 1;
            for (i64 g = g0; g < g1; g++)
                (rows > 1 ? NAME(many_rows) : NAME(few_rows))(x + i * k, k, columns + starts[g], values + starts[g] * HEIGHT,
                    starts[g + 1] - starts[g], bias ? bias + g * HEIGHT : NULL, y + i * n + g * HEIGHT, n);
        }
    }
    return 0;
}

/* to[0 .. vectors * LANES) = sum over j of values[j] * x'[columns[j]], rows of x' being PANEL numbers apart. */
INLINE void NAME(csr_row)(const T *turned, const int32_t *columns, const T *values, i64 count, T *to, const int vectors)
{
    V sum[PANEL / LANES] = {0};
    for (i64 j = 0; j < count; j++) {
        const T *from = turned + columns[j] * (i64)PANEL;
        UNROLL for (int v = 0; v < vectors; v++) sum[v] += values[j] * *(const V *)(from + v * LANES);
    }
    UNROLL for (int v = 0; v < vectors; v++) *(V *)(to + v * LANES) = sum[v];
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
                      i64 n, i64 k, i64 count)
{
    T sums[LANES * PANEL] __attribute__((aligned(64))), block[LANES * LANES] __attribute__((aligned(64)));
    if (wrong(starts, columns, n, count, k)) return 2;
    for (i64 i0 = 0; i0 < m; i0 += PANEL) {
        i64 rows = least(m - i0, PANEL), vectors = (rows + LANES - 1) / LANES;
        NAME(turn_panel)(x + i0 * k, rows, k, turned);
        for (i64 j0 = 0; j0 < n; j0 += LANES) {
            i64 there = least(n - j0, LANES);
            for (i64 j = 0; j < there; j++) {
                const int32_t *c = columns + starts[j0 + j];
                const T *v = values + starts[j0 + j];
                i64 long_ = starts[j0 + j + 1] - starts[j0 + j];
                if (vectors == PANEL / LANES) NAME(csr_row)(turned, c, v, long_, sums + j * PANEL, PANEL / LANES);
                else for (i64 w = 0; w < vectors; w++) NAME(csr_row)(turned + w * LANES, c, v, long_, sums + j * PANEL + w * LANES, 1);
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

#undef V
#undef MASK
#undef PER_BLOCK
#undef TILE_ROWS
