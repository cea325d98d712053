/* Error functions, gamma functions and their kin, one pass over memory. Arrays are contiguous.

   All arithmetic is float64; float32 numbers are converted on the way, and have shorter polynomials where those suffice.
   Polynomials interpolate at Chebyshev nodes; they were computed with 40 digits by Python's mpmath. The loops become vector code;
   what they cannot do (arguments below 0) a second loop does number by number. */

#include "vector_math.h"

typedef int64_t i64;

#define PI 3.14159265358979324
#define MIDDLE 3.75                                /* of the tail's variable, where it is 0 */

/* (x + 3.75) exp(x^2) erfc(x) of t = (x - 3.75) / (x + 3.75), x >= 0 (after Shepherd and Laframboise, 1981): `short` to 4e-10. */
INLINE double tail_short(double t)
{
    double s = -4.653548394336575e-06;
    s = fma(s, t, 2.775548976781647e-05); s = fma(s, t, 5.362508895960511e-06); s = fma(s, t, -0.00033603674882448387);
    s = fma(s, t, 0.0007982038653053024); s = fma(s, t, 0.000977975136166676); s = fma(s, t, -0.012537028854586473);
    s = fma(s, t, 0.04912166133723868); s = fma(s, t, -0.13195521288827483); s = fma(s, t, 0.2790615727151769);
    s = fma(s, t, -0.49047030287734833); s = fma(s, t, 0.7363189548628366); s = fma(s, t, -0.958741576534027);
    s = fma(s, t, 1.0919229092605853);
    return s;
}

INLINE double tail(double t)
{
    double s = -2.428383181037169e-10;
    s = fma(s, t, -2.8317431223875074e-09); s = fma(s, t, 2.846149608785993e-09); s = fma(s, t, 3.3853101478493466e-08);
    s = fma(s, t, -2.6092739883306852e-08); s = fma(s, t, -2.543003175072746e-07); s = fma(s, t, 2.788860619761132e-07);
    s = fma(s, t, 1.6474463894957575e-06); s = fma(s, t, -3.288762429350935e-06); s = fma(s, t, -8.89886673862872e-06);
    s = fma(s, t, 3.747141362441219e-05); s = fma(s, t, 1.0592041305059113e-05); s = fma(s, t, -0.00034864677629479736);
    s = fma(s, t, 0.0007948235779689006); s = fma(s, t, 0.000986338067815038); s = fma(s, t, -0.012535880112698615);
    s = fma(s, t, 0.04911877861624072); s = fma(s, t, -0.13195540117257462); s = fma(s, t, 0.2790620490337476);
    s = fma(s, t, -0.4904702912079074); s = fma(s, t, 0.736318925221752); s = fma(s, t, -0.9587415766529069);
    s = fma(s, t, 1.0919229095627891);
    return s;
}

/* erf(x) / x of t = x^2 <= 1; `short` to 4e-11. */
INLINE double near_zero_short(double t)
{
    double s = -9.667044571486996e-06;
    s = fma(s, t, 0.00011265959025606609); s = fma(s, t, -0.0008484080405535107); s = fma(s, t, 0.005221031807858023);
    s = fma(s, t, -0.026865430727670243); s = fma(s, t, 0.11283782495236845); s = fma(s, t, -0.3761263846802871);
    s = fma(s, t, 1.1283791670615435);
    return s;
}

INLINE double near_zero(double t)
{
    double s = 5.957176147748911e-11;
    s = fma(s, t, -1.1372848856791674e-09); s = fma(s, t, 1.4659775274047436e-08); s = fma(s, t, -1.6350312701054695e-07);
    s = fma(s, t, 1.6461000484121368e-06); s = fma(s, t, -1.4925595266831182e-05); s = fma(s, t, 0.0001205533111164271);
    s = fma(s, t, -0.000854832698083379); s = fma(s, t, 0.0052239776248180145); s = fma(s, t, -0.026866170645076792);
    s = fma(s, t, 0.11283791670954879); s = fma(s, t, -0.3761263890318375); s = fma(s, t, 1.1283791670955126);
    return s;
}

/* log((1 + s) / (1 - s)) / s of t = s^2, |s| < 0.1717. */
INLINE double twice_atanh(double t)
{
    double s = 0.13265527927388243;
    s = fma(s, t, 0.13248384848961497); s = fma(s, t, 0.15387177822275883); s = fma(s, t, 0.1818177334703648);
    s = fma(s, t, 0.2222222268191142); s = fma(s, t, 0.285714285687849); s = fma(s, t, 0.4000000000000761);
    s = fma(s, t, 0.6666666666666666); s = fma(s, t, 2.0);
    return s;
}

/* erfinv(x) / x of t = -log(1 - x^2) <= 6; and of its square root above, up to what float64 has. To 4e-11 and 3e-9. */
INLINE double inverse_near(double t)
{
    double s = 1.2961748038399046e-13;
    s = fma(s, t, -4.2547195411062805e-12); s = fma(s, t, 4.113986328313992e-11); s = fma(s, t, 2.194955842072562e-10);
    s = fma(s, t, -8.216312775867829e-09); s = fma(s, t, 7.123000315131555e-08); s = fma(s, t, -1.9980631893305613e-07);
    s = fma(s, t, -6.469865321791876e-07); s = fma(s, t, 1.4599412449837903e-06); s = fma(s, t, 4.718717499939352e-05);
    s = fma(s, t, -0.00012842440705283567); s = fma(s, t, -0.0023349510636824864); s = fma(s, t, 0.011549311076622146);
    s = fma(s, t, 0.23201366903535806); s = fma(s, t, 0.8862269254193818);
    return s;
}

INLINE double inverse_far(double t)
{
    double s = -2.1130084309039992e-08;
    s = fma(s, t, 1.3576167260178913e-06); s = fma(s, t, -4.0300200400362636e-05); s = fma(s, t, 0.0007323308646860562);
    s = fma(s, t, -0.009097495212038594); s = fma(s, t, 0.08168534597929253); s = fma(s, t, -0.5463102803494456);
    s = fma(s, t, 2.7621872333885937); s = fma(s, t, -10.596693659393006); s = fma(s, t, 30.64374421156791);
    s = fma(s, t, -65.59586324225067); s = fma(s, t, 100.42223029651119); s = fma(s, t, -103.3322475707339);
    s = fma(s, t, 64.3198041389436); s = fma(s, t, -17.264520682851675);
    return s;
}

/* log(x) of a normal x > 0: 2^n m, m from sqrt(1/2) to sqrt(2). */
INLINE double log_of(double x)
{
    uint64_t bits, power;
    double m, n;
    memcpy(&bits, &x, sizeof bits);
    bits += 0x3FF0000000000000u - 0x3FE6A09E667F3BCDu;
    power = (bits >> 52) | 0x4330000000000000u;                /* 2^52 + n + 1023 */
    bits = (bits & 0x000FFFFFFFFFFFFFu) + 0x3FE6A09E667F3BCDu;
    memcpy(&n, &power, sizeof n);
    memcpy(&m, &bits, sizeof m);
    n -= 4503599627371519.0;
    double s = (m - 1.0) / (m + 1.0);
    return fma(n, 0.693147180369123816, fma(s, twice_atanh(s * s), n * 1.90821492927058770e-10));
}

/* exp(x^2) erfc(x), x >= 0. */
INLINE double scaled_tail(double x, const int brief)
{
    double y = 1.0 / (x + MIDDLE), t = fma(-2.0 * MIDDLE, y, 1.0);
    return y * (brief ? tail_short(t) : tail(t));
}

/* exp(-x^2) with what x^2 is rounded by; below exp(-700) in two factors, since the first would be denormal. */
INLINE double bell(double x)
{
    double square = x * x, lost = fma(x, x, -square);
    double over = square > 700.0 ? 600.0 : 0.0, scale = square > 700.0 ? 2.6503965530043108e-261 : 1.0;
    return exp_of_negative_float64(over - square) * scale * (1.0 - lost);
}

INLINE double erfc_of(double x, const int brief)
{
    double size = fabs(x);
    size = size > 30.0 ? 30.0 : size;
    double rest = bell(size) * scaled_tail(size, brief);
    return x < 0 ? 2.0 - rest : rest;
}

INLINE double erf_of(double x, const int brief)
{
    double square = x * x, near = x * (brief ? near_zero_short(square) : near_zero(square));
    return fabs(x) < 1.0 ? near : copysign(1.0 - erfc_of(fabs(x), brief), x);
}

INLINE double erfcx_of(double x, const int brief)
{
    double size = fabs(x), rest = scaled_tail(size, brief);
    double most = size > 30.0 ? 30.0 : size, square = most * most, lost = fma(most, most, -square);
    double whole = 2.0 * exp_float64(square) * (1.0 + lost);
    return x < 0 ? whole - rest : rest;
}

/* A polynomial, and for float64 one step of Halley, which triples its digits. */
INLINE double erfinv_of(double x, const int brief)
{
    double size = fabs(x), w = -log_of((1.0 - size) * (1.0 + size));
    double y = size * (w < 6.0 ? inverse_near(w) : inverse_far(sqrt(w)));
    if (!brief) {
        double gap = size < 0.5 ? erf_of(y, 0) - size : (1.0 - size) - erfc_of(y, 0);
        gap *= 0.886226925452758014 * exp_float64(y * y);
        y -= gap / fma(y, gap, 1.0);
    }
    y = size < 1.0 ? y : size == 1.0 ? INFINITY : NAN;
    return copysign(y, x);
}

/* log(Gamma(2 + t)) / t, |t| <= 1/2: to 2e-17. */
INLINE double lgamma_next_to_two(double t)
{
    double s = 2.7475390051909663e-07;
    s = fma(s, t, -5.811277768921246e-07); s = fma(s, t, 9.242852225162277e-07); s = fma(s, t, -1.9743106888421067e-06);
    s = fma(s, t, 4.3828545383846665e-06); s = fma(s, t, -9.45628851510172e-06); s = fma(s, t, 2.050601970174762e-05);
    s = fma(s, t, -4.4923727564247656e-05); s = fma(s, t, 9.945761692157133e-05); s = fma(s, t, -0.00022315497746292723);
    s = fma(s, t, 0.0005096695196526673); s = fma(s, t, -0.0011927539009983087); s = fma(s, t, 0.002890510330865901);
    s = fma(s, t, -0.007385551028935545); s = fma(s, t, 0.02058080842778338); s = fma(s, t, -0.06735230105319563);
    s = fma(s, t, 0.3224670334241132); s = fma(s, t, 0.42278433509846713);
    return s;
}

/* Stirling's series from 8 on; below that the product that leads there is divided away. Next to 1 and 2, where that would leave the
   rounding of large terms instead of 0, a polynomial, and Gamma(z) = Gamma(1 + z) / z. */
INLINE double lgamma_of_positive(double z, const int fast)
{
    double small = z < 8.0 ? 1.0 : 0.0, shifted = z + 8.0 * small, r = 1.0 / shifted, t = r * r;
    double product = z * (z + 1.0) * (z + 2.0) * (z + 3.0) * ((z + 4.0) * (z + 5.0) * (z + 6.0) * (z + 7.0));
    product = z < 8.0 ? product : 1.0;
    double from_root = z < 1.5 ? z - 1.0 : z - 2.0, near = z >= 0.5 && z <= 2.5 ? 1.0 : 0.0;
    product = near == 0.0 ? product : z < 1.5 ? z : 1.0;
    double s = -3617.0 / 122400.0;
    s = fma(s, t, 1.0 / 156.0); s = fma(s, t, -691.0 / 360360.0); s = fma(s, t, 1.0 / 1188.0); s = fma(s, t, -1.0 / 1680.0);
    s = fma(s, t, 1.0 / 1260.0); s = fma(s, t, -1.0 / 360.0); s = fma(s, t, 1.0 / 12.0);
    double high = fast ? log_of(shifted) : log(shifted), low = fast ? log_of(product) : log(product);
    double far = (shifted - 0.5) * high - shifted + 0.918938533204672742 + s * r - low;
    return near == 0.0 ? far : fma(from_root, lgamma_next_to_two(from_root), -low);
}

/* The asymptotic series from 12 on, and the recurrence that leads there. */
INLINE double digamma_of_positive(double x, const int fast)
{
    double total = 0.0;
    for (int i = 0; i < 12; i++) {
        double below = x < 12.0 ? 1.0 : 0.0;
        total += below / x;
        x += below;
    }
    double r = 1.0 / x, t = r * r, s = 3617.0 / 8160.0;
    s = fma(s, t, -1.0 / 12.0); s = fma(s, t, 691.0 / 32760.0); s = fma(s, t, -1.0 / 132.0); s = fma(s, t, 1.0 / 240.0);
    s = fma(s, t, -1.0 / 252.0); s = fma(s, t, 1.0 / 120.0); s = fma(s, t, -1.0 / 12.0);
    return (fast ? log_of(x) : log(x)) - 0.5 * r + s * t - total;
}

INLINE double trigamma_of_positive(double x)
{
    double total = 0.0;
    for (int i = 0; i < 12; i++) {
        double below = x < 12.0 ? 1.0 : 0.0, y = 1.0 / x;
        total = fma(below * y, y, total);
        x += below;
    }
    double r = 1.0 / x, t = r * r, s = -3617.0 / 510.0;
    s = fma(s, t, 7.0 / 6.0); s = fma(s, t, -691.0 / 2730.0); s = fma(s, t, 5.0 / 66.0); s = fma(s, t, -1.0 / 30.0);
    s = fma(s, t, 1.0 / 42.0); s = fma(s, t, -1.0 / 30.0); s = fma(s, t, 1.0 / 6.0);
    return fma(s * t, r, fma(0.5, t, r)) + total;
}

/* The three of any x; below 1/2 by reflection. */
static double lgamma_slow(double x)
{
    if (isinf(x)) return INFINITY;
    if (!(x < 0.5)) return lgamma_of_positive(x, 0);
    return log(PI / fabs(sin(PI * (x - rint(x))))) - lgamma_of_positive(1.0 - x, 0);
}

static double digamma_slow(double x)
{
    if (!(x < 0.5)) return digamma_of_positive(x, 0);
    if (x == 0) return copysign(INFINITY, -x);
    if (x == floor(x)) return NAN;
    return digamma_of_positive(1.0 - x, 0) - PI / tan(PI * (x - rint(x)));
}

static double trigamma_slow(double x)
{
    if (!(x < 0.5)) return x > 1e300 ? 0.0 : trigamma_of_positive(x);
    double sine = sin(PI * (x - rint(x)));
    return PI * PI / (sine * sine) - trigamma_of_positive(1.0 - x);
}

#define FAST(x) ((x) >= 1e-150 && (x) <= 1e150)

#define VALUES(T, NAME, FUNCTION, BRIEF)                                                                                \
    void FUNCTION##_##NAME(const T *x, T *y, i64 n) { EACH(i, n) y[i] = (T)FUNCTION##_of((double)x[i], BRIEF); }

#define GAMMAS(T, NAME, FUNCTION, FORMULA)                                                                              \
    void FUNCTION##_##NAME(const T *x, T *y, i64 n)                                                                     \
    {                                                                                                                   \
        for (i64 at = 0; at < n; at += 512) {                                                                           \
            const i64 size = n - at < 512 ? n - at : 512;                                                               \
            const T *from = x + at;                                                                                     \
            T *to = y + at;                                                                                             \
            EACH(i, size) { double v = FAST(from[i]) ? (double)from[i] : 1.0; to[i] = (T)FORMULA; }                     \
            for (i64 i = 0; i < size; i++) if (!FAST(from[i])) to[i] = (T)FUNCTION##_slow((double)from[i]);             \
        }                                                                                                               \
    }

#define ALL(T, NAME, BRIEF)                                                                                             \
    VALUES(T, NAME, erf, BRIEF)                                                                                         \
    VALUES(T, NAME, erfc, BRIEF)                                                                                        \
    VALUES(T, NAME, erfcx, BRIEF)                                                                                       \
    VALUES(T, NAME, erfinv, BRIEF)                                                                                      \
    GAMMAS(T, NAME, lgamma, lgamma_of_positive(v, 1))                                                                             \
    GAMMAS(T, NAME, digamma, digamma_of_positive(v, 1))                                                                 \
    GAMMAS(T, NAME, trigamma, trigamma_of_positive(v))

WIDE_VECTORS

ALL(float, float32, 1)
ALL(double, float64, 0)

END_OF_WIDE_VECTORS
