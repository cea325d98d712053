/* Optimizer updates, one pass over memory. Arrays are contiguous, of n elements; `s` are the scalars, in the order of
   kernels/optimizer.py, which says what they mean.

   A step moves 28 bytes an element and computes little, so memory decides: lines are fetched ahead, those that are written as
   such. On one core beside another, Adam over 20 MiB arrays took 1.46 ns an element so, 1.63 without (in memory that processes
   share, with its small pages; Intel Xeon 2.5 GHz, 2026-11). */

#include <math.h>
#include <stdint.h>
#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

typedef int64_t i64;

#define LINE 64                     /* bytes of a cache line */
#define AHEAD 32                    /* lines fetched before they are needed; 8 are too few, 16 to 64 are alike */
#define READ(p) __builtin_prefetch((p) + b + AHEAD * lanes, 0);
#define WRITE(p) __builtin_prefetch((p) + b + AHEAD * lanes, 1);

/* BODY for each element i, after the prefetches of a line's worth of them. */
#define EACH(T, FETCH, BODY)                                                                                            \
    enum { lanes = LINE / sizeof(T) };                                                                                  \
    i64 b = 0;                                                                                                          \
    for (; b + lanes <= n; b += lanes) {                                                                                \
        FETCH                                                                                                           \
        for (i64 k = 0; k < lanes; k++) { i64 i = b + k; BODY }                                                         \
    }                                                                                                                   \
    for (i64 i = b; i < n; i++) { BODY }

#define RULES(T, NAME, SQRT)                                                                                            \
void sgd_##NAME(T *restrict w, const T *restrict gradient, const T *restrict s, i64 n)                                  \
{                                                                                                                       \
    T lr = s[0], decay = s[1], scale = s[2];                                                                            \
    EACH(T, WRITE(w) READ(gradient), w[i] -= lr * (gradient[i] * scale + decay * w[i]);)                                \
}                                                                                                                       \
void sgd_momentum_##NAME(T *restrict w, const T *restrict gradient, T *restrict buffer, const T *restrict s, i64 n)     \
{                                                                                                                       \
    T lr = s[0], momentum = s[1], own = s[2], ahead = s[3], decay = s[4], scale = s[5];                                 \
    EACH(T, WRITE(w) READ(gradient) WRITE(buffer),                                                                      \
        T g = gradient[i] * scale + decay * w[i];                                                                       \
        T velocity = buffer[i] * momentum + g;                                                                          \
        buffer[i] = velocity;                                                                                           \
        w[i] -= lr * (own * g + ahead * velocity);)                                                                     \
}                                                                                                                       \
void adam_##NAME(T *restrict w, const T *restrict gradient, T *restrict m, T *restrict v, const T *restrict s, i64 n)   \
{                                                                                                                       \
    T step_size = s[0], keep = s[1], penalty = s[2], new1 = s[3], old2 = s[4], new2 = s[5], root = s[6], eps = s[7];    \
    T scale = s[8];                                                                                                     \
    EACH(T, WRITE(w) READ(gradient) WRITE(m) WRITE(v),                                                                  \
        T g = gradient[i] * scale + penalty * w[i];                                                                     \
        T first = m[i] + new1 * (g - m[i]);                                                                             \
        T second = v[i] * old2 + new2 * g * g;                                                                          \
        m[i] = first;                                                                                                   \
        v[i] = second;                                                                                                  \
        w[i] = w[i] * keep - step_size * first / (SQRT(second) * root + eps);)                                          \
}                                                                                                                       \
void lamb_##NAME(const T *restrict w, const T *restrict gradient, T *restrict direction, T *restrict m, T *restrict v,  \
                 const T *restrict s, i64 n)                                                                            \
{                                                                                                                       \
    T new1 = s[0], old2 = s[1], new2 = s[2], correct1 = s[3], root = s[4], eps = s[5], decay = s[6], scale = s[7];      \
    EACH(T, READ(w) READ(gradient) WRITE(direction) WRITE(m) WRITE(v),                                                  \
        T g = gradient[i] * scale;                                                                                      \
        T first = m[i] + new1 * (g - m[i]);                                                                             \
        T second = v[i] * old2 + new2 * g * g;                                                                          \
        m[i] = first;                                                                                                   \
        v[i] = second;                                                                                                  \
        direction[i] = correct1 * first / (SQRT(second) * root + eps) + decay * w[i];)                                  \
}                                                                                                                       \
void rmsprop_##NAME(T *restrict w, const T *restrict gradient, T *restrict square, T *restrict buffer,                  \
                    const T *restrict s, i64 n)                                                                         \
{                                                                                                                       \
    T lr = s[0], momentum = s[1], old = s[2], new = s[3], eps = s[4], decay = s[5], scale = s[6];                       \
    EACH(T, WRITE(w) READ(gradient) WRITE(square) WRITE(buffer),                                                        \
        T g = gradient[i] * scale + decay * w[i];                                                                       \
        T second = square[i] * old + new * g * g;                                                                       \
        T velocity = buffer[i] * momentum + g / (SQRT(second) + eps);                                                   \
        square[i] = second;                                                                                             \
        buffer[i] = velocity;                                                                                           \
        w[i] -= lr * velocity;)                                                                                         \
}

/* The same for elements [from, from + n) of `a`, the values and the state; `gradient` is those elements' alone. */
#define PART(T, RULE, NAME, ...)                                                                                        \
void RULE##_part_##NAME(T *const *a, const T *gradient, const T *s, i64 from, i64 n)                                    \
{                                                                                                                       \
    RULE##_##NAME(a[0] + from, gradient, __VA_ARGS__ s, n);                                                             \
}
#define PARTS(T, NAME)                                                                                                  \
PART(T, sgd, NAME, )                                                                                                    \
PART(T, sgd_momentum, NAME, a[1] + from,)                                                                               \
PART(T, adam, NAME, a[1] + from, a[2] + from,)                                                                          \
PART(T, rmsprop, NAME, a[1] + from, a[2] + from,)

/* The sum of the squares of each BLOCK elements, the last block filled up with zeros: square i plus square i + BLOCK / 2, and so
   on in halves, the order of kernels/optimizer.py. */
enum { BLOCK = 4096 };
#define SQUARE_SUMS(T, NAME)                                                                                            \
void square_sums_##NAME(const T *x, i64 n, double *out)                                                                 \
{                                                                                                                       \
    double sums[BLOCK / 2];                                                                                             \
    T filled[BLOCK];                                                                                                    \
    for (i64 first = 0; first < n; first += BLOCK) {                                                                    \
        const T *from = x + first;                                                                                      \
        if (n - first < BLOCK) {                                                                                        \
            for (i64 i = 0; i < BLOCK; i++) filled[i] = i < n - first ? from[i] : (T)0;                                 \
            from = filled;                                                                                              \
        }                                                                                                               \
        for (i64 i = 0; i < BLOCK / 2; i++) {                                                                           \
            double a = from[i], b = from[i + BLOCK / 2];                                                                \
            sums[i] = a * a + b * b;                                                                                    \
        }                                                                                                               \
        for (i64 half = BLOCK / 4; half >= 1; half /= 2)                                                                \
            for (i64 i = 0; i < half; i++) sums[i] += sums[half + i];                                                   \
        out[first / BLOCK] = sums[0];                                                                                   \
    }                                                                                                                   \
}
SQUARE_SUMS(float, float32)
SQUARE_SUMS(double, float64)

RULES(float, float32, sqrtf)
RULES(double, float64, sqrt)
PARTS(float, float32)
PARTS(double, float64)
