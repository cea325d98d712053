/* Normalisation by channel (batch and group norm): x is (N, C, L), contiguous; what belongs to a channel is an array of C
   numbers. The body stands once, for number type T; the file includes itself for float and double.

   What a step spends here it spends on memory, so a few channels at a time are read for their statistics and then, while the
   caches still have them, again for the result. */

#ifndef T

#include <math.h>
#include <string.h>

#include "geometry.h"
#include "silu.h"
#include "vectors.h"

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#define TOGETHER (1 << 20)           /* bytes of x in the channels that are read again while they are in the cache */
#define FEW 16                       /* numbers whose mean is a first guess */
#define MOST_TOGETHER 32             /* channels, since each has vectors of sums */
#define SILU_AFTER 4                 /* `activation`, and `masked`, of what is not done in one go with the numbers around it */
#define SILU_BEFORE 5

#define SOURCE "batch_norm.c"
#include "both.h"

#else

#include "sums.h"
#include "activated.h"
#include "normalise.h"
#include "channel_passes.h"
#include "channel_statistics.h"
#include "small_planes.h"

/* Mean of each channel, and the sum of squared distances from it. */
void NAME(channel_moments)(const T *restrict x, double *restrict mean, double *restrict squares, i64 n, i64 c, i64 l)
{
    if (n && NAME(are_small)(l)) {
        NAME(Row) row;
        ROWS(first, last) NAME(row_moments)(&row, x, mean, squares, n, c, l, first, last);
        return;
    }
    if (l > 1) {
        GROUPS(first, last) NAME(moments)(x, mean, squares, n, c, l, first, last);
        return;
    }
    memset(mean, 0, c * sizeof(double));             /* vectors run over channels here, over positions elsewhere */
    memset(squares, 0, c * sizeof(double));
    for (i64 k = 0; k < n * l; k++) for (i64 j = 0; j < c; j++) mean[j] += x[k * c + j];         /* l is 1 or 0 */
    for (i64 j = 0; j < c; j++) mean[j] /= n;
    for (i64 k = 0; k < n * l; k++) for (i64 j = 0; j < c; j++) {
        double d = x[k * c + j] - mean[j];
        squares[j] += d * d;
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
    if (NAME(are_small)(l)) {
        NAME(Row) row;
        ROWS(first, last) {
            NAME(describe)(&row, centre + first, centre, NULL, last - first, l);
            NAME(row_sums)(&row, g, x, NULL, NULL, plain, product, n, c, l, first, last, 0);
        }
        return;
    }
    if (l > 1) {
        GROUPS(first, last) NAME(sums_of)(g, x, NULL, centre, NULL, NULL, NULL, plain, product, n, c, l, first, last, 0);
        return;
    }
    memset(plain, 0, c * sizeof(double));
    memset(product, 0, c * sizeof(double));
    for (i64 k = 0; k < n * l; k++, g += c, x += c)
        for (i64 j = 0; j < c; j++) { plain[j] += g[j]; product[j] += (double)g[j] * (x[j] - centre[j]); }
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

/* (T) of inverse * weight, for channels [first, last). */
static void NAME(scales)(const double *inverse, const T *weight, i64 first, i64 last, T *scale)
{
    for (i64 j = first; j < last; j++) scale[j - first] = (T)(weight ? inverse[j] * weight[j] : inverse[j]);
}

static void NAME(inverses)(double *variance, double *inverse, double eps, i64 count, i64 first, i64 last)
{
    for (i64 j = first; j < last; j++) {
        variance[j] /= count;
        inverse[j] = 1 / sqrt(variance[j] + eps);
    }
}

/* Calls FUNCTION(..., residual, activation) with those two as constants: only ReLU comes after a residual, and SiLU later. */
#define ACTIVATED(FUNCTION, ...)                                                                                                \
    if (residual && activation) FUNCTION(__VA_ARGS__, 1, 1);                                                                    \
    else if (residual) FUNCTION(__VA_ARGS__, 1, 0);                                                                             \
    else if (activation == 1) FUNCTION(__VA_ARGS__, 0, 1);                                                                      \
    else if (activation == 2) FUNCTION(__VA_ARGS__, 0, 2);                                                                      \
    else if (activation == 3) FUNCTION(__VA_ARGS__, 0, 3);                                                                           \
    else FUNCTION(__VA_ARGS__, 0, 0)

/* Batch norm with statistics of the batch, y = activated((x - mean) * inverse * weight + bias [+ residual]). weight, bias and
   residual may be NULL. */
void NAME(batch_norm)(const T *restrict x, const T *weight, const T *bias, const T *restrict residual, T *restrict y,
                      double *restrict mean, double *restrict variance, double *restrict inverse, double eps, i64 n, i64 c, i64 l,
                      i64 activation)
{
    if (n && NAME(are_small)(l)) {
        NAME(Row) row;
        ROWS(first, last) {
            T centre[ROW], scale[ROW];
            NAME(row_moments)(&row, x, mean, variance, n, c, l, first, last);
            NAME(inverses)(variance, inverse, eps, n * l, first, last);
            for (i64 j = first; j < last; j++) centre[j - first] = (T)mean[j];
            NAME(scales)(inverse, weight, first, last, scale);
            NAME(describe)(&row, centre, scale, bias ? bias + first : NULL, last - first, l);
            const i64 at = first * l, width = (last - first) * l;
            ACTIVATED(NAME(normalise_rows), &row, x + at, residual ? residual + at : NULL, y + at, n, width, c * l);
            if (activation == SILU_AFTER) for (i64 k = 0; k < n; k++) NAME(silu_run)(y + at + k * c * l, width);
        }
        return;
    }
    GROUPS(first, last) {
        T centre[MOST_TOGETHER], scale[MOST_TOGETHER];
        NAME(moments)(x, mean, variance, n, c, l, first, last);
        NAME(inverses)(variance, inverse, eps, n * l, first, last);
        for (i64 j = first; j < last; j++) centre[j - first] = (T)mean[j];
        NAME(scales)(inverse, weight, first, last, scale);
        RUNS_BACK(k, j, at) {
            T m = centre[j - first], s = scale[j - first], b = bias ? bias[j] : 0;
            i64 next = NAME(earlier)(j, first, last, c, l);
            ACTIVATED(NAME(normalised), x + at, residual ? residual + at : NULL, y + at, l, next, m, s, b);
            if (activation == SILU_AFTER) NAME(silu_run)(y + at, l);
        }
    }
}

/* Of channels [first, last): what their gradients are moved by. */
static void NAME(slopes)(const double *inverse, const double *plain, const double *product, const T *scale, i64 count, i64 first,
                         i64 last, T *slope, T *shift)
{
    for (i64 j = first; j < last; j++) {
        slope[j - first] = (T)(-scale[j - first] * inverse[j] * inverse[j] * (product[j] / count));
        shift[j - first] = (T)(-scale[j - first] * (plain[j] / count));
    }
}

/* Calls FUNCTION(..., masked) with that as a constant. */
#define MASKED(FUNCTION, ...)                                                                                                   \
    if (masked == SILU_BEFORE) FUNCTION(__VA_ARGS__, SILU_BEFORE);                                                              \
    else if (masked == 4) FUNCTION(__VA_ARGS__, 4);                                                                             \
    else if (masked == 3) FUNCTION(__VA_ARGS__, 3);                                                                             \
    else if (masked == 2) FUNCTION(__VA_ARGS__, 2);                                                                             \
    else if (masked) FUNCTION(__VA_ARGS__, 1);                                                                                  \
    else FUNCTION(__VA_ARGS__, 0)

static void NAME(small_gradients)(const T *g, const T *x, const T *y, const T *centre, const T *weight, const T *bias,
                                  const double *inverse, T *dx, T *h, double *plain, double *product, i64 n, i64 c, i64 l,
                                  i64 masked)
{
    NAME(Row) row;
    const T *from = masked == 1 ? h : masked == SILU_BEFORE ? dx : g;
    ROWS(first, last) {
        T scale[ROW], slope[ROW], shift[ROW];
        const i64 channels = last - first, at = first * l;
        NAME(scales)(inverse, weight, first, last, scale);
        NAME(describe)(&row, centre + first, scale, bias ? bias + first : NULL, channels, l);
        T *kept = masked == SILU_BEFORE ? dx : h;
        MASKED(NAME(row_sums), &row, g, x, y, kept, plain, product, n, c, l, first, last);
        NAME(slopes)(inverse, plain, product, scale, n * l, first, last, slope, shift);
        NAME(spread_over)(slope, channels, l, row.slope);
        NAME(spread_over)(shift, channels, l, row.constant);
        const int again = masked == 1 || masked == SILU_BEFORE ? 0 : masked;
        if (dx && again == 4) NAME(slope_rows)(&row, from + at, x + at, dx + at, n, channels * l, c * l, 4);
        else if (dx && again == 3) NAME(slope_rows)(&row, from + at, x + at, dx + at, n, channels * l, c * l, 3);
        else if (dx && again == 2) NAME(slope_rows)(&row, from + at, x + at, dx + at, n, channels * l, c * l, 2);
        else if (dx) NAME(slope_rows)(&row, from + at, x + at, dx + at, n, channels * l, c * l, 0);
    }
}

/* With h = passed(g), the gradient of what the activation got: the sums over each channel of h and of h * (x - centre), and, where
   dx is not NULL, the gradient of x, scale * (h - sum(h) / count - (x - centre) * inverse^2 * sum(h (x - centre)) / count).
   masked 0: there is no activation, h is g. 1: ReLU; h is the residual's gradient too and is written. 2, 3, 4, 5: there is no
   residual, and what ReLU, ReLU6, hard-swish or SiLU got is had from x; of SiLU, dx is where h is kept, and is not NULL. */
void NAME(batch_norm_gradients)(const T *restrict g, const T *restrict x, const T *restrict y, const T *centre, const T *weight,
                                const T *bias, const double *inverse, T *restrict dx, T *restrict h, double *restrict plain,
                                double *restrict product, i64 n, i64 c, i64 l, i64 masked)
{
    if (NAME(are_small)(l)) {
        NAME(small_gradients)(g, x, y, centre, weight, bias, inverse, dx, h, plain, product, n, c, l, masked);
        return;
    }
    GROUPS(first, last) {
        T scale[MOST_TOGETHER], slope[MOST_TOGETHER], shift[MOST_TOGETHER];
        NAME(scales)(inverse, weight, first, last, scale);
        T *kept = masked == SILU_BEFORE ? dx : h;
        MASKED(NAME(sums_of), g, x, y, centre, scale, bias, kept, plain, product, n, c, l, first, last);
        const T *from = masked == 1 ? h : masked == SILU_BEFORE ? dx : g;
        NAME(slopes)(inverse, plain, product, scale, n * l, first, last, slope, shift);
        if (dx) RUNS_BACK(k, j, at) {
            T m = centre[j], s = scale[j - first], b = bias ? bias[j] : 0, d = slope[j - first], e = shift[j - first];
            i64 next = NAME(earlier)(j, first, last, c, l);
            if (masked == 4) NAME(sloped)(from + at, x + at, dx + at, l, next, m, s, b, d, e, 4);
            else if (masked == 3) NAME(sloped)(from + at, x + at, dx + at, l, next, m, s, b, d, e, 3);
            else if (masked == 2) NAME(sloped)(from + at, x + at, dx + at, l, next, m, s, b, d, e, 2);
            else NAME(sloped)(from + at, x + at, dx + at, l, next, m, s, b, d, e, 0);
        }
    }
}

#undef ACTIVATED
#undef MASKED
#undef RUNS
#undef RUNS_BACK
#undef EACH_256_BYTES
#undef EACH_VECTOR
#undef GROUPS
#undef ROWS
#undef ALL
#undef V
#undef MASK
#undef WIDE
#undef SUMS
#endif
