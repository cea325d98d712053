/* One new position of some texts through all blocks of a transformer, in one call.

   Each step is the function that the op of that name calls, of the library that has it, so the bits are those of the ops one by
   one; what is saved is what lies between them in Python, 0.08 ms a block (2026-11). A block is

       x += out(attention(qkv(norm1(x))));   x += narrow(f(wide(norm2(x)))) */

#include <stdint.h>

typedef int64_t i64;
typedef uint64_t u64;

/* What a block has, as addresses in an array of 64-bit integers; 0 where there is no bias. */
enum { NORM1, NORM1_BIAS, QKV, QKV_BIAS, OUT, OUT_BIAS, NORM2, NORM2_BIAS, WIDE, WIDE_BIAS, NARROW, NARROW_BIAS,
       KEYS, VALUES, PARTS };

/* The functions: layer_norm.c's row_norm, product.c's few_rows and flash_attention.c's cached_attention. */
enum { ROW_NORM, FEW_ROWS, CACHED_ATTENTION };

#define BLOCKS(T, NAME)                                                                                                        \
typedef void (*row_norm_##NAME)(const T *, const T *, T *, const T *, const T *, T *, T *, T *, double, i64, i64, i64,         \
                                const u64 *, unsigned char *, i64, i64, i64, double);                                          \
typedef void (*few_rows_##NAME)(const T *, const T *, const T *, T *, i64, i64, i64, i64);                                     \
typedef int (*cached_attention_##NAME)(const T *, T *, T *, T *, const i64 *, const i64 *, T *, i64, i64, i64, i64, i64,       \
                                       double);                                                                                \
int blocks_##NAME(T *x, const i64 *table, const i64 *functions, const i64 *slot, const i64 *at, T *room, i64 rows, i64 d,      \
                  i64 heads, i64 width, i64 hidden, i64 layers, i64 slots, i64 capacity, i64 activation, double eps,           \
                  double scale)                                                                                                \
{                                                                                                                              \
    const row_norm_##NAME norm = (row_norm_##NAME)functions[ROW_NORM];                                                         \
    const few_rows_##NAME product = (few_rows_##NAME)functions[FEW_ROWS];                                                      \
    const cached_attention_##NAME attention = (cached_attention_##NAME)functions[CACHED_ATTENTION];                            \
    T *normed = room, *qkv = normed + rows * d, *mixed = qkv + 3 * rows * d, *made = mixed + rows * d;                         \
    T *total = made + rows * d, *inner = total + rows * d, *means = inner + rows * hidden, *rest = means + 2 * rows;           \
    for (i64 l = 0; l < layers; l++, table += PARTS) {                                                                         \
        const T *const *of = (const T *const *)table;                                                                          \
        norm(x, 0, 0, of[NORM1], of[NORM1_BIAS], normed, means, means + rows, eps, rows, d, 1, 0, 0, 0, 0, 1, 0);              \
        product(normed, of[QKV], of[QKV_BIAS], qkv, rows, 3 * d, d, 0);                                                        \
        const int wrong = attention(qkv, (T *)of[KEYS], (T *)of[VALUES], mixed, slot, at, rest, rows, heads, width, slots,     \
                                    capacity, scale);                                                                          \
        if (wrong) return wrong;                                                                                               \
        product(mixed, of[OUT], of[OUT_BIAS], made, rows, d, d, 0);                                                            \
        norm(x, made, total, of[NORM2], of[NORM2_BIAS], normed, means, means + rows, eps, rows, d, 1, 0, 0, 0, 0, 1, 0);       \
        product(normed, of[WIDE], of[WIDE_BIAS], inner, rows, hidden, d, activation);                                          \
        product(inner, of[NARROW], of[NARROW_BIAS], made, rows, d, hidden, 0);                                                 \
        for (i64 i = 0; i < rows * d; i++) x[i] = total[i] + made[i];                                                          \
    }                                                                                                                          \
    return 0;                                                                                                                  \
}

BLOCKS(float, float32)
BLOCKS(double, float64)
