/* Functions of one and two numbers that NumPy computes number by number, or in several passes over memory. Arrays are contiguous.

   Arithmetic of quotients and exponentials is float64, so that float32 results are rounded once. */

#include "vector_math.h"

typedef int64_t i64;

/* log((1 + s) / (1 - s)) / s of t = s^2, |s| <= 1/3: interpolated at Chebyshev nodes by Python's mpmath. */
INLINE double twice_atanh_to_a_third(double t)
{
    double s = 0.16488285931389568;
    s = fma(s, t, 0.06980390498332432); s = fma(s, t, 0.10976616637947494); s = fma(s, t, 0.11715274668110426);
    s = fma(s, t, 0.13336876815743837); s = fma(s, t, 0.1538444706045997); s = fma(s, t, 0.18181823422495252);
    s = fma(s, t, 0.22222222119103674); s = fma(s, t, 0.28571428572622926); s = fma(s, t, 0.3999999999999287);
    s = fma(s, t, 0.6666666666666669); s = fma(s, t, 2.0);
    return s;
}

/* log(exp(a) + exp(b)) = the larger one + log(1 + u), u = exp(-|a - b|) = s 2 / (1 - s). */
INLINE double logaddexp_of(double a, double b)
{
    double most = a > b ? a : b, gap = a > b ? b - a : a - b;
    double u = exp_of_negative_float64(gap), s = u / (2.0 + u);
    double sum = fma(s, twice_atanh_to_a_third(s * s), most);
    return a == b ? a + 0.693147180559945309 : sum;          /* infinities have no difference; NaN gives NaN */
}

/* x - y trunc(x / y), exact; `python`: with the sign of y. A quotient is never rounded below a whole number it reaches; where it is
   rounded up to one, or has too many digits, or is none, C's fmod is asked. */
#define SURE(u, v, r) ((u) < (v) * 1e15 && (v) > 1e-290 && (r) >= 0.0 && (r) < (v))
#define SIGNED(T, m, b)                                                                                                 \
    (python ? ((m) == 0 ? (T)copysign(0.0, (double)(b)) : ((m) < 0) != ((b) < 0) ? (T)((m) + (b)) : (m)) : (m))

#define REMAINDERS(T, NAME)                                                                                             \
    void remainder_##NAME(const T *x, const T *y, T *z, i64 python, i64 n)                                              \
    {                                                                                                                   \
        for (i64 at = 0; at < n; at += 512) {                                                                           \
            const i64 size = n - at < 512 ? n - at : 512;                                                               \
            const T *a = x + at, *b = y + at;                                                                           \
            T *to = z + at;                                                                                             \
            i64 unsure = 0;                                                                                             \
            EACH(i, size) {                                                                                             \
                double u = fabs((double)a[i]), v = fabs((double)b[i]), r = fma(-trunc(u / v), v, u);                    \
                T m = (T)copysign(r, (double)a[i]);                                                                     \
                to[i] = SIGNED(T, m, b[i]);                                                                             \
                unsure += SURE(u, v, r) ? 0 : 1;                                                                        \
            }                                                                                                           \
            for (i64 i = 0; unsure && i < size; i++) {                                                                  \
                double u = fabs((double)a[i]), v = fabs((double)b[i]), r = fma(-trunc(u / v), v, u);                    \
                if (SURE(u, v, r)) continue;                                                                            \
                T m = (T)fmod((double)a[i], (double)b[i]);                                                              \
                to[i] = SIGNED(T, m, b[i]);                                                                             \
            }                                                                                                           \
        }                                                                                                               \
    }

#define ALL(T, NAME)                                                                                                    \
    REMAINDERS(T, NAME)                                                                                                 \
    void logaddexp_##NAME(const T *x, const T *y, T *z, i64 n)                                                          \
    {                                                                                                                   \
        EACH(i, n) z[i] = (T)logaddexp_of((double)x[i], (double)y[i]);                                                  \
    }                                                                                                                   \
    void replace_##NAME(const T *x, T *y, double missing, double most, double least, i64 n)                             \
    {                                                                                                                   \
        const T a = (T)missing, b = (T)most, c = (T)least;                                                              \
        EACH(i, n) { const T v = x[i]; y[i] = v != v ? a : v == (T)INFINITY ? b : v == -(T)INFINITY ? c : v; }          \
    }

WIDE_VECTORS

ALL(float, float32)
ALL(double, float64)

END_OF_WIDE_VECTORS
