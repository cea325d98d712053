/* Philox-4x32-10 (Salmon, Moraes, Dror, Shaw, 2011), as native/philox.h has it: word j of row r of the stream `key` is word j % 4
   of counter (j / 4, r). */
#pragma once
#include "device.h"

struct Words { uint32 of[4]; };

/* The key of a stream: the one that is stored, where there is one, which may be another at each launch of a graph. */
__device__ __forceinline__ uint64 key_of(const uint64 *stored, int64 key) { return stored ? *stored : (uint64)key; }

/* Words [4 block, 4 block + 4) of a row. */
__device__ __forceinline__ Words philox(uint64 key, uint64 row, uint64 block) {
    uint32 c0 = (uint32)block, c1 = (uint32)(block >> 32), c2 = (uint32)row, c3 = (uint32)(row >> 32);
    uint32 k0 = (uint32)key, k1 = (uint32)(key >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint64 a = (uint64)c0 * 0xD2511F53u, b = (uint64)c2 * 0xCD9E8D57u;
        c0 = (uint32)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32)b;
        c2 = (uint32)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

/* One of the four, without an address of registers. */
__device__ __forceinline__ uint32 word_of(const Words &words, uint32 place) {
    const uint32 low = place & 1 ? words.of[1] : words.of[0], high = place & 1 ? words.of[3] : words.of[2];
    return place & 2 ? high : low;
}

/* Word `place` of a row, where its neighbours are not wanted. */
__device__ __forceinline__ uint32 word_at(uint64 key, uint64 row, uint64 place) {
    return word_of(philox(key, row, place >> 2), (uint32)place & 3);
}

/* Which of the numbers at [place, place + 8) of a row are kept, from the lowest bit on: those whose word is `least` or more, of
   which there are up to 2^32. */
__device__ __forceinline__ uint32 kept_of_8(uint64 key, uint64 row, uint64 place, uint64 least) {
    const uint32 shift = (uint32)place & 3;
    uint32 kept = 0;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        if (i == 2 && !shift) break;                                                     /* the eight fill two counters */
        const Words words = philox(key, row, (place >> 2) + i);
#pragma unroll
        for (int w = 0; w < 4; ++w) kept |= (uint32)(words.of[w] >= (uint32)least) << (4 * i + w);
    }
    return least >> 32 ? 0 : kept >> shift & 0xff;
}
