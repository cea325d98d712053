/* What matrix products have in common: the tile of sums that fills the registers.

   Multiply-adds are fused here, on every machine that can: to be included first. */

#include <stdint.h>
#include <string.h>

#include "vectors.h"

typedef int64_t i64;

#if defined(__clang__)
#pragma STDC FP_CONTRACT ON
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=fast")
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
#define ROWS 8
#else
#define ROWS 4
#endif
#define VECTORS 3                   /* ROWS x VECTORS sums, VECTORS of b and a number of a fill the registers */

#define INLINE static inline __attribute__((always_inline))
