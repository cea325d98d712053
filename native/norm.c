/* Normalisation: by channel (batch and group norm) and by row (layer and RMS norm). The body stands once, for number type T;
   the file includes itself for float and double.

   Channels: x is (N, C, L), contiguous; what belongs to a channel is an array of C numbers. Sums over a channel are kept in
   double: a channel may have millions of values. Rows: x is (R, D). */

#ifndef T

#include <math.h>
#include <string.h>

#include "geometry.h"

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#define LANES 32                     /* partial sums, folded in one fixed order */
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

/* The sum over i < n of `term`, which says what it adds for x[i], in `type`. */
#define SUM(type, n, term, result)                                              \
    do {                                                                        \
        type part[LANES] = {0};                                                 \
        i64 whole = (n) / LANES * LANES;                                        \
        for (i64 b = 0; b < whole; b += LANES)                                  \
            for (i64 j = 0; j < LANES; j++) { i64 i = b + j; part[j] += term; } \
        for (i64 i = whole; i < (n); i++) part[i - whole] += term;              \
        HALVE(part, 16); HALVE(part, 8); HALVE(part, 4); HALVE(part, 2); HALVE(part, 1);         \
        result += part[0];                                                      \
    } while (0)

/* Mean of each channel, and the sum of squared distances from it. */
void NAME(channel_moments)(const T *restrict x, double *restrict mean, double *restrict squares, i64 n, i64 c, i64 l)
{
    memset(mean, 0, c * sizeof(double));
    memset(squares, 0, c * sizeof(double));
    if (l == 1) {                    /* vectors run over channels here, over positions below */
        for (i64 k = 0; k < n; k++) for (i64 j = 0; j < c; j++) mean[j] += x[k * c + j];
        for (i64 j = 0; j < c; j++) mean[j] /= n;
        for (i64 k = 0; k < n; k++) for (i64 j = 0; j < c; j++) {
            double d = x[k * c + j] - mean[j];
            squares[j] += d * d;
        }
        return;
    }
    for (i64 j = 0; j < c; j++) {
        double sum = 0, square = 0;
        for (i64 k = 0; k < n; k++) {
            const T *run = x + (k * c + j) * l;
            SUM(double, l, run[i], sum);
        }
        double m = mean[j] = sum / (n * l);
        for (i64 k = 0; k < n; k++) {
            const T *run = x + (k * c + j) * l;
            SUM(double, l, (run[i] - m) * (run[i] - m), square);
        }
        squares[j] = square;
    }
}

/* y = (x - centre) * scale + shift */
void NAME(channel_affine)(const T *restrict x, const T *centre, const T *scale, const T *shift, T *restrict y, i64 n, i64 c,
                          i64 l)
{
    if (l == 1) {
        for (i64 k = 0; k < n; k++, x += c, y += c)
            for (i64 j = 0; j < c; j++) y[j] = (x[j] - centre[j]) * scale[j] + shift[j];
        return;
    }
    for (i64 k = 0; k < n; k++) for (i64 j = 0; j < c; j++, x += l, y += l) {
        T m = centre[j], s = scale[j], b = shift[j];
        for (i64 i = 0; i < l; i++) y[i] = (x[i] - m) * s + b;
    }
}

/* Sums over each channel of g, and of g * (x - centre). */
void NAME(channel_sums)(const T *restrict g, const T *restrict x, const T *centre, double *restrict plain,
                        double *restrict product, i64 n, i64 c, i64 l)
{
    memset(plain, 0, c * sizeof(double));
    memset(product, 0, c * sizeof(double));
    if (l == 1) {
        for (i64 k = 0; k < n; k++, g += c, x += c)
            for (i64 j = 0; j < c; j++) { plain[j] += g[j]; product[j] += (double)g[j] * (x[j] - centre[j]); }
        return;
    }
    for (i64 j = 0; j < c; j++) {
        double sum = 0, sum_product = 0;
        T m = centre[j];
        for (i64 k = 0; k < n; k++) {
            const T *gs = g + (k * c + j) * l, *xs = x + (k * c + j) * l;
            SUM(double, l, gs[i], sum);
            SUM(double, l, (double)gs[i] * (xs[i] - m), sum_product);
        }
        plain[j] = sum;
        product[j] = sum_product;
    }
}

/* out = a * g + b * (x - centre) + d */
void NAME(channel_combine)(const T *restrict g, const T *restrict x, const T *centre, const T *a, const T *b, const T *d,
                           T *restrict out, i64 n, i64 c, i64 l)
{
    if (l == 1) {
        for (i64 k = 0; k < n; k++, g += c, x += c, out += c)
            for (i64 j = 0; j < c; j++) out[j] = a[j] * g[j] + b[j] * (x[j] - centre[j]) + d[j];
        return;
    }
    for (i64 k = 0; k < n; k++) for (i64 j = 0; j < c; j++, g += l, x += l, out += l) {
        T m = centre[j], aj = a[j], bj = b[j], dj = d[j];
        for (i64 i = 0; i < l; i++) out[i] = aj * g[i] + bj * (x[i] - m) + dj;
    }
}

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
    T sum = 0, product = 0;
    if (centred) SUM(T, n, weighted ? g[i] * weight[i] : g[i], sum);
    SUM(T, n, (weighted ? g[i] * weight[i] : g[i]) * (x[i] - m), product);
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

#undef SUM
#endif
