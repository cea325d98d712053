/* Normalisation by channel (batch and group norm). The body stands once, for number type T; the file includes itself for float
   and double.

   x is (N, C, L), contiguous; what belongs to a channel is an array of C numbers. Sums over a channel are kept in
   double: a channel may have millions of values. */

#ifndef T

#include <math.h>
#include <string.h>

#include "geometry.h"

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#define LANES 16                     /* partial sums, folded in one fixed order */
#define CHUNK 1024                   /* numbers of a channel that are masked at a time. (GCC 12 at -O3 makes wrong code of a sum
                                        in lanes whose terms are chosen by a comparison, in double.) */
#define TOGETHER (256 << 10)         /* bytes of x in the channels that are passed twice while they are in the cache */
#define HALVE(part, n) for (i64 j = 0; j < n; j++) part[j] += part[j + n]

#define T float
#define NAME(name) name##_float32
#include "norm.c"
#undef T
#undef NAME

#define T double
#define NAME(name) name##_float64
#include "norm.c"

#else

/* The sum over i < n of `term`, which says what it adds for x[i], in partial sums. */
#define WIDE_SUM(n, term, result)                                               \
    do {                                                                        \
        double part[LANES] = {0};                                               \
        i64 whole = (n) / LANES * LANES;                                        \
        for (i64 block_ = 0; block_ < whole; block_ += LANES)                   \
            for (i64 lane_ = 0; lane_ < LANES; lane_++) {                       \
                i64 i = block_ + lane_;                                         \
                part[lane_] += term;                                            \
            }                                                                   \
        for (i64 i = whole; i < (n); i++) part[i - whole] += term;              \
        for (i64 half = LANES / 2; half > 0; half /= 2) HALVE(part, half);      \
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
            WIDE_SUM(l, run[i], sum);
        }
        double m = mean[j] = sum / (n * l);
        for (i64 k = 0; k < n; k++) {
            const T *run = x + (k * c + j) * l;
            WIDE_SUM(l, (run[i] - m) * (run[i] - m), square);
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
            WIDE_SUM(l, gs[i], sum);
            WIDE_SUM(l, (double)gs[i] * (xs[i] - m), sum_product);
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

/* Channels [first, last) of (N, C, L), sample by sample: k is the sample, j the channel, `at` where its run of l begins. */
#define RUNS(k, j, at) \
    for (i64 k = 0; k < n; k++) for (i64 j = first; j < last; j++) for (i64 at = (k * c + j) * l, once = 1; once; once = 0)

static i64 NAME(channels_together)(i64 n, i64 c, i64 l)
{
    i64 each = TOGETHER / (i64)sizeof(T) / (n * l);
    return each < 1 ? 1 : each > c ? c : each;
}

/* Batch norm with statistics of the batch, y = [max(0,)] (x - mean) * inverse * weight + bias [+ residual]; a few channels at a
   time, so that what is read for the mean is in the cache for the rest. weight, bias and residual may be NULL. */
void NAME(batch_norm)(const T *restrict x, const T *weight, const T *bias, const T *restrict residual, T *restrict y,
                      double *restrict mean, double *restrict variance, double *restrict inverse, double eps, i64 n, i64 c, i64 l,
                      i64 relu)
{
    memset(mean, 0, c * sizeof(double));
    memset(variance, 0, c * sizeof(double));
    i64 each = NAME(channels_together)(n, c, l);
    for (i64 first = 0; first < c; first += each) {
        i64 last = first + each < c ? first + each : c;
        RUNS(k, j, at) WIDE_SUM(l, x[at + i], mean[j]);
        for (i64 j = first; j < last; j++) mean[j] /= n * l;
        RUNS(k, j, at) { double m = mean[j]; WIDE_SUM(l, (x[at + i] - m) * (x[at + i] - m), variance[j]); }
        for (i64 j = first; j < last; j++) {
            variance[j] /= n * l;
            inverse[j] = 1 / sqrt(variance[j] + eps);
        }
        RUNS(k, j, at) {
            T m = (T)mean[j], s = (T)(weight ? inverse[j] * weight[j] : inverse[j]), b = bias ? bias[j] : 0;
            const T *xs = x + at, *rs = residual + at;
            T *ys = y + at;
            if (residual && relu) for (i64 i = 0; i < l; i++) { T v = (xs[i] - m) * s + b + rs[i]; ys[i] = v < 0 ? 0 : v; }
            else if (residual) for (i64 i = 0; i < l; i++) ys[i] = (xs[i] - m) * s + b + rs[i];
            else if (relu) for (i64 i = 0; i < l; i++) { T v = (xs[i] - m) * s + b; ys[i] = v < 0 ? 0 : v; }
            else for (i64 i = 0; i < l; i++) ys[i] = (xs[i] - m) * s + b;
        }
    }
}

/* With h the gradient of what ReLU got: the sums over each channel of h and of h * (x - centre), and, where dx is not NULL, the
   gradient of x, scale * (h - sum(h) / count - (x - centre) * inverse^2 * sum(h (x - centre)) / count).
   masked 0: there is no ReLU, h is g. 1: h, which is g where y > 0, is the residual's gradient too and is written. 2: there is
   no residual, and y is made again from x. */
void NAME(batch_norm_gradients)(const T *restrict g, const T *restrict x, const T *restrict y, const T *centre, const T *weight,
                                const T *bias, const double *inverse, T *restrict dx, T *restrict h, double *restrict plain,
                                double *restrict product, i64 n, i64 c, i64 l, i64 masked)
{
    memset(plain, 0, c * sizeof(double));
    memset(product, 0, c * sizeof(double));
    i64 each = NAME(channels_together)(n, c, l);
    for (i64 first = 0; first < c; first += each) {
        i64 last = first + each < c ? first + each : c;
        RUNS(k, j, at) {
            T m = centre[j], s = (T)(weight ? inverse[j] * weight[j] : inverse[j]), b = bias ? bias[j] : 0;
            const T *gs = g + at, *xs = x + at, *ys = y + at;
            if (masked == 1) {
                for (i64 i = 0; i < l; i++) h[at + i] = ys[i] > 0 ? gs[i] : 0;
                gs = h + at;
            }
            for (i64 start = 0; start < l; start += CHUNK) {
                i64 size = l - start < CHUNK ? l - start : CHUNK;
                T made[CHUNK];
                const T *hs = masked == 2 ? made : gs + start, *zs = xs + start;
                if (masked == 2) for (i64 i = 0; i < size; i++) made[i] = (zs[i] - m) * s + b > 0 ? gs[start + i] : 0;
                WIDE_SUM(size, hs[i], plain[j]);
                WIDE_SUM(size, (double)hs[i] * (zs[i] - m), product[j]);
            }
        }
        const T *from = masked == 1 ? h : g;
        if (dx) RUNS(k, j, at) {
            T m = centre[j], s = (T)(weight ? inverse[j] * weight[j] : inverse[j]), b = bias ? bias[j] : 0;
            T slope = (T)(-s * inverse[j] * inverse[j] * (product[j] / (n * l))), shift = (T)(-s * (plain[j] / (n * l)));
            const T *gs = from + at, *xs = x + at;
            T *to = dx + at;
            if (masked == 2)
                for (i64 i = 0; i < l; i++) {
                    T z = xs[i] - m;
                    to[i] = s * (z * s + b > 0 ? gs[i] : 0) + slope * z + shift;
                }
            else for (i64 i = 0; i < l; i++) to[i] = s * gs[i] + slope * (xs[i] - m) + shift;
        }
    }
}

#undef RUNS
#undef WIDE_SUM
#endif
