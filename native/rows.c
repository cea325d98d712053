/* Softmax, cross-entropy and the sum of rows by index. Matrices are (rows, n), contiguous. All functions return 0.

   Sums run in LANES partial sums that are folded in a fixed order: the bits do not depend on the width of vectors. */

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#include "vector_math.h"

typedef int64_t i64;
#define LANES 16

#define ROWS(T, NAME, LOG)                                                                                              \
                                                                                                                        \
INLINE T fold_##NAME(T *lanes)                                                                                          \
{                                                                                                                       \
    for (int step = LANES / 2; step > 0; step /= 2)                                                                     \
        for (int l = 0; l < step; l++) lanes[l] += lanes[l + step];                                                     \
    return lanes[0];                                                                                                    \
}                                                                                                                       \
                                                                                                                        \
static T sum_##NAME(const T *x, i64 n)                                                                                  \
{                                                                                                                       \
    T lanes[LANES] = {0};                                                                                               \
    i64 i = 0;                                                                                                          \
    for (; i + LANES <= n; i += LANES) for (int l = 0; l < LANES; l++) lanes[l] += x[i + l];                            \
    for (int l = 0; i < n; i++, l++) lanes[l] += x[i];                                                                  \
    return fold_##NAME(lanes);                                                                                          \
}                                                                                                                       \
                                                                                                                        \
static T dot_##NAME(const T *x, const T *y, i64 n)                                                                      \
{                                                                                                                       \
    T lanes[LANES] = {0};                                                                                               \
    i64 i = 0;                                                                                                          \
    for (; i + LANES <= n; i += LANES) for (int l = 0; l < LANES; l++) lanes[l] += x[i + l] * y[i + l];                 \
    for (int l = 0; i < n; i++, l++) lanes[l] += x[i] * y[i];                                                           \
    return fold_##NAME(lanes);                                                                                          \
}                                                                                                                       \
                                                                                                                        \
/* NaN is passed over here; it comes back in the sum of exponentials. */                                                \
static T largest_##NAME(const T *x, i64 n)                                                                              \
{                                                                                                                       \
    T lanes[LANES];                                                                                                     \
    i64 i = 0;                                                                                                          \
    for (int l = 0; l < LANES; l++) lanes[l] = -INFINITY;                                                               \
    for (; i + LANES <= n; i += LANES)                                                                                  \
        for (int l = 0; l < LANES; l++) lanes[l] = x[i + l] > lanes[l] ? x[i + l] : lanes[l];                           \
    for (; i < n; i++) lanes[0] = x[i] > lanes[0] ? x[i] : lanes[0];                                                    \
    for (int l = 1; l < LANES; l++) lanes[0] = lanes[l] > lanes[0] ? lanes[l] : lanes[0];                               \
    return lanes[0];                                                                                                    \
}                                                                                                                       \
                                                                                                                        \
/* sum of exp(x - shift), in the same lanes as sum */                                                                   \
static T sum_exp_##NAME(const T *x, T shift, i64 n)                                                                     \
{                                                                                                                       \
    T lanes[LANES] = {0}, part[LANES];                                                                                  \
    i64 i = 0;                                                                                                          \
    for (; i + LANES <= n; i += LANES) {                                                                                \
        for (int l = 0; l < LANES; l++) part[l] = exp_##NAME(x[i + l] - shift);                                         \
        for (int l = 0; l < LANES; l++) lanes[l] += part[l];                                                            \
    }                                                                                                                   \
    for (int l = 0; i < n; i++, l++) lanes[l] += exp_##NAME(x[i] - shift);                                              \
    return fold_##NAME(lanes);                                                                                          \
}                                                                                                                       \
                                                                                                                        \
int softmax_##NAME(const T *restrict x, T *restrict y, i64 rows, i64 n)                                                 \
{                                                                                                                       \
    for (i64 r = 0; r < rows; r++, x += n, y += n) {                                                                    \
        T top = largest_##NAME(x, n);                                                                                   \
        for (i64 i = 0; i < n; i++) y[i] = exp_##NAME(x[i] - top);                                                      \
        T total = sum_##NAME(y, n);                                                                                     \
        for (i64 i = 0; i < n; i++) y[i] /= total;                                                                      \
    }                                                                                                                   \
    return 0;                                                                                                           \
}                                                                                                                       \
                                                                                                                        \
int softmax_grad_##NAME(const T *restrict y, const T *restrict g, T *restrict dx, i64 rows, i64 n)                      \
{                                                                                                                       \
    for (i64 r = 0; r < rows; r++, y += n, g += n, dx += n) {                                                           \
        T mean = dot_##NAME(y, g, n);                                                                                   \
        for (i64 i = 0; i < n; i++) dx[i] = (g[i] - mean) * y[i];                                                       \
    }                                                                                                                   \
    return 0;                                                                                                           \
}                                                                                                                       \
                                                                                                                        \
int log_softmax_##NAME(const T *restrict x, T *restrict y, i64 rows, i64 n)                                             \
{                                                                                                                       \
    for (i64 r = 0; r < rows; r++, x += n, y += n) {                                                                    \
        T top = largest_##NAME(x, n), rest = LOG(sum_exp_##NAME(x, top, n));                                            \
        for (i64 i = 0; i < n; i++) y[i] = (x[i] - top) - rest;                                                         \
    }                                                                                                                   \
    return 0;                                                                                                           \
}                                                                                                                       \
                                                                                                                        \
int log_softmax_grad_##NAME(const T *restrict y, const T *restrict g, T *restrict dx, i64 rows, i64 n)                  \
{                                                                                                                       \
    for (i64 r = 0; r < rows; r++, y += n, g += n, dx += n) {                                                           \
        T total = sum_##NAME(g, n);                                                                                     \
        for (i64 i = 0; i < n; i++) dx[i] = g[i] - exp_##NAME(y[i]) * total;                                            \
    }                                                                                                                   \
    return 0;                                                                                                           \
}                                                                                                                       \
                                                                                                                        \
/* log sum exp(x[r]) = tops[r] + logs[r], the largest entry and the rest: their sum would round large entries' digits   \
   away. losses[r] = log sum exp(x[r]) - (1 - s) x[r, label] - s mean(x[r]). */                                         \
int cross_entropy_##NAME(const T *x, const i64 *labels, T *losses, T *tops, T *logs, double smoothing,                  \
                          i64 ignoring, i64 ignored, i64 rows, i64 n)                                                   \
{                                                                                                                       \
    for (i64 r = 0; r < rows; r++, x += n) {                                                                            \
        T top = tops[r] = largest_##NAME(x, n);                                                                         \
        logs[r] = LOG(sum_exp_##NAME(x, top, n));                                                                       \
        if (ignoring && labels[r] == ignored) { losses[r] = 0; continue; }                                              \
        losses[r] = logs[r] - (T)(1 - smoothing) * (x[labels[r]] - top);                                                \
        if (smoothing != 0) losses[r] -= (T)smoothing * (sum_##NAME(x, n) / (T)n - top);                                \
    }                                                                                                                   \
    return 0;                                                                                                           \
}                                                                                                                       \
                                                                                                                        \
int cross_entropy_grad_##NAME(const T *restrict x, const i64 *labels, const T *tops, const T *logs, T *restrict dx,     \
                               double smoothing, double scale, i64 ignoring, i64 ignored, i64 rows, i64 n)              \
{                                                                                                                       \
    T factor = (T)scale, uniform = (T)(smoothing / (double)n);                                                          \
    for (i64 r = 0; r < rows; r++, x += n, dx += n) {                                                                   \
        if (ignoring && labels[r] == ignored) { memset(dx, 0, n * sizeof(T)); continue; }                               \
        T top = tops[r], rest = logs[r];                                                                                \
        for (i64 i = 0; i < n; i++) dx[i] = (exp_##NAME((x[i] - top) - rest) - uniform) * factor;                       \
        dx[labels[r]] -= (T)(1 - smoothing) * factor;                                                                   \
    }                                                                                                                   \
    return 0;                                                                                                           \
}                                                                                                                       \
                                                                                                                        \
/* out[index[r]] += x[r], in the order of r. */                                                                         \
int scatter_add_rows_##NAME(T *restrict out, const i64 *index, const T *restrict x, i64 rows, i64 n)                    \
{                                                                                                                       \
    for (i64 r = 0; r < rows; r++, x += n) {                                                                            \
        T *to = out + index[r] * n;                                                                                     \
        for (i64 i = 0; i < n; i++) to[i] += x[i];                                                                      \
    }                                                                                                                   \
    return 0;                                                                                                           \
}

ROWS(float, float32, logf)
ROWS(double, float64, log)
