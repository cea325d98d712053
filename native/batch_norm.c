/* Normalisation by channel (batch and group norm): x is (N, C, L), contiguous; what belongs to a channel is an array of C
   numbers. The body stands once, for number type T; the file includes itself for float and double.

   What a step spends here it spends on memory, so a few channels at a time are read for their statistics and then, while the
   caches still have them, again for the result. */

#ifndef T

#include <math.h>
#include <string.h>

#include "geometry.h"
#include "vectors.h"

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#define INLINE static inline __attribute__((always_inline))
#define TOGETHER (1 << 20)           /* bytes of x in the channels that are read again while they are in the cache */
#define FEW 16                       /* numbers whose mean is a first guess */
#define MOST_TOGETHER 32             /* channels, since each has vectors of sums */

#define SOURCE "batch_norm.c"
#include "both.h"

#else

#include "sums.h"
#include "normalise.h"

/* Adds d = x - centre, and d * d. */
INLINE void NAME(add_moments)(SUMS *s, const T *x, i64 later, T centre, i64 n)
{
    for (i64 there; n > 0; x += there, n -= there) {
        there = NAME(room)(s, n);
        i64 i = 0;
        for (; i + AHEAD * LANES <= there; i += AHEAD * LANES) {
            NAME(bring)(x + i + later, 0);
            for (i64 u = 0; u < AHEAD; u++) {
                V d = *(const V *)(x + i + u * LANES) - centre;
                NAME(add)(s, u, d, d * d);
            }
        }
        for (i64 u = 0; i < there; i += LANES, u++) {
            V d = NAME(load)(x + i, at_most(there - i, LANES), centre) - centre;
            NAME(add)(s, u, d, d * d);
        }
    }
}

/* What there is of g but where ReLU made 0: where y <= 0, or, masked being 2, where (x - m) * s + b <= 0, since y was that. */
INLINE V NAME(passed)(V g, V z, V y, T s, T b, const int masked)
{
    if (!masked) return g;
    if (masked == 2) y = z * s + b;
    return (V)((MASK)g & ~(y <= (V){0}));
}

/* Adds h = passed(g), and h * (x - m); keeps h where masked is 1. */
INLINE void NAME(add_gradients)(SUMS *sums, const T *g, const T *x, const T *y, T *h, i64 n, i64 later, T m, T s, T b,
                               const int masked)
{
    for (i64 done = 0, there; done < n; done += there) {
        there = NAME(room)(sums, n - done);
        i64 i = done, stop = done + there;
        for (; i + AHEAD * LANES <= stop; i += AHEAD * LANES) {
            NAME(bring)(g + i + later, 0);
            NAME(bring)(x + i + later, 0);
            if (masked == 1) NAME(bring)(y + i + later, 0);
            if (masked == 1) NAME(bring)(h + i + later, 1);
            for (i64 u = 0; u < AHEAD; u++) {
                const i64 at = i + u * LANES;
                V z = *(const V *)(x + at) - m, zero = {0};
                V v = NAME(passed)(*(const V *)(g + at), z, masked == 1 ? *(const V *)(y + at) : zero, s, b, masked);
                if (masked == 1) *(V *)(h + at) = v;
                NAME(add)(sums, u, v, v * z);
            }
        }
        for (i64 u = 0; i < stop; i += LANES, u++) {
            const i64 size = at_most(stop - i, LANES);
            V z = NAME(load)(x + i, size, m) - m, zero = {0};
            V v = NAME(passed)(NAME(load)(g + i, size, 0), z, masked == 1 ? NAME(load)(y + i, size, 0) : zero, s, b, masked);
            if (masked == 1) memcpy(h + i, &v, size * sizeof(T));
            NAME(add)(sums, u, v, v * z);
        }
    }
}

/* Channels [first, last) of (N, C, L), sample by sample: k is the sample, j the channel, `at` where its run of l begins. What was
   read last is read first the next time, backwards: the cache still has it. */
#define RUNS(k, j, at) \
    for (i64 k = 0; k < n; k++) for (i64 j = first; j < last; j++) for (i64 at = (k * c + j) * l, once = 1; once; once = 0)
#define RUNS_BACK(k, j, at) \
    for (i64 k = n - 1; k >= 0; k--) for (i64 j = last - 1; j >= first; j--) \
        for (i64 at = (k * c + j) * l, once = 1; once; once = 0)

/* A few channels at a time: those that stay in the cache until they are read again. */
#define GROUPS(first, last) \
    for (i64 each = NAME(together)(n, c, l), first = 0, last = each < c ? each : c; first < c; \
         first = last, last = last + each < c ? last + each : c)

static i64 NAME(together)(i64 n, i64 c, i64 l)
{
    return clip(TOGETHER / (i64)sizeof(T) / at_least(n * l, 1), 1, at_most(at_least(c, 1), MOST_TOGETHER));
}

static void NAME(moments_about)(const T *x, const T *centre, double *mean, double *squares, i64 n, i64 c, i64 l, i64 first,
                                i64 last)
{
    SUMS sums[MOST_TOGETHER];
    memset(sums, 0, (last - first) * sizeof *sums);
    RUNS(k, j, at) NAME(add_moments)(sums + j - first, x + at, NAME(later)(j, first, last, c, l), centre[j - first], l);
    for (i64 j = first; j < last; j++) {
        SUMS *s = sums + j - first;
        double sum = NAME(total)(s, 0), distance = sum / (n * l), square = NAME(total)(s, 1) - sum * distance;
        mean[j] = centre[j - first] + distance;
        squares[j] = square < 0 ? 0 : square;
    }
}

/* Mean of channels [first, last), and the sum of squared distances from it. One pass has both, from d = x - centre for any
   centre: sum d^2 - (sum d)^2 / N. That loses digits where the centre is far from the mean. So it is the mean of the first few,
   and where that turns out to be more than two deviations off, the channel is read again. */
static void NAME(moments)(const T *x, double *mean, double *squares, i64 n, i64 c, i64 l, i64 first, i64 last)
{
    T centre[MOST_TOGETHER] = {0};
    const i64 few = n ? at_most(l, FEW) : 0;
    for (i64 j = first; j < last; j++) {
        double sum = 0;
        for (i64 i = 0; i < few; i++) sum += x[j * l + i];
        centre[j - first] = (T)(sum / few);
    }
    NAME(moments_about)(x, centre, mean, squares, n, c, l, first, last);
    for (i64 j = first; j < last; j++) {
        double off = mean[j] - centre[j - first];
        T better = (T)mean[j];
        if (off * off * (n * l) > 4 * squares[j]) NAME(moments_about)(x, &better, mean, squares, n, c, l, j, j + 1);
    }
}

/* Mean of each channel, and the sum of squared distances from it. */
void NAME(channel_moments)(const T *restrict x, double *restrict mean, double *restrict squares, i64 n, i64 c, i64 l)
{
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

/* For channels [first, last): the sums of h = passed(g), and of h * (x - centre). */
INLINE void NAME(sums_of)(const T *g, const T *x, const T *y, const T *centre, const T *scale, const T *bias, T *h,
                          double *plain, double *product, i64 n, i64 c, i64 l, i64 first, i64 last, const int masked)
{
    SUMS sums[MOST_TOGETHER];
    memset(sums, 0, (last - first) * sizeof *sums);
    RUNS(k, j, at)
        NAME(add_gradients)(sums + j - first, g + at, x + at, masked == 1 ? y + at : NULL, masked == 1 ? h + at : NULL, l,
                            NAME(later)(j, first, last, c, l), centre[j], scale ? scale[j - first] : 0, bias ? bias[j] : 0, masked);
    for (i64 j = first; j < last; j++) {
        plain[j] = NAME(total)(sums + j - first, 0);
        product[j] = NAME(total)(sums + j - first, 1);
    }
}

/* Sums over each channel of g, and of g * (x - centre). */
void NAME(channel_sums)(const T *restrict g, const T *restrict x, const T *centre, double *restrict plain,
                        double *restrict product, i64 n, i64 c, i64 l)
{
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

/* Batch norm with statistics of the batch, y = [max(0,)] (x - mean) * inverse * weight + bias [+ residual]. weight, bias and
   residual may be NULL. */
void NAME(batch_norm)(const T *restrict x, const T *weight, const T *bias, const T *restrict residual, T *restrict y,
                      double *restrict mean, double *restrict variance, double *restrict inverse, double eps, i64 n, i64 c, i64 l,
                      i64 relu)
{
    GROUPS(first, last) {
        NAME(moments)(x, mean, variance, n, c, l, first, last);
        for (i64 j = first; j < last; j++) {
            variance[j] /= n * l;
            inverse[j] = 1 / sqrt(variance[j] + eps);
        }
        T centre[MOST_TOGETHER], scale[MOST_TOGETHER];
        for (i64 j = first; j < last; j++) {
            centre[j - first] = (T)mean[j];
            scale[j - first] = (T)(weight ? inverse[j] * weight[j] : inverse[j]);
        }
        RUNS_BACK(k, j, at) {
            T m = centre[j - first], s = scale[j - first], b = bias ? bias[j] : 0;
            i64 next = NAME(earlier)(j, first, last, c, l);
            if (residual && relu) NAME(normalised)(x + at, residual + at, y + at, l, next, m, s, b, 1, 1);
            else if (residual) NAME(normalised)(x + at, residual + at, y + at, l, next, m, s, b, 1, 0);
            else if (relu) NAME(normalised)(x + at, NULL, y + at, l, next, m, s, b, 0, 1);
            else NAME(normalised)(x + at, NULL, y + at, l, next, m, s, b, 0, 0);
        }
    }
}

/* With h = passed(g), the gradient of what ReLU got: the sums over each channel of h and of h * (x - centre), and, where dx is
   not NULL, the gradient of x, scale * (h - sum(h) / count - (x - centre) * inverse^2 * sum(h (x - centre)) / count).
   masked 0: there is no ReLU, h is g. 1: h is the residual's gradient too and is written. 2: there is no residual, and y's sign
   is had from x. */
void NAME(batch_norm_gradients)(const T *restrict g, const T *restrict x, const T *restrict y, const T *centre, const T *weight,
                                const T *bias, const double *inverse, T *restrict dx, T *restrict h, double *restrict plain,
                                double *restrict product, i64 n, i64 c, i64 l, i64 masked)
{
    GROUPS(first, last) {
        T scale[MOST_TOGETHER];
        for (i64 j = first; j < last; j++) scale[j - first] = (T)(weight ? inverse[j] * weight[j] : inverse[j]);
        if (masked == 2) NAME(sums_of)(g, x, NULL, centre, scale, bias, NULL, plain, product, n, c, l, first, last, 2);
        else if (masked) NAME(sums_of)(g, x, y, centre, NULL, NULL, h, plain, product, n, c, l, first, last, 1);
        else NAME(sums_of)(g, x, NULL, centre, NULL, NULL, NULL, plain, product, n, c, l, first, last, 0);
        const T *from = masked == 1 ? h : g;
        T slope[MOST_TOGETHER], shift[MOST_TOGETHER];
        for (i64 j = first; j < last; j++) {
            slope[j - first] = (T)(-scale[j - first] * inverse[j] * inverse[j] * (product[j] / (n * l)));
            shift[j - first] = (T)(-scale[j - first] * (plain[j] / (n * l)));
        }
        if (dx) RUNS_BACK(k, j, at) {
            T m = centre[j], s = scale[j - first], b = bias ? bias[j] : 0, d = slope[j - first], e = shift[j - first];
            i64 next = NAME(earlier)(j, first, last, c, l);
            if (masked == 2) NAME(sloped)(from + at, x + at, dx + at, l, next, m, s, b, d, e, 2);
            else NAME(sloped)(from + at, x + at, dx + at, l, next, m, s, b, d, e, 0);
        }
    }
}

#undef RUNS
#undef RUNS_BACK
#undef EACH_256_BYTES
#undef EACH_VECTOR
#undef GROUPS
#undef V
#undef MASK
#undef WIDE
#undef SUMS
#endif
