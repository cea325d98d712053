/* The order of sums along contiguous rows of n numbers: NumPy's, to the bit.

   NumPy halves a row, at a multiple of 8, until there are at most 128 numbers; of these it makes 8 sums side by side, each of every
   eighth number, and adds those in pairs. It does one such leaf after the other, and each addition waits for the one before.
   Here eight leaves, which do not wait for each other, go together: eight of one row, or four of two, two of four, one of eight. */

#ifndef MPITRAIN_ROW_ORDER_H
#define MPITRAIN_ROW_ORDER_H

#include <stdint.h>

#include "vectors.h"

typedef int64_t i64;

#define LEAF 128
#define LINE 64
#define AHEAD 8192                  /* bytes: 16 million numbers in 3.5 ms, and 6.6 without (Zen 5, 2026-11) */
#define SIDE 8                      /* sums side by side, and leaves together */
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

INLINE i64 half_of(i64 n) { return n / 2 - n / 2 % SIDE; }

/* Into how many leaves, at most SIDE, n numbers are cut, where each is cut equally often; otherwise 0. The first leaf is the
   shortest, the last one the longest. */
INLINE int leaves_of(i64 n)
{
    i64 least = n, most = n;
    for (int count = 1; count <= SIDE; count *= 2) {
        if (most <= LEAF) return least >= SIDE ? count : 0;
        if (least <= LEAF) return 0;
        least = half_of(least);
        most -= half_of(most);
    }
    return 0;
}

#endif
