/* Layer and RMS norm of the rows of x (R, D), forward and backward; the body stands once, for number type T, and the file includes
   itself for float and double.

   A row is read from memory once: what comes after its sum finds it in the first cache. Lines that will be written are fetched
   in the pass before, since the CPU does not see that by itself; the rows that come next it does see. Mean and mean square are
   made in two passes, not from one sum of squares, which would lose the digits of a row far from zero. Sums over a row run in the
   lanes of PARTS vectors, folded in one order: relative to the sum of magnitudes their error is below (D / lanes + 25) roundings.
   Sums over rows are kept in T for SOME rows and then added to those in double: 1e-6 of the sum of magnitudes at most in float,
   for any number of rows. A row's results have the same bits in whichever group of rows they are made. */

#ifndef T

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "vectors.h"

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif
#if defined(__clang__)
#pragma STDC FP_CONTRACT ON
#else
#pragma GCC optimize("fp-contract=fast")
#endif

#include "philox.h"

#define INLINE static inline __attribute__((always_inline))
#define PARTS 4                      /* vectors of partial sums */
#define GROUP 4                      /* rows whose terms are added to a column's sum in registers */
#define SOME 16                      /* rows whose sum is kept in T */
#define WORDS 512                    /* random words at a time */

#define SOURCE "layer_norm.c"
#include "both.h"

#else

typedef T NAME(vector) __attribute__((vector_size(VECTOR_BYTES)));
typedef T NAME(loose) __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(T)), may_alias));
#define V NAME(vector)
#define AT(x, i) (*(const NAME(loose) *)((x) + (i)))
#define ROOT(x) __builtin_choose_expr(sizeof(T) == sizeof(float), sqrtf(x), sqrt(x))

/* BODY for each whole vector of n numbers, from `at` on, with v the partial sum that it adds to. */
#define EACH_VECTOR(n, BODY)                                                                                            \
    i64 i = 0;                                                                                                          \
    for (; i + PARTS * LANES <= (n); i += PARTS * LANES)                                                                  \
        for (i64 v = 0; v < PARTS; v++) { i64 at = i + v * LANES; BODY }                                                 \
    for (; i + LANES <= (n); i += LANES) { const i64 at = i, v = 0; BODY }

/* The sum of all lanes, and of the numbers that fill no vector, the last of n. */
INLINE T NAME(fold)(const V *part, const T *rest, i64 n)
{
    union { V whole; T lane[LANES]; } sum = {(part[0] + part[1]) + (part[2] + part[3])};
    T last = 0;
    for (i64 half = LANES / 2; half > 0; half /= 2) for (i64 l = 0; l < half; l++) sum.lane[l] += sum.lane[l + half];
    for (i64 l = 0; l < n % LANES; l++) last += rest[l];
    return sum.lane[0] + last;
}

static T NAME(sum)(const T *x, i64 n)
{
    V part[PARTS] = {0};
    EACH_VECTOR(n, part[v] += AT(x, at);)
    return NAME(fold)(part, x + i, n);
}

/* The sum of squared distances from the mean, of which `mean` is a first guess: what it is wrong by is the mean distance from it,
   and corrects both (a row of equal numbers becomes 0, not its rounding errors times 1 / sqrt(eps)). Not where not `centred`. The
   lines of y, which comes of it, are fetched. */
static T NAME(squares)(const T *x, T *mean, const T *y, i64 n, i64 centred)
{
    V part[PARTS] = {0}, drift[PARTS] = {0};
    T rest[LANES], far[LANES], guess = *mean;
    EACH_VECTOR(n, __builtin_prefetch(y + at, 1); V d = AT(x, at) - guess; part[v] += d * d; drift[v] += d;)
    for (i64 l = 0; l < n % LANES; l++) { far[l] = x[i + l] - guess; rest[l] = far[l] * far[l]; }
    T square = NAME(fold)(part, rest, n), wrong = centred ? NAME(fold)(drift, far, n) / n : 0;
    *mean = guess + wrong;
    square -= wrong * wrong * n;
    return square < 0 ? 0 : square;                  /* NaN stays */
}

/* What of `added` is dropped: rows of x are parts of samples, `parts` of them each, which have `rows` (a number each) of the stream
   `key`, a word for each number from their element of `firsts` on; those below `least` are dropped, the others multiplied by `scale`. */
typedef struct { const u64 *rows, *firsts; u64 key; i64 least, parts; T scale; } NAME(dropping);

/* total = x + what is kept of `added`, for row r of x; which are kept goes to `bits`, 8 to a byte. n is a multiple of 8. */
static void NAME(drop_and_add)(const NAME(dropping) *dropping, i64 r, const T *restrict x, const T *restrict added,
                               T *restrict total, unsigned char *restrict bits, i64 n)
{
    u32 words[WORDS], least = (u32)dropping->least;
    unsigned char any = dropping->least <= UINT32_MAX;
    T scale = dropping->scale;
    i64 sample = r / dropping->parts;
    u64 row = dropping->rows[sample], block = (dropping->firsts[sample] + (u64)(r % dropping->parts * n)) / 4;
    for (i64 from = 0; from < n; from += WORDS) {
        i64 size = n - from < WORDS ? n - from : WORDS;
        philox_along(dropping->key, row, block + (u64)(from / 4), words, size / 4);
        for (i64 i = 0; i < size; i++) {
            words[i] = (words[i] >= least) & any;
            total[from + i] = (words[i] ? added[from + i] : 0) * scale;
        }
        for (i64 i = 0; i < size; i++) total[from + i] += x[from + i];           /* rounded as dropout alone rounds it */
        for (i64 i = 0; i < size; i += 8) {
            unsigned packed = 0;
            for (int j = 0; j < 8; j++) packed |= words[i + j] << j;
            bits[(r * n + from + i) / 8] = (unsigned char)packed;
        }
    }
}

/* y = (x - mean) * inverse * weight + bias for each row, inverse = 1 / sqrt(mean square of x - mean + eps). The mean is
   taken as 0 where not `centred`; bias may be NULL. Where `added` is not NULL, x + added is normalised, and written to `total`,
   without what is dropped of the latter, where `samples` is not NULL: their rows, and after them the first word of each, a multiple of 4.
   GROUP rows go side by side: a sum's end is a chain of steps that wait for each other, and the next row's sum fills them. */
void NAME(row_norm)(const T *restrict x, const T *restrict added, T *restrict total, const T *restrict weight,
                    const T *restrict bias, T *restrict y, T *restrict means, T *restrict inverses, double eps, i64 rows, i64 n,
                    i64 centred, const u64 *samples, unsigned char *bits, i64 key, i64 least, i64 parts, double kept_scale)
{
    NAME(dropping) dropping = {samples, samples ? samples + rows / parts : NULL, (u64)key, least, parts, (T)kept_scale};
    for (i64 r = 0; r < rows; r += GROUP) {
        i64 there = rows - r < GROUP ? rows - r : GROUP;
        const T *row = (added ? total : x) + r * n;
        for (i64 k = r; k < r + there; k++) {
            if (samples) NAME(drop_and_add)(&dropping, k, x + k * n, added + k * n, total + k * n, bits, n);
            else if (added) for (i64 i = 0; i < n; i++) total[k * n + i] = x[k * n + i] + added[k * n + i];
            means[k] = centred ? NAME(sum)((added ? total : x) + k * n, n) / n : 0;
        }
        for (i64 k = 0; k < there; k++) inverses[r + k] = NAME(squares)(row + k * n, means + r + k, y + (r + k) * n, n, centred);
        for (i64 k = r; k < r + there; k++) inverses[k] = 1 / ROOT(inverses[k] / n + (T)eps);
        for (i64 k = 0; k < there; k++) {
            const T *from = row + k * n;
            T *to = y + (r + k) * n, s = inverses[r + k], mean = means[r + k];
            if (bias) for (i64 i = 0; i < n; i++) to[i] = (from[i] - mean) * s * weight[i] + bias[i];
            else for (i64 i = 0; i < n; i++) to[i] = (from[i] - mean) * s * weight[i];
        }
    }
}

/* What a row's gradients take from it: z = (x - mean) * inverse, h = g * weight, dx = h * inverse + constant + z * slope. */
typedef struct { T inverse, mean, constant, slope; } NAME(row);

/* dx = inverse (h - mean(h) - z mean(h z)), without mean(h) where not `centred`; its lines are fetched. */
static NAME(row) NAME(look_at)(const T *g, const T *x, const T *weight, T mean, T inverse, const T *dx, i64 n, i64 centred)
{
    V sums[PARTS] = {0}, products[PARTS] = {0};
    T rest[LANES], rest_products[LANES];
    EACH_VECTOR(n, __builtin_prefetch(dx + at, 1);
                V h = AT(g, at) * AT(weight, at); sums[v] += h; products[v] += h * (AT(x, at) - mean);)
    for (i64 l = 0; l < n % LANES; l++) {
        rest[l] = g[i + l] * weight[i + l];
        rest_products[l] = rest[l] * (x[i + l] - mean);
    }
    T sum = NAME(fold)(sums, rest, n), product = NAME(fold)(products, rest_products, n) * inverse;
    return (NAME(row)){inverse, mean, centred ? -sum / n * inverse : 0, -product / n * inverse};
}

/* `rows` rows: their dx, where `moved`, with `around` added where `surrounded`; and where `summed`, what they add to the sums over
   rows of g z and of g in `part` (2, n). */
INLINE void NAME(group)(const T *restrict g, const T *restrict x, const T *restrict weight, const T *restrict around,
                        const NAME(row) *row, T *restrict dx, T *restrict part, i64 n, const int rows, const int moved,
                        const int surrounded, const int summed)
{
    for (i64 i = 0; i < n; i++) {
        T product = summed ? part[i] : 0, plain = summed ? part[n + i] : 0, w = weight[i];
        for (int r = 0; r < rows; r++) {
            T e = g[r * n + i], z = (x[r * n + i] - row[r].mean) * row[r].inverse;
            if (summed) {
                product += e * z;
                plain += e;
            }
            if (moved) {
                T v = e * w * row[r].inverse + (z * row[r].slope + row[r].constant);
                dx[r * n + i] = surrounded ? v + around[r * n + i] : v;
            }
        }
        if (summed) { part[i] = product; part[n + i] = plain; }
    }
}

INLINE void NAME(rows)(const T *g, const T *x, const T *weight, const T *around, const NAME(row) *row, T *dx, T *part, i64 n,
                       const int rows)
{
    if (dx && around && part) NAME(group)(g, x, weight, around, row, dx, part, n, rows, 1, 1, 1);
    else if (dx && part) NAME(group)(g, x, weight, NULL, row, dx, part, n, rows, 1, 0, 1);
    else if (dx && around) NAME(group)(g, x, weight, around, row, dx, NULL, n, rows, 1, 1, 0);
    else if (dx) NAME(group)(g, x, weight, NULL, row, dx, NULL, n, rows, 1, 0, 0);
    else if (part) NAME(group)(g, x, weight, NULL, row, NULL, part, n, rows, 0, 0, 1);
}

/* dropped = what is kept of dx, for `n` numbers from a byte of `bits` on; n is a multiple of 8. */
static void NAME(drop_gradient)(const T *restrict dx, const unsigned char *restrict bits, T *restrict dropped, T scale, i64 n)
{
    for (i64 i = 0; i < n; i += 8) {
        unsigned packed = bits[i / 8];
        for (int j = 0; j < 8; j++) dropped[i + j] = (packed >> j & 1 ? dx[i + j] : 0) * scale;
    }
}

/* The gradients of x, of weight and of bias; the first may be NULL, or the last two: not wanted. `around`, where it is not NULL, is
   added to the first. `sums` and `part` are room for (2, n). Where `bits` is not NULL, the gradient of what was dropped in part
   goes to `dropped`. */
void NAME(row_norm_gradients)(const T *g, const T *x, const T *weight, const T *around, const T *means, const T *inverses, T *dx,
                              T *dweight, T *dbias, double *sums, T *part, i64 rows, i64 n, i64 centred,
                              const unsigned char *bits, T *dropped, double kept_scale)
{
    if (!dweight) sums = NULL;
    if (sums) memset(sums, 0, 2 * n * sizeof(double));
    for (i64 first = 0; first < rows; first += SOME) {
        i64 end = rows - first < SOME ? rows : first + SOME;
        if (sums) memset(part, 0, 2 * n * sizeof(T));
        for (i64 r = first; r < end; ) {
            i64 there = end - r < GROUP ? 1 : GROUP;
            NAME(row) row[GROUP];
            for (i64 k = 0; k < there; k++) {
                i64 at = (r + k) * n;
                row[k] = NAME(look_at)(g + at, x + at, weight, means[r + k], inverses[r + k], (dx ? dx : x) + at, n, centred);
            }
            const T *beside = around ? around + r * n : NULL;
            T *to = dx ? dx + r * n : NULL, *summed = sums ? part : NULL;
            if (there == GROUP) NAME(rows)(g + r * n, x + r * n, weight, beside, row, to, summed, n, GROUP);
            else NAME(rows)(g + r * n, x + r * n, weight, beside, row, to, summed, n, 1);
            if (bits) NAME(drop_gradient)(to, bits + r * n / 8, dropped + r * n, (T)kept_scale, there * n);
            r += there;
        }
        if (sums) for (i64 i = 0; i < 2 * n; i++) sums[i] += part[i];
    }
    if (sums) for (i64 i = 0; i < n; i++) { dweight[i] = (T)sums[i]; dbias[i] = (T)sums[n + i]; }
}

#undef V
#undef AT
#undef ROOT
#undef EACH_VECTOR
#endif
