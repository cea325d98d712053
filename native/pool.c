/* Pooling of images (N, C, H, W), contiguous, for float and double. A plane is one (H, W); output (i, j) of a plane looks at
   rows [y0[i], y1[i]) and columns [x0[j], x1[j]), so one loop serves fixed, padded and adaptive windows. */

#include <string.h>

#include "geometry.h"

#define POOL_FUNCTIONS(T, NAME)                                                                                         \
                                                                                                                        \
/* The largest value and where it is in its plane; NaN wins, and the first of equals. */                                \
void maximum_##NAME(const T *x, T *y, int32_t *where, const i64 *y0, const i64 *y1, const i64 *x0, const i64 *x1,       \
                    i64 planes, i64 h, i64 w, i64 oh, i64 ow)                                                           \
{                                                                                                                       \
    for (i64 p = 0; p < planes; p++, x += h * w, y += oh * ow, where += oh * ow)                                        \
        for (i64 i = 0; i < oh; i++) for (i64 j = 0; j < ow; j++) {                                                     \
            i64 at = y0[i] * w + x0[j];                                                                                 \
            T best = x[at];                                                                                             \
            for (i64 r = y0[i]; r < y1[i]; r++) for (i64 c = x0[j]; c < x1[j]; c++) {                                   \
                T value = x[r * w + c];                                                                                 \
                if (value > best || (value != value && best == best)) { best = value; at = r * w + c; }                 \
            }                                                                                                           \
            y[i * ow + j] = best;                                                                                       \
            where[i * ow + j] = (int32_t)at;                                                                            \
        }                                                                                                               \
}                                                                                                                       \
                                                                                                                        \
void maximum_gradient_##NAME(const T *g, const int32_t *where, T *dx, i64 planes, i64 image, i64 outputs)               \
{                                                                                                                       \
    memset(dx, 0, planes * image * sizeof(T));                                                                          \
    for (i64 p = 0; p < planes; p++, g += outputs, where += outputs, dx += image)                                       \
        for (i64 i = 0; i < outputs; i++) dx[where[i]] += g[i];                                                         \
}                                                                                                                       \
                                                                                                                        \
/* Sums in double: a window may be a whole plane. */                                                                    \
void total_##NAME(const T *x, T *y, const i64 *y0, const i64 *y1, const i64 *x0, const i64 *x1,                         \
                  i64 planes, i64 h, i64 w, i64 oh, i64 ow)                                                             \
{                                                                                                                       \
    for (i64 p = 0; p < planes; p++, x += h * w, y += oh * ow)                                                          \
        for (i64 i = 0; i < oh; i++) for (i64 j = 0; j < ow; j++) {                                                     \
            double sum = 0;                                                                                             \
            for (i64 r = y0[i]; r < y1[i]; r++) for (i64 c = x0[j]; c < x1[j]; c++) sum += x[r * w + c];                \
            y[i * ow + j] = (T)sum;                                                                                     \
        }                                                                                                               \
}                                                                                                                       \
                                                                                                                        \
void total_gradient_##NAME(const T *g, T *dx, const i64 *y0, const i64 *y1, const i64 *x0, const i64 *x1,               \
                           i64 planes, i64 h, i64 w, i64 oh, i64 ow)                                                    \
{                                                                                                                       \
    memset(dx, 0, planes * h * w * sizeof(T));                                                                          \
    for (i64 p = 0; p < planes; p++, g += oh * ow, dx += h * w)                                                         \
        for (i64 i = 0; i < oh; i++) for (i64 j = 0; j < ow; j++)                                                       \
            for (i64 r = y0[i]; r < y1[i]; r++) for (i64 c = x0[j]; c < x1[j]; c++) dx[r * w + c] += g[i * ow + j];     \
}

POOL_FUNCTIONS(float, float32)
POOL_FUNCTIONS(double, float64)
