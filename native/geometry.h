/* What a convolution looks at; `mpitrain/kernels/convolution.py` fills it in as an array of 64-bit integers. */
#ifndef MPITRAIN_GEOMETRY_H
#define MPITRAIN_GEOMETRY_H

#include <stdint.h>

typedef int64_t i64;

typedef struct {
    i64 n, c, h, w;                     /* images (N, C, H, W) */
    i64 kh, kw, sh, sw, ph, pw, dh, dw; /* kernel, stride, padding, dilation in y and x */
    i64 oh, ow;                         /* size of the result */
    i64 o, groups;                      /* channels of the result; 0 where a function does not ask */
} Geometry;

static inline i64 at_most(i64 a, i64 b) { return a < b ? a : b; }
static inline i64 at_least(i64 a, i64 b) { return a > b ? a : b; }
static inline i64 clip(i64 value, i64 low, i64 high) { return value < low ? low : value > high ? high : value; }

/* The outputs [lo, hi) whose input position o*stride + shift lies inside [0, size). */
static inline void inside(i64 shift, i64 stride, i64 size, i64 outputs, i64 *lo, i64 *hi)
{
    *lo = clip(shift >= 0 ? 0 : (-shift + stride - 1) / stride, 0, outputs);
    *hi = size <= shift ? *lo : clip((size - shift + stride - 1) / stride, *lo, outputs);
}

#endif
