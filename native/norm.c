/* Normalisation by row (layer and RMS norm): x is (R, D), contiguous. The body stands once, for number type T; the file includes
   itself for float and double. */

#ifndef T

#include <math.h>
#include <string.h>

#include "geometry.h"

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#define LANES 32                     /* partial sums of T, folded in one fixed order */
#define BLOCK 4                      /* rows whose terms go into a column's sum at a time */
#define HALVE(part, n) for (i64 j = 0; j < n; j++) part[j] += part[j + n]

#define T float
#define NAME(name) name##_float32
#define ROOT sqrtf
#include "norm.c"
#undef T
#undef NAME
#undef ROOT

#define T double
#define NAME(name) name##_float64
#define ROOT sqrt
#include "norm.c"

#else

/* The sum over i < n of `term`, which says what it adds for x[i], in `lanes` partial sums of `type`. */
#define SUM_IN(type, lanes, n, term, result)                                    \
    do {                                                                        \
        type part[lanes] = {0};                                                 \
        i64 whole = (n) / lanes * lanes;                                        \
        for (i64 block_ = 0; block_ < whole; block_ += lanes)                   \
            for (i64 lane_ = 0; lane_ < lanes; lane_++) {                       \
                i64 i = block_ + lane_;                                         \
                part[lane_] += term;                                            \
            }                                                                   \
        for (i64 i = whole; i < (n); i++) part[i - whole] += term;              \
        for (i64 half = lanes / 2; half > 0; half /= 2) HALVE(part, half);      \
        result += part[0];                                                      \
    } while (0)
#define SUM(type, n, term, result) SUM_IN(type, LANES, n, term, result)

/* y = (x - mean) * inverse * weight + bias for each row, inverse = 1 / sqrt(mean square of x - mean + eps). The mean is
   taken as 0 where not `centred`; weight and bias may be NULL. */
void NAME(row_norm)(const T *restrict x, const T *restrict weight, const T *restrict bias, T *restrict y,
                    T *restrict means, T *restrict inverses, double eps, i64 rows, i64 n, i64 centred)
{
    for (i64 r = 0; r < rows; r++, x += n, y += n) {
        T sum = 0, square = 0;
        if (centred) SUM(T, n, x[i], sum);
        T m = sum / n;
        SUM(T, n, (x[i] - m) * (x[i] - m), square);
        T s = 1 / ROOT(square / n + (T)eps);
        means[r] = m;
        inverses[r] = s;
        if (weight && bias) for (i64 i = 0; i < n; i++) y[i] = (x[i] - m) * s * weight[i] + bias[i];
        else if (weight) for (i64 i = 0; i < n; i++) y[i] = (x[i] - m) * s * weight[i];
        else for (i64 i = 0; i < n; i++) y[i] = (x[i] - m) * s;
    }
}

/* With h = g * weight and z = (x - mean) * inverse: dx = inverse * (h - z * mean(h z) [- mean(h), where centred]). */
static inline __attribute__((always_inline)) void NAME(row_gradient)(const T *restrict g, const T *restrict x,
    const T *restrict weight, T m, T s, T *restrict dx, i64 n, i64 centred, const int weighted)
{
    T sums[LANES] = {0}, products[LANES] = {0};
    i64 whole = n / LANES * LANES;
    for (i64 i = 0; i < whole; i += LANES)
        for (i64 j = 0; j < LANES; j++) {
            T h = weighted ? g[i + j] * weight[i + j] : g[i + j];
            sums[j] += h;
            products[j] += h * (x[i + j] - m);
        }
    for (i64 i = whole; i < n; i++) {
        T h = weighted ? g[i] * weight[i] : g[i];
        sums[i - whole] += h;
        products[i - whole] += h * (x[i] - m);
    }
    for (i64 half = LANES / 2; half > 0; half /= 2) { HALVE(sums, half); HALVE(products, half); }
    T sum = centred ? sums[0] : 0, product = products[0];
    T mean = sum / n, slope = product * s * s / n;
    for (i64 i = 0; i < n; i++) dx[i] = ((weighted ? g[i] * weight[i] : g[i]) - mean - (x[i] - m) * slope) * s;
}

/* Adds the sums over `rows` rows, one after the other, of g * z, and, where `plain` is not NULL, of g. */
static inline __attribute__((always_inline)) void NAME(row_sums)(const T *restrict g, const T *restrict x, const T *means,
    const T *inverses, double *restrict product, double *restrict plain, const i64 rows, i64 n)
{
    for (i64 i = 0; i < n; i++) {
        double total = product[i];
        for (i64 r = 0; r < rows; r++) total += g[r * n + i] * ((x[r * n + i] - means[r]) * inverses[r]);
        product[i] = total;
    }
    if (plain) for (i64 i = 0; i < n; i++) {
        double total = plain[i];
        for (i64 r = 0; r < rows; r++) total += g[r * n + i];
        plain[i] = total;
    }
}

/* The gradients of x, weight (`product`) and bias (`plain`), while a few rows are in the cache; each may be NULL: not wanted. */
void NAME(row_norm_gradients)(const T *restrict g, const T *restrict x, const T *restrict weight, const T *restrict means,
                              const T *restrict inverses, T *restrict dx, double *restrict product, double *restrict plain,
                              i64 rows, i64 n, i64 centred)
{
    if (product) memset(product, 0, n * sizeof(double));
    if (plain) memset(plain, 0, n * sizeof(double));
    for (i64 r = 0; r < rows; r += BLOCK) {
        i64 there = rows - r < BLOCK ? rows - r : BLOCK;
        const T *gs = g + r * n, *xs = x + r * n;
        for (i64 k = 0; dx && k < there; k++) {
            if (weight) NAME(row_gradient)(gs + k * n, xs + k * n, weight, means[r + k], inverses[r + k], dx + (r + k) * n, n,
                                           centred, 1);
            else NAME(row_gradient)(gs + k * n, xs + k * n, NULL, means[r + k], inverses[r + k], dx + (r + k) * n, n, centred, 0);
        }
        if (product && there == BLOCK) NAME(row_sums)(gs, xs, means + r, inverses + r, product, plain, BLOCK, n);
        else for (i64 k = 0; product && k < there; k++)
            NAME(row_sums)(gs + k * n, xs + k * n, means + r + k, inverses + r + k, product, plain, 1, n);
    }
}

#undef SUM_IN
#undef SUM
#endif
