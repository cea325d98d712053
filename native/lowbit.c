/* Products with weights in few bits: y (m, n) = x (m, k) w' (n, k) * scales + bias, one thread. See kernels/lowbit.py.

   int8: a scale for each output. int4: groups of 32 inputs; byte i of a group has weight i in its low half and weight i + 16 in
   its high one, 8 added to each; its scale is a float16.

   Of floats: weights become floats (int4: with their scale, exactly). Number l of LANES partial sums has the terms r with
   r % LANES = l, added in order by fused multiply-adds. `folded` adds the partial sums as one fixed tree. So a number of y has
   the same bits at any m and n, and on every CPU that fuses.

   Of whole numbers: x is int8, too, with a scale for each row. Sums of int8 products are exact, so their order is free; they wrap
   nowhere, since k <= 2^16. In int4, sums of 8 products are exact, become floats, are multiplied with the group's scale and are
   added to partial sum l in the order of the groups, without fusing. So these bits are equal on all CPUs, and NumPy's. */

#include "sixteen.h"
#ifdef __x86_64__
#include <immintrin.h>
#endif

typedef uint8_t u8;
typedef int8_t i8;
typedef int32_t i32;

#define LANES 16
#define GROUP 32
#define HALF 16
#define UNROLL _Pragma("GCC unroll 16")

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__F16C__)
#define WIDE 1
typedef __m512 V;
#define NEXT(at, step) _mm_prefetch((const char *)(at) + (step), _MM_HINT_T0)      /* what comes next */
#endif
#if defined(WIDE) && defined(__AVX512VNNI__)
#define DOTS 1
#endif

INLINE i64 least(i64 a, i64 b) { return a < b ? a : b; }

INLINE float folded(const float *lanes)
{
    float half[8], quarter[4];
    for (int l = 0; l < 8; l++) half[l] = lanes[l] + lanes[l + 8];
    for (int l = 0; l < 4; l++) quarter[l] = half[l] + half[l + 4];
    return (quarter[0] + quarter[1]) + (quarter[2] + quarter[3]);
}

/* ---- x in whole numbers ------------------------------------------------------------------------------------------------ */

#define TINY 0x1p-100f              /* rows without a larger number count as zeros: 127 / size might overflow */
#define INFINITE 0x7f800000

INLINE i8 rounded(float x)
{
    x = x > 127 ? 127 : x < -127 ? -127 : x;
    float shifted = x + 0x1.8p23f;                                  /* to the nearest whole number, ties to even */
    return (i8)(i32)(shifted - 0x1.8p23f);
}

/* x * inverse as whole numbers; gives their sum. */
INLINE i32 rounded_row(const float *x, float inverse, i8 *q, i64 k)
{
    i32 sum = 0;
    i64 r = 0;
#ifdef WIDE
    __m512i total = _mm512_setzero_si512();
    const V top = _mm512_set1_ps(127), bottom = _mm512_set1_ps(-127), by = _mm512_set1_ps(inverse);
    for (; r < k; r += LANES) {
        const __mmask16 there = k - r >= LANES ? 0xffff : (__mmask16)((1u << (k - r)) - 1);
        V near = _mm512_max_ps(bottom, _mm512_min_ps(top, _mm512_mul_ps(_mm512_maskz_loadu_ps(there, x + r), by)));
        __m512i whole = _mm512_cvt_roundps_epi32(near, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        total = _mm512_add_epi32(total, whole);
        _mm_mask_storeu_epi8(q + r, there, _mm512_cvtepi32_epi8(whole));
    }
    sum = _mm512_reduce_add_epi32(total);
#endif
    for (; r < k; r++) {
        q[r] = rounded(x[r] * inverse);
        sum += q[r];
    }
    return sum;
}

/* Rows of x (m, k) as int8 in rows of `padded` numbers, zeros after the k-th, and the scale of each: its largest size / 127, or
   for all of them `given`, unless that is negative; and the sum of each. A row that is not finite has the scale NaN. */
void lowbit_rows(const float *restrict x, i8 *restrict q, float *restrict scales, i32 *restrict sums, i64 m, i64 k, i64 padded,
                 double given)
{
    for (i64 i = 0; i < m; i++, x += k, q += padded) {
        i32 top = 0;
        for (i64 r = 0; r < k; r++) {
            i32 size = (i32)(bits_of(x[r]) & 0x7fffffff);
            top = size > top ? size : top;
        }
        float size = float_of((u32)top), scale = given >= 0 ? (float)given : size / 127, inverse = 1 / scale;
        if (given < 0) inverse = 127 / size;
        int zeros = top >= INFINITE || (given < 0 ? size < TINY : scale < TINY);
        scales[i] = top >= INFINITE ? float_of(0x7fc00000) : zeros ? 0 : scale;
        memset(q + k, 0, (size_t)(padded - k));
        if (zeros) memset(q, 0, (size_t)k);
        sums[i] = zeros ? 0 : rounded_row(x, inverse, q, k);
    }
}

#include "lowbit_floats.h"
#include "lowbit_integers.h"

void lowbit_int8(const float *x, const u8 *w, const float *scales, const float *bias, float *y, i64 m, i64 n, i64 k)
{
    multiply_floats(&(Weights){w, scales, NULL, n, k, 0}, x, bias, y, m);
}

void lowbit_int4(const float *x, const u8 *w, const u16 *scales, const float *bias, float *y, i64 m, i64 n, i64 k, i64 groups)
{
    multiply_floats(&(Weights){w, NULL, scales, n, k, groups}, x, bias, y, m);
}

/* x is int8 (m, k), in rows of `padded` numbers: whole vectors, zeros after the k-th; with a scale and the sum of each row. */
void lowbit_int8_integers(const i8 *x, const float *of_x, const i32 *sums, const u8 *w, const float *scales, const float *bias,
                          float *y, i64 m, i64 n, i64 k, i64 padded)
{
    multiply_int8(&(Factors){x, padded, of_x, sums, w, scales, bias, y, n, k, 0}, m);
}

/* The same, where `padded` numbers are whole spans. */
void lowbit_int4_integers(const i8 *x, const float *of_x, const u8 *w, const u16 *scales, const float *bias, float *y, i64 m,
                          i64 n, i64 k, i64 groups, i64 padded)
{
    multiply_int4(&(Factors){x, padded, of_x, NULL, w, scales, bias, y, n, k, 0}, m);
}
