/* The rows of attention: softmax of scaled scores, and its gradient, over matrices (L, S). With `causal`, row i has columns
   0..i only, and the others are set to zero without being read. The file includes itself for float and double. */

#ifndef T

#include "geometry.h"
#include "vector_math.h"

#define PARTS 16                     /* partial sums, folded in one fixed order */
#define HALVE(part, n) for (i64 j = 0; j < n; j++) part[j] += part[j + n]
#define FOLD(part) do { HALVE(part, 8); HALVE(part, 4); HALVE(part, 2); HALVE(part, 1); } while (0)

#define SOURCE "attention.c"
#include "both.h"

#else

/* y = softmax(scale * x), row by row; a row without any score above minus infinity becomes zeros. x may be y. */
void NAME(weights)(const T *x, T *y, double scale, i64 matrices, i64 rows, i64 columns, i64 causal)
{
    T factor = (T)scale;
    for (i64 m = 0; m < matrices; m++) for (i64 r = 0; r < rows; r++, x += columns, y += columns) {
        i64 n = causal ? at_most(r + 1, columns) : columns;
        i64 end = at_most((n + PARTS - 1) / PARTS * PARTS, columns), whole = end / PARTS * PARTS;
        T most[PARTS], part[PARTS] = {0};
        for (i64 j = 0; j < PARTS; j++) most[j] = -INFINITY;
        for (i64 i = 0; i < n; i++) y[i] = x[i] * factor;
        for (i64 i = n; i < end; i++) y[i] = -INFINITY;      /* up to whole vectors: their exp is zero */
        for (i64 i = 0; i < whole; i += PARTS)
            for (i64 j = 0; j < PARTS; j++) most[j] = y[i + j] > most[j] ? y[i + j] : most[j];
        for (i64 i = whole; i < end; i++) most[i - whole] = y[i] > most[i - whole] ? y[i] : most[i - whole];
        T top = most[0];
        for (i64 j = 1; j < PARTS; j++) top = most[j] > top ? most[j] : top;
        if (top == -INFINITY) top = 0;                   /* every exp below is zero then, or NaN where a score is */
        for (i64 i = 0; i < end; i++) y[i] = NAME(exp)(y[i] - top);
        for (i64 i = 0; i < whole; i += PARTS)
            for (i64 j = 0; j < PARTS; j++) part[j] += y[i + j];
        for (i64 i = whole; i < end; i++) part[i - whole] += y[i];
        FOLD(part);
        T inverse = part[0] == 0 ? 0 : 1 / part[0];
        for (i64 i = 0; i < end; i++) y[i] *= inverse;
        for (i64 i = end; i < columns; i++) y[i] = 0;
    }
}

/* dx = scale * y * (g - sum of y * g), the gradient of the unscaled scores. g may be dx. */
void NAME(weights_gradient)(const T *y, const T *g, T *dx, double scale, i64 matrices, i64 rows, i64 columns, i64 causal)
{
    T factor = (T)scale;
    for (i64 m = 0; m < matrices; m++) for (i64 r = 0; r < rows; r++, y += columns, g += columns, dx += columns) {
        i64 n = causal ? at_most(r + 1, columns) : columns, whole = n / PARTS * PARTS;
        T part[PARTS] = {0};
        for (i64 i = 0; i < whole; i += PARTS)
            for (i64 j = 0; j < PARTS; j++) part[j] += y[i + j] * g[i + j];
        for (i64 i = whole; i < n; i++) part[i - whole] += y[i] * g[i];
        FOLD(part);
        T mean = part[0];
        for (i64 i = 0; i < n; i++) dx[i] = (g[i] - mean) * (y[i] * factor);
        for (i64 i = n; i < columns; i++) dx[i] = 0;
    }
}

#endif
