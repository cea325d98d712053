/* Every stride-th pixel of images (N, C, H, W), contiguous, between channels of zeros: the shortcut of a residual block without
   parameters; and its adjoint. For float and double. */

#include <string.h>

#include "geometry.h"

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#define SUBSAMPLE(T, NAME)                                                                                              \
                                                                                                                        \
/* y (N, before + C + after, OH, OW) */                                                                                 \
void subsample_##NAME(const T *restrict x, T *restrict y, i64 n, i64 c, i64 h, i64 w, i64 oh, i64 ow, i64 stride,       \
                      i64 before, i64 after)                                                                            \
{                                                                                                                       \
    for (i64 k = 0; k < n; k++) {                                                                                       \
        memset(y, 0, before * oh * ow * sizeof(T));                                                                     \
        y += before * oh * ow;                                                                                          \
        for (i64 p = 0; p < c; p++, x += h * w) for (i64 i = 0; i < oh; i++, y += ow) {                                 \
            const T *row = x + i * stride * w;                                                                          \
            if (stride == 2) for (i64 j = 0; j < ow; j++) y[j] = row[2 * j];                                            \
            else for (i64 j = 0; j < ow; j++) y[j] = row[j * stride];                                                   \
        }                                                                                                               \
        memset(y, 0, after * oh * ow * sizeof(T));                                                                      \
        y += after * oh * ow;                                                                                           \
    }                                                                                                                   \
}                                                                                                                       \
                                                                                                                        \
void subsample_gradient_##NAME(const T *restrict g, T *restrict dx, i64 n, i64 c, i64 h, i64 w, i64 oh, i64 ow,         \
                               i64 stride, i64 before, i64 after)                                                       \
{                                                                                                                       \
    for (i64 k = 0; k < n; k++, g += after * oh * ow) {                                                                 \
        g += before * oh * ow;                                                                                          \
        for (i64 p = 0; p < c; p++, dx += h * w) for (i64 i = 0; i < oh; i++, g += ow) {                                \
            T *to = dx + i * stride * w;                                                                                \
            if (stride == 2) {                                                                                          \
                for (i64 j = 0; j < w / 2; j++) { to[2 * j] = g[j]; to[2 * j + 1] = 0; }                                \
                if (w % 2) to[w - 1] = g[ow - 1];                                                                       \
            } else {                                                                                                    \
                memset(to, 0, w * sizeof(T));                                                                           \
                for (i64 j = 0; j < ow; j++) to[j * stride] = g[j];                                                     \
            }                                                                                                           \
            memset(to + w, 0, (at_most((i + 1) * stride, h) - i * stride - 1) * w * sizeof(T));                         \
        }                                                                                                               \
    }                                                                                                                   \
}

SUBSAMPLE(float, float32)
SUBSAMPLE(double, float64)
