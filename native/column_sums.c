/* Sums over the rows of x (R, D), for float and double: each BLOCK rows in T, one after the other, and the sums of blocks in
   double. So a sum of millions has the rounding errors of a block; kernels/sums.py has the same order as an expression. */

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

typedef int64_t i64;

#define BLOCK 64                    /* rows: part of the order of the sums */
#define STRIPE 512                  /* columns at a time, whose sums stay in the L1 cache */
#define NARROW 32                   /* columns: below, sums stay in registers */
#define INLINE static inline __attribute__((always_inline))

#define COLUMN_SUMS(T, NAME)                                                                                            \
                                                                                                                        \
/* part = the sum of `rows` rows of n numbers, `step` apart. */                                                         \
INLINE void block_##NAME(const T *restrict x, i64 step, i64 rows, T *restrict part, i64 n)                              \
{                                                                                                                       \
    memcpy(part, x, n * sizeof(T));                                                                                     \
    for (i64 r = 1; r < rows; r++) for (i64 j = 0; j < n; j++) part[j] += x[r * step + j];                              \
}                                                                                                                       \
                                                                                                                        \
/* Four blocks side by side: they do not wait for each other. Rows of n numbers are read as if they were `wide`. */     \
INLINE void blocks_##NAME(const T *restrict x, T *restrict part, i64 n, const i64 wide)                                 \
{                                                                                                                       \
    for (int k = 0; k < 4; k++) memcpy(part + k * NARROW, x + k * BLOCK * n, wide * sizeof(T));                         \
    for (i64 r = 1; r < BLOCK; r++)                                                                                     \
        for (int k = 0; k < 4; k++) for (i64 j = 0; j < wide; j++) part[k * NARROW + j] += x[(k * BLOCK + r) * n + j];  \
}                                                                                                                       \
                                                                                                                        \
INLINE void narrow_##NAME(const T *restrict x, T *restrict sums, i64 rows, i64 n, const i64 wide)                       \
{                                                                                                                       \
    double total[NARROW] = {0};                                                                                         \
    T part[4 * NARROW] = {0};                                                                                           \
    for (i64 r = 0; r < rows; ) {                                                                                       \
        i64 blocks = (rows - r - 4 * BLOCK) * n >= wide - n ? 4 : 1;                                                    \
        if (blocks == 4) blocks_##NAME(x + r * n, part, n, wide);                                                       \
        else block_##NAME(x + r * n, n, rows - r < BLOCK ? rows - r : BLOCK, part, n);                                  \
        for (i64 k = 0; k < blocks; k++) for (i64 j = 0; j < n; j++)                                                    \
            total[j] = r + k ? total[j] + part[k * NARROW + j] : part[j];                                               \
        r += blocks * BLOCK;                                                                                            \
    }                                                                                                                   \
    for (i64 j = 0; j < n; j++) sums[j] = (T)total[j];                                                                  \
}                                                                                                                       \
                                                                                                                        \
void column_sums_##NAME(const T *restrict x, T *restrict sums, i64 rows, i64 n)                                         \
{                                                                                                                       \
    if (n == 2) narrow_##NAME(x, sums, rows, 2, 2);                                                                     \
    else if (n == 3) narrow_##NAME(x, sums, rows, 3, 3);                                                                \
    else if (n == 4) narrow_##NAME(x, sums, rows, 4, 4);                                                                \
    else if (n == 8) narrow_##NAME(x, sums, rows, 8, 8);                                                                \
    else if (n < 8) narrow_##NAME(x, sums, rows, n, 8);                                                                 \
    else if (n == 16) narrow_##NAME(x, sums, rows, 16, 16);                                                             \
    else if (n < 16) narrow_##NAME(x, sums, rows, n, 16);                                                               \
    else if (n <= 32) narrow_##NAME(x, sums, rows, n, 32);                                                              \
    if (n <= NARROW) return;                                                                                            \
    for (i64 from = 0; from < n; from += STRIPE) {                                                                      \
        double total[STRIPE];                                                                                           \
        T part[STRIPE];                                                                                                 \
        i64 width = n - from < STRIPE ? n - from : STRIPE;                                                              \
        for (i64 r = 0; r < rows; r += BLOCK) {                                                                         \
            block_##NAME(x + r * n + from, n, rows - r < BLOCK ? rows - r : BLOCK, part, width);                        \
            for (i64 j = 0; j < width; j++) total[j] = r ? total[j] + part[j] : part[j];                                \
        }                                                                                                               \
        for (i64 j = 0; j < width; j++) sums[from + j] = (T)total[j];                                                   \
    }                                                                                                                   \
}

COLUMN_SUMS(float, float32)
COLUMN_SUMS(double, float64)
