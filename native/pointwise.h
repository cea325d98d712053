/* Activations and their gradients, one pass over memory. Arrays are contiguous. All functions return 0.

   An activation that is computed for training leaves its derivative beside its value: the two share their exponential, and
   the gradient is one multiplication then. `slope` may be the memory of x: each element is read before it is written.

   They are external in pointwise.c, and static where products apply them to what they have just computed. Who includes tile.h too
   includes this first: nothing is fused here that is not said to be. */

#include "ahead.h"
#include "silu.h"

#ifndef LINKAGE
#define LINKAGE static __attribute__((noinline, unused))
#endif

typedef int64_t i64;

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("prefer-vector-width=512")
#endif
#if defined(__clang__)
#define EACH(i, n) _Pragma("clang loop vectorize(assume_safety)") for (i64 i = 0; i < n; i++)
#else
#define EACH(i, n) _Pragma("GCC ivdep") for (i64 i = 0; i < n; i++)
#endif

/* y[i] = FUNCTION(x[i]), and the same with the derivative. */
#define VALUES(T, NAME, FUNCTION)                                                                                       \
    INLINE void FUNCTION##_some_##NAME(const T *x, T *y, i64 n)                                                         \
    {                                                                                                                   \
        EACH(i, n) y[i] = FUNCTION##_of_##NAME(x[i]);                                                                   \
    }                                                                                                                   \
    LINKAGE int FUNCTION##_##NAME(const T *x, T *y, i64 n)                                                              \
    {                                                                                                                   \
        i64 at = 0;                                                                                                     \
        for (; at + STRETCH(T) <= n; at += STRETCH(T)) {                                                                \
            fetch(x + at + AHEAD(T), NULL, y + at + AHEAD(T), NULL);                                                    \
            FUNCTION##_some_##NAME(x + at, y + at, STRETCH(T));                                                         \
        }                                                                                                               \
        FUNCTION##_some_##NAME(x + at, y + at, n - at);                                                                 \
        return 0;                                                                                                       \
    }

#define VALUES_AND_SLOPES(T, NAME, FUNCTION)                                                                            \
    VALUES(T, NAME, FUNCTION)                                                                                           \
    INLINE void FUNCTION##_and_some_slopes_##NAME(const T *x, T *slope, T *y, i64 n)                                    \
    {                                                                                                                   \
        EACH(i, n) {                                                                                                    \
            T value, steep;                                                                                             \
            FUNCTION##_both_##NAME(x[i], &value, &steep);                                                               \
            y[i] = value;                                                                                               \
            slope[i] = steep;                                                                                           \
        }                                                                                                               \
    }                                                                                                                   \
    LINKAGE int FUNCTION##_and_slope_##NAME(const T *x, T *slope, T *y, i64 n)                                          \
    {                                                                                                                   \
        i64 at = 0;                                                                                                     \
        for (; at + STRETCH(T) <= n; at += STRETCH(T)) {                                                                \
            fetch(x == slope ? NULL : x + at + AHEAD(T), NULL, slope + at + AHEAD(T), y + at + AHEAD(T));               \
            FUNCTION##_and_some_slopes_##NAME(x + at, slope + at, y + at, STRETCH(T));                                  \
        }                                                                                                               \
        FUNCTION##_and_some_slopes_##NAME(x + at, slope + at, y + at, n - at);                                          \
        return 0;                                                                                                       \
    }

/* dx = GRADIENT of (kept[j], g[j]), row by row; where `sums` is not NULL, the sums of dx over the rows go there. dx may be the
   memory of `kept`. */
#define GRADIENT(T, NAME, FUNCTION, FORMULA)                                                                            \
    INLINE void FUNCTION##_some_##NAME(const T *kept, const T *g, T *dx, T *restrict sums, i64 n)                       \
    {                                                                                                                   \
        if (sums) EACH(i, n) { T k = kept[i], d = g[i], v = FORMULA; dx[i] = v; sums[i] += v; }                         \
        else EACH(i, n) { T k = kept[i], d = g[i]; dx[i] = FORMULA; }                                                   \
    }                                                                                                                   \
    LINKAGE int FUNCTION##_##NAME(const T *kept, const T *g, T *dx, T *restrict sums, i64 rows, i64 n)                  \
    {                                                                                                                   \
        if (sums) memset(sums, 0, n * sizeof(T));                                                                       \
        for (i64 r = 0; r < rows; r++, kept += n, g += n, dx += n) {                                                    \
            i64 at = 0;                                                                                                 \
            for (; at + STRETCH(T) <= n; at += STRETCH(T)) {                                                            \
                fetch(g + at + AHEAD(T), kept == dx ? NULL : kept + at + AHEAD(T), dx + at + AHEAD(T), NULL);           \
                FUNCTION##_some_##NAME(kept + at, g + at, dx + at, sums ? sums + at : NULL, STRETCH(T));                \
            }                                                                                                           \
            FUNCTION##_some_##NAME(kept + at, g + at, dx + at, sums ? sums + at : NULL, n - at);                        \
        }                                                                                                               \
        return 0;                                                                                                       \
    }

/* x P(N < x), GELU; x s(2 u) with the sigmoid s and 2 u = 1.596 (x + 0.0447 x^3), GELU by a tanh, since
   (1 + tanh u) / 2 = s(2 u). */
#define FORMULAS(T, NAME, FUSED)                                                                                        \
    INLINE T relu_of_##NAME(T x) { return x < 0 ? (T)0 : x; }               /* NaN stays NaN */                         \
    INLINE T distribution_##NAME(T x, T density)                                                                        \
    {                                                                                                                   \
        T tail = normal_tail_##NAME(x, density);                                                                        \
        return x > 0 ? (T)1 - tail : tail;                                                                              \
    }                                                                                                                   \
    INLINE T gelu_of_##NAME(T x) { return x * distribution_##NAME(x, density_##NAME(x)); }                              \
    INLINE void gelu_both_##NAME(T x, T *value, T *slope)                                                               \
    {                                                                                                                   \
        T density = density_##NAME(x), below = distribution_##NAME(x, density);                                         \
        *value = x * below;                                                                                             \
        *slope = FUSED(x, density, below);                                                                              \
    }                                                                                                                   \
    INLINE T twice_u_##NAME(T x) { return x * FUSED(x * x, (T)0.0713548162726002504, (T)1.59576912160573071); }         \
    INLINE T gelu_tanh_of_##NAME(T x) { return x * sigmoid_of_##NAME(twice_u_##NAME(x)); }                              \
    INLINE void gelu_tanh_both_##NAME(T x, T *value, T *slope)                                                          \
    {                                                                                                                   \
        T s = sigmoid_of_##NAME(twice_u_##NAME(x)), y = x * s;                                                          \
        *value = y;                                                                                                     \
        *slope = FUSED(y * ((T)1 - s), FUSED(x * x, (T)0.214064448817800755, (T)1.59576912160573071), s);               \
    }                                                                                                                   \
    VALUES(T, NAME, relu)                                                                                               \
    VALUES(T, NAME, sigmoid)                                                                                            \
    VALUES_AND_SLOPES(T, NAME, gelu)                                                                                    \
    VALUES_AND_SLOPES(T, NAME, gelu_tanh)                                                                               \
    VALUES_AND_SLOPES(T, NAME, silu)                                                                                    \
    GRADIENT(T, NAME, slope_grad, k * d)                                                                                \
    GRADIENT(T, NAME, relu_grad, k <= 0 ? (T)0 : d)                        /* NaN passes it on */                       \
    GRADIENT(T, NAME, tanh_grad, ((T)1 - k * k) * d)                                                                    \
    GRADIENT(T, NAME, sigmoid_grad, ((T)1 - k) * k * d)

FORMULAS(float, float32, fmaf)
FORMULAS(double, float64, fma)

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif
