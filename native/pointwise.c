/* Activations and their gradients, one pass over memory. Arrays are contiguous, of n elements. All functions return 0. */

#include "vector_math.h"

typedef int64_t i64;

#define VALUES(T, NAME, FUNCTION)                                                                                       \
    int FUNCTION##_##NAME(const T *restrict x, T *restrict y, i64 n)                                                    \
    {                                                                                                                   \
        for (i64 i = 0; i < n; i++) y[i] = FUNCTION##_of_##NAME(x[i]);                                                  \
        return 0;                                                                                                       \
    }

#define GRADIENT(T, NAME, FUNCTION)                                                                                     \
    int FUNCTION##_grad_##NAME(const T *restrict x, const T *restrict g, T *restrict dx, i64 n)                         \
    {                                                                                                                   \
        for (i64 i = 0; i < n; i++) dx[i] = g[i] * FUNCTION##_slope_##NAME(x[i]);                                       \
        return 0;                                                                                                       \
    }

/* s(x), the sigmoid; x P(N < x), GELU; x s(2 u) with 2 u = 1.596 (x + 0.0447 x^3), GELU by a tanh, since
   (1 + tanh u) / 2 = s(2 u); x s(x), SiLU. Each with its derivative. */
#define FORMULAS(T, NAME)                                                                                               \
    INLINE T sigmoid_of_##NAME(T x) { return (T)1 / ((T)1 + exp_##NAME(-x)); }                                          \
    INLINE T distribution_##NAME(T x, T bell)                                                                           \
    {                                                                                                                   \
        T tail = normal_tail_##NAME(x, bell);                                                                           \
        return x > 0 ? (T)1 - tail : tail;                                                                              \
    }                                                                                                                   \
    INLINE T bell_##NAME(T x) { return exp_##NAME((T)-0.5 * x * x); }                                                   \
    INLINE T gelu_of_##NAME(T x) { return x * distribution_##NAME(x, bell_##NAME(x)); }                                 \
    INLINE T gelu_slope_##NAME(T x)                                                                                     \
    {                                                                                                                   \
        T bell = bell_##NAME(x);                                                                                        \
        return distribution_##NAME(x, bell) + x * bell * (T)0.398942280401432678;                                       \
    }                                                                                                                   \
    INLINE T twice_u_##NAME(T x) { return (T)1.59576912160573071 * (x + (T)0.044715 * x * x * x); }                     \
    INLINE T gelu_tanh_of_##NAME(T x) { return x * sigmoid_of_##NAME(twice_u_##NAME(x)); }                              \
    INLINE T gelu_tanh_slope_##NAME(T x)                                                                                \
    {                                                                                                                   \
        T s = sigmoid_of_##NAME(twice_u_##NAME(x));                                                                     \
        return s + x * s * ((T)1 - s) * ((T)1.59576912160573071 * ((T)1 + (T)0.134145 * x * x));                        \
    }                                                                                                                   \
    INLINE T silu_of_##NAME(T x) { return x * sigmoid_of_##NAME(x); }                                                   \
    INLINE T silu_slope_##NAME(T x)                                                                                     \
    {                                                                                                                   \
        T s = sigmoid_of_##NAME(x);                                                                                     \
        return s + x * s * ((T)1 - s);                                                                                  \
    }                                                                                                                   \
    VALUES(T, NAME, sigmoid)                                                                                            \
    VALUES(T, NAME, gelu)                                                                                               \
    GRADIENT(T, NAME, gelu)                                                                                             \
    VALUES(T, NAME, gelu_tanh)                                                                                          \
    GRADIENT(T, NAME, gelu_tanh)                                                                                        \
    VALUES(T, NAME, silu)                                                                                               \
    GRADIENT(T, NAME, silu)                                                                                             \
    int relu_##NAME(const T *restrict x, T *restrict y, i64 n)                                                          \
    {                                                                                                                   \
        for (i64 i = 0; i < n; i++) y[i] = x[i] < 0 ? (T)0 : x[i];      /* NaN stays NaN */                             \
        return 0;                                                                                                       \
    }                                                                                                                   \
    int relu_grad_##NAME(const T *restrict y, const T *restrict g, T *restrict dx, i64 n)                               \
    {                                                                                                                   \
        for (i64 i = 0; i < n; i++) dx[i] = y[i] > 0 ? g[i] : (T)0;                                                     \
        return 0;                                                                                                       \
    }

FORMULAS(float, float32)
FORMULAS(double, float64)
