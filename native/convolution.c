/* Convolutions without im2col, for float and double.

   A convolution is a matrix product whose right-hand matrix is never made: row (c, ky, kx) of it is the image of channel
   c, moved. Packing a zero-padded copy of the image makes each such row a run of contiguous numbers,

       y[o, p] = sum over r = (c, ky, kx) of  weight[o, r] * packed[offset[r] + p]

   where p counts through the rows of the packed image: the few positions in its margin are computed and thrown away.
   With a stride, the image is packed as stride x stride phases (every second pixel of every second row, ...), and again
   each row is contiguous. Three products do everything: forward, the gradient of the image, the gradient of the kernel.

   The multiply-adds here are fused, on every machine that can: the products are the whole cost. Each sum has one fixed
   order, which depends on the shapes only. */

#include <stdlib.h>
#include <string.h>

#include "geometry.h"

#if defined(__clang__)
#pragma STDC FP_CONTRACT ON
#elif defined(__GNUC__)
/* and no calls of memset for the one or two zeros beside a row: they were a third of a small convolution's time */
#pragma GCC optimize("fp-contract=fast", "no-tree-loop-distribute-patterns")
#endif

/* Register tiles: ROWS x VECTORS sums in forward, LEFT x RIGHT in the gradient of the kernel, of VECTOR_BYTES each. */
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#define ROWS 8
#define LEFT 4
#define RIGHT 6
#elif defined(__aarch64__)
#define VECTOR_BYTES 16
#define ROWS 8
#define LEFT 4
#define RIGHT 6
#else
#define VECTOR_BYTES 32
#define ROWS 4
#define LEFT 2
#define RIGHT 4
#endif
#define VECTORS 3

#define PACKED_BYTES (384 << 10)     /* images packed at a time: with the weights they should stay in a 1 MiB L2 cache */
#define BLOCK_POSITIONS 1280         /* positions whose results are kept before they are stored */
#define GRADIENT_POSITIONS 1088      /* the kernel's gradient: LEFT rows of so many stay in a 32 KiB L1 cache, and one
                                        folding of vectors is little work beside them */
#define INLINE static inline __attribute__((always_inline))

/* Memory that begins with a cache line, so that whole vectors in it do not straddle two. */
static void *aligned(i64 bytes) { return aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64); }

#define T float
#define NAME(name) name##_float32
#include "convolution.h"
#undef T
#undef NAME

#define T double
#define NAME(name) name##_float64
#include "convolution.h"
