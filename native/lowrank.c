/* Products of a matrix and few columns, one thread: M = values + error (m, k), P (r, m), Q (r, k). See kernels/lowrank.py, whose
   expressions have the same bits: orders of sums are fixed, and nothing is fused. `error` is NULL where no residual is kept.

   All of them are bound by memory: a tile of ROWS rows and COLUMNS columns of P or Q takes each number of M from memory once. */

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#include "sixteen.h"
#include "vectors.h"

#define LANES 16                    /* partial sums of P */
#define PARTS (LANES / FLOATS)      /* vectors of them */
#define COLUMNS 4
#ifdef __AVX512F__
#define ROWS 4
#define DOWN 8                      /* rows of M that are added to Q at a time */
#else
#define ROWS 1                      /* with fewer registers */
#define DOWN 4
#endif
#define UNROLL _Pragma("GCC unroll 16")

typedef float V __attribute__((vector_size(VECTOR_BYTES)));

INLINE V load(const float *at) { V v; memcpy(&v, at, sizeof v); return v; }
INLINE void store(float *at, V v) { memcpy(at, &v, sizeof v); }
INLINE V some(const float *at, i64 count) { V v = {0}; memcpy(&v, at, 4 * (size_t)count); return v; }
INLINE V of_m(const float *values, const float *error, i64 at)
{
    return error ? load(values + at) + load(error + at) : load(values + at);
}

INLINE float folded(const V *v)
{
    float lanes[LANES];
    UNROLL for (int h = 0; h < PARTS; h++) store(lanes + h * FLOATS, v[h]);
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return lanes[0];
}

/* `rows` rows of M from `values`, by `columns` rows of Q. */
INLINE void left_tile(const float *values, const float *error, const float *q, float *p, i64 m, i64 k, const int rows,
                      const int columns)
{
    V sum[ROWS][COLUMNS][PARTS];
    i64 j = 0;
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int c = 0; c < columns; c++)
            UNROLL for (int h = 0; h < PARTS; h++) sum[i][c][h] = (V){0};
    for (; j + LANES <= k; j += LANES)
        UNROLL for (int h = 0; h < PARTS; h++) {
            V right[COLUMNS];
            UNROLL for (int c = 0; c < columns; c++) right[c] = load(q + c * k + j + h * FLOATS);
            UNROLL for (int i = 0; i < rows; i++) {
                V row = of_m(values, error, i * k + j + h * FLOATS);
                UNROLL for (int c = 0; c < columns; c++) sum[i][c][h] += row * right[c];
            }
        }
    UNROLL for (int h = 0; h < PARTS; h++, j += FLOATS) {
        const i64 count = k - j < FLOATS ? k - j : FLOATS;
        if (count > 0)
            UNROLL for (int i = 0; i < rows; i++) {
                V row = some(values + i * k + j, count);
                if (error) row += some(error + i * k + j, count);
                UNROLL for (int c = 0; c < columns; c++) sum[i][c][h] += row * some(q + c * k + j, count);
            }
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int c = 0; c < columns; c++) p[c * m + i] = folded(sum[i][c]);
}

INLINE void left_rows(const float *values, const float *error, const float *q, float *p, i64 m, i64 k, i64 r, const int rows)
{
    i64 c = 0;
    for (; c + COLUMNS <= r; c += COLUMNS) left_tile(values, error, q + c * k, p + c * m, m, k, rows, COLUMNS);
    for (; c + 2 <= r; c += 2) left_tile(values, error, q + c * k, p + c * m, m, k, rows, 2);
    for (; c < r; c++) left_tile(values, error, q + c * k, p + c * m, m, k, rows, 1);
}

void lowrank_left(const float *restrict values, const float *restrict error, const float *restrict q, float *restrict p, i64 m,
                  i64 k, i64 r)
{
    i64 i = 0;
    for (; i + ROWS <= m; i += ROWS) left_rows(values + i * k, error ? error + i * k : NULL, q, p + i, m, k, r, ROWS);
    for (; i < m; i++) left_rows(values + i * k, error ? error + i * k : NULL, q, p + i, m, k, r, 1);
}

/* Adds `rows` rows of M times their factors to columns j .. j + FLOATS of `columns` rows of Q. */
INLINE void right_tile(const V *rows_of, const float *p, float *q, i64 m, i64 k, const int rows, const int columns)
{
    UNROLL for (int c = 0; c < columns; c++) {
        V sum = load(q + c * k);
        UNROLL for (int i = 0; i < rows; i++) sum += rows_of[i] * p[c * m + i];
        store(q + c * k, sum);
    }
}

INLINE void right_rows(const float *restrict values, const float *restrict error, const float *restrict p, float *restrict q,
                       i64 m, i64 k, i64 r, const int rows)
{
    i64 j = 0;
    for (; j + FLOATS <= k; j += FLOATS) {
        V row[DOWN];
        i64 c = 0;
        UNROLL for (int i = 0; i < rows; i++) row[i] = of_m(values, error, i * k + j);
        for (; c + COLUMNS <= r; c += COLUMNS) right_tile(row, p + c * m, q + c * k + j, m, k, rows, COLUMNS);
        for (; c < r; c++) right_tile(row, p + c * m, q + c * k + j, m, k, rows, 1);
    }
    for (; j < k; j++)
        for (int i = 0; i < rows; i++) {
            float x = error ? values[i * k + j] + error[i * k + j] : values[i * k + j];
            for (i64 c = 0; c < r; c++) q[c * k + j] += x * p[c * m + i];
        }
}

void lowrank_right(const float *restrict values, const float *restrict error, const float *restrict p, float *restrict q, i64 m,
                   i64 k, i64 r)
{
    i64 i = 0;
    memset(q, 0, (size_t)(r * k) * sizeof *q);
    for (; i + DOWN <= m; i += DOWN) right_rows(values + i * k, error ? error + i * k : NULL, p + i, q, m, k, r, DOWN);
    for (; i < m; i++) right_rows(values + i * k, error ? error + i * k : NULL, p + i, q, m, k, r, 1);
}

/* values = P' Q, or with `error`: error = values + error - P' Q, one row. */
INLINE void product_row(const float *restrict p, const float *restrict q, float *restrict values, float *restrict error, i64 m,
                        i64 k, i64 r)
{
    float *restrict to = error ? error : values;
    i64 j = 0;
    for (; j + FLOATS <= k; j += FLOATS) {
        V sum = {0};
        for (i64 c = 0; c < r; c++) sum += p[c * m] * load(q + c * k + j);
        store(to + j, error ? load(values + j) + load(error + j) - sum : sum);
    }
    for (; j < k; j++) {
        float sum = 0;
        for (i64 c = 0; c < r; c++) sum += p[c * m] * q[c * k + j];
        to[j] = error ? values[j] + error[j] - sum : sum;
    }
}

void lowrank_product(const float *restrict p, const float *restrict q, float *restrict values, i64 m, i64 k, i64 r)
{
    for (i64 i = 0; i < m; i++) product_row(p + i, q, values + i * k, NULL, m, k, r);
}

void lowrank_leave(const float *values, float *restrict error, const float *restrict p, const float *restrict q, i64 m, i64 k,
                   i64 r)
{
    for (i64 i = 0; i < m; i++) product_row(p + i, q, (float *)values + i * k, error + i * k, m, k, r);
}
