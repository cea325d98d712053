/* The sigmoid, 1 / (1 + exp(-x)), and SiLU, x times that, with its derivative: they share their exponential. */

#ifndef MPITRAIN_SILU_H
#define MPITRAIN_SILU_H

#include "vector_math.h"

#define SILU(T, NAME, FUSED)                                                                                            \
    INLINE T sigmoid_of_##NAME(T x) { return (T)1 / ((T)1 + exp_##NAME(-x)); }                                          \
    INLINE T silu_of_##NAME(T x) { return x * sigmoid_of_##NAME(x); }                                                   \
    INLINE void silu_both_##NAME(T x, T *value, T *slope)                                                               \
    {                                                                                                                   \
        T s = sigmoid_of_##NAME(x), y = x * s;                                                                          \
        *value = y;                                                                                                     \
        *slope = FUSED(y, (T)1 - s, s);                                                                                 \
    }

SILU(float, float32, fmaf)
SILU(double, float64, fma)

#endif
