/* Means and sums of squared distances from them, along the middle dim of x (A, N, B), in double: two passes, for float and double.
   Along memory (B = 1) numbers are added in the order of rows; otherwise each BLOCK rows one after the other, and then the blocks. */

#include <string.h>

#include "row_order.h"

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#define BLOCK 64                    /* rows: part of the order of the sums */
#define STRIPE 512                  /* columns at a time, whose sums stay in the L1 cache */

#define T double
#define INTEGER int64_t

#define IN float
#define TERM(v, c) (v)
#define NAME(name) name##_plain_float32
#include "row_sums.h"
#undef TERM
#undef NAME
#define TERM(v, c) (((v) - (c)) * ((v) - (c)))
#define NAME(name) name##_square_float32
#include "row_sums.h"
#undef TERM
#undef NAME
#undef IN

#define IN double
#define TERM(v, c) (v)
#define NAME(name) name##_plain_float64
#include "row_sums.h"
#undef TERM
#undef NAME
#define TERM(v, c) (((v) - (c)) * ((v) - (c)))
#define NAME(name) name##_square_float64
#include "row_sums.h"
#undef TERM
#undef NAME
#undef IN

#define VARIANCES(IN, NAME)                                                                                             \
                                                                                                                        \
/* sums = those of `rows` rows of n numbers, `step` apart: of the numbers, or of the squares of their distances. */     \
INLINE void columns_##NAME(const IN *restrict x, i64 step, i64 rows, const double *restrict means, double *restrict sums, \
                           i64 n, const int squares)                                                                    \
{                                                                                                                       \
    double part[STRIPE], centre[STRIPE];                                                                                \
    for (i64 j = 0; j < n; j++) centre[j] = squares ? means[j] : 0, sums[j] = 0;                                        \
    for (i64 r = 0; r < rows; r += BLOCK) {                                                                             \
        const i64 end = r + BLOCK < rows ? r + BLOCK : rows;                                                            \
        memset(part, 0, n * sizeof(double));                                                                            \
        for (i64 i = r; i < end; i++)                                                                                   \
            for (i64 j = 0; j < n; j++) {                                                                               \
                const double v = x[i * step + j] - centre[j];                                                           \
                part[j] += squares ? v * v : v;                                                                         \
            }                                                                                                           \
        for (i64 j = 0; j < n; j++) sums[j] += part[j];                                                                 \
    }                                                                                                                   \
}                                                                                                                       \
                                                                                                                        \
INLINE void stripe_##NAME(const IN *restrict x, i64 step, i64 rows, double *restrict means, double *restrict squares,   \
                          i64 n)                                                                                        \
{                                                                                                                       \
    columns_##NAME(x, step, rows, squares, means, n, 0);                                                                  \
    for (i64 j = 0; j < n; j++) means[j] /= (double)rows;                                                               \
    columns_##NAME(x, step, rows, means, squares, n, 1);                                                                \
}                                                                                                                       \
                                                                                                                        \
void variances_##NAME(const IN *restrict x, double *restrict means, double *restrict squares, i64 outer, i64 rows, i64 n) \
{                                                                                                                       \
    if (n == 1) {                                                                                                       \
        const i64 together = rows < 500 ? 4096 / (rows + 1) / SIDE * SIDE : 1;       /* rows that are in the cache still */ \
        for (i64 a = 0; a < outer; a += together) {                                                                     \
            const i64 count = outer - a < together ? outer - a : together;                                              \
            rows_plain_##NAME(x + a * rows, 0, means + a, count, rows);                                                 \
            for (i64 i = a; i < a + count; i++) means[i] /= (double)rows;                                               \
            rows_square_##NAME(x + a * rows, means + a, squares + a, count, rows);                                      \
        }                                                                                                               \
        return;                                                                                                         \
    }                                                                                                                   \
    for (i64 a = 0; a < outer; a++, x += rows * n, means += n, squares += n) {                                          \
        if (n == 2) stripe_##NAME(x, 2, rows, means, squares, 2);                                                       \
        else if (n == 4) stripe_##NAME(x, 4, rows, means, squares, 4);                                                  \
        else if (n == 8) stripe_##NAME(x, 8, rows, means, squares, 8);                                                  \
        else if (n == 16) stripe_##NAME(x, 16, rows, means, squares, 16);                                               \
        else for (i64 from = 0; from < n; from += STRIPE)                                                               \
            stripe_##NAME(x + from, n, rows, means + from, squares + from, n - from < STRIPE ? n - from : STRIPE);      \
    }                                                                                                                   \
}

VARIANCES(float, float32)
VARIANCES(double, float64)
