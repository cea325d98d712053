/* Numbers of 16 bits on the wire, sums in float: packing, unpacking, and adding what arrived, one pass over memory each.

   Nothing may overlap. */

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")      /* in the cache, packing takes half the time of 256 bits; beyond, the same */
#endif

#include "sixteen.h"

#define WIRE(NAME)                                                                                                      \
void pack_##NAME(const float *restrict x, u16 *restrict to, i64 n)                                                      \
{                                                                                                                       \
    for (i64 i = 0; i < n; i++) to[i] = pack_##NAME##_1(x[i]);                                                          \
}                                                                                                                       \
void unpack_##NAME(const u16 *restrict from, float *restrict x, i64 n)                                                  \
{                                                                                                                       \
    for (i64 i = 0; i < n; i++) x[i] = unpack_##NAME##_1(from[i]);                                                      \
}                                                                                                                       \
/* What is sent, and the sender keeps what the receiver gets. */                                                        \
void round_##NAME(float *restrict x, u16 *restrict to, i64 n)                                                           \
{                                                                                                                       \
    for (i64 i = 0; i < n; i++) {                                                                                       \
        u16 packed = pack_##NAME##_1(x[i]);                                                                             \
        to[i] = packed;                                                                                                 \
        x[i] = unpack_##NAME##_1(packed);                                                                               \
    }                                                                                                                   \
}                                                                                                                       \
void add_##NAME(const u16 *restrict from, float *restrict x, i64 n)                                                     \
{                                                                                                                       \
    for (i64 i = 0; i < n; i++) x[i] = unpack_##NAME##_1(from[i]) + x[i];                                               \
}                                                                                                                       \
void add_pack_##NAME(const u16 *restrict from, const float *restrict x, u16 *restrict to, i64 n)                        \
{                                                                                                                       \
    for (i64 i = 0; i < n; i++) to[i] = pack_##NAME##_1(unpack_##NAME##_1(from[i]) + x[i]);                             \
}                                                                                                                       \
void add_round_##NAME(const u16 *restrict from, float *restrict x, u16 *restrict to, i64 n)                             \
{                                                                                                                       \
    for (i64 i = 0; i < n; i++) {                                                                                       \
        u16 packed = pack_##NAME##_1(unpack_##NAME##_1(from[i]) + x[i]);                                                \
        to[i] = packed;                                                                                                 \
        x[i] = unpack_##NAME##_1(packed);                                                                               \
    }                                                                                                                   \
}

WIRE(bfloat16)
WIRE(float16)
