/* exp and the complementary error function as plain arithmetic, so that loops over arrays become vector code.

   The multiply-adds are fused explicitly: a third faster, and the same bits whatever the compiler would choose.
   Polynomials interpolate at Chebyshev nodes, or are the best in the largest relative error. Largest relative errors, over
   100,000 points against the C library's long double: exp_float32 9e-8, exp_float64 1.7e-16, exp_of_negative_float32 1.9e-7
   where x > -1, and 1.9e-7 + 3e-8 |x|, all 0 where the result would be close to a denormal number; normal_tail 7.1e-7 (float32)
   and 1e-15 (float64) for |x| < 3, growing with x^2 as the rounding of x^2 in exp does; tanh_float32 1.7e-7, and 1.2e-7 for
   |x| > 0.7, tanh_float64 3.6e-16 and 2.1e-16. */

#ifndef MPITRAIN_VECTOR_MATH_H
#define MPITRAIN_VECTOR_MATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* A loop over numbers that do not depend on each other: it becomes vector code. */
#if defined(__clang__)
#define EACH(i, n) _Pragma("clang loop vectorize(assume_safety)") for (i64 i = 0; i < n; i++)
#else
#define EACH(i, n) _Pragma("GCC ivdep") for (i64 i = 0; i < n; i++)
#endif

/* Around functions whose loops are worth the widest vectors of the CPU, which GCC else leaves aside. */
#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE_VECTORS _Pragma("GCC push_options") _Pragma("GCC target(\"prefer-vector-width=512\")")
#define END_OF_WIDE_VECTORS _Pragma("GCC pop_options")
#else
#define WIDE_VECTORS
#define END_OF_WIDE_VECTORS
#endif

/* exp(r) - 1 for |r| <= log(2) / 2; next to 0 too its error is relative. */
INLINE float less_one_float32(float r)
{
    float s = 0.001392692661f;
    s = fmaf(s, r, 0.008363773874f); s = fmaf(s, r, 0.04166655011f); s = fmaf(s, r, 0.1666657338f); s = fmaf(s, r, 0.5f);
    return fmaf(s * r, r, r);
}

/* exp(x) = 2^n exp(r), n the integer next to x / log 2, |r| <= log(2) / 2. Adding and subtracting 1.5 * 2^23 rounds to an
   integer, which then stands in the low bits of the sum. n - 1 in the exponent and a factor of 2 reach the largest
   numbers; log 2 is split in two, of which the first has few bits, so that n times it is exact.
   `exp_times` puts n + bias into the exponent. */
INLINE float exp_times_float32(float x, uint32_t bias)
{
    float shifted = fmaf(x, 1.442695041f, 12582912.0f), n = shifted - 12582912.0f;
    float r = fmaf(n, 2.12194440e-4f, fmaf(n, -0.693359375f, x));
    float s = less_one_float32(r) + 1.0f;
    uint32_t bits;
    float power;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + bias) << 23;
    memcpy(&power, &bits, sizeof power);
    return s * power;
}

INLINE float exp_float32(float x)
{
    float result = exp_times_float32(x, 126u) * 2.0f;
    result = x > 88.72283f ? INFINITY : result;
    return x < -86.6f ? 0.0f : result;
}

/* factor 2^(x scale) for x scale <= 0 and NaN, in half as many steps: one number for the scale, and a shorter polynomial, 1 exactly at 0.
   What that adds to the relative error grows with -x, as the result falls: no sum of results notices. Below `least`, 0. */
INLINE float power_below_float32(float x, float scale, float least, const float factor)
{
    float shifted = fmaf(x, scale, 12583039.0f), r = fmaf(x, scale, 12583039.0f - shifted);   /* 1.5 * 2^23 + 127, the bias */
    float s = 0.001326472707f * factor;
    s = fmaf(s, r, 0.009671512649f * factor); s = fmaf(s, r, 0.05550733744f * factor); s = fmaf(s, r, 0.2402224209f * factor);
    s = fmaf(s, r, 0.6931469776f * factor); s = fmaf(s, r, factor);
    uint32_t bits;
    float power;
    memcpy(&bits, &shifted, sizeof bits);
    bits <<= 23;
    memcpy(&power, &bits, sizeof power);
    return (scale < 0 ? x > least : x < least) ? 0.0f : s * power;
}

/* exp(x) for x <= 0 and NaN, and the density of the standard normal distribution, exp(-x^2 / 2) / sqrt(2 pi). */
INLINE float exp_of_negative_float32(float x) { return power_below_float32(x, 1.442695041f, -86.6f, 1.0f); }
INLINE float density_float32(float x) { return power_below_float32(x * x, -0.7213475204f, 173.2f, 0.3989422804f); }

INLINE double less_one_float64(double r)
{
    double s = 2.51013469283503402e-8;
    s = fma(s, r, 2.76213386691429238e-7); s = fma(s, r, 2.75572664186123037e-6); s = fma(s, r, 0.0000248015186413959936);
    s = fma(s, r, 0.000198412698643805133); s = fma(s, r, 0.00138888889189391678); s = fma(s, r, 0.0083333333333297935);
    s = fma(s, r, 0.0416666666666206386); s = fma(s, r, 0.166666666666666675); s = fma(s, r, 0.500000000000000113);
    return fma(s * r, r, r);
}

INLINE double exp_times_float64(double x, uint64_t bias)
{
    double shifted = fma(x, 1.44269504088896341, 6755399441055744.0), n = shifted - 6755399441055744.0;
    double r = fma(n, -1.90821492927058770e-10, fma(n, -0.693147180369123816, x));
    double s = less_one_float64(r) + 1.0;
    uint64_t bits;
    double power;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + bias) << 52;
    memcpy(&power, &bits, sizeof power);
    return s * power;
}

INLINE double exp_float64(double x)
{
    double result = exp_times_float64(x, 1022u) * 2.0;
    result = x > 709.782712893384 ? INFINITY : result;
    return x < -707.5 ? 0.0 : result;
}

INLINE double exp_of_negative_float64(double x)
{
    double result = exp_times_float64(x, 1023u);
    return x < -707.5 ? 0.0 : result;
}

INLINE double density_float64(double x) { return 0.398942280401432678 * exp_of_negative_float64(-0.5 * x * x); }

/* tanh |x| = -E / (E + 2) with E = exp(-2 |x|) - 1, which the reduction of exp gives without loss, next to 0; 1 - 2 t / (t + 1) with
   t = E + 1 where that is nearer to 1, and one minus the square of the result is wanted. */
INLINE float tanh_float32(float x)
{
    float y = -2.0f * fabsf(x);
    y = y < -20.0f ? -20.0f : y;
    float shifted = fmaf(y, 1.442695041f, 12583039.0f), n = shifted - 12583039.0f;              /* 1.5 * 2^23 + 127, the bias */
    float r = fmaf(n, 2.12194440e-4f, fmaf(n, -0.693359375f, y));
    uint32_t bits;
    float power;
    memcpy(&bits, &shifted, sizeof bits);
    bits <<= 23;
    memcpy(&power, &bits, sizeof power);
    float q = less_one_float32(r), t = fmaf(power, q, power), e = fmaf(power, q, power - 1.0f);
    float over = y > -1.0f ? -e : -2.0f * t, added = y > -1.0f ? 0.0f : 1.0f;
    return copysignf(added + over / (t + 1.0f), x);
}

INLINE double tanh_float64(double x)
{
    double y = -2.0 * fabs(x);
    y = y < -40.0 ? -40.0 : y;
    double shifted = fma(y, 1.44269504088896341, 6755399441056767.0), n = shifted - 6755399441056767.0;     /* + 1023 */
    double r = fma(n, -1.90821492927058770e-10, fma(n, -0.693147180369123816, y));
    uint64_t bits;
    double power;
    memcpy(&bits, &shifted, sizeof bits);
    bits <<= 52;
    memcpy(&power, &bits, sizeof power);
    double q = less_one_float64(r), t = fma(power, q, power), e = fma(power, q, power - 1.0);
    double over = y > -1.0 ? -e : -2.0 * t, added = y > -1.0 ? 0.0 : 1.0;
    return copysign(added + over / (t + 1.0), x);
}

/* P(N > |x|) for a standard normal N, as density times p(t), t = 1 / (1 + c |x|); the density is what a gradient wants too. In
   float32 p is the best for |x| < 5.5; beyond, where the tail is below 2e-8, what it is off by grows to a twentieth of that. */
INLINE float normal_tail_float32(float x, float density)
{
    float t = 1.0f / fmaf(fabsf(x), 0.28f, 1.0f);
    float s = -0.284848257f;
    s = fmaf(s, t, 1.0667909f); s = fmaf(s, t, -0.761969692f); s = fmaf(s, t, 0.839644098f); s = fmaf(s, t, 0.0787725354f);
    s = fmaf(s, t, 0.3179502f); s = fmaf(s, t, -0.00302559148f);
    return density * s;
}

INLINE double normal_tail_float64(double x, double density)
{
    double t = 1.0 / fma(fabs(x), 0.212132034355964257, 1.0);
    double s = -0.0002957930221495414;
    s = fma(s, t, 0.0023137466277165027); s = fma(s, t, -0.005370149958853268); s = fma(s, t, -0.008913636514794054);
    s = fma(s, t, 0.08620482412893973); s = fma(s, t, -0.25425616905907544); s = fma(s, t, 0.4502078196640468);
    s = fma(s, t, -0.5521293595538523); s = fma(s, t, 0.507300286977084); s = fma(s, t, -0.36309370677984654);
    s = fma(s, t, 0.19992166350835408); s = fma(s, t, -0.09228670006205274); s = fma(s, t, 0.035578512582493456);
    s = fma(s, t, 0.0013673815162331033); s = fma(s, t, 0.02400475239137147); s = fma(s, t, 0.034706666612936754);
    s = fma(s, t, 0.049171880722882505); s = fma(s, t, 0.0622869045666422); s = fma(s, t, 0.07320406721917487);
    s = fma(s, t, 0.08082013254427863); s = fma(s, t, 0.08462843836906608); s = fma(s, t, 0.08462843751940366);
    return density * (2.50662827463100050 * t * s);
}

#endif
