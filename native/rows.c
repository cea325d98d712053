/* Softmax, cross-entropy and the sum of rows by index. Matrices are (rows, n), contiguous. All functions return 0,
   or 2 where a label or an index lies outside.

   Sums run in LANES partial sums that are folded in a fixed order: the bits do not depend on the width of vectors. */

#include "vector_math.h"

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

typedef int64_t i64;
#define LANES 32

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
static T sum_above_##NAME(const T *x, T below, i64 n)                                                                   \
{                                                                                                                       \
    T lanes[LANES] = {0};                                                                                               \
    i64 i = 0;                                                                                                          \
    for (; i + LANES <= n; i += LANES) for (int l = 0; l < LANES; l++) lanes[l] += x[i + l] - below;                    \
    for (int l = 0; i < n; i++, l++) lanes[l] += x[i] - below;                                                          \
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
    for (int l = 0; i < n; i++, l++) lanes[l] = x[i] > lanes[l] ? x[i] : lanes[l];                                      \
    for (int step = LANES / 2; step > 0; step /= 2)                                                                     \
        for (int l = 0; l < step; l++) lanes[l] = lanes[l + step] > lanes[l] ? lanes[l + step] : lanes[l];              \
    return lanes[0];                                                                                                    \
}                                                                                                                       \
                                                                                                                        \
/* sum of exp(x - top), in the same lanes as sum; the terms go to y where `store`. No x is above top. */                \
INLINE T sum_exp_##NAME(const T *restrict x, T *restrict y, T top, i64 n, const int store)                              \
{                                                                                                                       \
    T lanes[LANES] = {0}, part[LANES];                                                                                  \
    i64 i = 0;                                                                                                          \
    for (; i + LANES <= n; i += LANES) {                                                                                \
        for (int l = 0; l < LANES; l++) part[l] = exp_of_negative_##NAME(x[i + l] - top);                               \
        if (store) for (int l = 0; l < LANES; l++) y[i + l] = part[l];                                                  \
        for (int l = 0; l < LANES; l++) lanes[l] += part[l];                                                            \
    }                                                                                                                   \
    for (int l = 0; i < n; i++, l++) {                                                                                  \
        T term = exp_of_negative_##NAME(x[i] - top);                                                                    \
        if (store) y[i] = term;                                                                                         \
        lanes[l] += term;                                                                                               \
    }                                                                                                                   \
    return fold_##NAME(lanes);                                                                                          \
}                                                                                                                       \
                                                                                                                        \
int softmax_##NAME(const T *restrict x, T *restrict y, i64 rows, i64 n)                                                 \
{                                                                                                                       \
    for (i64 r = 0; r < rows; r++, x += n, y += n) {                                                                    \
        T scale = (T)1 / sum_exp_##NAME(x, y, largest_##NAME(x, n), n, 1);                                              \
        for (i64 i = 0; i < n; i++) y[i] *= scale;                                                                      \
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
        T top = largest_##NAME(x, n), rest = LOG(sum_exp_##NAME(x, NULL, top, n, 0));                                   \
        for (i64 i = 0; i < n; i++) y[i] = (x[i] - top) - rest;                                                         \
    }                                                                                                                   \
    return 0;                                                                                                           \
}                                                                                                                       \
                                                                                                                        \
int log_softmax_grad_##NAME(const T *restrict y, const T *restrict g, T *restrict dx, i64 rows, i64 n)                  \
{                                                                                                                       \
    for (i64 r = 0; r < rows; r++, y += n, g += n, dx += n) {                                                           \
        T total = sum_##NAME(g, n);                                                                                     \
        for (i64 i = 0; i < n; i++) dx[i] = g[i] - exp_of_negative_##NAME(y[i]) * total;                                \
    }                                                                                                                   \
    return 0;                                                                                                           \
}                                                                                                                       \
                                                                                                                        \
/* losses[r] = log sum exp(x[r]) - (1 - s) x[r, label] - s mean(x[r]), from x less the largest entry of its row: the    \
   digits of the rest would drown in that. Where `exps` is not NULL, it gets exp(x - largest), `totals` the sums. */    \
int cross_entropy_##NAME(const T *x, const i64 *labels, T *losses, T *exps, T *totals, double smoothing,                \
                         i64 ignoring, i64 ignored, i64 rows, i64 n)                                                    \
{                                                                                                                       \
    for (i64 r = 0; r < rows; r++, x += n) {                                                                            \
        if (ignoring && labels[r] == ignored) { losses[r] = 0; continue; }                                              \
        if (labels[r] < 0 || labels[r] >= n) return 2;                                                                  \
        T top = largest_##NAME(x, n);                                                                                   \
        T total = exps ? sum_exp_##NAME(x, exps + r * n, top, n, 1) : sum_exp_##NAME(x, NULL, top, n, 0);               \
        if (exps) totals[r] = total;                                                                                    \
        losses[r] = LOG(total) - (T)(1 - smoothing) * (x[labels[r]] - top);                                             \
        if (smoothing != 0) losses[r] -= (T)smoothing * (sum_above_##NAME(x, top, n) / (T)n);                              \
    }                                                                                                                   \
    return 0;                                                                                                           \
}                                                                                                                       \
                                                                                                                        \
/* The gradient of the losses times `scale`, in place of the exponentials. */                                           \
int cross_entropy_grad_##NAME(T *exps, const i64 *labels, const T *totals, double smoothing, double scale,              \
                              i64 ignoring, i64 ignored, i64 rows, i64 n)                                               \
{                                                                                                                       \
    T factor = (T)scale, uniform = (T)(smoothing / (double)n) * factor;                                                 \
    for (i64 r = 0; r < rows; r++, exps += n) {                                                                         \
        if (ignoring && labels[r] == ignored) { memset(exps, 0, n * sizeof(T)); continue; }                             \
        if (labels[r] < 0 || labels[r] >= n) return 2;                                                                  \
        T share = factor / totals[r];                                                                                   \
        for (i64 i = 0; i < n; i++) exps[i] = exps[i] * share - uniform;                                                \
        exps[labels[r]] -= (T)(1 - smoothing) * factor;                                                                 \
    }                                                                                                                   \
    return 0;                                                                                                           \
}                                                                                                                       \
                                                                                                                        \
/* out[index[r]] += x[r], in the order of r. */                                                                         \
int scatter_add_rows_##NAME(T *restrict out, const i64 *index, const T *restrict x, i64 rows, i64 n, i64 outputs)       \
{                                                                                                                       \
    for (i64 r = 0; r < rows; r++) if (index[r] < 0 || index[r] >= outputs) return 2;                                   \
    for (i64 r = 0; r < rows; r++, x += n) {                                                                            \
        T *to = out + index[r] * n;                                                                                     \
        for (i64 i = 0; i < n; i++) to[i] += x[i];                                                                      \
    }                                                                                                                   \
    return 0;                                                                                                           \
}

ROWS(float, float32, logf)
ROWS(double, float64, log)
