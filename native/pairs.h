/* Pairs of bfloat16 numbers in words of 32 bits, the first in the low half, and what AVX512-BF16 does with them; without that
   instruction the same by two fused multiply-adds (the later number first). Who includes it lets the compiler fuse. */
#ifndef MPITRAIN_PAIRS_H
#define MPITRAIN_PAIRS_H

#include "sixteen.h"
#include "vectors.h"

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#include <immintrin.h>
#define HAS_INSTRUCTION 1
#else
#define HAS_INSTRUCTION 0
#endif

typedef u32 Words __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef int32_t Mask __attribute__((vector_size(VECTOR_BYTES)));
typedef float Floats __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));

/* Floats as bits -> bfloat16 in the high halves; the low halves are left over. What pack_bfloat16_1 does. */
INLINE Words rounded(Words bits)
{
    Words nan = (Words)((Mask)(bits & 0x7fffffff) > 0x7f800000);
    return ((bits + 0x7fff + (bits >> 16 & 1)) & ~nan) | (nan & 0x7fc00000);
}

INLINE Words pairs_of(Words first, Words second) { return rounded(first) >> 16 | (rounded(second) & 0xffff0000); }

INLINE u32 pair_of(float first, float second) { return pack_bfloat16_1(first) | (u32)pack_bfloat16_1(second) << 16; }

/* sum + both products of a pair, in each lane. */
INLINE Floats add_pairs(Floats sum, Words a, Words b)
{
#if HAS_INSTRUCTION
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    sum += (Floats)(a & 0xffff0000) * (Floats)(b & 0xffff0000);
    sum += (Floats)(a << 16) * (Floats)(b << 16);
    return sum;
#endif
}

INLINE Floats add_products(Floats sum, u32 a, Words b) { return add_pairs(sum, a - (Words){0}, b); }

#endif
