/* Blocks of one bit and one or two values, and their residuals, one thread. See kernels/compress.py, whose expressions have the
   same bits, and compress.c. */

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#include "sixteen.h"
#ifdef __AVX__
#include <immintrin.h>
#endif
#include "compress.h"

#define LANES 32
#define HUGE 0x7b000000             /* 2^119: a sum of 256 numbers might overflow from there on */
#define TURNS 4                     /* of Lloyd's algorithm */

/* Lanes are folded in halves. */
INLINE float folded(float *lanes)
{
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return lanes[0];
}

/* The bits of eight numbers at most, the first one lowest: whether they are below a bound. */
INLINE u8 byte_of(const float *a, float bound, i64 count)
{
    u32 byte = 0;
    for (i64 j = 0; j < count; j++) byte |= (u32)(a[j] < bound) << j;
    return (u8)byte;
}

INLINE void pack_below(const float *restrict a, float bound, u8 *restrict q, i64 size)
{
    i64 j = 0;
#ifdef __AVX512F__
    for (; j + 16 <= size; j += 16) {
        __mmask16 mask = _mm512_cmp_ps_mask(_mm512_loadu_ps(a + j), _mm512_set1_ps(bound), _CMP_LT_OQ);
        memcpy(q + j / 8, &mask, 2);
    }
#elif defined(__AVX__)
    for (; j + 8 <= size; j += 8)
        q[j / 8] = (u8)_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(a + j), _mm256_set1_ps(bound), _CMP_LT_OQ));
#endif
    for (; j + 8 <= size; j += 8) q[j / 8] = byte_of(a + j, bound, 8);
    if (j < size) q[j / 8] = byte_of(a + j, bound, size - j);
}

INLINE void leave_two(const float *restrict a, float *restrict error, float bound, float low, float high, i64 size)
{
    if (error) for (i64 j = 0; j < size; j++) error[j] = a[j] - (a[j] < bound ? low : high);
}

/* Up to eight elements whose bits are those of a byte. */
INLINE void unpack_byte(u32 byte, u32 high, u32 low, float *restrict total, i64 count, const int add)
{
    for (i64 j = 0; j < count; j++) {
        u32 is_low = 0 - (byte >> j & 1);
        float x = float_of((low & is_low) | (high & ~is_low));
        total[j] = add ? total[j] + x : x;
    }
}

INLINE void unpack_two(const u8 *restrict q, float high, float low, float *restrict total, i64 size, const int add)
{
    i64 j = 0;
#ifdef __AVX512F__
    const __m512 highs = _mm512_set1_ps(high), lows = _mm512_set1_ps(low);
    for (; j + 16 <= size; j += 16) {
        __mmask16 mask;
        memcpy(&mask, q + j / 8, 2);
        __m512 x = _mm512_mask_blend_ps(mask, highs, lows);
        _mm512_storeu_ps(total + j, add ? _mm512_add_ps(_mm512_loadu_ps(total + j), x) : x);
    }
#endif
    for (; j + 8 <= size; j += 8) unpack_byte(q[j / 8], bits_of(high), bits_of(low), total + j, 8, add);
    if (j < size) unpack_byte(q[j / 8], bits_of(high), bits_of(low), total + j, size - j, add);
}

/* All blocks, whose elements are minus or plus a size (`each` 1), or the lower or the higher of two values (2). */
INLINE int decoded(const u8 *restrict q, const i64 *bounds, const float *restrict values, const int each, float *restrict total,
                   i64 n, i64 blocks, i64 bytes, i64 add)
{
    for (i64 i = 0, at = 0, from = 0; i < blocks; i++) {
        i64 end = end_of(bounds, i, at, n), size = end - at, taken = (size + 7) / 8;
        if (end < 0 || from + taken > bytes) return 2;
        float high = values[each * i + each - 1], low = each == 1 ? -high : values[each * i];
        if (add) unpack_two(q + from, high, low, total + at, size, 1);
        else unpack_two(q + from, high, low, total + at, size, 0);
        at = end;
        from += taken;
    }
    return 0;
}

/* ---- a sign and a size --------------------------------------------------------------------------------------------------- */

/* Lane l has the numbers l, l + LANES, ... in order. */
INLINE float sum_of_sizes(const float *restrict a, i64 size)
{
    float lanes[LANES];
    i64 j = 0;
    for (int l = 0; l < LANES; l++) lanes[l] = 0;
    for (; j + LANES <= size; j += LANES)
        for (int l = 0; l < LANES; l++) lanes[l] += float_of(bits_of(a[j + l]) & SIZE);
    for (int l = 0; l < size - j; l++) lanes[l] += float_of(bits_of(a[j + l]) & SIZE);
    return folded(lanes);
}

int onebit_encode(const float *restrict values, float *restrict error, const i64 *bounds, float *restrict scales, u8 *restrict q,
                  i64 n, i64 blocks, i64 bytes)
{
    float a[BLOCK];
    for (i64 i = 0, at = 0, to = 0; i < blocks; i++) {
        i64 end = end_of(bounds, i, at, n), size = end - at, taken = (size + 7) / 8;
        if (end < 0 || to + taken > bytes) return 2;
        float *left = error ? error + at : NULL;
        loaded(values + at, left, a, size);
        float total = sum_of_sizes(a, size), scale = total / (float)(size ? size : 1);
        int finite = total <= 0x1.fffffep127f;
        scales[i] = finite ? scale : nan_();
        pack_below(a, 0, q + to, size);
        if (finite) leave_two(a, left, 0, -scale, scale, size);
        at = end;
        to += taken;
    }
    return 0;
}

int onebit_decode(const u8 *restrict q, const i64 *bounds, const float *restrict scales, float *restrict total, i64 n, i64 blocks,
                  i64 bytes, i64 add)
{
    return decoded(q, bounds, scales, 1, total, n, blocks, bytes, add);
}

/* ---- one of two values --------------------------------------------------------------------------------------------------- */

typedef struct { float low, high, bound; } Two;

INLINE void extremes(const float *restrict a, i64 size, Two *two)
{
    float low[LANES], high[LANES];
    for (int l = 0; l < LANES; l++) low[l] = high[l] = a[0];
    i64 j = 0;
    for (; j + LANES <= size; j += LANES)
        for (int l = 0; l < LANES; l++) {
            low[l] = a[j + l] < low[l] ? a[j + l] : low[l];
            high[l] = a[j + l] > high[l] ? a[j + l] : high[l];
        }
    for (int l = 0; l < size - j; l++) {
        low[l] = a[j + l] < low[l] ? a[j + l] : low[l];
        high[l] = a[j + l] > high[l] ? a[j + l] : high[l];
    }
    two->low = low[0];
    two->high = high[0];
    for (int l = 1; l < LANES; l++) {
        two->low = low[l] < two->low ? low[l] : two->low;
        two->high = high[l] > two->high ? high[l] : two->high;
    }
}

INLINE void add_sides(const float *restrict a, float bound, float *restrict low, float *restrict high, i32 *restrict count,
                      i64 lanes)
{
    for (int l = 0; l < lanes; l++) {
        int below = a[l] < bound;
        low[l] += below ? a[l] : 0;
        high[l] += below ? 0 : a[l];
        count[l] += below;
    }
}

/* The bound between two values, and the means of both sides; a side without numbers has the other one's. */
INLINE void turn(const float *restrict a, i64 size, Two *two)
{
    float low[LANES], high[LANES];
    i32 count[LANES], below = 0;
    i64 j = 0;
    two->bound = (two->low + two->high) * 0.5f;
    for (int l = 0; l < LANES; l++) { low[l] = high[l] = 0; count[l] = 0; }
    for (; j + LANES <= size; j += LANES) add_sides(a + j, two->bound, low, high, count, LANES);
    add_sides(a + j, two->bound, low, high, count, size - j);
    for (int l = 0; l < LANES; l++) below += count[l];
    float lows = folded(low), highs = folded(high);
    two->low = below ? lows / (float)below : highs / (float)(size - below);
    two->high = below < size ? highs / (float)(size - below) : two->low;
}

int twomeans_encode(const float *restrict values, float *restrict error, const i64 *bounds, float *restrict means, u8 *restrict q,
                    i64 n, i64 blocks, i64 bytes)
{
    float a[BLOCK];
    for (i64 i = 0, at = 0, to = 0; i < blocks; i++) {
        i64 end = end_of(bounds, i, at, n), size = end - at, taken = (size + 7) / 8;
        if (end < 0 || to + taken > bytes) return 2;
        float *left = error ? error + at : NULL;
        Two two = {nan_(), nan_(), nan_()};
        int finite = loaded(values + at, left, a, size) < HUGE;
        if (!size) finite = 0;
        if (finite) {
            extremes(a, size, &two);
            for (int i = 0; i < TURNS; i++) turn(a, size, &two);
            leave_two(a, left, two.bound, two.low, two.high, size);
        }
        means[2 * i] = two.low;
        means[2 * i + 1] = two.high;
        pack_below(a, two.bound, q + to, size);
        at = end;
        to += taken;
    }
    return 0;
}

int twomeans_decode(const u8 *restrict q, const i64 *bounds, const float *restrict means, float *restrict total, i64 n, i64 blocks,
                    i64 bytes, i64 add)
{
    return decoded(q, bounds, means, 2, total, n, blocks, bytes, add);
}
