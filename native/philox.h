/* Philox-4x32-10 (Salmon, Moraes, Dror, Shaw, 2011): four words of 32 bits for each counter, whatever was drawn before. */

#ifndef MPITRAIN_PHILOX_H
#define MPITRAIN_PHILOX_H

#include <stdint.h>

typedef int64_t i64;
typedef uint32_t u32;
typedef uint64_t u64;

enum { ROUNDS = 10 };

/* A counter's four words become random ones. */
#define MIX(key, c0, c1, c2, c3)                                          \
    do {                                                                  \
        u32 k0 = (u32)key, k1 = (u32)(key >> 32);                         \
        for (int round = 0; round < ROUNDS; round++) {                    \
            u64 a = (u64)c0 * 0xD2511F53u, b = (u64)c2 * 0xCD9E8D57u;     \
            c0 = (u32)(b >> 32) ^ c1 ^ k0;                                \
            c1 = (u32)b;                                                  \
            c2 = (u32)(a >> 32) ^ c3 ^ k1;                                \
            c3 = (u32)a;                                                  \
            k0 += 0x9E3779B9u;                                            \
            k1 += 0xBB67AE85u;                                            \
        }                                                                 \
    } while (0)

/* Words [4 block, 4 (block + n)) of one row, one after the other. */
static inline void philox_along(u64 key, u64 row, u64 block, u32 *restrict out, i64 n)
{
    for (i64 i = 0; i < n; i++) {
        u32 c0 = (u32)(block + i), c1 = (u32)((block + i) >> 32), c2 = (u32)row, c3 = (u32)(row >> 32);
        MIX(key, c0, c1, c2, c3);
        out[4 * i] = c0;
        out[4 * i + 1] = c1;
        out[4 * i + 2] = c2;
        out[4 * i + 3] = c3;
    }
}

#endif
