/* Sums over windows of images (N, C, H, W), contiguous, for float and double; the file includes itself for each. A plane is one
   (H, W); output (i, j) of a plane looks at rows [y0[i], y1[i]) and columns [x0[j], x1[j]). All is summed in double, since a
   window may be a whole plane. */

#ifndef T

#include <string.h>

#include "ahead.h"
#include "geometry.h"
#include "vectors.h"

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#define INLINE static inline __attribute__((always_inline))
#define COLUMNS 256                  /* of a plane whose sums are kept at a time, and windows that are made of them */

typedef double SUM __attribute__((vector_size(VECTOR_BYTES)));
typedef int64_t LONGS __attribute__((vector_size(VECTOR_BYTES)));

#define SOURCE "window_sum.c"
#include "both.h"

#else

#define SOME NAME(some)              /* DOUBLES numbers */

typedef T SOME __attribute__((vector_size(DOUBLES * sizeof(T)), aligned(sizeof(T)), may_alias));

/* The sums of `count` stretches of n numbers each, DOUBLES at most, `from[p]` where they begin; each is summed in the same order. */
static void NAME(stretches)(const T *const *from, double *sums, i64 n, i64 count)
{
    SUM part[DOUBLES] = {{0}};
    double rest[DOUBLES] = {0};
    for (int p = 0; p < count; p++) {
        const T *x = from[p];
        SUM part_of[4] = {{0}};
        i64 i = 0;
        for (; i + 4 * DOUBLES <= n; i += 4 * DOUBLES) {
            for (i64 at = i; at < i + 4 * DOUBLES; at += LINE(T)) __builtin_prefetch(x + at + 2 * AHEAD(T));
            for (int k = 0; k < 4; k++) part_of[k] += __builtin_convertvector(*(const SOME *)(x + i + k * DOUBLES), SUM);
        }
        for (; i + DOUBLES <= n; i += DOUBLES) part_of[0] += __builtin_convertvector(*(const SOME *)(x + i), SUM);
        for (; i < n; i++) rest[p] += x[i];
        part[p] = (part_of[0] + part_of[1]) + (part_of[2] + part_of[3]);
    }
    for (int half = DOUBLES / 2; half > 0; half /= 2)    /* two vectors become one, of sums of both's halves */
        for (int p = 0; p < half; p++)
            part[p] = PICK(LONGS, part[p], part[p + half], ORDER(LOW, DOUBLES))
                    + PICK(LONGS, part[p], part[p + half], ORDER(HIGH, DOUBLES));
    for (int p = 0; p < DOUBLES; p++) sums[p] = part[0][p] + rest[p];
}

/* Windows as wide as their plane are stretches of it. Several planes go side by side: one folding serves all. */
static void NAME(total_of_stretches)(const T *x, T *y, const int32_t *y0, const int32_t *y1, i64 planes, i64 plane, i64 w, i64 oh)
{
    for (i64 first = 0; first < planes; first += DOUBLES)
        for (i64 i = 0; i < oh; i++) {
            const T *from[DOUBLES];
            double sums[DOUBLES];
            const i64 count = at_most(planes - first, DOUBLES);
            for (i64 p = 0; p < count; p++) from[p] = x + (first + p) * plane + y0[i] * w;
            NAME(stretches)(from, sums, (y1[i] - y0[i]) * w, count);
            for (i64 p = 0; p < count; p++) y[(first + p) * oh + i] = (T)sums[p];
        }
}

/* y[j] = the sum of columns [x0[j], x1[j]) of `sums`, for n windows of one width, `stride` apart. */
INLINE void NAME(across)(const double *restrict sums, T *restrict y, i64 width, const i64 stride, i64 n)
{
    double total[COLUMNS];
    for (i64 j = 0; j < n; j++) total[j] = width > 0 ? sums[j * stride] : 0;
    for (i64 step = 1; step < width; step++) for (i64 j = 0; j < n; j++) total[j] += sums[j * stride + step];
    for (i64 j = 0; j < n; j++) y[j] = (T)total[j];
}

/* The sums over windows [x0[j], x1[j]) of rows [0, rows) of x, for n windows that end in the same COLUMNS: first of columns, then
   of those, as many windows at a time as are alike. */
static void NAME(row_of_totals)(const T *restrict x, T *restrict y, const int32_t *x0, const int32_t *x1, i64 rows, i64 w, i64 n)
{
    double sums[COLUMNS];
    const i64 left = x0[0], size = x1[n - 1] - left;
    for (i64 c = 0; c < size; c++) sums[c] = rows > 0 ? x[left + c] : 0;
    for (i64 r = 1; r < rows; r++) for (i64 c = 0; c < size; c++) sums[c] += x[r * w + left + c];
    for (i64 j = 0, next; j < n; j = next) {
        const i64 width = x1[j] - x0[j], stride = j + 1 < n ? x0[j + 1] - x0[j] : 0;
        for (next = j + 1; next < n && x0[next] - x0[next - 1] == stride && x1[next] - x0[next] == width;) next++;
        const double *from = sums + x0[j] - left;
        if (stride == 1) NAME(across)(from, y + j, width, 1, next - j);
        else if (stride == 2) NAME(across)(from, y + j, width, 2, next - j);
        else NAME(across)(from, y + j, width, stride, next - j);
    }
}

/* The sums over windows, in double: one may be a whole plane. Neither x0 nor x1 ever falls; the sum of an empty window is 0. */
void NAME(total)(const T *restrict x, T *restrict y, const int32_t *y0, const int32_t *y1, const int32_t *x0, const int32_t *x1,
                 i64 planes, i64 h, i64 w, i64 oh, i64 ow)
{
    if (ow == 1 && x1[0] - x0[0] == w) {
        NAME(total_of_stretches)(x, y, y0, y1, planes, h * w, w, oh);
        return;
    }
    for (i64 p = 0; p < planes; p++, x += h * w)
        for (i64 i = 0; i < oh; i++, y += ow)
            for (i64 j = 0, next; j < ow; j = next) {
                const T *row = x + y0[i] * w;
                for (next = j + 1; next < ow && x1[next] - x0[j] <= COLUMNS && next - j < COLUMNS;) next++;
                if (x1[j] - x0[j] <= COLUMNS) {
                    NAME(row_of_totals)(row, y + j, x0 + j, x1 + j, y1[i] - y0[i], w, next - j);
                    continue;
                }
                double sum = 0;
                for (i64 r = 0; r < y1[i] - y0[i]; r++) for (i64 c = x0[j]; c < x1[j]; c++) sum += row[r * w + c];
                y[j] = (T)sum;
            }
}

void NAME(total_gradient)(const T *restrict g, T *restrict dx, const int32_t *y0, const int32_t *y1, const int32_t *x0,
                          const int32_t *x1, i64 planes, i64 h, i64 w, i64 oh, i64 ow)
{
    if (oh * ow == 1 && y1[0] - y0[0] == h && x1[0] - x0[0] == w) {
        for (i64 p = 0; p < planes; p++, dx += h * w) {
            for (i64 i = 0; i < h * w; i += LINE(T)) __builtin_prefetch(dx + i + 2 * AHEAD(T), 1);
            for (i64 i = 0; i < h * w; i++) dx[i] = g[p];
        }
        return;
    }
    memset(dx, 0, planes * h * w * sizeof(T));
    for (i64 p = 0; p < planes; p++, g += oh * ow, dx += h * w)
        for (i64 i = 0; i < oh; i++) for (i64 j = 0; j < ow; j++)
            for (i64 r = y0[i]; r < y1[i]; r++) for (i64 c = x0[j]; c < x1[j]; c++) dx[r * w + c] += g[i * ow + j];
}

#undef SOME
#endif
