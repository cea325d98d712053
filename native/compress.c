/* Blocks of few bits and their residuals, one thread. See kernels/compress.py, whose expressions have the same bits.

   A block is read once from memory: a = values + error is kept in the L1 cache, while its scale is found and it is rounded. Loops
   over a block are written so that compilers vectorise them; `error` is NULL where no residual is kept, and no array overlaps
   another. Functions answer 2 where `bounds` are not those of blocks of at most BLOCK of n numbers. */

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#include "sixteen.h"
#include "compress.h"
#include "scaled.h"

#define ROUNDS_UP 0x7f7f8000        /* from here on bfloat16 has infinity */

/* ---- whole numbers with a scale ------------------------------------------------------------------------------------------ */

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

/* Up or down by chance, so that the mean is right: the largest whole number not above a / scale + u, where u is a word's upper
   24 bits, from 0 to 1. */
int int8_draw(const float *restrict values, float *restrict error, const i64 *bounds, const u32 *restrict words,
              float *restrict scales, u8 *restrict q, i64 n, i64 blocks)
{
    float a[BLOCK], inverse;
    for (i64 i = 0, at = 0; i < blocks; i++) {
        i64 end = end_of(bounds, i, at, n), size = end - at;
        if (end < 0) return 2;
        float *restrict left = error ? error + at : NULL;
        int finite = scaled(loaded(values + at, left, a, size), 127, scales + i, &inverse);
        if (!finite) memset(q + at, 0, (size_t)size);
        for (i64 j = 0; j < size && finite; j++) {
            float near = __builtin_floorf(a[j] * inverse + (float)(i32)(words[at + j] >> 8) * 0x1p-24f);
            near = near > 127 ? 127 : near < -127 ? -127 : near;
            q[at + j] = (u8)(i8)(i32)near;
            if (left) left[j] = a[j] - near * scales[i];
        }
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
                u16 *restrict sent, u16 *restrict places, i64 n, i64 blocks, i64 total)
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
        int kept = left && top < ROUNDS_UP;
        if (kept) memcpy(left, a, (size_t)size * sizeof *a);
        for (i64 j = 0; j < size && count; j++) {
            if (sizes[j] < bound || (sizes[j] == bound && equal-- <= 0)) continue;
            u16 near = pack_bfloat16_1(a[j]);
            sent[to] = near;
            places[to++] = (u16)j;
            count--;
            if (kept) left[j] = a[j] - unpack_bfloat16_1(near);
        }
        at = end;
    }
    return 0;
}

int topk_add(const u16 *restrict sent, const u16 *restrict places, const i64 *bounds, const i64 *restrict counts,
             float *restrict total, i64 n, i64 blocks, i64 sums)
{
    for (i64 i = 0, at = 0, from = 0; i < blocks; i++) {
        i64 end = end_of(bounds, i, at, n);
        if (end < 0 || counts[i] < 0 || from + counts[i] > sums) return 2;
        for (i64 stop = from + counts[i]; from < stop; from++) {
            if (places[from] >= end - at) return 2;
            total[at + places[from]] += unpack_bfloat16_1(sent[from]);
        }
        at = end;
    }
    return 0;
}
