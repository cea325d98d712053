/* Blocks of few bits and their residuals, one thread. See kernels/compress.py, whose expressions have the same bits.

   A block is read once from memory: a = values + error is kept in the L1 cache, while its scale is found and it is rounded. Loops
   over a block are written so that compilers vectorise them; `error` is NULL where no residual is kept, and no array overlaps
   another. Functions answer 2 where `bounds` are not those of blocks of at most BLOCK of n numbers. */

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#include "sixteen.h"
#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef uint8_t u8;
typedef int8_t i8;
typedef int32_t i32;

#define BLOCK 4096
#define LANES 64
#define TINY 0x1p-100f              /* scales below count as 0: 1 / scale might overflow */
#define HUGE 0x7f000000             /* 2^127: 127 scales might overflow from there on */
#define NOT_FINITE 0x7f800000
#define SIZE 0x7fffffff
#define NEAREST 0x1.8p23f           /* added, it leaves the nearest whole number in the last bits, ties to even */

INLINE float nan_(void) { return float_of(0x7fc00000); }

/* Where a block ends that begins at `start`; -1 where bounds are wrong. */
INLINE i64 end_of(const i64 *bounds, i64 i, i64 start, i64 n)
{
    i64 end = bounds[i + 1] - bounds[0];
    return end < start || end > n || end - start > BLOCK ? -1 : end;
}

/* a = values + error of one block; gives the largest size as bits. */
INLINE i32 loaded(const float *restrict values, const float *restrict error, float *restrict a, i64 size)
{
    i32 top = 0;
    if (error)
        for (i64 i = 0; i < size; i++) {
            a[i] = values[i] + error[i];
            i32 bits = (i32)(bits_of(a[i]) & SIZE);
            top = bits > top ? bits : top;
        }
    else
        for (i64 i = 0; i < size; i++) {
            a[i] = values[i];
            i32 bits = (i32)(bits_of(a[i]) & SIZE);
            top = bits > top ? bits : top;
        }
    return top;
}

/* ---- whole numbers with a scale ------------------------------------------------------------------------------------------ */

/* The scale that travels, and 1 / scale, or 0 where all become zeros; 0: the block is not finite. */
INLINE int scaled(i32 top, float most, float *scale, float *inverse)
{
    float found = float_of((u32)top) / most;
    *inverse = 0;
    if (top >= HUGE) { *scale = nan_(); return 0; }
    if (found < TINY) { *scale = 0; return 1; }
    *scale = found;
    *inverse = 1 / found;
    return 1;
}

INLINE float whole(float a, float inverse) { return (a * inverse + NEAREST) - NEAREST; }

INLINE void leave(const float *restrict a, float *restrict error, float scale, float inverse, i64 size)
{
    if (error) for (i64 i = 0; i < size; i++) error[i] = a[i] - whole(a[i], inverse) * scale;
}

int int8_encode(const float *restrict values, float *restrict error, const i64 *bounds, float *restrict scales, u8 *restrict q,
                i64 n, i64 blocks)
{
    float a[BLOCK], inverse;
    for (i64 i = 0, at = 0; i < blocks; i++) {
        i64 end = end_of(bounds, i, at, n), size = end - at;
        if (end < 0) return 2;
        float *left = error ? error + at : NULL;
        int finite = scaled(loaded(values + at, left, a, size), 127, scales + i, &inverse);
        if (finite) {
            for (i64 j = 0; j < size; j++) q[at + j] = (u8)bits_of(a[j] * inverse + NEAREST);
            leave(a, left, scales[i], inverse, size);
        } else memset(q + at, 0, (size_t)size);
        at = end;
    }
    return 0;
}

int int8_decode(const u8 *restrict q, const i64 *bounds, const float *restrict scales, float *restrict total, i64 n, i64 blocks,
                i64 add)
{
    for (i64 i = 0, at = 0; i < blocks; i++) {
        i64 end = end_of(bounds, i, at, n);
        float scale = scales[i];
        if (end < 0) return 2;
        if (add) for (i64 j = at; j < end; j++) total[j] += (float)(i8)q[j] * scale;
        else for (i64 j = at; j < end; j++) total[j] = (float)(i8)q[j] * scale;
        at = end;
    }
    return 0;
}

int int4_encode(const float *restrict values, float *restrict error, const i64 *bounds, float *restrict scales, u8 *restrict q,
                i64 n, i64 blocks, i64 bytes)
{
    float a[BLOCK + 1], inverse;
    for (i64 i = 0, at = 0, to = 0; i < blocks; i++) {
        i64 end = end_of(bounds, i, at, n), size = end - at, half = (size + 1) / 2;
        if (end < 0 || to + half > bytes) return 2;
        float *left = error ? error + at : NULL;
        int finite = scaled(loaded(values + at, left, a, size), 7, scales + i, &inverse);
        a[size] = 0;
        if (finite) {
            for (i64 j = 0; j < half; j++) {
                u32 low = bits_of(a[j] * inverse + NEAREST) + 8, high = bits_of(a[j + half] * inverse + NEAREST) + 8;
                q[to + j] = (u8)((low & 15) | (high & 15) << 4);
            }
            leave(a, left, scales[i], inverse, size);
        } else memset(q + to, 0x88, (size_t)half);
        at = end;
        to += half;
    }
    return 0;
}

INLINE float upper(u8 byte, float scale) { return (float)((i32)(byte >> 4) - 8) * scale; }
INLINE float lower(u8 byte, float scale) { return (float)((i32)(byte & 15) - 8) * scale; }

int int4_decode(const u8 *restrict q, const i64 *bounds, const float *restrict scales, float *restrict total, i64 n, i64 blocks,
                i64 bytes, i64 add)
{
    for (i64 i = 0, at = 0, from = 0; i < blocks; i++) {
        i64 end = end_of(bounds, i, at, n), size = end - at, half = (size + 1) / 2;
        float scale = scales[i], *restrict first = total + at, *restrict second = first + half;
        const u8 *restrict byte = q + from;
        if (end < 0 || from + half > bytes) return 2;
        if (add) {
            for (i64 j = 0; j < half; j++) first[j] += lower(byte[j], scale);
            for (i64 j = 0; j < size - half; j++) second[j] += upper(byte[j], scale);
        } else {
            for (i64 j = 0; j < half; j++) first[j] = lower(byte[j], scale);
            for (i64 j = 0; j < size - half; j++) second[j] = upper(byte[j], scale);
        }
        at = end;
        from += half;
    }
    return 0;
}

/* ---- signs with a scale -------------------------------------------------------------------------------------------------- */

/* The sum of sizes: lane l has the numbers l, l + LANES, ... in order, and lanes are folded in halves. */
INLINE float sum_of_sizes(const float *restrict a, i64 size)
{
    float lanes[LANES];
    i64 j = 0;
    for (int l = 0; l < LANES; l++) lanes[l] = 0;
    for (; j + LANES <= size; j += LANES)
        for (int l = 0; l < LANES; l++) lanes[l] += float_of(bits_of(a[j + l]) & SIZE);
    for (int l = 0; l < size - j; l++) lanes[l] += float_of(bits_of(a[j + l]) & SIZE);
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return lanes[0];
}

/* The sign bits of up to eight numbers, the first one lowest. */
INLINE u8 signs(const float *a, i64 count)
{
    u32 byte = 0;
    for (i64 j = 0; j < count; j++) byte |= bits_of(a[j]) >> 31 << j;
    return (u8)byte;
}

INLINE void pack_signs(const float *restrict a, u8 *restrict q, i64 size)
{
    i64 j = 0;
#ifdef __AVX512F__
    for (; j + 16 <= size; j += 16) {
        __mmask16 mask = _mm512_cmplt_epi32_mask(_mm512_loadu_si512(a + j), _mm512_setzero_si512());
        memcpy(q + j / 8, &mask, 2);
    }
#endif
    for (; j + 8 <= size; j += 8) q[j / 8] = signs(a + j, 8);
    if (j < size) q[j / 8] = signs(a + j, size - j);
}

int onebit_encode(const float *restrict values, float *restrict error, const i64 *bounds, float *restrict scales, u8 *restrict q,
                  i64 n, i64 blocks, i64 bytes)
{
    float a[BLOCK];
    for (i64 i = 0, at = 0, to = 0; i < blocks; i++) {
        i64 end = end_of(bounds, i, at, n), size = end - at, taken = (size + 7) / 8;
        if (end < 0 || to + taken > bytes) return 2;
        float *restrict left = error ? error + at : NULL;
        loaded(values + at, left, a, size);
        float total = sum_of_sizes(a, size), scale = total / (float)(size ? size : 1);
        int finite = total <= 0x1.fffffep127f;
        scales[i] = finite ? scale : nan_();
        pack_signs(a, q + to, size);
        if (left && finite)
            for (i64 j = 0; j < size; j++) left[j] = a[j] - float_of(bits_of(scale) | (bits_of(a[j]) & ~(u32)SIZE));
        at = end;
        to += taken;
    }
    return 0;
}

/* Element j of a block, with `flip` the sign bit of its scale. */
INLINE float signed_(const u8 *q, i64 j, u32 scale) { return float_of(scale ^ (u32)(q[j >> 3] >> (j & 7) & 1) << 31); }

INLINE void unpack_signs(const u8 *restrict q, float scale, float *restrict total, i64 size, const int add)
{
    const u32 bits = bits_of(scale);
    i64 j = 0;
#ifdef __AVX512F__
    const __m512i plus = _mm512_set1_epi32((i32)bits), minus = _mm512_set1_epi32((i32)(bits ^ ~(u32)SIZE));
    for (; j + 16 <= size; j += 16) {
        __mmask16 mask;
        memcpy(&mask, q + j / 8, 2);
        __m512 x = _mm512_castsi512_ps(_mm512_mask_blend_epi32(mask, plus, minus));
        _mm512_storeu_ps(total + j, add ? _mm512_add_ps(_mm512_loadu_ps(total + j), x) : x);
    }
#endif
    for (; j < size; j++) total[j] = add ? total[j] + signed_(q, j, bits) : signed_(q, j, bits);
}

int onebit_decode(const u8 *restrict q, const i64 *bounds, const float *restrict scales, float *restrict total, i64 n, i64 blocks,
                  i64 bytes, i64 add)
{
    for (i64 i = 0, at = 0, from = 0; i < blocks; i++) {
        i64 end = end_of(bounds, i, at, n), size = end - at, taken = (size + 7) / 8;
        if (end < 0 || from + taken > bytes) return 2;
        if (add) unpack_signs(q + from, scales[i], total + at, size, 1);
        else unpack_signs(q + from, scales[i], total + at, size, 0);
        at = end;
        from += taken;
    }
    return 0;
}

/* ---- the largest elements ------------------------------------------------------------------------------------------------ */

INLINE i64 at_least(const i32 *restrict sizes, i64 size, i32 bound)
{
    i32 found = 0;
    for (i64 j = 0; j < size; j++) found += sizes[j] >= bound;
    return found;
}

/* The largest bound that `count` sizes reach, or one that exactly so many do: its bits are found from the highest down. All sizes
   are in the L1 cache, where to count them takes less than to sort what remains. */
INLINE i32 bound_of(const i32 *restrict sizes, i64 size, i64 count, i32 top)
{
    i32 bound = 0;
    for (int bit = 30; bit >= 0; bit--) {
        i32 higher = bound | (i32)1 << bit;
        if (higher > top) continue;
        i64 reach = at_least(sizes, size, higher);
        if (reach >= count) bound = higher;
        if (reach == count) break;
    }
    return bound;
}

int topk_encode(const float *restrict values, float *restrict error, const i64 *bounds, const i64 *restrict counts,
                float *restrict sent, u16 *restrict places, i64 n, i64 blocks, i64 total)
{
    float a[BLOCK];
    i32 sizes[BLOCK];
    for (i64 i = 0, at = 0, to = 0; i < blocks; i++) {
        i64 end = end_of(bounds, i, at, n), size = end - at, count = counts[i];
        if (end < 0 || count < 0 || count > size || to + count > total) return 2;
        float *restrict left = error ? error + at : NULL;
        i32 top = loaded(values + at, left, a, size);
        for (i64 j = 0; j < size; j++) sizes[j] = (i32)(bits_of(a[j]) & SIZE);
        i32 bound = count ? bound_of(sizes, size, count, top) : SIZE;
        i64 equal = count - at_least(sizes, size, bound + 1);           /* so many of those that are equal to it, the first ones */
        int kept = left && top < NOT_FINITE;
        if (kept) memcpy(left, a, (size_t)size * sizeof *a);
        for (i64 j = 0; j < size && count; j++) {
            if (sizes[j] < bound || (sizes[j] == bound && equal-- <= 0)) continue;
            sent[to] = a[j];
            places[to++] = (u16)j;
            count--;
            if (kept) left[j] = 0;
        }
        at = end;
    }
    return 0;
}

int topk_add(const float *restrict sent, const u16 *restrict places, const i64 *bounds, const i64 *restrict counts,
             float *restrict total, i64 n, i64 blocks, i64 sums)
{
    for (i64 i = 0, at = 0, from = 0; i < blocks; i++) {
        i64 end = end_of(bounds, i, at, n);
        if (end < 0 || counts[i] < 0 || from + counts[i] > sums) return 2;
        for (i64 stop = from + counts[i]; from < stop; from++) {
            if (places[from] >= end - at) return 2;
            total[at + places[from]] += sent[from];
        }
        at = end;
    }
    return 0;
}
