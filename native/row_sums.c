/* Sums along contiguous rows x (R, n), for float and double, with the bits of NumPy's.

   NumPy halves a row, at a multiple of 8, until there are at most 128 numbers; of these it makes 8 sums side by side, each of every
   eighth number, and adds those in pairs. It does one such leaf after the other, and each addition waits for the one before.
   Here eight leaves, which do not wait for each other, go together: eight of one row, or of eight rows. */

#include <stdint.h>
#include <string.h>

#include "vectors.h"

typedef int64_t i64;

#define LEAF 128
#define LINE 64
#define AHEAD 8192                  /* bytes: 16 million numbers in 3.5 ms, and 6.6 without (Zen 5, 2026-11) */
#define SIDE 8                      /* sums side by side, and leaves together */
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

INLINE i64 half_of(i64 n) { return n / 2 - n / 2 % SIDE; }

#define T float
#define INTEGER int32_t
#define NAME(name) name##_float32
#include "row_sums.h"
#undef T
#undef INTEGER
#undef NAME

#define T double
#define INTEGER int64_t
#define NAME(name) name##_float64
#include "row_sums.h"
