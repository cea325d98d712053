/* Blocks of few levels, whose digits share words of 32 bits, one thread. See kernels/digits.py, whose expressions have the same
   bits, and compress.c. Functions answer 2 where bounds are wrong, or the words are not those of the blocks. */

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#include "sixteen.h"
#include "compress.h"
#include "scaled.h"

#define MOST 20                     /* digits of a word */

/* The levels and digits are constants where this is inlined, so that divisions become products. */
INLINE int encode(const float *restrict values, float *restrict error, const i64 *bounds, float *restrict scales,
                  u32 *restrict words, i64 n, i64 blocks, i64 total, const u32 levels, const i64 digits)
{
    float a[BLOCK + MOST], inverse;
    const u32 half = levels / 2;
    for (i64 i = 0, at = 0, to = 0; i < blocks; i++) {
        i64 end = end_of(bounds, i, at, n), size = end - at, count = (size + digits - 1) / digits;
        if (end < 0 || to + count > total) return 2;
        float *left = error ? error + at : NULL;
        int finite = scaled(loaded(values + at, left, a, size), (float)half, scales + i, &inverse);
        for (i64 j = size; j < count * digits; j++) a[j] = 0;
        if (!finite) for (i64 j = 0; j < size; j++) a[j] = 0;
        for (i64 w = 0; w < count; w++) {
            u32 word = 0;
            for (i64 k = digits - 1; k >= 0; k--)
                word = word * levels + ((bits_of(a[k * count + w] * inverse + NEAREST) + half) & 31);
            words[to + w] = word;
        }
        if (finite) leave(a, left, scales[i], inverse, size);
        at = end;
        to += count;
    }
    return 0;
}

INLINE int decode(const u32 *restrict words, const i64 *bounds, const float *restrict scales, float *restrict total, i64 n,
                  i64 blocks, i64 given, i64 add, const u32 levels, const i64 digits)
{
    u32 rest[BLOCK];
    const i32 half = (i32)(levels / 2);
    for (i64 i = 0, at = 0, from = 0; i < blocks; i++) {
        i64 end = end_of(bounds, i, at, n), size = end - at, count = (size + digits - 1) / digits;
        float scale = scales[i];
        if (end < 0 || from + count > given) return 2;
        memcpy(rest, words + from, (size_t)count * sizeof *rest);
        for (i64 k = 0; k < digits; k++) {
            float *restrict to = total + at + k * count;
            i64 there = size - k * count < count ? size - k * count : count;
            for (i64 w = 0; w < there; w++) {
                float x = (float)((i32)(rest[w] % levels) - half) * scale;
                to[w] = add ? to[w] + x : x;
                rest[w] /= levels;
            }
        }
        at = end;
        from += count;
    }
    return 0;
}

int digits_encode(const float *restrict values, float *restrict error, const i64 *bounds, float *restrict scales,
                  u32 *restrict words, i64 n, i64 blocks, i64 total, i64 levels)
{
    switch (levels) {
    case 3: return encode(values, error, bounds, scales, words, n, blocks, total, 3, 20);
    case 5: return encode(values, error, bounds, scales, words, n, blocks, total, 5, 13);
    case 7: return encode(values, error, bounds, scales, words, n, blocks, total, 7, 11);
    case 9: return encode(values, error, bounds, scales, words, n, blocks, total, 9, 10);
    case 11: return encode(values, error, bounds, scales, words, n, blocks, total, 11, 9);
    default: return 2;
    }
}

int digits_decode(const u32 *restrict words, const i64 *bounds, const float *restrict scales, float *restrict total, i64 n,
                  i64 blocks, i64 given, i64 levels, i64 add)
{
    switch (levels) {
    case 3: return decode(words, bounds, scales, total, n, blocks, given, add, 3, 20);
    case 5: return decode(words, bounds, scales, total, n, blocks, given, add, 5, 13);
    case 7: return decode(words, bounds, scales, total, n, blocks, given, add, 7, 11);
    case 9: return decode(words, bounds, scales, total, n, blocks, given, add, 9, 10);
    case 11: return decode(words, bounds, scales, total, n, blocks, given, add, 11, 9);
    default: return 2;
    }
}
